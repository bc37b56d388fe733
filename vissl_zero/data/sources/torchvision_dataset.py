"""Data sets that torchvision reads from a folder: VISSL's ``torchvision_dataset``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torchvision
from PIL import Image

from vissl_zero.data.source import SourceRequest
from vissl_zero.errors import DataError, did_you_mean
from vissl_zero.registry import DATA_SOURCES

_BY_FLAG = ({"train": True}, {"train": False})
_TRAIN_TEST = ({"split": "train"}, {"split": "test"})
_TRAIN_VAL = ({"split": "train"}, {"split": "val"})
# DATASET_NAMES -> arguments of torchvision's class for TRAIN and for TEST. VISSL knew the first five.
SETS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "CIFAR10": _BY_FLAG,
    "CIFAR100": _BY_FLAG,
    "STL10": _TRAIN_TEST,
    "MNIST": _BY_FLAG,
    "SVHN": _TRAIN_TEST,
    "FashionMNIST": _BY_FLAG,
    "KMNIST": _BY_FLAG,
    "USPS": _BY_FLAG,
    "Places365": ({"split": "train-standard", "small": True}, {"split": "val", "small": True}),
    "INaturalist": ({"version": "2021_train"}, {"version": "2021_valid"}),
    "Imagenette": _TRAIN_VAL,
    "Food101": _TRAIN_TEST,
    "Flowers102": _TRAIN_TEST,
    "OxfordIIITPet": ({"split": "trainval"}, {"split": "test"}),
    "DTD": _TRAIN_TEST,
    "FGVCAircraft": ({"split": "trainval"}, {"split": "test"}),
    "StanfordCars": _TRAIN_TEST,
    "GTSRB": _TRAIN_TEST,
    "PCAM": _TRAIN_TEST,
    "Country211": ({"split": "train"}, {"split": "valid"}),
}


@DATA_SOURCES.register("torchvision_dataset")
class TorchvisionDataset:
    """A data set of torchvision's, by its class name in DATASET_NAMES, from the folder in DATA_PATHS.

    Nothing is downloaded. TRAIN and TEST are the splits that torchvision calls train and test (or val). A copy of what
    torchvision keeps in memory (all images of CIFAR and its like) goes to every loader worker.

    Raises:
        DataError: the name is unknown, or the folder does not hold the data set.
    """

    def __init__(self, request: SourceRequest):
        root = f"config.DATA.{request.split}"
        if len(request.dataset_names) != 1 or request.dataset_names[0] not in SETS:
            got = ", ".join(request.dataset_names) or "nothing"
            hint = did_you_mean(got, SETS)
            must = f"{root}.DATASET_NAMES must name one data set of torchvision's, got {got}."
            raise DataError(f"{must} Known: {', '.join(SETS)}.{hint}")
        name = request.dataset_names[0]
        if len(request.paths) != 1 or not Path(request.paths[0]).is_dir():
            got = ", ".join(request.paths) or "nothing"
            raise DataError(f"{root}.DATA_PATHS must name the folder that torchvision's {name} lies in, got {got}.")
        train, test = SETS[name]
        arguments = train if request.split == "TRAIN" else test
        try:
            data = getattr(torchvision.datasets, name)(request.paths[0], **arguments)
        except (RuntimeError, OSError, ValueError, ImportError) as error:
            said = str(error).replace(" You can use download=True to download it", "").replace("\n", " ")
            fix = f"Put it there as torchvision's {name}(root, download=True) does."
            raise DataError(f"{request.paths[0]} does not hold torchvision's {name} ({said}). {fix}") from error
        self._data, self._name = data, name
        self._labels = np.array(_labels(data), dtype=np.int64)
        self.class_names: tuple[str, ...] = _class_names(data, self._labels)

    def __len__(self) -> int:
        return len(self._data)

    def image(self, index: int) -> Image.Image:
        """The image, grey ones with three equal channels."""
        image: Image.Image = self._data[index][0]
        return image.convert("RGB")

    def label(self, index: int) -> int | None:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        """Name of the data set and the image's number."""
        return f"{self._name}[{index}]"


def _labels(data: Any) -> list[int]:
    """The label of every image, from what torchvision keeps; where it keeps none, every image is read once."""
    for attribute in ("targets", "labels", "_labels"):
        values = getattr(data, attribute, None)
        if values is not None and len(values) == len(data):
            return [int(value) for value in values]
    for attribute in ("samples", "_samples", "index"):
        values = getattr(data, attribute, None)
        if values is not None and len(values) == len(data) and isinstance(values[0][-1], int):
            return [pair[-1] for pair in values]
    return [int(data[index][1]) for index in range(len(data))]


def _class_names(data: Any, labels: np.ndarray) -> tuple[str, ...]:
    """torchvision's names of the classes where it has them, else their numbers, gaps included."""
    names = tuple(str(name) for name in getattr(data, "classes", ()))
    number = int(labels.max()) + 1
    return names if len(names) >= number else tuple(str(label) for label in range(number))
