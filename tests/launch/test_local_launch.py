"""Runs through the command line in real processes: endings good and bad."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command_line import COMMAND
from tests.small_trunk import SMALL_TRUNK
from vissl_zero.launch.process_group import LISTEN, connections

ROOT = Path(__file__).parents[2]
SMALL = [
    "config=quickstart/swav_digits",
    *SMALL_TRUNK,
    "config.TRAINER.MAX_STEPS=4",
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.DATA.NUM_DATALOADER_WORKERS=0",
]
SABOTEUR = '''
import os, signal, time
from vissl_zero.engine.hook import Hook
from vissl_zero.registry import HOOKS

@HOOKS.register("saboteur")
class Saboteur(Hook):
    """Ends rank 1 at step 2 in the way SABOTAGE says."""

    def on_step(self, run, record):
        if run.rank != 1 or record.step != 2:
            return
        way = os.environ["SABOTAGE"]
        if way == "raise":
            raise RuntimeError("the cat sat on the keyboard")
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "hang":
            time.sleep(600)
        if way == "nan":  # in the next step
            run.method.register_forward_hook(lambda module, inputs, loss: loss * float("nan"))
'''


def start(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    command = [*COMMAND, *SMALL, f"config.CHECKPOINT.DIR={folder}/run", *overrides]
    (folder / "saboteur_of_tests.py").write_text(SABOTEUR)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]), **environment}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder, start_new_session=True
    )


def sabotage(folder: Path, way: str, *overrides: str) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of a run whose rank 1 fails at step 2."""
    plugin = ["config.IMPORTS=[saboteur_of_tests]", "config.HOOKS.EXTRA=[saboteur]"]
    began = time.monotonic()
    process = start(folder, *plugin, *overrides, SABOTAGE=way)
    _, err = process.communicate(timeout=240)
    return process.returncode, err, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_run_leaves_what_the_contract_says(tmp_path):
    process = start(tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    folder = tmp_path / "run"
    for name in ["metrics.jsonl", "summary.json", "weights.safetensors", "config.user.yaml", "config.resolved.yaml"]:
        assert (folder / name).stat().st_size > 0, name
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert any((folder / "tensorboard").iterdir())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert {"step", "epoch", "loss", "lr", "images_per_s", "bytes"} <= record.keys()
        assert set(record["bytes"]) >= {"params", "grads", "optimizer", "activations", "buffers", "peak"}
        assert all(record["bytes"][kind] > 0 for kind in ("params", "grads", "activations", "buffers", "peak"))
    assert records[-1]["bytes"]["optimizer"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["level"] == 3 and summary["engine"] == "torch" and summary["world_size"] == 2
    assert summary["num_steps"] == 4
    assert summary["loss_first"] == records[0]["loss"] and summary["loss_last"] == records[-1]["loss"]
    assert 0 < summary["knn_top1_before"] < 1 and 0 < summary["knn_top1_after"] < 1

    again = start(tmp_path)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0 and "is complete (step 4 of 4)" in out, out + err
    assert json.loads((folder / "summary.json").read_text()) == summary
    shorter = start(tmp_path, "config.TRAINER.MAX_STEPS=3")
    out, err = shorter.communicate(timeout=120)
    assert shorter.returncode == 0 and "the checkpoint is of step 4, and config.TRAINER ends at 3" in out, out + err
    fresh = start(tmp_path, "config.CHECKPOINT.AUTO_RESUME=false")
    _, err = fresh.communicate(timeout=120)
    assert fresh.returncode == 2 and "already holds a run" in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_raises_ends_the_run_with_its_own_traceback(tmp_path):
    code, err, seconds = sabotage(tmp_path, "raise")
    assert code == 1
    assert "the cat sat on the keyboard" in err
    assert "rank 1 failed first" in err and str(tmp_path / "run") in err
    assert "Connection closed by peer" not in err.split("the cat sat")[0]
    assert seconds < 120


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_loss_that_is_no_number_ends_all_ranks_together_and_is_explained(tmp_path):
    code, err, _ = sabotage(tmp_path, "nan")
    assert code == 2 and "Traceback" not in err
    assert "The loss became nan at step 3" in err and "Gradients that are not finite: trunk." in err
    facts = json.loads((tmp_path / "run" / "diverged.json").read_text())
    assert facts["step"] == 3 and facts["ranks"] == [1] and facts["loss_by_rank"][1] == "nan"
    assert "trunk.stem.0.weight" in facts["parameters"] and len(facts["parameters"]) > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_is_named(tmp_path):
    code, err, _ = sabotage(tmp_path, "kill")
    assert code == 1
    assert "rank 1 was ended by SIGKILL" in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_runs_into_the_collective_timeout(tmp_path):
    code, err, seconds = sabotage(tmp_path, "hang", "config.DISTRIBUTED.TIMEOUT_S=10")
    assert code == 1
    assert "imed out" in err or "No answer from peer rank 1" in err, err  # gloo's words, or those of our own exchange
    assert seconds < 180


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_stops_all_ranks_and_names_the_run_folder(tmp_path):
    process = start(tmp_path, "config.TRAINER.MAX_STEPS=100000", "config.DATA.NUM_DATALOADER_WORKERS=1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert metrics.exists(), "no step was taken"
    by_launcher, by_ranks = _listeners(process.pid)
    assert not by_launcher and {local.split(":")[0] for local in by_ranks} == {"0100007F"}, "127.0.0.1 alone"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=80)
    assert process.returncode == 130
    assert f"The run folder is {tmp_path / 'run'}" in err and "Traceback" not in err
    assert err.count("Saving and stopping; Ctrl-C again ends at once") == 1
    time.sleep(0.5)
    assert not _processes_of_group(process.pid)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_torchrun_too_the_rank_that_failed_first_speaks_first(tmp_path):
    (tmp_path / "saboteur_of_tests.py").write_text(SABOTEUR)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "tools/run_distributed.py"), *SMALL, f"config.CHECKPOINT.DIR={tmp_path}/run"]
    command += ["config.IMPORTS=[saboteur_of_tests]", "config.HOOKS.EXTRA=[saboteur]"]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "SABOTAGE": "raise"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path, env=env)
    ours, _, summary = done.stderr.partition("Root Cause (first observed failure)")
    assert done.returncode == 1 and "the cat sat on the keyboard" in summary, done.stderr
    assert "rank      : 1" in summary.split("traceback")[0], summary
    assert ours.index("[rank 1] Traceback") < (ours + "[rank 0]").index("[rank 0]"), ours


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_gives_the_same_losses(tmp_path):
    overrides = [*SMALL, "config.TRAINER.DTYPE=float64"]
    ours = start(tmp_path, "config.TRAINER.DTYPE=float64")
    out, err = ours.communicate(timeout=200)
    assert ours.returncode == 0, out + err
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "tools/run_distributed.py"), *overrides, f"config.CHECKPOINT.DIR={tmp_path}/torchrun"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr

    def losses(name: str) -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    assert losses("torchrun") == pytest.approx(losses("run"), abs=1e-12)
    assert not (tmp_path / "outputs").exists()


def _listeners(launcher: int) -> tuple[list[str], list[str]]:
    """Addresses that the launcher and that other processes of its group listen on, as the kernel writes them."""
    found: tuple[list[str], list[str]] = [], []
    rows = {row.inode: row.local for row in connections() if row.state == LISTEN}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # it has ended
            if os.getpgid(pid := int(folder.parent.name)) == launcher:
                inodes = [path.readlink().name[8:-1] for path in folder.iterdir()]
                found[pid != launcher].extend(rows[inode] for inode in inodes if inode in rows)
    return found


def _processes_of_group(group: int) -> list[str]:
    listing = subprocess.run(["ps", "-ww", "-eo", "pgid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    # What has ended and waits for init to note it is gone for us.
    return [row[2] for row in rows if row[0] == str(group) and not row[1].startswith("Z")]
