"""Verifies that all ranks train the same model in the same way: before sharding, and before every update.

It also detects changes of a model that its shards cannot follow, before they cause a wrong update.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vissl_zero import collectives
from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.state.checksum import checksum
from vissl_zero.sharding.state.shard import Shard
from vissl_zero.sharding.torch_private import (
    as_plain_tensors,
    is_building_data_parallel,
    left_to_itself,
    local_tensor,
    num_gradient_hooks,
    num_writes,
    own_modules,
    own_parameters,
    runs_in_data_parallel,
    set_left_to_itself,
)


class ModelsDifferError(VisslZeroError):
    """The ranks did not build the same model, so that training it together would be wrong from the first step."""


def require_equal_models(model: nn.Module, device: torch.device) -> None:
    """Compare parameters and buffers across ranks: names, shapes, ``requires_grad``, and values by checksums.

    Collective. Tensors on the meta device have no values yet and are compared by name and shape. A counter (a buffer of
    integers) takes the value of rank 0, as under ``DistributedDataParallel``: some libraries leave its memory
    uninitialized until it is used.

    Raises:
        ModelsDifferError: on every rank, with the first parameter that differs.
    Cost: a gather of a few bytes, one all-reduce of 4 numbers per tensor; one pass over the tensors.
    """
    if collectives.world_size() == 1:
        return
    params = list(model.named_parameters())
    named = [*params, *model.named_buffers()]
    require_equal("parameters or buffers", [f"{name}, of shape {tuple(t.shape)}" for name, t in named])
    require_equal("what is trained", [f"requires_grad={p.requires_grad} of {name}" for name, p in params])
    # Names are equal by now, so the all-reduce of the sums has one shape on all ranks.
    sums = torch.stack([checksum(tensor) for _, tensor in named]).to(device)
    differing = [named[index] for index in _differing(sums)]
    counters = [(name, tensor) for name, tensor in differing if _is_counter(tensor)]
    _refuse_differing([name for name, tensor in differing if not _is_counter(tensor)])
    # The list is equal on all ranks, so all take part in each broadcast.
    for name, buffer in counters:
        _take_from_rank_0(name, buffer, device)


def require_equal(what: str, facts: Sequence[str]) -> None:
    """Compare ``facts`` across ranks. Collective over the world; every rank calls it with the same ``what``.

    Raises:
        ModelsDifferError: on every rank, with the first fact that differs.
    Cost: a gather of 8 bytes a rank; more only where it raises.
    """
    if collectives.world_size() == 1:
        return
    digests: list[Any] = [None] * dist.get_world_size()
    # Not ``hash``, which Python seeds differently in every process.
    dist.all_gather_object(digests, hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16])
    if len(set(digests)) == 1:
        return
    # Digests differ: only now send the facts themselves, to name the first that does.
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, list(facts))
    other = next(rank for rank, entries in enumerate(lists) if entries != lists[0])
    pairs = zip_longest(lists[0], lists[other], fillvalue="nothing")
    first, second = next((a, b) for a, b in pairs if a != b)
    raise ModelsDifferError(
        f"The ranks differ in {what}: rank 0 has {first}, rank {other} has {second}. "
        "Build model, optimizer and settings in the same way on every rank."
    )


@contextmanager
def equal_values(
    fill: Callable[[nn.Module, str], None], model: nn.Module, device: torch.device
) -> Iterator[Callable[[nn.Module, str], None]]:
    """Yield a ``fill`` for sharding ``model``; afterward compare across ranks how it filled meta parameters.

    Raises:
        ModelsDifferError: on every rank, with the first parameter that differs.
    Cost: one all-reduce of 4 numbers per tensor; one pass over the tensors.
    """
    bare = {name for name, param in model.named_parameters() if param.is_meta}
    sums: dict[str, Tensor] = {}

    def filled(module: nn.Module, name: str) -> None:
        fill(module, name)
        for key, param in module.named_parameters(prefix=name):
            if key in bare - sums.keys():  # an outer module is filled after units inside it
                sums[key] = checksum(param)

    yield filled
    if collectives.world_size() > 1 and sums:
        names, values = list(sums), torch.stack(list(sums.values()))
        _refuse_differing([names[index] for index in _differing(values.to(device))])


def _refuse_differing(names: Sequence[str]) -> None:
    if names:
        raise ModelsDifferError(
            f"The ranks start from different weights: {names[0]} differs between them. "
            "Draw the initial weights from one seed, or load them from one file, on every rank."
        )


def _is_counter(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or isinstance(tensor, nn.Parameter))


@torch.no_grad()
def _take_from_rank_0(name: str, buffer: Tensor, device: torch.device) -> None:
    value = buffer.to(device).contiguous()
    # As bytes: not every backend sends booleans.
    dist.broadcast(value.view(-1).view(torch.uint8), 0)
    buffer.copy_(value)
    if collectives.rank() == 0:
        words = "The buffer %s differs between the ranks: all start with the values of rank 0."
        logging.getLogger(__name__).warning(words, name)


class StepCheck:
    """Compares, before every update, the facts that must be equal on all ranks.

    Args:
        device: device of the model; used where the process group has no CPU backend.
    """

    def __init__(self, device: torch.device):
        self._is_needed = collectives.world_size() > 1
        self._device = collectives.device_of_numbers(device) if self._is_needed else device

    def require_equal(
        self, problem: str | None, facts: Mapping[str, int], marks: Sequence[bool] = ()
    ) -> Sequence[bool]:
        """Raise on every rank if any rank has a problem, or if facts differ.

        Args:
            problem: why this rank cannot update; None if it can.
            facts: numbers of 32 bits by their meaning, which completes the error message; the same keys on all ranks.
            marks: flags, as many as on every other rank.
        Returns:
            For each mark whether any rank has set it.
        Raises:
            VisslZeroError: on every rank; nothing was updated.
        Cost: one all-reduce of a few numbers, and 8 bytes for each mark.
        """
        if self._is_needed:
            values = [int(problem is not None), *facts.values()]
            sent = [*values, *(-value for value in values), *marks]
            bounds = torch.tensor(sent, dtype=torch.int64, device=self._device)
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
            agreed = bounds.tolist()
            # Ranks agree on a value where its maximum is its minimum.
            # Likewise a problem on some ranks only. If all ranks have one, each raises its own below.
            has_problem, *differs = (agreed[i] != -agreed[i + len(values)] for i in range(len(values)))
            # The maximum of a mark: whether any rank has set it.
            marks = [bool(mark) for mark in agreed[2 * len(values) :]]
            if problem is None and has_problem:
                raise VisslZeroError("No update was made: another rank cannot continue; see its message.")
            if problem is None and (names := [fact for fact, d in zip(facts, differs, strict=True) if d]):
                raise VisslZeroError(f"No update was made: the ranks differ in {names[0]}.")
        if problem is not None:
            raise VisslZeroError(problem)
        return marks


def text_digest(*values: object) -> int:
    """Return a 32-bit digest of the text of ``values``, the same in every process."""
    return zlib.crc32(repr(values).encode())


def option_text(option: Any) -> str:
    """Return the text of an option of a parameter group, the same on every rank: without device and address."""
    if isinstance(option, Tensor):
        return repr(option.tolist())
    return repr(option) if isinstance(option, str | int | float | None) else type(option).__name__


def _differing(values: Tensor) -> list[int]:
    """Return the indices of the rows of ``values`` that differ between ranks, the same list on all. Collective."""
    # One maximum of a value and of its negative gives both bounds in a single message.
    bounds = torch.stack([values, -values])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    rows = (bounds[0] != -bounds[1]).reshape(len(values), -1).any(dim=1)
    return rows.nonzero().flatten().tolist()


_FIRST_PASSES = 2
_MOVED = (
    "The memory of {} was replaced after sharding began (by model.to(...), .half() or .data = ...), so updates would "
    "be lost. Do that before initialize(); afterward, write in place."
)
_MISSING = (
    "{} is not in the model any more, and would not be trained: the model was changed after initialize(). Replace "
    "layers before it; write new values into the parameter in place."
)
_ADDED = (
    "{} was not in the model that was given to initialize(), and would be neither trained nor saved. Replace or add "
    "layers before initialize(), or build model and optimizer again."
)


class ParameterGuard:
    """Detects changes of a model's parameters between steps that sharding cannot follow.

    Args:
        module: already sharded.
        shards: this rank's part of every parameter.
        optimizer: optimizer that runs on them; from now on only inside ``own_step``.
    """

    def __init__(self, module: nn.Module, shards: Iterable[Shard], optimizer: torch.optim.Optimizer):
        shards = list(shards)
        self._module = module
        self._shards = shards
        self._frozen = {shard.name for shard in self._shards if not shard.source.requires_grad}
        self._places = {shard.name: _place(shard) for shard in self._shards}
        self._num_hooks = {shard.name: num_gradient_hooks(shard.source) for shard in self._shards}
        self._known = {id(param): name for name, param in module.named_parameters()}
        # fairscale's FSDP flattens parameters, so the model has others than the shards.
        self._is_followed = all(id(shard.source) in self._known for shard in shards)
        self._tables = _tables(module)
        _FirstPasses(module, self._refuse_moved)
        self._is_own_step = False
        self._num_writes = self._count_writes()
        self._optimizer = getattr(optimizer, "optim", optimizer)  # the base optimizer inside fairscale's OSS
        self._optimizer.register_step_pre_hook(self._refuse_foreign_step)

    def accept_hooks(self) -> None:
        """Accept the present hooks of parameters: sharding has set them."""
        self._num_hooks = {shard.name: num_gradient_hooks(shard.source) for shard in self._shards}

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Within this context, a step of the optimizer counts as made by this package, not by the user's loop."""
        self._is_own_step = True
        try:
            with self.own_writes():
                yield
        finally:
            self._is_own_step = False

    @contextmanager
    def own_writes(self) -> Iterator[None]:
        """Count writes into parameters made inside as sharding's own, not as the loop's. A context."""
        yield
        self._num_writes = self._count_writes()
        for shard in self._shards:
            shard.forget_writes()

    def written(self) -> int:
        """Return a digest of the loop's writes into parameters since the last update; 0 if none. Not a collective.

        Of a parameter that this rank holds in full it covers the values; of a sharded one, the numbers and full tensors
        that were combined into it. torch does not count writes through ``.data`` at level 0.
        Cost: one pass over what was written.
        """
        pairs = zip(self._shards, self._count_writes(), self._num_writes, strict=True)
        written = [shard for shard, number, before in pairs if number != before]
        sums = [shard.sum_of_writes().tolist() for shard in written]
        return text_digest([shard.name for shard in written], sums) if written else 0

    def _count_writes(self) -> list[tuple[int, int]]:
        # A write by the loop counts at the sharded tensor, and a write by sharding at its local rows.
        with as_plain_tensors():
            return [(num_writes(shard.source), num_writes(local_tensor(shard.source))) for shard in self._shards]

    def problem(self) -> str | None:
        """Return a sentence on the first change that an update would not see; None if there is none."""
        with as_plain_tensors():
            return self._problem()

    def _problem(self) -> str | None:
        if self._is_followed and (problem := self._rebuilt()) is not None:
            return problem
        for shard in self._shards:
            source = shard.source
            if source.requires_grad and shard.name in self._frozen:
                return (
                    f"{shard.name} was frozen when sharding began, and now has requires_grad, but would not be "
                    "trained. Give it to initialize() with requires_grad=True, and freeze it afterward."
                )
            if self._is_moved(shard):
                return _MOVED.format(shard.name)
            if num_gradient_hooks(source) != self._num_hooks[shard.name]:
                return (
                    f"A hook was set on {shard.name} after sharding began, where it does not see the gradient that the "  # noqa: S608
                    "update uses. Set it before initialize() at levels 0 to 2, or put a hook on a module's output."
                )
        return None

    def _rebuilt(self) -> str | None:
        """Return a sentence on the first parameter that the model lost or gained; None if all are still in it."""
        tables = _tables(self._module)
        if tables == self._tables:
            # The usual case: comparing ids is cheaper than walking over named parameters.
            return None
        names = {id(param): name for name, param in self._module.named_parameters()}
        for key, name in self._known.items():
            if key not in names:
                return _MISSING.format(name)
        for key, name in names.items():
            if key not in self._known:
                return _ADDED.format(name)
        self._tables = tables
        # Parameters have only changed their names or places, as in pruning.
        return None

    def _is_moved(self, shard: Shard) -> bool:
        # One on a disk has no address: exchanged by torch.utils.swap_tensors, it has another's store.
        store = getattr(shard.source, "store", None)
        return _place(shard) != self._places[shard.name] or store not in (None, shard)

    def _refuse_moved(self) -> None:
        moved = next((shard.name for shard in self._shards if self._is_moved(shard)), None)
        if moved is not None:
            raise VisslZeroError(_MOVED.format(moved))

    def _refuse_foreign_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # The hook is copied with the optimizer: trial steps of copies are allowed.
        if optimizer is self._optimizer and not self._is_own_step:
            raise VisslZeroError(
                "step() was called on the optimizer that was given to initialize(), which has no gradients. "
                "Call step() of the optimizer that initialize() returned."
            )


