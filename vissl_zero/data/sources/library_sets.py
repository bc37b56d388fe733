"""Data sets that a library brings or reads: scikit-learn's digits, torchvision's; and synthetic images.

``torchvision_dataset`` is VISSL's name for whatever torchvision reads from a folder.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torchvision
from PIL import Image

from vissl_zero.data.source import SourceRequest
from vissl_zero.errors import DataError, did_you_mean
from vissl_zero.registry import DATA_SOURCES

NUM_CLASSES = 10
NUM_IMAGES = 50_000  # VISSL's number without a DATA_LIMIT
_SPLIT_KEY = {"TRAIN": 0, "TEST": 1}


@DATA_SOURCES.register("synthetic")
class Synthetic:
    """Seeded images with a learnable class structure, generated on the fly.

    Class c is a grating at an angle of c * 18 degrees and its own wavelength; phase, two colors, contrast and noise
    differ from image to image, so that color and brightness say nothing about the class. DATA_LIMIT images (50,000 for
    -1) of DEFAULT_GRAY_IMG_SIZE pixels a side; image i is of class i mod 10 and depends on (seed, split, i) alone.
    """

    class_names = tuple(f"grating {c}" for c in range(NUM_CLASSES))

    def __init__(self, request: SourceRequest):
        self._num_images = request.limit if request.limit > 0 else NUM_IMAGES
        self._size = request.image_size
        self._key = (request.seed, _SPLIT_KEY[request.split])

    def __len__(self) -> int:
        return self._num_images

    def image(self, index: int) -> Image.Image:
        """Generate image ``index``."""
        # Keyed by image, so that any worker generates the same one.
        rng = np.random.default_rng((*self._key, index))
        label = index % NUM_CLASSES
        # 18 degrees between classes, so that 0.05 radians (3 degrees) of noise confuses few neighbors.
        angle = np.pi * label / NUM_CLASSES + rng.normal(0, 0.05)
        waves = (3.0 + label % 3) * rng.uniform(0.9, 1.1)
        axis = np.linspace(0, 1, self._size, endpoint=False)
        along = axis[None, :] * np.cos(angle) + axis[:, None] * np.sin(angle)
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * (waves * along + rng.uniform()))
        # Apart in every channel, so that each grating can be seen.
        dark, bright = rng.uniform(0, 110, 3), rng.uniform(145, 255, 3)
        pixels = dark + (bright - dark) * wave[..., None] + rng.normal(0, 12, (self._size, self._size, 3))
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

    def label(self, index: int) -> int | None:
        return index % NUM_CLASSES

    def name(self, index: int) -> str:
        return f"synthetic image {index}"


NUM_TRAIN = 1_437  # the first four fifths; the last 360 are TEST
_WHITE = 16  # the scans count 0 to 16


@cache
def _scans() -> np.ndarray:
    """Read (1797, 65) int64 from scikit-learn's files: 64 pixels, 0 to 16, and the digit."""
    # Without importing scikit-learn, which takes a second.
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None  # installed with this package
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt", encoding="ascii") as file:
        return np.loadtxt(file, dtype=np.int64, delimiter=",")


@DATA_SOURCES.register("digits")
class Digits:
    """1,797 real scans of digits, 8x8, that come with scikit-learn.

    TRAIN is the first 1,437 (other writers than TEST's: the file is ordered by writer), TEST the last 360.
    """

    class_names = tuple("0123456789")

    def __init__(self, request: SourceRequest):
        rows = _scans()[slice(None, NUM_TRAIN) if request.split == "TRAIN" else slice(NUM_TRAIN, None)]
        self._first = 0 if request.split == "TRAIN" else NUM_TRAIN
        self._images = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / _WHITE)).astype(np.uint8)
        self._labels = rows[:, -1]

    def __len__(self) -> int:
        return len(self._images)

    def image(self, index: int) -> Image.Image:
        """Return the scan, gray in three channels."""
        return Image.fromarray(self._images[index]).convert("RGB")

    def label(self, index: int) -> int | None:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        return f"digit {self._first + index}"


_CELLS = 4  # quadrants of a scene
_INK = 96  # of 255: brighter pixels belong to the digit


