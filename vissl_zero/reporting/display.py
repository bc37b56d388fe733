"""Progress on rank 0: a few lines redrawn in place on a terminal, plain ASCII lines in logs and pipes."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import replace

import rich
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vissl_zero.engine.hook import Hook, MeanLoss, Run, StepRecord
from vissl_zero.reporting.quantity import bar, bytes_text, duration_text, figure_text, shown_kinds, sparkline, total
from vissl_zero.terminal import print_line

_SECONDS_BETWEEN_FRAMES = 0.25
_BAR_WIDTH = 24
_SPARKLINE_WIDTH = 32


class LiveDisplay(Hook):
    """The display on a terminal, redrawn in ``on_record``; a thread would take time from steps and show nothing new.

    Args:
        console: console of a terminal that can show UTF-8.
    """

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._drawn_at = 0.0
        self._watch: dict[str, float] = {}  # last measured values

    def on_start(self, run: Run) -> None:
        self._progress = Progress(run)
        # Other output to stdout or stderr appears above the frame.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        # rich hides the cursor; a killed rank would leave the user's terminal without a cursor.
        self._console.show_cursor(True)

    def on_epoch_start(self, run: Run) -> None:
        if self._live is not None and not run.records:
            self._live.update(Text("the first step ...", style="dim"), refresh=True)

    def on_record(self, run: Run, record: StepRecord) -> None:
        self._progress.update(record)
        # Not every step measures it; the frame keeps the last values rather than jump.
        self._watch = record.watch or self._watch
        now = time.monotonic()
        # Bounded by time, not by steps, since a small model makes hundreds of them in a second.
        is_due = now - self._drawn_at >= _SECONDS_BETWEEN_FRAMES or record.step == run.num_steps
        if self._live is not None and is_due:
            self._live.update(frame(run, replace(record, watch=self._watch), self._progress), refresh=True)
            self._drawn_at = now

    def on_end(self, run: Run) -> None:
        self.close(run)  # the last frame stays, and later output is printed below it

    def close(self, run: Run) -> None:
        if self._live is not None:
            with suppress(OSError, ValueError):  # the terminal is gone, or its stream is closed
                self._live.stop()
            self._live = None


def frame(run: Run, record: StepRecord, progress: Progress) -> RenderableType:
    """Draw the state of a run in progress; lines are cropped if the terminal is narrow."""
    return Group(
        _position(run, record, progress),
        _figures(run, record, progress),
        *_health(record),
        *_evaluation(run),
        _memory(run, record),
    )


def _position(run: Run, record: StepRecord, progress: Progress) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1, min_width=4)
    row.add_column(no_wrap=True, justify="right")
    row.add_row(
        Text(f"epoch {record.epoch + 1}/{run.plan.num_epochs}", style="bold"),
        f"step {record.step}/{run.num_steps}",
        ProgressBar(total=1.0, completed=progress.fraction),
        f"{duration_text(progress.time_left_s)} left",
    )
    return row


def _figures(run: Run, record: StepRecord, progress: Progress) -> RenderableType:
    loss = Text("loss ", no_wrap=True, overflow="ellipsis")
    loss.append("skipped" if record.loss is None else f"{record.loss:.4f}", style="bold cyan")
    if progress.loss_first is not None:
        loss.append(f"  first {progress.loss_first:.4f}  ", style="dim")
        loss.append(sparkline(progress.losses.values(), _SPARKLINE_WIDTH), style="cyan")
    rest = [f"lr {figure_text(record.lr, 3)}", f"{progress.images_per_s:.0f} images/s"]
    rest.append(f"data wait {100 * progress.data_wait:.0f} %")
    if record.grad_norm is not None:
        rest.append(f"gradient norm {figure_text(record.grad_norm, 3)}")
    if run.plan.sharding.precision.use_loss_scale:
        rest.append(f"loss scale {record.loss_scale:g} ({progress.num_skipped} skipped)")
    return Group(loss, Text("   ".join(rest), no_wrap=True, overflow="ellipsis"))


def _health(record: StepRecord) -> list[RenderableType]:
    """Format the loss's own measures of health, if it has any."""
    if not record.watch:
        return []
    figures = "   ".join(f"{name.replace('_', ' ')} {figure_text(value, 3)}" for name, value in record.watch.items())
    return [Text(figures, style="dim", no_wrap=True, overflow="ellipsis")]


