"""Optimizers that need full tensors (Muon, LAMB, Adafactor, ...) on shards: each tensor is updated by one rank.

A step gathers every gradient, and the parameter, from the ranks that hold its rows to the rank that owns it, runs the
optimizer there on full tensors, and sends the updated rows back. The optimizer sees full tensors only, so the update
is the same at every level and on any number of ranks. Optimizer state is kept by the owner, 1/N of it on each rank.
Where every rank holds full parameters (levels 1 and 2 on the CPU), they are not sent to the owner. With state or
parameters on a disk, a few tensors are updated at a time, and only these are in memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.adaptation import OptimizerFactory
from vissl_zero.optim.update_rule import counter_keys
from vissl_zero.resolve.resolved import OffloadPlan
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator
from vissl_zero.sharding.offload.block_file import OffloadError
from vissl_zero.sharding.offload.parameter_store import DiskShard, ParameterStore
from vissl_zero.sharding.offload.state_place import UNSOUND, copied
from vissl_zero.sharding.offload.streamed_optimizer import WholeStates
from vissl_zero.sharding.offload.tier import whole_states
from vissl_zero.sharding.state.shard import Shard

ROUND_ELEMENTS = 2**20  # full elements per rank and round, with a tier on a disk; fewer rounds need fewer messages


def partition(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign tensors to ranks, the largest first, each to the rank with the fewest elements so far.

    The fullest rank then has at most 4/3 of the best partition's (https://doi.org/10.1137/0117039).
    """
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    # Ties go to the lower number, so that every rank computes the same partition without a message.
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += sizes[index]
    return owners


