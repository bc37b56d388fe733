"""What a run asks of SLURM: parameters for submitit, and the sbatch script that they become."""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.rules.slurm import is_unsafe
from vissl_zero.errors import LaunchError


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
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return _make_sbatch_string(command=command, folder=folder, **parameters(plan))
