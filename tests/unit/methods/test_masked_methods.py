"""What methods that hide patches refuse, before a run and in the first forward pass."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.blocks import model_block
from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.methods.method import build_method
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.model import build_model
from vissl_zero.resolve.resolve import resolve

_TRUNK = "config.MODEL.TRUNK.VISION_TRANSFORMERS.USE_MASK_TOKEN"
_TWO = "{name: ImgPilToMultiCrop, total_num_crops: 2, size_crops: [24, 16], num_crops: [1, 1]"
_SIZES = f"config.DATA.TRAIN.TRANSFORMS=[{_TWO}, crop_scales: [[0.5, 1], [0.2, 0.5]]}}, {{name: ToTensor}}]"


def _resolved(recipe: str, *overrides: str) -> Any:
    composed = compose(recipe, overrides)
    return resolve(composed.run, "runs/x", recipe=recipe, written=composed.written, host=CPU_HOST)


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("mae", "config.MODEL.TRUNK.NAME=resnet", "must be a vision transformer for mae_loss"),
        ("mae", "config.LOSS.mae_loss.mask_ratio=1", "mask_ratio"),
        ("mae", _SIZES, "must make crops of one size for mae_loss"),
        ("mae", "config.MODEL.HEAD.PARAMS=[[mlp,{dims: [64, 8]}]]", "must be one patch_predictor for mae_loss"),
        ("simmim", f"{_TRUNK}=false", f"{_TRUNK}: must be true for simmim_loss"),
        ("maskfeat", f"{_TRUNK}=false", f"{_TRUNK}: must be true for maskfeat_loss"),
        ("maskfeat", "config.MODEL.HEAD.PARAMS=[[pixel_head,{dims: [-1, 48]}]]", "must be one hog_head"),
        ("ijepa", "config.LOSS.ijepa_loss.target_scale=0.3", "must leave room for the context: 0.6 of the patches"),
        ("ijepa", "config.LOSS.ijepa_loss.target_ratio=[2, 1]", "the least and the largest"),
        ("ijepa", "config.MODEL.HEAD.PARAMS[0][1].dims=[-1,64,-1]", "config.MODEL.HEAD.PARAMS[0][1].dims: must end in"),
        ("data2vec", f"{_TRUNK}=false", f"{_TRUNK}: must be true for data2vec_loss"),
        ("data2vec", "config.LOSS.data2vec_loss.average_top_k_layers=4", "must be at most the trunk's 3 blocks"),
        ("ibot", "config.LOSS.ibot_loss.mask_ratio=[0.5, 0.1]", "two shares of the patches"),
        ("dinov2", "config.LOSS.dinov2_loss.mask_probability=2", "must be between 0 and 1"),
        ("msn", _SIZES, "must begin with two crops of the first size"),
    ],
)
def test_a_recipe_that_cannot_be_masked_is_refused(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _resolved(f"digits/{recipe}", override)
    assert message in str(refused.value)


class _Images:
    """A micro-batch of two images."""

    def __init__(self) -> None:
        self.images, self.num_crops, self.num_local = [torch.zeros(2, 3, 24, 24)], [1], 2


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("mae", "config.MODEL.HEAD.PARAMS=[[patch_predictor,{dims: [-1, 8, 50], num_heads: 2}]]", "a square patch, 48"),
        ("simmim", "config.MODEL.HEAD.PARAMS=[[pixel_head,{dims: [-1, 27]}]]", "numbers of the trunk's patches, 48"),
        ("simmim", "config.MODEL.HEAD.PARAMS=[[pixel_head,{dims: [-1, 24]}]]", "numbers of the trunk's patches, 48"),
        ("simmim", "config.LOSS.simmim_loss.mask_patch_size=6", "must be a multiple of the patches, 4"),
        ("maskfeat", "config.LOSS.maskfeat_loss.cell_size=3", "must divide the patches, 4 pixels (got 3). Write 4"),
        ("maskfeat", "config.LOSS.maskfeat_loss.cell_size=4", "cells of a patch (got 108). Write 27 in its place"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(recipe: str, override: str, message: str) -> None:
    plan = _resolved(f"digits/{recipe}", override)
    model, method, batch = build_model(plan.config.MODEL), build_method(plan.config.LOSS), _Images()
    set_random_key(0, 0, torch.arange(2))
    with pytest.raises(ConfigError) as refused:
        method.loss(method.run_student(model, batch), batch)  # type: ignore[arg-type]
    assert message in str(refused.value)


@pytest.mark.parametrize(("recipe", "dims"), [("mae", "[-1,8,-1]"), ("simmim", "[-1,-1]")])
@pytest.mark.parametrize(("patch", "channels"), [(4, 3), (6, 3), (4, 5)])
def test_pixels_of_the_trunks_patches_need_no_number(recipe: str, dims: str, patch: int, channels: int) -> None:
    of_trunk = f"config.MODEL.TRUNK.VISION_TRANSFORMERS.PATCH_SIZE={patch}"
    size = ["config.MODEL.TRUNK.VISION_TRANSFORMERS.IMAGE_SIZE=24", "config.DATA.IMG_SIZE=24"]
    keys = [f"config.MODEL.HEAD.PARAMS[0][1].dims={dims}", of_trunk, *size]
    plan = _resolved(f"digits/{recipe}", *keys, f"++config.LOSS.{recipe}_loss.mask_ratio=0.5")
    model = build_model(replace(plan.config.MODEL, IN_CHANNELS=channels))
    assert channels * patch * patch in [parameter.shape[0] for parameter in model.heads.parameters()]


def test_a_trunk_with_too_few_blocks_is_refused() -> None:
    """Of a trunk of timm's, whose depth the recipe does not say."""
    plan = _resolved("digits/data2vec")
    args = {"img_size": 24, "patch_size": 4, "depth": 1}
    keys = {"name": "vit_tiny_patch16_224", "use_mask_token": True, "model_args": args}
    config = {**asdict(plan.config.MODEL), "TRUNK": {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": keys}}
    config |= {"HEAD": {**config["HEAD"], "PARAMS": [["latent_head", {"dims": [-1, 192]}]]}}
    set_random_key(0, 0, torch.arange(2))
    with pytest.raises(ConfigError, match="at least the 2 blocks"):
        build_method(plan.config.LOSS).run_teacher(build_model(model_block(config)), _Images())  # type: ignore[arg-type]


def test_a_head_of_patches_needs_a_trunk_of_patches() -> None:
    plan = _resolved("digits/mae")
    config = {**asdict(plan.config.MODEL), "TRUNK": {"NAME": "resnet", "RESNETS": {"DEPTH": 18}}}
    with pytest.raises(ConfigError, match="must be a vision transformer"):
        build_model(
            model_block(config | {"HEAD": {**config["HEAD"], "PARAMS": [["patch_predictor", {"dims": [512, 16, 48]}]]}})
        )
