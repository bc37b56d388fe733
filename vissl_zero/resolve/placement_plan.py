"""The placement of ranks (processes, device, backend), and the rules of devices, machines, restarts and SLURM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem, did_you_mean
from vissl_zero.registry import HOOKS
from vissl_zero.resolve.host import Host

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

GPU_NAMES = ("gpu", "cuda")


@dataclass(frozen=True)
class Placement:
    """The placement of a run's ranks.

    Attributes:
        device: "cpu" or "cuda".
        backend: "gloo" or "cpu:gloo,cuda:nccl".
        world_size, num_nodes, procs_per_node: number of ranks, of machines, and of ranks per machine.
        threads_per_rank: CPU threads of torch per rank.
        notes: sentences to print once.
    """

    device: str
    backend: str
    world_size: int
    num_nodes: int
    procs_per_node: int
    threads_per_rank: int
    notes: tuple[str, ...] = ()


def placement(cfg: RunConfig, host: Host) -> Placement:
    """Return the placement of the ranks of ``cfg`` on ``host``."""
    distributed, notes = cfg.DISTRIBUTED, [host.assumed] if host.assumed else []
    world_size, procs = ranks(cfg, host)
    device = _device(cfg, host, procs)
    if device == "cpu" and host.num_gpus and cfg.MACHINE.DEVICE == "auto" and distributed.BACKEND != "gloo":
        notes.append(f"{procs} processes do not fit on {host.num_gpus} GPU(s), so the CPU is used.")
    if device == "cpu" and cfg.DRY_RUN and cfg.MACHINE.DEVICE == "auto" and is_submitted(cfg):
        notes.append("planned for CPUs; no GPUs are requested. Add config.MACHINE.DEVICE=gpu.")
    if device == "cpu" and distributed.BACKEND == "nccl":
        notes.append("config.DISTRIBUTED.BACKEND: nccl needs GPUs; gloo is used on the CPU.")
    if host.torchrun and procs != distributed.NUM_PROC_PER_NODE != 1:
        notes.append(f"config.DISTRIBUTED.NUM_PROC_PER_NODE has no effect: torchrun started {procs} processes.")
    if host.torchrun and distributed.MAX_RESTARTS:
        notes.append("config.DISTRIBUTED.MAX_RESTARTS has no effect under torchrun, which has --max-restarts.")
    if cfg.MACHINE.MEMORY_GIB is not None and not cfg.DRY_RUN:
        notes.append("config.MACHINE.MEMORY_GIB has an effect on dry runs only.")
    threads = _threads(cfg, host, procs)
    if threads < host.num_cores // procs and not (cfg.TRAINER.THREADS_PER_RANK or host.num_threads):
        plural = "thread" if threads == 1 else "threads"
        notes.append(
            f"The machine is busy ({host.num_idle_cores} of {host.num_cores} cores idle): {threads} {plural} per "
            f"process; config.TRAINER.THREADS_PER_RANK={host.num_cores // procs} uses all cores."
        )
    return Placement(
        device=device,
        # gloo too, for tensors that stay on the host: nccl moves none of them.
        backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        world_size=world_size,
        # torchrun does not say how many machines there are.
        num_nodes=max(1, world_size // procs),
        procs_per_node=procs,
        threads_per_rank=threads,
        notes=tuple(notes),
    )


def _threads(cfg: RunConfig, host: Host, procs: int) -> int:
    """Return the threads per rank: the user's number, else the rank's share of the idle cores."""
    # The number of threads changes the order of sums. With DETERMINISTIC it must not depend on the machine's load.
    cores = host.num_cores if cfg.TRAINER.DETERMINISTIC else host.num_idle_cores or host.num_cores
    return cfg.TRAINER.THREADS_PER_RANK or host.num_threads or max(1, cores // procs)


def ranks(cfg: RunConfig, host: Host) -> tuple[int, int]:
    """Return (world size, processes on this machine); torchrun's numbers win over the configuration's."""
    procs = max(1, cfg.DISTRIBUTED.NUM_PROC_PER_NODE)
    return host.torchrun or (procs * max(1, cfg.DISTRIBUTED.NUM_NODES), procs)


def _device(cfg: RunConfig, host: Host, procs: int) -> str:
    if cfg.MACHINE.DEVICE in GPU_NAMES:
        return "cuda"
    fits = host.num_gpus >= procs and cfg.DISTRIBUTED.BACKEND != "gloo"
    return "cuda" if cfg.MACHINE.DEVICE == "auto" and fits else "cpu"


def gpu(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that requested GPUs exist, one per process, and use nccl."""
    if cfg.MACHINE.DEVICE not in GPU_NAMES:
        return None
    key, got = "config.MACHINE.DEVICE", repr(cfg.MACHINE.DEVICE)
    if decided.host.num_gpus == 0:
        return Problem(key, got, f"cannot be used here: {decided.host.why_no_gpu}", f"Write {key}=auto or {key}=cpu.")
    if cfg.DISTRIBUTED.BACKEND == "gloo":
        fix = "Write auto, or train on the CPU."
        return Problem("config.DISTRIBUTED.BACKEND", "'gloo'", "must be nccl on GPUs", fix)
    procs = decided.placement.procs_per_node
    if procs > decided.host.num_gpus:
        key, must = (
            "config.DISTRIBUTED.NUM_PROC_PER_NODE",
            f"must be at most the number of GPUs, {decided.host.num_gpus}",
        )
        return Problem(key, str(procs), must, f"Write {key}={decided.host.num_gpus}, or config.MACHINE.DEVICE=cpu.")
    return None


