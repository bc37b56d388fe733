"""The machine's resources for a run. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.lifetime import run_in_subprocess

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SETTLING_S, _SETTLED_WITHIN_S = 0.25, 5.0
RESERVE = 2**29  # bytes of a rank: code, libraries, torch's own buffers; CUDA's context on a GPU


@dataclass(frozen=True)
class Host:
    """The machine that a run is planned for, and how this process was started.

    Attributes:
        num_gpus: number of usable GPUs.
        why_no_gpu: clause with the reason why no GPU is usable; empty if one is.
        num_cores: number of CPU cores that this process may use.
        num_idle_cores: number of these cores that are idle now; None: not measured.
        num_threads: OMP_NUM_THREADS if the user has set it, else None.
        assumed: sentence with the facts that are assumed, not measured; empty if all are measured.
        torchrun: (world size, local world size) if torchrun started this process, else None.
    """

    num_gpus: int = 0
    why_no_gpu: str = "no NVIDIA driver is loaded"
    num_cores: int = 1
    num_idle_cores: int | None = None
    num_threads: int | None = None
    assumed: str = ""
    torchrun: tuple[int, int] | None = None


def this_host(environment: Mapping[str, str] | None = None) -> Host:
    """Return the resources of this machine. Takes milliseconds; the GPU driver is queried once per process.

    Args:
        environment: variables that torchrun sets; the process's own by default.
    """
    environment = os.environ if environment is None else environment
    num_gpus, why_no_gpu = _gpus()
    torchrun, threads = torchrun_ranks(environment), environment.get("OMP_NUM_THREADS", "")
    # torchrun sets the variable to 1 by default, so that under torchrun it is not the user's choice.
    num_threads = int(threads) if threads.isdigit() and int(threads) > 0 and torchrun is None else None
    # The cores that the process may use: its affinity mask, or a container's CPU quota if that is less.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_cores = max(1, min([num_cores, *(round(share) for share in _shares())]))
    return Host(num_gpus, why_no_gpu, num_cores, num_threads=num_threads, torchrun=torchrun)


def cluster_host(num_procs: int, num_cores: int, device: str, partition: str) -> Host:
    """Return the resources of a SLURM node as the job will see it. It may differ from this machine.

    Args:
        num_procs, num_cores: processes and cores that the job requests per node.
        device: MACHINE.DEVICE; for "auto", ``sinfo`` decides whether the partition's nodes have GPUs.
        partition: name of the partition; empty: the cluster's default.
    """
    why_no_gpu = "the partition's nodes have none"
    num_gpus = num_procs if device in ("gpu", "cuda") else _partition_gpus(partition) if device == "auto" else 0
    if num_gpus is None:
        assumed = "Assumed: nodes without GPUs, because sinfo does not answer. Write config.MACHINE.DEVICE=gpu or cpu."
        return Host(0, why_no_gpu, num_cores, assumed=assumed)
    return Host(num_gpus, why_no_gpu, num_cores)


def assumed_host(here: Host, num_procs: int) -> Host:
    """Return ``here`` with one GPU per process, for a dry run on a machine with fewer GPUs."""
    why = here.why_no_gpu or f"this one has {here.num_gpus}"
    return replace(
        here, num_gpus=num_procs, why_no_gpu="", assumed=f"Assumed: machines with {num_procs} GPU(s) each ({why})."
    )


def _partition_gpus(partition: str) -> int | None:
    """Return the number of GPUs per node of a SLURM partition, by ``sinfo``; None if ``sinfo`` fails."""
    # By the partition's nodes: the login node, where this runs, often has no GPU.
    command = ["sinfo", "-h", "-o", "%P %G", *(["-p", partition] if partition else [])]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    counts = []
    for line in answer.splitlines():
        name, _, resources = line.partition(" ")
        if partition or name.endswith("*"):  # the star marks the default
            # "gpu:4", "gpu:a100:4" and "gpu:a100:4(S:0-1)" are forms of one entry.
            counts += [int(count) for count in re.findall(r"gpu(?::[a-zA-Z][^:,()]*)?:(\d+)", resources)]
    return max(counts, default=0)


def torchrun_ranks(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (world size, ranks on this machine) if a launcher such as torchrun started this process, else None.

    Raises:
        ConfigError: the launcher's variables are not consistent.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environment.keys():
        return None
    numbers = rank_numbers(environment)
    return numbers["WORLD_SIZE"], numbers.get("LOCAL_WORLD_SIZE", numbers["WORLD_SIZE"])


def rank_numbers(environment: Mapping[str, str]) -> dict[str, int]:
    """Read the variables that a launcher such as torchrun sets. RANK and WORLD_SIZE must be set.

    Raises:
        ConfigError: the variables are not numbers or not consistent, for example left over from another run.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    present = {name: environment[name] for name in names if name in environment}
    # isdecimal() holds for digits of other scripts too, which no launcher writes.
    numbers = {name: int(text) for name, text in present.items() if text.isdecimal() and text.isascii()}
    local = numbers.get("LOCAL_WORLD_SIZE", numbers.get("WORLD_SIZE", 0))
    if numbers.keys() != present.keys() or not (
        numbers.get("LOCAL_RANK", 0) < local <= numbers["WORLD_SIZE"] and numbers["RANK"] < numbers["WORLD_SIZE"]
    ):
        got = ", ".join(f"{name}={text}" for name, text in present.items())
        fix = "Unset them: only torchrun should set them, for each process that it starts."
        raise ConfigError([Problem("environment", got, "must number the processes of a run", fix)])
    # torch's own error for a wrong port does not name the variable.
    port = environment.get("MASTER_PORT", "1")
    if not (port.isdecimal() and port.isascii() and 0 < int(port) < 2**16):
        fix = "Unset it: torchrun sets it for the processes that it starts."
        raise ConfigError([Problem("environment", f"MASTER_PORT={port}", "must name a port, 1 to 65535", fix)])
    return numbers


