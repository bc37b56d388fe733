"""What each task of a submitted job runs: a launcher of its share of the ranks, requeued when it saved and stopped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from vissl_zero.engine.stopping import STOPPED
from vissl_zero.errors import LaunchError, VisslZeroError

_MEET_S = 300.0


@dataclass
class SlurmTask:
    """Called in every task by submitit, which unpickles it from the submission folder.

    Attributes:
        run_dir: the run folder, with ``config.resolved.yaml``.
        folder: the job's submission folder, which this user alone can enter, on a disk that all nodes share.
        secret: of the run.
        max_requeues: SLURM.MAX_REQUEUES.
    """

    run_dir: str
    folder: str
    secret: bytes
    max_requeues: int

    def __call__(self) -> None:
        """Run this task's ranks to the end.

        Raises:
            SystemExit: with the code of the run, unless it is 0.
        """
        from vissl_zero.launch.run_lock import RunLock

        try:
            with RunLock(Path(self.run_dir)) if _number("SLURM_PROCID") == 0 else nullcontext():
                code = self._launch()
        except VisslZeroError as error:
            print(error, flush=True)
            code = 2
        if code == STOPPED and _number("SLURM_PROCID") == 0:
            code = requeue(self.max_requeues)
        if code:
            raise SystemExit(code)

    def _launch(self) -> int:
        from vissl_zero.config.resolve import load_resolved
        from vissl_zero.launch.launcher_spec import LauncherSpec
        from vissl_zero.launch.local import launch_local
        from vissl_zero.launch.machines import launch_member

        plan = load_resolved(Path(self.run_dir) / "config.resolved.yaml")
        count, index = _number("SLURM_NTASKS", 1), _number("SLURM_PROCID")
        if count == 1:
            return launch_local(plan)
        # One name per try: a requeued job must not read the address of the try before.
        meeting = Path(self.folder) / f"meet_{_job_id()}_{_number('SLURM_RESTART_COUNT')}.json"
        address = (_own_address(), plan.config["SLURM"]["PORT_ID"]) if index == 0 else _read_address(meeting)
        spec = LauncherSpec(
            index=index,
            count=count,
            procs=plan.world_size // count,
            address=address,
            secret=self.secret,
            timeout_s=plan.sharding.timeout_s,
            first_local_rank=_number("SLURM_LOCALID") * (plan.world_size // count),
            start_s=_MEET_S,
            comes_back=False,
        )
        return launch_member(plan, spec, announce=meeting if index == 0 else None)


def requeue(max_requeues: int) -> int:
    """Queue this job again after it saved and stopped. Returns the exit code.

    Not if it was cancelled, has been queued often enough, or the cluster is about to do so itself.
    """
    times = _number("SLURM_RESTART_COUNT")
    if times >= max_requeues:
        print(
            f"Saved and stopped. Not requeued: it was requeued {times} times already, and config.SLURM.MAX_REQUEUES is "
            f"{max_requeues}. The same command resumes from the checkpoint.",
            flush=True,
        )
        return STOPPED
    state = job_state(_job_id())
    if state != "RUNNING":  # cancelled, or being requeued by someone else
        print(f"Saved and stopped; the job is {state.lower() or 'gone'}.", flush=True)
        return STOPPED
    print(f"Saved and stopped; requeued ({times + 1} of at most {max_requeues} times).", flush=True)
    subprocess.run(["scontrol", "requeue", _job_id()], check=False, timeout=60)
    time.sleep(60.0)  # SLURM ends this job now; one that ended by itself before that would not be queued
    return STOPPED


def job_state(job_id: str) -> str:
    """SLURM's word for the state of a job, such as RUNNING; empty if it is not known any more."""
    done = subprocess.run(
        ["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True, check=False, timeout=60
    )
    return next((word.partition("=")[2] for word in done.stdout.split() if word.startswith("JobState=")), "")


def _job_id() -> str:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _number(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def _own_address() -> str:
    """Of this node, as the other nodes reach it: what its name in the cluster resolves to."""
    for name in (os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        try:
            return socket.gethostbyname(name) if name else ""
        except OSError:
            continue
    return "127.0.0.1"


def _read_address(path: Path) -> tuple[str, int]:
    """Wait for the first task to write where it listens.

    Raises:
        LaunchError: it does not.
    """
    deadline = time.monotonic() + _MEET_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"The job's first task did not write {path} within {_MEET_S:g} s. The run folder must be on a disk "
                "that all nodes share."
            )
        time.sleep(0.1)
        list(path.parent.iterdir())  # has a network file system look again
    host, port = json.loads(path.read_text())
    return host, port
