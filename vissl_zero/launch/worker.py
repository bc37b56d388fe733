"""What one rank runs: ``python -m vissl_zero.launch.worker <run folder>``, started by the launcher or by torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from vissl_zero.config.resolve import load_resolved
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.launch.failure import write_failure
from vissl_zero.launch.membership import FIRST_LOCAL_RANK_VARIABLE, FIRST_RANK_VARIABLE, WORLD_SIZE_VARIABLE
from vissl_zero.launch.process_group import process_group
from vissl_zero.registry import load_plugins
from vissl_zero.reporting.hooks import build_hooks
from vissl_zero.reporting.out_of_memory import explain, is_out_of_memory


def rank_device(plan: ResolvedRun) -> torch.device:
    """This rank's device: the CPU, or the GPU of its local rank."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if plan.device == "cuda" else torch.device("cpu")


def train_rank(plan: ResolvedRun) -> None:
    """Train one rank from start to end. Every rank calls it, inside the process group."""
    torch.set_num_threads(plan.threads_per_rank)
    load_plugins(plan.config["IMPORTS"])
    run = None
    try:
        run, schedules, frozen = build_run(plan, rank_device(plan))
        train(run, schedules, frozen, build_hooks(plan))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain(error, plan, run.sharded.ledger() if run else None) from error


def work(plan: ResolvedRun) -> None:
    """Join the other ranks and train."""
    with process_group(plan.backend, rank_device(plan), plan.sharding.timeout_s):
        train_rank(plan)


def take_place() -> None:
    """Number this rank among all machines; torch's launcher knows its own machine only."""
    if FIRST_RANK_VARIABLE in os.environ:
        os.environ["RANK"] = str(int(os.environ[FIRST_RANK_VARIABLE]) + int(os.environ["RANK"]))
        os.environ["LOCAL_RANK"] = str(int(os.environ[FIRST_LOCAL_RANK_VARIABLE]) + int(os.environ["LOCAL_RANK"]))
        os.environ["WORLD_SIZE"] = os.environ[WORLD_SIZE_VARIABLE]


def fail(error: BaseException) -> int:
    """Report an error of this rank and give its exit code: 2 for a user's error, 1 otherwise."""
    failure = write_failure(error, int(os.environ.get("RANK", 0)))
    if "VISSL_ZERO_FAILURES" not in os.environ:
        # No launcher of ours collects the reports: print, but let the rank that failed first speak first.
        lost_peer = isinstance(error, RuntimeError) and "peer" in str(error)
        time.sleep(2.0 if lost_peer else 0.0)
        print(f"[rank {failure.rank}] {failure.text}", file=sys.stderr, flush=True)
    return 2 if failure.is_user_error else 1


def main() -> int:
    """Entry of a rank started by ``launch/local.py``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher alone answers it
    take_place()
    try:
        work(load_resolved(Path(sys.argv[1]) / "config.resolved.yaml"))
    except BaseException as error:  # noqa: BLE001 - whatever ended this rank must be reported to the launcher
        return fail(error)
    return 0


if __name__ == "__main__":
    # os._exit: a failed rank must not wait for threads of a process group whose peers are gone.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
