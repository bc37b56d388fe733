"""Runs that share this process and its one thread, for the benchmarks that train many recipes one after the other."""

from __future__ import annotations

import os
import socket

import torch

from vissl_zero.launch.run import run
from vissl_zero.resolve.resolved import ResolvedRun


def be_a_rank() -> None:
    """As torchrun starts the only one: runs are this process, with one thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)


def train_here(plan: ResolvedRun) -> None:
    """Train in this process, which has imported everything already.

    Raises:
        RuntimeError: it did not come to its end.
    """
    if run(plan, ""):
        raise RuntimeError(f"{plan.recipe} did not train")
