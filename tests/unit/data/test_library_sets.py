"""Labels of data sets of torchvision, wherever they keep them."""

from __future__ import annotations

from typing import Any

import pytest
from torchvision.datasets import FakeData

from vissl_zero.data.sources.library_sets import _labels


class _Set:
    """Three images, labels 2, 0 and 1, and what else a data set keeps."""

    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[str, int]:
        return "image", (2, 0, 1)[index]


PAIRS = [("a", 5), ("b", 6), ("c", 7)]


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (_Set(), [2, 0, 1]),
        (_Set(targets=["3", 4, 5.0], samples=PAIRS), [3, 4, 5]),
        (_Set(labels=[3, 4, 5]), [3, 4, 5]),
        (_Set(_labels=[3, 4, 5]), [3, 4, 5]),
        (_Set(targets=[3, 4], samples=PAIRS), [5, 6, 7]),  # of other images than these
        (_Set(_samples=PAIRS), [5, 6, 7]),
        (_Set(index=PAIRS), [5, 6, 7]),
        (_Set(samples=PAIRS[:2]), [2, 0, 1]),
        (_Set(samples=[("a", "x"), ("b", "y"), ("c", "z")]), [2, 0, 1]),
    ],
)
def test_labels_are_those_kept_for_each_image_or_read(data: Any, labels: list[int]) -> None:
    assert _labels(data) == labels


def test_a_data_set_that_keeps_no_labels_is_read() -> None:
    data = FakeData(3, (3, 4, 4), 5)
    assert _labels(data) == [data[index][1] for index in range(3)]
