from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageEnhance, ImageOps

from tests.blocks import data_block
from tests.unit.data.conftest import MULTI_CROP, MakeData, save_image
from vissl_zero.data.dataset import seed_sample
from vissl_zero.data.loader import build_loader
from vissl_zero.data.pipeline import build_pipeline, derive_eval_transforms
from vissl_zero.data.split_pipeline import build_eval_pipeline, described_views
from vissl_zero.data.transforms import (
    ImgPatchesFromTensor,
    ImgPilRandomPhotometric,
    ImgPilRandomSolarize,
    ImgPilRandomStroke,
    MNISTImgPil2RGB,
    _posterize,
)
from vissl_zero.errors import ConfigError, DataError
from vissl_zero.registry import TRANSFORMS

KEY = "config.DATA.TRAIN.TRANSFORMS"


def picture(size: tuple[int, int] = (20, 16)) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def test_later_transforms_act_on_every_crop_by_itself() -> None:
    seed_sample(0, 0, 0)
    crops = build_pipeline(MULTI_CROP, KEY)(picture())
    assert [tuple(crop.shape) for crop in crops] == [(3, 12, 12)] * 2 + [(3, 8, 8)] * 3
    flips = build_pipeline([*MULTI_CROP[:1], {"name": "RandomHorizontalFlip", "p": 0.5}, {"name": "ToTensor"}], KEY)
    whole = Image.fromarray(np.tile(np.arange(16, dtype=np.uint8) * 8, (16, 1))).convert("RGB")
    seen = set()
    for sample in range(8):
        seed_sample(0, 0, sample)
        seen.add(tuple(bool(crop[0, 0, 0] > crop[0, 0, -1]) for crop in flips(whole)))
    assert any(len(set(flipped)) == 2 for flipped in seen)  # some crops of one image flipped, others not


def test_without_multi_crop_there_is_one_crop() -> None:
    (crop,) = build_pipeline([{"name": "ToTensor"}], KEY)(picture())
    assert torch.equal(crop, torch.from_numpy(np.array(picture())).permute(2, 0, 1) / 255)


@pytest.mark.parametrize(
    ("entry", "shape"),
    [
        ({"name": "Resize", "size": 8}, (3, 8, 10)),
        ({"name": "Resize", "size": [8, 8], "interpolation": "bicubic"}, (3, 8, 8)),
        ({"name": "CenterCrop", "size": 6}, (3, 6, 6)),
        ({"name": "RandomResizedCrop", "size": 9, "scale": [0.2, 1.0]}, (3, 9, 9)),
        ({"name": "RandomApply", "p": 1.0, "transforms": [{"name": "CenterCrop", "size": 5}]}, (3, 5, 5)),
        ({"name": "RandomVerticalFlip"}, (3, 16, 20)),
    ],
)
def test_torchvision_classes_go_by_their_own_names(entry: dict[str, Any], shape: tuple[int, ...]) -> None:
    (crop,) = build_pipeline([entry, {"name": "ToTensor"}], KEY)(picture())
    assert tuple(crop.shape) == shape


def test_every_problem_is_reported_at_once_with_the_closest_names() -> None:
    entries = [
        {"name": "RandomHorizontalFlop"},
        {"name": "ImgPilGausianBlur"},
        {"name": "CenterCrop", "sise": 3},
        {"size": 3},
        {**MULTI_CROP[0], "total_num_crops": 9},
    ]
    with pytest.raises(ConfigError) as caught:
        build_pipeline(entries, KEY)
    text = [str(problem) for problem in caught.value.problems]
    assert len(text) == 5
    assert "Did you mean 'RandomHorizontalFlip'" in text[0]
    assert "Did you mean 'ImgPilGaussianBlur'" in text[1]
    assert text[2].startswith("config.DATA.TRAIN.TRANSFORMS[2]: CenterCrop: ") and "takes: (size)" in text[2]
    assert text[3].startswith("config.DATA.TRAIN.TRANSFORMS[3]: must be {name: ..., ...}")
    assert "total_num_crops is 5" in text[4]


