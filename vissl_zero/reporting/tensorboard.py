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
    """Loss, learning rate, speed, gradient norm, the criterion's own figures, memory by kind and evaluation results.

    Cost: about 0.1 ms per figure and step, on rank 0; files are written by TensorBoard's own thread.
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

    def on_step(self, run: Run, record: StepRecord) -> None:
        if self._writer is None:
            return
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record.step)

    def on_epoch_start(self, run: Run) -> None:
        self._write_results(run)  # what hooks after this one found at the end of the epoch before

    def on_end(self, run: Run) -> None:
        self._write_results(run)

    def close(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_results(self, run: Run) -> None:
        """Evaluation results that are new or have changed."""
        if self._writer is None:
            return
        for name, value in run.results.items():
            if isinstance(value, int | float) and self._written.get(name) != value:
                self._writer.add_scalar(f"evaluation/{name}", value, run.step)
                self._written[name] = value


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