class _FirstPasses:
    """Checks a model after its first forward passes, in which some layers convert their own parameters.

    A check in ``step`` would be too late: the backward pass fails before, with torch's message.
    """

    def __init__(self, module: nn.Module, look: Callable[[], None]):
        self._look, self._num_left = look, _FIRST_PASSES
        self._hook = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._hook.remove()
        self._look()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _look_at_nothing  # a copy is a plain model

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _nothing_to_look_at, ()


def _look_at_nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    """Do nothing: the hook of a copied model, which is a plain model."""


def _nothing_to_look_at() -> Callable[..., None]:
    return _look_at_nothing


def _place(shard: Shard) -> object:
    """Return what must not change of a parameter: its address if ``local`` shares its memory, else dtype and shape."""
    source = shard.source
    if shard.local is source:
        return source.dtype, source.device, source.shape
    # Not to_local(), which returns a new view and records it for autograd.
    return local_tensor(source).data_ptr()


def _tables(module: nn.Module) -> list[list[int]]:
    """List which parameters and modules each module has, by identity."""
    return [
        [id(part) for part in (*own_parameters(owner).values(), *own_modules(owner).values())]
        for owner in module.modules()
    ]


def mark_sharded(model: nn.Module) -> None:
    """Make ``DistributedDataParallel`` refuse ``model``, whose gradients it would average a second time.

    Around the model itself, its constructor is refused. Around a module that contains the model, its forward pass is;
    with DTensors, which it cannot broadcast, the constructor.
    """
    set_left_to_itself(model, _NotToBeWrapped())
    model.register_forward_pre_hook(_refuse_to_run_inside)
    if any(isinstance(param, DTensor) for param in model.parameters()):
        model.__dict__["named_parameters"] = partial(_named_or_refused, model.named_parameters)