def _several_machines(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that RUN_ID names a rendezvous address if the run has several machines."""
    distributed = cfg.DISTRIBUTED
    if distributed.NUM_NODES <= 1 or decided.host.torchrun or is_submitted(cfg) or cfg.DRY_RUN:
        return None
    host_name, _, port = distributed.RUN_ID.rpartition(":")
    if host_name and port.isdigit() and 0 < int(port) < 65536:
        return None
    if distributed.RUN_ID == "auto":
        must = "must be 1, unless machines know where to meet"
        fix = (
            "On each machine write config.DISTRIBUTED.RUN_ID=<address of machine 0>:<port> node_id=<its number>; "
            "or use torchrun --nnodes, or config.SLURM.USE_SLURM=true."
        )
        return Problem("config.DISTRIBUTED.NUM_NODES", str(distributed.NUM_NODES), must, fix)
    must = "must be <address of machine 0>:<port>"
    return Problem("config.DISTRIBUTED.RUN_ID", repr(distributed.RUN_ID), must, "Write such as 10.0.0.1:29500.")


def hooks(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that every extra hook is registered."""
    return [HOOKS.unknown(name) for name in cfg.HOOKS.EXTRA if name not in HOOKS]


def folder(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the run folder has a name."""
    if cfg.CHECKPOINT.DIR is None or (cfg.CHECKPOINT.DIR and "\0" not in cfg.CHECKPOINT.DIR):
        return []
    fix = "Write config.CHECKPOINT.DIR=runs/mine, or leave it out for a new folder under runs/."
    return [Problem("config.CHECKPOINT.DIR", repr(cfg.CHECKPOINT.DIR), "must name a folder", fix)]


def allowed(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the entries of ALLOW_CHANGED are existing keys or blocks."""
    problems, known = [], [field.name for field in fields(cfg)]
    for key in cfg.CHECKPOINT.ALLOW_CHANGED:
        if key.removeprefix("config.").split(".")[0] not in known:
            fix = did_you_mean(key, known).strip() or "Write it as the refused resume printed it, such as LOSS.name."
            problems.append(Problem("config.CHECKPOINT.ALLOW_CHANGED", repr(key), "must name keys or blocks", fix))
    return problems


def restarts(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that restarts can resume from a checkpoint, and that MIN_PROC_PER_NODE is possible."""
    problems = []
    distributed = cfg.DISTRIBUTED
    if distributed.MAX_RESTARTS > 0 and not cfg.CHECKPOINT.AUTO_RESUME:
        must = "needs AUTO_RESUME: a restarted run resumes from its newest checkpoint"
        fix = "Write config.CHECKPOINT.AUTO_RESUME=true, or MAX_RESTARTS=0."
        problems.append(Problem("config.DISTRIBUTED.MAX_RESTARTS", str(distributed.MAX_RESTARTS), must, fix))
    least = distributed.MIN_PROC_PER_NODE
    if least != -1 and not 1 <= least <= distributed.NUM_PROC_PER_NODE:
        must = f"must be -1, or from 1 to NUM_PROC_PER_NODE ({distributed.NUM_PROC_PER_NODE})"
        problems.append(Problem("config.DISTRIBUTED.MIN_PROC_PER_NODE", str(least), must, "Write -1."))
    if least != -1 and distributed.NUM_NODES > 1:
        must = "must be -1 with more than one machine: they restart with all of their processes"
        problems.append(Problem("config.DISTRIBUTED.MIN_PROC_PER_NODE", str(least), must, "Write -1."))
    return problems


_OPTION = re.compile(r"[a-z][a-z0-9-]*")
# Option of sbatch -> the key that decides it, which ADDITIONAL_PARAMETERS must not contradict.
_DECIDED = {
    "job-name": "config.SLURM.NAME",
    "comment": "config.SLURM.COMMENT",
    "partition": "config.SLURM.PARTITION",
    "account": "config.SLURM.ACCOUNT",
    "qos": "config.SLURM.QOS",
    "time": "config.SLURM.TIME_HOURS and TIME_MINUTES",
    "constraint": "config.SLURM.CONSTRAINT",
    "mem": "config.SLURM.MEM_GB",
    "cpus-per-task": "config.SLURM.NUM_CPU_PER_PROC",
    "nodes": "config.DISTRIBUTED.NUM_NODES",
    "ntasks": "config.DISTRIBUTED.NUM_PROC_PER_NODE and NUM_NODES",
    "ntasks-per-node": "config.DISTRIBUTED.NUM_PROC_PER_NODE",
    "gpus-per-node": "config.DISTRIBUTED.NUM_PROC_PER_NODE and config.MACHINE.DEVICE",
    "signal": "config.SLURM.SIGNAL_DELAY_S",
    "output": "config.SLURM.LOG_FOLDER",
    "error": "config.SLURM.LOG_FOLDER",
    "open-mode": "the run, which appends to its logs",
    "requeue": "config.SLURM.MAX_REQUEUES",
    "no-requeue": "config.SLURM.MAX_REQUEUES",
    "array": "Hydra's multirun (-m)",
    "wrap": "the run",
}


def _strings(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that strings in the sbatch script are one line each, without SLURM's placeholder %."""
    # A second line would be read as an option of sbatch or as a shell command.
    slurm, problems = cfg.SLURM, []
    for key in ("NAME", "COMMENT", "PARTITION", "ACCOUNT", "QOS", "CONSTRAINT", "LOG_FOLDER"):
        value = getattr(slurm, key)
        if is_unsafe(value):
            problems.append(_one_line(f"config.SLURM.{key}", value))
    folder = cfg.CHECKPOINT.DIR or ""
    if is_unsafe(folder):
        problems.append(_one_line("config.CHECKPOINT.DIR", folder))
    if "%" in folder:
        must = "must not contain %, which SLURM replaces"
        problems.append(Problem("config.CHECKPOINT.DIR", repr(folder), must, "Name another folder."))
    if not slurm.NAME.strip():
        problems.append(Problem("config.SLURM.NAME", repr(slurm.NAME), "must have a letter", "Name the job."))
    if "%" in slurm.LOG_FOLDER:
        must = "must not contain %, which SLURM replaces"
        problems.append(Problem("config.SLURM.LOG_FOLDER", repr(slurm.LOG_FOLDER), must, "Name another folder."))
    return problems


def _setup(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that SETUP has shell commands and no options of sbatch."""
    must = "must be shell commands, not options of sbatch"
    fix = "Put options into config.SLURM.ADDITIONAL_PARAMETERS."
    return [
        Problem("config.SLURM.SETUP", repr(command), must, fix)
        for command in cfg.SLURM.SETUP
        if re.search(r"^\s*#\s*SBATCH", command, re.MULTILINE)
    ]


def _additional(cfg: RunConfig, decided: Decisions) -> Iterator[Problem]:
    """Check that further options of sbatch are well formed, and that no other key decides them."""
    for name, value in cfg.SLURM.ADDITIONAL_PARAMETERS.items():
        option, key = str(name).replace("_", "-"), f"config.SLURM.ADDITIONAL_PARAMETERS.{name}"
        if not _OPTION.fullmatch(option):
            fix = "Write it without leading dashes, such as exclude."
            yield Problem("config.SLURM.ADDITIONAL_PARAMETERS", repr(name), "must be a long option of sbatch", fix)
        elif option in _DECIDED:
            # sbatch takes the later of two equal options without a word.
            yield Problem(key, repr(value), "is decided by another key", f"Use {_DECIDED[option]}.")
        elif not isinstance(value, (str, int, float, bool)):
            yield Problem(key, repr(value), "must be a string, a number or true", "Write one value.")
        elif value is False:
            yield Problem(key, "False", "must be true for an option without a value", "Leave it out to turn it off.")
        elif is_unsafe(str(value)):
            yield _one_line(key, str(value))


def _time_limit(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the time limit is above 0, and that the signal to save comes after the start."""
    slurm = cfg.SLURM
    problems = []
    minutes = 60 * slurm.TIME_HOURS + slurm.TIME_MINUTES
    if minutes < 1:
        fix = "Set config.SLURM.TIME_HOURS or config.SLURM.TIME_MINUTES."
        problems.append(Problem("config.SLURM.TIME_HOURS", "0", "must leave time to run", fix))
    elif 60 * minutes <= slurm.SIGNAL_DELAY_S:
        must = f"must be less than the time limit, {60 * minutes} s"
        fix = "Lower it, or raise config.SLURM.TIME_HOURS or TIME_MINUTES."
        problems.append(Problem("config.SLURM.SIGNAL_DELAY_S", str(slurm.SIGNAL_DELAY_S), must, fix))
    return problems


def is_submitted(cfg: RunConfig) -> bool:
    """Check whether the run is submitted to a scheduler, so that its machines and their disks are not this one's."""
    return cfg.SLURM.USE_SLURM


def _slurm_job(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check the keys of SLURM if the run is submitted."""
    if not is_submitted(cfg):
        return []
    return [*_strings(cfg, decided), *_setup(cfg, decided), *_additional(cfg, decided), *_time_limit(cfg, decided)]


def is_unsafe(value: object) -> bool:
    """Check for line breaks or other control characters, which could end a line of an sbatch script."""
    return isinstance(value, str) and any(
        ord(letter) < 32 or ord(letter) == 127 or letter in "\u0085\u2028\u2029" for letter in value
    )


def _one_line(key: str, value: str) -> Problem:
    must = "must be one line of printable text: the next line would be read as an option or a command"
    return Problem(key, repr(value), must, "Remove the line breaks.")


PLACEMENT_RULES = (gpu, _several_machines, hooks, folder, allowed, restarts, _slurm_job)
