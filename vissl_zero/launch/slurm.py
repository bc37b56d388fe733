"""A run on SLURM: its submission through submitit (``config.SLURM.USE_SLURM=true``), and the tasks of the job.

The keys of ``config.SLURM`` become parameters of submitit, which writes the sbatch script. Submitted jobs are noted in
the run folder and in the user's home, so that they can be listed, followed and canceled. Each task starts a launcher
for its share of the ranks. A job that saved and stopped is requeued.

A job runs a copy of the code, and reads a folder to which no other user can ever write. submitit unpickles files of
this folder, so whoever can write into it, or replace it, runs code as the user.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vissl_zero.atomic import read_object, replacing
from vissl_zero.engine.stopping import STOPPED
from vissl_zero.errors import LaunchError, VisslZeroError
from vissl_zero.launch.run_folder import prepare_folder
from vissl_zero.resolve.placement_plan import is_unsafe
from vissl_zero.resolve.resolved import ResolvedRun


def submit(plan: ResolvedRun, user_yaml: str) -> int:
    """Submit the run as a job, note and print the job. Return 0.

    Raises:
        LaunchError: SLURM is missing, the folder is not safe, or the cluster refuses the job.
    """
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise LaunchError(
            "config.SLURM.USE_SLURM: sbatch and srun are not on the PATH here. Submit from a machine of the cluster, "
            "or leave USE_SLURM off."
        )
    _ask_cluster(plan)
    existed = Path(plan.run_dir).exists()
    try:
        prepare_folder(plan, user_yaml).release()  # the job takes the lock when it starts
        folder = private_folder(_submission_folder(plan))
        if plan.config.SLURM.SNAPSHOT_CODE:
            snapshot(code_folder(plan), plan.config.IMPORTS)
        job = _hand_in(plan, folder)
    except LaunchError:
        # A refused job leaves no folder behind, but one that was there is the user's.
        if not existed:
            shutil.rmtree(plan.run_dir, ignore_errors=True)
        raise
    note(job)
    for name, text in {
        "job": f"{job.job_id} ({job.name})",
        "run folder": job.run_dir,
        "log": job.stdout,
        "errors": job.stderr,
        "follow": f"vissl-zero jobs logs {job.job_id} --follow",
        "cancel": f"vissl-zero jobs cancel {job.job_id}",
    }.items():
        print(f"{name:12}{text}")
    return 0


def _ask_cluster(plan: ResolvedRun) -> None:
    """Let SLURM check the job without submission, because an impossible job would wait in the queue forever.

    Raises:
        LaunchError: the cluster refuses the job, or does not answer.
    """
    with tempfile.NamedTemporaryFile("w", prefix="vissl_zero_", suffix=".sh") as file:
        file.write(script(plan))
        file.flush()
        answer = _answer(["sbatch", "--test-only", file.name])
    if answer.returncode:
        lines = [line.removeprefix("sbatch: error: ") for line in answer.stderr.splitlines() if line.strip()]
        sizes = {name: value for name, value in parameters(plan).items() if name in _SIZES and value}
        wanted = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in sizes.items())
        raise LaunchError(
            f"config.SLURM: the cluster refuses the job ({'; '.join(dict.fromkeys(lines))}). It asks for {wanted}. "
            f"{_offer()} See PARTITION, MEM_GB, NUM_CPU_PER_PROC of config.SLURM and NUM_NODES, NUM_PROC_PER_NODE of "
            "config.DISTRIBUTED. Nothing was submitted."
        )


def _answer(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"config.SLURM: {command[0]} has not answered within {_ANSWER_S:g} s. Nothing was submitted. Try again "
            "once the cluster answers (sinfo shows it)."
        ) from error


_ANSWER_S = 120.0
_SIZES = (
    "partition",
    "account",
    "qos",
    "constraint",
    "nodes",
    "ntasks_per_node",
    "cpus_per_task",
    "mem",
    "gpus_per_node",
)


def _offer() -> str:
    """Return a sentence on the partitions of the cluster; "" if sinfo lists none."""
    answer = _answer(["sinfo", "-h", "-o", "%R|%D|%c|%m|%G"])
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 4]
    partitions = []
    for name, nodes, cores, megabytes, resources in rows:
        gpus = "" if resources == "(null)" else f", {resources}"
        memory = f"{int(megabytes.rstrip('+')) / 1024:.3g} GiB"
        partitions.append(f"{name}: {nodes} nodes of {cores} cores and {memory}{gpus}")
    return f"Partitions: {'; '.join(partitions)}." if partitions else ""


def _hand_in(plan: ResolvedRun, folder: Path) -> Submitted:
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    executor = SlurmExecutor(folder / "%j")
    executor.update_parameters(**parameters(plan))
    task = SlurmTask(plan.run_dir, str(folder), secrets.token_bytes(32), plan.config.SLURM.MAX_REQUEUES)
    # The pickled task has the run's secret.
    mask = os.umask(0o077)
    try:
        job = executor.submit(task)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"config.SLURM: sbatch failed ({' '.join(str(error).split())}).") from error
    finally:
        os.umask(mask)
    return Submitted(
        job_id=job.job_id,
        name=plan.config.SLURM.NAME,
        recipe=plan.recipe,
        run_dir=plan.run_dir,
        stdout=str(job.paths.stdout),
        stderr=str(job.paths.stderr),
        submitted=time.time(),
    )


def refused_sweep(error: Exception) -> LaunchError | None:
    """Return the error of a sweep whose jobs submitit's launcher cannot submit; None for any other error."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    # submitit has no class of its own for a machine without SLURM.
    is_no_cluster = isinstance(error, RuntimeError) and str(error).startswith('Could not detect "srun"')
    if not is_no_cluster and not isinstance(error, FailedJobError | FailedSubmissionError):
        return None
    fix = "Correct the keys of hydra.launcher, or write hydra/launcher=local to run side by side on this machine."
    return LaunchError(f"hydra/launcher: SLURM takes no job of the sweep ({' '.join(str(error).split())}). {fix}")


