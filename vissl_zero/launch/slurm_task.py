"""What each task of a submitted job runs: a launcher of its share of the ranks, requeued when it saved and stopped.

A job is read from a copy of the code, and from a folder that no other user can ever write to: submitit unpickles what
it finds in the folder, so whoever can write into it, or replace it, runs code as the user.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
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
        from vissl_zero.launch.run_folder import RunLock

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
        from vissl_zero.launch.machines import launch_member
        from vissl_zero.launch.rendezvous import LauncherSpec
        from vissl_zero.launch.run import launch_local

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


_KEY = "config.SLURM.LOG_FOLDER"


def private_folder(path: Path) -> Path:
    """Make ``path`` with mode 0700, or check that it is safe; returns it without links.

    Raises:
        LaunchError: it, or a folder above it, is open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
    except OSError as error:
        raise LaunchError(f"{_KEY}: cannot make {path} ({error.strerror}).") from error
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise LaunchError(
            f"{_KEY}: {path} must belong to you and be private, because jobs run what they find there (it "
            f"belongs to {_user(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):o}). chmod 700 it, or name "
            "another folder."
        )
    for parent in path.parents:
        if culprit := _who_else_can_replace(parent.stat()):
            raise LaunchError(
                f"{_KEY}: {path} could be replaced by others, because {culprit} can write to {parent}. Name a folder "
                "elsewhere, such as ~/vissl_zero_jobs."
            )
    return path


def _who_else_can_replace(status: os.stat_result) -> str:
    """Who besides the user and root can rename what is in a folder; else an empty text."""
    if status.st_uid not in (0, os.getuid()):
        return _user(status.st_uid)
    if status.st_mode & stat.S_ISVTX:  # sticky: only owners rename
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return f"group {_group(status.st_gid)}"
    return ""


def _is_own_group(gid: int) -> bool:
    """Whether the user is the only member of a group (many systems give each user a private group)."""
    if gid == 0:
        return True
    try:
        members = set(grp.getgrgid(gid).gr_mem)
        own = pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return own.pw_gid == gid and own.pw_name == grp.getgrgid(gid).gr_name and members <= {own.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
