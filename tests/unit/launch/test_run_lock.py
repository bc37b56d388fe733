"""Who may have a run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vissl_zero.errors import LaunchError
from vissl_zero.launch.run_folder import LOCK_NAME, STALE_S, RunLock

HOLD = "import sys, time; from pathlib import Path; from vissl_zero.launch.run_folder import RunLock\n"
HOLD += "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def test_a_second_run_is_refused_and_the_first_is_named(tmp_path):
    with RunLock(tmp_path), pytest.raises(LaunchError) as caught:
        RunLock(tmp_path)
    assert f"a run is active in {tmp_path} (process {os.getpid()} on " in str(caught.value)
    RunLock(tmp_path).release()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(LaunchError, match=f"process {holder.pid} on"):
        RunLock(tmp_path)
    holder.kill()
    holder.wait()
    RunLock(tmp_path).release()


def _written_elsewhere(folder: Path, job: str = "") -> Path:
    path = folder / LOCK_NAME
    path.write_text(json.dumps({"host": "another-machine", "pid": 1, "born": "1", "job": job}))
    return path


def test_another_machines_lock_counts_until_it_is_stale(tmp_path):
    path = _written_elsewhere(tmp_path, "7")
    with pytest.raises(LaunchError, match="on another-machine, job 7"):
        RunLock(tmp_path)
    old = time.time() - STALE_S - 1
    os.utime(path, (old, old))
    RunLock(tmp_path).release()


def test_a_requeued_job_takes_its_own_lock_over(tmp_path, monkeypatch):
    _written_elsewhere(tmp_path, "7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    RunLock(tmp_path).release()


def test_a_process_number_given_to_another_process_is_no_owner(tmp_path):
    import socket

    facts = {"host": socket.gethostname(), "pid": os.getppid(), "born": "1", "job": ""}
    (tmp_path / LOCK_NAME).write_text(json.dumps(facts))
    RunLock(tmp_path).release()


def test_rubbish_in_the_file_is_no_owner(tmp_path):
    (tmp_path / LOCK_NAME).write_bytes(b"\x80\x04garbage")
    RunLock(tmp_path).release()