def is_marked_sharded(model: nn.Module) -> bool:
    """Check whether ``mark_sharded`` was called with ``model``; False for a copy, which is a plain model."""
    return isinstance(left_to_itself(model), _NotToBeWrapped)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as its author wrote it: ``fully_shard`` gives a unit one derived from it."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule)).__name__


def _named_or_refused(named: Callable[..., Iterator[tuple[str, nn.Parameter]]], *args: Any, **kwargs: Any) -> Any:
    # DistributedDataParallel asks module by module; other calls need not pay for a walk over the stack.
    if kwargs.get("recurse") is False and is_building_data_parallel():
        raise VisslZeroError(_AVERAGED_TWICE)
    return named(*args, **kwargs)


def _refuse_to_run_inside(model: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled() and runs_in_data_parallel() and is_marked_sharded(model):
        raise VisslZeroError(_AVERAGED_TWICE)


_AVERAGED_TWICE = (
    "This model was given to initialize(), which averages its gradients; DistributedDataParallel would do it a "
    "second time. Call the model as it is: leave it out of accelerator.prepare(...), fabric.setup(...) and the "
    "like. docs/initialize.md has the lines for accelerate, Lightning and Hugging Face's Trainer."
)


class _NotToBeWrapped:
    """Raises when ``DistributedDataParallel`` reads the names to ignore, before it changes anything of a model."""

    def __iter__(self) -> Iterator[str]:
        raise VisslZeroError(_AVERAGED_TWICE)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tuple, ()  # a copy is a plain model