def _evaluation(run: Run) -> list[RenderableType]:
    """Draw the measures of quality so far, such as top-1 of kNN; empty if none are measured."""
    before, latest = run.results.get("knn_top1_before"), run.results.get("knn_top1_latest")
    parts = []
    if before is not None:
        text = f"kNN top-1 {100 * before:.1f} % before"
        parts.append(text if latest is None else f"{text}, {100 * latest:.1f} % now")
    if run.results.get("top1_latest") is not None:
        curve = [top1 for _, top1 in run.results["top1_by_step"]]
        parts.append(f"top-1 on TEST {100 * curve[-1]:.1f} % (best {100 * max(curve):.1f} %)  {sparkline(curve, 16)}")
    if run.results.get("miou_latest") is not None:
        curve = [miou for _, miou in run.results["miou_by_step"]]
        parts.append(f"mIoU on TEST {100 * curve[-1]:.1f} % (best {100 * max(curve):.1f} %)  {sparkline(curve, 16)}")
    if run.results.get("probe_top1_latest") is not None:
        curve = [top1 for _, top1 in run.results["probe_top1_by_step"]]
        parts.append(f"linear probe {100 * curve[-1]:.1f} %  {sparkline(curve, 16)}")
    return [Text("   ".join(parts), no_wrap=True, overflow="ellipsis")] if parts else []


def _memory(run: Run, record: StepRecord) -> RenderableType:
    memory = record.bytes
    whole = max(1, total(memory))
    where = "allocated" if run.device.type == "cuda" else "resident"
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right", min_width=8)
    table.add_column(no_wrap=True)
    table.add_row(
        Text("memory of rank 0", style="bold"), bytes_text(total(memory)), f"peak {bytes_text(memory.peak)} {where}"
    )
    for kind, name in shown_kinds(memory).items():
        held = getattr(memory, kind)
        table.add_row(f"  {name}", bytes_text(held), Text(bar(held / whole, _BAR_WIDTH), style="magenta"))
    return table


_LONGEST_SILENCE_S = 10.0
_LATEST = {
    "top1_latest": "top-1 on TEST",
    "top5_latest": "top-5",
    "miou_latest": "mIoU on TEST",
    "knn_top1_latest": "kNN top-1",
    "probe_top1_latest": "linear probe",
}


class _PlainLines(Hook):
    """The display in a log: lines for the first, every ``every``-th and the last step, each epoch, and after a silence.

    Args:
        console: console to print to.
        every: steps between lines (LOG_FREQUENCY).
    """

    def __init__(self, console: Console, every: int):
        self._console = console
        self._every = max(1, every)
        self._epoch_started = time.monotonic()
        self._epoch_loss = MeanLoss()
        self._last_print_s = time.monotonic()

    def on_start(self, run: Run) -> None:
        self._progress = Progress(run)

    def on_epoch_start(self, run: Run) -> None:
        self._epoch_started = time.monotonic()
        self._epoch_loss = MeanLoss()
        # Later hooks have measured these at the end of the last epoch.
        figures = {text: run.results.get(name) for name, text in _LATEST.items()}
        if summary := ", ".join(f"{text} {100 * value:.1f} %" for text, value in figures.items() if value is not None):
            self._print(f"after epoch {run.epoch}: {summary}")

    def on_record(self, run: Run, record: StepRecord) -> None:
        self._progress.update(record)
        self._epoch_loss.add(record)
        is_due = record.step % self._every == 0 or record.step == run.num_steps or len(run.records) == 1
        if is_due or time.monotonic() - self._last_print_s >= _LONGEST_SILENCE_S:
            self._print(step_line(run, record, self._progress))

    def on_epoch_end(self, run: Run) -> None:
        if (mean := self._epoch_loss.value) is not None:
            took = duration_text(time.monotonic() - self._epoch_started)
            self._print(f"epoch {run.epoch + 1}/{run.plan.num_epochs} done in {took}, mean loss {mean:.4f}")

    def _print(self, text: str) -> None:
        self._last_print_s = time.monotonic()
        print_line(text, self._console)
        # A log is read while the run goes on, and Python would write it in blocks.
        self._console.file.flush()


def step_line(run: Run, record: StepRecord, progress: Progress) -> str:
    """Format a step as a line of about 100 characters; columns are aligned from line to line."""
    width = len(str(run.num_steps))
    loss = "skipped" if record.loss is None else f"{record.loss:7.4f}"
    memory = bytes_text(total(record.bytes))
    return (
        f"epoch {record.epoch + 1}/{run.plan.num_epochs}  step {record.step:{width}d}/{run.num_steps}  loss {loss}  "
        f"lr {figure_text(record.lr, 3):<8}  {progress.images_per_s:6.0f} images/s  "
        f"data wait {100 * progress.data_wait:2.0f} %  memory {memory:>8}  "
        f"{duration_text(progress.time_left_s)} left"
    )