def _rounds_of(sizes: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Group tensors into rounds, in which they are full together: per owner no more elements than the largest has."""
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


def _require_eps(optimizer: torch.optim.Optimizer, params: Sequence[Sequence[Tensor]]) -> None:
    """Refuse torch's Adafactor without eps over several dtypes: it uses the eps of the first dtype for all."""
    for group, of_group in zip(optimizer.param_groups, params, strict=True):
        eps = group.get("eps")
        if isinstance(eps, tuple) and None in eps and len({param.dtype for param in of_group}) > 1:
            must = "must be given eps where parameters of a group have several formats: it would be that of one of them"
            fix = "Write eps=(1e-7, 1e-3), give each format a group of its own, or use ZeRO level 0."
            raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, fix)])


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Runs an optimizer on full tensors that this rank owns, for shards that all ranks hold.

    ``param_groups`` and ``state`` are those of the optimizer inside, so rates and counters are shared with it. The
    groups list all shards; during a step, they list the full tensors that this rank owns, the keys of ``state``.

    Args:
        build: builds the optimizer over full tensors.
        groups: its groups, over ``local`` of ``shards``.
        shards: shards of all trained parameters, the same names in the same order on every rank.
        group: the ranks among which they are cut. All of them must construct this object, and call ``step``.
        tier: where the state is stored.
        comm: communicator of the ranks of ``group``, for shards in host memory; None: torch's collectives.
    Raises:
        ConfigError: the optimizer takes a constant of a whole group from the dtype of one parameter.
        OffloadError: a rank has no disk space or cannot use the folder.
    Attributes:
        inner: the optimizer.
        adaptation: adaptation that ``build`` returned.
        owned: full tensors of this rank by full name; without memory between steps.
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
        comm: CpuCommunicator | None = None,
    ):
        self._shards, self._group, self._comm = list(shards), group, comm
        self._stores = list({id(s.store): s.store for s in shards if isinstance(s, DiskShard)}.values())
        self._is_streamed = bool(self._stores) or tier.is_on_disk
        # Parameters that are full on every rank, with ``local`` a view of some rows: the owner has the values already.
        self._is_held = [s.source is not s.local and not isinstance(s.source, DTensor) for s in self._shards]
        self.num_sent = 0
        rank, num_ranks = group.rank(), group.size()
        sizes = [shard.full_shape.numel() for shard in shards]
        self._owners = partition(sizes, num_ranks)
        self._rounds = _rounds_of(sizes, self._owners) if self._is_streamed else [list(range(len(shards)))]
        spans: list[Any] = [None] * num_ranks
        # Engines cut tensors in different ways, so ranks exchange where their parts begin.
        dist.all_gather_object(spans, [(s.first_element, s.local.numel()) for s in shards], group=group)
        self._spans: list[list[tuple[int, int]]] = spans
        # Each shard group makes its own partition, so a tensor has one owner per group.
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
        self._sharded_params = [list(options["params"]) for options in groups]
        self._whole_params = [[by_local[id(p)] for p in params if id(p) in by_local] for params in self._sharded_params]
        # Full values first: an optimizer may read its parameters when it is built. With a tier on a disk, all of them
        # may not fit into memory.
        if not self._is_streamed:
            self._gather(self._rounds[0])
        self.inner, self.adaptation = build(
            [{**options, "params": list(params)} for options, params in zip(groups, self._whole_params, strict=True)]
        )
        _require_eps(self.inner, self._sharded_params)
        params = [whole for whole in self._wholes if whole is not None]
        self._states: WholeStates | None = whole_states(tier, self.inner, params)
        # With several rounds, one step calls the inner optimizer's step several times, which would count each.
        self._counters = counter_keys(self.inner) if len(self._rounds) > 1 else frozenset()
        self._is_broken = self._is_built = False
        super().__init__(groups, self.inner.defaults)
        self._is_built = True
        # The inner optimizer's dicts, not those that super() was given: schedules set rates that the inner step reads.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state if self._states is None else self._states  # type: ignore[assignment]
        self._show(self._sharded_params)
        self._forget(params)
        # Not a method of this object: the finalizer would keep it alive.
        self._finalizer = weakref.finalize(self, _end, self._states, self._stores)

    @property
    def on_disk(self) -> WholeStates | None:
        """The state if it is stored on a disk; else None."""
        return self._states

    @property
    def resident_tensors(self) -> list[Tensor] | None:
        """Memory of the state and of streaming buffers; None if nothing is streamed."""
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
        """Refuse to add a group: the groups are fixed."""
        # torch's constructor adds the groups through this method, so it is refused only afterward.
        assert not getattr(self, "_is_built", False)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update from ``local.grad`` of the shards; a tensor without a gradient on any rank stays. Collective.

        Raises:
            OffloadError: something could not be read or stored. Some tensors are updated and others not: nothing but
                the last checkpoint can be trusted, and every further call raises too.
        """
        assert closure is None
        if self._is_broken:
            raise OffloadError(UNSOUND)
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
        """Collect the inner optimizer's step counters outside ``state``: its attributes, its groups' options."""
        counters = {key: value for key, value in vars(self.inner).items() if type(value) in (int, float)}
        groups = [{key: copied(group[key]) for key in self._counters & group.keys()} for group in self.param_groups]
        return counters, groups

    def _set_counts(self, counters: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        """Reset the counters to their values before a round: the next round belongs to the same step."""
        vars(self.inner).update(counters)
        for group, counts in zip(self.param_groups, groups, strict=True):
            for key in self._counters & group.keys():
                del group[key]
            group.update({key: copied(value) for key, value in counts.items()})

    @contextmanager
    def _shown(self, mine: Sequence[nn.Parameter]) -> Iterator[None]:
        """List full parameters in the groups for the inner optimizer; outside, groups list shards. A context."""
        present = set(mine)
        self._show([[param for param in group_params if param in present] for group_params in self._whole_params])
        try:
            yield
        finally:
            self._show(self._sharded_params)

    @contextmanager
    def _loaded(self, mine: Sequence[nn.Parameter]) -> Iterator[None]:
        """Load the state of ``mine`` into memory, where the inner optimizer finds it. A context."""
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
        for group, group_params in zip(
            self.param_groups if self._is_built else self.inner.param_groups, params, strict=True
        ):
            group["params"] = group_params

    @staticmethod
    def _forget(wholes: Sequence[nn.Parameter]) -> None:
        """Free the memory of full tensors; they keep their shapes."""
        for whole in wholes:
            whole.grad = None
            # The tensor objects must stay: the state of the inner optimizer is keyed by them.
            whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def _gather(self, tensors: Sequence[int]) -> list[nn.Parameter]:
        """Fill full tensors and their gradients from the shards of all ranks; return those that this rank owns."""
        has_grad = self._on_any_rank([self._shards[index].local.grad is not None for index in tensors])
        # Values are not sent if the owner has them already, nor gradients if no rank has one.
        has = {index: (not self._is_held[index], grad) for index, grad in zip(tensors, has_grad, strict=True)}
        outgoing: list[list[Tensor]] = [[] for _ in self._spans]
        for index in tensors:
            outgoing[self._owners[index]] += _values_and_gradient(self._shards[index], *has[index])
        mine = self._mine(tensors)
        incoming: list[list[Tensor]] = [[] for _ in self._spans]
        for index, whole in mine:
            whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
            if self._is_held[index]:
                whole.copy_(self._shards[index].source)
            has_values, has_gradient = has[index]
            # The optimizer leaves a tensor without gradient alone, which a gradient of zeros would not achieve.
            whole.grad = torch.empty_like(whole) if has_gradient else None
            for targets, spans in zip(incoming, self._spans, strict=True):
                # In the order in which ``_values_and_gradient`` packs them on the sender.
                targets += [_rows(whole, spans[index])] * has_values
                targets += [_rows(whole.grad, spans[index])] if whole.grad is not None else []
        self._all_to_all(incoming, outgoing, {index: sum(what) for index, what in has.items()}, to_owners=True)
        return [whole for _, whole in mine]

    @torch.no_grad()
    def _scatter(self, tensors: Sequence[int]) -> None:
        """Copy updated rows from the owners of full tensors to the shards of all ranks."""
        mine = self._mine(tensors)
        outgoing = [[_rows(whole, spans[index]) for index, whole in mine] for spans in self._spans]
        incoming: list[list[Tensor]] = [[] for _ in self._spans]
        stored: dict[int, Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for index in tensors:
            shard = self._shards[index]
            target = shard.local.detach()
            if isinstance(shard, DiskShard):
                target = stored[shard.index] = torch.empty(shard.local.numel(), dtype=shard.local.dtype)
            elif not target.is_contiguous():
                copies.append((target, target.contiguous()))
                target = copies[-1][1]
            incoming[self._owners[index]].append(target.view(-1))
        self._all_to_all(incoming, outgoing, dict.fromkeys(tensors, 1), to_owners=False)
        for target, rows in copies:
            target.copy_(rows)
        for store in self._stores:  # a model has one
            store.write(stored)

    def _mine(self, tensors: Sequence[int]) -> list[tuple[int, nn.Parameter]]:
        """Select the full tensors that this rank owns among ``tensors``, with their indices."""
        return [(index, whole) for index in tensors if (whole := self._wholes[index]) is not None]

    def _on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether at least one rank has set it. Collective."""
        message = torch.tensor(flags, dtype=torch.uint8, device=self._message_device())
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in message.tolist()]

    def _all_to_all(
        self,
        received: Sequence[Sequence[Tensor]],
        sent: Sequence[Sequence[Tensor]],
        num_times: Mapping[int, int],
        *,
        to_owners: bool,
    ) -> None:
        """Move runs of elements between shards and full tensors; what stays on this rank is copied.

        Args:
            received, sent: per rank, tensors (n,).
            num_times: per tensor, how often its elements are sent: 2 for values and gradients.
            to_owners: send from shards to owners; False: from owners to shards.
        """
        me = self._group.rank()
        for target, values in zip(received[me], sent[me], strict=True):
            target.copy_(values)
        if self._group.size() == 1:
            return
        # num_bytes[r][owner]: bytes between rank r and an owner. Every rank computes all: sizes need no message.
        num_bytes = [[0] * self._group.size() for _ in self._spans]
        for index, times in num_times.items():
            for by_owner, spans in zip(num_bytes, self._spans, strict=True):
                by_owner[self._owners[index]] += times * spans[index][1] * self._shards[index].local.itemsize
        if not to_owners:
            num_bytes = [list(column) for column in zip(*num_bytes, strict=True)]
        others = [rank for rank in range(self._group.size()) if rank != me]
        self.num_sent += sum(num_bytes[me][rank] for rank in others)
        # As bytes, so that tensors of several dtypes share one message.
        targets, parts = (
            [[tensor.contiguous().view(torch.uint8) for tensor in of_rank] for of_rank in by_rank]
            for by_rank in (received, sent)
        )
        if self._comm is not None:
            most = max(num for sender, row in enumerate(num_bytes) for to, num in enumerate(row) if sender != to)
            self._comm.all_to_all(targets, parts, most)
            return
        sizes = [num_bytes[rank][me] * (rank != me) for rank in range(self._group.size())]
        device = self._message_device()
        leaving = [part.to(device) for rank in others for part in parts[rank]]
        # cat needs at least one tensor, and this rank may send nothing.
        message = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *leaving])
        arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        sent_sizes = [num * (rank != me) for rank, num in enumerate(num_bytes[me])]
        dist.all_to_all_single(arrived, message, sizes, sent_sizes, group=self._group)
        flat = [target for rank in others for target in targets[rank]]
        for target, values in zip(flat, arrived.split([len(target) for target in flat]), strict=True):
            target.copy_(values)

    def _message_device(self) -> torch.device:
        """Return the device of tensors in the group's collectives."""
        if dist.get_backend(self._group) == dist.Backend.NCCL:  # with offload, shards are in host memory
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _device(shard: Shard) -> torch.device:
    """Return the device on which a shard is updated; one on a disk passes through host memory."""
    return torch.device("cpu") if shard.is_on_disk else shard.local.device


def _values_and_gradient(shard: Shard, has_values: bool, has_gradient: bool) -> list[Tensor]:
    """Return the values, the gradient or both of a shard, each as a tensor (n,)."""
    tensors = [shard.values()] if has_values else []
    if has_gradient:
        # Zeros if another rank has a gradient and this rank has none: message sizes must not depend on it.
        missing = shard.local.grad is None
        zeros = torch.zeros(shard.local.shape, dtype=shard.local.dtype, device=_device(shard)) if missing else None
        tensors.append(shard.grad() if zeros is None else zeros)
    return [tensor.reshape(-1) for tensor in tensors]


def _rows(whole: Tensor, span: tuple[int, int]) -> Tensor:
    """View ``span[1]`` elements of a full tensor from ``span[0]`` on, (n,)."""
    return whole.detach().view(-1)[span[0] : span[0] + span[1]]


def _end(states: WholeStates | None, stores: Sequence[ParameterStore]) -> None:
    if states is not None:
        states.close()
    for store in stores:
        store.close()
