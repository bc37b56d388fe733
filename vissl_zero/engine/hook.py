"""What the training loop tells the rest of the program, and when.

Hooks are how metrics, display, evaluation and reports attach to a run; the loop knows none of them. Every hook runs on
every rank (some of them call collectives); one that only writes files checks ``run.is_main``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vissl_zero.engine.stopping import Stop
from vissl_zero.sharding.strategy import Bytes, Sharded

if TYPE_CHECKING:
    from vissl_zero.config.resolved import ResolvedRun
    from vissl_zero.data.loader import Loader
    from vissl_zero.methods.method import Method


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step, equal on every rank but for ``bytes``.

    Attributes:
        step: optimizer steps so far, this one included (the first is 1).
        epoch: of the step, from 0.
        loss: mean over the step's samples (all ranks and micro-batches), float64; None if the step was skipped.
        lr: learning rate of the trunk.
        images_per_s: source images per second over all ranks, data loading included.
        bytes: this rank's memory by kind, as it was last measured.
        skipped: the loss scaler skipped the update.
        grad_norm: global L2 norm before clipping; None if the step was skipped.
        loss_scale: 1.0 without loss scaling.
        watch: figures of the method on its own health (``Method.health``), possibly empty.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float
    images_per_s: float
    bytes: Bytes
    skipped: bool = False
    grad_norm: float | None = None
    loss_scale: float = 1.0
    watch: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A run in progress, as hooks see it.

    Attributes:
        plan: the resolved configuration.
        sharded: model and optimizer.
        method: what is learned: the loss, what student and teacher see.
        loader: training data.
        device: where the model computes.
        rank, world_size: global.
        steps_per_epoch, num_steps: length of the schedule, and the step the run will end at (MAX_STEPS included).
        step, epoch, position: optimizer steps done, epoch in progress, source images consumed in all.
        epoch_samples: source images of that epoch consumed, over all ranks.
        records: every step so far, those before a resume as ``metrics.jsonl`` has them.
        first_step: optimizer steps done when this process began; not 0 where it goes on from a checkpoint.
        is_asked_to_stop: some rank was asked to save and stop (``engine/stopping.py``) before the end of the last step;
            alike on every rank.
        stop: set by a hook, alike on every rank: leave the loop after this step, without ``on_end``.
        results: figures for ``summary.json`` that hooks add (``knn_top1_before`` ...).
    """

    plan: ResolvedRun
    sharded: Sharded
    method: Method
    loader: Loader
    device: torch.device
    rank: int
    world_size: int
    steps_per_epoch: int
    num_steps: int
    step: int = 0
    epoch: int = 0
    position: int = 0
    epoch_samples: int = 0
    first_step: int = 0
    is_asked_to_stop: bool = False
    stop: Stop | None = None
    records: list[StepRecord] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def is_resumed(self) -> bool:
        """The run goes on from a checkpoint: what is done once, at the start, was done."""
        return self.first_step > 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.plan.run_dir)


class Hook:
    """Base of all hooks; override what you need. Called in the order hooks were given, on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """What the hook must know again after a resume, as JSON can hold it; rank 0's is kept. Not a collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; on every rank, before ``on_start``."""

    def on_start(self, run: Run) -> None:
        """After the model was sharded (and its checkpoint loaded, if ``run.is_resumed``), before the next step."""

    def on_epoch_start(self, run: Run) -> None:
        """Before the first step of ``run.epoch``, or before the next one where a resumed run is in the middle of it."""

    def on_step(self, run: Run, record: StepRecord) -> None:
        """After every optimizer step."""

    def on_epoch_end(self, run: Run) -> None:
        """After the last step of ``run.epoch``."""

    def on_end(self, run: Run) -> None:
        """After the last step of the run (not after an error)."""

    def close(self, run: Run) -> None:
        """Always, also after an error: release files and the terminal. Never a collective; must not raise."""