_SMOOTHING = 0.1  # weight of the newest step in running means


class LossHistory:
    """The history of the loss as a bounded number of means, so that its memory does not grow with the run.

    Args:
        capacity: most values; even. When it is reached, neighbors are merged, and each value is the mean of twice as
            many steps.
    """

    def __init__(self, capacity: int = 64):
        self._capacity = capacity
        self._steps_per_value = 1
        self._values: list[float] = []
        self._pending: list[float] = []

    def add(self, loss: float) -> None:
        """Append the loss of one step."""
        self._pending.append(loss)
        if len(self._pending) < self._steps_per_value:
            return
        self._values.append(sum(self._pending) / len(self._pending))
        self._pending.clear()
        if len(self._values) == self._capacity:
            self._values = [(a + b) / 2 for a, b in zip(self._values[::2], self._values[1::2], strict=True)]
            self._steps_per_value *= 2

    def values(self) -> list[float]:
        """Return the means, each over the same number of steps, oldest first."""
        return list(self._values)


class Progress:
    """The progress of a run.

    Attributes:
        loss_first: loss of the first step that was not skipped; None before that step.
        num_skipped: number of steps that the loss scaler skipped.
        images_per_s, data_wait: running means; NaN before the first step.
        losses: history of the loss.
    """

    def __init__(self, run: Run):
        self._num_steps = run.num_steps
        self._global_batch = run.plan.global_batch
        self._step = run.step
        self._num_seen = 0
        self._seconds_per_step = self._waited_per_step = math.nan
        self.loss_first: float | None = None
        self.num_skipped = 0
        self.losses = LossHistory()

    def update(self, record: StepRecord) -> None:
        """Add the newest step."""
        self._step = record.step
        self._num_seen += 1
        # Means are of times, not of rates: the time that is left follows from the mean time of a step.
        seconds = self._global_batch / record.images_per_s
        waited = seconds * record.data_wait
        if self._num_seen <= 2:  # the first step also measures activations, so the second replaces it
            self._seconds_per_step, self._waited_per_step = seconds, waited
        else:
            self._seconds_per_step += _SMOOTHING * (seconds - self._seconds_per_step)
            self._waited_per_step += _SMOOTHING * (waited - self._waited_per_step)
        if record.skipped:
            self.num_skipped += 1
        if record.loss is not None and math.isfinite(record.loss):
            self.loss_first = record.loss if self.loss_first is None else self.loss_first
            self.losses.add(record.loss)

    @property
    def images_per_s(self) -> float:
        return self._global_batch / self._seconds_per_step

    @property
    def data_wait(self) -> float:
        """Share of the time for which this rank waited for its loader, from 0 to 1."""
        return self._waited_per_step / self._seconds_per_step

    @property
    def time_left_s(self) -> float:
        """Seconds of training to the last step, without evaluation; NaN before the first step."""
        return (self._num_steps - self._step) * self._seconds_per_step

    @property
    def fraction(self) -> float:
        """Share of completed steps, from 0 to 1."""
        return self._step / max(1, self._num_steps)


class Display(Hook):
    """The display of a run on rank 0: live on a terminal, lines elsewhere.

    Args:
        console: console to print to; None: rich's global console. Our other output uses the global one too, because
            output through another console would tear the live frame.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()
        # On ranks other than 0 it stays this one, which does nothing.
        self._display = Hook()

    def on_start(self, run: Run) -> None:
        if run.is_main:
            is_live = can_redraw(self._console)
            every = run.plan.config.LOG_FREQUENCY
            self._display = LiveDisplay(self._console) if is_live else _PlainLines(self._console, every)
        self._display.on_start(run)

    def on_epoch_start(self, run: Run) -> None:
        self._display.on_epoch_start(run)

    def on_record(self, run: Run, record: StepRecord) -> None:
        self._display.on_record(run, record)

    def on_epoch_end(self, run: Run) -> None:
        self._display.on_epoch_end(run)

    def on_end(self, run: Run) -> None:
        self._display.on_end(run)

    def close(self, run: Run) -> None:
        self._display.close(run)


def can_redraw(console: Console) -> bool:
    """Check whether the console is a terminal that can redraw lines and shows UTF-8.

    ``Console.is_terminal`` is not enough: FORCE_COLOR makes it true for a file.
    """
    is_terminal = getattr(console.file, "isatty", lambda: False)()
    return bool(is_terminal and os.environ.get("TERM", "") not in ("", "dumb") and console.encoding.startswith("utf"))
