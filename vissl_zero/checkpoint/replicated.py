"""State that ranks should hold alike, and may not: buffers, the loss's own state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.checkpoint.shard_file import bytes_of
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
    """Under which of its names this rank finds a tensor in a checkpoint that ``world_size`` ranks have written."""
    own = f"of_rank/{collectives.rank()}/{prefix}/{name}"
    return own if world_size == collectives.world_size() and own in names else f"{prefix}/{name}"


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """A number that differs if any value does (63 bits)."""
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(bytes_of(tensor.detach().to("cpu").contiguous()))
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
