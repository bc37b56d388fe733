"""The hook that feeds the loggers of a run: each step once, in order, whatever a kill has lost or left over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich
from rich.console import Console

from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.registry import LOGGERS, require_interface
from vissl_zero.reporting import histogram_file, metrics_file
from vissl_zero.reporting.histogram_file import Counts, read_histograms, tagged
from vissl_zero.reporting.loggers.logger import LoggedRun, Logger, run_id
from vissl_zero.reporting.quantity import KINDS
from vissl_zero.resolve.saved import config_data
from vissl_zero.terminal import print_line

_ATTACHED = ("config.user.yaml", "config.resolved.yaml", "summary.json", "report.png")

_NOTHING = -1  # held, not even the results before the first step
Row = tuple[int, dict[str, float]]


class Logging(Hook):
    """Send the figures of every step, and evaluation results, to each logger.

    A step is one row: it waits until the next step begins, so that what is measured after it goes into the same row.
    ``metrics.jsonl`` and the checkpoint hold all that was logged up to the step that a run resumes from. Rows that a
    logger lacks are logged from there, rows that it already holds are not logged again.

    Comes last, after every hook that adds results or writes files. Cost: 0.02 to 0.2 ms per step and logger, on rank 0.

    Args:
        names: names of the loggers.
        console: where warnings go.
    Raises:
        RegistryError: a name is unknown.
    """

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        self._console = console or rich.get_console()
        self._loggers: dict[str, Logger] = {}
        for name in names:
            self._loggers[name] = LOGGERS.get(name).build()
            require_interface(LOGGERS, name, self._loggers[name], base=Logger)
        self._held: dict[str, int] = {}  # the last step that each holds
        self._row: Row | None = None
        self._histograms: dict[int, Counts] = {}  # of steps that are not logged yet
        self._evaluations: list[Row] = []
        self._newest: dict[str, float] = {}
        self._is_over = False

    def state_dict(self) -> dict[str, Any]:
        """Return every evaluation result so far with its step, for loggers that have to be filled again."""
        return {"evaluations": self._evaluations} if self._evaluations else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evaluations = [(int(step), dict(figures)) for step, figures in state["evaluations"]]
        for _, figures in self._evaluations:
            self._newest.update(figures)

    def on_start(self, run: Run) -> None:
        if not run.is_main or not self._loggers:
            self._loggers.clear()
            return
        config = config_data(run.plan.config, run.plan.learns_from_other)
        facts = LoggedRun(run.folder, run_id(run.folder), run.plan.recipe, config, run.step)
        self._each(lambda name, logger: self._held.update({name: logger.open(facts) or _NOTHING}))
        self._fill_up(run)
        if not run.is_resumed:
            self._row = (0, {})
        self._add_results(run)

    def on_step(self, run: Run, step: Step) -> None:
        if self._loggers and run.histograms is not None:
            self._histograms[step.step] = tagged(run.histograms)

    def on_record(self, run: Run, record: StepRecord) -> None:
        self._send_row()
        self._row = (record.step, scalars(record))

    def on_epoch_end(self, run: Run) -> None:
        self._add_results(run)

    def on_end(self, run: Run) -> None:
        self._add_results(run)
        self._send_row()
        files = [path for name in _ATTACHED if (path := run.folder / name).is_file()]
        self._each(lambda _, logger: logger.attach(files))
        self._is_over = True

    def close(self, run: Run) -> None:
        self._send_row()
        self._each(lambda _, logger: logger.close(self._is_over))
        self._loggers.clear()

    def _fill_up(self, run: Run) -> None:
        """Log again what a logger lacks of the steps before a resume."""
        if not self._held or not run.is_resumed or min(self._held.values()) >= run.step:
            return
        after = min(self._held.values())
        if (path := run.folder / histogram_file.FILE_NAME).exists():
            self._histograms = dict(read_histograms(path))
        records = metrics_file.read_records(run.folder / metrics_file.FILE_NAME, max(after, 0))
        for step, figures in _merged(((record.step, scalars(record)) for record in records), self._evaluations):
            self._send(step, figures)
        self._histograms = {}

    def _add_results(self, run: Run) -> None:
        """Add evaluation results that are new or have changed to the row of the newest step."""
        if not self._loggers:
            return
        results = {name: float(value) for name, value in run.results.items() if isinstance(value, int | float)}
        new = {f"evaluation/{name}": value for name, value in results.items() if math.isfinite(value)}
        # Results stay in ``run.results``. Logged again, they would look like new measurements at each epoch.
        new = {tag: value for tag, value in new.items() if self._newest.get(tag) != value}
        if not new:
            return
        self._newest.update(new)
        self._evaluations.append((run.step, new))
        step, figures = self._row or (run.step, {})
        self._row = (step, figures | new)

    def _send_row(self) -> None:
        if self._row is not None and self._row[1]:
            self._send(*self._row)
        self._row = None

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        def log(name: str, logger: Logger) -> None:
            if step > self._held[name]:
                self._held[name] = step
                logger.log(figures, step)
                if counts:
                    logger.log_histograms(counts, step)

        # Outside ``log``, because every logger gets the same ones.
        counts = self._histograms.pop(step, None)
        self._each(log)

    def _each(self, call: Callable[[str, Logger], None]) -> None:
        """Call for each logger; one that raises, for whatever reason, is left out and does not end the run."""
        for name, logger in list(self._loggers.items()):
            try:
                call(name, logger)
            except Exception as error:  # noqa: BLE001 - a library of another place, or the user's own class
                # Left out for good: a row that it missed could not be logged after later ones.
                self._loggers.pop(name)
                self._held.pop(name, None)
                why = " ".join(str(error).split()) or type(error).__name__
                text = f"warning: the logger {name} fails ({why}) and is left out; training continues."
                print_line(text, self._console)


def _merged(rows: Iterator[Row], evaluations: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows in order, each with the evaluation results of its step; results of step 0 come first."""
    by_step: dict[int, dict[str, float]] = {}
    for step, figures in evaluations:
        by_step.setdefault(step, {}).update(figures)
    if 0 in by_step:
        yield 0, by_step[0]
    for step, figures in rows:
        yield step, figures | by_step.get(step, {})


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the scalars to log for a step: tag -> value. Values that are not finite are left out."""
    scalars = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/images_per_s": record.images_per_s,
        "train/data_wait": record.data_wait,
        "train/grad_norm": record.grad_norm,
        "train/loss_scale": record.loss_scale,
        "memory/peak": record.bytes.peak,
    }
    scalars |= {f"watch/{name}": value for name, value in record.watch.items()}
    scalars |= {f"memory/{kind}": getattr(record.bytes, kind) for kind in KINDS}
    return {tag: float(value) for tag, value in scalars.items() if value is not None and math.isfinite(value)}
