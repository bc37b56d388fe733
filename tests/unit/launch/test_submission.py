"""What is submitted to SLURM: no line that the user did not write, no folder that others can write to."""

from __future__ import annotations

import dataclasses
import os
import shlex
import stat
from pathlib import Path

import pytest

from tests.unit.config.example_config import CPU_HOST, complaints
from vissl_zero import cli
from vissl_zero.config.compose import compose
from vissl_zero.errors import LaunchError
from vissl_zero.launch import slurm
from vissl_zero.launch.slurm import code_folder, private_folder, script, snapshot
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

RECIPE = "quickstart/swav_digits"


def planned(*overrides: str) -> ResolvedRun:
    composed = compose(RECIPE, ["config.SLURM.USE_SLURM=true", *overrides])
    return resolve(composed.run, "/runs/mine", recipe=RECIPE)


def options(text: str) -> dict[str, str]:
    """The sbatch options of a script."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_script_says_what_the_keys_say():
    text = script(
        planned(
            "config.SLURM.NAME=mine",
            "config.SLURM.PARTITION=fast",
            "config.SLURM.ACCOUNT=lab",
            "config.SLURM.TIME_HOURS=2",
            "config.SLURM.TIME_MINUTES=30",
            "config.SLURM.SIGNAL_DELAY_S=200",
            "config.SLURM.SETUP=[module load cuda]",
            "+config.SLURM.ADDITIONAL_PARAMETERS.exclude=node7",
            "config.DISTRIBUTED.NUM_NODES=3",
            "config.MACHINE.DEVICE=gpu",
        )
    )
    found = options(text)
    expected = {
        "job-name": "mine",
        "partition": "fast",
        "account": "lab",
        "time": "150",
        "nodes": "3",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "2",
        "mem": "250GB",
        "signal": "USR2@200",
        "exclude": "node7",
        "open-mode": "append",
        "requeue": "",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "qos" not in found and "constraint" not in found
    assert "\nmodule load cuda\n" in text
    per_process = options(script(planned("config.SLURM.TASK_PER=process")))
    assert per_process["ntasks-per-node"] == "2" and per_process["cpus-per-task"] == "8"


def test_a_plan_says_that_nobody_knows_the_gpus_of_a_cluster_that_does_not_answer() -> None:
    (note,) = [note for note in planned().notes if "sinfo" in note]
    assert "nodes without GPUs" in note and "config.MACHINE.DEVICE=gpu or cpu" in note
    assert not [note for note in planned("config.MACHINE.DEVICE=gpu").notes if "sinfo" in note]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("NAME", "a\n#SBATCH --partition=urgent", "config.SLURM.NAME: must be one line"),
        ("COMMENT", "a\r#SBATCH --x", "config.SLURM.COMMENT: must be one line"),
        ("ADDITIONAL_PARAMETERS", {"exclude": "a\nrm -rf /"}, "ADDITIONAL_PARAMETERS.exclude: must be one line"),
        ("ADDITIONAL_PARAMETERS", {"x=1 --y": 1}, "must be a long option of sbatch"),
        ("ADDITIONAL_PARAMETERS", {"a\n": 1}, "must be a long option of sbatch"),
        ("ADDITIONAL_PARAMETERS", {"output": "/tmp/x"}, "Use config.SLURM.LOG_FOLDER"),
        ("ADDITIONAL_PARAMETERS", {"job_name": "x"}, "Use config.SLURM.NAME"),
        ("ADDITIONAL_PARAMETERS", {"exclusive": False}, "Leave it out to turn it off"),
        ("SETUP", ["module load a\n #SBATCH --partition=urgent"], "must be shell commands, not options"),
        ("LOG_FOLDER", "logs/%j", "must not contain %"),
        ("TIME_HOURS", 0, "must leave time to run"),
        ("SIGNAL_DELAY_S", 300000, "must be less than the time limit, 259200 s"),
        ("TASK_PER", "gpu", "must be node or process"),
        ("PORT_ID", 70000, "must be at most 65535"),
    ],
)
def test_what_cannot_be_meant_is_refused(key, value, message):
    found = complaints(CPU_HOST, SLURM__USE_SLURM=True, **{f"SLURM__{key}": value})
    assert len(found) == 1 and message in found[0]
    assert complaints(CPU_HOST, **{f"SLURM__{key}": value}) == []  # not submitted: no effect


@pytest.mark.parametrize(("folder", "message"), [("/runs/a\n#SBATCH --x", "must be one line"), ("/r/%j", "contain %")])
def test_a_run_folder_cannot_add_a_line_to_the_script(folder, message):
    found = complaints(CPU_HOST, SLURM__USE_SLURM=True, CHECKPOINT__DIR=folder)
    assert len(found) == 1 and "config.CHECKPOINT.DIR" in found[0] and message in found[0]
    assert complaints(CPU_HOST, CHECKPOINT__DIR=folder) == []


def test_neither_can_the_folder_that_the_command_was_given_in():
    plan = dataclasses.replace(planned(), run_dir="/home/me/a\n#SBATCH --partition=urgent\n/runs/1")
    with pytest.raises(LaunchError, match="must be one line of printable text"):
        script(plan)


def test_quotes_and_dollars_stay_text():
    """What the shell and sbatch read from the line is what was written; on the cluster, tests/slurm has the same."""
    comment = """it's "$(touch /tmp/x)" `id` \\ #"""
    found = options(script(planned(f"config.SLURM.COMMENT='{comment.replace(chr(39), chr(92) + chr(39))}'")))
    assert shlex.split(found["comment"]) == [comment]


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_a_sentence(tmp_path, monkeypatch):
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 30\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_ANSWER_S", 0.3)
    with pytest.raises(LaunchError, match="sbatch has not answered"):
        slurm.submit(planned(f"config.CHECKPOINT.DIR={tmp_path / 'run'}"), "")
    assert not (tmp_path / "run").exists()


