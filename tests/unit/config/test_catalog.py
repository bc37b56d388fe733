"""VISSL's dataset catalog: names in recipes become paths of this machine, or a sentence with the line to add."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.config.catalog import (
    find_catalog,
    missing,
    public_equivalent,
    source_of,
    use_catalog,
    with_public_paths,
)
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError

RECIPE = """# @package _global_
defaults: [/config/supervised/digits]
config:
  DATA:
    TRAIN: {DATA_SOURCES: [disk_folder], LABEL_SOURCES: [disk_folder], DATASET_NAMES: [my_set], DATA_PATHS: []}
    TEST: {DATA_SOURCES: [], DATASET_NAMES: [my_set]}
"""


def data(**keys: object) -> Data:
    """A block that trains on a named data set."""
    return Data(TRAIN=Split(**{"DATA_SOURCES": ["disk_folder"], "DATASET_NAMES": ["flowers"]} | keys))  # type: ignore[arg-type]


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    path = tmp_path / "dataset_catalog.json"
    flowers = {"train": ["/data/flowers", "/data/labels.npy"], "val": ["<img_path>", "<lbl_path>"]}
    path.write_text(json.dumps({"flowers": flowers, "empty": {}}))
    return path


def test_paths_come_from_the_catalog(catalog: Path) -> None:
    block = data(LABEL_SOURCES=["disk_filelist"])
    (note,) = use_catalog(block, catalog)
    assert block.TRAIN.DATA_PATHS == ["/data/flowers"]
    assert block.TRAIN.LABEL_PATHS == ["/data/labels.npy"]
    assert "flowers is read from /data/flowers" in note
    assert missing(block) == []


def test_paths_that_are_given_win(catalog: Path) -> None:
    block = data(DATA_PATHS=["/mine"])
    assert use_catalog(block, catalog) == []
    assert block.TRAIN.DATA_PATHS == ["/mine"]
    assert block.TRAIN.LABEL_PATHS == []
    block = data(LABEL_SOURCES=["disk_filelist"], LABEL_PATHS=["/mine.npy"])
    use_catalog(block, catalog)
    assert (block.TRAIN.DATA_PATHS, block.TRAIN.LABEL_PATHS) == (["/data/flowers"], ["/mine.npy"])


@pytest.mark.parametrize("source", ["hdf5", "segmentation_folder", "everstore"])
def test_every_source_of_paths_may_be_named(catalog: Path, source: str) -> None:
    block = data(DATA_SOURCES=[source])
    use_catalog(block, catalog)
    assert block.TRAIN.DATA_PATHS == ["/data/flowers"]


@pytest.mark.parametrize("source", ["digits", "digit_scenes", "synthetic", "my_plugins_source"])
def test_other_sources_have_no_paths_to_name(catalog: Path, source: str) -> None:
    block = data(DATA_SOURCES=[source])
    assert use_catalog(block, catalog) == [] and missing(block) == []


@pytest.mark.parametrize("name", ["roses", "empty"])
def test_a_name_that_is_not_there_is_answered_with_the_line_to_add(catalog: Path, name: str) -> None:
    block = data(DATASET_NAMES=[name])
    assert use_catalog(block, catalog) == []
    (problem,) = missing(block)
    assert f'{{"{name}": {{"train": ["/path/to/images", "<labels>"], "val"' in str(problem)
    assert "config.DATA.TRAIN.DATA_PATHS=[/path/to/images]" in str(problem)


def test_placeholders_are_not_paths(catalog: Path) -> None:
    block = Data(TEST=Split(DATA_SOURCES=["disk_folder"], DATASET_NAMES=["flowers"]))
    use_catalog(block, catalog)
    assert block.TEST.DATA_PATHS == []
    assert len(missing(block)) == 1


def test_names_of_a_split_without_a_source_want_no_paths(catalog: Path) -> None:
    block = data(DATA_SOURCES=[])
    assert use_catalog(block, catalog) == [] and missing(block) == [] and block.TRAIN.DATA_PATHS == []


def test_all_names_of_a_split_must_be_there(catalog: Path) -> None:
    block = data(DATASET_NAMES=["flowers", "roses"])
    assert use_catalog(block, catalog) == []
    assert block.TRAIN.DATA_PATHS == [] and len(missing(block)) == 1
    block = data(DATASET_NAMES=["flowers", "flowers"], LABEL_SOURCES=["disk_filelist"])
    use_catalog(block, catalog)
    assert block.TRAIN.DATA_PATHS == ["/data/flowers"] * 2 and block.TRAIN.LABEL_PATHS == ["/data/labels.npy"] * 2


def test_where_it_is_looked_for(tmp_path: Path, catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert find_catalog([], {}) is None
    own = tmp_path / "home/.vissl_zero/dataset_catalog.json"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert find_catalog([], {}) == own
    beside = tmp_path / "recipes/config/dataset_catalog.json"
    beside.parent.mkdir(parents=True)
    beside.write_text("{}")
    assert find_catalog([tmp_path / "recipes"], {}) == beside
    assert find_catalog([tmp_path / "recipes"], {"VISSL_ZERO_CATALOG": str(catalog)}) == catalog
    with pytest.raises(ConfigError, match="must name a dataset catalog"):
        find_catalog([], {"VISSL_ZERO_CATALOG": "/nowhere"})


@pytest.mark.parametrize("text", ["[", "[]", '{"a": 1}', '{"a": {}, "b": 1}', "[" * 100_000])
def test_a_file_that_is_no_catalog(catalog: Path, text: str) -> None:
    catalog.write_text(text)
    with pytest.raises(ConfigError, match="must be JSON"):
        use_catalog(data(), catalog)


def test_a_file_that_is_no_catalog_does_not_matter_where_no_path_is_wanted(catalog: Path) -> None:
    catalog.write_text("[")
    assert use_catalog(data(DATA_PATHS=["/mine"]), catalog) == []


@pytest.mark.timeout(20)
def test_a_named_pipe_is_no_catalog(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="must be JSON"):
        use_catalog(data(), tmp_path / "pipe")


def test_a_recipe_finds_the_catalog_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs/config"
    folder.mkdir(parents=True)
    (folder / "named.yaml").write_text(RECIPE)
    (folder / "dataset_catalog.json").write_text(json.dumps({"my_set": {"train": [str(tmp_path)], "val": []}}))
    monkeypatch.delenv("VISSL_ZERO_CATALOG", raising=False)
    composed = compose("named", [f"hydra.searchpath=[file://{tmp_path}/configs]"])
    train = composed.run.DATA.TRAIN
    assert list(map(Path, train.DATA_PATHS)) == [tmp_path]
    assert any("my_set is read from" in note for note in composed.notes)


@pytest.mark.parametrize(("path", "source"), [("/data/flowers", "disk_folder"), ("/data/train.npy", "disk_filelist")])
def test_everstore_is_read_from_what_stands_for_it(tmp_path: Path, path: str, source: str) -> None:
    catalog = tmp_path / "dataset_catalog.json"
    catalog.write_text(json.dumps({"flowers": {"train": [path, "<labels>"]}}))
    block = data(DATA_SOURCES=["everstore"], LABEL_SOURCES=["everstore"])
    notes = use_catalog(block, catalog)
    assert ([source], [source], [path]) == (block.TRAIN.DATA_SOURCES, block.TRAIN.LABEL_SOURCES, block.TRAIN.DATA_PATHS)
    assert any("everstore is Facebook's" in note and path in note for note in notes)
    elsewhere = data(DATA_SOURCES=["everstore"], DATASET_NAMES=["trees"])
    use_catalog(elsewhere, catalog)
    assert any('{"trees": {"train"' in str(problem) for problem in missing(elsewhere))


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (["data.mdb", "lock.mdb"], "lmdb"),
        (["dataset_dict.json", "train/x.arrow"], "arrow"),
        (["data-00.arrow", "state.json"], "arrow"),
        (["a.parquet", "readme.md"], "parquet"),
        (["data/a.parquet", "readme.md"], "parquet"),
        (["data/a.jpg", "readme.md"], "disk_folder"),
        (["other/a.parquet"], "disk_folder"),
        (["a.tar", "index.json"], "webdataset"),
        (["a/1.jpg", "b/1.jpg"], "disk_folder"),
    ],
)
def test_a_folder_is_known_by_the_names_in_it(tmp_path: Path, names: list[str], source: str) -> None:
    for name in names:
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).touch()
    assert source_of([str(tmp_path / "set")]) == source
    (tmp_path / "photos").mkdir()
    assert source_of([str(tmp_path / "set"), str(tmp_path / "photos")]) == "disk_folder"


def test_weights_that_a_recipe_leaves_to_its_reader_become_a_path_to_correct():
    text, (change,) = with_public_paths('A: 1\nPARAMS_FILE: "specify the model weights"')
    assert (change.line, change.was) == (2, 'PARAMS_FILE: "specify the model weights"')
    assert change.now == "PARAMS_FILE: /path/to/weights.torch"
    assert text.endswith(f"{change.now}  # vissl-zero: name the initial weights")


def test_public_paths_are_left_alone():
    text = "A: https://download.pytorch.org/models/resnet50-19c8e357.pth\nB: /my/checkpoint/x\n# /checkpoint/y\n"
    assert with_public_paths(text) == (text, [])
    assert public_equivalent("/my/dino_vitbase16_pretrain.pth") == ""


def test_internal_paths_and_sources_become_what_a_reader_has() -> None:
    """Line by line: the rest of the text, its comments and the numbers of its lines stay."""
    dino = "manifold://tree/users/x/dino_vitbase16_pretrain.pth"
    url = "https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth"
    text, changes = with_public_paths(
        f"A: 1\n  B: {dino} # why {dino}\nC: ['/checkpoint/me/', /private/home/me/y.npy]\n"
        "DATA_SOURCES: [everstore]\nLABEL_SOURCES: [ 'everstore' ]\n"
    )
    lines = text.split("\n")
    assert lines[0] == "A: 1" and lines[5:] == [""]
    assert (
        lines[1] == f"  B: /path/to/dino_vitbase16_pretrain.pth  # vissl-zero: was {dino}, public: {url} # why {dino}"
    )
    own = "not public: name your own file"
    assert lines[2] == (
        "C: ['/path/to/me', /path/to/y.npy]"
        f"  # vissl-zero: was /checkpoint/me/, {own}; was /private/home/me/y.npy, {own}"
    )
    assert lines[3].startswith("DATA_SOURCES: [disk_filelist]  # ") and "name a list of images (.npy)" in lines[3]
    assert lines[4].startswith("LABEL_SOURCES: [disk_filelist]  # ") and "name a list of labels (.npy)" in lines[4]
    assert [change.line for change in changes] == [2, 3, 4, 5]
    assert (changes[0].was, changes[0].now) == (f"B: {dino}", "B: /path/to/dino_vitbase16_pretrain.pth")
    assert with_public_paths("A: /datasets01/")[0].startswith("A: /path/to/datasets01  #")
    assert (public_equivalent(dino), public_equivalent("/checkpoint/me/other.pth")) == (url, "")


@pytest.mark.parametrize(
    ("array", "source"),
    [
        (np.zeros((2, 3, 4), np.float32), "npy"),
        (np.zeros((2, 3), np.uint8), "npy"),
        (np.zeros((2, 3), np.float32), "disk_filelist"),
        (np.zeros(2, np.int64), "disk_filelist"),
        (np.array(["a.jpg"]), "disk_filelist"),
    ],
)
def test_an_array_of_pixels_is_told_from_a_list(tmp_path: Path, array: np.ndarray, source: str) -> None:
    np.save(tmp_path / "x.npy", array)
    assert source_of([str(tmp_path / "x.npy")]) == source
    assert source_of([str(tmp_path / "missing.npy")]) == "disk_folder"
