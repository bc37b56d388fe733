"""Devices, processes, machines, hooks; the run folder and restarts."""

from __future__ import annotations

from dataclasses import fields

from vissl_zero.config.derive.placement_plan import GPU_NAMES, ranks
from vissl_zero.config.host import Host
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem, did_you_mean
from vissl_zero.registry import HOOKS


def gpu(cfg: RunConfig, host: Host) -> Problem | None:
    """Requested GPUs exist, one per process, and use nccl."""
    if cfg.MACHINE.DEVICE not in GPU_NAMES:
        return None
    key, got = "config.MACHINE.DEVICE", repr(cfg.MACHINE.DEVICE)
    if host.num_gpus == 0:
        return Problem(key, got, f"cannot be used here: {host.why_no_gpu}", f"Write {key}=auto or {key}=cpu.")
    if cfg.DISTRIBUTED.BACKEND == "gloo":
        fix = "Write auto, or train on the CPU."
        return Problem("config.DISTRIBUTED.BACKEND", "'gloo'", "must be nccl on GPUs", fix)
    procs = ranks(cfg, host)[1]
    if procs > host.num_gpus:
        key, must = "config.DISTRIBUTED.NUM_PROC_PER_NODE", f"must be at most the number of GPUs, {host.num_gpus}"
        return Problem(key, str(procs), must, f"Write {key}={host.num_gpus}, or config.MACHINE.DEVICE=cpu.")
    return None


def several_machines(cfg: RunConfig, host: Host) -> Problem | None:
    """Several machines know where to meet."""
    distributed = cfg.DISTRIBUTED
    if distributed.NUM_NODES <= 1 or host.torchrun or cfg.SLURM.USE_SLURM or cfg.DRY_RUN:
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


def hooks(cfg: RunConfig, host: Host) -> list[Problem]:
    """Every extra hook is registered."""
    return [HOOKS.unknown(name) for name in cfg.HOOKS.EXTRA if name not in HOOKS]


def folder(cfg: RunConfig, host: Host) -> list[Problem]:
    """The run folder has a name."""
    if cfg.CHECKPOINT.DIR is None or (cfg.CHECKPOINT.DIR and "\0" not in cfg.CHECKPOINT.DIR):
        return []
    fix = "Write config.CHECKPOINT.DIR=runs/mine, or leave it out for a new folder under runs/."
    return [Problem("config.CHECKPOINT.DIR", repr(cfg.CHECKPOINT.DIR), "must name a folder", fix)]


def allowed(cfg: RunConfig, host: Host) -> list[Problem]:
    """What may change is a key or a block that there is."""
    found, known = [], [field.name for field in fields(cfg)]
    for key in cfg.CHECKPOINT.ALLOW_CHANGED:
        if key.removeprefix("config.").split(".")[0] not in known:
            fix = did_you_mean(key, known).strip() or "Write it as the refused resume printed it, such as LOSS.name."
            found.append(Problem("config.CHECKPOINT.ALLOW_CHANGED", repr(key), "must name keys or blocks", fix))
    return found


def restarts(cfg: RunConfig, host: Host) -> list[Problem]:
    """Restarts need a number of tries and a checkpoint to resume from."""
    found = []
    distributed = cfg.DISTRIBUTED
    if distributed.MAX_RESTARTS > 0 and not cfg.CHECKPOINT.AUTO_RESUME:
        must = "needs AUTO_RESUME: a restarted run resumes from its newest checkpoint"
        fix = "Write config.CHECKPOINT.AUTO_RESUME=true, or MAX_RESTARTS=0."
        found.append(Problem("config.DISTRIBUTED.MAX_RESTARTS", str(distributed.MAX_RESTARTS), must, fix))
    least = distributed.MIN_PROC_PER_NODE
    if least != -1 and not 1 <= least <= distributed.NUM_PROC_PER_NODE:
        must = f"must be -1, or from 1 to NUM_PROC_PER_NODE ({distributed.NUM_PROC_PER_NODE})"
        found.append(Problem("config.DISTRIBUTED.MIN_PROC_PER_NODE", str(least), must, "Write -1."))
    if least != -1 and distributed.NUM_NODES > 1:
        must = "must be -1 with more than one machine: they restart with all of their processes"
        found.append(Problem("config.DISTRIBUTED.MIN_PROC_PER_NODE", str(least), must, "Write -1."))
    return found


RULES = (gpu, several_machines, hooks, folder, allowed, restarts)
