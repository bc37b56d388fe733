"""Optimizers that need full tensors (Muon, LAMB, Adafactor, ...) on shards: each tensor is updated by one rank.

A step gathers every gradient, and the parameter, from the ranks that hold its rows to the rank that owns it, runs the
optimizer there on full tensors, and sends the updated rows back: the update does not know that anything is sharded, so
it is the same at every level and on any number of ranks. Optimizer state lives with the owner, 1/N of it on each rank.
Where every rank holds parameters whole (levels 1 and 2 on the CPU), they are not sent to the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero import collectives
from vissl_zero.sharding.shard import Shard
from vissl_zero.sharding.strategy import OptimizerFactory

_ALIGNMENT = 16  # bytes: a message may be read as any number format


def deal(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Which rank owns each tensor: the largest first, each to the rank that has least.

    The fullest rank then has at most 4/3 of the best partition's (https://doi.org/10.1137/0117039).
    """
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    # Ties go to the lower number, so that every rank finds the same deal without a message.
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += sizes[index]
    return owners


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Runs an optimizer on full tensors that this rank owns, for shards that all ranks hold.

    ``param_groups`` and ``state`` are those of the optimizer inside, so rates and counters are shared with it. The
    groups list all shards; during a step, they list the full tensors that this rank owns. ``state`` is by these.

    Args:
        build: of the optimizer, over full tensors.
        groups: its groups, over ``local`` of ``shards``.
        shards: of all trained parameters, the same names in the same order on every rank.
        group: the ranks among which they are cut. Every one of them must construct it, and call ``step``.
    Attributes:
        inner: the optimizer.
        adaptation: that ``build`` returned.
        owned: by full name, the full tensors of this rank; without memory between steps.
    Cost: a step moves (N-1)/N of all gradients to owners, of all parameters where ranks hold rows only, and of all
    parameters back; a rank holds 1/N of both in full during the step. ``num_sent``: bytes that this rank sent to others
    so far.
    """

    def __init__(
        self, build: OptimizerFactory, groups: list[dict[str, Any]], shards: Sequence[Shard], group: dist.ProcessGroup
    ):
        self._shards, self._group = list(shards), group
        # Whole on every rank, beside the rows that the optimizer updates: the owner has the values already.
        self._is_held = [s.source is not s.local and not isinstance(s.source, DTensor) for s in self._shards]
        self.num_sent = 0
        rank, num_ranks = group.rank(), group.size()
        self._owners = deal([shard.full_shape.numel() for shard in shards], num_ranks)
        spans: list[Any] = [None] * num_ranks
        # Engines cut tensors in different ways, so each rank tells the others where its parts begin.
        dist.all_gather_object(spans, [(s.first_element, s.local.numel()) for s in shards], group=group)
        self._spans: list[list[tuple[int, int]]] = spans
        # Every shard group deals anew, so a tensor has one owner in each group.
        copies = collectives.world_size() // num_ranks
        by_local: dict[int, nn.Parameter] = {}
        self.owned: dict[str, Shard] = {}
        for shard, owner in zip(shards, self._owners, strict=True):
            if owner == rank:
                whole = nn.Parameter(torch.zeros(shard.full_shape, dtype=shard.local.dtype, device=shard.local.device))
                by_local[id(shard.local)] = whole
                copy = collectives.rank() // num_ranks
                self.owned[shard.name] = Shard(shard.name, whole, whole, shard.full_shape, num_copies=copies, copy=copy)
        self._wholes = [
            self.owned[shard.name].local if owner == rank else None
            for shard, owner in zip(shards, self._owners, strict=True)
        ]
        self._sharded_params = [list(given["params"]) for given in groups]
        self._whole_params = [[by_local[id(p)] for p in own if id(p) in by_local] for own in self._sharded_params]
        # Full values first: an optimizer may read its parameters when it is built.
        self._gather()
        self.inner, self.adaptation = build(
            [{**given, "params": list(own)} for given, own in zip(groups, self._whole_params, strict=True)]
        )
        self._is_built = False
        super().__init__(groups, self.inner.defaults)
        self._is_built = True
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._show(self._sharded_params)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed."""
        # torch's constructor adds the groups through this method, so it is refused only afterwards.
        assert not getattr(self, "_is_built", False)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update from ``local.grad`` of the shards; a tensor that no rank has a gradient of stays. Collective."""
        assert closure is None
        self._gather()
        # Outside of a step, groups show sharded parameters. The inner optimizer must find the full ones in them.
        self._show(self._whole_params)
        try:
            self.inner.step()
        finally:
            self._show(self._sharded_params)
        self._scatter()
        self._forget()

    def _show(self, params: Sequence[list[nn.Parameter]]) -> None:
        for group, own in zip(self.param_groups if self._is_built else self.inner.param_groups, params, strict=True):
            group["params"] = own

    def _forget(self) -> None:
        """Give back the memory of full tensors; they keep their shapes."""
        for whole in self._wholes:
            if whole is not None:
                whole.grad = None
                # The tensor objects must stay: the state of the inner optimizer is keyed by them.
                whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def _gather(self) -> None:
        """Fill this rank's full tensors and their gradients from the shards of all ranks."""
        # A value is left out ([is_held:] skips it) where the owner has it already.
        outgoing = [
            _packed(
                [
                    part
                    for shard, owner, is_held in zip(self._shards, self._owners, self._is_held, strict=True)
                    if owner == rank
                    for part in _value_and_gradient(shard)[is_held:]
                ]
            )
            for rank in range(self._group.size())
        ]
        mine = [index for index, whole in enumerate(self._wholes) if whole is not None]
        for index in mine:
            whole = self._wholes[index]
            assert whole is not None
            whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
            if self._is_held[index]:
                whole.copy_(self._shards[index].source)
        # Each message ends with a flag per tensor: whether that rank had a gradient.
        flags_at = [
            sum((2 - self._is_held[index]) * spans[index][1] * self._shards[index].local.itemsize for index in mine)
            for spans in self._spans
        ]
        incoming = self._exchange(outgoing, [_padded(num_bytes + len(mine)) for num_bytes in flags_at])
        has_grad = [
            any(int(incoming[rank][flags_at[rank] + place]) for rank in range(self._group.size()))
            for place in range(len(mine))
        ]
        for index, is_present in zip(mine, has_grad, strict=True):
            whole = self._wholes[index]
            assert whole is not None
            # The optimizer leaves a tensor without gradient alone, which a gradient of zeros would not achieve.
            whole.grad = torch.empty_like(whole) if is_present else None
        for message, spans in zip(incoming, self._spans, strict=True):
            targets = []
            for index in mine:
                whole, (first, numel) = self._wholes[index], spans[index]
                assert whole is not None
                run = slice(first, first + numel)
                grad = None if whole.grad is None else whole.grad.view(-1)[run]
                # The same two parts, in the order in which their sender packed them.
                targets += [(whole.detach().view(-1)[run], numel), (grad, numel)][self._is_held[index] :]
            dtypes = [self._shards[index].local.dtype for index in mine for _ in range(2 - self._is_held[index])]
            _unpack(message, targets, dtypes)

    @torch.no_grad()
    def _scatter(self) -> None:
        """Copy updated rows from the owners of full tensors to the shards of all ranks."""
        mine = [index for index, whole in enumerate(self._wholes) if whole is not None]
        outgoing = []
        for spans in self._spans:
            parts = []
            for index in mine:
                whole, (first, numel) = self._wholes[index], spans[index]
                assert whole is not None
                parts.append(whole.detach().view(-1)[first : first + numel])
            outgoing.append(_packed(parts))
        theirs = [
            [shard for shard, owner in zip(self._shards, self._owners, strict=True) if owner == rank]
            for rank in range(self._group.size())
        ]
        sizes = [_padded(sum(shard.local.nbytes for shard in own)) for own in theirs]
        for message, own in zip(self._exchange(outgoing, sizes), theirs, strict=True):
            targets = [(shard.local.detach(), shard.local.numel()) for shard in own]
            _unpack(message, targets, [shard.local.dtype for shard in own])

    def _exchange(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Send each rank its message. Returns the messages received, by rank."""
        device = self._shards[0].local.device if self._shards else torch.device("cpu")
        if dist.get_backend(self._group) == dist.Backend.NCCL:  # with offload, shards are in the host's memory
            device = torch.device("cuda", torch.cuda.current_device())
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        sent = torch.cat(list(outgoing)).to(device) if self._shards else received
        self.num_sent += sum(len(message) for rank, message in enumerate(outgoing) if rank != self._group.rank())
        dist.all_to_all_single(received, sent, list(sizes), [len(message) for message in outgoing], group=self._group)
        return received.split(list(sizes))


def _value_and_gradient(shard: Shard) -> list[Tensor | bool]:
    grad = shard.local.grad
    # Zeros in the place of a missing gradient: the size of a message must not depend on who has one.
    return [shard.local.detach(), torch.zeros_like(shard.local) if grad is None else grad, grad is not None]


def _packed(parts: Sequence[Tensor | bool]) -> Tensor:
    """Tensors one behind the other as bytes, then the flags, then padding."""
    tensors = [part.reshape(-1).contiguous().view(torch.uint8) for part in parts if isinstance(part, Tensor)]
    flags = [part for part in parts if isinstance(part, bool)]
    device = tensors[0].device if tensors else torch.device("cpu")
    num_bytes = sum(len(tensor) for tensor in tensors) + len(flags)
    tail = torch.zeros(len(flags) + _padded(num_bytes) - num_bytes, dtype=torch.uint8)
    tail[: len(flags)] = torch.tensor(flags, dtype=torch.uint8)
    return torch.cat([*tensors, tail.to(device)])


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _unpack(message: Tensor, targets: Sequence[tuple[Tensor | None, int]], dtypes: Sequence[torch.dtype]) -> None:
    """Copy the parts of a packed message to ``targets``: pairs of a tensor (None: skip) and its number of elements."""
    start = 0
    for (target, numel), dtype in zip(targets, dtypes, strict=True):
        stop = start + numel * dtype.itemsize
        if target is not None and numel:
            # clone: a run may begin where this format must not, behind one of another format
            target.copy_(message[start:stop].clone().view(dtype).view(target.shape))
        start = stop
