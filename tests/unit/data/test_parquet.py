"""Parquet files of images: their columns, their splits, what stays in memory, and errors of one sentence."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from tests.unit.data.test_same_pixels import write_parquet
from vissl_zero.config.catalog import source_of
from vissl_zero.data import pack as packing
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.source import Source, build_eval_sources, build_source
from vissl_zero.data.sources import parquet
from vissl_zero.errors import DataError


def opened(make_data: MakeData, *paths: Path) -> Any:
    return build_source(data_block(make_data("parquet", *paths)), "TRAIN", 0)


@pytest.fixture
def folder(make_data: MakeData, photos: Path) -> Source:
    return build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)


def test_splits_labels_and_names_are_those_of_the_hub(make_data: MakeData, folder: Source, tmp_path: Path) -> None:
    write_parquet(tmp_path / "hub/data/train-00000-of-00002.parquet", folder, range(4))
    write_parquet(tmp_path / "hub/data/train-00001-of-00002.parquet", folder, range(4, 9))
    write_parquet(tmp_path / "hub/data/validation-00000-of-00001.parquet", folder, [9, 10])
    assert source_of([str(tmp_path / "hub")]) == "parquet" == source_of([str(tmp_path / "hub/data")])
    data = make_data("parquet", tmp_path / "hub")
    train, test = build_eval_sources(data_block(data), 0)
    assert test is not None and (len(train), len(test)) == (9, 2)
    assert train.class_names == test.class_names == ("a", "b", "c")
    assert [train.label(index) for index in range(9)] == [0] * 6 + [1] * 3 and test.label(1) == 1
    for source, index, other in ((train, 5, 5), (test, 1, 10)):
        assert np.array_equal(np.asarray(source.image(index)), np.asarray(folder.image(other)))
    assert train.name(5) == f"{tmp_path}/hub/data/train-00001-of-00002.parquet row 1"
    file = tmp_path / "hub/data/train-00001-of-00002.parquet"
    assert source_of([str(file)]) == "parquet" and len(opened(make_data, file)) == 5
    (tmp_path / "hub/data/validation-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match="has no split test or validation or val: its files are those of other splits"):
        build_eval_sources(data_block(data), 0)


def test_files_may_be_binary_or_only_named(make_data: MakeData, folder: Source, tmp_path: Path) -> None:
    content = Path(folder.name(0)).read_bytes()
    pq.write_table(pa.table({"id": [7, 8], "picture": pa.array([content, None])}), tmp_path / "binary.parquet")
    source = opened(make_data, tmp_path / "binary.parquet")
    assert source.class_names == () and source.label(0) is None and source.encoded(0) == content
    with pytest.raises(BrokenImageError, match=r"binary\.parquet row 1 cannot be used: its row has no image"):
        source.image(1)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": None, "path": folder.name(0)}, {"bytes": None, "path": None}]
    columns = {"image": pa.array(rows, image), "label": pa.array([None, None], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "named.parquet")
    source = opened(make_data, tmp_path / "named.parquet")
    assert source.encoded(0) == content and source.label(0) is None
    with pytest.raises(BrokenImageError, match="its row has no image"):
        source.image(1)


@pytest.mark.parametrize(
    ("column", "labels", "classes"),
    [
        (pa.array([2, 0, 2], pa.uint8()), [2, 0, 2], ("0", "1", "2")),
        (pa.array(["dog", "cat", "dog"]), [1, 0, 1], ("cat", "dog")),
        (pa.array(["10", "2", "10"], pa.large_string()), [1, 0, 1], ("2", "10")),
        (pa.array(["dog", "cat", "dog"]).dictionary_encode(), [1, 0, 1], ("cat", "dog")),
        (pa.array([2, 0, 2], pa.int32()).dictionary_encode(), [2, 0, 2], ("0", "1", "2")),
        (pa.nulls(3), [None] * 3, ()),
    ],
)
def test_labels_are_a_column_of_numbers_or_names(
    make_data: MakeData, tmp_path: Path, column: Any, labels: list[int | None], classes: tuple[str, ...]
) -> None:
    pq.write_table(pa.table({"image": [b"x"] * 3, "label": column}), tmp_path / "x.parquet", row_group_size=1)
    source = opened(make_data, tmp_path / "x.parquet")
    assert [source.label(index) for index in range(3)] == labels and source.class_names == classes


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([1, None, 0], pa.uint8()), "1 of 3 images have no label. Give every image the same kind of label"),
        (pa.array(["a", None, ""]), "2 of 3 images have no label"),
        (pa.array([0.5, 1.0, 2.0]), "the column label is of double. Write names or whole numbers, or rename it"),
        (pa.array([[1], [2], [1, 2]]), "the column label is of list<.*>. Write names or whole numbers"),
    ],
)
def test_labels_that_some_images_lack_or_of_other_types_are_refused(
    make_data: MakeData, tmp_path: Path, column: Any, says: str
) -> None:
    pq.write_table(pa.table({"image": [b"x"] * 3, "label": column}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=says):
        opened(make_data, tmp_path / "x.parquet")


def test_files_with_labels_of_two_kinds_are_refused(make_data: MakeData, tmp_path: Path) -> None:
    for number, label in enumerate((1, "cat")):
        pq.write_table(pa.table({"image": [b"x"], "label": [label]}), tmp_path / f"{number}.parquet")
    with pytest.raises(DataError, match="some labels are names and others numbers"):
        opened(make_data, tmp_path)


@pytest.mark.parametrize("form", packing.WRITERS)
def test_other_sources_are_packed_like_a_folder(make_data: MakeData, folder: Source, tmp_path: Path, form: str) -> None:
    write_parquet(tmp_path / "x.parquet", folder, range(11))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (3, 8, 6), np.uint8))
    for path in (tmp_path / "x.parquet", tmp_path / "x.npy"):
        out = tmp_path / f"{form}_of_{path.name}"
        packing.pack(path, out, form, None, lambda line: None)
        source, packed = (
            build_source(data_block(make_data(kind, p)), "TRAIN", 0)
            for kind, p in ((path.suffix[1:], path), (form, out))
        )
        assert packed.class_names == source.class_names and len(packed) == len(source)
        for index in range(len(source)):
            assert packed.label(index) == source.label(index)
            assert np.array_equal(np.asarray(packed.image(index)), np.asarray(source.image(index)))
    (tmp_path / "x.csv").write_text("path,labels\nx.jpg,a|b\n")
    with pytest.raises(DataError, match="has several labels for an image"):
        packing.pack(tmp_path / "x.csv", tmp_path / "out", form, None, lambda line: None)


def test_few_row_groups_stay_in_memory_and_none_is_pickled(
    make_data: MakeData, folder: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "x.parquet", folder, range(11), rows_per_group=2)
    source = opened(make_data, tmp_path / "x.parquet")
    whole = [source.encoded(index) for index in range(11)]
    assert len(source._kept) == 6 and len(pickle.dumps(source)) < 2000
    monkeypatch.setattr(parquet, "_KEPT_BYTES", 2 * max(map(len, whole)))
    copy = pickle.loads(pickle.dumps(source))
    order = [7, 0, 10, 7, 1, 6]
    assert [copy.encoded(index) for index in order] == [whole[index] for index in order]
    assert len(copy._kept) <= 2 and next(reversed(copy._kept)) == 3
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(BrokenImageError, match="its row group cannot be read"):
        pickle.loads(pickle.dumps(source)).image(3)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": ["a"]}, "has no column of image files; its columns are text"),
        ({"image": pa.array([], pa.binary())}, "has no rows"),
        ({"image": [b"x"], "label": [7], "names": 1}, "has labels up to 7, but 3 classes"),
        (None, "cannot be read as a Parquet file"),
    ],
)
def test_wrong_files_are_one_sentence(
    make_data: MakeData, tmp_path: Path, columns: dict[str, Any] | None, says: str
) -> None:
    path = tmp_path / "x.parquet"
    if columns is None:
        path.write_bytes(b"PAR1 and nothing")
    else:
        about = '{"info": {"features": {"label": {"names": ["a", "b", "c"]}}}}' if columns.pop("names", None) else "{}"
        pq.write_table(pa.table(columns).replace_schema_metadata({"huggingface": about}), path)
    with pytest.raises(DataError, match=says) as caught:
        opened(make_data, path)
    assert "\n" not in str(caught.value)


def test_a_path_without_parquet_files_is_one_sentence(make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no Parquet files"):
        opened(make_data, tmp_path)
    with pytest.raises(DataError, match="parquet needs files"):
        opened(make_data)
    pq.write_table(pa.table({"image": [b"x"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"photo": [b"x"]}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"1\.parquet has no column image, which .*0\.parquet has"):
        opened(make_data, tmp_path)