def test_transforms_must_end_in_tensors() -> None:
    with pytest.raises(DataError, match="but end in Image"):
        build_pipeline([{"name": "CenterCrop", "size": 3}], KEY)(picture())


@pytest.mark.parametrize(
    "names",
    [
        ["ToTensor", "ToTensor"],
        ["Normalize", "ToTensor"],
        *(["ToTensor", name] for name in ("ImgPil2LabTensor", "MNISTImgPil2RGB", "ImgPilRandomPhotometric")),
    ],
)
def test_transforms_in_the_wrong_order_are_named(names: list[str]) -> None:
    arguments = {"Normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}, "ImgPilRandomPhotometric": {"p": 1.0}}
    pipeline = build_pipeline([{"name": name, **arguments.get(name, {})} for name in names], "config.X")
    said = rf"(?s)TRANSFORMS: ({'|'.join(names)}) cannot take a (Tensor|Image) .*after it"
    with pytest.raises(DataError, match=said):
        pipeline(Image.new("RGB", (8, 8)))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            [{"name": "RandomCrop", "size": 9}],
            r"RandomCrop cannot take an image of 8 x 7 \(Required crop size \(9, 9\)",
        ),
        (
            [{"name": "ToTensor"}, {"name": "ImgPatchesFromTensor", "patch_jitter": 21}],
            r"ImgPatchesFromTensor cannot take a Tensor of 3 x 7 x 8 \(cells of 2 pixels have no room",
        ),
        (
            [{"name": "ToTensor"}, {"name": "ImgPatchesFromTensor", "patch_jitter": 1}],
            r"ImgPatchesFromTensor cannot take a Tensor of 3 x 7 x 8 \(tiles need a square image; crop it",
        ),
    ],
)
def test_an_image_of_a_wrong_size_is_no_matter_of_order(entries: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=rf"TRANSFORMS: {said}.*\)\. Change its arguments") as raised:
        build_pipeline(entries, KEY)(Image.new("RGB", (8, 7)))
    assert "ToTensor" not in str(raised.value)


def test_images_of_different_sizes_are_named(make_data: MakeData, tmp_path: Path) -> None:
    save_image(tmp_path / "1.png", 1, (16, 16))
    save_image(tmp_path / "2.png", 2, (16, 12))
    data = make_data("disk_folder", tmp_path, TRANSFORMS=[{"name": "ToTensor"}])
    with pytest.raises(DataError, match=r"crops of .*/\d.png have other shapes than those of .*/\d.png: \(3, 1"):
        next(build_loader(data_block(data), "TRAIN", 0, 2, 0, 1, 1).epoch(0))


def test_colour_distortion_and_blur_do_what_they_say() -> None:
    image = picture((32, 32))
    blur = TRANSFORMS.get("ImgPilGaussianBlur").build
    assert blur(p=0.0)(image) is image
    spread = [np.asarray(blur(p=1.0, radius_min=r, radius_max=r)(image)).std() for r in (0.5, 2.0)]
    assert np.asarray(image).std() > spread[0] > spread[1]
    distort = TRANSFORMS.get("ImgPilColorDistortion").build(strength=1.0)
    untouched = gray = 0
    for sample in range(400):
        seed_sample(0, 0, sample)
        pixels = np.asarray(distort(image)).astype(int)
        untouched += bool((pixels == np.asarray(image)).all())
        gray += bool((np.ptp(pixels, axis=2) == 0).all())
    assert 40 < untouched < 90  # 0.2 without jitter x 0.8 without gray = 0.16 of 400
    assert 55 < gray < 110  # 0.2 of 400


CROPS = {"total_num_crops": 2, "num_crops": [2], "size_crops": [8], "crop_scales": [[0.5, 1.0]]}


