"""The start of a run: in N processes here, as one of several machines, or as one rank that torchrun has started."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vissl_zero.engine import stopping
from vissl_zero.errors import VisslZeroError
from vissl_zero.launch.launcher import launch_local, launch_machine
from vissl_zero.launch.run_folder import RunLock, prepare_folder, require_free, require_plain_files
from vissl_zero.planner.fit_plans import FitRun
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import as_data
from vissl_zero.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

DOES_NOT_FIT = 1


def _is_under_torchrun() -> bool:
    """Check whether another launcher has already started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ


def run(plan: ResolvedRun, user_yaml: str, node_id: int = 0, fit: FitRun | None = None) -> int:
    """Run to the end, or submit. Return the exit code.

    Args:
        plan: the resolved run.
        user_yaml: the configuration as the user wrote it, interpolations unresolved, for ``config.user.yaml``.
        node_id: number of this machine, where machines are started by hand.
        fit: fit that chose ``plan``, and chooses another plan if memory runs out; only on one machine.
    """
    if plan.config.DRY_RUN:  # under torchrun, every rank executes this
        is_silent = _is_under_torchrun() and os.environ["RANK"] != "0"  # RANK alone may be left from another program
        budget = fit.choice.budget_bytes if fit else None
        return 0 if is_silent else print_dry_run(plan, _submission(plan), budget_bytes=budget)
    if _is_under_torchrun():
        return _run_as_rank(plan, user_yaml)
    if plan.config.SLURM.USE_SLURM:
        from vissl_zero.launch.slurm import submit

        return submit(plan, user_yaml)
    if plan.num_nodes > 1:
        return launch_machine(plan, user_yaml, node_id)
    with prepare_folder(plan, user_yaml):
        with suppress(OSError, ValueError):  # the terminal is gone
            ranks = "1 process" if plan.procs_per_node == 1 else f"{plan.procs_per_node} processes"
            print(f"Starting {plan.recipe} in {ranks} on {plan.device}: {plan.run_dir}", flush=True)
        return launch_local(plan, fit=fit)


def _run_as_rank(plan: ResolvedRun, user_yaml: str) -> int:
    from vissl_zero import collectives
    from vissl_zero.launch.process_group import process_group
    from vissl_zero.launch.worker import fail, rank_device, train_rank
    from vissl_zero.sharding.allocator import allocator_advice

    if plan.device == "cpu" and (advice := allocator_advice(plan.sharding)):
        plan = replace(plan, notes=(*plan.notes, advice))
    stopping.forget()  # a request to an earlier run of this process
    stopping.listen()
    lock: RunLock | None = None
    try:
        with process_group(plan.backend, rank_device(plan), plan.sharding.timeout_s):
            # Each rank has composed its own plan, and the time in the folder's name may differ: rank 0 decides.
            plan = replace(plan, run_dir=collectives.broadcast_object(plan.run_dir))
            problem: VisslZeroError | None = None
            if collectives.rank() == 0:
                try:
                    lock = prepare_folder(plan, user_yaml)
                except VisslZeroError as error:
                    problem = error
            if problem := collectives.broadcast_object(problem):
                raise problem
            return train_rank(plan)
    except BaseException as error:  # noqa: BLE001 - whatever ended this rank must be reported to the launcher
        return fail(error)
    finally:
        if lock is not None:
            lock.release()


def _submission(plan: ResolvedRun) -> str:
    """Return the sbatch script of a run that would be submitted; "" for other runs."""
    if not plan.config.SLURM.USE_SLURM:
        return ""
    from vissl_zero.launch.slurm import script

    return script(plan)


def print_dry_run(
    plan: ResolvedRun, submission: str = "", console: Console | None = None, budget_bytes: int | None = None
) -> int:
    """Print the plan for ``config.DRY_RUN=true`` and return the exit code: 0, or ``DOES_NOT_FIT``.

    It shows everything that the user can check before spending hours, and starts nothing. The data are indexed, a few
    images are read, the model is built with fake tensors, and the run folder is inspected.

    Args:
        plan: the resolved run.
        submission: the sbatch script if the run would be submitted, else "".
        console: console to print to; None: stdout.
        budget_bytes: budget for which ``fit`` chose the plan; None: ``fit`` did not choose.
    Raises:
        ConfigError, DataError, CheckpointError, LaunchError: the run would be refused with the same error.
    """
    import rich

    from vissl_zero.checkpoint.first_weights import load_first_weights
    from vissl_zero.planner.candidates import Budget
    from vissl_zero.planner.dry_run import dry_run
    from vissl_zero.reporting.dry_run_lines import dry_run_lines, title, verdict

    out = console or rich.get_console()
    print_line(title(plan), out)  # the model takes seconds, or a minute
    resumed = _resumed(plan)
    run = dry_run(plan, None if resumed else lambda model: load_first_weights(model, plan))
    budget = None if budget_bytes is None else Budget(budget_bytes, source="the budget of config.ZERO.LEVEL=fit")
    for line in [*dry_run_lines(run, budget), *resumed]:
        print_line(line, out)
    if submission:
        print_line(f"\nsbatch script:\n{submission}", out)
    return 0 if verdict(run, budget)[0] else DOES_NOT_FIT


def _resumed(plan: ResolvedRun) -> list[str]:
    """Return lines on whether and from what the run would resume; the data of checkpoints are not read.

    Raises:
        ConfigError, CheckpointError, LaunchError: the run could not start or resume in its folder.
    """
    from vissl_zero.checkpoint.comparison import require_resumable
    from vissl_zero.checkpoint.folder import find_checkpoints, newest_checkpoint
    from vissl_zero.checkpoint.resume import Resumable, opening_lines

    folder, options = Path(plan.run_dir), plan.config.CHECKPOINT
    require_plain_files(folder)
    require_free(folder, plan)
    if not options.AUTO_RESUME or not find_checkpoints(folder):
        return []
    passed_over: list[str] = []
    with newest_checkpoint(folder, passed_over) as checkpoint:
        manifest = checkpoint.manifest
        require_resumable(manifest.config, as_data(plan), options.ALLOW_CHANGED)
        lines = opening_lines(Resumable(checkpoint.path, passed_over), plan)
    return ["resume:", *(f"  {line}" for line in lines)]
