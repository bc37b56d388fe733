"""Runs that learn from other weights: their losses, step by step."""

from __future__ import annotations

import torch

from vissl_zero.checkpoint.first_weights import load_teacher
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.engine.loop import train
from vissl_zero.resolve.resolved import ResolvedRun


class Losses(Hook):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_record(self, run: Run, record: StepRecord) -> None:
        assert record.loss is not None
        self.values.append(record.loss)


def distill(plan: ResolvedRun) -> tuple[Run, list[float]]:
    """Train with the teacher that the plan names; the run, closed, and its losses."""
    losses = Losses()
    run, schedules, frozen = build_run(plan, torch.device("cpu"), fill_teacher=lambda model: load_teacher(model, plan))
    try:
        train(run, schedules, frozen, [losses])
    finally:
        run.sharded.close()
    return run, losses.values


def losses_of(plan: ResolvedRun) -> list[float]:
    return distill(plan)[1]