@pytest.mark.parametrize(
    ("name", "right", "wrong", "says"),
    [
        ("ImgPilRandomSolarize", {"p": 1.0}, {"p": 1.1}, "p must be from 0 to 1"),
        ("ImgPilRandomPhotometric", {"p": 0.0}, {"p": -0.1}, "p must be from 0 to 1"),
        ("ImgPil2LabTensor", {"indices": []}, {"indices": [0]}, "indices must be empty"),
        ("MNISTImgPil2RGB", {"size": [8, 9]}, {"size": [8]}, "size must be a number or two, box two numbers"),
        ("MNISTImgPil2RGB", {"box": [1, 2]}, {"box": [1]}, "size must be a number or two, box two numbers"),
        ("ImgPilToMultiCrop", CROPS, {**CROPS, "total_num_crops": 3}, "with these num_crops, total_num_crops is 2"),
        ("ImgPilToMultiCrop", CROPS, {**CROPS, "size_crops": [8, 4]}, "of one length, and total_num_crops their sum"),
        (
            "ImgPilToMultiCrop",
            {**CROPS, "interpolation": "bicubic"},
            {**CROPS, "interpolation": "nearest"},
            "interpolation must be bilinear or bicubic, not nearest",
        ),
        (
            "ImgPilToMultiCrop",
            {**CROPS, "keeps_boxes": True},
            {**CROPS, "keeps_boxes": 1},
            "keeps_boxes must be true or false, not 1",
        ),
        ("ImgReplicatePil", {"num_times": 1}, {"num_times": 0}, "num_times must be a whole number, at least 1"),
        ("ImgPilToPatchesAndImage", {}, {"permute_patches": False}, "permute_patches must be true"),
    ],
)
def test_wrong_values_of_a_transform(name: str, right: dict[str, Any], wrong: dict[str, Any], says: str) -> None:
    TRANSFORMS.get(name).build(**right)
    with pytest.raises(ValueError, match=re.escape(says)):
        TRANSFORMS.get(name).build(**wrong)


@pytest.mark.parametrize(
    ("color", "lab"),
    [
        ((255, 255, 255), (50, 0, 0)),
        ((0, 0, 0), (-50, 0, 0)),
        # CIE Lab of sRGB's primaries, 53.2 80.1 67.2, 87.7 -86.2 83.2 and 32.3 79.2 -107.9, in steps of 8 bits
        ((255, 0, 0), (136 * 100 / 255 - 50, 80, 67)),
        ((0, 255, 0), (224 * 100 / 255 - 50, -86, 83)),
        ((0, 0, 255), (82 * 100 / 255 - 50, 79, -108)),
        # CIE's linear segment, L = 903.3 Y, ends at Y = 0.008856; 10 of 255 in sRGB is Y = 0.00304, 30 is Y = 0.01298.
        ((10, 10, 10), (7 * 100 / 255 - 50, 0, 0)),
        ((30, 30, 30), (29 * 100 / 255 - 50, 0, 0)),
    ],
)
def test_lab_is_cies(color: tuple[int, int, int], lab: tuple[float, float, float]) -> None:
    pixels = TRANSFORMS.get("ImgPil2LabTensor").build()(Image.new("RGB", (2, 3), color))
    assert pixels.shape == (3, 3, 2) and pixels.dtype == torch.float32
    torch.testing.assert_close(pixels[:, 1, 1], torch.tensor(lab, dtype=torch.float32))


def test_a_transform_of_ones_own() -> None:
    @TRANSFORMS.register("Invert")
    class Invert:
        """Swaps dark and bright."""

        def __call__(self, image: Image.Image) -> Image.Image:
            return Image.eval(image, lambda value: 255 - value)

    (crop,) = build_pipeline([{"name": "Invert"}, {"name": "ToTensor"}], KEY)(picture())
    (plain,) = build_pipeline([{"name": "ToTensor"}], KEY)(picture())
    assert torch.allclose(crop, 1 - plain)


@dataclass
class AddConfig:
    """Keys of the transform below."""

    amount: int = 10


@TRANSFORMS.register("Add", config=AddConfig)
class Add:
    """Brightens."""

    def __init__(self, amount: int):
        self.amount = amount

    def __call__(self, image: Image.Image) -> Image.Image:
        return Image.eval(image, lambda value: min(value + self.amount, 255))


