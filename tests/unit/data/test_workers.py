from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.data.conftest import MakeData
from vissl_zero.data.loader import build_loader
from vissl_zero.errors import DataError
from vissl_zero.registry import TRANSFORMS


@TRANSFORMS.register("ExitTheWorker")
class ExitTheWorker:
    """Ends the process at once, as the kernel does when memory runs out."""

    def __call__(self, image: Image.Image) -> Image.Image:
        os._exit(9)


@TRANSFORMS.register("ADefect")
class ADefect:
    """A transform of a user's own with a mistake in it."""

    def __call__(self, image: Image.Image) -> Image.Image:
        raise KeyError("my own mistake")


def test_a_worker_that_dies_is_an_error_that_says_what_to_do(make_data: MakeData, photos: Path) -> None:
    data = make_data("disk_folder", photos, num_workers=2, TRANSFORMS=[{"name": "ExitTheWorker"}])
    with pytest.raises(
        DataError, match=r"A data loading worker died .* lower config.DATA.NUM_DATALOADER_WORKERS \(2 per"
    ):
        next(build_loader(data, "TRAIN", 0, 4, 0, 1, 1).epoch(0))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_defect_in_a_users_transform_keeps_its_own_traceback(
    make_data: MakeData, photos: Path, num_workers: int
) -> None:
    data = make_data("disk_folder", photos, num_workers=num_workers, TRANSFORMS=[{"name": "ADefect"}])
    with pytest.raises(KeyError, match="my own mistake"):
        next(build_loader(data, "TRAIN", 0, 4, 0, 1, 1).epoch(0))
