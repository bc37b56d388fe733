"""What stands in a run folder before a run starts there: nothing is written through a link, nothing is waited for."""

from __future__ import annotations

import os

import pytest

from tests.unit.commands.example_checkpoint import state_of, tiny_model, write_checkpoint
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.errors import ConfigError, LaunchError
from vissl_zero.launch.run_folder import prepare_folder
from vissl_zero.resolve.saved import as_data


def test_both_configurations_are_there_at_once_or_not_at_all(tmp_path):
    names = ("config.user.yaml", "config.resolved.yaml")
    for name in names:
        (tmp_path / name).write_text("old")
        (tmp_path / f"first.{name}").hardlink_to(tmp_path / name)  # shows what is written in place
    prepare_folder(make_plan(make_config(), tmp_path), "new\n").release()
    assert (tmp_path / "config.user.yaml").read_text() == "new\n"
    assert [(tmp_path / f"first.{name}").read_text() for name in names] == ["old", "old"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize(
    "name", ["run.lock", "config.user.yaml", "config.resolved.yaml", "metrics.jsonl", "checkpoints", "logs/rank0.log"]
)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_of_ours_is_named(tmp_path, name, kind):
    mine, path = tmp_path / "mine", tmp_path / "run" / name
    mine.write_text("mine")
    path.parent.mkdir(parents=True)
    {"link": lambda: path.symlink_to(mine), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    plan = make_plan(make_config(), tmp_path / "run")
    if kind == "folder" and name in ("checkpoints", "logs/rank0.log"):
        prepare_folder(plan, "").release()
        return
    says = {"link": "a link", "pipe": "a named pipe", "folder": "a folder"}[kind]
    with pytest.raises(LaunchError, match=f"{path} is {says}, and a run could write through it"):
        prepare_folder(plan, "")
    assert mine.read_text() == "mine"


def test_a_configuration_that_cannot_resume_the_run_overwrites_nothing(tmp_path):
    plan = make_plan(make_config(), tmp_path)
    prepare_folder(plan, "first\n").release()
    write_checkpoint(tmp_path, state_of(tiny_model()), resolved=as_data(plan))
    resolved = (tmp_path / "config.resolved.yaml").read_bytes()
    other = make_config()
    other["SEED_VALUE"] = 7
    with pytest.raises(ConfigError, match=r"config\.SEED_VALUE: was"):
        prepare_folder(make_plan(other, tmp_path), "second\n")
    assert (tmp_path / "config.user.yaml").read_text() == "first\n"
    assert (tmp_path / "config.resolved.yaml").read_bytes() == resolved
    prepare_folder(plan, "third\n").release()  # the lock is free, and the same configuration resumes
    assert (tmp_path / "config.user.yaml").read_text() == "third\n"
