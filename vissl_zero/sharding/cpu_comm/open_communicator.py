"""How the ranks of a group communicate: through shared memory or gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from vissl_zero.sharding.cpu_comm.communicator import CpuCommunicator
from vissl_zero.sharding.cpu_comm.gloo import GlooCommunicator
from vissl_zero.sharding.cpu_comm.shared_memory import open_shared_memory

SLOT_BYTES = 2**20  # stays in a core's cache; 2 * LAG of them per rank. Twice or half that: as fast


def open_communicator(group: dist.ProcessGroup, timeout_s: float, *, use_shared_memory: bool = True) -> CpuCommunicator:
    """Shared memory where all ranks of ``group`` run on one machine, else gloo. CPU tensors.

    Collective over the world: every rank calls it, each with its own group.

    Args:
        group: the ranks that exchange.
        timeout_s: longest wait for a message; that of ``group`` if it is shorter.
        use_shared_memory: False: gloo in any case.
    """
    comm: CpuCommunicator | None = None
    of_group_s = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    timeout_s = min(timeout_s, of_group_s)
    if use_shared_memory:
        comm = open_shared_memory(group, SLOT_BYTES, timeout_s)
    wishes: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(wishes, None if comm else tuple(dist.get_process_group_ranks(group)))
    # new_group is a collective of the world, so every rank makes all groups, its own or not, in one order.
    for ranks in sorted({wish for wish in wishes if wish}):
        own = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
        if dist.get_rank() in ranks:
            comm = GlooCommunicator(own, SLOT_BYTES)
    assert comm is not None
    return comm
