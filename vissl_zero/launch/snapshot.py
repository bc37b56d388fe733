"""A copy of the code that a job runs: an edit of the checkout while the job waits in the queue does not reach it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vissl_zero.errors import LaunchError

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def snapshot(code: Path, imports: Sequence[str]) -> None:
    """Copy vissl_zero and the top-level modules of ``imports`` into the folder ``code``, which goes on PYTHONPATH.

    Raises:
        LaunchError: it cannot be written.
    """
    try:
        shutil.rmtree(code, ignore_errors=True)
        for name in dict.fromkeys(["vissl_zero", *(module.partition(".")[0] for module in imports)]):
            spec = find_spec(name)
            if spec is None:
                continue  # said already where imports are checked
            if spec.submodule_search_locations:
                shutil.copytree(next(iter(spec.submodule_search_locations)), code / name, ignore=_LEFT_OUT)
            elif spec.origin:
                code.mkdir(parents=True, exist_ok=True)
                shutil.copy(spec.origin, code / Path(spec.origin).name)
    except OSError as error:
        raise LaunchError(f"config.SLURM.SNAPSHOT_CODE: cannot copy the code to {code} ({error.strerror}).") from error
