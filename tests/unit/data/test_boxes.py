"""Boxes that crops keep: where each place of a crop lies in its image, whatever makes the crops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.blocks import data_block
from tests.unit.config.example_config import complaints
from tests.unit.data.conftest import MULTI_CROP, MakeData
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.data.loader import build_loader
from vissl_zero.methods.vicregl import place_centers

HEIGHT, WIDTH, SIZES, COUNTS = 200, 240, (40, 24), [2, 3]
CROPS = MULTI_CROP[0] | {"size_crops": list(SIZES), "num_crops": COUNTS, "keeps_boxes": True}
FLIP, END = MULTI_CROP[1], {"name": "ToTensor"}
BACKENDS: dict[str, dict[str, Any]] = {
    "pil": {},
    "fast": {"BACKEND": "fast"},
    "on the device": {"BACKEND": "fast", "AUGMENT_ON": "device"},
}


def gradients(folder: Path) -> Path:
    """Images whose red and green tell how far right and down a pixel is."""
    down, across = np.mgrid[0:HEIGHT, 0:WIDTH]
    for number in range(4):
        pixels = np.stack([across, down, np.full_like(down, 50 * number)], axis=-1).astype(np.uint8)
        (folder / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "a" / f"{number}.png")
    return folder


def batch_of(make_data: MakeData, folder: Path, transforms: Sequence[Any], **keys: Any) -> ImageBatch:
    data = make_data("disk_folder", folder, TRANSFORMS=list(transforms)) | keys
    batch = next(build_loader(data_block(data), "TRAIN", 3, 4, 0, 1, 1).epoch(0))[0]
    return batch.to("cpu", torch.float32)


def crops_of(batch: ImageBatch) -> list[tuple[Tensor, Tensor]]:
    """Crop and boxes of each number, (B, 3, H, W) and (B, 4)."""
    assert batch.boxes is not None
    views = [view for images, count in zip(batch.images, batch.num_crops, strict=True) for view in images.chunk(count)]
    return list(zip(views, batch.boxes.chunk(len(views)), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_tells_where_the_places_of_a_crop_lie(backend: str, make_data: MakeData, tmp_path: Path) -> None:
    """A place's mean color is that of its center, which the box says; mirrored crops are among them."""
    batch = batch_of(make_data, gradients(tmp_path), [CROPS, FLIP, END], **BACKENDS[backend])
    assert any(tensor is batch.boxes for tensor in batch.tensors)  # what workers share
    mirrored = 0
    for crops, boxes in crops_of(batch):
        expected = place_centers(boxes, 4, 4).view(-1, 4, 4, 2)
        places = torch.nn.functional.adaptive_avg_pool2d(crops * 255, 4)
        # A pixel's value is its number; its center is half a pixel further.
        found = torch.stack((places[:, 1], places[:, 0]), dim=3) + 0.5
        assert (found - expected).abs().max() < 1.5
        mirrored += int((boxes[:, 1] > boxes[:, 3]).sum())
    assert 0 < mirrored < len(batch.boxes)  # type: ignore[arg-type]


def test_boxes_do_not_change_the_crops(make_data: MakeData, tmp_path: Path) -> None:
    """Nor do colors change boxes; without flips nothing is mirrored."""
    folder = gradients(tmp_path)
    plain = batch_of(make_data, folder, [{**CROPS, "keeps_boxes": False}, *MULTI_CROP[1:]])
    kept = batch_of(make_data, folder, [CROPS, *MULTI_CROP[1:]])
    assert plain.boxes is None
    assert all(torch.equal(one, other) for one, other in zip(plain.images, kept.images, strict=True))
    bare = batch_of(make_data, folder, [CROPS, END])
    assert kept.boxes is not None and bare.boxes is not None
    assert torch.equal(kept.boxes.sort(dim=1).values, bare.boxes.sort(dim=1).values)
    assert (bare.boxes[:, 1] < bare.boxes[:, 3]).all() and not torch.equal(kept.boxes, bare.boxes)


def test_boxes_of_sizes_that_alternate_are_in_the_order_of_the_batch(make_data: MakeData, tmp_path: Path) -> None:
    """Crops of one size stand together in a batch, whatever the order in which they were made."""
    crops = CROPS | {
        "size_crops": [40, 24, 40],
        "num_crops": [1, 2, 2],
        "crop_scales": [[0.3, 1], [0.1, 0.4], [0.2, 1]],
    }
    for crop, boxes in crops_of(batch_of(make_data, gradients(tmp_path), [crops, FLIP, END])):
        found = 255 * crop[:, 1].mean(dim=(1, 2)) + 0.5
        assert (found - boxes[:, [0, 2]].mean(dim=1)).abs().max() < 1.5


def test_images_of_more_channels_have_the_same_boxes(make_data: MakeData, tmp_path: Path) -> None:
    gray = batch_of(make_data, gradients(tmp_path / "one"), [CROPS, FLIP, END])
    (tmp_path / "four" / "a").mkdir(parents=True)
    for number in range(4):
        np.save(tmp_path / "four" / "a" / f"{number}.npy", np.zeros((HEIGHT, WIDTH, 4), np.uint8))
    four = batch_of(make_data, tmp_path / "four", [CROPS, FLIP, END], IN_CHANNELS=4)
    assert gray.boxes is not None and four.boxes is not None and torch.equal(gray.boxes, four.boxes)


AFFINE = {"name": "RandomAffine", "degrees": 10}
REFUSALS = {
    "a transform before": ([AFFINE, CROPS, END], "must be the first transform where it keeps boxes"),
    "one that moves pixels": ([CROPS, FLIP, AFFINE, END], "must not follow ImgPilToMultiCrop with keeps_boxes"),
    "a late flip": ([CROPS, {"name": "RandomGrayscale"}, FLIP, END], "RandomHorizontalFlip"),
    "one that is applied to some": (
        [CROPS, {"name": "ImgPilMultiCropRandomApply", "transforms": [FLIP], "prob": [1.0] * 5}, END],
        "RandomHorizontalFlip",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_transforms_that_would_make_boxes_wrong_are_refused(case: str) -> None:
    transforms, text = REFUSALS[case]
    assert any(text in complaint for complaint in complaints(DATA__TRAIN__TRANSFORMS=transforms))
    without = [{k: v for k, v in entry.items() if k != "keeps_boxes"} for entry in transforms]
    assert not any("boxes" in complaint for complaint in complaints(DATA__TRAIN__TRANSFORMS=without))


def test_an_evaluation_keeps_no_boxes() -> None:
    assert any("only training looks at" in text for text in complaints(DATA__TEST__TRANSFORMS=[CROPS, END]))
