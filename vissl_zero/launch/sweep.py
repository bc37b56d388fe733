"""Around a sweep, whatever launches its jobs: a safe folder before, one summary after. Imports no torch by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.plain_tree import leaves
from vissl_zero.config.rules.slurm import is_unsafe
from vissl_zero.engine import stopping
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.launch.submission import private_folder
from vissl_zero.reporting.sweep_note import is_done, read_note

_sweep_dir: Path | None = None


class SweepFolder(Callback):
    """Called by Hydra, in the process that the user started."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember where the sweep goes; close the folder that submitit unpickles from.

        Raises:
            SystemExit: that folder is open to others, or a text for sbatch has several lines. (Hydra goes on after any
                other exception of a callback.)
        """
        global _sweep_dir
        _sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        folder = OmegaConf.select(config, "hydra.launcher.submitit_folder")
        if folder is None:
            return
        try:
            _check(OmegaConf.to_container(config.hydra.launcher, resolve=True))
            logs = private_folder(Path(str(folder).split("%")[0]).absolute())
        except VisslZeroError as error:
            print(error, file=sys.stderr)
            _sweep_dir = None
            raise SystemExit(2) from error
        print(f"sweep folder  {_sweep_dir}\nlogs          {logs}", flush=True)


def _remove_if_unused(folder: Path) -> None:
    """Take back what Hydra leaves of a sweep whose jobs were looked at only, or refused."""
    if {path.name for path in folder.iterdir()} == {"multirun.yaml"}:
        (folder / "multirun.yaml").unlink()
        folder.rmdir()


def _check(launcher: Any) -> None:
    """Refuse texts that would end a line of the sbatch script; ``setup`` is shell."""
    texts = [(key, value) for key, value in leaves(launcher) if not key.startswith("setup")]
    if found := [_two_lines(key, value) for key, value in texts if is_unsafe(value)]:
        raise ConfigError(found)


def _two_lines(key: str, value: str) -> Problem:
    must = "must be one line of printable text: the next line would be read as an option or a command"
    return Problem(f"hydra.launcher.{key}", repr(value), must, "Take the line breaks out.")


def finish_sweep() -> int | None:
    """Write and print the summary of the sweep that this process ran; its worst exit code, or None without a sweep."""
    global _sweep_dir
    folder, _sweep_dir = _sweep_dir, None
    if folder is None or not folder.is_dir():
        return None
    notes = [(path, note) for path in folder.iterdir() if path.is_dir() and (note := read_note(path)) is not None]
    if not notes:
        _remove_if_unused(folder)
        return None
    from vissl_zero.reporting.sweep_summary import CSV_NAME, PLOT_NAME, collect, print_sweep, write_sweep

    rows = collect(folder)
    write_sweep(folder, rows)
    print()
    print_sweep(rows)
    print(f"\nsweep folder  {folder}  ({CSV_NAME}, {PLOT_NAME})")
    missing = sum(not is_done(path) for path, _ in notes)
    again = f"The same command with hydra.sweep.dir={folder} does those."
    if stopping.asked() is not None:
        print(f"Stopped: some jobs are not done or have not begun. {again}")
    elif missing:
        print(f"{missing} of {len(notes)} jobs are not done. {again}")
    return max((note.code or 0 for _, note in notes), default=0)
