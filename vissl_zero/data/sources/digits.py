"""Images that need no download: scikit-learn's digits, and synthetic ones with a class structure to learn."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from vissl_zero.data.source import SourceRequest
from vissl_zero.registry import DATA_SOURCES

NUM_CLASSES = 10
NUM_IMAGES = 50_000  # VISSL's number when DATA_LIMIT says nothing
_SPLIT_KEY = {"TRAIN": 0, "TEST": 1}


@DATA_SOURCES.register("synthetic")
class Synthetic:
    """Seeded images with a learnable class structure, made on the fly.

    Class c is a grating at an angle of c * 18 degrees and its own wavelength; phase, two colours, contrast and noise
    differ from image to image, so that colour and brightness say nothing about the class. DATA_LIMIT images (50,000 for
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
        """Make image ``index``."""
        rng = np.random.default_rng((*self._key, index))
        label = index % NUM_CLASSES
        angle = np.pi * label / NUM_CLASSES + rng.normal(0, 0.05)
        waves = (3.0 + label % 3) * rng.uniform(0.9, 1.1)
        axis = np.linspace(0, 1, self._size, endpoint=False)
        along = axis[None, :] * np.cos(angle) + axis[:, None] * np.sin(angle)
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * (waves * along + rng.uniform()))
        dark, bright = rng.uniform(0, 110, 3), rng.uniform(145, 255, 3)
        pixels = dark + (bright - dark) * wave[..., None] + rng.normal(0, 12, (self._size, self._size, 3))
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

    def label(self, index: int) -> int | None:
        return index % NUM_CLASSES

    def name(self, index: int) -> str:
        return f"synthetic image {index}"


NUM_TRAIN = 1_437  # the first four fifths; the last 360 are TEST
WHITE = 16  # the scans count 0 to 16


@cache
def _scans() -> np.ndarray:
    """(1797, 65): 64 pixels, 0 to 16, and the digit. Read beside scikit-learn's code, whose import takes a second."""
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
        self._images = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / WHITE)).astype(np.uint8)
        self._labels = rows[:, -1]

    def __len__(self) -> int:
        return len(self._images)

    def image(self, index: int) -> Image.Image:
        """The scan, grey in three channels."""
        return Image.fromarray(self._images[index]).convert("RGB")

    def label(self, index: int) -> int | None:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        return f"digit {self._first + index}"