def test_a_transform_of_ones_own_has_typed_keys() -> None:
    black = Image.new("RGB", (2, 2))
    for entry, value in (({"name": "Add"}, 10), ({"name": "Add", "amount": "51"}, 51)):
        (crop,) = build_pipeline([entry, {"name": "ToTensor"}], KEY)(black)
        assert torch.allclose(crop, torch.tensor(value / 255))
    with pytest.raises(ConfigError, match="amunt: is not a key"):
        build_pipeline([{"name": "Add", "amunt": 3}], KEY)


def test_evaluation_transforms_follow_from_train() -> None:
    assert derive_eval_transforms(MULTI_CROP) == [
        {"name": "Resize", "size": 12},
        {"name": "CenterCrop", "size": [12, 12]},
        {"name": "ToTensor"},
        MULTI_CROP[-1],
    ]
    assert derive_eval_transforms([{"name": "ToTensor"}]) == [{"name": "ToTensor"}]
    crops = [{"name": "Resize", "size": 256}, {"name": "RandomCrop", "size": [24, 32]}, {"name": "ToTensor"}]
    assert derive_eval_transforms(crops)[:2] == [
        {"name": "Resize", "size": 32},
        {"name": "CenterCrop", "size": [24, 32]},
    ]


def test_evaluation_transforms_of_test_win(make_data: MakeData) -> None:
    data = make_data("digits", TEST={"TRANSFORMS": [{"name": "CenterCrop", "size": 4}, {"name": "ToTensor"}]})
    (crop,) = build_eval_pipeline(data_block(data))(picture())
    assert tuple(crop.shape) == (3, 4, 4)


def _stripes() -> Image.Image:
    return Image.fromarray(np.arange(48 * 48 * 3, dtype=np.int64).reshape(48, 48, 3).astype(np.uint8))


def test_copies_are_augmented_each_by_itself() -> None:
    entries = [{"name": "ImgReplicatePil", "num_times": 3}, {"name": "RandomResizedCrop", "size": 24}]
    crops = build_pipeline([*entries, {"name": "ToTensor"}], "x")(_stripes())
    assert [tuple(crop.shape) for crop in crops] == [(3, 24, 24)] * 3
    assert not torch.equal(crops[0], crops[1]) and not torch.equal(crops[1], crops[2])


def test_a_probability_for_each_crop() -> None:
    invert = {"name": "RandomInvert", "p": 1.0}
    entry = {"name": "ImgPilMultiCropRandomApply", "transforms": [invert], "prob": [0.0, 1.0, 0.5]}
    copies = {"name": "ImgReplicatePil", "num_times": 3}
    apply = build_pipeline([copies, entry, {"name": "ToTensor"}], "x")
    plain = build_pipeline([{"name": "ToTensor"}], "x")(_stripes())[0]
    shares = []
    for _ in range(200):
        first, second, third = apply(_stripes())
        assert torch.equal(first, plain) and torch.allclose(second, 1 - plain)
        shares.append(not torch.equal(third, plain))
    assert 60 < sum(shares) < 140
    with pytest.raises(DataError, match="3 entries, and there are 2 crops"):
        build_pipeline([{"name": "ImgReplicatePil", "num_times": 2}, entry, {"name": "ToTensor"}], "x")(_stripes())


def test_solarization_is_pil_s_at_a_threshold_from_0_to_256(monkeypatch: pytest.MonkeyPatch) -> None:
    """VISSL's RandomSolarizeTransform: pil_photometric_transforms_lib.py at 09270ed2."""
    always, never = ImgPilRandomSolarize(p=1.0), ImgPilRandomSolarize(p=0.0)
    image = _stripes()
    assert never(image) is image
    for threshold in (0, 128, 256):
        monkeypatch.setattr("random.randint", lambda low, high, at=threshold: at if (low, high) == (0, 256) else -1)
        assert always(image).tobytes() == ImageOps.solarize(image, threshold).tobytes()


