"""The fast backend beside Pillow's: the same boxes and draws, pixels within a stated distance, refusals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from tests.blocks import data_block
from tests.unit.data.conftest import MULTI_CROP, MakeData
from vissl_zero.data.dataset import borrowed_randomness, seed_sample
from vissl_zero.data.decode import BrokenImageError, Decoder
from vissl_zero.data.fast.color import Colors
from vissl_zero.data.fast.picture import EncodedPicture, opened
from vissl_zero.data.fast.pipeline import build_fast_pipeline
from vissl_zero.data.fast.transforms import FORMS, draw_box
from vissl_zero.data.loader import build_loader
from vissl_zero.data.pipeline import build_pipeline
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.fast_forms import FAST_FORMS, refused

Entry = dict[str, Any]
END = [{"name": "ToTensor"}]
JITTER = {"name": "ColorJitter", "brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
# Name of a transform -> (its entry, most mean absolute difference to Pillow's, in steps of 8 bits).
BOUNDS: dict[str, tuple[Entry, float]] = {
    "RandomResizedCrop": ({"name": "RandomResizedCrop", "size": 48}, 0.1),
    "ImgPilToMultiCrop": (
        {
            "name": "ImgPilToMultiCrop",
            "total_num_crops": 3,
            "num_crops": [1, 2],
            "size_crops": [64, 32],
            "crop_scales": [[0.3, 1.0], [0.05, 0.3]],
        },
        0.1,
    ),
    "ImgReplicatePil": ({"name": "ImgReplicatePil", "num_times": 2}, 0.0),
    "ImgPilToPatchesAndImage": ({"name": "ImgPilToPatchesAndImage", "crop_size_image": 64}, 0.1),
    "Resize": ({"name": "Resize", "size": 50}, 0.1),
    "CenterCrop": ({"name": "CenterCrop", "size": [60, 140]}, 0.0),
    "RandomHorizontalFlip": ({"name": "RandomHorizontalFlip", "p": 0.5}, 0.0),
    "ColorJitter": (JITTER, 1.0),
    "RandomGrayscale": ({"name": "RandomGrayscale", "p": 0.5}, 0.1),
    "RandomApply": ({"name": "RandomApply", "transforms": [JITTER], "p": 0.5}, 1.0),
    "ImgPilColorDistortion": ({"name": "ImgPilColorDistortion", "strength": 1.0}, 1.0),
    "ImgPilMultiCropRandomApply": (
        {"name": "ImgPilMultiCropRandomApply", "transforms": [JITTER], "prob": [0.5]},
        1.0,
    ),
    "ImgPilGaussianBlur": ({"name": "ImgPilGaussianBlur", "p": 1.0}, 0.6),
    "RandomSolarize": ({"name": "RandomSolarize", "threshold": 128, "p": 0.5}, 0.0),
    "ImgPilRandomSolarize": ({"name": "ImgPilRandomSolarize", "p": 1.0}, 0.0),
    "ImgPilRandomPhotometric": ({"name": "ImgPilRandomPhotometric", "p": 1.0}, 1.0),
    "ImgPilRandomStroke": ({"name": "ImgPilRandomStroke", "strength": 0.5}, 0.2),
    "RandomAffine": (
        {"name": "RandomAffine", "degrees": 15, "translate": [0.1, 0.1], "shear": 10, "interpolation": "bilinear"},
        0.6,
    ),
}


def photograph(width: int = 160, height: int = 120, seed: int = 0) -> Image.Image:
    """Smooth colored shapes with edges and a little noise, as a photograph has them."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [np.sin(rng.uniform(2, 18) * x + rng.uniform(2, 18) * y + rng.uniform(0, 6)) for _ in range(3)]
    pixels = 128 + 90 * np.stack(waves, -1) + 60 * (np.hypot(x - 0.5, y - 0.4) < 0.2)[..., None]
    noise = rng.normal(0, 4, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92, **options)
    return file.getvalue()


def crops_of(pipeline: Any, image: Any, key: int) -> list[np.ndarray]:
    """The crops for a sample, times 255."""
    with borrowed_randomness():
        seed_sample(7, 0, key)
        return [255 * crop.numpy() for crop in pipeline(image)]


