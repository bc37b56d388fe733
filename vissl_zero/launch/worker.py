"""The program of one rank, which the launcher (through ``rank_group``) or torchrun starts.

It resumes from the newest checkpoint, and hooks save new checkpoints.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from vissl_zero.atomic import read_object
from vissl_zero.checkpoint.first_weights import load_first_weights, load_teacher
from vissl_zero.checkpoint.resume import opening_lines, resume
from vissl_zero.checkpoint.saver import CheckpointHook, Saver
from vissl_zero.checkpoint.snapshot import RankCheck
from vissl_zero.engine import stopping
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.engine.loop import train
from vissl_zero.evaluation.early_stopping import EarlyStoppingHook
from vissl_zero.launch.failure import FAILURE_FOLDER_VARIABLE, write_failure
from vissl_zero.launch.process_group import is_first_to_fail, process_group
from vissl_zero.launch.rendezvous import FIRST_LOCAL_RANK_VARIABLE, FIRST_RANK_VARIABLE, WORLD_SIZE_VARIABLE
from vissl_zero.registry import load_plugins
from vissl_zero.reporting import summary
from vissl_zero.reporting.hooks import build_hooks
from vissl_zero.reporting.lossy_output import tolerate_lost_output
from vissl_zero.reporting.quantity import FitMeasurement
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import load_resolved
from vissl_zero.sharding.memory import is_out_of_memory
from vissl_zero.terminal import print_line

_AFTER_FIRST_S = 2.0


def rank_device(plan: ResolvedRun) -> torch.device:
    """Return this rank's device: the CPU, or the GPU of its local rank."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if plan.device == "cuda" else torch.device("cpu")


def prepare_process(plan: ResolvedRun) -> None:
    """Set up threads, kernels and plugins; call it before anything is built."""
    torch.set_num_threads(plan.threads_per_rank)
    if (rounds := plan.config.MACHINE.TF32) is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounds
    if plan.sharding.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses deterministic mode
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    load_plugins(plan.config.IMPORTS)


def train_rank(plan: ResolvedRun) -> int:
    """Train to the end, from the newest checkpoint if there is one. Every rank calls it, inside the process group.

    Returns:
        Exit code: 0, or a code of ``engine/stopping.py`` if the run saved and stopped.
    """
    tolerate_lost_output()  # ranks of torchrun do not pass through ``rank_group``
    prepare_process(plan)
    limit = plan.config.CHECKPOINT.TIME_LIMIT_MIN
    if limit is not None and stopping.deadline() is None:  # otherwise the launcher has set it
        stopping.end_at(time.time() + 60 * limit)
    run = None
    device = rank_device(plan)
    measurement = FitMeasurement(device)
    try:
        run, schedules, frozen = build_run(
            plan,
            device,
            lambda model: load_first_weights(model, plan),
            lambda teacher: load_teacher(teacher, plan),
        )
        _refuse_single_images(run)
        run.results["memory_before_bytes"] = measurement.held_bytes
        hooks = with_checkpoints(run, [measurement, *build_hooks(plan)])
        if hooks is None:
            return 0
        train(run, schedules, frozen, hooks)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        from vissl_zero.reporting.out_of_memory import explain  # imports the planner, which training does not need

        raise explain(error, plan, run.sharded.ledger() if run else None) from error
    finally:
        if run is not None:
            run.sharded.close()  # the process ends without Python's own cleanup
    return run.stop.exit_code if run.stop is not None else 0


def _refuse_single_images(run: Run) -> None:
    """Refuse a micro-batch of one image before the first step, where batch norm will need more.

    Raises:
        ConfigError: as that step would.
    """
    if run.loader.order.fewest > 1 or run.plan.batch_per_rank == 1:
        return  # in the second case the first step tells
    from vissl_zero.planner.dry_run import meets_single_images, set_stage  # imports what training does not need

    if meets_single_images(run.plan, run.loader):
        set_stage(run.plan)


