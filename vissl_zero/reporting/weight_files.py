"""Files of weights that a run writes: at its end, as a running average, and after every step.

``weights.safetensors``: the trained model's full parameters and buffers under their plain names.

``HOOKS.EMA_MODEL``: a running average of the weights, and ``weights_ema.safetensors`` at the end.

Full weights after every step, for comparing two runs parameter by parameter (``vissl-zero verify``).
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vissl_zero.atomic import replacing
from vissl_zero.checkpoint.folder import find_checkpoints
from vissl_zero.checkpoint.shard_file import Entry, in_file_order, write_shard_file
from vissl_zero.checkpoint.weights import (
    AVERAGED_WEIGHTS_FILE,
    BEST_WEIGHTS_FILE,
    TEACHER_WEIGHTS_FILE,
    WEIGHTS_FILE,
)
from vissl_zero.config.blocks.output import EmaModel
from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.errors import CheckpointError
from vissl_zero.evaluation.followed_figure import FollowedFigure
from vissl_zero.registry import HOOKS
from vissl_zero.resolve.followed_figure import BEST
from vissl_zero.sharding.state.shard import WholeTensor


class FinalWeights(Hook):
    """Gathers the whole model at the end of the run and writes it on rank 0.

    Cost: the model is gathered and written tensor by tensor; rank 0 has one full tensor in memory at a time.
    """

    def on_end(self, run: Run) -> None:
        _write(run, WEIGHTS_FILE)
        if run.method.has_teacher and run.method.teacher_follows:
            _write(run, TEACHER_WEIGHTS_FILE, which="teacher")


class BestWeights(Hook):
    """Writes ``weights_best.safetensors`` at the end of each epoch in which a metric has its best value so far.

    Place it after hooks that measure. It adds ``<metric>_best`` and ``best_step`` to the results. Cost: that of
    ``FinalWeights``, at each such epoch.

    Args:
        metric: ``CHECKPOINT.BEST_METRIC``.
    """

    def __init__(self, metric: str) -> None:
        self._figure = FollowedFigure(metric, BEST)
        self._best: list[float] = []  # step, value

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the state of the metric."""
        return {"best": self._best, **self._figure.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = list(state["best"])
        self._figure.load_state_dict(state)

    def on_record(self, run: Run, record: StepRecord) -> None:
        self._figure.add(record)

    def on_epoch_end(self, run: Run) -> None:
        """Keep the weights if they are the best. Collective."""
        self._keep_if_best(run, self._figure.at_epoch_end(run))

    def on_end(self, run: Run) -> None:
        """Keep the weights if they are the best. Collective."""
        self._keep_if_best(run, self._figure.at_end(run))

    def _keep_if_best(self, run: Run, figure: float | None) -> None:
        if figure is not None and self._figure.is_better(figure, self._best[1] if self._best else None):
            self._best = [run.step, figure]
            _write(run, BEST_WEIGHTS_FILE)
        if self._best:
            run.results[f"{self._figure.metric}_best"], run.results["best_step"] = self._best[1], self._best[0]


def _write(run: Run, name: str, which: str = "student") -> None:
    run.sharded.consolidate_buffers()  # running statistics may differ between ranks; the file has their mean
    with run.sharded.evaluated():
        _stream(run, name, run.sharded.whole_tensors() if which == "student" else run.sharded.whole_teacher_tensors())


def _stream(run: Run, name: str, tensors: Sequence[WholeTensor]) -> None:
    # transformers refuses a safetensors file that does not name its format.
    metadata = {"format": "pt", "recipe": run.plan.recipe, "step": str(run.step)}
    if run.method.ignored_label is not None and (classes := run.loader.source.class_names):
        metadata["classes"] = json.dumps(classes)
    try:
        stream_weights(tensors, run.folder / name, metadata, run.is_main)
    except OSError as error:
        fix = "Make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check the disk"
        has_any = bool(find_checkpoints(run.folder))
        after = "resumes from the last checkpoint" if has_any else "trains from the start, for there is no checkpoint"
        raise CheckpointError(
            f"{run.folder / name} cannot be written ({error}). {fix}; the same command {after}."
        ) from error


def stream_weights(tensors: Sequence[WholeTensor], path: Path, metadata: dict[str, str], is_writer: bool) -> None:
    """Gather tensors one by one, and write them to a safetensors file with checksums.

    Collective. The file is replaced only once it is complete; one full tensor at a time is in memory.

    Args:
        tensors: tensors to gather; the same on every rank.
        path: path of the file.
        metadata: strings for the file's header.
        is_writer: whether this rank writes the file; the others only take part in the gathers.
    Raises:
        OSError: the writer cannot write. It raises after all tensors are gathered, so other ranks do not wait.
    """
    queue = deque(in_file_order(Entry(t.name, t.dtype, t.shape, t.read) for t in tensors))
    try:
        if is_writer:
            # All entries read from one queue: what is left in it after an error is what other ranks still wait to
            # gather.
            entries = [replace(entry, read=lambda: queue.popleft().read()) for entry in queue]
            with replacing(path) as temporary:
                write_shard_file(temporary, entries, metadata, with_checksums=True)
    finally:
        while queue:  # on other ranks all tensors; on the writer those not yet gathered when the disk was full
            queue.popleft().read()


class WeightAverageHook(Hook):
    """Keeps a running average of the weights, as VISSL's ``EmaHook``: a copy during warm-up, an average after it.

    Skipped steps do not change it. Cost: another copy of a rank's parameters; communication only at the end.

    Args:
        options: UPDATE_ITER, WARMUP and DECAY.
    """

    def __init__(self, options: EmaModel):
        self._options = options
        self._has_begun = False

    def on_step(self, run: Run, step: Step) -> None:
        """Update the average in the first step, and every UPDATE_ITER steps after it."""
        if step.skipped or (step.step - 1) % self._options.UPDATE_ITER:
            return
        self._has_begun = True
        # Of the whole recipe, not ``run.num_steps``, which a limit of steps or an early stop shortens.
        length = run.steps_per_epoch * run.plan.num_epochs
        is_warm = (step.step - 1) / length >= self._options.WARMUP
        # A decay of 0 copies the weights.
        run.sharded.average(self._options.DECAY if is_warm else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return whether there is an average; the model's state has the average itself."""
        return {"has_begun": self._has_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; see ``Hook``."""
        self._has_begun = bool(state["has_begun"])

    def on_end(self, run: Run) -> None:
        """Gather the average tensor by tensor; rank 0 writes it. Collective."""
        if not self._has_begun:
            return
        with run.sharded.averaged():
            run.sharded.consolidate_buffers()  # as in weights.safetensors
            _stream(run, AVERAGED_WEIGHTS_FILE, run.sharded.whole_tensors())


FOLDER = "weight_trace"


@HOOKS.register("weight_trace")
class WeightTrace(Hook):
    """Saves the full weights after every step into the run folder's weight_trace/ (large: one model per step)."""

    def on_start(self, run: Run) -> None:
        """Save the first weights as step 0. Collective."""
        self._save(run, 0)

    def on_step(self, run: Run, step: Step) -> None:
        """Save the weights after the step. Collective."""
        self._save(run, step.step)

    def _save(self, run: Run, step: int) -> None:
        folder = run.folder / FOLDER
        if run.is_main:
            folder.mkdir(exist_ok=True)
        path = folder / f"{step:06d}.safetensors"
        stream_weights(run.sharded.whole_tensors(), path, {"step": str(step)}, run.is_main)
