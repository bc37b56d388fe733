"""Submit a run to SLURM through submitit: ``config.SLURM.USE_SLURM=true``."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.errors import LaunchError
from vissl_zero.launch.run import prepare_folder
from vissl_zero.launch.slurm_note import Submitted, note
from vissl_zero.launch.slurm_script import code_folder, parameters, script, submission_folder
from vissl_zero.launch.slurm_task import SlurmTask
from vissl_zero.launch.submission import private_folder, snapshot


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
