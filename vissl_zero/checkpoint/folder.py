"""The folder of a run's checkpoints: ``<run folder>/checkpoints/step_<steps>``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from vissl_zero.checkpoint.manifest import LaterFormatError
from vissl_zero.checkpoint.reader import Checkpoint, open_checkpoint
from vissl_zero.errors import CheckpointError

FOLDER_NAME = "checkpoints"
_NAME = re.compile(r"step_(\d{9,})")
_PARTIAL = re.compile(r"\.step_\d{9,}\.(partial|old)")


def name_of(step: int) -> str:
    """Folder name of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:09d}"


def partial_name_of(step: int) -> str:
    """Folder name while it is being written."""
    return f".{name_of(step)}.partial"


def step_of(path: Path) -> int | None:
    """Optimizer steps of a checkpoint folder, by its name; None for anything else."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def find_checkpoints(run_folder: str | Path) -> list[Path]:
    """Folders of a run's finished checkpoints, newest first; only opening one tells whether it is whole."""
    folder = Path(run_folder) / FOLDER_NAME
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def newest_checkpoint(path: str | Path, passed_over: list[str] | None = None, with_data: bool = False) -> Checkpoint:
    """The checkpoint at ``path``, or, for a run folder, its newest that opens.

    Args:
        path: of either.
        passed_over: gets a sentence for each newer one that does not open.
        with_data: read the data against their checksums too; what is damaged does not count as opening.
    Raises:
        LaterFormatError: one that is newer than the newest that opens was written by a later vissl_zero.
        CheckpointError: there is none; the message says why each that is there does not open.
    """
    path = Path(path)
    candidates = find_checkpoints(path)
    if not candidates:
        if path.is_dir() and not (path / "manifest.json").exists():
            raise CheckpointError(f"{path} holds no checkpoint.")
        return _opened(path, with_data)
    reasons = []
    for candidate in candidates:
        try:
            return _opened(candidate, with_data)
        except LaterFormatError:
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            if passed_over is not None:
                passed_over.append(str(error))
    raise CheckpointError(f"{path} holds no checkpoint that opens:\n" + "\n".join(reasons))


def _opened(path: Path, with_data: bool) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    problems = list(checkpoint.verify()) if with_data else []
    if problems:
        checkpoint.close()
        raise CheckpointError("\n".join(problems))
    return checkpoint


def remove_leftovers(run_folder: Path) -> list[str]:
    """Remove what interrupted saves have left; gives the names. One process calls this, with no save under way."""
    folder = run_folder / FOLDER_NAME
    found = sorted(p for p in folder.iterdir() if _PARTIAL.fullmatch(p.name)) if folder.is_dir() else []
    for path in found:
        _remove(path)
    return [path.name for path in found]


def _remove(path: Path) -> None:
    """A folder with what is in it; a link itself, not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def prune(run_folder: Path, keep_last: int, keep_every: int, newest: int | None = None) -> list[Path]:
    """Remove all checkpoints but the newest ``keep_last`` and those at multiples of ``keep_every`` steps.

    Args:
        run_folder: of the run.
        keep_last: at least 1; -1: all.
        keep_every: in optimizer steps; -1: none.
        newest: steps of the newest to count; later ones, of another course of the run or damaged, are left alone.
    Returns:
        What was removed.
    """
    if keep_last < 0:
        return []
    removed = []
    found = [p for p in find_checkpoints(run_folder) if newest is None or (step_of(p) or 0) <= newest]
    for path in found[max(keep_last, 1) :]:
        step = step_of(path)
        if keep_every > 0 and step is not None and step % keep_every == 0:
            continue
        # Renamed first: half a checkpoint must never stand under the name of a whole one.
        doomed = path.with_name(f".{path.name}.old")
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)
        removed.append(path)
    return removed
