"""The ranks that train together: those of torchrun, those already joined, or this process alone."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from vissl_zero.errors import ConfigError, Problem

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_ranks(device: torch.device, timeout_s: float) -> None:
    """Start the default process group if there is none; it is left at exit.

    Every rank that torchrun started must call it. Without torchrun's environment, this process is a world of one.

    Args:
        device: of this rank.
        timeout_s: of every collective of a group started here.
    Raises:
        ConfigError: torchrun's environment is incomplete.
    """
    if dist.is_initialized():
        return
    given = [name for name in _TORCHRUN if name in os.environ]
    is_launched = "RANK" in given or "WORLD_SIZE" in given
    if is_launched and len(given) < len(_TORCHRUN):
        missing = ", ".join(name for name in _TORCHRUN if name not in given)
        fix = "Start the program with torchrun, or unset RANK and WORLD_SIZE to train in one process."
        raise ConfigError([Problem("environment", "", f"has {', '.join(given)} but not {missing}", fix)])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        # gloo beside nccl: norms of tensors that are offloaded to the host are summed on the host
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=None if is_launched else dist.HashStore(),
        rank=-1 if is_launched else 0,
        world_size=-1 if is_launched else 1,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def training_device(model: torch.nn.Module) -> torch.device:
    """Where to train: the GPU that holds the model, else this rank's GPU if the machine has any, else the CPU."""
    held = next((param.device for param in model.parameters()), torch.device("cpu"))
    if held.type == "cuda":
        return held
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
