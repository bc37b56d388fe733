"""What a sweep knows of each of its jobs: ``job.json`` in the job's folder. Imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vissl_zero.atomic import read_object, replacing

FILE_NAME = "job.json"


@dataclass(frozen=True)
class JobNote:
    """One job of a sweep.

    Attributes:
        overrides: as Hydra gave them to the job.
        code: exit code; None while it runs, or where it was interrupted.
    """

    overrides: list[str]
    code: int | None = None

    def write(self, folder: Path) -> None:
        """Replace the note in the job's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / FILE_NAME) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_note(folder: Path) -> JobNote | None:
    """The note of a job's folder; None if there is none that can be read."""
    try:
        note = JobNote(**read_object(folder / FILE_NAME))
    except (OSError, ValueError, TypeError):
        return None
    is_list = isinstance(note.overrides, list) and all(isinstance(word, str) for word in note.overrides)
    return note if is_list and (note.code is None or type(note.code) is int) else None


def read_summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a job, empty if it did not get that far."""
    try:
        return read_object(folder / "summary.json")
    except (OSError, ValueError):
        return {}


def is_done(folder: Path) -> bool:
    """Whether a job has come to its end in good order."""
    note = read_note(folder)
    return note is not None and note.code == 0 and bool(read_summary(folder))
