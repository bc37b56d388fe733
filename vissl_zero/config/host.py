"""What the machine offers, found out without importing torch."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """This machine and how the process was started.

    Attributes:
        num_gpus: usable ones.
        why_no_gpu: a clause that says why there is none, else empty.
        num_cores: that this process may use.
        torchrun: (world size, local world size) if torchrun started this process, else None.
    """

    num_gpus: int = 0
    why_no_gpu: str = "no NVIDIA driver is loaded"
    num_cores: int = 1
    torchrun: tuple[int, int] | None = None


def this_host(environment: Mapping[str, str] | None = None) -> Host:
    """Look at this machine. Takes milliseconds; the GPU driver is asked once a process.

    Args:
        environment: variables that torchrun sets; the process's own by default.
    """
    num_gpus, why_no_gpu = _gpus()
    return Host(num_gpus, why_no_gpu, _cores(), torchrun_ranks(os.environ if environment is None else environment))


def cluster_host(num_procs: int, num_cores: int, device: str, partition: str) -> Host:
    """A node of the SLURM cluster as a job will see it, which need not be like this machine.

    Args:
        num_procs, num_cores: that the job asks for on each node.
        device: MACHINE.DEVICE; "auto" has GPUs where the partition says that its nodes do.
        partition: empty for the cluster's default one.
    """
    why_no_gpu = "the partition's nodes have none"
    num_gpus = num_procs if device in ("gpu", "cuda") else _partition_gpus(partition) if device == "auto" else 0
    return Host(num_gpus, why_no_gpu, num_cores)


def _partition_gpus(partition: str) -> int:
    command = ["sinfo", "-h", "-o", "%P %G", *(["-p", partition] if partition else [])]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    counts = []
    for line in answer.splitlines():
        name, _, resources = line.partition(" ")
        if partition or name.endswith("*"):  # the star marks the default
            counts += [int(count) for count in re.findall(r"gpu(?::[a-zA-Z][^:,()]*)?:(\d+)", resources)]
    return max(counts, default=0)


def torchrun_ranks(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """World size and ranks on this machine, if a launcher has already started this process as one of several."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environment.keys():
        return None
    world_size = int(environment["WORLD_SIZE"])
    return world_size, int(environment.get("LOCAL_WORLD_SIZE", world_size))


@cache
def _gpus() -> tuple[int, str]:
    if not _torch_has_cuda():
        return 0, "the installed torch was built without CUDA"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "there is no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0, "the NVIDIA driver reports an error"
    return count.value, "" if count.value else "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES?)"


def _torch_has_cuda() -> bool:
    """What ``torch.version.cuda`` would say; reading the file does not import torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    tree = ast.parse((Path(spec.origin).parent / "version.py").read_text())
    for statement in tree.body:
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return isinstance(statement.value, ast.Constant) and statement.value.value is not None  # type: ignore[attr-defined]
    return False


def _cores() -> int:
    """Cores this process may use: its affinity, and a container's share of the processor if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
