"""Everyday wishes: own images, rate, batch, epochs, image size, weight decay; each by one key, as the docs print it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.config.example_config import CPU_HOST
from vissl_zero import cli
from vissl_zero.config.compose import compose
from vissl_zero.config.explanations import EVERYDAY
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

DIGITS = "supervised/digits"
QUICKSTART = "quickstart/swav_digits"
DOCS = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()


def plan(recipe: str, *overrides: str) -> ResolvedRun:
    composed = compose(recipe, overrides)
    return resolve(composed.run, "runs/x", recipe=recipe, notes=composed.notes, host=CPU_HOST)


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(recipe, *overrides)
    return str(caught.value)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for index in range(100):
        path = tmp_path / "photos" / f"class{index % 2}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "photos"


@pytest.mark.parametrize("written", ["{}", "[{}]", "[{0},{0}]"])
def test_data_paths_alone_train_on_that_data(photos: Path, written: str) -> None:
    run = plan(QUICKSTART, f"config.DATA.TRAIN.DATA_PATHS={written.format(photos)}")
    train, test = run.config.DATA.TRAIN, run.config.DATA.TEST
    assert train.DATA_SOURCES == ["disk_folder"] and set(train.DATA_PATHS) == {str(photos)}
    assert test.DATA_SOURCES == [], "kNN on digits would say nothing of a trunk trained on photos"
    assert any("not the recipe's digits" in note for note in run.notes)


def test_in_a_file_of_ones_own_too(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "configs" / "config" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    paths = f"TRAIN: {{DATA_PATHS: {photos}}}, TEST: {{DATA_PATHS: [{photos}]}}"
    recipe.write_text(f"# @package _global_\ndefaults: [/config/{DIGITS}]\nconfig: {{DATA: {{{paths}}}}}\n")
    monkeypatch.chdir(tmp_path)
    data = plan("mine").config.DATA
    assert [split.DATA_SOURCES for split in (data.TRAIN, data.TEST)] == [["disk_folder"]] * 2
    assert [str(photos)] == data.TRAIN.DATA_PATHS


def test_a_source_named_beside_paths_stays_and_the_paths_are_said_to_do_nothing(photos: Path) -> None:
    words = [f"config.DATA.TRAIN.DATA_PATHS={photos}", "config.DATA.TRAIN.DATA_SOURCES=digits"]
    run = plan(QUICKSTART, *words)
    assert run.config.DATA.TRAIN.DATA_SOURCES == ["digits"]
    assert run.config.DATA.TEST.DATA_SOURCES == ["digits"]
    assert any("DATA.TRAIN.DATA_PATHS" in note for note in run.notes)


def test_own_test_images_are_not_shown_to_a_trunk_of_digits(photos: Path) -> None:
    assert "DATA_PATHS: must name your training" in refusal(DIGITS, f"config.DATA.TEST.DATA_PATHS={photos}")


@pytest.mark.parametrize("value", ["[[a]]", "[{a: 1}]"])
def test_what_is_no_text_is_no_path(value: str) -> None:
    assert "must be a string or a list of strings" in refusal(DIGITS, f"config.DATA.TRAIN.DATA_PATHS={value}")


def test_no_data_is_refused_rather_than_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "configs" / "config" / "test_only.yaml"
    recipe.parent.mkdir(parents=True)
    text = "TEST_ONLY: true, MODEL: {HEAD: {PARAMS: [[mlp, {dims: [-1, 2]}]]}}"
    recipe.write_text(f"# @package _global_\nconfig: {{{text}}}\n")
    monkeypatch.chdir(tmp_path)
    said = refusal("test_only")
    assert said.startswith("config.DATA.TRAIN.DATA_SOURCES: must name a data source") and "\n" not in said


def test_peak_learning_rate_keeps_the_shape() -> None:
    before, after = (plan(QUICKSTART, *words).optimizer.lr for words in ([], ["config.OPTIMIZER.lr=0.2"]))
    for part, old in zip(after["schedulers"], before["schedulers"], strict=True):
        assert part["start_value"] == pytest.approx(100 * old["start_value"])
        assert part["end_value"] == pytest.approx(100 * old["end_value"])


def test_a_peak_is_one_at_any_batch() -> None:
    published = ["config.DATA.TRAIN.DATA_SOURCES=[synthetic]", "config.OPTIMIZER.lr=0.7"]
    run = plan("pretrain/swav/regnet_16gf", *published)
    assert max(part["end_value"] for part in run.optimizer.lr["schedulers"]) == pytest.approx(0.7)
    assert any("auto_lr_scaling has no effect" in note for note in run.notes)


def test_a_rate_that_nothing_can_be_scaled_to_is_refused() -> None:
    flat = "config.OPTIMIZER.param_schedulers.lr={name: constant, value: 0}"
    assert "lr: needs a schedule that rises above 0" in refusal(DIGITS, flat, "config.OPTIMIZER.lr=1")
    assert "config.OPTIMIZER.lr: must be above 0" in refusal(DIGITS, "config.OPTIMIZER.lr=-1")


def test_image_size_scales_every_size() -> None:
    crops = "{name: ImgPilToMultiCrop, total_num_crops: 2, size_crops: [32, 24], num_crops: [1, 1], "
    crops += "crop_scales: [[0.5, 1], [0.5, 1]]}"
    train = f"config.DATA.TRAIN.TRANSFORMS=[{{name: Resize, size: [32, 32]}}, {crops}, {{name: ToTensor}}]"
    test = "config.DATA.TEST.TRANSFORMS=[{name: Resize, size: [32, 32]}, {name: ToTensor}]"
    data = plan(QUICKSTART, train, test, "config.DATA.IMG_SIZE=64").config.DATA
    resize, cut = data.TRAIN.TRANSFORMS[:2]
    assert (resize["size"], cut["size_crops"]) == ([64, 64], [64, 48])
    assert data.TEST.TRANSFORMS[0]["size"] == [64, 64]
    folder = plan("benchmark/linear", "+config/benchmark/data=folder", *PROBE).config.DATA
    assert [entry.get("size") for entry in folder.TEST.TRANSFORMS[:2]] == [128, 112]


PROBE = [
    "config.DATA.IMG_SIZE=112",
    "config.DATA.TRAIN.DATA_SOURCES=[synthetic]",
    "config.DATA.TEST.DATA_SOURCES=[synthetic]",
    "config.MODEL.TRUNK.NAME=resnet",
]


def test_image_size_without_a_sized_transform_is_refused() -> None:
    words = ["config.DATA.TRAIN.TRANSFORMS=[{name: ToTensor}]", "config.DATA.IMG_SIZE=64"]
    assert "config.DATA.IMG_SIZE: must be left out" in refusal(DIGITS, *words)


SMALL_PHOTOS = ["config.DATA.TRAIN.DATA_SOURCES=[synthetic]", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=4"]


@pytest.mark.parametrize("trunk", [[], ["config.MODEL.TRUNK.NAME=timm/vit_small_patch16_224"]])
def test_small_crops_of_a_transformer_become_whole_patches(trunk: list[str]) -> None:
    words = [*SMALL_PHOTOS, *trunk, "config.DATA.TRAIN.DATA_LIMIT=100", "config.DATA.IMG_SIZE=64"]
    data = plan("pretrain/dino/vit_small", *words).config.DATA
    assert [entry["size_crops"] for entry in data.TRAIN.TRANSFORMS if "size_crops" in entry] == [[64, 32]]


def test_crops_that_are_no_whole_patches_are_refused() -> None:
    text = refusal("pretrain/dino/vit_small", *SMALL_PHOTOS, "config.DATA.IMG_SIZE=70")
    assert "(got 70). Write 64 or 80." in text
    crops = "{name: ImgPilToMultiCrop, total_num_crops: 2, size_crops: [96, 50], num_crops: [1, 1], "
    crops += "crop_scales: [[0.5, 1], [0.5, 1]]}"
    words = f"config.DATA.TRAIN.TRANSFORMS=[{crops}, {{name: ToTensor}}]"
    text = refusal("pretrain/dino/vit_small", *SMALL_PHOTOS, words)
    assert "TRAIN.TRANSFORMS: must be a multiple" in text and "crops of 50 pixels" in text


def test_list_positions_in_brackets() -> None:
    key = "config.OPTIMIZER.param_schedulers.lr.schedulers[1].end_value"
    assert plan(QUICKSTART, f"{key}=0.5").optimizer.lr["schedulers"][1]["end_value"] == 0.5


def test_weight_decay_that_gives_way_is_named() -> None:
    run = plan(DIGITS, "+config/zero=oss", "config.OPTIMIZER.weight_decay=0.5")
    said = "config.OPTIMIZER.weight_decay has no effect: base_optimizer.weight_decay=1e-06 is used."
    assert run.optimizer.weight_decay == 1e-6 and said in run.notes


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("lr", "config.OPTIMIZER.lr"),
        ("config.OPTIMIZER.learning_rate", "config.OPTIMIZER.lr"),
        ("config.DATA.TRAIN.BATCH_SIZE", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA"),
        ("epochs", "config.OPTIMIZER.num_epochs"),
        ("config.DATA.image_size", "config.DATA.IMG_SIZE"),
        ("config.weight_decay", "config.OPTIMIZER.weight_decay"),
    ],
)
def test_the_words_people_write_lead_to_the_key(word: str, key: str) -> None:
    assert refusal(DIGITS, f"{word}=1") == f"{word}: is not a key. Write {key}=<value>."


def test_every_everyday_key_is_one_that_help_and_docs_print_work() -> None:
    tree = compose(DIGITS).run
    for key in EVERYDAY:
        node: object = tree
        for part in key.split(".")[1:]:
            node = getattr(node, part)
    printed = re.findall(r"^    (config\.[\w.]+=\S+)  ", cli.HELP, re.MULTILINE)
    table = re.findall(r"^\| [^|]+ \| `(config\.[\w.]+=[^`]+)` \|", DOCS, re.MULTILINE)
    assert len(printed) >= 9 and len(table) >= 9
    compose(DIGITS, printed)
    compose(DIGITS, table)


# OC_CAUSE=1 is what OmegaConf does under a debugger: its errors are causes of each other.
@pytest.mark.parametrize("omegaconf_causes", ["0", "1"])
def test_all_mistyped_keys_and_values_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omegaconf_causes: str
) -> None:
    monkeypatch.setenv("OC_CAUSE", omegaconf_causes)
    recipe = tmp_path / "configs" / "config" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    mistakes = "{ZERO: {LEVL: 1}, OPTIMIZER: {num_epochs: x}}"
    recipe.write_text(f"# @package _global_\ndefaults: [/config/{DIGITS}]\nconfig: {mistakes}\n")
    monkeypatch.chdir(tmp_path)
    said = refusal("mine", "config.DATA.TRAIN.DATA_PATH=a", "config.LOSS.swav_loss.epslon=1", "epochs=3")
    assert {line.split(":")[0] for line in said.splitlines()} == {
        "epochs",
        "config.ZERO.LEVL",
        "config.OPTIMIZER.num_epochs",
        "config.DATA.TRAIN.DATA_PATH",
        "config.LOSS.swav_loss.epslon",
    }


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("config.SVM.FORCE_RETRAIN=true", "Did you mean 'force_retrain'"),
        ("config.NUM_NODES=2", "A key of that name stands at config.DISTRIBUTED.NUM_NODES."),
    ],
)
def test_a_near_miss_is_found_in_any_case_and_an_equal_name_anywhere(word: str, hint: str) -> None:
    assert hint in refusal(DIGITS, word)
