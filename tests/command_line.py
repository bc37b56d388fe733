"""The command line in a process of its own, as people start it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from typing import Any

COMMAND = [sys.executable, "-m", "vissl_zero.cli"]
_SHOWN = 3000  # characters of each stream, of a command that failed


def run_command(
    *words: str, timeout_s: float = 280, returncodes: Collection[int] = (0,), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``vissl-zero`` to its end; fail with what it printed unless it ends with one of these exit codes.

    Args:
        options: of ``subprocess.run``: ``cwd``, ``env``.
    """
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    assert done.returncode in returncodes, done.stdout[-_SHOWN:] + done.stderr[-_SHOWN:]
    return done
