"""Images of other channels than red, green and blue: files, pixels, statistics, refusals, and a step of training."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional

from tests.blocks import data_block
from tests.unit.config.example_config import complaints
from tests.unit.data.conftest import MakeData
from vissl_zero.cli import main
from vissl_zero.config.compose import compose
from vissl_zero.data.channels import build_channel_pipeline, to_channels
from vissl_zero.data.decode import BrokenImageError, Decoder
from vissl_zero.data.loader import build_loader
from vissl_zero.errors import ConfigError, DataError
from vissl_zero.models.model import build_model
from vissl_zero.resolve.resolve import resolve

VIEWS: list[dict[str, Any]] = [
    {
        "name": "ImgPilToMultiCrop",
        "total_num_crops": 3,
        "num_crops": [2, 1],
        "size_crops": [12, 8],
        "crop_scales": [[0.3, 1.0], [0.1, 0.4]],
    },
    {"name": "RandomHorizontalFlip", "p": 0.5},
    {"name": "RandomApply", "transforms": [{"name": "RandomRotation", "degrees": 20}], "p": 0.5},
    {"name": "ImgPilGaussianBlur", "p": 0.5, "radius_min": 0.1, "radius_max": 2.0},
    {"name": "ToTensor"},
    {"name": "Normalize", "mean": [0.5] * 5, "std": [0.25] * 5},
]


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Class folders of 16-bit arrays of 5 channels, in either layout."""
    rng = np.random.default_rng(0)
    for index in range(8):
        values = rng.integers(0, 2**16, (5, 20 + index, 24), np.uint16)
        path = tmp_path / "arrays" / "ab"[index % 2] / f"{index}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values if index % 3 else values.transpose(1, 2, 0))
    return tmp_path / "arrays"


def file(path: Path, image: Image.Image, **options: Any) -> bytes:
    image.save(path, **options)
    return path.read_bytes()


def test_files_keep_all_their_bits_and_channels(tmp_path: Path) -> None:
    values = np.arange(6 * 4, dtype=np.uint16).reshape(6, 4) * 2_500 + 7
    for ending in ("png", "tif"):
        found = to_channels(file(tmp_path / f"gray.{ending}", Image.fromarray(values)), "x", Decoder(channels=1))
        assert torch.equal(found[0], torch.from_numpy(values.astype(np.float32) / np.float32(65_535)))
    pages = [Image.fromarray(values + page) for page in range(5)]
    stack = file(tmp_path / "stack.tif", pages[0], save_all=True, append_images=pages[1:])
    found = to_channels(stack, "x", Decoder(channels=5))
    assert found.shape == (5, 6, 4) and (65_535 * (found[4] - found[0])).round().unique().tolist() == [4.0]
    rgba = np.random.default_rng(0).integers(0, 256, (6, 4, 4), np.uint8)
    found = to_channels(file(tmp_path / "rgba.png", Image.fromarray(rgba)), "x", Decoder(channels=4))
    assert torch.equal(found, torch.from_numpy(rgba.transpose(2, 0, 1) / np.float32(255)))
    floats = np.random.default_rng(0).normal(size=(7, 6, 4)).astype(">f8")
    assert torch.equal(to_channels(floats, "x", Decoder(channels=7)), torch.from_numpy(floats.astype(np.float32)))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros((5, 0, 4), np.uint8), "its shape is 5 x 0 x 4, and config.DATA.IN_CHANNELS asks for 5 channels"),
        (np.zeros((6, 6, 4), np.uint8), "its shape is 6 x 6 x 4, and config.DATA.IN_CHANNELS asks for 5 channels"),
        (np.zeros((5, 6, 6), np.int32), "its values are int32; uint8, uint16 and floating point are read"),
        (np.full((5, 6, 6), np.nan, np.float32), "it has values that are not finite"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, values: np.ndarray, reason: str) -> None:
    np.save(tmp_path / "x.npy", values)
    with pytest.raises(BrokenImageError, match=f"x.npy cannot be used: {reason}"):
        to_channels((tmp_path / "x.npy").read_bytes(), "x.npy", Decoder(channels=5))


