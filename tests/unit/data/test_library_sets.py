"""Labels of data sets of torchvision, wherever they keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchvision.datasets import FakeData

from vissl_zero.data.source import SourceRequest
from vissl_zero.data.sources.library_sets import TorchvisionDataset, _labels


class _Set:
    """Three images, labels 2, 0 and 1, and what else a data set keeps."""

    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[str, int]:
        return "image", (2, 0, 1)[index]


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (_Set(), [2, 0, 1]),
        (_Set(targets=["3", 4, 5.0]), [3, 4, 5]),
        (_Set(labels=[3, 4, 5]), [3, 4, 5]),
        (_Set(_labels=[3, 4, 5]), [3, 4, 5]),
        (_Set(_samples=[("a", 5), ("b", 6), ("c", 7)]), [5, 6, 7]),
    ],
)
def test_labels_are_those_kept_for_each_image_or_read(data: Any, labels: list[int]) -> None:
    assert _labels(data) == labels


def test_a_data_set_that_keeps_no_labels_is_read() -> None:
    data = FakeData(3, (3, 4, 4), 5)
    assert _labels(data) == [data[index][1] for index in range(3)]


def test_inaturalists_labels_are_known_without_reading_its_images(tmp_path: Path) -> None:
    for number, species in enumerate(("terrestris", "rubellus")):
        folder = tmp_path / f"2021_train/0000{number}_Animalia_Annelida_Clitellata_Haplotaxida_Lumbricidae_L_{species}"
        folder.mkdir(parents=True)
        for image in range(1 + number):
            (folder / f"{image}.jpg").touch()  # empty: opening one would fail
    source = TorchvisionDataset(SourceRequest("TRAIN", (str(tmp_path),), dataset_names=("INaturalist",)))
    assert [source.label(index) for index in range(len(source))] == [0, 1, 1]
