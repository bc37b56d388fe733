"""Tables of images and arrays of pixels: the folder's pixels and labels, and errors of one sentence."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData, save_image
from tests.unit.data.test_packed import hashes
from vissl_zero.config.catalog import source_of
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.source import Source, Subset, build_source, encoded_image, label_matrix, left_out
from vissl_zero.errors import DataError

PATHS = [f"photos/a/{index}.jpg" for index in range(6)] + [f"photos/b/{index}.png" for index in range(5)]


def opened(data: dict[str, Any], names: tuple[str, ...] = ()) -> Source:
    return build_source(data_block(data), "TRAIN", 0, names)


@pytest.fixture
def tables(photos: Path) -> dict[str, Path]:
    rows = [(path, path.split("/")[1]) for path in PATHS]
    csv, jsonl = photos.parent / "images.csv", photos.parent / "images.jsonl"
    csv.write_text("split,path,label\n" + "".join(f"x,{path},{label}\n" for path, label in rows))
    jsonl.write_text("".join(json.dumps({"path": path, "label": label}) + "\n" for path, label in rows))
    return {"csv": csv, "jsonl": jsonl}


@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_tables_give_the_folders_pixels(
    make_data: MakeData, photos: Path, tables: dict[str, Path], backend: str
) -> None:
    keys = {"BACKEND": backend}
    folder = make_data("disk_folder", photos) | keys
    whole, late = hashes(folder, 1), hashes(folder, 1, start=4)
    for table in tables.values():
        assert source_of([str(table)]) == "manifest"
        data = make_data("manifest", table) | keys
        assert opened(data).class_names == ("a", "b")
        assert hashes(data, 1) == hashes(data, 1, ranks=2) == whole and hashes(data, 1, start=4) == late


@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_an_array_gives_the_folders_pixels(make_data: MakeData, tmp_path: Path, backend: str) -> None:
    for index in range(10):
        save_image(tmp_path / "p" / "ab"[index % 2] / f"{index}.png", index)
    source = opened(make_data("disk_folder", tmp_path / "p"))
    pixels = np.stack([np.asarray(source.image(index)) for index in range(10)])
    np.save(tmp_path / "0.npy", pixels[:5])
    np.save(tmp_path / "1.npy", pixels[5:])
    np.save(tmp_path / "labels.npy", np.array([source.label(index) for index in range(10)]))
    labels = {"LABEL_SOURCES": ["disk_filelist"], "LABEL_PATHS": [str(tmp_path / "labels.npy")]}
    files = tmp_path / "0.npy", tmp_path / "1.npy"
    assert source_of(list(map(str, files))) == "npy" and source_of([str(tmp_path / "labels.npy")]) == "disk_filelist"
    keys = {"BACKEND": backend}
    data, folder = make_data("npy", *files, **labels) | keys, make_data("disk_folder", tmp_path / "p") | keys
    whole = hashes(folder, 1)
    assert hashes(data, 1) == hashes(data, 1, ranks=2) == whole and hashes(data, 1, start=4) == hashes(folder, 1, 4)


def test_a_file_is_recognized_by_its_name_where_all_paths_agree(tmp_path: Path) -> None:
    for name in ("x.TXT", "x.csv"):
        (tmp_path / name).write_text("path\n")
    assert source_of([str(tmp_path / "x.TXT")]) == "disk_filelist"
    assert source_of([str(tmp_path / name) for name in ("x.csv", "x.TXT")]) == "disk_folder"
    assert source_of([str(tmp_path / "none.csv")]) == "disk_folder"


def test_an_array_of_numbers_is_pixels_of_three_dimensions_or_more(make_data: MakeData, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    kinds = (np.float32, ">f8", np.uint16, np.int64, "<U5", "S5")
    for dims, formats in ((4, ["npy"] * 4 + ["disk_filelist"] * 2), (2, ["disk_filelist"] * 6)):
        for kind, form in zip(kinds, formats, strict=True):
            np.save(path, np.zeros((2, 8, 8, 3)[:dims], kind))
            assert source_of([str(path)]) == form
    np.save(path, np.zeros((2, 8, 8, 3), np.float32))
    with pytest.raises(DataError, match=r"not float32 of .*Convert it, or write config\.DATA\.IN_CHANNELS=<number>"):
        opened(make_data("npy", path))


def test_two_workers_give_the_same(make_data: MakeData, tables: dict[str, Path], tmp_path: Path) -> None:
    np.save(tmp_path / "gray.npy", np.random.default_rng(0).integers(0, 256, (9, 16, 16, 1), np.uint8))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = np.load(tmp_path / "gray.npy")
    paths = {"manifest": tables["csv"], "npy": tmp_path / "gray.npy", "hdf5": tmp_path / "x.h5"}
    for source, path in paths.items():
        assert hashes(make_data(source, path, num_workers=2), 0) == hashes(make_data(source, path), 0)


def test_gray_arrays_are_read_and_a_copy_holds_no_pixels(make_data: MakeData, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 8, 6), dtype=np.uint8)
    for array in (pixels, pixels[..., None]):
        np.save(tmp_path / "x.npy", array)
        source = opened(make_data("npy", tmp_path / "x.npy"))
        assert all(isinstance(mapped, np.memmap) for mapped in source._arrays)  # read image by image, not at once
        copy = pickle.dumps(source)
        assert len(copy) < 1000 and source.label(3) is None
        assert np.array_equal(np.asarray(pickle.loads(copy).image(7)), np.repeat(pixels[7, ..., None], 3, 2))
    np.save(tmp_path / "x.npy", pixels[:3])
    assert np.asarray(pickle.loads(copy).image(2)).shape == (8, 6, 3)
    with pytest.raises(BrokenImageError, match="has changed since the start"):
        pickle.loads(copy).image(7)


def test_labels_of_a_table_are_numbers_several_or_none(make_data: MakeData, photos: Path, tmp_path: Path) -> None:
    def of(text: str, names: tuple[str, ...] = ()) -> Source:
        (tmp_path / "x.csv").write_text(text)
        return opened(make_data("manifest", tmp_path / "x.csv"), names)

    numbers = of("path,label\nx,10\ny,2\nz,10\n")
    assert numbers.class_names == ("2", "10") and [numbers.label(i) for i in range(3)] == [1, 0, 1]
    assert of("path,label\nx,b\n", ("a", "b")).label(0) == 1
    several = of("path,labels\nphotos/a/0.jpg,cat|dog\ny,\nz,bird\n")
    assert several.class_names == ("bird", "cat", "dog") and several.image(0).size == (16, 16)
    matrix = label_matrix(several)
    assert matrix is not None and matrix.tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 0]]
    one_each = of("path,label\nx,b\ny,a\nz,b\n")
    for num_classes, rows in ((0, [[0, 1], [1, 0], [0, 1]]), (3, [[0, 1, 0], [1, 0, 0], [0, 1, 0]])):
        matrix = label_matrix(one_each, num_classes)
        assert matrix is not None and matrix.dtype == np.int8 and matrix.tolist() == rows
    part = label_matrix(Subset(one_each, (2, 1)))
    assert part is not None and part.tolist() == [[0, 1], [1, 0]]
    assert label_matrix(of("path\nx\n")) is None and label_matrix(Subset(of("path\nx\n"), (0,))) is None
    assert of("path\nx\ny\n").class_names == () and of("path\n" + str(photos / "b/0.png")).image(0).size == (16, 16)


def test_names_of_columns_count_without_capitals_and_spaces(make_data: MakeData, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("Label, Path\nb , photos/b/0.png\na, photos/a/0.jpg\n")
    (tmp_path / "x.jsonl").write_text(
        '{"PATH": "photos/b/0.png", "Label ": 2}\n{"path": "photos/a/0.jpg", "label": "1"}'
    )
    for table, names in (("x.csv", ("a", "b")), ("x.jsonl", ("1", "2"))):
        source = opened(make_data("manifest", tmp_path / table))
        assert source.class_names == names and [source.label(index) for index in range(2)] == [1, 0]
        assert source.image(0).size == (16, 16)


def test_columns_that_are_not_read_are_noted_where_there_are_no_labels(make_data: MakeData, tmp_path: Path) -> None:
    for table, note in (
        ("path,lable,split\nx,cat,a,\n", ["no column label or labels; these are not read: lable, split."]),
        ("path\nx,\n", []),
        ("path,lable,label\nx,cat,\n", []),
        ('{"path": "x", "lable": "cat", "labels": null}\n', []),
    ):
        file = tmp_path / ("x.jsonl" if table.startswith("{") else "x.csv")
        file.write_text(table)
        notes = left_out(opened(make_data("manifest", file)))
        assert [each.removeprefix(f"{file}: ") for each in notes] == note


def test_a_name_that_is_no_text_survives(make_data: MakeData, photos: Path, tmp_path: Path) -> None:
    for name in (b"\xff.png", "a\u2028b.png".encode()):
        os.link(photos / "b/0.png", os.fsencode(tmp_path) + b"/" + name)
        (tmp_path / "x.csv").write_bytes(b"path\n" + name + b"\n")
        (tmp_path / "x.jsonl").write_bytes(b'{"path": "' + name + b'"}\n')
        for table in ("x.csv", "x.jsonl"):
            source = opened(make_data("manifest", tmp_path / table))
            assert len(source) == 1 and source.image(0).size == (16, 16)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.csv", b"", "has no column path; its columns are none"),
        ("x.csv", b"path\n", "names no images"),
        ("x.csv", b"file,label\nx,1\n", "its columns are file, label. The first line must name the columns"),
        ("x.csv", b"path,label\nx,1\ny,\n", "1 of 2 images have no label"),
        ("x.csv", b"path,label\n,1\n", "line 2, has no path"),
        ("x.csv", b"path,label,labels\nx,1,2\n", "has label and labels"),
        ("x.csv", b'path\n"x', "cannot be read as a table"),
        ("x.csv", b'"path"x,label\na,1\n', "cannot be read as a table"),
        ("x.csv", b"path,label\nx\ny\n", "lines 2, 3, have fewer cells than the first line"),
        (
            "x.csv",
            b"path,label\na, b.png,1\ny,1\nz\nv,1,,\nw,1,,2\n",
            "line 4, has fewer .* lines 2, 6, have more cells",
        ),
        ("x.csv", b"path,label\n" + b"x,1,2\n" * 9, "lines 2, 3, 4, 5, 6 and 4 more, have more cells .* Put cells"),
        ("x.csv", b"path,label, Label\nx,1,2\n", "has the column label twice. Leave one of them out"),
        ("x.csv", b"path,label\nx,1\ny, \n", "1 of 2 images have no label"),
        ("x.jsonl", b'{"path": "x", "label": 1, "Label": 2}', "has the column label twice"),
        ("x.jsonl", b'{"path": "x", "label": 0}\n{"path": "y", "label": "a"}', "some labels are names and others numb"),
        ("x.jsonl", b'{"path": "x"}\n[]\n', "line 2, cannot be read as a table of images .a line must be an object"),
        ("x.jsonl", b'{"path": "x", "label": 0.5}', "line 1, has .0.5. for a label"),
        *(
            ("x.jsonl", b'{"path": %s}' % path, "line 1, has no path")
            for path in (b'"\\ud800"', b'"a\\u0000"', b"3", b'""')
        ),
        ("x.jsonl", b'{"path": "x", "label": 1}\n{"path": "y", "labels": [1]}', "both label and labels are used"),
        ("none.csv", None, "is not a file"),
        ("x.npy", b"x", "cannot be read"),
        ("none.npy", None, "is not a file"),
    ],
)
def test_wrong_files_are_one_sentence(
    make_data: MakeData, tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        opened(make_data("npy" if name.endswith("npy") else "manifest", tmp_path / name))
    assert "\n" not in str(caught.value)


def test_wrong_arrays_and_classes_are_one_sentence(
    make_data: MakeData, tmp_path: Path, tables: dict[str, Path]
) -> None:
    wrong = (np.zeros((2, 4, 4), np.float32), np.zeros((2, 4, 4, 2), np.uint8), np.zeros((4, 4), np.uint8))
    for array in wrong:
        np.save(tmp_path / "x.npy", array)
        with pytest.raises(DataError, match="must hold images as uint8"):
            opened(make_data("npy", tmp_path / "x.npy"))
    np.save(tmp_path / "x.npy", np.zeros((0, 4, 4), np.uint8))
    with pytest.raises(DataError, match="is empty"):
        opened(make_data("npy", tmp_path / "x.npy"))
    with pytest.raises(DataError, match=r"labels that DATA\.TRAIN does not have"):
        opened(make_data("manifest", tables["csv"]), ("a", "c"))
    with pytest.raises(DataError, match="needs"):
        opened(make_data("npy"))
    with pytest.raises(DataError, match="needs"):
        opened(make_data("manifest"))


@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_hdf5_gives_the_folders_pixels(make_data: MakeData, photos: Path, tmp_path: Path, backend: str) -> None:
    keys = {"BACKEND": backend}
    for index in range(10):
        save_image(tmp_path / "p" / "ab"[index % 2] / f"{index}.png", index)
    for folder, holds_files in ((photos, True), (tmp_path / "p", False)):
        source = opened(make_data("disk_folder", folder))
        path = tmp_path / ("files.h5" if holds_files else "pixels.hdf5")
        with h5py.File(path, "w") as file:
            if holds_files:
                files = [np.frombuffer(encoded_image(source, index), np.uint8) for index in range(len(source))]
                images = file.create_dataset("image", (len(files),), h5py.vlen_dtype(np.uint8))
                for index, content in enumerate(files):
                    images[index] = content
            else:
                file["x"] = np.stack([np.asarray(source.image(index)) for index in range(len(source))])
            file["labels"] = np.array([source.label(index) for index in range(len(source))])
            file["labels"].attrs["class_names"] = source.class_names
        assert source_of([str(path)]) == "hdf5"
        data, whole = make_data("hdf5", path) | keys, make_data("disk_folder", folder) | keys
        assert opened(data).class_names == ("a", "b")
        assert hashes(data, 1) == hashes(data, 1, ranks=2) == hashes(whole, 1)
        assert hashes(data, 1, start=4) == hashes(whole, 1, start=4)
        assert len(pickle.dumps(opened(data))) < 2000


def test_wrong_hdf5_files_are_one_sentence(make_data: MakeData, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"x")
    with pytest.raises(DataError, match="cannot be read as an HDF5 file"):
        opened(make_data("hdf5", path))
    with pytest.raises(DataError, match="is not a file"):
        opened(make_data("hdf5", tmp_path))
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"features": np.zeros(3)}, "has none of images, image, data, x; it has features"),
        ({"images": np.zeros((2, 3, 3))}, "must hold images as uint8"),
        ({"images": np.zeros(3, np.uint8)}, "must hold images as uint8"),
        *(
            ({"images": np.zeros((2, 3, 3), np.uint8), "labels": labels}, "labels must be 2 integers")
            for labels in (np.zeros(3, int), np.zeros((2, 1), int), np.zeros(2))
        ),
    )
    for number, (content, says) in enumerate(wrong):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            for name, values in content.items():
                file[name] = values
        with pytest.raises(DataError, match=says) as caught:
            opened(make_data("hdf5", path))
        assert "\n" not in str(caught.value)
    path = tmp_path / "fine.h5"
    with h5py.File(path, "w") as file:
        file["images"] = np.zeros((2, 3, 3), np.uint8)
    copy = pickle.dumps(opened(make_data("hdf5", path)))
    path.write_bytes(b"x")
    with pytest.raises(BrokenImageError, match="cannot be read"):
        pickle.loads(copy).image(0)
