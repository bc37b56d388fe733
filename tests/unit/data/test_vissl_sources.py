"""VISSL's data sources: lists of files, and what torchvision reads from a folder."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from vissl_zero.data.source import build_eval_sources, build_source
from vissl_zero.errors import DataError


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    """Three files whose first pixel tells them apart."""
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(3):
        Image.new("RGB", (4, 4), (index * 40, 0, 0)).save(folder / f"{index}.png")
    return [str(folder / f"{index}.png") for index in (2, 0, 1)]


def test_a_list_gives_its_files_in_its_order_with_labels(
    make_data: MakeData, images: list[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "paths.npy", np.array(images))
    np.save(tmp_path / "labels.npy", np.array([5, 3, 5]))
    keys = {"LABEL_SOURCES": ["disk_filelist"], "LABEL_PATHS": [str(tmp_path / "labels.npy")]}
    source = build_source(data_block(make_data("disk_filelist", tmp_path / "paths.npy", **keys)), "TRAIN", 0)
    assert [source.image(i).getpixel((0, 0)) for i in range(3)] == [(80, 0, 0), (0, 0, 0), (40, 0, 0)]
    assert [source.label(i) for i in range(3)] == [1, 0, 1]
    assert source.class_names == ("3", "5")
    assert source.name(1) == images[1]


def test_a_text_list_and_moved_prefixes(make_data: MakeData, images: list[str], tmp_path: Path) -> None:
    (tmp_path / "paths.txt").write_text("\n".join(["/old/2.png", "", "images/0.png", "/older/1.png"]))
    keys = {"REMOVE_IMG_PATH_PREFIX": "/old/", "NEW_IMG_PATH_PREFIX": str(tmp_path / "images") + os.sep}
    source = build_source(data_block(make_data("disk_filelist", tmp_path / "paths.txt", **keys)), "TRAIN", 0)
    assert [source.name(i) for i in range(3)] == [images[0], images[1], "/older/1.png"]
    assert source.label(0) is None
    assert source.class_names == ()


def test_lists_that_are_none(make_data: MakeData, images: list[str], tmp_path: Path) -> None:
    file = tmp_path / "paths.npy"

    def refused() -> str:
        with pytest.raises(DataError) as error:
            build_source(data_block(make_data("disk_filelist", file)), "TRAIN", 0)
        return str(error.value)

    assert "paths.npy cannot be read: No such file" in refused()
    np.save(file, np.array(images, dtype=object), allow_pickle=True)
    assert "is not a plain .npy array of text" in refused()
    np.save(file, np.array([1, 2]))
    assert "must hold a 1-d array of text" in refused()
    np.save(file, np.array([], dtype=str))
    assert "is empty" in refused()
    file.unlink()
    os.mkfifo(file)
    assert "is not a file" in refused()


def _write_mnist(root: Path, name: str, images: np.ndarray, labels: np.ndarray) -> None:
    """MNIST's own format: big-endian sizes, then bytes (http://yann.lecun.com/exdb/mnist/)."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">4i", 2051, *images.shape)
    (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, len(labels)) + labels.tobytes())


def test_a_data_set_of_torchvision(make_data: MakeData, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (6, 28, 28), dtype=np.uint8)
    labels = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)
    _write_mnist(tmp_path, "train", pixels[:4], labels[:4])
    _write_mnist(tmp_path, "t10k", pixels[4:], labels[4:])
    keys = {"DATASET_NAMES": ["MNIST"], "LABEL_SOURCES": ["torchvision_dataset"], "DATA_PATHS": [str(tmp_path)]}
    train, test = build_eval_sources(data_block(make_data("torchvision_dataset", **keys, TEST=keys)), 0)
    assert test is not None
    assert (len(train), len(test)) == (4, 2)
    assert [train.label(i) for i in range(4)] + [test.label(i) for i in range(2)] == [3, 1, 4, 1, 5, 9]
    assert np.array_equal(np.asarray(test.image(1)), np.repeat(pixels[5][..., None], 3, axis=2))
    assert (train.class_names[3], len(train.class_names), test.name(1)) == ("3 - three", 10, "MNIST[1]")


def test_a_data_set_that_is_not_there(make_data: MakeData, tmp_path: Path) -> None:
    def refused(**keys: object) -> str:
        with pytest.raises(DataError) as error:
            build_source(data_block(make_data("torchvision_dataset", **keys)), "TRAIN", 0)
        return str(error.value)

    assert "got CIFAR." in refused(DATASET_NAMES=["CIFAR"], DATA_PATHS=[str(tmp_path)])
    assert "Did you mean 'CIFAR10" in refused(DATASET_NAMES=["CIFAR"], DATA_PATHS=[str(tmp_path)])
    assert "one data set of torchvision's, got nothing. Known: " in refused(
        DATASET_NAMES=[], DATA_PATHS=[str(tmp_path)]
    )
    assert "lies in, got nothing." in refused(DATASET_NAMES=["CIFAR10"], DATA_PATHS=[])
    assert "must name the folder" in refused(DATASET_NAMES=["CIFAR10"], DATA_PATHS=[str(tmp_path / "none")])
    said = refused(DATASET_NAMES=["CIFAR10"], DATA_PATHS=[str(tmp_path)])
    assert "does not hold torchvision's CIFAR10" in said
    assert "CIFAR10(root, download=True)" in said
