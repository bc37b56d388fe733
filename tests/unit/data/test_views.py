"""``load_views`` makes the loader's crops, bit by bit."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vissl_zero
from tests.blocks import data_block
from tests.unit.data.conftest import save_image
from vissl_zero.config.compose import compose
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.loader import build_loader
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.resolve import resolve

RECIPE = "pretrain/swav/my_photos"


@pytest.mark.parametrize(("backend", "place"), [("pil", "workers"), ("fast", "workers"), ("fast", "device")])
def test_views_are_the_loaders_crops(tmp_path: Path, backend: str, place: str) -> None:
    for index in range(3):
        save_image(tmp_path / f"{index}.jpg", index, (60, 50))
    how = [f"config.DATA.BACKEND={backend}", f"config.DATA.AUGMENT_ON={place}"]
    overrides = [*how, "config.SEED_VALUE=5", "config.DATA.IMG_SIZE=32"]
    mine = [f"config.DATA.TRAIN.DATA_PATHS={tmp_path}", "config.DATA.NUM_DATALOADER_WORKERS=0"]
    plan = resolve(compose(RECIPE, [*overrides, *mine]).run, tmp_path)
    loader = build_loader(data_block(plan.config.DATA), "TRAIN", plan.seed, 3, 0, 1, 1)
    batch = next(loader.epoch(2))[0].to("cpu", torch.float32)
    views = pickle.loads(pickle.dumps(vissl_zero.load_views(RECIPE, overrides=overrides)))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for row, index in enumerate(batch.sample_ids.tolist()):
        path = tmp_path / f"{index}.jpg"
        expected = [crop for images in batch.images for crop in images[row :: batch.num_local]]
        for image in (path, str(path), path.read_bytes(), Image.open(path)):
            crops = views(image, epoch=2, index=index)
            assert len(crops) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(crops, expected, strict=True))
        assert not torch.equal(views(path, epoch=1, index=index)[0], expected[0])
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    again = vissl_zero.load_views(RECIPE, overrides=[*overrides, "config.DATA.AUGMENTATION_PERIOD=2"])
    assert torch.equal(again(path, epoch=3, index=1)[0], views(path, epoch=1, index=1)[0])
    assert torch.equal(views(path)[0], views(path, epoch=0, index=0)[0])  # as load_views says
    with pytest.raises(BrokenImageError, match="the file does not exist"):
        views(tmp_path / "none.jpg")


def test_a_wrong_recipe_or_transform_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="my_photo"):
        vissl_zero.load_views("pretrain/swav/my_photo")
    with pytest.raises(ConfigError, match="RandAugment"):
        transforms = "config.DATA.TRAIN.TRANSFORMS=[{name: RandAugment}, {name: ToTensor}]"
        vissl_zero.load_views(RECIPE, overrides=["config.DATA.BACKEND=fast", transforms])
