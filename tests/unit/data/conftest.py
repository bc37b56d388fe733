"""Small image folders and DATA blocks for the tests of the data room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

MULTI_CROP: list[dict[str, Any]] = [
    {
        "name": "ImgPilToMultiCrop",
        "total_num_crops": 5,
        "num_crops": [2, 3],
        "size_crops": [12, 8],
        "crop_scales": [[0.3, 1.0], [0.1, 0.4]],
    },
    {"name": "RandomHorizontalFlip", "p": 0.5},
    {"name": "ImgPilColorDistortion", "strength": 0.5},
    {"name": "ImgPilGaussianBlur", "p": 0.5, "radius_min": 0.1, "radius_max": 1.0},
    {"name": "ToTensor"},
    {"name": "Normalize", "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
]

MakeData = Callable[..., dict[str, Any]]


def save_image(path: Path, seed: int, size: tuple[int, int] = (16, 16)) -> Path:
    """A small image of noise; the format follows the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two class folders, ``a`` with 6 JPEGs and ``b`` with 5 PNGs."""
    for index in range(6):
        save_image(tmp_path / "photos/a" / f"{index}.jpg", index)
    for index in range(5):
        save_image(tmp_path / "photos/b" / f"{index}.png", 100 + index)
    return tmp_path / "photos"


@pytest.fixture
def make_data() -> MakeData:
    """``make_data(source, path..., num_workers=0, TEST={...}, **train keys)``: a whole DATA block."""

    def make(source: str, *paths: Path, num_workers: int = 0, broken: str = "raise", **keys: Any) -> dict[str, Any]:
        split = {
            "DATA_SOURCES": [source],
            "DATA_PATHS": [str(path) for path in paths],
            "LABEL_SOURCES": [],
            "LABEL_PATHS": [],
            "LABEL_TYPE": "standard",
            "DATA_LIMIT": -1,
            "DEFAULT_GRAY_IMG_SIZE": 16,
            "DROP_LAST": False,
            "TRANSFORMS": MULTI_CROP,
        }
        test = {**split, "TRANSFORMS": [], **keys.pop("TEST", {})}
        return {
            "NUM_DATALOADER_WORKERS": num_workers,
            "PIN_MEMORY": True,
            "WORKER_TIMEOUT_S": 60.0,
            "ON_BROKEN_IMAGE": broken,
            "TRAIN": {**split, **keys},
            "TEST": test,
        }

    return make
