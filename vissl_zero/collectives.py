"""A thin layer over torch.distributed that is the identity without a process group.

For figures and statistics: none of these is differentiable. Every function but ``rank`` and ``world_size`` is a
collective: all ranks must call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")


def _is_distributed() -> bool:
    """Check whether this process is a member of an initialized default group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if _is_distributed() else 1


def rank() -> int:
    """Return the global rank of this process; 0 without a process group."""
    return dist.get_rank() if _is_distributed() else 0


def new_group(timeout_s: float, ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group, and wait until all its ranks have joined it.

    torch's own function may return while another rank still connects, which fails if this process ends at once.

    Args:
        timeout_s: timeout of its collectives, in seconds.
        ranks: its members; None: all.
        backend: None: that of the world.
    """
    group: dist.ProcessGroup = dist.new_group(
        None if ranks is None else list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend
    )
    if ranks is None or rank() in ranks:
        dist.barrier(group)
    return group


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over all ranks, as a new tensor; same shape and dtype everywhere. Cost: one all-reduce."""
    return _all_reduce(tensor, "sum")


def sum_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Sum as ``all_reduce_sum`` without waiting: call what it returns for the sum, on the CPU, when it is needed.

    The sum and its copy to the host run in the background. Calling the result is not a collective. Cost: one
    all-reduce.
    """
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(result, async_op=True) if world_size() > 1 else None
    if not result.is_cuda:

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return result

        return wait
    if work is not None:
        work.wait()  # on a GPU the stream waits, not the host
    # Pinned, because a copy to other host memory would make the host wait for the device.
    host = torch.empty_like(result, device="cpu", pin_memory=True).copy_(result, non_blocking=True)
    # An event, and not the whole stream: by the time that the sum is read, the stream has more work behind it.
    is_there = torch.cuda.Event()
    is_there.record()

    def wait_for_copy() -> Tensor:
        is_there.synchronize()
        return host

    return wait_for_copy


def all_reduce_max(tensor: Tensor) -> Tensor:
    """Take the element-wise maximum of ``tensor`` over all ranks, as a new tensor. Cost: one all-reduce."""
    return _all_reduce(tensor, "max")


def all_gather_rows(tensor: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Gather the rows of all ranks, one below the other in the order of ranks.

    Args:
        tensor: (n_r, ...) with any n_r per rank, zero included; trailing dimensions and dtype equal on all ranks.
        counts: n_r by rank; None asks the ranks for them.
    Returns:
        (sum of n_r, ...), identical on every rank.
    Cost: an all-gather of ``max n_r`` rows per rank, and one of the counts unless they are given, which are read on the
    host, which waits for the device. No copies where all ranks have as many rows.
    """
    tensor = tensor.detach()
    if world_size() == 1:
        # A new tensor here too, since callers may change what they get.
        return tensor.clone()
    if counts is None:
        counts = all_gather_number(len(tensor), tensor.device)
    most = max(counts)
    if min(counts) == most:
        return _all_gather(tensor).flatten(0, 1)
    # Every rank must send as many rows, in gloo and in NCCL.
    padded = tensor.new_zeros(most, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return torch.cat([part[:count] for part, count in zip(_all_gather(padded), counts, strict=True)])


def device_of_numbers(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where to put numbers that the host makes and reads, and that ranks agree on.

    In host memory, where the process group takes that (gloo beside nccl): the host then waits for other hosts, and not
    for what its own device still has to compute.

    Args:
        device: device that a group of nccl alone needs.
        group: group whose ranks agree; None: all.
    """
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device


def all_gather_number(number: int, device: torch.device) -> list[int]:
    """Gather the number of every rank, by rank; ``device`` is that of ``device_of_numbers``. Cost: one all-gather."""
    if world_size() == 1:
        return [number]
    local = torch.tensor(number, device=device_of_numbers(device))
    # A fake tensor stands for those of all ranks.
    return [number] * world_size() if isinstance(local, FakeTensor) else _all_gather(local).tolist()


def all_gather_into(gathered: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write the tensors of a group's ranks one after another into ``gathered``. Cost: one all-gather, no copies.

    Args:
        gathered: 1-d and contiguous, the group's size times as long as ``tensor``.
        tensor: 1-d and contiguous, of the same length and dtype on every rank.
        group: group whose ranks call this; None: all.
    """
    # torch 2.13's name for it, and the one before.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(gathered, tensor, group=group)


def all_gather_objects(value: T) -> list[T]:
    """Gather what each rank holds, in the order of ranks: small things that can be pickled."""
    if not _is_distributed():
        return [value]
    gathered: list[T] = [value] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def first_failure(work: Callable[[], object], *kinds: type[Exception]) -> str | None:
    """Do ``work``, and return why it failed on the first rank where it did; None: it failed on none. Collective.

    Args:
        work: it calls no collective.
        kinds: what counts as a failure; other errors are raised where they occur.
    """
    reason = None
    try:
        work()
    except kinds as error:
        reason = str(error) or type(error).__name__
    # Every rank comes here, failed or not: one that raised before it would leave the others waiting in the collective.
    return next((text for text in all_gather_objects(reason) if text is not None), None)


def broadcast_object(value: T) -> T:
    """Send rank 0's ``value`` to every rank, pickled; for small objects of one run. Cost: two broadcasts."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _all_gather(tensor: Tensor) -> Tensor:
    gathered = tensor.new_empty(world_size(), *tensor.shape)
    all_gather_into(gathered.view(-1), tensor.contiguous().view(-1))
    return gathered


def _all_reduce(tensor: Tensor, operation: str) -> Tensor:
    # The collective writes in place and takes contiguous memory only; the caller's tensor must keep its values.
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world_size() > 1:
        dist.all_reduce(result, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return result
