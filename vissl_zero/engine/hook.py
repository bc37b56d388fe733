"""The interface of hooks: the events that the training loop reports, and the state of the run.

Metrics, display, evaluation and reports are hooks; the loop knows none of them. Every hook runs on every rank, because
some hooks call collectives. A hook that only writes files checks ``run.is_main``.
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

TEACHER_CHECKSUM = "teacher_checksum"  # key of ``Run.results``; checkpoints have it instead of a frozen teacher


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step with the values that each rank knows without communication.

    They are equal on every rank, except ``bytes``, ``data_wait`` and (slightly) ``images_per_s``.

    Attributes:
        step: optimizer steps so far, this one included (the first is 1).
        epoch: epoch of the step, from 0.
        lr: learning rate of the trunk.
        images_per_s: source images per second over all ranks, data loading included.
        data_wait: share of the step's time in which this rank waited for its loader, 0 to 1.
        bytes: this rank's memory by kind at the last measurement.
        skipped: the loss scaler skipped the update.
        loss_scale: 1.0 without loss scaling.
        num_samples: source images of the step, over all ranks and micro-batches.
    """

    step: int
    epoch: int
    lr: float
    images_per_s: float
    bytes: Bytes
    data_wait: float = 0.0
    skipped: bool = False
    loss_scale: float = 1.0
    num_samples: int = 1  # for metrics.jsonl of earlier versions, which lacks it


@dataclass(frozen=True, kw_only=True)
class StepRecord(Step):
    """A step with the values that the device computes and that are summed over ranks.

    Attributes:
        loss: mean over the step's samples (all ranks and micro-batches), float64; None if the step was skipped.
        grad_norm: global L2 norm before clipping; None if the step was skipped.
        watch: health metrics of the method (``Method.health``); empty at steps that are not logged.
    """

    loss: float | None
    grad_norm: float | None = None
    watch: dict[str, float] = field(default_factory=dict)


@dataclass
class MeanLoss:
    """The mean loss over the samples of several steps: the last step of an epoch may have fewer than the others."""

    total: float = 0.0
    num_samples: int = 0

    def add(self, record: StepRecord) -> None:
        """Add a step, unless it was skipped."""
        if record.loss is not None:
            self.total += record.loss * record.num_samples
            self.num_samples += record.num_samples

    @property
    def value(self) -> float | None:
        """Return the mean; None if every step was skipped."""
        return self.total / self.num_samples if self.num_samples else None