def test_every_fast_form_is_declared_bounded_and_takes_no_more_than_declared() -> None:
    assert FORMS.keys() == FAST_FORMS.keys() == BOUNDS.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_fast_form_is_within_its_bound_of_pillows(name: str) -> None:
    entry, bound = BOUNDS[name]
    slow, fast = build_pipeline([entry, *END], "t"), build_fast_pipeline([entry, *END], "t", Decoder())
    distances, changes = [], []
    for key in range(12):
        image = photograph(330, 280, seed=key) if name == "ImgPilToPatchesAndImage" else photograph(seed=key)
        pillows, ours = crops_of(slow, image, key), crops_of(fast, image, key)
        assert [crop.shape for crop in ours] == [crop.shape for crop in pillows]
        distances += [np.abs(a - b).mean() for a, b in zip(pillows, ours, strict=True)]
        changes.append(pillows[0].sum())
    assert len({float(change) for change in changes}) > 1
    assert np.mean(distances) <= bound, np.mean(distances)


@pytest.mark.parametrize(("width", "height"), [(9, 6), (6, 9), (5, 4)])
def test_an_image_smaller_than_its_center_crop_is_padded_as_by_torchvision(width: int, height: int) -> None:
    entries = [{"name": "CenterCrop", "size": [8, 7]}, *END]
    (expected,) = crops_of(build_pipeline(entries, "t"), photograph(width, height), 0)
    (crop,) = crops_of(build_fast_pipeline(entries, "t", Decoder()), photograph(width, height), 0)
    assert np.array_equal(crop, expected) and crop.shape == (3, 8, 7)


def test_copies_that_are_cropped_at_once_have_pillows_boxes() -> None:
    """The file is decoded no larger than the crops need, and copies are not made."""
    for crop in ({"name": "RandomResizedCrop", "size": 48}, BOUNDS["ImgPilToMultiCrop"][0]):
        entries = [{"name": "ImgReplicatePil", "num_times": 3}, crop, *END]
        slow, fast = build_pipeline(entries, "t"), build_fast_pipeline(entries, "t", Decoder())
        image = photograph()
        pillows, ours = crops_of(slow, image, 0), crops_of(fast, image, 0)
        assert len(ours) == len(pillows)
        assert all(np.abs(a - b).mean() < 1 for a, b in zip(pillows, ours, strict=True))


def test_a_whole_recipe_has_the_same_boxes_and_nearly_the_same_values(make_data: MakeData, photos: Path) -> None:
    for index in range(4):
        (photos / "a" / f"photo{index}.jpg").write_bytes(jpeg(photograph(seed=index)))
    # Without Normalize, so that values are in steps of 8 bits.
    for entries, bound in ((MULTI_CROP[:1], 1.5), (MULTI_CROP[:-2], 2.0)):
        data = make_data("disk_folder", photos, TRANSFORMS=[*entries, *END])
        slow, fast = (
            next(build_loader(data_block(data | {"BACKEND": name}), "TRAIN", 3, 16, 0, 1, 1).epoch(0))[0]
            for name in ("pil", "fast")
        )
        for a, b in zip(slow.images, fast.images, strict=True):
            assert a.shape == b.shape and (255 * (a - b)).abs().mean() < bound


@pytest.mark.parametrize(("size", "scale"), [((90, 120), (0.08, 1.0)), ((10, 200), (0.5, 1.0)), ((200, 9), (0.9, 1.0))])
def test_boxes_are_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    like = torch.empty(3, *size)
    for key in range(100):
        with borrowed_randomness():
            seed_sample(0, 0, key)
            theirs = RandomResizedCrop.get_params(like, scale, (3 / 4, 4 / 3)), torch.rand(1)
            seed_sample(0, 0, key)
            assert (draw_box(size, scale, (3 / 4, 4 / 3)), torch.rand(1)) == theirs


