"""``AUGMENT_ON: device``: a batch's changes of color beside the fast backend's, one crop's beside the batch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.blocks import data_block
from tests.unit.config.example_config import complaints
from tests.unit.data.conftest import MakeData
from tests.unit.data.test_fast_backend import BOUNDS, END, JITTER, Entry, photograph
from vissl_zero.data.changes import Kind, _mean_gray, _spread
from vissl_zero.data.dataset import borrowed_randomness, seed_sample
from vissl_zero.data.decode import Decoder
from vissl_zero.data.fast.device_pipeline import DevicePipeline, HandOver
from vissl_zero.data.fast.pipeline import build_fast_pipeline
from vissl_zero.data.loader import build_loader

# Most mean absolute difference to the fast backend's, in steps of 8 bits; of all others none.
DISTANCES = {
    **dict.fromkeys(("ColorJitter", "RandomApply", "ImgPilColorDistortion", "ImgPilMultiCropRandomApply"), 0.1),
    "RandomGrayscale": 0.05,
    "ImgPilGaussianBlur": 0.01,
    "ImgPilRandomStroke": 0.05,
    "ImgPilRandomPhotometric": 0.3,
}
SEVERAL: list[Entry] = [
    {"name": "RandomHorizontalFlip"},
    JITTER,
    {"name": "RandomGrayscale", "p": 0.3},
    {"name": "ImgPilGaussianBlur", "p": 0.6, "radius_max": 3.0},
    {"name": "ImgPilRandomSolarize", "p": 0.3},
    {"name": "ImgPilRandomPhotometric", "p": 0.3},
    {"name": "ImgPilRandomStroke"},
]


def noted(pipeline: DevicePipeline, count: int) -> list[Any]:
    """The crops of some images, with what is noted for them."""
    crops = []
    for key in range(count):
        with borrowed_randomness():
            seed_sample(7, 0, key)
            crops += pipeline.crops(photograph(330, 280, seed=key))
    return crops


def changed(pipeline: DevicePipeline, crops: list[Any]) -> torch.Tensor:
    return pipeline.changes([crop.noted for crop in crops])(pipeline.stacked(crops))


@pytest.mark.parametrize("name", BOUNDS)
def test_a_batch_is_within_its_bound_of_the_fast_backends(name: str) -> None:
    entries = [BOUNDS[name][0], *END]
    fast = build_fast_pipeline(entries, "t", Decoder())
    device = build_fast_pipeline(entries, "t", Decoder(), DevicePipeline)
    assert isinstance(device, DevicePipeline)
    ours, theirs, before = noted(device, 10), [], []
    for key in range(10):
        with borrowed_randomness():
            seed_sample(7, 0, key)
            theirs += fast(photograph(330, 280, seed=key))
    for shape in {crop.shape for crop in theirs}:
        rows = [row for row, crop in enumerate(theirs) if crop.shape == shape]
        found = changed(device, [ours[row] for row in rows])
        wanted = torch.stack([theirs[row] for row in rows])
        assert found.dtype == torch.float32 and found.shape == wanted.shape
        assert 255 * (found - wanted).abs().mean() <= DISTANCES.get(name, 0.0)
        before += [
            float((wanted[place] - torch.from_numpy(ours[row].pixels).permute(2, 0, 1) / 255).abs().max())
            for place, row in enumerate(rows)
        ]
    assert (max(before) > 0.02) == (name in DISTANCES or "Solarize" in name or "Flip" in name)  # it changes something


def test_a_crop_does_not_depend_on_its_batch() -> None:
    pipeline = build_fast_pipeline(
        [{"name": "Resize", "size": [37, 29]}, *SEVERAL, *END], "t", Decoder(), DevicePipeline
    )
    assert isinstance(pipeline, DevicePipeline)
    crops = noted(pipeline, 24)
    whole = changed(pipeline, crops)
    assert {kind for kind, *_ in pipeline.changes([crop.noted for crop in crops]).rounds} == set(Kind)
    for parts in ([crops[:5], crops[5:]], [[crop] for crop in crops]):
        assert torch.equal(torch.cat([changed(pipeline, part) for part in parts]), whole)


def test_normalized_values_are_the_fast_backends_bit_for_bit() -> None:
    entries = [*END, {"name": "Normalize", "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}]
    for end in (entries, [{"name": "ImgPilToRawTensor"}]):
        fast, device = (build_fast_pipeline(end, "t", Decoder(), *kind) for kind in ((), (DevicePipeline,)))
        assert torch.equal(fast(photograph())[0], device(photograph())[0])


def test_workers_crop_and_hand_over_pixels_of_8_bits(make_data: MakeData, photos: Path) -> None:
    data = make_data("disk_folder", photos) | {"BACKEND": "fast", "AUGMENT_ON": "device"}
    ((batch,), *_) = build_loader(data_block(data), "TRAIN", 3, 6, 0, 1, 1).epoch(0)
    assert [(image.dtype, tuple(image.shape)) for image in batch.images] == [
        (torch.uint8, (12, 3, 12, 12)),
        (torch.uint8, (18, 3, 8, 8)),
    ]
    kept = [image.clone() for image in batch.images]
    first, again = (batch.to("cpu", torch.float64) for _ in range(2))
    assert not first.changes and all(image.dtype == torch.float64 for image in first.images)
    assert all(map(torch.equal, batch.images, kept)) and all(map(torch.equal, first.images, again.images))
    assert np.ptp([float(image.mean()) for image in first.images]) > 0


def test_pillows_backend_and_what_has_no_fast_form_are_refused() -> None:
    (line,) = complaints(DATA__AUGMENT_ON="device")
    assert "config.DATA.AUGMENT_ON" in line and "BACKEND=fast" in line


def test_the_gray_that_contrast_mixes_with_is_a_mean_in_float64() -> None:
    """One step less than half a pixel value: in float32 the mean of a million pixels would round up."""
    pixels = torch.full((2, 3, 1000, 1000), 127, dtype=torch.uint8)
    pixels[:, :, :500] = 128
    pixels[0, :, 0, 0] = 127
    unchanged = torch.eye(3, 4, dtype=torch.float64).expand(2, 3, 4)
    assert _mean_gray(pixels, unchanged).tolist() == [127, 128]


def test_contrast_is_spread_as_pillow_does_it_down_to_a_single_step() -> None:
    pixels = np.random.default_rng(0).integers([100, 7, 40], [101, 9, 200], (8, 8, 3), np.uint8, endpoint=False)
    (spread,) = _spread(torch.from_numpy(pixels).permute(2, 0, 1)[None], torch.empty(0))
    assert np.array_equal(spread.permute(1, 2, 0), ImageOps.autocontrast(Image.fromarray(pixels)))


BLUR, CUT = {"name": "ImgPilGaussianBlur", "p": 1.0}, {"name": "CenterCrop", "size": 8}


@pytest.mark.parametrize(
    ("entries", "num_by_workers"),
    [
        ([JITTER, BLUR], 0),
        ([CUT, JITTER], 1),
        ([JITTER, CUT], 2),
        ([{"name": "RandomApply", "transforms": [JITTER], "p": 0.5}], 0),
        ([{"name": "RandomApply", "transforms": [CUT, JITTER], "p": 0.5}], 1),
        ([{"name": "ImgPilMultiCropRandomApply", "transforms": [JITTER], "prob": [0.5]}], 0),
        ([{"name": "ImgPilMultiCropRandomApply", "transforms": [CUT, JITTER], "prob": [0.5]}], 1),
    ],
)
def test_workers_keep_what_moves_pixels(entries: list[Entry], num_by_workers: int) -> None:
    """And whatever stands before it; the rest is left to the device."""
    pipeline = build_fast_pipeline([*entries, *END], "t", Decoder(), kind=DevicePipeline)
    assert [isinstance(form, HandOver) for form in pipeline.transforms].index(True) == num_by_workers
