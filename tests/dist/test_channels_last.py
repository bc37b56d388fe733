"""MODEL.CHANNELS_LAST: convolutions see images laid out channels last, and the weights come out the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from tests.dist.test_method_parity import TOLERANCE, Result, _train, make_method_plan, plain
from tests.ranks import run_on_ranks
from vissl_zero.engine.build import build_run
from vissl_zero.resolve.resolved import ResolvedRun


def _laid_out(plan: ResolvedRun) -> ResolvedRun:
    model = dataclasses.replace(plan.config.MODEL, CHANNELS_LAST=True)
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, MODEL=model))


def _cells(method: str, norm: str, world_size: int) -> list[Result]:
    return [_train(_laid_out(make_method_plan(method, level, world_size, norm))) for level in (0, 3)]


@pytest.mark.parametrize(("method", "norm"), [("swav", "batch"), pytest.param("mae", "vit", marks=pytest.mark.slow)])
def test_levels_give_the_weights_of_the_plain_loop(method: str, norm: str) -> None:
    for result in run_on_ranks(2, _cells, method, norm, 2)[0]:
        assert result.distance(plain(method, norm)) < TOLERANCE


def test_every_convolution_sees_that_layout() -> None:
    plan = _laid_out(make_method_plan("swav", 0, 1, "batch"))
    run, _, _ = build_run(plan, torch.device("cpu"))
    layouts: list[bool] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layouts.extend(one.is_contiguous(memory_format=torch.channels_last) for one in (*inputs, output))

    convolutions = [module for module in run.sharded.model.modules() if isinstance(module, nn.Conv2d)]
    for module in convolutions:
        module.register_forward_hook(note)
    with torch.no_grad():
        run.sharded.model([torch.rand(4, 3, 8, 8, dtype=torch.float64)])
    assert len(layouts) == 2 * len(convolutions) > 0 and all(layouts)
