"""``vissl-zero doctor``: which features work on this machine, and why others do not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vissl_zero import torchvision_compat
from vissl_zero.version import __version__

PACKAGES = ["torch", "torchvision", "hydra-core", "omegaconf", "fairscale", "classy-vision", "submitit", "safetensors"]
_MIB = 2**20
_SHM_NEEDED = 64 * _MIB  # NCCL exchanges tensors through /dev/shm


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        subject: feature or resource that was checked.
        works: True, False, or None where it is only information.
        text: version or amount; or why the feature does not work, and what would help.
    """

    subject: str
    works: bool | None
    text: str


def doctor() -> int:
    """Print all findings and return 0 if a run on this machine can work, else 1."""
    findings = [*_versions(), *_engines_and_backends(), *_resources()]
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(3):
        table.add_column(no_wrap=column < 2)
    for finding in findings:
        mark = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[finding.works]
        table.add_row(finding.subject, mark, finding.text)
    Console().print(table)
    # These two train at every level on the CPU. All else is optional, a GPU too.
    essential = {finding.subject: finding.works for finding in findings}
    return 0 if essential["backend gloo"] and essential["engine torch"] else 1


def _versions() -> Iterator[Finding]:
    yield Finding("vissl_zero", None, __version__)
    yield Finding("Python", None, f"{platform.python_version()} on {platform.platform()}")
    # Versions are read from metadata: importing a package takes seconds, and a broken one ends the report.
    for package in PACKAGES:
        try:
            installed = version(package)
        except PackageNotFoundError:
            yield Finding(package, False, "not installed; pip install -r requirements.txt")
            continue
        yield _torchvision(installed) if package == "torchvision" else Finding(package, True, installed)


def _torchvision(number: str) -> Finding:
    """Check that torchvision can be imported: its CUDA wheel with a CPU build of torch needs vissl_zero first."""
    try:
        import torch
        import torchvision
    except (ImportError, RuntimeError) as error:
        return Finding("torchvision", False, f"{number}; {error}")
    if not torchvision_compat.is_repaired():
        return Finding("torchvision", True, number)
    built = torchvision.version.__version__
    fix = "import vissl_zero before torchvision or timm"
    return Finding("torchvision", True, f"{built}, repaired by vissl_zero, as torch is {torch.__version__}: {fix}")


def _engines_and_backends() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(num_gpus)}))
    why_no_gpu = "torch was built without CUDA" if torch.version.cuda is None else "no GPU, or no driver for it"
    yield Finding("GPU", num_gpus > 0, f"{num_gpus} x {names}" if num_gpus else why_no_gpu)
    yield Finding("backend gloo", dist.is_gloo_available(), "CPU ranks")
    nccl = dist.is_nccl_available()
    yield Finding("backend nccl", nccl and num_gpus > 0, "GPU ranks" if nccl else "torch was built without it")
    yield _fully_shard()
    yield _fairscale(num_gpus)
    yield _slurm()


def _fully_shard() -> Finding:
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError as error:
        return Finding("engine torch", False, f"{error}; torch 2.11 or newer is needed")
    return Finding("engine torch", True, "ZeRO levels 0 to 3")


def _fairscale(num_gpus: int) -> Finding:
    try:
        import fairscale  # noqa: F401
    except ImportError as error:
        return Finding("engine fairscale", False, f"{error}; pip install fairscale")
    level3 = "levels 1 to 3" if num_gpus else "levels 1 and 2; its level 3 needs CUDA streams: use ZERO.ENGINE=torch"
    return Finding("engine fairscale", True, level3)


def _slurm() -> Finding:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return Finding("SLURM", None, "not available: sbatch is not on the PATH")
    try:
        # The programs are there even if the controller is down; then sinfo tries for long before it gives up.
        answer = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, check=False, timeout=30)
        partitions = sorted(set(answer.stdout.split())) if answer.returncode == 0 else []
    except subprocess.TimeoutExpired:
        partitions = []
    if not partitions:
        return Finding("SLURM", False, "installed, but its controller does not answer")
    return Finding("SLURM", True, f"partitions {', '.join(partitions)}")


def _resources() -> Iterator[Finding]:
    # Those that this process may use: SLURM and taskset leave a process fewer than the machine has.
    yield Finding("CPU cores", None, str(len(os.sched_getaffinity(0))))
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(memory[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    yield Finding("memory", None, f"{_gib(free)} free of {_gib(total)}")
    for subject, path, needed in (("/dev/shm", "/dev/shm", _SHM_NEEDED), ("disk here", ".", 0)):  # noqa: S108 - it is measured
        if not Path(path).exists():
            yield Finding(subject, False, "missing; set config.DATA.NUM_DATALOADER_WORKERS=0")  # no semaphores
            continue
        usage = shutil.disk_usage(path)
        enough = usage.free >= needed
        fix = "" if enough else "; too small for NCCL between GPUs: start a container with --ipc=host"
        yield Finding(subject, enough if needed else None, f"{_gib(usage.free)} free of {_gib(usage.total)}{fix}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