def test_tiles_are_those_of_vissl(monkeypatch: pytest.MonkeyPatch) -> None:
    """First pixels that ImgPatchesFromTensor of img_patches_tensor.py at 09270ed2 gives for these offsets."""
    across, down = [[0, 1, 0], [1, 1, 2], [0, 2, 0]], [[0, 0, 2], [1, 2, 2], [0, 1, 1]]
    offsets = iter([offset for i in range(3) for j in range(3) for offset in (across[i][j], down[i][j])])
    monkeypatch.setattr("random.randrange", lambda limit: next(offsets))
    tiles = ImgPatchesFromTensor(9, 3)(torch.arange(1800.0).view(2, 30, 30))
    assert [int(tile[0, 0, 0]) for tile in tiles] == [0, 301, 660, 41, 371, 672, 20, 352, 650]
    assert {tuple(tile.shape) for tile in tiles} == {(2, 7, 7)}
    with pytest.raises(ValueError, match="no room"):
        ImgPatchesFromTensor(9, 10)(torch.zeros(3, 30, 30))


def test_a_crop_and_the_tiles_of_another() -> None:
    seed_sample(0, 0, 0)
    entry = {"name": "ImgPilToPatchesAndImage", "crop_size_image": 12, "crop_size_patches": 90}
    whole, *tiles = build_pipeline([entry, {"name": "ToTensor"}], KEY)(picture())
    assert tuple(whole.shape) == (3, 12, 12) and [tuple(tile.shape) for tile in tiles] == [(3, 9, 9)] * 9
    assert derive_eval_transforms([entry])[:2] == [
        {"name": "Resize", "size": 12},
        {"name": "CenterCrop", "size": [12, 12]},
    ]


def test_tiles_are_a_square_number_of_them_with_room_between() -> None:
    for number in (1, 4):
        assert len(ImgPatchesFromTensor(number, 1)(torch.zeros(3, 8, 8))) == number
    for number in (-4, 0, 2, 3):
        with pytest.raises(ValueError, match="square number"):
            ImgPatchesFromTensor(number, 1)
    with pytest.raises(ValueError, match="patch_jitter must be at least 1"):
        ImgPatchesFromTensor(4, 0)


def test_pirl_s_changes_of_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """VISSL's ImgPilRandomPhotometric at 09270ed2: all four, one after another, or none."""
    image = picture()
    assert ImgPilRandomPhotometric(p=0.0)(image) is image
    monkeypatch.setattr("random.randint", lambda low, high: {(4, 8): 5, (0, 256): 100}[low, high])
    monkeypatch.setattr("random.uniform", lambda low, high: {(0.1, 1.9): 0.7}[low, high])
    sharp = ImageEnhance.Sharpness(ImageOps.posterize(image, 5)).enhance(0.7)
    assert (
        ImgPilRandomPhotometric(p=1.0)(image).tobytes()
        == ImageOps.autocontrast(ImageOps.solarize(sharp, 100)).tobytes()
    )


def test_an_image_on_a_canvas_has_three_channels() -> None:
    gray = Image.fromarray(np.full((4, 6), 200, dtype=np.uint8))
    plain, larger = MNISTImgPil2RGB()(gray), MNISTImgPil2RGB(size=8, box=[1, 2])(gray)
    assert (plain.mode, plain.size, larger.mode, larger.size) == ("RGB", (6, 4), "RGB", (8, 8))
    pixels = np.asarray(larger)
    assert (pixels[2:6, 1:7] == 200).all() and pixels.sum() == 200 * 3 * 24 and (np.asarray(plain) == 200).all()


