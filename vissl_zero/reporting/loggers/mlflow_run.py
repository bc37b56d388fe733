"""A run of MLflow: in a database in the run folder, or on the user's server."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from vissl_zero.registry import LOGGERS
from vissl_zero.reporting.loggers.logger import LoggedRun, Logger
from vissl_zero.resolve.saved import leaves

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

FILE_NAME = "mlflow.db"
_FILES_NAME = "mlflow_files"
_ID_TAG = "vissl_zero.run_id"
_EVERY_S = 5.0
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request, by MLflow's own limits
_LONGEST = 500
# Where the user has not set them. By MLflow's own limits, training would wait four minutes for a server that is gone.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",  # seconds
}


@LOGGERS.register("mlflow")
class MlflowRun(Logger):
    """A run of MLflow, in mlflow.db or at MLFLOW_TRACKING_URI.

    The run is found again by its tag ``vissl_zero.run_id``. MLflow cannot take a step back, so what it holds stays.
    Experiment: ``MLFLOW_EXPERIMENT_NAME``, else vissl_zero. Files go to mlflow_files/, or where the server keeps them.
    Cost: a request of 40 ms every 5 s; once, ten seconds in which MLflow makes its tables.
    """

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._id = ""
        self._at_start: set[str] = set()  # tags of step 0 that MLflow holds, if it holds no later step
        self._waiting: list[list[Metric]] = []  # a row per step
        self._sent = time.monotonic()

    def open(self, run: LoggedRun) -> int:
        for variable, value in _SETTINGS.items():
            os.environ.setdefault(variable, value)
        from mlflow.tracking import MlflowClient

        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            # Files need a place of their own: by default they would go to the folder in which the command was started.
            uri, place = f"sqlite:///{run.folder / FILE_NAME}", str(run.folder / _FILES_NAME)
        self._client = client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vissl_zero")
        experiment = client.get_experiment_by_name(name)
        if experiment and place and experiment.artifact_location != place:
            _move_files(run.folder / FILE_NAME, experiment.artifact_location, place)
        number = experiment.experiment_id if experiment else client.create_experiment(name, artifact_location=place)
        if matching := client.search_runs([number], f"tags.`{_ID_TAG}` = '{run.run_id}'"):
            self._id = matching[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            # Of the learning rate, which every step has: a skipped step has no loss.
            held = max((metric.step for metric in client.get_metric_history(self._id, "train/lr")), default=0)
            self._at_start = set() if held else set(matching[0].data.metrics)
            return held
        tags = {_ID_TAG: run.run_id, "recipe": run.recipe}
        self._id = client.create_run(number, run_name=run.folder.name, tags=tags).info.run_id
        self._log_config(client, run)
        return 0

    def _log_config(self, client: MlflowClient, run: LoggedRun) -> None:
        from mlflow.entities import Param

        settings = {path.removeprefix("config."): str(value) for path, value in leaves(run.config) if value is not None}
        # MLflow refuses brackets in names.
        params = [Param(path.replace("[", ".").replace("]", ""), text[:_LONGEST]) for path, text in settings.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting.append(
            [Metric(tag, value, now, step) for tag, value in figures.items() if step or tag not in self._at_start]
        )
        if time.monotonic() - self._sent > _EVERY_S:
            self._send()

    def attach(self, files: Sequence[Path]) -> None:
        assert self._client is not None
        self._send()
        for path in files:
            self._client.log_artifact(self._id, str(path))

    def close(self, is_over: bool) -> None:
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._id, status="FINISHED" if is_over else "KILLED")

    def _send(self) -> None:
        """Send what waits. The metrics of one step go into one request, which MLflow writes as a whole or not."""
        assert self._client is not None
        while self._waiting:
            batch = self._waiting.pop(0)
            # Whole rows only: the history of one metric then tells which steps the server has.
            while self._waiting and len(batch) + len(self._waiting[0]) <= _MOST_METRICS:
                batch = batch + self._waiting.pop(0)
            self._client.log_batch(self._id, metrics=batch)
        self._sent = time.monotonic()


def _move_files(database: Path, before: str, now: str) -> None:
    """Rewrite the places of files, which MLflow stores as absolute paths, in a folder that was moved or copied."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?", (now, before))
        connection.execute(
            "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE substr(artifact_uri, 1, ?) = ?",
            (now, len(before) + 1, len(before) + 1, f"{before}/"),
        )
