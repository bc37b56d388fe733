"""``vissl-zero replay``: what is refused, each in one sentence, and how the plan changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reporting.test_bad_step_capture import Poison, trained
from vissl_zero.cli import main
from vissl_zero.commands.replay import _plan
from vissl_zero.resolve.resolved import Precision


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(folder, Poison(3))
    return folder / "bad_steps/3"


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replay", *words]) == 2
    out = capsys.readouterr()
    assert "Traceback" not in out.err and not out.out
    return out.err.strip()


def test_a_folder_that_is_none_is_refused_and_those_of_a_run_are_named(
    captured: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    must = "is no folder of a captured step: those are <run folder>/bad_steps/<step>, with bad_step.json."
    assert refusal(capsys, str(tmp_path)) == f"{tmp_path} {must}"
    run = captured.parent.parent
    assert refusal(capsys, str(run)) == f"{run} {must} Captured there: {captured}."


def _changed(captured: Path, tmp_path: Path, name: str, text: Any) -> Path:
    copied = tmp_path / "3"
    shutil.copytree(captured, copied)
    path = next(copied.rglob(name))
    path.write_text(text(path.read_text()))
    return copied


def test_a_later_version_is_refused(captured: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    later = _changed(
        captured, tmp_path, "bad_step.json", lambda text: text.replace('"format_version": 1', '"format_version": 2')
    )
    said = refusal(capsys, str(later))
    assert "has format version 2; this vissl_zero reads version 1. Open it with the version" in said


def test_damage_is_refused(captured: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = _changed(captured, tmp_path, "bad_step.json", lambda text: text.replace("the loss is nan", "it is fine"))
    assert "is damaged: its content does not match its checksum" in refusal(capsys, str(broken))
    shutil.rmtree(broken)
    broken = _changed(captured, tmp_path, "config.resolved.yaml", lambda text: "a: b")
    assert "config.resolved.yaml cannot be read (it has no config)" in refusal(capsys, str(broken))
    shutil.rmtree(broken / "checkpoints")
    assert "is damaged: it must hold one checkpoint, and holds 0" in refusal(capsys, str(broken))


def test_processes_that_cannot_be_are_refused(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("0", "-1"):
        assert "Write --processes 1, as the step was captured." in refusal(capsys, str(captured), "--processes", number)


def test_the_plan_changes_as_asked(captured: Path) -> None:
    plan = _plan(captured, "float32", 3, 2)
    assert plan.sharding.precision == Precision() and (plan.sharding.level, plan.world_size) == (3, 2)
    assert plan.batch_per_rank == 8
    same = _plan(captured, None, None, None)
    assert (same.sharding.level, same.world_size, same.sharding.precision.master) == (0, 1, "float64")


def test_the_command_prints_it_all_as_json(captured: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(captured.parent.parent.rglob("*"))
    assert main(["replay", str(captured), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["is_equal"] and result["first_not_finite"] == "trunk.stem.0" and len(result["modules"]) > 30
    assert sorted(captured.parent.parent.rglob("*")) == before
