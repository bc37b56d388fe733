"""The events that the training loop reports to hooks.

Hooks are how metrics, display, evaluation and reports attach to a run; the loop knows none of them. Every hook runs on
every rank (some of them call collectives); one that only writes files checks ``run.is_main``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from vissl_zero.engine.passes import InPasses
from vissl_zero.engine.stopping import Stop
from vissl_zero.sharding.memory import Bytes
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.update.histograms import Histograms

if TYPE_CHECKING:
    from vissl_zero.data.dataset import ImageBatch
    from vissl_zero.data.loader import Loader
    from vissl_zero.engine.teacher_features import TeacherFeatures
    from vissl_zero.methods.method import Method
    from vissl_zero.methods.online_probe import OnlineProbe
    from vissl_zero.models.model import Model
    from vissl_zero.resolve.resolved import ResolvedRun

TEACHER_CHECKSUM = "teacher_checksum"  # among results: of a frozen teacher, which checkpoints leave out


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step as soon as it was launched, with the figures that each rank knows by itself.

    Rank 0 writes its own. They are equal on every rank except for ``bytes``, ``data_wait`` and, by little,
    ``images_per_s``.

    Attributes:
        step: optimizer steps so far, this one included (the first is 1).
        epoch: epoch of the step, from 0.
        lr: learning rate of the trunk.
        images_per_s: source images per second over all ranks, data loading included.
        data_wait: share of the step's time in which this rank waited for its loader, 0 to 1.
        bytes: this rank's memory by kind, as it was last measured.
        skipped: the loss scaler skipped the update.
        loss_scale: 1.0 without loss scaling.
    """

    step: int
    epoch: int
    lr: float
    images_per_s: float
    bytes: Bytes
    data_wait: float = 0.0
    skipped: bool = False
    loss_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StepRecord(Step):
    """A step with its figures, computed by the device and summed over the ranks.

    Attributes:
        loss: mean over the step's samples (all ranks and micro-batches), float64; None if the step was skipped.
        grad_norm: global L2 norm before clipping; None if the step was skipped.
        watch: figures of the method on its own health (``Method.health``); empty at steps that are not logged.
    """

    loss: float | None
    grad_norm: float | None = None
    watch: dict[str, float] = field(default_factory=dict)


