"""``config.DRY_RUN=true``: everything a person can check before spending hours, without starting anything.

The recipe has been composed, checked and resolved by then. Here the data are indexed and one micro-batch is read, the
model is built with fake tensors, and the plan is printed.
"""

from __future__ import annotations

import rich
from rich.console import Console

from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.engine.rehearsal import rehearse
from vissl_zero.reporting.rehearsal_lines import rehearsal_lines


def dry_run(plan: ResolvedRun, submission: str = "", console: Console | None = None) -> int:
    """Print the plan; returns the exit code.

    Args:
        plan: the resolved run.
        submission: the sbatch script, where the run would be submitted.
        console: where to print.
    Raises:
        ConfigError, DataError: what the plan asks for does not exist or cannot be done.
    """
    out = console or rich.get_console()
    for line in rehearsal_lines(rehearse(plan)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if submission:
        out.print(f"\nsbatch script:\n{submission}", markup=False, highlight=False, soft_wrap=True)
    return 0
