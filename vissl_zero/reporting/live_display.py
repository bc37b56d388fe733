"""Progress on a terminal: a few lines, redrawn in place at most four times a second."""

from __future__ import annotations

import time
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.reporting.glyphs import bar, sparkline
from vissl_zero.reporting.memory_kinds import shown_kinds, total
from vissl_zero.reporting.progress import Progress
from vissl_zero.reporting.quantity import bytes_text, duration_text, figure_text

_SECONDS_BETWEEN_FRAMES = 0.25
_BAR_WIDTH = 24
_SPARKLINE_WIDTH = 32


class LiveDisplay(Hook):
    """Redraws from within ``on_step``: a thread of its own would take time from the step and has nothing new to show.

    Args:
        console: a terminal that can show UTF-8.
    """

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._drawn_at = 0.0

    def on_start(self, run: Run) -> None:
        self._progress = Progress(run)
        # What others print to stdout or stderr meanwhile appears above the frame.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        # rich hides the cursor; a rank that is killed would leave the user's terminal without one.
        self._console.show_cursor(True)

    def on_epoch_start(self, run: Run) -> None:
        if self._live is not None and not run.records:
            self._live.update(Text("the first step ...", style="dim"), refresh=True)

    def on_step(self, run: Run, record: StepRecord) -> None:
        self._progress.update(record)
        now = time.monotonic()
        is_due = now - self._drawn_at >= _SECONDS_BETWEEN_FRAMES or record.step == run.num_steps
        if self._live is not None and is_due:
            self._live.update(frame(run, record, self._progress), refresh=True)
            self._drawn_at = now

    def on_end(self, run: Run) -> None:
        self.close(run)  # the last frame stays; what follows is printed below it

    def close(self, run: Run) -> None:
        if self._live is not None:
            with suppress(OSError, ValueError):  # the terminal is gone, or its stream closed
                self._live.stop()
            self._live = None


def frame(run: Run, record: StepRecord, progress: Progress) -> RenderableType:
    """Everything a person wants to know of a run in progress; lines are cropped where the terminal is narrow."""
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
    if record.grad_norm is not None:
        rest.append(f"gradient norm {figure_text(record.grad_norm, 3)}")
    if run.plan.sharding.precision.use_loss_scale:
        rest.append(f"loss scale {record.loss_scale:g} ({progress.num_skipped} skipped)")
    return Group(loss, Text("   ".join(rest), no_wrap=True, overflow="ellipsis"))


def _health(record: StepRecord) -> list[RenderableType]:
    """The criterion's own figures on its health, if it has any."""
    if not record.watch:
        return []
    figures = "   ".join(f"{name.replace('_', ' ')} {figure_text(value, 3)}" for name, value in record.watch.items())
    return [Text(figures, style="dim", no_wrap=True, overflow="ellipsis")]


def _evaluation(run: Run) -> list[RenderableType]:
    """Top-1 of kNN and of the classifier so far, where they are measured."""
    before, latest = run.results.get("knn_top1_before"), run.results.get("knn_top1_latest")
    parts = []
    if before is not None:
        text = f"kNN top-1 {100 * before:.1f} % before"
        parts.append(text if latest is None else f"{text}, {100 * latest:.1f} % now")
    if run.results.get("top1_latest") is not None:
        curve = [top1 for _, top1 in run.results["top1_by_step"]]
        parts.append(f"top-1 on TEST {100 * curve[-1]:.1f} % (best {100 * max(curve):.1f} %)  {sparkline(curve, 16)}")
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
