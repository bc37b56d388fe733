"""Devices, processes, length of the run."""

from __future__ import annotations

from vissl_zero.config.derive.placement import GPU_NAMES, ranks
from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import above_zero, at_least, at_most, one_of
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem


def names(cfg: RunConfig, host: Host) -> list[Problem]:
    """Device and backend are known."""
    found = one_of("MACHINE.DEVICE", cfg.MACHINE.DEVICE, ("auto", "cpu", *GPU_NAMES))
    return found + one_of("DISTRIBUTED.BACKEND", cfg.DISTRIBUTED.BACKEND, ("auto", "nccl", "gloo"))


def gpu(cfg: RunConfig, host: Host) -> Problem | None:
    """A GPU that is asked for exists, one per process, joined by nccl."""
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


def numbers(cfg: RunConfig, host: Host) -> list[Problem]:
    """Counts and times are in range."""
    return [
        *at_least("DISTRIBUTED.NUM_PROC_PER_NODE", cfg.DISTRIBUTED.NUM_PROC_PER_NODE, 1),
        *at_least("DISTRIBUTED.NUM_NODES", cfg.DISTRIBUTED.NUM_NODES, 1),
        *above_zero("DISTRIBUTED.TIMEOUT_S", cfg.DISTRIBUTED.TIMEOUT_S),
        *at_least("TRAINER.MAX_STEPS", cfg.TRAINER.MAX_STEPS, 1),
        *at_least("TRAINER.THREADS_PER_RANK", cfg.TRAINER.THREADS_PER_RANK, 1),
        *at_least("LOG_FREQUENCY", cfg.LOG_FREQUENCY, 1),
        *at_least("SEED_VALUE", cfg.SEED_VALUE, 0),
        *at_most("SEED_VALUE", cfg.SEED_VALUE, 2**63 - 1),
        *at_least("NEAREST_NEIGHBOR.TOPK", cfg.NEAREST_NEIGHBOR.TOPK, 1),
        *above_zero("NEAREST_NEIGHBOR.SIGMA", cfg.NEAREST_NEIGHBOR.SIGMA),
        *at_least("NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS", cfg.NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS, 0),
        *at_least("NEAREST_NEIGHBOR.MAX_TRAIN_IMAGES", cfg.NEAREST_NEIGHBOR.MAX_TRAIN_IMAGES, 1),
        *at_least("NEAREST_NEIGHBOR.MAX_TEST_IMAGES", cfg.NEAREST_NEIGHBOR.MAX_TEST_IMAGES, 1),
    ]


def several_machines(cfg: RunConfig, host: Host) -> Problem | None:
    """Several machines know where to meet."""
    distributed = cfg.DISTRIBUTED
    if distributed.NUM_NODES <= 1 or host.torchrun or cfg.SLURM.USE_SLURM:
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


RULES = (names, gpu, numbers, several_machines)
