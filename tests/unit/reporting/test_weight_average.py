"""The running average of the weights follows as VISSL's does."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from vissl_zero.config.blocks.output import EmaModel
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError
from vissl_zero.reporting import weight_files
from vissl_zero.reporting.weight_files import WeightAverageHook
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve

RECIPE = "quickstart/swav_digits"
PROTOTYPES = "heads.0.prototypes0.weight"
OPTIONS = EmaModel(SAVE_EMA_MODEL=True, UPDATE_ITER=2, WARMUP=0.05, DECAY=0.75)


class Trace(Hook):
    """Remembers a weight after each step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_step(self, run: Run, step: Step) -> None:
        self.weights.append(weight_of(run))


def weight_of(run: Run) -> Tensor:
    return dict(run.sharded.model.named_parameters())[PROTOTYPES].detach().clone()


def test_an_average_copies_in_the_warm_up_and_follows_after_it(tmp_path: Path) -> None:
    """vissl/hooks/ema_hooks.py ``on_update``, whose iterations count from 0."""
    overrides = ("config.ZERO.LEVEL=0", "config.TRAINER.MAX_STEPS=6", "config.OPTIMIZER.num_epochs=1")
    plan = resolve(compose(RECIPE, overrides).run, tmp_path, recipe=RECIPE, host=Host(num_cores=1))
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    trace = Trace()
    train(run, schedules, frozen, [trace, WeightAverageHook(OPTIONS)])
    expected = trace.weights[0]
    for iteration, weight in enumerate(trace.weights):
        if iteration % 2 == 0:
            is_warm = iteration / run.steps_per_epoch >= 0.05
            expected = 0.75 * expected + 0.25 * weight if is_warm else weight
    assert [iteration / run.steps_per_epoch >= 0.05 for iteration in (0, 2, 4)] == [False, False, True]
    with run.sharded.averaged():
        torch.testing.assert_close(weight_of(run), expected)
    run.sharded.close()
    with safe_open(tmp_path / "weights_ema.safetensors", "pt") as file:
        torch.testing.assert_close(file.get_tensor(PROTOTYPES), expected)
        assert file.metadata()["format"] == "pt"  # transformers refuses a file without


@pytest.mark.parametrize(
    ("number", "has_checkpoint", "says"),
    [
        (errno.ENOSPC, False, r"No space left.*\)\. Make room; .* trains from the start, for there is no checkpoint\."),
        (
            errno.EIO,
            True,
            r"Input/output error\)\. Check the disk; .* resumes from the last checkpoint\.",
        ),
    ],
)
def test_a_disk_that_takes_no_weights_is_named_with_the_file_and_what_comes_after(
    number: int, has_checkpoint: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(weight_files, "write_shard_file", refuse)
    overrides = ["config.ZERO.LEVEL=0", "config.TRAINER.MAX_STEPS=1"]
    plan = resolve(compose(RECIPE, overrides).run, tmp_path, recipe=RECIPE, host=Host(num_cores=1))
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    monkeypatch.setattr(weight_files, "find_checkpoints", lambda _: [tmp_path] * has_checkpoint)
    with pytest.raises(CheckpointError, match=rf"weights_ema\.safetensors cannot be written \(.*{says}"):
        train(run, schedules, frozen, [WeightAverageHook(OPTIONS)])
    run.sharded.close()