@DATA_SOURCES.register("digit_scenes")
class DigitScenes:
    """Up to four of the digits on a canvas, each in a corner of its own, with the class of every pixel.

    Class 0 is the ground, class d + 1 the strokes of digit d. Scene i shows scan i of its split (as ``digits`` has
    them), and others at random; a digit is three eighths of the canvas high. DATA_LIMIT scenes (as many as scans for
    -1) of DEFAULT_GRAY_IMG_SIZE pixels a side; scene i depends on (seed, split, i) alone.
    """

    class_names = ("ground", *(f"digit {digit}" for digit in range(10)))

    def __init__(self, request: SourceRequest):
        self._digits = Digits(request)
        self._num_images = request.limit if request.limit > 0 else len(self._digits)
        self._size = request.image_size
        self._key = (request.seed, _SPLIT_KEY[request.split])

    def __len__(self) -> int:
        return self._num_images

    def image(self, index: int) -> Image.Image:
        """Draw scene ``index``."""
        return self._scene(index)[0]

    def mask(self, index: int) -> Image.Image:
        """Return the class of each pixel of scene ``index``."""
        return self._scene(index)[1]

    def label(self, index: int) -> int | None:
        """Return None: pixels have classes, scenes have none."""
        return None

    def name(self, index: int) -> str:
        return f"scene {index}"

    def _scene(self, index: int) -> tuple[Image.Image, Image.Image]:
        rng = np.random.default_rng((*self._key, index))
        half, side = self._size // 2, max(1, self._size * 3 // 8)
        scans = [index % len(self._digits), *rng.integers(len(self._digits), size=rng.integers(_CELLS)).tolist()]
        ground = rng.integers(0, 60)
        canvas = np.full((self._size, self._size), ground, np.uint8)
        mask = np.zeros((self._size, self._size), np.uint8)
        for scan, cell in zip(scans, rng.permutation(_CELLS).tolist(), strict=False):
            down, right = rng.integers(half - side + 1, size=2).tolist()
            top, left = half * (cell // 2) + down, half * (cell % 2) + right
            box = (slice(top, top + side), slice(left, left + side))
            ink = np.asarray(self._digits.image(scan).convert("L").resize((side, side), Image.Resampling.BILINEAR))
            # The maximum of both, since the black around a digit would show as a box on the ground.
            canvas[box] = np.maximum(canvas[box], ink)
            mask[box][ink >= _INK] = 1 + (self._digits.label(scan) or 0)
        return Image.fromarray(canvas).convert("RGB"), Image.fromarray(mask)


_BY_FLAG = ({"train": True}, {"train": False})
_TRAIN_TEST = ({"split": "train"}, {"split": "test"})
_TRAIN_VAL = ({"split": "train"}, {"split": "val"})
# DATASET_NAMES -> arguments of torchvision's class for TRAIN and for TEST. VISSL knew the first five.
_SETS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
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
        if len(request.dataset_names) != 1 or request.dataset_names[0] not in _SETS:
            got = ", ".join(request.dataset_names) or "nothing"
            hint = did_you_mean(got, _SETS)
            must = f"{root}.DATASET_NAMES must name one data set of torchvision's, got {got}."
            raise DataError(f"{must} Known: {', '.join(_SETS)}.{hint}")
        name = request.dataset_names[0]
        if len(request.paths) != 1 or not Path(request.paths[0]).is_dir():
            got = ", ".join(request.paths) or "nothing"
            raise DataError(f"{root}.DATA_PATHS must name the folder that torchvision's {name} lies in, got {got}.")
        train, test = _SETS[name]
        arguments = train if request.split == "TRAIN" else test
        try:
            data = getattr(torchvision.datasets, name)(request.paths[0], **arguments)
        except (RuntimeError, OSError, ValueError, ImportError) as error:
            reason = str(error).replace(" You can use download=True to download it", "").replace("\n", " ")
            fix = f"Put it there as torchvision's {name}(root, download=True) does."
            raise DataError(f"{request.paths[0]} does not hold torchvision's {name} ({reason}). {fix}") from error
        self._data, self._name = data, name
        self._labels = np.array(_labels(data), dtype=np.int64)
        self.class_names: tuple[str, ...] = _class_names(data, self._labels)

    def __len__(self) -> int:
        return len(self._data)

    def image(self, index: int) -> Image.Image:
        """Return the image, gray ones with three equal channels."""
        image: Image.Image = self._data[index][0]
        return image.convert("RGB")

    def label(self, index: int) -> int | None:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        """Return the name of the data set and the image's number."""
        return f"{self._name}[{index}]"


def _labels(data: Any) -> list[int]:
    """Return every image's label: from torchvision's attributes, or else by reading every image once."""
    for attribute in ("targets", "labels", "_labels"):
        if (values := getattr(data, attribute, None)) is not None:
            return [int(value) for value in values]
    for attribute, place in (("_samples", 1), ("index", 0)):  # (file, label); of iNaturalist (label, file)
        if (pairs := getattr(data, attribute, None)) is not None:
            return [pair[place] for pair in pairs]
    # Slow, but correct for any class of torchvision.
    return [int(data[index][1]) for index in range(len(data))]


def _class_names(data: Any, labels: np.ndarray) -> tuple[str, ...]:
    """Return torchvision's names of the classes, or else the numbers from 0 to the largest label."""
    names = tuple(str(name) for name in getattr(data, "classes", ()))
    number = int(labels.max()) + 1
    return names if len(names) >= number else tuple(str(label) for label in range(number))
