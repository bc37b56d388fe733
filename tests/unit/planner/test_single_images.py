"""A last step with one image on a rank is refused before training, where batch norm needs more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.engine.build import build_run
from vissl_zero.errors import ConfigError
from vissl_zero.launch.worker import _refuse_single_images
from vissl_zero.planner.dry_run import set_stage
from vissl_zero.resolve.resolved import ResolvedRun

REFUSED = r"config\.DATA\.TRAIN: must leave more than one image to a rank.*DROP_LAST=True"


def plan(num_images: int, size: int = 0, **changes: Any) -> ResolvedRun:
    """Return a plan of 16 images a step; the last feature map has one pixel, unless images are larger."""
    config = make_config()
    config["DATA"]["TRAIN"] |= {"DATA_LIMIT": num_images, "DROP_LAST": False}
    if size:
        config["DATA"]["TRAIN"]["TRANSFORMS"].insert(0, {"name": "Resize", "size": [size, size]})
    return make_plan(config, **changes)


def test_it_is_refused_by_the_dry_run_and_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        set_stage(plan(65))
    run, *_ = build_run(plan(65), torch.device("cpu"))
    with pytest.raises(ConfigError, match=REFUSED):
        _refuse_single_images(run)


@pytest.mark.parametrize(
    "harmless",
    [
        plan(66),
        plan(65, size=32),  # batch norm has several pixels of the image
        plan(65, max_steps=4),  # ends before the last step of the epoch
        plan(66, world_size=2),  # synchronized: the ranks have two images together
    ],
)
def test_what_trains_is_not_refused(harmless: ResolvedRun) -> None:
    set_stage(harmless)


def test_ranks_with_batch_norm_of_their_own_need_two_images_each() -> None:
    together = plan(67, world_size=2)
    alone = replace(together, sharding=replace(together.sharding, sync_bn_group=0))
    with pytest.raises(ConfigError, match=REFUSED):
        set_stage(alone)
