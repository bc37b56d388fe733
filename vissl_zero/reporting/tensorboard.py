"""TensorBoard event files in the run folder."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.reporting.memory_kinds import KINDS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER_NAME = "tensorboard"
_FLUSH_S = 10


class TensorBoard(Hook):
    """Loss, learning rate, speed, gradient norm, the method's own figures, memory by kind and evaluation results.

    Cost: 0.05 ms per step, on rank 0; files are written by TensorBoard's own thread.
    """

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None
        self._written: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        from torch.utils.tensorboard import SummaryWriter  # 1 s, so only where it is used

        # A resumed run does again what came after its checkpoint: purge_step hides the first try.
        purge_step = run.step + 1 if run.step else None
        self._writer = SummaryWriter(str(run.folder / FOLDER_NAME), purge_step=purge_step, flush_secs=_FLUSH_S)
        self._write_results(run)

    def on_record(self, run: Run, record: StepRecord) -> None:
        self._write(scalars(record), record.step)

    def on_epoch_start(self, run: Run) -> None:
        self._write_results(run)  # what hooks after this one found at the end of the epoch before

    def on_end(self, run: Run) -> None:
        self._write_results(run)

    def close(self, run: Run) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(error)
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        """A disk that is full does not end the run; its event files end here."""
        self._writer = None
        print(f"warning: {FOLDER_NAME} cannot be written any more ({error.strerror}); training continues.", flush=True)

    def _write_results(self, run: Run) -> None:
        """Evaluation results that are new or have changed."""
        results = {name: value for name, value in run.results.items() if isinstance(value, int | float)}
        new = {name: value for name, value in results.items() if self._written.get(name) != value}
        self._written.update(new)
        self._write({f"evaluation/{name}": float(value) for name, value in new.items()}, run.step)

    def _write(self, figures: dict[str, float], step: int) -> None:
        """All figures of a step as one event: 0.05 ms, where an ``add_scalar`` for each takes 0.7."""
        if self._writer is None or not figures:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self._writer.file_writer is not None
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        try:
            self._writer.file_writer.add_summary(Summary(value=values), step)
        except OSError as error:  # its thread's, of an earlier write
            self._give_up(error)


def scalars(record: StepRecord) -> dict[str, float]:
    """What is written for one step: tag -> finite number."""
    found = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/images_per_s": record.images_per_s,
        "train/grad_norm": record.grad_norm,
        "train/loss_scale": record.loss_scale,
        "memory/peak": record.bytes.peak,
    }
    found |= {f"watch/{name}": value for name, value in record.watch.items()}
    found |= {f"memory/{kind}": getattr(record.bytes, kind) for kind in KINDS}
    return {tag: float(value) for tag, value in found.items() if value is not None and math.isfinite(value)}
