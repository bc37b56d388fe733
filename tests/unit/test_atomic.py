from __future__ import annotations

import os
from pathlib import Path

import pytest

from vissl_zero.atomic import replacing
from vissl_zero.engine.stopping import is_done, read_note


def test_the_new_file_appears_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", '{"overrides": 3}', '{"overrides": [{}]}', "{", None])
def test_a_hostile_note_of_a_job_is_no_note(tmp_path: Path, text: str | None) -> None:
    """One that is nested too deeply raises RecursionError, a named pipe waits for a writer."""
    for name in ("job.json", "summary.json"):
        if text is None:
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).write_text(text)
    assert read_note(tmp_path) is None and not is_done(tmp_path)


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_the_first_error_is_reported_where_nothing_can_be_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError, match="first"), replacing(folder / "a") as temporary:
        temporary.mkdir()  # unlink fails
        raise ValueError("first")