def test_normalized_values_are_those_of_torchvision_bit_for_bit() -> None:
    entries = [{"name": "ToTensor"}, {"name": "Normalize", "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}]
    image = photograph()
    (slow,), (fast,) = build_pipeline(entries, "t")(image), build_fast_pipeline(entries, "t", Decoder())(image)
    assert torch.equal(slow, fast)


def test_normalization_is_undone_as_with_pillow() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    entries = [{"name": "ToTensor"}, {"name": "Normalize", "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}]
    (plain,) = build_pipeline(entries[:1], "here")(image)
    for pipeline in (build_pipeline(entries, "here"), build_fast_pipeline(entries, "here", Decoder())):
        (values,) = pipeline(image)
        assert not torch.allclose(values, plain)
        torch.testing.assert_close(pipeline.unnormalized(values[None])[0], plain)


def test_colors_fold_into_one_matrix_until_a_change_may_leave_the_range() -> None:
    pixels = np.asarray(photograph())
    colors = Colors(pixels)
    for change, factor in ((colors.brighten, 0.6), (colors.saturate, 0.5), (colors.stretch, 0.7)):
        change(factor)
        assert colors._pixels is pixels  # pending
    colors.gray()
    assert colors._pixels is pixels
    assert np.ptp(colors.pixels, axis=2).max() == 0
    colors.brighten(4.0)
    colors.saturate(0.5)
    assert colors._pixels.max() == 255  # cut before what follows


@pytest.mark.parametrize(("size", "factor"), [((96, 96), 1), ((48, 48), 2), ((20, 20), 4), ((8, 8), 8)])
def test_a_large_jpeg_is_decoded_no_larger_than_its_crops_need(
    size: tuple[int, int], factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = photograph(803, 600)
    decoded: list[int] = []
    original = EncodedPicture._decoded

    def noted(self: EncodedPicture, by: int) -> np.ndarray | None:
        pixels = original(self, by)
        decoded.append(round(803 / pixels.shape[1]) if pixels is not None else 0)
        return pixels

    monkeypatch.setattr(EncodedPicture, "_decoded", noted)
    entries = [{"name": "RandomResizedCrop", "size": list(size), "scale": [0.03, 0.04]}, *END]
    slow, fast = build_pipeline(entries, "t"), build_fast_pipeline(entries, "t", Decoder())
    file, distances = jpeg(photo), []
    for key in range(6):
        (a,) = crops_of(slow, Decoder().image(file, "x"), key)
        (b,) = crops_of(fast, EncodedPicture(file, "x", Decoder()), key)
        distances.append(np.abs(a - b).mean())
    assert set(decoded) == {factor} and np.mean(distances) < (0.2 if factor == 1 else 4.0)


@pytest.mark.parametrize(("size", "half"), [((64, 2), (1, 32)), ((2, 64), (32, 1))])
def test_both_sides_of_a_narrow_jpeg_are_halved(size: tuple[int, int], half: tuple[int, int]) -> None:
    """A side of one pixel is as long at an eighth."""
    picture = EncodedPicture(jpeg(Image.new("RGB", size)), "x", Decoder())
    pixels = picture._decoded(2)
    assert pixels is not None and pixels.shape[:2] == half


def test_files_that_are_no_plain_jpeg_are_read_as_pillow_reads_them() -> None:
    photo, whole = photograph(), build_fast_pipeline(END, "t", Decoder())
    png = io.BytesIO()
    photo.convert("P").save(png, "PNG")
    files = {"cmyk": jpeg(photo.convert("CMYK")), "grey": jpeg(photo.convert("L")), "palette": png.getvalue()}
    for name, file in files.items():
        (crop,) = whole(opened(file, name, Decoder()))
        assert np.array_equal(
            crop.numpy(), np.asarray(Decoder().image(file, name)).transpose(2, 0, 1) / np.float32(255)
        )
    with pytest.raises(BrokenImageError, match=r"cut\.jpg cannot be used: .*truncated"):
        whole(opened(jpeg(photo)[:2000], "cut.jpg", Decoder()))


def test_exif_orientation_is_applied_where_asked() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    file, whole = jpeg(photograph(), exif=exif), build_fast_pipeline(END, "t", Decoder())
    assert whole(opened(file, "x", Decoder()))[0].shape == (3, 120, 160)
    (turned,) = whole(opened(file, "x", Decoder(applies_exif=True)))
    assert turned.shape == (3, 160, 120)
    upright = opened(jpeg(photograph()), "x", Decoder(applies_exif=True))
    assert isinstance(upright, EncodedPicture) and upright._opened is None  # its boxes decide how large it is decoded


def test_what_has_no_fast_form_is_refused_all_at_once() -> None:
    entries = [
        {"name": "RandAugment"},
        {"name": "RandomResizedCrop", "size": 8, "interpolation": "nearest", "antialias": True},
        {"name": "RandomApply", "transforms": [{"name": "RandomPosterize", "bits": 4}]},
        {"name": "ToTensor"},
        {"name": "RandomErasing"},
    ]
    found = [str(problem) for problem in refused(entries, "T")]
    assert len(found) == 5
    for text in ("'RandAugment'", "RandomResizedCrop.antialias", "interpolation: must be bilinear or bicubic"):
        assert any(text in line for line in found), (text, found)
    assert any("'RandomPosterize'" in line for line in found) and any("must end in ToTensor" in line for line in found)
    with pytest.raises(ConfigError, match="RandAugment"):
        build_fast_pipeline(entries, "T", Decoder())
