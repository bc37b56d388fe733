"""Start a run: here, in N processes, or as one rank of a job that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vissl_zero.atomic import irregular, replacing
from vissl_zero.config.fit_log import Choice
from vissl_zero.config.resolve import save_resolved
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.errors import LaunchError
from vissl_zero.launch.run_lock import RunLock

_OUR_FILES = {
    "config.resolved.yaml",
    "config.user.yaml",
    "forecasts.jsonl",
    "metrics.jsonl",
    "report.png",
    "run.lock",
    "summary.json",
    "weights.safetensors",
    "weights_ema.safetensors",
}
_OUR_FOLDERS = ("features", "logs", "tensorboard")


def is_under_torchrun() -> bool:
    """Whether another launcher has already started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ


def prepare_folder(plan: ResolvedRun, user_yaml: str) -> RunLock:
    """Make the run folder, lock it, write the user's and the resolved configuration into it. One process calls this.

    Returns:
        The lock, to be held as long as the run lives.
    Raises:
        LaunchError: another run is alive in the folder, it holds one that is not to be continued, or it cannot be
            written.
    """
    folder = Path(plan.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_plain_files(folder)
        lock = RunLock(folder)
        try:
            require_free(folder, plan)
            with replacing(folder / "config.user.yaml") as temporary:
                temporary.write_text(user_yaml, encoding="utf-8")
            save_resolved(plan, folder / "config.resolved.yaml")
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise LaunchError(f"config.CHECKPOINT.DIR: cannot write to {folder} ({error.strerror}).") from error
    return lock


def require_plain_files(folder: Path) -> None:
    """Nothing in the folder is a link, which a run would write through, or a folder where the run has a file.

    What stands inside ``checkpoints`` is left to the search for one to resume from, which passes over what is damaged.
    """
    for path in sorted(path for part in (folder, *map(folder.joinpath, _OUR_FOLDERS)) for path in _entries(part)):
        kind = irregular(path.lstat())
        if kind and (kind != "a folder" or path.name in _OUR_FILES):
            raise LaunchError(
                f"config.CHECKPOINT.DIR: {path} is {kind}, where a run writes its own files. Remove it, or name "
                "another folder."
            )


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def require_free(folder: Path, plan: ResolvedRun) -> None:
    """The folder holds no run, or one that can be continued: it has a checkpoint, or ended before its first."""
    if not (folder / "metrics.jsonl").exists():
        return
    has_checkpoint = any(folder.glob("checkpoints/step_*"))
    if plan.config["CHECKPOINT"]["AUTO_RESUME"] and (has_checkpoint or not (folder / "summary.json").exists()):
        return
    raise LaunchError(
        f"config.CHECKPOINT.DIR: {folder} already holds a run, and nothing there is overwritten. "
        "Name another folder, or move that one away."
    )


def run(plan: ResolvedRun, user_yaml: str, node_id: int = 0, choices: Sequence[Choice] = ()) -> int:
    """Run to the end, or submit; returns the exit code.

    Args:
        plan: the resolved run.
        user_yaml: the configuration as the user wrote it, interpolations unresolved, for ``config.user.yaml``.
        node_id: number of this machine, where machines are started by hand.
        choices: of ``fit``: ``plan`` and what to go on with, in turn, where memory runs out; on one machine.
    """
    if plan.config["DRY_RUN"]:  # under torchrun every rank comes here
        from vissl_zero.launch.print_dry_run import print_dry_run

        return print_dry_run(plan, _submission(plan)) if os.environ.get("RANK", "0") == "0" else 0
    if is_under_torchrun():
        return _run_as_rank(plan, user_yaml)
    if plan.config["SLURM"]["USE_SLURM"]:
        from vissl_zero.launch.slurm import submit

        return submit(plan, user_yaml)
    if plan.num_nodes > 1:
        from vissl_zero.launch.machines import launch_machine

        return launch_machine(plan, user_yaml, node_id)
    from vissl_zero.launch.local import launch_local

    with prepare_folder(plan, user_yaml):
        with suppress(OSError, ValueError):  # the terminal is gone
            ranks = "1 process" if plan.procs_per_node == 1 else f"{plan.procs_per_node} processes"
            print(f"Starting {plan.recipe} in {ranks} on {plan.device}: {plan.run_dir}", flush=True)
        return launch_local(plan, choices=choices)


def _run_as_rank(plan: ResolvedRun, user_yaml: str) -> int:
    from vissl_zero import collectives
    from vissl_zero.engine import stopping
    from vissl_zero.launch.process_group import process_group
    from vissl_zero.launch.worker import fail, rank_device, train_rank
    from vissl_zero.sharding.allocator import allocator_advice

    if plan.device == "cpu" and (advice := allocator_advice(plan.sharding)):
        plan = replace(plan, notes=(*plan.notes, advice))
    stopping.forget()  # of an earlier run of this process
    stopping.listen()
    lock: RunLock | None = None
    try:
        with process_group(plan.backend, rank_device(plan), plan.sharding.timeout_s):
            # Every rank composed by itself, and the clock in the folder's name may differ: rank 0 decides.
            plan = replace(plan, run_dir=collectives.broadcast_object(plan.run_dir))
            problem: LaunchError | None = None
            if collectives.rank() == 0:
                try:
                    lock = prepare_folder(plan, user_yaml)
                except LaunchError as error:
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
    """The sbatch script of a run that would be submitted, else nothing."""
    if not plan.config["SLURM"]["USE_SLURM"]:
        return ""
    from vissl_zero.launch.slurm_script import script

    return script(plan)
