"""Progress as plain lines, for logs and pipes. ASCII, one line per message, nothing redrawn."""

from __future__ import annotations

import time

from rich.console import Console

from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.reporting.memory_kinds import total
from vissl_zero.reporting.progress import Progress
from vissl_zero.reporting.quantity import bytes_text, duration_text, figure_text

_LONGEST_SILENCE_S = 10.0


class PlainLines(Hook):
    """A line for the first step, for every ``every``-th, for the last, for the end of each epoch, and after a silence.

    Args:
        console: where to print.
        every: steps between lines (LOG_FREQUENCY).
    """

    def __init__(self, console: Console, every: int):
        self._console = console
        self._every = max(1, every)
        self._epoch_started = time.monotonic()
        self._epoch_losses: list[float] = []
        self._said = time.monotonic()

    def on_start(self, run: Run) -> None:
        self._progress = Progress(run)

    def on_epoch_start(self, run: Run) -> None:
        self._epoch_started = time.monotonic()
        self._epoch_losses.clear()
        # What hooks after this one measured at the end of the epoch before.
        names = {"top1_latest": "top-1 on TEST", "top5_latest": "top-5", "knn_top1_latest": "kNN top-1"}
        figures = {text: run.results.get(name) for name, text in names.items()}
        if said := ", ".join(f"{text} {100 * value:.1f} %" for text, value in figures.items() if value is not None):
            self._say(f"after epoch {run.epoch}: {said}")

    def on_step(self, run: Run, record: StepRecord) -> None:
        self._progress.update(record)
        if record.loss is not None:
            self._epoch_losses.append(record.loss)
        is_due = record.step % self._every == 0 or record.step == run.num_steps or len(run.records) == 1
        if is_due or time.monotonic() - self._said >= _LONGEST_SILENCE_S:
            self._say(step_line(run, record, self._progress))

    def on_epoch_end(self, run: Run) -> None:
        if self._epoch_losses:
            mean = sum(self._epoch_losses) / len(self._epoch_losses)
            took = duration_text(time.monotonic() - self._epoch_started)
            self._say(f"epoch {run.epoch + 1}/{run.plan.num_epochs} done in {took}, mean loss {mean:.4f}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


def step_line(run: Run, record: StepRecord, progress: Progress) -> str:
    """One step in about 100 columns; columns stay where they are from line to line."""
    width = len(str(run.num_steps))
    loss = "skipped" if record.loss is None else f"{record.loss:7.4f}"
    memory = bytes_text(total(record.bytes))
    return (
        f"epoch {record.epoch + 1}/{run.plan.num_epochs}  step {record.step:{width}d}/{run.num_steps}  loss {loss}  "
        f"lr {figure_text(record.lr, 3):<8}  {progress.images_per_s:6.0f} images/s  memory {memory:>8}  "
        f"{duration_text(progress.time_left_s)} left"
    )