def test_the_same_values_at_any_number_of_ranks_and_from_one_array(make_data: MakeData, arrays: Path) -> None:
    found = []
    for ranks in (1, 2):
        data = data_block(make_data("disk_folder", arrays, TRANSFORMS=VIEWS) | {"IN_CHANNELS": 5})
        rows: dict[int, list[torch.Tensor]] = {}
        for rank in range(ranks):
            for (batch,) in build_loader(data, "TRAIN", 3, 4 // ranks, rank, ranks, 1).epoch(1):
                for row, sample in enumerate(batch.sample_ids.tolist()):
                    rows[sample] = [crop for images in batch.images for crop in images[row :: batch.num_local]]
        found.append(rows)
    assert found[0].keys() == found[1].keys() == set(range(8))
    assert [tuple(crop.shape) for crop in found[0][0]] == [(5, 12, 12), (5, 12, 12), (5, 8, 8)]
    for sample, crops in found[0].items():
        assert all(map(torch.equal, crops, found[1][sample]))


def test_an_array_of_images_is_read_in_either_layout(make_data: MakeData, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (4, 5, 16, 12), np.uint16)
    end = [{"name": "ToTensor"}]
    for layout in (values, values.transpose(0, 2, 3, 1)):
        np.save(tmp_path / "images.npy", layout)
        data = data_block(make_data("npy", tmp_path / "images.npy", TRANSFORMS=end) | {"IN_CHANNELS": 5})
        ((batch,),) = build_loader(data, "TRAIN", 3, 4, 0, 1, 1).epoch(0)
        wanted = torch.from_numpy(values[batch.sample_ids.numpy()].astype(np.float32) / np.float32(65_535))
        assert torch.equal(batch.images[0], wanted)
    for shape in ((4, 5), (0, 5, 16, 12), (1, 4, 5, 16, 12)):
        np.save(tmp_path / "images.npy", np.zeros(shape, np.uint16))
        with pytest.raises(DataError, match=rf"must hold images as .* or \(N, C, H, W\), not {re.escape(str(shape))}"):
            build_loader(data, "TRAIN", 3, 4, 0, 1, 1)


def test_statistics_are_per_channel_and_for_normalize(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", str(arrays), "--channels", "5"]) == 0
    said = capsys.readouterr().out
    images = [np.load(path) for path in arrays.rglob("*.npy")]
    (arrays / "a" / "00.npy").write_bytes(b"broken")  # comes first, and is passed over
    assert main(["data", "stats", str(arrays), "--channels", "5"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert "8 images (1 more cannot be read)" in first and others == said.splitlines()[1:]
    flat = [(image if image.shape[0] == 5 else image.transpose(2, 0, 1)).reshape(5, -1) for image in images]
    every = np.concatenate(flat, axis=1) / 65_535
    for values in (every.mean(1), every.std(1)):
        assert ", ".join(f"{value:.4f}" for value in values) in said
    assert "channels      5" in said and "8 images" in said


def test_what_knows_colors_is_refused_by_name() -> None:
    jitter = {"name": "RandomApply", "transforms": [{"name": "ColorJitter", "hue": 0.1}]}
    views = [jitter, {"name": "RandomGrayscale"}, *VIEWS]
    keys = {"DATA__IN_CHANNELS": 5, "DATA__TRAIN__TRANSFORMS": views}
    said = [line for line in complaints(**keys, DATA__BACKEND="fast") if "5 channels" in line]
    assert [line.split(":")[0] for line in said] == ["config.DATA.BACKEND", *["config.DATA.TRAIN.TRANSFORMS"] * 2]
    assert "got 'ColorJitter'" in said[1] and "got 'RandomGrayscale'" in said[2]
    keys |= {
        "DATA__TRAIN__TRANSFORMS": VIEWS,
        "DATA__TRAIN__DATA_SOURCES": ["hdf5"],
        "LOSS": {"name": "feature_distillation_loss"},
    }
    said = complaints(**keys, MODEL__INPUT_TYPE="bgr", MODEL__IN_CHANNELS=4)
    for key in ("MODEL.INPUT_TYPE", "MODEL.IN_CHANNELS", "LOSS.name", "DATA.TRAIN.DATA_SOURCES"):
        assert any(line.startswith(f"config.{key}: must be") and " 5" in line for line in said), (key, said)


@pytest.mark.parametrize("trunk", ["resnet", "regnet", "vision_transformer", "timm/convnext_atto"])
def test_a_run_notes_its_channels_and_its_trunk_sees_them(trunk: str, arrays: Path, tmp_path: Path) -> None:
    images = [f"config.DATA.TRAIN.DATA_PATHS=[{arrays}]", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=4"]
    run = compose("digits/simclr", [*images, "config.DATA.IN_CHANNELS=5", f"config.MODEL.TRUNK.NAME={trunk}"]).run
    crops = {**VIEWS[0], "total_num_crops": 2, "num_crops": [2], "size_crops": [224], "crop_scales": [[0.1, 1.0]]}
    run.DATA.TRAIN.TRANSFORMS = [crops, *VIEWS[1:]]
    with pytest.raises(ConfigError, match=r"TEST\.TRANSFORMS\.Normalize\.mean: must be 5 numbers"):
        resolve(run, tmp_path)
    run.DATA.TEST.TRANSFORMS = []
    cfg = resolve(run, tmp_path).config.MODEL
    assert cfg.IN_CHANNELS == 5
    (features,) = build_model(cfg).trunk([torch.randn(2, 5, 224, 224)])
    assert features.shape[0] == 2


def test_the_gray_of_an_image_that_a_source_makes_goes_to_every_channel() -> None:
    image = Image.new("RGB", (2, 1), (255, 0, 0))
    image.putpixel((1, 0), (255, 255, 255))
    made = to_channels(image, "made", Decoder(channels=4))
    assert made.shape == (4, 1, 2) and made.dtype == torch.float32
    assert made.equal(torch.tensor([76 / 255, 1.0]).expand(4, 1, 2))


def test_copies_of_tensors_are_apart() -> None:
    pipeline = build_channel_pipeline(
        [{"name": "ImgReplicatePil", "num_times": 3}, {"name": "ToTensor"}], "t", Decoder(channels=2)
    )
    image = torch.zeros(2, 4, 4)
    copies = pipeline(image)
    assert len(copies) == 3
    copies[0] += 1
    assert not image.any() and not copies[1].any()


@pytest.mark.parametrize(
    "read",
    [
        lambda data: Decoder().image(data, "x"),
        lambda data: Decoder().size(data, "x"),
        lambda data: to_channels(data, "x", Decoder(channels=1)),
    ],
)
def test_a_format_that_is_not_listed_reaches_no_decoder(read: Callable[[bytes], Any]) -> None:
    file = io.BytesIO()
    Image.new("L", (4, 3)).save(file, "PCX")
    with pytest.raises(BrokenImageError, match="x cannot be used"):
        read(file.getvalue())


def test_what_is_opened_in_memory_is_what_a_source_gives(arrays: Path) -> None:
    decoder = Decoder(channels=5)
    content = (arrays / "a" / "0.npy").read_bytes()
    opened = build_channel_pipeline([{"name": "ToTensor"}], "t", decoder).open(content, "x", Decoder())
    assert torch.equal(opened, to_channels(content, "x", decoder)) and opened.shape[0] == 5


def test_a_blur_reaches_three_deviations_and_no_further_than_the_image() -> None:
    entries = [{"name": "ImgPilGaussianBlur", "p": 1.0, "radius_min": 2.0, "radius_max": 2.0}]
    (blur,) = build_channel_pipeline(entries, "t", Decoder(channels=5)).transforms
    image = torch.rand(5, 40, 40)
    assert torch.equal(blur(image), functional.gaussian_blur(image, [13, 13], [2.0, 2.0]))
    small = torch.rand(5, 6, 4)  # reflection ends at 3 pixels
    assert torch.equal(blur(small), functional.gaussian_blur(small, [7, 7], [2.0, 2.0]))
