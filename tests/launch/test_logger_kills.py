"""A real run with every logger, killed three times and resumed in another folder, read back by each library."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command_line import COMMAND, run_command
from tests.small_trunk import SMALL_TRUNK
from tests.unit.reporting.test_loggers import READERS, from_csv

KILLER = '''
import os, signal
from vissl_zero.checkpoint import folder
from vissl_zero.engine.hook import Hook
from vissl_zero.registry import HOOKS
from vissl_zero.reporting.loggers import mlflow_run, tensorboard_events

if "EAGER" in os.environ:  # what a slower run has written by now: more than the checkpoint has
    mlflow_run._EVERY_S = tensorboard_events._FLUSH_S = 0.0


def kill():
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register("dies_after_a_step")
class DiesAfterAStep(Hook):
    """Ends with its launcher when it has updated the weights of a step, before the figures of that step arrive."""

    def on_step(self, run, step):
        if step.step == int(os.environ["KILL_AT"]):
            kill()


@HOOKS.register("dies_with_a_record")
class DiesWithARecord(Hook):
    """Ends with its launcher when the figures of a step are in metrics.jsonl and not yet in a logger."""

    def on_record(self, run, record):
        if record.step == int(os.environ["KILL_AT"]):
            kill()
'''
NUM_STEPS = 14


def command(folder: Path, names: list[str], *overrides: str) -> list[str]:
    return [
        "config=quickstart/swav_digits",
        *SMALL_TRUNK,
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
        "config.NEAREST_NEIGHBOR.USE_KNN=false",
        "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=4",
        "config.CHECKPOINT.ASYNC=false",
        f"config.TRAINER.MAX_STEPS={NUM_STEPS}",
        f"config.HOOKS.LOGGERS=[{','.join(names)}]",
        f"config.CHECKPOINT.DIR={folder}",
        *overrides,
    ]


def killed(folder: Path, names: list[str], hook: str, step: int, **environment: str) -> None:
    """Train until ``hook`` kills rank and launcher at ``step``."""
    words = command(folder, names, "config.IMPORTS=[killer_of_loggers]", f"config.HOOKS.EXTRA=[{hook}]")
    place = folder.parent
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, "KILL_AT": str(step), **environment},
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_run_killed_three_times_and_moved_has_every_step_once_in_every_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at 6, 7 and 11, with checkpoints of 4, 4 and 8; the last resume is in another folder."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    names = [name for name in READERS if name != "trackio" or find_spec("trackio")]
    (tmp_path / "killer_of_loggers.py").write_text(KILLER)
    folder = tmp_path / "run"
    killed(folder, names, "dies_after_a_step", 6)
    killed(folder, names, "dies_with_a_record", 7, EAGER="1")
    assert set(from_csv(folder)) == set(range(1, 6))  # beyond the checkpoint of step 4
    killed(folder, names, "dies_after_a_step", 11)
    elsewhere = tmp_path / "another machine" / "moved"
    elsewhere.parent.mkdir()
    shutil.copytree(folder, elsewhere)
    shutil.rmtree(folder)
    done = run_command(*command(elsewhere, names), cwd=tmp_path)
    assert "resumed after step 8" in done.stdout and "warning" not in done.stdout
    lines = (elsewhere / "metrics.jsonl").read_text().splitlines()
    losses = {row["step"]: row["loss"] for row in map(json.loads, lines)}
    assert list(losses) == list(range(1, NUM_STEPS + 1))
    for name in names:
        assert READERS[name](elsewhere) == pytest.approx(losses, rel=1e-6), name
