"""scikit-learn's digits: real data that needs no download."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vissl_zero.data.source import SourceRequest
from vissl_zero.registry import DATA_SOURCES

NUM_TRAIN = 1_437  # the first four fifths; the last 360 are TEST
WHITE = 16  # the scans count 0 to 16


@DATA_SOURCES.register("digits")
class Digits:
    """1,797 real scans of digits, 8x8, that come with scikit-learn.

    TRAIN is the first 1,437 (other writers than TEST's: the file is ordered by writer), TEST the last 360.
    """

    class_names = tuple("0123456789")

    def __init__(self, request: SourceRequest):
        from sklearn.datasets import load_digits  # here: takes a second, and loader workers get a filled copy

        data = load_digits()
        part = slice(None, NUM_TRAIN) if request.split == "TRAIN" else slice(NUM_TRAIN, None)
        self._first = part.start or 0
        self._images = np.rint(data.images[part] * (255 / WHITE)).astype(np.uint8)
        self._labels = data.target[part].astype(np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def image(self, index: int) -> Image.Image:
        """The scan, grey in three channels."""
        return Image.fromarray(self._images[index]).convert("RGB")

    def label(self, index: int) -> int | None:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        return f"digit {self._first + index}"