class Records(Sequence[StepRecord]):
    """The steps of a run in order, in bounded memory: all steps of a short run, every 2nd, 4th, ... of a long run.

    The first ``HEAD`` steps and the newest step are always kept.
    """

    HEAD = 64
    MOST = 4096

    def __init__(self, records: Iterable[StepRecord] = ()):
        self._kept: list[tuple[int, StepRecord]] = []  # with the index among all steps
        self._newest: StepRecord | None = None  # the newest step, if it is not in _kept
        self._num_seen = 0
        self._stride = 1
        for record in records:
            self.append(record)

    def append(self, record: StepRecord) -> None:
        """Add the next step."""
        index, self._newest = self._num_seen, record
        self._num_seen += 1
        if self._is_kept(index):
            self._kept.append((index, record))
            self._newest = None
        if len(self._kept) > self.MOST:
            self._stride *= 2
            # The doubled stride may drop the newest record, which is kept until the next one comes.
            self._newest = self._newest or record
            self._kept = [row for row in self._kept if self._is_kept(row[0])]
            if self._kept[-1][1] is record:
                self._newest = None

    def _is_kept(self, index: int) -> bool:
        return index < self.HEAD or index % self._stride == 0

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
        method: the loss, and the inputs of student and teacher.
        loader: training data.
        device: device of the model.
        rank, world_size: rank of this process, and number of ranks.
        steps_per_epoch, num_steps: optimizer steps per epoch, and of the whole run (at most MAX_STEPS).
        step, epoch, position: optimizer steps done, epoch in progress, and source images consumed in total.
        epoch_samples: source images consumed in this epoch, over all ranks.
        records: steps so far, thinned out in a long run; on rank 0 also steps before a resume, from ``metrics.jsonl``.
        first_step: optimizer steps done when this process started: above 0 if it resumed from a checkpoint.
        is_asked_to_stop: by the newest record, some rank has a request to save and stop (``engine/stopping.py``);
            equal on every rank.
        histograms: histograms of the newest step, every HOOKS.HISTOGRAMS_EVERY steps; else None.
        lr_factor: set by a hook, equal on every rank: factor of the schedules' learning rates from now on.
        stop: set by a hook, equal on every rank: leave the loop after this step, without ``on_end``.
        unsettled: function that completes the record of the newest step; None: it is complete. See ``settle``.
        bytes: this rank's memory by kind at the last measurement.
        evaluated_model: the model inside ``sharded`` that EVALUATED_MODEL names; it keeps the features of its newest
            pass (``kept_features``).
        teacher_features: cache of a frozen teacher's outputs on disk; None: the teacher runs in each step.
        results: values for ``summary.json`` that hooks add (``knn_top1_before`` ...).
        captured: set by a hook: folder of the newest captured bad step, named by the step's number.
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
        """Check whether to measure at the end of this epoch: every ``every_num_epochs``, except at the end of the run.

        Args:
            every_num_epochs: period in epochs; 0: never.
        """
        # Hooks measure in ``on_end`` too, so at the end of the run the measurement would be made twice.
        is_one = every_num_epochs > 0 and (self.epoch + 1) % every_num_epochs == 0
        return is_one and self.step < self.num_steps

    def settle(self) -> None:
        """Complete the record of the newest step now instead of a step later. Collective; waits for the device.

        Call it before using that record, or before saving state that must not come from a diverged step.

        Raises:
            DivergedError: the loss of that step is not finite.
        """
        # Cleared before the call: a hook that receives the record may call settle() itself.
        unsettled, self.unsettled = self.unsettled, None
        if unsettled is not None:
            unsettled()

    @property
    def probe(self) -> OnlineProbe | None:
        """Return the classifier that is trained along with the model (``ONLINE_PROBE``); None without one."""
        probe: OnlineProbe | None = getattr(self.method, "online_probe", None)
        return probe

    @torch.no_grad()
    def run_teacher(self, batch: ImageBatch) -> list[Any]:
        """Compute the teacher's outputs for a micro-batch, or read them from the cache. Collective."""

        def compute() -> list[Any]:
            return self.method.run_teacher(self.in_passes(self.sharded.teacher), batch)

        if self.teacher_features is None:
            return compute()
        return self.teacher_features.outputs(self.epoch, batch.sample_ids, compute)

    def in_passes(self, model: nn.Module) -> Any:
        """Return a stand-in for ``model`` that runs without graph, in a quarter of CROP_PASSES (rounded up)."""
        # Without graph only one layer's activations are alive, less than a quarter of the whole model's.
        number = -(-self.plan.crop_passes // 4)
        return (
            model if number == 1 else InPasses(model, number, self.plan.config.MODEL.VIEWS_APART, self.evaluated_model)
        )

    def show_probe(self, batch: ImageBatch) -> None:
        """Train the probe on the kept features of the newest forward pass, which must be of ``batch``."""
        if self.probe is not None and self.evaluated_model is not None:
            self.probe.learn(self.evaluated_model.kept_features, batch)

    @property
    def is_resumed(self) -> bool:
        """Check whether the run resumed from a checkpoint, so that one-time actions at the start are done already."""
        return self.first_step > 0

    @property
    def is_main(self) -> bool:
        """Check whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.plan.run_dir)


class Hook:
    """Base class of hooks; override the methods you need. The loop calls all hooks in order, on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save for a resume, of JSON types; rank 0's is saved. Must not call collectives."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``. Called on every rank, before ``on_start``."""

    def on_start(self, run: Run) -> None:
        """Run after the model was sharded (and its checkpoint loaded, if ``run.is_resumed``), before the next step."""

    def on_epoch_start(self, run: Run) -> None:
        """Run before the first step of ``run.epoch``, or before the next step if the run resumes in mid-epoch."""

    def on_batch(self, run: Run, micro_batches: Sequence[ImageBatch]) -> None:
        """Run before every optimizer step, with this rank's micro-batches, on the CPU; ``run.step`` steps are done."""

    def before_update(self, run: Run, figures: Callable[[], tuple[float, float]]) -> None:
        """Run after the last backward pass of every step, before the update.

        Args:
            run: run in progress; since the step began, only forward passes have changed its state (buffers).
            figures: returns the step's loss and gradient norm, equal to those of its record. The first call is a
                collective, and waits for the device, which then idles until the update.
        """

    def on_step(self, run: Run, step: Step) -> None:
        """Run after every optimizer step, while the model is as this step left it."""

    def on_record(self, run: Run, record: StepRecord) -> None:
        """Run for every step in order, one step later (or at the end of an epoch), so the loop need not wait.

        ``run.step`` may be one ahead of ``record.step``.
        """

    def on_epoch_end(self, run: Run) -> None:
        """Run after the last step of ``run.epoch``."""

    def on_end(self, run: Run) -> None:
        """Run after the last step of the run (not after an error)."""

    def close(self, run: Run) -> None:
        """Release files and the terminal. Always called, also after an error; must not raise or call collectives."""
