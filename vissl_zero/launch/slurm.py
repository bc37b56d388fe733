"""Submit a run to SLURM through submitit: ``config.SLURM.USE_SLURM=true``.

What the run asks for becomes parameters of submitit, and they an sbatch script. What was submitted is noted in the run
folder and in the user's home, so that it can be listed, followed and cancelled.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vissl_zero.atomic import read_object, replacing
from vissl_zero.config.derive.placement_plan import is_unsafe
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.errors import LaunchError
from vissl_zero.launch.run_folder import prepare_folder
from vissl_zero.launch.slurm_task import SlurmTask, private_folder, snapshot


def submit(plan: ResolvedRun, user_yaml: str) -> int:
    """Submit, note it down, and say what was done; returns 0.

    Raises:
        LaunchError: there is no SLURM, the folder is not safe, or the cluster refuses the job.
    """
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise LaunchError(
            "config.SLURM.USE_SLURM: sbatch and srun are not on the PATH here. Submit from a machine of the cluster, "
            "or leave USE_SLURM off."
        )
    _ask_cluster(plan)
    existed = Path(plan.run_dir).exists()
    try:
        prepare_folder(plan, user_yaml).release()  # the job takes the lock when it runs
        folder = private_folder(submission_folder(plan))
        if plan.config["SLURM"]["SNAPSHOT_CODE"]:
            snapshot(code_folder(plan), plan.config["IMPORTS"])
        job = _hand_in(plan, folder)
    except LaunchError:
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
    """Let SLURM check the job without submitting it: an impossible one would wait in the queue for ever.

    Raises:
        LaunchError: it says no.
    """
    with tempfile.NamedTemporaryFile("w", prefix="vissl_zero_", suffix=".sh") as file:
        file.write(script(plan))
        file.flush()
        answer = _answer(["sbatch", "--test-only", file.name])
    if answer.returncode:
        lines = [line.removeprefix("sbatch: error: ") for line in answer.stderr.splitlines() if line.strip()]
        asked = {name: value for name, value in parameters(plan).items() if name in _SIZES and value}
        wanted = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in asked.items())
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
    """What the partitions have, in a sentence; nothing if sinfo does not say."""
    answer = _answer(["sinfo", "-h", "-o", "%R|%D|%c|%m|%G"])
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 4]
    texts = []
    for name, nodes, cores, megabytes, resources in rows:
        gpus = "" if resources == "(null)" else f", {resources}"
        texts.append(f"{name}: {nodes} nodes of {cores} cores and {int(megabytes.rstrip('+')) / 1024:.3g} GiB{gpus}")
    return f"Partitions: {'; '.join(texts)}." if texts else ""


def _hand_in(plan: ResolvedRun, folder: Path) -> Submitted:
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    executor = SlurmExecutor(folder / "%j")
    executor.update_parameters(**parameters(plan))
    task = SlurmTask(plan.run_dir, str(folder), secrets.token_bytes(32), plan.config["SLURM"]["MAX_REQUEUES"])
    # The pickled task holds the run's secret.
    mask = os.umask(0o077)
    try:
        job = executor.submit(task)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"config.SLURM: sbatch failed ({' '.join(str(error).split())}).") from error
    finally:
        os.umask(mask)
    return Submitted(
        job_id=job.job_id,
        name=plan.config["SLURM"]["NAME"],
        recipe=plan.recipe,
        run_dir=plan.run_dir,
        stdout=str(job.paths.stdout),
        stderr=str(job.paths.stderr),
        submitted=time.time(),
    )


def submission_folder(plan: ResolvedRun) -> Path:
    """Where submission files and logs of a run go.

    Raises:
        LaunchError: the path has a line break in it, which would end a line of the sbatch script.
    """
    if is_unsafe(plan.run_dir):  # it may come from the folder that the command was given in, or from hydra.run.dir
        raise LaunchError(f"The run folder {plan.run_dir!r} must be one line of printable text. Name another folder.")
    return Path(plan.run_dir) / Path(plan.config["SLURM"]["LOG_FOLDER"]).expanduser() / "slurm"


def code_folder(plan: ResolvedRun) -> Path:
    """Where the snapshot of a run's code goes; runs may share a LOG_FOLDER."""
    return submission_folder(plan) / f"code_{hashlib.sha256(plan.run_dir.encode()).hexdigest()[:12]}"


