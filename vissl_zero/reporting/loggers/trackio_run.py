"""A run of Trackio: in a database in the run folder, or in the user's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vissl_zero.registry import LOGGERS
from vissl_zero.reporting.loggers.logger import LoggedRun, Logger

FOLDER_NAME = "trackio"
_PROJECT = "vissl_zero"


@LOGGERS.register("trackio")
class TrackioRun(Logger):
    """A run of Trackio, in trackio/ or at TRACKIO_DIR.

    Project: ``TRACKIO_PROJECT``, else vissl_zero; the run's name ends with the id of the run folder. Trackio cannot
    take a step back, so what it holds stays. ``TRACKIO_DIR=<run folder>/trackio trackio show`` shows them.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: LoggedRun) -> int:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / FOLDER_NAME))  # it reads this when it is imported
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        name = f"{run.recipe.replace('/', '-')}-{run.run_id}"
        held = SQLiteStorage.get_max_step_for_run(project, name)
        # By default it also shows a dashboard in notebooks, and measures the machine from a thread.
        self._run = trackio.init(
            project,
            name=name,
            resume="allow",
            config=dict(run.config) | {"recipe": run.recipe},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return held or 0

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, is_over: bool) -> None:
        self._run.finish()
