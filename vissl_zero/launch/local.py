"""N ranks on this machine, through torch's elastic launch API.

Rendezvous goes through files in a folder that only this user can enter: torch's TCPStore listens on every interface,
even when told 127.0.0.1, so anyone who reaches the machine could join or disturb a run.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.launch.failure import FAILURE_FOLDER_VARIABLE, first_failure
from vissl_zero.launch.membership import Membership
from vissl_zero.launch.process_group import STORE_PATH_VARIABLE

INTERRUPTED = 130  # the shell's code for a process ended by Ctrl-C


def launch_local(plan: ResolvedRun, membership: Membership | None = None, plan_folder: Path | None = None) -> int:
    """Start this machine's ranks and wait for them.

    Args:
        plan: of the run.
        membership: joined already, where other machines (or other launchers here) take part.
        plan_folder: with ``config.resolved.yaml``, if that is not the run folder.
    Returns:
        Exit code: 0, 2 (a user's error, its sentence printed), 130 (interrupted) or 1 (a crash, its traceback printed).
    """
    num_procs = membership.place.procs if membership else plan.procs_per_node
    first_rank = membership.first_rank() if membership else 0
    with tempfile.TemporaryDirectory(prefix="vissl_zero_") as private, _environment(plan, Path(private), membership):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_procs,
            run_id="vissl_zero",
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(private) / "rendezvous"),
            rdzv_configs={"store_type": "file", "timeout": 120},
            max_restarts=0,
            local_addr="localhost",
            logs_specs=_logs(plan, num_procs, first_rank),
            shutdown_timeout=10,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "vissl_zero.launch.worker", str(plan_folder or plan.run_dir))
        except ChildFailedError as error:
            codes = {first_rank + rank: failure.exitcode for rank, failure in error.failures.items()}
            failure = first_failure(Path(private), codes)
            if membership and (cause := membership.explain(failure)):
                print(f"{cause}\nThe run folder is {plan.run_dir}", file=sys.stderr)
                return 1
            print(failure.text, file=sys.stderr)
            where = f"rank {failure.rank} failed first; the run folder is {plan.run_dir}"
            if not failure.is_user_error:
                print(f"\n{where}\nOutput of ranks other than 0: {_log_folder(plan)}", file=sys.stderr)
            return 2 if failure.is_user_error else 1
        except (SignalException, KeyboardInterrupt):
            print(f"\nStopped; all ranks have ended. The run folder is {plan.run_dir}", file=sys.stderr)
            return INTERRUPTED
    return 0


def _log_folder(plan: ResolvedRun) -> Path:
    return Path(plan.run_dir) / "logs"


def _logs(plan: ResolvedRun, num_procs: int, first_rank: int) -> DefaultLogsSpecs:
    """Rank 0 keeps the terminal (the live display needs it); the others write to files."""
    folder = _log_folder(plan)
    if first_rank:
        folder /= f"from_rank_{first_rank}"
    folder.mkdir(parents=True, exist_ok=True)
    redirects = dict.fromkeys(range(num_procs), Std.ALL)
    if first_rank == 0:
        redirects[0] = Std.NONE
    return DefaultLogsSpecs(log_dir=str(folder), redirects=redirects)


@contextmanager
def _environment(plan: ResolvedRun, private: Path, membership: Membership | None) -> Iterator[None]:
    """Environment variables the ranks inherit; put back afterwards, so that a sweep's next run starts clean."""
    ours = {
        STORE_PATH_VARIABLE: str(private / "store"),
        FAILURE_FOLDER_VARIABLE: str(private),
        "OMP_NUM_THREADS": str(plan.threads_per_rank),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else the agent opens a TCPStore on every interface
    }
    if membership is not None:
        del ours[STORE_PATH_VARIABLE]
        ours |= membership.variables()
    elif "GLOO_SOCKET_IFNAME" not in os.environ and Path("/sys/class/net/lo").exists():
        ours["GLOO_SOCKET_IFNAME"] = "lo"  # gloo's own sockets: this machine only
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we print the cause ourselves
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
