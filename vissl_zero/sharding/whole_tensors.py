"""Optimizers that need full tensors (Muon, LAMB, Adafactor, ...) on shards: each tensor is updated by one rank.

A step gathers every gradient, and the parameter, from the ranks that hold its rows to the rank that owns it, runs the
optimizer there on full tensors, and sends the updated rows back: the update does not know that anything is sharded, so
it is the same at every level and on any number of ranks. Optimizer state lives with the owner, 1/N of it on each rank.
Where every rank holds parameters whole (levels 1 and 2 on the CPU), they are not sent to the owner. Where state or
parameters rest on a disk, tensors are updated a few at a time, so that no more than these are in memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero import collectives
from vissl_zero.config.resolved import OffloadPlan
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.update_rule import counter_keys
from vissl_zero.sharding.offload.offloaded_shards import DiskShard
from vissl_zero.sharding.offload.parameter_store import ParameterStore
from vissl_zero.sharding.offload.run_folder import OffloadError
from vissl_zero.sharding.offload.state_place import copied
from vissl_zero.sharding.offload.tier import whole_states
from vissl_zero.sharding.offload.whole_states import WholeStates
from vissl_zero.sharding.shard import Shard
from vissl_zero.sharding.strategy import OptimizerFactory

_ALIGNMENT = 16  # bytes: a message may be read as any number format
ROUND_ELEMENTS = 2**20  # of a rank's full tensors at once, where these rest on a disk: fewer rounds, fewer messages


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


def rounds_of(sizes: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Which tensors are whole at the same time: of each owner as many as take no more room than the largest tensor."""
    most = max([*sizes, ROUND_ELEMENTS])
    filled: defaultdict[int, int] = defaultdict(int)
    current: defaultdict[int, int] = defaultdict(int)
    rounds: list[list[int]] = []
    for index, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if filled[owner] + size > most:
            current[owner], filled[owner] = current[owner] + 1, 0
        filled[owner] += size
        rounds += [[] for _ in range(current[owner] + 1 - len(rounds))]
        rounds[current[owner]].append(index)
    return rounds or [[]]


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Runs an optimizer on full tensors that this rank owns, for shards that all ranks hold.

    ``param_groups`` and ``state`` are those of the optimizer inside, so rates and counters are shared with it. The
    groups list all shards; during a step, they list the full tensors that this rank owns. ``state`` is by these.

    Args:
        build: of the optimizer, over full tensors.
        groups: its groups, over ``local`` of ``shards``.
        shards: of all trained parameters, the same names in the same order on every rank.
        group: the ranks among which they are cut. Every one of them must construct it, and call ``step``.
        tier: where the state rests.
    Raises:
        ConfigError: something is on a disk, and the optimizer makes state when it is built.
        OffloadError: a rank has no disk space or cannot use the folder.
    Attributes:
        inner: the optimizer.
        adaptation: that ``build`` returned.
        owned: by full name, the full tensors of this rank; without memory between steps.
    Cost: a step moves (N-1)/N of all gradients to owners, of all parameters where ranks hold rows only, and of all
    parameters back; a rank holds 1/N of both in full during the step. ``num_sent``: bytes that this rank sent to others
    so far.
    """

    def __init__(
        self,
        build: OptimizerFactory,
        groups: list[dict[str, Any]],
        shards: Sequence[Shard],
        group: dist.ProcessGroup,
        tier: OffloadPlan,
    ):
        self._shards, self._group = list(shards), group
        self._stores = list({id(s.store): s.store for s in shards if isinstance(s, DiskShard)}.values())
        self._is_streamed = bool(self._stores) or tier.device == "nvme"
        # Whole on every rank, beside the rows that the optimizer updates: the owner has the values already.
        self._is_held = [s.source is not s.local and not isinstance(s.source, DTensor) for s in self._shards]
        self.num_sent = 0
        rank, num_ranks = group.rank(), group.size()
        sizes = [shard.full_shape.numel() for shard in shards]
        self._owners = deal(sizes, num_ranks)
        self._rounds = rounds_of(sizes, self._owners) if self._is_streamed else [list(range(len(shards)))]
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
                whole = nn.Parameter(torch.zeros(shard.full_shape, dtype=shard.local.dtype, device=_device(shard)))
                by_local[id(shard.local)] = whole
                copy = collectives.rank() // num_ranks
                self.owned[shard.name] = Shard(shard.name, whole, whole, shard.full_shape, num_copies=copies, copy=copy)
        self._wholes = [
            self.owned[shard.name].local if owner == rank else None
            for shard, owner in zip(shards, self._owners, strict=True)
        ]
        self._sharded_params = [list(given["params"]) for given in groups]
        self._whole_params = [[by_local[id(p)] for p in own if id(p) in by_local] for own in self._sharded_params]
        # Full values first: an optimizer may read its parameters when it is built. All at once, they may be more than
        # memory holds.
        if not self._is_streamed:
            self._gather(self._rounds[0])
        self.inner, self.adaptation = build(
            [{**given, "params": list(own)} for given, own in zip(groups, self._whole_params, strict=True)]
        )
        if self._is_streamed:
            _require_no_state(self.inner)
        params = [whole for whole in self._wholes if whole is not None]
        self._states: WholeStates | None = whole_states(tier, self.inner, params)
        self._counters = counter_keys(self.inner) if len(self._rounds) > 1 else frozenset()
        self._is_broken = self._is_built = False
        super().__init__(groups, self.inner.defaults)
        self._is_built = True
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state if self._states is None else self._states  # type: ignore[assignment]
        self._show(self._sharded_params)
        self._forget(params)
        # Not a method of this object: the finalizer would keep it alive.
        self._finalizer = weakref.finalize(self, _end, self._states, self._stores)

    @property
    def on_disk(self) -> WholeStates | None:
        """What ``state`` is where it rests on a disk."""
        return self._states

    @property
    def resident_tensors(self) -> list[Tensor] | None:
        """All memory of the state and of streaming; None where nothing is streamed."""
        if not self._is_streamed:
            return None
        buffers = [tensor for store in self._stores for tensor in store.resident_tensors]
        if self._states is not None:
            return buffers + self._states.resident_tensors
        held = (value for state in self.state.values() for key, value in state.items() if key != "step")
        return [*buffers, *(value for value in held if isinstance(value, Tensor))]

    @property
    def disk_bytes(self) -> int:
        """Size of the files."""
        of_state = 0 if self._states is None else self._states.disk_bytes
        return of_state + sum(store.disk_bytes for store in self._stores)

    def close(self) -> None:
        """Remove files, if there are any; the optimizer cannot be used after it."""
        self._is_broken = self._is_streamed
        self._finalizer()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed."""
        # torch's constructor adds the groups through this method, so it is refused only afterwards.
        assert not getattr(self, "_is_built", False)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update from ``local.grad`` of the shards; a tensor that no rank has a gradient of stays. Collective.

        Raises:
            OffloadError: something could not be read or stored. Some tensors are updated and others not: nothing but
                the last checkpoint can be trusted, and every further call raises too.
        """
        assert closure is None
        if self._is_broken:
            raise OffloadError(
                "Streaming optimizer state failed earlier, or was ended. Resume from the last checkpoint."
            )
        # Trusted again only at the end: an error in between leaves some tensors updated and others not.
        self._is_broken = self._is_streamed
        before = self._counts()
        for number, tensors in enumerate(self._rounds):
            if number:
                self._set_counts(*before)
            mine = self._gather(tensors)
            with self._shown(mine), self._loaded(mine):
                self.inner.step()
            self._scatter(tensors)
            self._forget(mine)
        for store in self._stores:
            store.expect_next_step()
        self._is_broken = False

    def _counts(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the optimizer inside counts of its steps beside the state of tensors: in itself, in its groups."""
        own = {key: value for key, value in vars(self.inner).items() if type(value) in (int, float)}
        groups = [{key: copied(group[key]) for key in self._counters & group.keys()} for group in self.param_groups]
        return own, groups

    def _set_counts(self, own: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        """Take back what it counted in a round: the next one is still the same step."""
        vars(self.inner).update(own)
        for group, counts in zip(self.param_groups, groups, strict=True):
            for key in self._counters & group.keys():
                del group[key]
            group.update({key: copied(value) for key, value in counts.items()})

    @contextmanager
    def _shown(self, mine: Sequence[nn.Parameter]) -> Iterator[None]:
        """Outside of a step, groups show sharded parameters. The inner optimizer must find full ones in them."""
        present = set(mine)
        self._show([[param for param in own if param in present] for own in self._whole_params])
        try:
            yield
        finally:
            self._show(self._sharded_params)

    @contextmanager
    def _loaded(self, mine: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, the state of ``mine`` is in memory, where the inner optimizer finds it."""
        if self._states is None:
            yield
            return
        changed = [param for param in mine if param.grad is not None]
        self.inner.state.update({param: self._states[param] for param in changed if param in self._states})
        yield
        for param in changed:
            if param in self.inner.state:
                self._states[param] = self.inner.state.pop(param)
        self.inner.state.clear()

    def _show(self, params: Sequence[list[nn.Parameter]]) -> None:
        for group, own in zip(self.param_groups if self._is_built else self.inner.param_groups, params, strict=True):
            group["params"] = own

    @staticmethod
    def _forget(wholes: Sequence[nn.Parameter]) -> None:
        """Give back the memory of full tensors; they keep their shapes."""
        for whole in wholes:
            whole.grad = None
            # The tensor objects must stay: the state of the inner optimizer is keyed by them.
            whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def _gather(self, tensors: Sequence[int]) -> list[nn.Parameter]:
        """Fill full tensors and their gradients from the shards of all ranks; returns those of this rank."""
        # A value is left out ([is_held:] skips it) where the owner has it already.
        outgoing = [
            _packed(
                [
                    part
                    for index in tensors
                    if self._owners[index] == rank
                    for part in _value_and_gradient(self._shards[index], self._is_held[index])
                ]
            )
            for rank in range(self._group.size())
        ]
        mine = self._mine(tensors)
        # Each message ends with a flag per tensor: whether that rank had a gradient.
        flags_at = [
            sum((2 - self._is_held[index]) * spans[index][1] * whole.itemsize for index, whole in mine)
            for spans in self._spans
        ]
        incoming = self._exchange(outgoing, [_padded(num_bytes + len(mine)) for num_bytes in flags_at])
        for place, (index, whole) in enumerate(mine):
            # Only now, when what was sent has gone.
            whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
            if self._is_held[index]:
                whole.copy_(self._shards[index].source)
            has_grad = any(int(message[start + place]) for message, start in zip(incoming, flags_at, strict=True))
            # The optimizer leaves a tensor without gradient alone, which a gradient of zeros would not achieve.
            whole.grad = torch.empty_like(whole) if has_grad else None
        for message, spans in zip(incoming, self._spans, strict=True):
            targets = []
            for index, whole in mine:
                first, numel = spans[index]
                run = slice(first, first + numel)
                grad = None if whole.grad is None else whole.grad.view(-1)[run]
                # The same two parts, in the order in which their sender packed them.
                targets += [(whole.detach().view(-1)[run], numel), (grad, numel)][self._is_held[index] :]
            dtypes = [whole.dtype for index, whole in mine for _ in range(2 - self._is_held[index])]
            _unpack(message, targets, dtypes)
        return [whole for _, whole in mine]

    @torch.no_grad()
    def _scatter(self, tensors: Sequence[int]) -> None:
        """Copy updated rows from the owners of full tensors to the shards of all ranks."""
        outgoing = []
        for spans in self._spans:
            parts: list[Tensor | bool] = []
            for index, whole in self._mine(tensors):
                first, numel = spans[index]
                parts.append(whole.detach().view(-1)[first : first + numel])
            outgoing.append(_packed(parts))
        theirs = [
            [self._shards[index] for index in tensors if self._owners[index] == rank]
            for rank in range(self._group.size())
        ]
        sizes = [_padded(sum(shard.local.nbytes for shard in own)) for own in theirs]
        stored: dict[int, Tensor] = {}
        for message, own in zip(self._exchange(outgoing, sizes), theirs, strict=True):
            targets = []
            for shard in own:
                target = shard.local.detach()
                if isinstance(shard, DiskShard):
                    target = stored[shard.index] = torch.empty(shard.local.numel(), dtype=shard.local.dtype)
                targets.append((target, shard.local.numel()))
            _unpack(message, targets, [shard.local.dtype for shard in own])
        for store in self._stores:  # a model has one
            store.write(stored)

    def _mine(self, tensors: Sequence[int]) -> list[tuple[int, nn.Parameter]]:
        """Of ``tensors``, those that this rank owns."""
        return [(index, whole) for index in tensors if (whole := self._wholes[index]) is not None]

    def _exchange(self, outgoing: list[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Send each rank its message, and empty the list of these. Returns the messages received, by rank."""
        device = _device(self._shards[0]) if self._shards else torch.device("cpu")
        if dist.get_backend(self._group) == dist.Backend.NCCL:  # with offload, shards are in the host's memory
            device = torch.device("cuda", torch.cuda.current_device())
        sent_sizes = [len(message) for message in outgoing]
        sent = torch.cat(outgoing).to(device)
        outgoing.clear()  # messages are as large as the tensors: no more of them than needed at any time
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.num_sent += sum(sent_sizes) - sent_sizes[self._group.rank()]
        dist.all_to_all_single(received, sent, list(sizes), sent_sizes, group=self._group)
        return received.split(list(sizes))


def _device(shard: Shard) -> torch.device:
    """Where it is updated: what is on a disk passes through the host's memory."""
    return torch.device("cpu") if shard.is_on_disk else shard.local.device


def _value_and_gradient(shard: Shard, is_held: bool) -> list[Tensor | bool]:
    has_grad = shard.local.grad is not None
    # Zeros in the place of a missing gradient: the size of a message must not depend on who has one.
    grad = shard.grad() if has_grad else torch.zeros(shard.local.shape, dtype=shard.local.dtype, device=_device(shard))
    return [*([] if is_held else [shard.values()]), grad, has_grad]


def _require_no_state(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        must = "cannot go with state or parameters on NVMe: it makes state of full tensors when it is built"
        raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, "Write device: cpu.")])


def _end(states: WholeStates | None, stores: Sequence[ParameterStore]) -> None:
    if states is not None:
        states.close()
    for store in stores:
        store.close()


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
