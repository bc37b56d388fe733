"""A bad step's folder: it is whole or not there, and a wrong folder is answered with the right ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from vissl_zero.checkpoint.bad_step import BadStep, NotWrittenError, _require_all, read_facts
from vissl_zero.checkpoint.folder import write_json
from vissl_zero.errors import CheckpointError

FACTS = BadStep(step=3, why="the loss is nan", loss="nan", grad_norm="1.5", lr_factor=0.5)


@pytest.mark.parametrize("error", [OSError("disk is full"), CheckpointError("x is of no known type")])
def test_what_fails_leaves_no_folder(tmp_path: Path, error: Exception) -> None:
    folder = tmp_path / "bad_steps/3"
    folder.mkdir(parents=True)
    (folder / "half").touch()

    def work() -> None:
        raise error

    with pytest.raises(NotWrittenError, match=str(error)):
        _require_all(work, folder)
    assert not folder.exists() and folder.parent.exists()
    _require_all(folder.mkdir, folder)
    assert folder.exists()


def test_the_facts_come_back(tmp_path: Path) -> None:
    write_json(tmp_path / "bad_step.json", asdict(FACTS))
    assert read_facts(tmp_path) == FACTS


@pytest.mark.parametrize("change", [{"why": None}, {"more": 1}])
def test_facts_of_another_version_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    facts = {key: value for key, value in {**asdict(FACTS), **change}.items() if value is not None}
    write_json(tmp_path / "bad_step.json", facts)
    with pytest.raises(CheckpointError, match="lacks what describes a step"):
        read_facts(tmp_path)


def test_another_folder_is_answered_with_those_of_captured_steps(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_facts(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is no folder of a captured step: those are <run folder>/bad_steps/<step>, with bad_step.json."
    )
    steps = [tmp_path / "bad_steps" / str(step) for step in (2, 10, 11, 12, 13, 14)]
    for step in steps:
        step.mkdir(parents=True)
        (step / "bad_step.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError) as caught:
        read_facts(tmp_path)
    assert str(caught.value).endswith(f"bad_step.json. Captured there: {', '.join(map(str, steps[:5]))}.")