def require_interfaces(environment: Mapping[str, str]) -> None:
    """Check that this machine has the network interfaces of GLOO_SOCKET_IFNAME.

    Raises:
        ConfigError: it does not have one of them.
    """
    known = sorted(name for _, name in socket.if_nameindex())
    for name in environment.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in known:
            must = f"must name network interfaces of this machine: {', '.join(known)}"
            fix = "Unset it, or correct it."
            raise ConfigError([Problem("environment", f"GLOO_SOCKET_IFNAME={name}", must, fix)])


@cache
def _gpus() -> tuple[int, str]:
    if not _torch_has_cuda():
        return 0, "the installed torch was built without CUDA"
    # In a subprocess: forked children cannot use CUDA if their parent has initialized it.
    return run_in_subprocess(_driver_gpus)


def _driver_gpus() -> tuple[int, str]:
    try:
        # Unlike nvidia-smi, the driver's library obeys CUDA_VISIBLE_DEVICES, and it takes milliseconds.
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "there is no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0, "the NVIDIA driver reports an error"
    return count.value, "" if count.value else "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES?)"


def _torch_has_cuda() -> bool:
    """Check whether the installed torch was built with CUDA, from its version.py; does not import torch."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is not None


def idle_cores(host: Host, seconds: float = 0.2, stat: Path = Path("/proc/stat")) -> int | None:
    """Measure the number of idle cores of ``host``: at least 1, or None if the system does not report CPU times.

    Cost: waits ``seconds``.
    """
    # More threads than idle cores wait for each other at every barrier: on a busy machine of 2 cores, 1 thread trained
    # 448 images/s, and 2 threads 26.
    before = _ticks(stat)
    time.sleep(seconds)
    after = _ticks(stat)
    if before is None or after is None or not (num_ticks := after[1] - before[1]):
        return None
    idle = (after[0] - before[0]) / num_ticks * (os.cpu_count() or 1)
    return max(1, min(host.num_cores, round(idle)))


def _ticks(stat: Path) -> tuple[int, int] | None:
    """Return (idle ticks, all ticks), summed over cores since boot; None if the file cannot be read."""
    try:
        name, *ticks = stat.read_text().splitlines()[0].split()
        counts = [int(tick) for tick in ticks[:8]]  # the later columns, guests, are part of user time already
    except (OSError, ValueError, IndexError):
        return None
    # Columns 3 and 4 are idle and iowait: a core that waits for a disk is free to compute.
    return (counts[3] + counts[4], sum(counts)) if name == "cpu" and len(counts) > 4 else None


def _shares(root: Path = _GROUPS, groups_file: Path = _OWN_GROUPS) -> Iterator[float]:
    """Yield the number of cores that each control group of this process allows, versions 1 and 2."""
    for place, is_first in _control_groups("cpu", root, groups_file):
        try:
            if is_first:
                quota, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (place / "cpu.max").read_text().split()
            if int(quota) > 0:  # unlimited is "max" (a ValueError) in version 2, and -1 in version 1
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue


def _control_groups(controller: str, root: Path, groups_file: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is version 1) of this process's control groups: its own group first, then its ancestors."""
    # The limits of all ancestors apply. In a container the path may be the host's, which does not exist here; the loop
    # then ends at the root, where the container's own group is mounted.
    try:
        entries = [line.split(":", 2) for line in groups_file.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, group in (entry for entry in entries if len(entry) == 3):
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = top / group.strip("/")
            # Own group first: num_oom_kills() takes the first group that has a counter.
            for place in (folder, *(above for above in folder.parents if above.is_relative_to(top))):
                yield place, bool(controllers)


# Whether control groups are of version 1 -> files of limit and usage, and the field of memory.stat for file cache.
_MEMORY_FILES = {
    True: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    False: ("memory.max", "memory.current", "inactive_file"),
}


def available_memory(root: Path = _GROUPS, groups_file: Path = _OWN_GROUPS) -> int:
    """Return the bytes of memory that this process may use: the machine's, or a control group's limit if less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for place, is_first in _control_groups("memory", root, groups_file):
        with suppress(OSError, ValueError):  # "max" (unlimited) is not a number
            # In version 1, no limit is a number larger than any memory, which loses in ``min``.
            limits.append(int((place / _MEMORY_FILES[is_first][0]).read_text()))
    return min(limits)


def free_memory(root: Path = _GROUPS, groups_file: Path = _OWN_GROUPS, info: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that are free now: the least over the machine and all control groups of this process."""
    least = [available_memory(root, groups_file)]
    with suppress(OSError, ValueError, KeyError):
        least.append(_counters(info)["MemAvailable:"] * 1024)
    for place, is_first in _control_groups("memory", root, groups_file):
        limit, used, cached = _MEMORY_FILES[is_first]
        with suppress(OSError, ValueError, KeyError):  # "max" is not a number, and the root group has no files
            free = int((place / limit).read_text()) - int((place / used).read_text())
            least.append(free + _counters(place / "memory.stat")[cached])  # the kernel reclaims it first
    return max(0, min(least))


def settled_free_memory() -> int:
    """Measure ``free_memory`` after processes were killed; waits up to 5 s until the kernel has freed their memory."""
    free, end = free_memory(), time.monotonic() + _SETTLED_WITHIN_S
    while time.monotonic() < end:
        time.sleep(_SETTLING_S)
        # The largest so far: another process may take memory in the meantime, which is not a sign that all is freed.
        before, free = free, max(free, free_memory())
        if free - before < 2**20:
            break
    return free


def num_oom_kills(root: Path = _GROUPS, groups_file: Path = _OWN_GROUPS, counters: Path = Path("/proc/vmstat")) -> int:
    """Count the processes that the OOM killer has killed so far; 0 if the kernel does not report it.

    Counts this process's control group, else the whole machine.
    """
    for place, is_first in _control_groups("memory", root, groups_file):
        with suppress(OSError, ValueError, KeyError):
            return _counters(place / ("memory.oom_control" if is_first else "memory.events"))["oom_kill"]
        # Linux before 4.13 has no ``oom_kill`` and counts only how often the limit was reached.
        with suppress(OSError, ValueError):
            return int((place / "memory.failcnt").read_text())
    with suppress(OSError, ValueError, KeyError):
        return _counters(counters)["oom_kill"]
    return 0


def _counters(path: Path) -> dict[str, int]:
    """Read a file of lines ``name number`` as a dict."""
    return {name: int(number) for name, number, *_ in (line.split() for line in path.read_text().splitlines())}
