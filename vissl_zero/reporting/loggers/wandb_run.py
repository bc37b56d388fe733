"""A run of Weights & Biases: offline in the run folder, or online."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vissl_zero.registry import LOGGERS
from vissl_zero.reporting.loggers.logger import LoggedRun, Logger
from vissl_zero.sharding.update.histograms import EDGES

FOLDER_NAME = "wandb"
_OPEN = 1e5  # in place of infinity, where the outer buckets end


@LOGGERS.register("wandb")
class WandbRun(Logger):
    """A run of Weights & Biases; offline unless WANDB_MODE=online.

    Project: ``WANDB_PROJECT``, else vissl_zero. The run's id is that of the run folder. ``wandb sync <run
    folder>/wandb/offline-run-*`` uploads. An offline run cannot be cut, so a resume replaces its files by new ones and
    logs every step since the first into them (0.1 ms each). An online run continues after the last step that the server
    has.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: LoggedRun) -> int:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            for path in (run.folder / FOLDER_NAME).glob(f"offline-run-*-{run.run_id}"):
                shutil.rmtree(path)
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vissl_zero"),
            id=run.run_id,
            name=run.folder.name,
            resume="allow",
            reinit="finish_previous",
            mode=mode,  # type: ignore[arg-type]
            dir=str(run.folder),
            config=dict(run.config) | {"recipe": run.recipe},
            settings=settings,
        )
        # wandb counts up to the step that it expects next.
        return int(self._run.step) - 1 if self._run.resumed and self._run.step else 0

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def log_histograms(self, counts: Mapping[str, Mapping[int, int]], step: int) -> None:
        import numpy as np
        import wandb

        edges, places = np.array([-_OPEN, *EDGES, _OPEN]), range(len(EDGES) + 1)
        shown = {tag: (np.array([row.get(place, 0) for place in places]), edges) for tag, row in counts.items()}
        self._run.log({tag: wandb.Histogram(np_histogram=pair) for tag, pair in shown.items()}, step=step)

    def attach(self, files: Sequence[Path]) -> None:
        import wandb

        if self._run.disabled:  # it has no folder
            return
        for path in files:
            # Copied here: wandb would link to it by an absolute path, which a moved folder breaks, and warn of that.
            copy = shutil.copy(path, self._run.dir)
            self._run.save(copy, base_path=self._run.dir, policy="now")
            if path.suffix == ".png":
                self._run.summary[path.stem] = wandb.Image(str(path))

    def close(self, is_over: bool) -> None:
        self._run.finish(exit_code=0 if is_over else 1)