def work(plan: ResolvedRun) -> int:
    """Join the process group and train. Return the exit code."""
    with process_group(plan.backend, rank_device(plan), plan.sharding.timeout_s):
        try:
            return train_rank(plan)
        except RuntimeError as error:
            if "Timed out waiting" in str(error):  # gloo names neither the rank nor the key
                error.add_note(
                    f"Another rank gave no answer for {plan.sharding.timeout_s:g} s (config.DISTRIBUTED.TIMEOUT_S): it "
                    "hangs, is stopped, or needs longer. Look at its log, or raise TIMEOUT_S."
                )
            raise


def take_place() -> None:
    """Set this rank's global number; its launcher has set only the number on this machine."""
    if FIRST_RANK_VARIABLE in os.environ:
        os.environ["RANK"] = str(int(os.environ[FIRST_RANK_VARIABLE]) + int(os.environ["RANK"]))
        os.environ["LOCAL_RANK"] = str(int(os.environ[FIRST_LOCAL_RANK_VARIABLE]) + int(os.environ["LOCAL_RANK"]))
        os.environ["WORLD_SIZE"] = os.environ[WORLD_SIZE_VARIABLE]


def fail(error: BaseException) -> int:
    """Report an error of this rank and return its exit code: 2 for a user's error, 1 otherwise."""
    is_collected = FAILURE_FOLDER_VARIABLE in os.environ
    if not is_collected and not is_first_to_fail():
        # Without a launcher of ours, the first rank to fail prints at once. torchrun, which compares whole seconds,
        # reports the earliest record.
        time.sleep(_AFTER_FIRST_S)
    failure = write_failure(error, int(os.environ.get("RANK", 0)))
    if not is_collected:
        print(f"[rank {failure.rank}] {failure.text}", file=sys.stderr, flush=True)
    return 2 if failure.is_user_error else 1


def main() -> int:
    """Run a rank that ``RankGroup`` has started, with the run folder in ``argv[1]``. Return the exit code."""
    take_place()
    try:
        return work(load_resolved(Path(sys.argv[1]) / "config.resolved.yaml"))
    except BaseException as error:  # noqa: BLE001 - whatever ended this rank must be reported to the launcher
        return fail(error)


def with_checkpoints(run: Run, hooks: Sequence[Hook]) -> list[Hook] | None:
    """Restore ``run`` from its newest checkpoint, if it has one and may resume. Return the hooks for training.

    Collective. Returns None if the run is complete and has written its summary.

    Raises:
        CheckpointError, ConfigError: see ``resume``.
    """
    options = run.plan.config.CHECKPOINT
    saver = Saver(run.folder, options.ASYNC, options.KEEP_LAST, options.KEEP_EVERY, run.device)
    if options.AUTO_RESUME:
        resumed = resume(run, hooks, run.plan)
        if resumed.path is not None:
            saver.latest_step = run.step
        if run.is_main:
            for line in opening_lines(resumed, run.plan):
                print_line(line)
    if run.is_main and run.step > run.num_steps:
        print_line(
            f"warning: the checkpoint is of step {run.step}, and config.TRAINER ends at {run.num_steps}: nothing is "
            "trained. Raise config.TRAINER.MAX_STEPS, or config.OPTIMIZER.num_epochs, to train on."
        )
    has_stopped = any(isinstance(hook, EarlyStoppingHook) and hook.has_stopped for hook in hooks)
    if run.is_resumed and (run.step >= run.num_steps or has_stopped) and _is_over(run):
        if run.is_main:
            print_line(
                f"The run in {run.folder} is complete (step {run.step} of {run.num_steps}); nothing is left to do."
            )
        saver.close()
        return None
    if options.CHECK_RANKS_EVERY > 0:
        hooks = [*hooks, RankCheck(options.CHECK_RANKS_EVERY)]
    hook = CheckpointHook(saver, hooks, options.CHECKPOINT_FREQUENCY, options.CHECKPOINT_ITER_FREQUENCY)
    return [*hooks, hook]


def _is_over(run: Run) -> bool:
    """Check whether the run has written the summary of its last step; all ranks share the folder, so they agree."""
    try:
        return read_object(run.folder / summary.FILE_NAME).get("num_steps") == run.step
    except (OSError, ValueError):
        return False