def parameters(plan: ResolvedRun) -> dict[str, Any]:
    """submitit's parameters; empty keys are left out, so that the cluster's own defaults hold."""
    slurm = plan.config["SLURM"]
    is_per_process = slurm["TASK_PER"] == "process"
    procs = plan.procs_per_node
    further = {str(name).replace("_", "-"): value for name, value in slurm["ADDITIONAL_PARAMETERS"].items()}
    found: dict[str, Any] = {
        "job_name": slurm["NAME"],
        "comment": slurm["COMMENT"],
        "partition": slurm["PARTITION"],
        "account": slurm["ACCOUNT"],
        "qos": slurm["QOS"],
        "constraint": slurm["CONSTRAINT"],
        "time": 60 * slurm["TIME_HOURS"] + slurm["TIME_MINUTES"],
        "mem": f"{slurm['MEM_GB']}GB" if slurm["MEM_GB"] else "0",
        "nodes": plan.num_nodes,
        "ntasks_per_node": procs if is_per_process else 1,
        "cpus_per_task": slurm["NUM_CPU_PER_PROC"] * (1 if is_per_process else procs),
        "gpus_per_node": procs if plan.device == "cuda" else "",
        "signal_delay_s": slurm["SIGNAL_DELAY_S"],
        "setup": [*slurm["SETUP"], *_own_code(plan)] or "",
        # Launchers notice by themselves when another is gone, and must have the time to say so.
        "srun_args": ["--kill-on-bad-exit=0", f"--cpus-per-task={slurm['NUM_CPU_PER_PROC'] * _procs_per_task(plan)}"],
        "additional_parameters": {"requeue": True, **further},
    }
    return {name: value for name, value in found.items() if value != ""}


def _own_code(plan: ResolvedRun) -> list[str]:
    """The command that has the job import the snapshot of the code, if there is one."""
    if not plan.config["SLURM"]["SNAPSHOT_CODE"]:
        return []
    return [f'export PYTHONPATH={shlex.quote(str(code_folder(plan)))}"${{PYTHONPATH:+:$PYTHONPATH}}"']


def _procs_per_task(plan: ResolvedRun) -> int:
    return 1 if plan.config["SLURM"]["TASK_PER"] == "process" else plan.procs_per_node


def script(plan: ResolvedRun) -> str:
    """The sbatch script that ``submit`` hands in (submitit puts the job's id for ``%j``)."""
    folder = submission_folder(plan) / "%j"
    from submitit.slurm.slurm import _make_sbatch_string  # slow to import

    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return _make_sbatch_string(command=command, folder=folder, **parameters(plan))


@dataclass(frozen=True)
class Submitted:
    """A submitted run.

    Attributes:
        job_id: SLURM's.
        name, recipe: for people.
        run_dir: the run folder.
        stdout, stderr: logs of the first task.
        submitted: Unix time.
    """

    job_id: str
    name: str
    recipe: str
    run_dir: str
    stdout: str
    stderr: str
    submitted: float


def jobs_folder() -> Path:
    """Where this user's submitted runs are noted."""
    return Path("~/.vissl_zero/jobs").expanduser()


def note(job: Submitted) -> None:
    """Write it to ``slurm.json`` in the run folder and into ``jobs_folder``; says so if that cannot be written."""
    text = json.dumps(asdict(job), indent=2) + "\n"
    with replacing(Path(job.run_dir) / "slurm.json") as temporary:
        temporary.write_text(text)
    try:
        jobs_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        (jobs_folder() / f"{job.job_id}.json").write_text(text)
    except OSError as error:
        print(f"vissl-zero jobs will not list this job: cannot write to {jobs_folder()} ({error.strerror}).")


def noted() -> list[Submitted]:
    """All that were noted, oldest first; files that cannot be read are left out."""
    found = []
    for path in jobs_folder().glob("*.json"):
        try:
            found.append(Submitted(**read_object(path)))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda job: job.submitted)
