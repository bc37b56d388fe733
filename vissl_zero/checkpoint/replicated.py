"""Replicated state: how it is stored, and the replica check that finds ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.checkpoint.shard_file import bytes_of
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.state import Part


def replicated_parts(prefix: str, tensors: Mapping[str, Tensor]) -> list[Part]:
    """What this rank stores of tensors by name that every rank has. Collective.

    Where all ranks hold the same, rank 0 stores it under ``<prefix>/<name>``. Where they do not, each stores its own
    under ``of_rank/<k>/<prefix>/<name>``, and rank 0 what a run on another number of ranks takes: the mean of floating
    point tensors, its own of others.

    Cost: one all-gather of a number; where ranks differ, an all-reduce of each floating point tensor.
    """
    rank = collectives.rank()
    if _is_equal_everywhere(tensors):
        return [_part(f"{prefix}/{name}", tensor) for name, tensor in tensors.items()] if rank == 0 else []
    parts = [_part(f"of_rank/{rank}/{prefix}/{name}", tensor) for name, tensor in tensors.items()]
    for name, tensor in tensors.items():
        shared = tensor
        if tensor.is_floating_point():
            shared = collectives.all_reduce_sum(tensor) / collectives.world_size()
        if rank == 0:
            parts.append(_part(f"{prefix}/{name}", shared.to(tensor.dtype)))
    return parts


def stored_name(names: Mapping[str, object], prefix: str, name: str, world_size: int) -> str:
    """The name under which this rank finds a tensor in a checkpoint that ``world_size`` ranks have written."""
    own = f"of_rank/{collectives.rank()}/{prefix}/{name}"
    return own if world_size == collectives.world_size() and own in names else f"{prefix}/{name}"


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """A number that differs if any value does (63 bits)."""
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(bytes_of(tensor.detach().to("cpu").contiguous()))
    # 63 bits, since torch's integers are signed.
    return digest.intdigest() >> 1


def _is_equal_everywhere(tensors: Mapping[str, Tensor]) -> bool:
    if collectives.world_size() == 1:
        return True
    own = torch.tensor([digest_of(tensors)])
    found = [torch.empty_like(own) for _ in range(collectives.world_size())]
    dist.all_gather(found, own)
    return len({int(number) for number in found}) == 1


def _part(name: str, tensor: Tensor) -> Part:
    value = tensor.detach()
    return Part(name, value.shape, 0, value.numel(), value.dtype, lambda: value)


class RanksDifferError(VisslZeroError):
    """Ranks hold different values of what should be equal; raised on every rank at the same step."""


class RankCheck(Hook):
    """Compares full parameters, buffers, the loss's state and the learning rate over ranks, bit for bit.

    Args:
        every: optimizer steps between comparisons.

    Cost: one pass over them (12 GB/s on a CPU; from a GPU they are copied first), an all-gather of a number each.
    """

    def __init__(self, every: int):
        self._every = every

    def on_step(self, run: Run, step: Step) -> None:
        if run.step % self._every == 0:
            require_equal_ranks(run)


def require_equal_ranks(run: Run) -> None:
    """Compare now. Collective.

    Raises:
        RanksDifferError: with the names of what differs, and the ranks that differ from rank 0.
    """
    if collectives.world_size() == 1:
        return
    tensors: dict[str, Tensor] = run.sharded.replicated()
    state = run.method.state_dict()
    tensors |= {f"loss.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    rates = [float(group["lr"]) for group in run.sharded.optimizer.param_groups]
    tensors["learning rates"] = torch.tensor([*rates, float(run.step)], dtype=torch.float64)
    own = torch.tensor([digest_of({"": tensor}) for tensor in tensors.values()])
    found = [torch.empty_like(own) for _ in range(collectives.world_size())]
    dist.all_gather(found, own)
    differing = [
        (name, [rank for rank, numbers in enumerate(found) if numbers[index] != found[0][index]])
        for index, name in enumerate(tensors)
    ]
    if wrong := [(name, ranks) for name, ranks in differing if ranks]:
        name, ranks = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise RanksDifferError(
            f"Ranks have drifted apart by step {run.step}: {name}{others} of rank {', '.join(map(str, ranks))} is not "
            "rank 0's. A device or its memory may be at fault; resume from an earlier checkpoint on other hardware."
        )