def test_a_submission_folder_is_private(tmp_path):
    folder = private_folder(tmp_path / "run/slurm")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(LaunchError, match="private"):
        private_folder(folder)


@pytest.mark.parametrize(("mode", "is_safe"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_nor_may_a_folder_above_be_open(tmp_path, mode, is_safe):
    above = tmp_path / "shared"
    above.mkdir()
    above.chmod(mode)
    if is_safe:
        assert private_folder(above / "slurm").is_dir()
    else:
        with pytest.raises(LaunchError, match=f"everybody can write to {above}"):
            private_folder(above / "slurm")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path):
    theirs = Path(tmp_path / "theirs")
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    with pytest.raises(LaunchError, match="must belong to you"):
        private_folder(theirs)
    with pytest.raises(LaunchError, match=f"can write to {theirs}"):
        private_folder(theirs / "slurm")
    group = tmp_path / "group"
    group.mkdir()
    os.chown(group, 0, 65534)
    group.chmod(0o775)
    with pytest.raises(LaunchError, match="group nogroup can write"):
        private_folder(group / "slurm")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('hydra.launcher.comment="a\n#SBATCH -p urgent"', "hydra.launcher.comment: must be one line"),
        ("hydra.launcher.submitit_folder=open/%j", "could be replaced by others"),
    ],
)
def test_a_sweep_is_as_safe(word, message, tmp_path, monkeypatch, capsys):
    """Hydra's submitit launcher writes the same scripts and unpickles from a folder of its own."""
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["vissl-zero"])
    command = ["-m", f"config={RECIPE}", "config.ZERO.LEVEL=0,1", "hydra/launcher=submitit_slurm", word]
    assert cli.main(command) == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_a_snapshot_has_the_code_and_the_imports(tmp_path, monkeypatch):
    (tmp_path / "parts_of_mine").mkdir()
    (tmp_path / "parts_of_mine/__init__.py").write_text("A = 1\n")
    (tmp_path / "one_file.py").write_text("B = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = planned("config.SLURM.SNAPSHOT_CODE=true", "config.SLURM.SETUP=[module load cuda]")
    code = tmp_path / "code"
    snapshot(code, ["parts_of_mine.heads", "one_file", "no_such_module"])
    names = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    assert {"parts_of_mine/__init__.py", "one_file.py", "vissl_zero/launch/slurm.py"} <= names
    assert not any("__pycache__" in name for name in names)
    assert f"module load cuda\nexport PYTHONPATH={code_folder(plan)}" in script(plan)
    assert "export PYTHONPATH" not in script(planned())