class Records(Sequence[StepRecord]):
    """The steps of a run in order, in bounded memory: all of a short run, every 2nd, 4th, ... of a long one.

    The first ones (``HEAD``) and the newest are always kept.
    """

    HEAD = 64
    MOST = 4096

    def __init__(self, records: Iterable[StepRecord] = ()):
        self._kept: list[tuple[int, StepRecord]] = []  # with their place among all
        self._newest: StepRecord | None = None  # where it is not kept
        self._num_seen = 0
        self._stride = 1
        for record in records:
            self.append(record)

    def append(self, record: StepRecord) -> None:
        """Add the next step."""
        place, self._newest = self._num_seen, record
        self._num_seen += 1
        if self._is_kept(place):
            self._kept.append((place, record))
            self._newest = None
        if len(self._kept) > self.MOST:
            self._stride *= 2
            self._newest = self._newest or record
            self._kept = [row for row in self._kept if self._is_kept(row[0])]
            if self._kept[-1][1] is record:
                self._newest = None

    def _is_kept(self, place: int) -> bool:
        return place < self.HEAD or place % self._stride == 0

    def __len__(self) -> int:
        return len(self._kept) + (self._newest is not None)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        return list(self)[index]

    def __iter__(self) -> Iterator[StepRecord]:
        yield from (record for _, record in self._kept)
        if self._newest is not None:
            yield self._newest


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
        records: steps so far, thinned out in a long run; on rank 0 also those before a resume, from ``metrics.jsonl``.
        first_step: optimizer steps done when this process began; not 0 where it resumes from a checkpoint.
        is_asked_to_stop: some rank was asked to save and stop (``engine/stopping.py``), according to the newest
            record; equal on every rank.
        histograms: histograms of the newest step, where HOOKS.HISTOGRAMS_EVERY asks for them; else None.
        lr_factor: set by a hook, equal on every rank: what the schedules' learning rates are multiplied by from now on.
        stop: set by a hook, equal on every rank: leave the loop after this step, without ``on_end``.
        unsettled: reads the figures of the newest step; None where that has been done. See ``settle``.
        bytes: this rank's memory by kind, as it was last measured.
        evaluated_model: the model inside ``sharded`` that EVALUATED_MODEL names, for the features that it keeps of its
            newest pass (``kept_features``).
        teacher_features: what a frozen teacher gives, on disk; None: it is run in each step.
        results: figures for ``summary.json`` that hooks add (``knn_top1_before`` ...).
        captured: set by a hook: the folder of the newest bad step that was captured, named by its number.
    """

    plan: ResolvedRun
    sharded: ShardedModel
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
    histograms: Histograms | None = None
    lr_factor: float = 1.0
    stop: Stop | None = None
    unsettled: Callable[[], None] | None = None
    records: Records = field(default_factory=Records)
    bytes: Bytes = field(default_factory=Bytes)
    evaluated_model: Model | None = None
    teacher_features: TeacherFeatures | None = None
    results: dict[str, Any] = field(default_factory=dict)
    captured: Path | None = None

    def is_due(self, every_num_epochs: int) -> bool:
        """Check whether the epoch that ends is one to measure: each so many, but for the last, which the end measures.

        Args:
            every_num_epochs: 0: none is.
        """
        is_one = every_num_epochs > 0 and (self.epoch + 1) % every_num_epochs == 0
        return is_one and self.step < self.num_steps

    def settle(self) -> None:
        """Read the figures of the newest step now instead of a step later; every rank must. Waits for the device.

        Before anything that must not be made of a step that went wrong (a checkpoint), or that needs its record.

        Raises:
            DivergedError: the loss of that step is not finite.
        """
        unsettled, self.unsettled = self.unsettled, None
        if unsettled is not None:
            unsettled()

    @property
    def probe(self) -> OnlineProbe | None:
        """The classifier that is trained beside the model (``ONLINE_PROBE``)."""
        probe: OnlineProbe | None = getattr(self.method, "online_probe", None)
        return probe

    @torch.no_grad()
    def run_teacher(self, batch: ImageBatch) -> list[Any]:
        """Compute the teacher's outputs for a micro-batch, or read them where they are kept. Collective."""

        def compute() -> list[Any]:
            return self.method.run_teacher(self.in_passes(self.sharded.teacher), batch)

        if self.teacher_features is None:
            return compute()
        return self.teacher_features.outputs(self.epoch, batch.sample_ids, compute)

    def in_passes(self, model: nn.Module) -> Any:
        """Return what stands in for a model that is run without graph: in fewer passes than CROP_PASSES says.

        Such a pass holds one layer's activations at a time, which are less than a quarter of a whole model's.
        """
        number = -(-self.plan.crop_passes // 4)
        return (
            model if number == 1 else InPasses(model, number, self.plan.config.MODEL.VIEWS_APART, self.evaluated_model)
        )

    def show_probe(self, batch: ImageBatch) -> None:
        """Let the probe learn from the features of the newest forward pass, which was of ``batch``."""
        if self.probe is not None and self.evaluated_model is not None:
            self.probe.learn(self.evaluated_model.kept_features, batch)

    @property
    def is_resumed(self) -> bool:
        """The run resumes from a checkpoint: anything done once at the start has been done."""
        return self.first_step > 0

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes files and talks to the user."""
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.plan.run_dir)


class Hook:
    """Base of all hooks; override what you need. Called in the order hooks were given, on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as JSON; rank 0's is saved. Not a collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned; on every rank, before ``on_start``."""

    def on_start(self, run: Run) -> None:
        """Run after the model was sharded (and its checkpoint loaded, if ``run.is_resumed``), before the next step."""

    def on_epoch_start(self, run: Run) -> None:
        """Run before the first step of ``run.epoch``, or before the next one where a run resumes in mid-epoch."""

    def on_batch(self, run: Run, micro_batches: Sequence[ImageBatch]) -> None:
        """Run before every optimizer step, ``run.step`` being those done, with this rank's part, on the CPU."""

    def before_update(self, run: Run, figures: Callable[[], tuple[float, float]]) -> None:
        """Run after the last backward pass of every step, while nothing is updated yet.

        Args:
            run: run in progress; of its state, only what a forward pass changes is no longer that before the step.
            figures: gives the step's loss and gradient norm, as its record will have them. The first call is a
                collective and waits for the device, which has nothing to do until the update follows.
        """

    def on_step(self, run: Run, step: Step) -> None:
        """Run after every optimizer step, for what must see the model as that step left it."""

    def on_record(self, run: Run, record: StepRecord) -> None:
        """Take the figures of every step, in order, after the step that follows or where an epoch or the run ends.

        So the loop need not wait for the device. ``run.step`` may be one ahead of ``record.step``.
        """

    def on_epoch_end(self, run: Run) -> None:
        """Run after the last step of ``run.epoch``."""

    def on_end(self, run: Run) -> None:
        """Run after the last step of the run (not after an error)."""

    def close(self, run: Run) -> None:
        """Release files and the terminal. Runs always, also after an error. Never a collective; must not raise."""