@pytest.mark.parametrize(
    ("keys", "means"),
    [
        ({"magnitude": 9, "magnitude_std": 0.5, "increasing_severity": True}, [70.0, 167.63, 70.0, 70.0, 103.889]),
        ({"magnitude": 5, "weight_choice": 0}, [70.0, 75.81, 70.0, 70.861, 92.937]),
        ({"magnitude": 7, "num_layers": 3}, [127.033, 67.569, 65.192, 94.619, 92.326]),
    ],
)
def test_rand_augment_is_vissl_s(keys: dict[str, Any], means: list[float]) -> None:
    """vissl 09270ed rand_auto_aug.py gives these images for the same seeds; their means are compared."""
    values = np.indices((24, 20)).sum(0)[:, :, None] * np.array([3, 5, 2]) % 256
    augment = build_pipeline([{"name": "RandAugment", **keys}], "here").transforms[0]
    for seed, mean in enumerate(means):
        random.seed(seed)
        np.random.seed(seed)
        assert np.asarray(augment(Image.fromarray(values.astype(np.uint8)))).mean() == pytest.approx(mean, abs=0.02)


def test_the_weights_of_rand_augment_are_probabilities() -> None:
    (augment,) = build_pipeline([{"name": "RandAugment", "magnitude": 5, "weight_choice": 0}], "here").transforms
    assert sum(augment.choice_weights) == pytest.approx(1)


def test_rand_augment_at_its_greatest_magnitude_and_torchvision_s() -> None:
    white = Image.new("RGB", (8, 8), "white")
    assert not np.asarray(_posterize(white, 0)).any() and np.asarray(_posterize(white, 1)).max() == 128
    made = build_pipeline([{"name": "RandAugment", "num_ops": 1, "magnitude": 4}], "here").transforms[0]
    assert isinstance(made, torchvision.transforms.RandAugment) and made.magnitude == 4
    with pytest.raises(ConfigError, match="num_ops cannot go with VISSL's keys"):
        build_pipeline([{"name": "RandAugment", "num_ops": 1, "magnitude_std": 0.5}], "here")


def test_strokes_become_thicker_or_thinner_by_a_random_share() -> None:
    pixels = np.zeros((9, 9, 3), dtype=np.uint8)
    pixels[:, 3:6] = 255
    image = Image.fromarray(pixels)
    stroke = ImgPilRandomStroke(strength=0.6)
    random.seed(0)
    outer, inner = [], []
    for _ in range(200):
        row = np.asarray(stroke(image))[4, :, 0]
        assert row[4] == 255 and row[1] == row[7] == 0  # the middle of a stroke of 3, and far from it
        outer.append(int(row[2]))
        inner.append(int(row[3]))
    thicker = [value for value in outer if value]
    thinner = [value for value in inner if value < 255]
    assert 70 < len(thicker) < 130 and 70 < len(thinner) < 130
    assert len(thicker) + len(thinner) >= 195  # one or the other, but for shares that round to nothing
    assert 0.55 * 255 < max(thicker) <= 0.6 * 255 + 1 and 0.4 * 255 - 1 <= min(thinner) < 0.45 * 255
    assert ImgPilRandomStroke(strength=0.0)(image).tobytes() == image.tobytes()


IMAGENETS = {"name": "Normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "Resize", "size": 256}, "shorter side resized to 256"),
        ({"name": "Resize", "size": [256]}, "shorter side resized to [256]"),
        ({"name": "Resize", "size": [32, 48], "interpolation": "bicubic"}, "resized to 32 x 48 (bicubic)"),
        ({"name": "CenterCrop", "size": 224}, "center crop 224 x 224"),
        ({"name": "CenterCrop", "size": [32, 48]}, "center crop 32 x 48"),
        (IMAGENETS, "mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225 (those of ImageNet)"),
        ({**IMAGENETS, "std": [1.0]}, "mean 0.485, 0.456, 0.406, std 1"),
        ({"name": "Pad", "padding": 3, "fill": 1}, "Pad padding 3, fill 1"),
        ({"name": "Grayscale"}, "Grayscale"),
    ],
)
def test_how_images_are_seen_is_said_in_words(make_data: MakeData, entry: dict[str, Any], words: str) -> None:
    data = make_data("digits", TEST={"TRANSFORMS": [entry, {"name": "ToTensor"}]})
    assert described_views(data_block(data)) == words
