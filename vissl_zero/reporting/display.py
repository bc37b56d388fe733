"""Progress on rank 0: redrawn in place on a terminal, plain lines everywhere else."""

from __future__ import annotations

import os

import rich
from rich.console import Console

from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.reporting.live_display import LiveDisplay
from vissl_zero.reporting.plain_lines import PlainLines


class Display(Hook):
    """Chooses the display that fits where stdout goes. Silent on every rank but 0.

    Args:
        console: rich's own by default, which everything of ours prints to: what goes through another one would tear
            the frame of the live display.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()
        self._display = Hook()

    def on_start(self, run: Run) -> None:
        if run.is_main:
            is_live = can_redraw(self._console)
            every = run.plan.config["LOG_FREQUENCY"]
            self._display = LiveDisplay(self._console) if is_live else PlainLines(self._console, every)
        self._display.on_start(run)

    def on_epoch_start(self, run: Run) -> None:
        self._display.on_epoch_start(run)

    def on_step(self, run: Run, record: StepRecord) -> None:
        self._display.on_step(run, record)

    def on_epoch_end(self, run: Run) -> None:
        self._display.on_epoch_end(run)

    def on_end(self, run: Run) -> None:
        self._display.on_end(run)

    def close(self, run: Run) -> None:
        self._display.close(run)


def can_redraw(console: Console) -> bool:
    """Whether lines can be redrawn: a terminal that moves its cursor and shows UTF-8.

    ``Console.is_terminal`` is not asked: FORCE_COLOR makes it true for a file.
    """
    is_terminal = getattr(console.file, "isatty", lambda: False)()
    return bool(is_terminal and os.environ.get("TERM", "") not in ("", "dumb") and console.encoding.startswith("utf"))
