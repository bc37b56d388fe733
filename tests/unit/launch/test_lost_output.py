"""Lost output, closed streams and other locales, through the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = f"{sys.executable} -m vissl_zero.cli"
RUN = (
    f"{COMMAND} config=quickstart/swav_digits config.TRAINER.MAX_STEPS=3 config.DISTRIBUTED.NUM_PROC_PER_NODE=1 "
    "config.TRAINER.THREADS_PER_RANK=1 config.NEAREST_NEIGHBOR.USE_KNN=false config.LOG_FREQUENCY=1 "
    "config.CHECKPOINT.DIR=run"
)


def bash(folder: Path, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "line",
    [
        f"{RUN} | head -n 1; exit ${{PIPESTATUS[0]}}",
        pytest.param(f"{RUN} >&-", marks=pytest.mark.slow),
        f"{RUN} >&- 2>&-",
        pytest.param(f"{RUN} > /dev/full", marks=pytest.mark.slow),
    ],
)
def test_a_run_survives_the_loss_of_its_output(tmp_path: Path, line: str) -> None:
    done = bash(tmp_path, line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["config=quickstart/swav_digits --cfg job", "config=quickstart/swav_digits --dry-run"])
def test_a_reader_that_has_enough_leaves_no_error_and_no_folder(tmp_path: Path, what: str) -> None:
    done = bash(tmp_path, f"{COMMAND} {what} | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["list recipes", "config=quickstart/swav_digits --cfg job"])
def test_an_answer_that_a_full_disk_cuts_short_is_no_success(tmp_path: Path, what: str) -> None:
    done = bash(tmp_path, f"{COMMAND} {what} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "stdout: cannot be written (No space left on device). The output is incomplete.\n"


@pytest.mark.timeout(120)
def test_a_folder_with_an_umlaut_is_taken_under_any_locale(tmp_path: Path) -> None:
    line = f"{COMMAND} config=quickstart/swav_digits config.CHECKPOINT.DIR=/tmp/läufe/a --cfg job | grep DIR:.*ufe"
    ascii_only = bash(tmp_path, line, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert "DIR: /tmp/läufe/a" in ascii_only.stdout, ascii_only.stderr