def _submission_folder(plan: ResolvedRun) -> Path:
    """Return the folder for submission files and logs of a run.

    Raises:
        LaunchError: the path has a line break, which would end a line of the sbatch script.
    """
    if is_unsafe(plan.run_dir):  # it may come from the current folder, or from hydra.run.dir
        raise LaunchError(f"The run folder {plan.run_dir!r} must be one line of printable text. Name another folder.")
    return Path(plan.run_dir) / Path(plan.config.SLURM.LOG_FOLDER).expanduser() / "slurm"


def code_folder(plan: ResolvedRun) -> Path:
    """Return the folder for the snapshot of a run's code; other runs may share its LOG_FOLDER."""
    return _submission_folder(plan) / f"code_{hashlib.sha256(plan.run_dir.encode()).hexdigest()[:12]}"


def parameters(plan: ResolvedRun) -> dict[str, Any]:
    """Return submitit's parameters; empty keys are left out, so that the cluster's defaults apply."""
    slurm = plan.config.SLURM
    procs = plan.procs_per_node
    procs_per_task = 1 if slurm.TASK_PER == "process" else procs
    setup = list(slurm.SETUP)
    if slurm.SNAPSHOT_CODE:  # the job imports the code from there
        setup.append(f'export PYTHONPATH={shlex.quote(str(code_folder(plan)))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    further = {str(name).replace("_", "-"): value for name, value in slurm.ADDITIONAL_PARAMETERS.items()}
    parameters: dict[str, Any] = {
        "job_name": slurm.NAME,
        "comment": slurm.COMMENT,
        "partition": slurm.PARTITION,
        "account": slurm.ACCOUNT,
        "qos": slurm.QOS,
        "constraint": slurm.CONSTRAINT,
        "time": 60 * slurm.TIME_HOURS + slurm.TIME_MINUTES,
        # To sbatch, 0 is all the memory of a node.
        "mem": f"{slurm.MEM_GB}GB" if slurm.MEM_GB else "0",
        "nodes": plan.num_nodes,
        "ntasks_per_node": procs // procs_per_task,
        "cpus_per_task": slurm.NUM_CPU_PER_PROC * procs_per_task,
        "gpus_per_node": procs if plan.device == "cuda" else "",
        "signal_delay_s": slurm.SIGNAL_DELAY_S,
        "setup": setup or "",
        # Launchers notice themselves that another is gone, and need time to report it. Since SLURM 22.05, srun does not
        # take over sbatch's cores for each task.
        "srun_args": ["--kill-on-bad-exit=0", f"--cpus-per-task={slurm.NUM_CPU_PER_PROC * procs_per_task}"],
        # SLURM requeues only jobs that allow it.
        "additional_parameters": {"requeue": True, **further},
    }
    return {name: value for name, value in parameters.items() if value != ""}


def script(plan: ResolvedRun) -> str:
    """Return the sbatch script that ``submit`` submits (submitit replaces ``%j`` by the job's id)."""
    folder = _submission_folder(plan) / "%j"
    from submitit.slurm.slurm import _make_sbatch_string  # slow to import

    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return _make_sbatch_string(command=command, folder=folder, **parameters(plan))


@dataclass(frozen=True)
class Submitted:
    """A submitted run.

    Attributes:
        job_id: SLURM's id of the job.
        name, recipe: name of the job, and recipe of the run.
        run_dir: the run folder.
        stdout, stderr: paths of the first task's logs.
        submitted: Unix time of the submission.
    """

    job_id: str
    name: str
    recipe: str
    run_dir: str
    stdout: str
    stderr: str
    submitted: float


def _jobs_folder() -> Path:
    """Return the folder with the notes of this user's submitted runs."""
    return Path("~/.vissl_zero/jobs").expanduser()


def note(job: Submitted) -> None:
    """Write the job to ``slurm.json`` in the run folder, and to ``_jobs_folder``; prints why if the latter fails."""
    text = json.dumps(asdict(job), indent=2) + "\n"
    with replacing(Path(job.run_dir) / "slurm.json") as temporary:
        temporary.write_text(text)
    try:
        _jobs_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        (_jobs_folder() / f"{job.job_id}.json").write_text(text)
    except OSError as error:
        print(f"vissl-zero jobs will not list this job: cannot write to {_jobs_folder()} ({error.strerror}).")


def noted() -> list[Submitted]:
    """List all noted runs, oldest first; files that cannot be read are left out."""
    jobs = []
    for path in _jobs_folder().glob("*.json"):
        try:
            jobs.append(Submitted(**read_object(path)))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(jobs, key=lambda job: job.submitted)


_MEET_S = 300.0


@dataclass
class SlurmTask:
    """The program of a task; submitit unpickles it from the submission folder and calls it.

    Attributes:
        run_dir: the run folder, with ``config.resolved.yaml``.
        folder: the job's submission folder, on a disk that all nodes share; only this user can enter it.
        secret: secret of the run.
        max_requeues: most requeues of the job (``SLURM.MAX_REQUEUES``).
    """

    run_dir: str
    folder: str
    secret: bytes
    max_requeues: int

    def __call__(self) -> None:
        """Run this task's ranks to the end.

        Raises:
            SystemExit: the exit code of the run is not 0.
        """
        from vissl_zero.launch.run_folder import RunLock

        try:
            # The first task alone: all tasks share the folder, and the lock is of one process.
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
        from vissl_zero.launch.launcher import launch_local, launch_member
        from vissl_zero.launch.rendezvous import LauncherSpec
        from vissl_zero.resolve.resolve import load_resolved

        plan = load_resolved(Path(self.run_dir) / "config.resolved.yaml")
        count, index = _number("SLURM_NTASKS", 1), _number("SLURM_PROCID")
        if count == 1:
            return launch_local(plan)
        # Each attempt has its own name: a requeued job must not read the address of an earlier attempt.
        meeting = Path(self.folder) / f"meet_{_job_id()}_{_number('SLURM_RESTART_COUNT')}.json"
        address = (_own_address(), plan.config.SLURM.PORT_ID) if index == 0 else _read_address(meeting)
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
    """Requeue this job after it saved and stopped. Return the exit code.

    The job is not requeued if it was canceled, has reached ``max_requeues``, or is being requeued by the cluster.
    """
    times = _number("SLURM_RESTART_COUNT")
    if times >= max_requeues:
        print(
            f"Saved and stopped. Not requeued: it was requeued {times} times already, and config.SLURM.MAX_REQUEUES is "
            f"{max_requeues}. The same command resumes from the checkpoint.",
            flush=True,
        )
        return STOPPED
    state = _job_state(_job_id())
    if state != "RUNNING":  # canceled, or already being requeued
        print(f"Saved and stopped; the job is {state.lower() or 'gone'}.", flush=True)
        return STOPPED
    print(f"Saved and stopped; requeued ({times + 1} of at most {max_requeues} times).", flush=True)
    subprocess.run(["scontrol", "requeue", _job_id()], check=False, timeout=60)
    time.sleep(60.0)  # SLURM ends this job now; a job that ends before that would not be requeued
    return STOPPED


def _job_state(job_id: str) -> str:
    """Return SLURM's name for the state of a job, such as RUNNING; "" if SLURM no longer knows the job."""
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
    """Return the address at which other nodes reach this node, by its name in the cluster."""
    for name in (os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        try:
            return socket.gethostbyname(name) if name else ""
        except OSError:
            continue
    return "127.0.0.1"


def _read_address(path: Path) -> tuple[str, int]:
    """Wait until the first task has written its address and return host and port.

    Raises:
        LaunchError: the first task does not write it in time.
    """
    deadline = time.monotonic() + _MEET_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"The job's first task did not write {path} within {_MEET_S:g} s. The run folder must be on a disk "
                "that all nodes share."
            )
        time.sleep(0.1)
        list(path.parent.iterdir())  # makes a network file system refresh its cache
    host, port = json.loads(path.read_text())
    return host, port


_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def snapshot(code: Path, imports: Sequence[str]) -> None:
    """Copy vissl_zero and the top-level modules of ``imports`` into the folder ``code``, the job's PYTHONPATH.

    Raises:
        LaunchError: the folder cannot be written.
    """
    try:
        shutil.rmtree(code, ignore_errors=True)
        for name in dict.fromkeys(["vissl_zero", *(module.partition(".")[0] for module in imports)]):
            spec = find_spec(name)
            if spec is None:
                continue  # the check of imports has reported it
            if spec.submodule_search_locations:
                shutil.copytree(next(iter(spec.submodule_search_locations)), code / name, ignore=_LEFT_OUT)
            elif spec.origin:
                code.mkdir(parents=True, exist_ok=True)
                shutil.copy(spec.origin, code / Path(spec.origin).name)
    except OSError as error:
        raise LaunchError(f"config.SLURM.SNAPSHOT_CODE: cannot copy the code to {code} ({error.strerror}).") from error


_KEY = "config.SLURM.LOG_FOLDER"


def private_folder(path: Path) -> Path:
    """Make the folder ``path`` with mode 0700, or check that it is safe. Return the path without links.

    Raises:
        LaunchError: other users can write to the folder, or to a folder above it.
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
    """Return who besides the user and root can rename the contents of a folder; "" if nobody can."""
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
    """Check whether the user is the only member of a group (many systems give each user a private group)."""
    if gid == 0:
        return True
    try:
        members = set(grp.getgrgid(gid).gr_mem)
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == grp.getgrgid(gid).gr_name and members <= {user.pw_name}


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
