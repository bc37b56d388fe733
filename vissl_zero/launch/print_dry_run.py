"""``config.DRY_RUN=true``: everything a person can check before spending hours, without starting anything.

The recipe has been composed, checked and resolved by then. Here the data are indexed and a few images are read, the
model is built with fake tensors, the run folder is looked at, and the plan is printed.
"""

from __future__ import annotations

from pathlib import Path

import rich
from rich.console import Console

from vissl_zero.checkpoint.comparison import require_resumable
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.checkpoint.folder import find_checkpoints, newest_checkpoint
from vissl_zero.checkpoint.resume import Found, opening_lines
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.saved import as_data
from vissl_zero.engine.dry_run import dry_run
from vissl_zero.launch.run_folder import require_free, require_plain_files
from vissl_zero.reporting.dry_run_lines import dry_run_lines, title, verdict

DOES_NOT_FIT = 1


def print_dry_run(plan: ResolvedRun, submission: str = "", console: Console | None = None) -> int:
    """Print the plan; returns the exit code: 0, or ``DOES_NOT_FIT``.

    Args:
        plan: the resolved run.
        submission: the sbatch script, where the run would be submitted.
        console: where to print.
    Raises:
        ConfigError, DataError, CheckpointError, LaunchError: what the run would be refused for.
    """
    out = console or rich.get_console()
    out.print(title(plan), markup=False, highlight=False, soft_wrap=True)  # the model takes seconds, or a minute
    resumed = _resumed(plan)
    run = dry_run(plan, None if resumed else lambda model: load_first_weights(model, plan))
    for line in [*dry_run_lines(run), *resumed]:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if submission:
        out.print(f"\nsbatch script:\n{submission}", markup=False, highlight=False, soft_wrap=True)
    return 0 if verdict(run)[0] else DOES_NOT_FIT


def _resumed(plan: ResolvedRun) -> list[str]:
    """What the run would do with what its folder already holds; the checkpoint's data are not read.

    Raises:
        ConfigError, CheckpointError, LaunchError: as the run would, where it cannot start or resume there.
    """
    folder, options = Path(plan.run_dir), plan.config["CHECKPOINT"]
    require_plain_files(folder)
    require_free(folder, plan)
    if not options["AUTO_RESUME"] or not find_checkpoints(folder):
        return []
    passed_over: list[str] = []
    with newest_checkpoint(folder, passed_over) as checkpoint:
        manifest = checkpoint.manifest
        require_resumable(manifest.config, as_data(plan), options["ALLOW_CHANGED"])
        lines = opening_lines(Found(checkpoint.path, passed_over), plan)
    return ["resume:", *(f"  {line}" for line in lines)]
