"""Sweeps through the command line: side by side, one summary, and only what is missing the second time."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hydra.types import RunMode
from omegaconf import OmegaConf

from tests.command_line import COMMAND, run_command
from tests.small_trunk import SMALL_TRUNK
from tests.unit.config.example_config import complaints
from vissl_zero.cli import main
from vissl_zero.engine import stopping
from vissl_zero.engine.stopping import JobNote
from vissl_zero.errors import ConfigError, LaunchError
from vissl_zero.launch.sweep import claim, divide, objective, read_metric
from vissl_zero.resolve.followed_figure import SUMMARY_NUMBERS
from vissl_zero.resolve.host import Host

SMALL = [
    "-m",
    "config=quickstart/swav_digits",
    "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
    "config.HOOKS.TENSORBOARD_SETUP.USE_TENSORBOARD=false",
    "hydra.sweep.dir=sweep",
]


def sweep(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [*COMMAND, *SMALL, *overrides]
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def results(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "sweep/sweep.csv").open() as file:
        return {row["job"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_jobs_run_side_by_side_and_a_failing_one_hides_no_other(tmp_path):
    overrides = ["hydra/launcher=local", "config.TRAINER.MAX_STEPS=2", "config.ZERO.LEVEL=0,9,3"]
    first = sweep(tmp_path, *overrides)
    out, _ = first.communicate(timeout=300)
    assert first.returncode == 2, out
    rows = results(tmp_path)
    assert [rows[name]["config.ZERO.LEVEL"] for name in "012"] == ["0", "9", "3"]
    assert [rows[name]["state"] for name in "012"] == ["done", "failed (2)", "done"]
    assert float(rows["0"]["loss_last"]) == pytest.approx(float(rows["2"]["loss_last"]), abs=1e-5)
    summary = json.loads((tmp_path / "sweep/2/summary.json").read_text())
    assert summary["level"] == 3 and int(rows["2"]["params_bytes"]) == summary["bytes"]["params"]
    assert (
        rows["1"]["loss_last"] == ""
        and "must be auto, fit, 0, 1, 2 or 3 (got 9)" in (tmp_path / "sweep/1/output.log").read_text()
    )
    assert (tmp_path / "sweep/sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "1 of 3 jobs are not done." in out

    written = (tmp_path / "sweep/0/metrics.jsonl").stat().st_mtime_ns
    again = sweep(tmp_path, *overrides)
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 2 and "3 jobs, 2 of them done before" in out, out
    assert (tmp_path / "sweep/0/metrics.jsonl").stat().st_mtime_ns == written and results(tmp_path) == rows

    other = sweep(tmp_path, *overrides[:-1], "config.ZERO.LEVEL=1,2")
    out, _ = other.communicate(timeout=120)
    assert other.returncode == 2 and "hold different jobs" in out and "Traceback" not in out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_seeds_are_trained_one_after_the_other_and_joined_in_a_table(tmp_path):
    words = [word for word in SMALL[1:] if not word.startswith("hydra.sweep.dir")]
    folder = tmp_path / "three (3)"
    words += ["config.TRAINER.MAX_STEPS=2", "config.SEEDS=[3, 1, 2]", f"config.CHECKPOINT.DIR='{folder}'"]
    out = run_command(*words, cwd=tmp_path, timeout_s=300).stdout
    summaries = [json.loads((folder / name / "summary.json").read_text()) for name in "012"]
    assert [
        yaml.safe_load((folder / name / "config.user.yaml").read_text())["config"]["SEED_VALUE"] for name in "012"
    ] == [3, 1, 2]
    losses = [summary["loss_last"] for summary in summaries]
    (group,) = json.loads((folder / "seeds.json").read_text())
    found = group["figures"]["loss_last"]
    assert found["mean"] == pytest.approx(sum(losses) / 3, rel=1e-12) and len({*losses}) == 3
    assert min(losses) <= found["low"] < found["mean"] < found["high"] <= max(losses)
    assert "mean over seeds" in out and f"[{found['low']:.4g}, {found['high']:.4g}]" in out
    again = run_command(*words, cwd=tmp_path, timeout_s=120)  # nothing is left to do
    assert again.stdout.count("done before") == 3 and "mean over seeds" in again.stdout


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["config.SEEDS=[1,1]"], "must be different whole numbers from 0"),
        (["config.SEEDS=[0,1]", "-m", "config.ZERO.LEVEL=0,3"], "must be empty in a sweep"),
        (["config.SEEDS=[a]"], "config.SEEDS"),
    ],
)
def test_seeds_that_are_wrong_get_a_sentence(words, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config=quickstart/swav_digits", *words]) == 2
    assert wanted in capsys.readouterr().err
    assert not [*(tmp_path / "runs").glob("*/*")]


def test_a_folder_of_other_jobs_is_refused_before_one_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*(word.replace("=false", "=False") for word in SMALL[1:]), "config.OPTIMIZER.lr=0.1"]  # as Hydra writes it
    for seed in (0, 1):
        JobNote([word for word in (*words, f"config.SEED_VALUE={seed}") if "hydra" not in word], 0).write(
            Path(f"sweep/{seed}")
        )
    before = sorted(path for path in Path().rglob("*"))
    assert main(["-m", *words, "config.OPTIMIZER.lr=0.2", "config.SEED_VALUE=0,1,2"]) == 2
    out, err = capsys.readouterr()
    assert "sweep/1 hold different jobs (config.OPTIMIZER.lr=0.1 there, config.OPTIMIZER.lr=0.2 here)" in err
    assert err.count("hold different jobs") == 1 and "loss" not in out
    assert sorted(path for path in Path().rglob("*")) == before


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_dry_run_of_several_jobs_writes_nothing(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/multirun.yaml").write_text("of an earlier sweep")
    run_command(*SMALL, "config.ZERO.LEVEL=0,3", "--dry-run", cwd=tmp_path, timeout_s=100)
    assert [path.name for path in tmp_path.rglob("*")] == ["sweep", "multirun.yaml"]
    assert (tmp_path / "sweep/multirun.yaml").read_text() == "of an earlier sweep"
    words = [*SMALL[1:-1], "config.SEEDS=[0,1]", "config.SEED_VALUE=5", "config.CHECKPOINT.DIR=seeds", "--dry-run"]
    out = run_command(*words, cwd=tmp_path, timeout_s=100).stdout
    assert "note: config.SEED_VALUE has no effect: config.SEEDS lists the seeds." in out
    assert str(tmp_path / "seeds/1") in out and not (tmp_path / "seeds").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_that_is_asked_to_stop_begins_no_other_job(tmp_path):
    """Also where the job in progress comes to its end all the same: there is one step left when the signal comes."""
    asked = sweep(tmp_path, "config.TRAINER.MAX_STEPS=2", "config.ZERO.LEVEL=0,3")
    metrics = tmp_path / "sweep/0/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    asked.send_signal(signal.SIGTERM)
    out, _ = asked.communicate(timeout=120)
    assert asked.returncode == stopping.STOPPED and "The same command with hydra.sweep.dir=" in out, out
    assert (tmp_path / "sweep/0/job.json").exists() and not (tmp_path / "sweep/1").exists()


def no_process_mentions(text: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_text() and int(path.parent.name) != os.getpid():
                return False
        except OSError:
            continue
    return True


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_that_is_killed_leaves_no_job(short_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_path))  # also tells its processes from others
    killed = sweep(short_path, "hydra/launcher=local", "config.TRAINER.MAX_STEPS=100000", "config.ZERO.LEVEL=0,3")
    metrics = short_path / "sweep/0/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(_processes_of(short_path)) > 2
    killed.kill()
    killed.communicate(timeout=40)
    deadline = time.monotonic() + 20
    while (left := _processes_of(short_path) or _temporary_files(short_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _temporary_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != "sweep"]


def _processes_of(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text())
        except OSError:  # gone, or another user's
            continue
    return [command for command in found if command and str(os.getpid()) not in command]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_jobs_interrupted_and_run_again_end_with_the_same_results(tmp_path):
    """Against a sweep that was left alone; two jobs at a time on two cores."""
    grid = [
        *SMALL_TRUNK,
        "hydra/launcher=local",
        "config.TRAINER.MAX_STEPS=20",
        "config.ZERO.LEVEL=range(0,4)",
    ]
    (tmp_path / "whole").mkdir()
    whole = sweep(tmp_path / "whole", *grid)
    out, _ = whole.communicate(timeout=700)
    assert whole.returncode == 0, out
    expected = results(tmp_path / "whole")
    assert len(expected) == 4

    (tmp_path / "cut").mkdir()
    cut = sweep(tmp_path / "cut", *grid)
    deadline = time.monotonic() + 300
    done = tmp_path / "cut/sweep"
    # The third job trains: so one of the first two has ended.
    while not (done / "2/metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(cut.pid, signal.SIGTERM)
    out, _ = cut.communicate(timeout=240)
    assert cut.returncode == stopping.STOPPED, out
    assert no_process_mentions(str(tmp_path / "cut"))
    assert 1 <= len(list(done.glob("*/summary.json"))) < 4
    again = sweep(tmp_path / "cut", *grid)
    out, _ = again.communicate(timeout=700)
    assert again.returncode == 0 and "of them done before" in out, out
    found = results(tmp_path / "cut")
    compared = [key for key in expected["0"] if key != "images_per_s"]
    assert {job: [row[key] for key in compared] for job, row in found.items()} == {
        job: [row[key] for key in compared] for job, row in expected.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_jobs_of_different_sizes_have_room_for_the_largest(tmp_path):
    refused = sweep(
        tmp_path, "config.ZERO.LEVEL=9", "config.DISTRIBUTED.NUM_PROC_PER_NODE=1,999", "hydra/launcher=local"
    )
    out, _ = refused.communicate(timeout=100)
    assert refused.returncode == 2 and "2 jobs, 1 at a time" in out, out


def test_the_machine_is_divided_without_overlap():
    host = Host(num_gpus=4, num_cores=4)
    slots = divide(host, procs=2, uses_gpus=True, most=None, num_jobs=16)
    assert slots.gpus == [["0", "1"], ["2", "3"]] and len(slots) == 2
    slots = divide(Host(num_cores=2), procs=1, uses_gpus=True, most=None, num_jobs=16)
    assert slots.gpus == [] and len(slots) == 2 and not set(slots.cores[0]) & set(slots.cores[1])
    assert len(divide(Host(num_cores=2), procs=4, uses_gpus=True, most=None, num_jobs=16)) == 1
    assert len(divide(Host(num_cores=2), procs=1, uses_gpus=False, most=3, num_jobs=16)) == 3
    assert len(divide(host, procs=1, uses_gpus=True, most=None, num_jobs=3)) == 3
    with pytest.raises(ConfigError, match="a job takes 2 of 4 GPUs"):
        divide(host, procs=2, uses_gpus=True, most=3, num_jobs=16)


def test_a_folder_is_claimed_by_one_job(tmp_path):
    job = tmp_path / "0"
    assert claim(job, ["a=1"])
    (job / "metrics.jsonl").write_text("{}\n")
    assert claim(job, ["a=1"]) and not (job / "metrics.jsonl").exists()  # interrupted without a checkpoint: made anew
    with pytest.raises(LaunchError, match="holds a different job"):
        claim(job, ["a=2"])
    JobNote(["a=0", "b=[1,2]", "a=1"]).write(job)
    assert claim(job, ["+b=[1,2]", "a=1"])  # the order of overrides makes no other job
    JobNote(["a=1"]).write(job)
    (job / "summary.json").write_text('{"loss_last": 1}')
    JobNote(["a=1"], 0).write(job)
    assert not claim(job, ["a=1"])
    foreign = tmp_path / "1"
    foreign.mkdir()
    (foreign / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(LaunchError, match="holds a different job"):
        claim(foreign, ["a=1"])


SEARCH = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("optuna") is None, reason="needs pip install hydra-optuna-sweeper")
def test_optuna_searches_by_a_figure_and_continues(tmp_path: Path) -> None:
    words = [*SEARCH, "config.TRAINER.MAX_STEPS=2", "config.OBJECTIVE=loss_last", "hydra/launcher=local"]
    words.append("config.OPTIMIZER.lr=tag(log,interval(0.0001,0.1))")
    first = sweep(tmp_path, *words)
    out, _ = first.communicate(timeout=250)
    assert first.returncode == 0, out
    rows = results(tmp_path)
    assert len({row["config.OPTIMIZER.lr"] for row in rows.values()}) == 3
    best = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    losses = [json.loads((tmp_path / f"sweep/{name}/summary.json").read_text())["loss_last"] for name in "012"]
    assert best["best_value"] == min(losses)
    again = sweep(tmp_path, *words)
    out, _ = again.communicate(timeout=100)
    assert again.returncode == 0 and "done before" in out, out


def test_a_search_needs_a_figure_that_is_there(tmp_path: Path) -> None:
    searching = OmegaConf.create({"mode": "MULTIRUN", "runtime": {"choices": {"hydra/sweeper": "optuna"}}})
    searching.mode = RunMode.MULTIRUN
    config = OmegaConf.create({"OBJECTIVE": "", "DRY_RUN": False})
    with pytest.raises(ConfigError, match=r"config.OBJECTIVE: must name the metric that optuna searches by"):
        objective(searching, config)
    with pytest.raises(ConfigError, match=r"config.DRY_RUN: must be false: optuna searches by a metric of training"):
        objective(searching, OmegaConf.create({"OBJECTIVE": "loss_last", "DRY_RUN": True}))
    assert read_metric(tmp_path, "loss_last") is None
    (tmp_path / "summary.json").write_text('{"loss_last": 1.5, "data": {}}')
    assert read_metric(tmp_path, "loss_last") == 1.5
    unknown = OmegaConf.create({"OBJECTIVE": "accuracy", "DRY_RUN": False, "HOOKS": {"EXTRA": []}})
    with pytest.raises(ConfigError, match=r"config.OBJECTIVE: must name a number of summary.json \(got 'accuracy'\)"):
        objective(searching, unknown)
    unknown.HOOKS.EXTRA = ["mine"]
    assert objective(searching, unknown) == "accuracy"
    with pytest.raises(ConfigError, match=r"must be a number in summary.json.*Did you mean 'loss_last'"):
        read_metric(tmp_path, "loss_lst")


@pytest.mark.skipif(find_spec("optuna") is None, reason="needs pip install hydra-optuna-sweeper")
@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("config.OBJECTIVE=accuracy", "config.OBJECTIVE: must name a number of summary.json"),
        ("config.OBJECTIVE=", "config.OBJECTIVE: must name the metric that optuna searches by"),
        ("hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials: must be at least 1 (got 0)"),
    ],
)
def test_a_search_that_cannot_end_well_is_refused_once_and_starts_nothing(
    word: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, *SEARCH, "config.OBJECTIVE=loss_last", "config.OPTIMIZER.lr=interval(0.01,0.1)", word]
    assert main(words) == 2
    assert capsys.readouterr().err.count(wanted) == 1 and not [*tmp_path.iterdir()]


@pytest.mark.skipif(find_spec("optuna") is None, reason="needs pip install hydra-optuna-sweeper")
def test_a_search_takes_no_figure_from_a_folder_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    JobNote(["a=1"]).write(Path("sweep/0"))
    Path("sweep/0/summary.json").write_text('{"loss_last": 0.5}')
    words = [*SMALL, *SEARCH, "hydra.sweeper.n_trials=1", "config.OBJECTIVE=loss_last"]
    assert main([*words, "config.OPTIMIZER.lr=interval(0.01,0.1)"]) == 2
    assert "sweep/0 holds a different job (a=1 there" in capsys.readouterr().err
    assert not Path("sweep/1").exists() and not Path("sweep/optimization_results.yaml").exists()


def test_an_objective_that_names_nothing_is_refused() -> None:
    for name in (*SUMMARY_NUMBERS, "top3", "precision_at_5"):
        assert complaints(OBJECTIVE=name) == []
    described = (Path(__file__).parents[2] / "docs/run_folder.md").read_text()
    assert [name for name in SUMMARY_NUMBERS if f"`{name}`" not in described] == []
    (found,) = complaints(OBJECTIVE="1e9")
    assert "OBJECTIVE: must name a number of summary.json (got '1e9')" in found
