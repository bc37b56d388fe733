"""Numbers of the data's code that come from elsewhere: VISSL, torchvision, Pillow, and what ``docs`` promises."""

from __future__ import annotations

import inspect
import io
from typing import Any

import pytest
import torchvision
from PIL import ExifTags, Image

from vissl_zero.config.blocks.data import Data
from vissl_zero.config.run_config import RunConfig
from vissl_zero.data.decode import Decoder
from vissl_zero.data.fast.transforms import FORMS
from vissl_zero.data.source import SourceRequest
from vissl_zero.data.sources.library_sets import _SETS, Synthetic
from vissl_zero.registry import TRANSFORMS

# facebookresearch/vissl 09270ed2, vissl/data/ssl_transforms: of constructors, or of from_config where they have none.
VISSLS: dict[str, dict[str, Any]] = {
    "ImgPilGaussianBlur": {"p": 0.5, "radius_min": 0.1, "radius_max": 2.0},
    "ImgPilColorDistortion": {"strength": 1.0, "brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2},
    "ImgPilRandomSolarize": {"p": 0.66},
    "ImgPilRandomPhotometric": {"p": 0.66},
    "MNISTImgPil2RGB": {"size": (), "box": (0, 0)},
    "ImgReplicatePil": {"num_times": 2},
    "ImgPatchesFromTensor": {"num_patches": 9, "patch_jitter": 21},
    "ImgPilToPatchesAndImage": {
        "crop_scale_image": (0.08, 1.0),
        "crop_size_image": 224,
        "crop_scale_patches": (0.6, 1.0),
        "crop_size_patches": 255,
        "permute_patches": True,
        "num_patches": 9,
    },
}


def _defaults(build: Any) -> dict[str, Any]:
    parameters = inspect.signature(build).parameters.values()
    return {item.name: item.default for item in parameters if item.default is not item.empty}


@pytest.mark.parametrize("name", VISSLS)
def test_a_transform_of_vissl_has_its_defaults(name: str) -> None:
    assert _defaults(TRANSFORMS.get(name).build) == VISSLS[name]


@pytest.mark.parametrize("name", FORMS)
def test_a_fast_form_has_the_defaults_of_what_it_stands_for(name: str) -> None:
    original = TRANSFORMS.get(name).build if name in TRANSFORMS else getattr(torchvision.transforms, name)
    theirs = _defaults(original)
    assert {key: theirs[key] for key in _defaults(FORMS[name])} == _defaults(FORMS[name])


def test_what_no_key_sets_has_the_value_of_its_key() -> None:
    run, request = RunConfig(), SourceRequest("TRAIN")
    train = run.DATA.TRAIN
    assert (request.limit, request.image_size, request.seed) == (
        *(train.DATA_LIMIT, train.DEFAULT_GRAY_IMG_SIZE),
        run.SEED_VALUE,
    )
    assert request.decoder == Decoder() == Decoder.of(run.DATA)


@pytest.mark.parametrize("background, value", [("white", 255), ("gray", 128), ("black", 0)])
def test_a_background_is_half_of_white_or_all_of_it(background: str, value: int) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (2, 2), (9, 9, 9, 0)).save(file, "PNG")
    decoder = Decoder.of(Data(BACKGROUND=background))
    assert decoder.image(file.getvalue(), "x").getpixel((0, 0)) == (value,) * 3


def test_synthetic_has_vissls_number_of_images() -> None:
    """DEFAULT_SIZE of vissl/data/synthetic_dataset.py at 09270ed2."""
    assert len(Synthetic(SourceRequest("TRAIN"))) == 50_000


@pytest.mark.parametrize("name", _SETS)
def test_train_and_test_of_a_library_set_differ_in_their_split_alone(name: str) -> None:
    train, test = _SETS[name]
    assert train.keys() == test.keys() <= inspect.signature(getattr(torchvision.datasets, name)).parameters.keys()
    assert [key for key in train if train[key] != test[key]] == [next(iter(train))]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_of_a_turned_image_is_that_of_its_pixels(orientation: int) -> None:
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", (6, 4)).save(file, "JPEG", exif=exif)
    for decoder in (Decoder(), Decoder(applies_exif=True)):
        assert decoder.size(file.getvalue(), "x") == decoder.image(file.getvalue(), "x").size
