"""TensorBoard event files in the run folder.

Not by torch's ``SummaryWriter``, whose thread prints a traceback of its own and dies with a file that fails.
"""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import rich
from rich.console import Console

from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.reporting.lossy_output import optional_output
from vissl_zero.reporting.quantity import KINDS

FOLDER_NAME = "tensorboard"
_FLUSH_S = 10.0
_VERSION = "brain.Event:2"


class EventFile:
    """One event file, in the format of ``tensorboard.compat.proto.event_pb2.Event``.

    Args:
        path: of a new file.
        purge_step: hide what earlier files of the folder hold of this step and later ones; None: nothing.
    Raises:
        OSError: from every method, if the file cannot be written.
    """

    def __init__(self, path: Path, purge_step: int | None = None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._file = path.open("wb")
        self._records = RecordWriter(self._file)
        self._event: Any = Event
        self._flushed = time.monotonic()
        self._add(file_version=_VERSION)
        if purge_step is not None:
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def add(self, figures: dict[str, float], step: int) -> None:
        """Write all figures of a step as one event: 0.05 ms. They reach the file within ``_FLUSH_S`` seconds."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._add(step=step, summary=Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what waits, and close."""
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class TensorBoard(Hook):
    """Loss, learning rate, speed, gradient norm, the method's own figures, memory by kind and evaluation results.

    Cost: 0.05 ms per step, on rank 0. Whatever fails here ends the event file, not the run.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or rich.get_console()
        self._events: EventFile | None = None
        self._written: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        folder = run.folder / FOLDER_NAME
        with self._optional():
            folder.mkdir(exist_ok=True)
            # A resumed run does again what came after its checkpoint: purge_step hides the first try.
            self._events = EventFile(folder / _file_name(), run.step + 1 if run.step else None)
        self._write_results(run)

    def on_record(self, run: Run, record: StepRecord) -> None:
        self._write(scalars(record), record.step)

    def on_epoch_start(self, run: Run) -> None:
        self._write_results(run)  # what hooks after this one found at the end of the epoch before

    def on_end(self, run: Run) -> None:
        self._write_results(run)

    def close(self, run: Run) -> None:
        events, self._events = self._events, None
        if events is not None:
            with self._optional():
                events.close()

    def _optional(self) -> optional_output:
        return optional_output(FOLDER_NAME, self._console)

    def _write_results(self, run: Run) -> None:
        """Evaluation results that are new or have changed."""
        results = {name: value for name, value in run.results.items() if isinstance(value, int | float)}
        new = {name: value for name, value in results.items() if self._written.get(name) != value}
        self._written.update(new)
        self._write({f"evaluation/{name}": float(value) for name, value in new.items()}, run.step)

    def _write(self, figures: dict[str, float], step: int) -> None:
        events, self._events = self._events, None
        if events is None or not figures:
            self._events = events
            return
        with self._optional():
            events.add(figures, step)
            self._events = events  # not after a failure: the file may end in a part of an event


def _file_name() -> str:
    """A name of TensorBoard's form that no other process has."""
    return f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"


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
