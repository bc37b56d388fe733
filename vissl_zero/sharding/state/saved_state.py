"""State that a rank writes so that a run can resume under any layout: each tensor with its place in the full one.

``parts_of`` yields the runs of elements that this rank stores; all ranks together store each element once.
``restore_state`` reads the runs that this rank needs, whatever layout wrote them. ``sharding/state/rank_state.py`` has
the form for an unchanged layout: one dict per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vissl_zero.errors import CheckpointError
from vissl_zero.optim.elementwise import complete_state
from vissl_zero.optim.update_rule import counter_keys, element_keys, state_keys
from vissl_zero.sharding.model.precision import LossScale
from vissl_zero.sharding.offload.streamed_optimizer import StreamedOptimizer, WholeStates
from vissl_zero.sharding.state.shard import Shard, empty_state
from vissl_zero.sharding.state.teacher import WeightAverage
from vissl_zero.sharding.torch_private import unsaved_buffers
from vissl_zero.sharding.update.whole_tensors import WholeTensorOptimizer


@dataclass(frozen=True)
class Part:
    """A run of elements of one tensor of the training state, which one rank has to store.

    Attributes:
        name: ``model/<full name>``, ``optimizer/<key>/<full name of the parameter>``, ...
        full_shape: shape of the full tensor.
        first_element: position of the first element in the flattened full tensor.
        num_elements: length of the run.
        dtype: data type of the elements.
        read: returns them in any shape of ``num_elements`` elements; may share memory with training.
        is_streamed: ``read`` reads a disk: a copy of all parts in memory would defeat the offload tier.
    """

    name: str
    full_shape: torch.Size
    first_element: int
    num_elements: int
    dtype: torch.dtype
    read: Callable[[], Tensor]
    is_streamed: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Part:
        """Wrap a full tensor; its memory is shared."""
        values = tensor.detach()
        return cls(name, values.shape, 0, values.numel(), values.dtype, lambda: values)


class SavedState(Protocol):
    """A saved state: full tensors by name, with access to any run of their elements."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a full tensor; None if there is none of that name."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a full tensor; None if there is none of that name."""

    def names(self, prefix: str) -> list[str]:
        """List the names of tensors that begin with ``prefix``."""

    def read_into(self, name: str, first_element: int, out: Tensor) -> None:
        """Fill ``out`` (1-d) with the elements from ``first_element`` on."""

    def scalars(self, parameter: str) -> Mapping[str, Any]:
        """Return the scalars of a parameter's optimizer state by key."""

    @property
    def loss_scale(self) -> Mapping[str, Any] | None:
        """State of the loss scaler."""


MODEL, OPTIMIZER, AVERAGE, TEACHER = "model/", "optimizer/", "average/", "teacher/"
SAME_SCALING = "Use the same setting of half precision (zero.fp16, config.MODEL.AMP_PARAMS)."
NO_TEACHER = (
    "The checkpoint holds a momentum teacher, and this model has none. Make it as the run did that saved it, by its "
    "method or by vissl_zero.ema(model, decay) before initialize()."
)


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield full names and values of the buffers that checkpoints contain."""
    for prefix, owner in model.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in unsaved_buffers(owner):
                yield f"{prefix}.{name}".lstrip("."), buffer


def parts_of(shards: Mapping[str, Shard], optimizer: torch.optim.Optimizer) -> Iterator[Part]:
    """Yield the parts of parameters and optimizer state that this rank stores. Not a collective.

    All ranks together store each element once; ranks that hold the same elements divide them.

    Raises:
        CheckpointError: the optimizer keeps state that is neither one number nor cut like its parameter.
    """
    for shard in shards.values():
        yield from _values_part(MODEL + shard.name, shard)
    if isinstance(optimizer, StreamedOptimizer) and optimizer.is_on_disk:
        yield from _streamed_parts(shards, optimizer)
        return
    shards = state_shards(shards, optimizer)
    names = {id(shard.local): name for name, shard in shards.items()}
    per_element = _element_keys(optimizer)
    states: Iterable[tuple[Tensor, Mapping[str, Any]]] = optimizer.state.items()
    if isinstance(optimizer, WholeTensorOptimizer) and (place := optimizer.on_disk) is not None:
        yield from _whole_parts(shards, names, place)
        states = [(param, place.numbers(param)) for param in place]
    for param, values in states:
        shard = shards[names[id(param)]]
        for key, value in values.items():
            # Scalars are not parts: ``scalars_of`` returns them.
            if _is_per_element(shard, key, value, per_element):
                yield from _part(f"{OPTIMIZER}{key}/{shard.name}", shard, value)
            # State of another shape cannot be cut like the parameter, but it can be stored where a rank holds the full
            # one.
            elif isinstance(value, Tensor) and value.dim() and shard.local.shape == shard.full_shape:
                yield from _part(f"{OPTIMIZER}{key}/{shard.name}", replace(shard, full_shape=value.shape), value)
            elif isinstance(value, Tensor) and value.dim():
                raise CheckpointError(
                    f"The optimizer's {key!r} of {shard.name} has shape {tuple(value.shape)}, unlike the parameter: "
                    "it cannot be stored so that another number of ranks could take it."
                )


def average_parts(shards: Mapping[str, Shard], average: WeightAverage) -> Iterator[Part]:
    """Yield the parts of the running average of parameters that this rank stores. Not a collective."""
    for name, shard in shards.items():
        yield from _part(AVERAGE + name, shard, average.params[name])


def teacher_parts(shards: Mapping[str, Shard]) -> Iterator[Part]:
    """Yield the parts of the teacher's parameters that this rank stores. Not a collective."""
    for name, shard in shards.items():
        yield from _values_part(TEACHER + name, shard)


def check_teacher(saved: SavedState, has_teacher: bool, shards: Mapping[str, Shard] | None) -> None:
    """Check that a store and this model both have a teacher, or neither.

    Args:
        saved: the store.
        has_teacher: the model has a teacher, whether or not saved states contain it.
        shards: parameters of the teacher to restore; None: no teacher is restored.
    Raises:
        CheckpointError: only one of them has a teacher, or the two teachers have different parameters.
    """
    names = {name.removeprefix(TEACHER): name for name in saved.names(TEACHER)}
    if shards is not None:
        check_names("the teacher's parameters", names, shards)
    elif names and not has_teacher:
        raise CheckpointError(NO_TEACHER)


@torch.no_grad()
def restore_teacher(saved: SavedState, shards: Mapping[str, Shard]) -> None:
    """Fill the teacher's parameters, after ``check_teacher``. Not a collective."""
    for name, shard in shards.items():
        _read_values(saved, TEACHER + name, shard)


def restore_average(
    saved: SavedState, shards: Mapping[str, Shard], buffers: Mapping[str, Tensor]
) -> WeightAverage | None:
    """Restore the running average of parameters; None if none was saved. Buffers are restored with the model's."""
    if not saved.names(AVERAGE):
        return None
    average = WeightAverage(shards.values(), buffers)
    for name, shard in shards.items():
        _read(saved, AVERAGE + name, shard, average.params[name])
    return average


def group_facts(shards: Mapping[str, Shard], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return options of the optimizer's groups, with the full names of their parameters. Not a collective."""
    names = {id(shard.local): name for name, shard in shards.items()}
    return [
        {key: _number(value) for key, value in group.items() if key != "params"}
        | {"params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def take_group_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set the options of a group to those that ``group_facts`` returned, directly or through JSON."""
    for key, value in saved.items():
        if key == "params":
            continue
        # JSON turns tuples (betas) into lists.
        value = _tensor_or_number(tuple(value) if isinstance(value, list) else value)
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            value = group[key].fill_(value.item())  # a schedule may hold the very tensor
        group[key] = value


def restore_counters(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore the counters that an optimizer keeps in its groups (LAMB's ``step``); options stay as they are."""
    if keys := counter_keys(inner_optimizer(optimizer)):
        by_name = {group.get("name"): group for group in saved}
        for group in optimizer.param_groups:
            saved_group = by_name.get(group.get("name"), {})
            take_group_options(group, {key: saved_group[key] for key in keys & saved_group.keys()})


def scalars_of(shards: Mapping[str, Shard], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the scalar optimizer state that this rank stores, by parameter and key, ready for JSON."""
    shards = state_shards(shards, optimizer)
    names = {id(shard.local): name for name, shard in shards.items()}
    scalars: dict[str, dict[str, Any]] = {}
    per_element = _element_keys(optimizer)
    if isinstance(optimizer, StreamedOptimizer):
        items = [(param, optimizer.scalars_of(param)) for param in optimizer.params_with_state()]
    elif isinstance(optimizer, WholeTensorOptimizer) and (place := optimizer.on_disk) is not None:
        items = [(param, place.numbers(param)) for param in place]
    else:
        items = list(optimizer.state.items())  # type: ignore[arg-type]
    for param, values in items:
        shard = shards[names[id(param)]]
        if not _stores_scalars(shard):
            continue
        numbers = {
            key: _number(value)
            for key, value in values.items()
            if not _is_per_element(shard, key, value, per_element) and not (isinstance(value, Tensor) and value.dim())
        }
        # Also if empty: the entry marks the parameter as updated.
        scalars[shard.name] = numbers
    return scalars


@torch.no_grad()
def restore_state(
    saved: SavedState,
    shards: Mapping[str, Shard],
    optimizer: torch.optim.Optimizer,
    loss_scale: LossScale | None,
) -> None:
    """Load parameters and optimizer state of this rank from a state that any layout may have saved.

    The groups keep this run's hyperparameters. Not a collective.

    Raises:
        CheckpointError: the state is of another model or another optimizer; nothing was changed.
    """
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    # All checks come before the first write, so that a refused checkpoint leaves the model as it was.
    _check_saved(saved, shards, optimizer, loss_scale)
    for name, shard in shards.items():
        _read_values(saved, MODEL + name, shard)
    keys_of: dict[str, list[str]] = {}
    for stored in saved.names(OPTIMIZER):
        key, _, name = stored.removeprefix(OPTIMIZER).partition("/")
        keys_of.setdefault(name, []).append(key)
    optimizer.state.clear()
    # A parameter without saved state has never been updated: the optimizer makes its state in the next step.
    for name, shard in state_shards(shards, optimizer).items():
        numbers = saved.scalars(name)
        if id(shards[name].local) not in trained or not (numbers or name in keys_of):
            continue
        state: dict[str, Any] = {key: _tensor_or_number(entry) for key, entry in numbers.items()}
        for key in keys_of.get(name, ()):
            stored = f"{OPTIMIZER}{key}/{name}"
            is_whole = shard.local.shape == shard.full_shape  # then state may have a shape of its own
            shape = saved.shape(stored) if is_whole else shard.local.shape
            assert shape is not None
            dtype = saved.dtype(stored)
            if isinstance(optimizer, StreamedOptimizer):
                dtype = optimizer.format_of(key, shard.local)
            elif dtype == saved.dtype(MODEL + name):  # state in the parameter's dtype follows it, if it differs here
                dtype = shard.local.dtype
            state[key] = empty_state(shard.local, shape, dtype)
            _read(saved, stored, shard, state[key])
        # For state on disk, this writes the records.
        optimizer.state[shard.local] = state
    if not isinstance(optimizer, StreamedOptimizer):
        complete_state(inner_optimizer(optimizer))
    if loss_scale is not None and saved.loss_scale is not None:
        loss_scale.load_state_dict(dict(saved.loss_scale))


def _check_saved(
    saved: SavedState, shards: Mapping[str, Shard], optimizer: torch.optim.Optimizer, loss_scale: LossScale | None
) -> None:
    prefixed = {name.removeprefix(MODEL): name for name in saved.names(MODEL)}
    check_names("parameters", prefixed, shards)
    for name, shard in shards.items():
        shape = saved.shape(MODEL + name)
        if shape != tuple(shard.full_shape):
            raise CheckpointError(f"{name} has shape {shape} in the checkpoint and {tuple(shard.full_shape)} here.")
    if (loss_scale is None) != (saved.loss_scale is None):
        raise CheckpointError(f"The checkpoint and this run differ in loss scaling. {SAME_SCALING}")
    held: dict[str, set[str]] = {name: set(saved.scalars(name)) for name in shards}
    for stored in saved.names(OPTIMIZER):
        key, _, name = stored.removeprefix(OPTIMIZER).partition("/")
        held[name].add(key)
    check_optimizer(held, [group["params"] for group in group_facts(shards, optimizer)], optimizer)


def check_optimizer(
    held: Mapping[str, Collection[str]], groups: Sequence[Sequence[str]], optimizer: torch.optim.Optimizer
) -> None:
    """Check that the saved state of each trained parameter has all keys that ``optimizer`` keeps.

    Args:
        held: saved keys by parameter; empty, or absent, for a parameter that was never updated.
        groups: names of the parameters in each group of ``optimizer``.
        optimizer: optimizer of this run.
    Raises:
        CheckpointError: the state is of another optimizer.
    """
    # By group: options such as amsgrad, in which groups may differ, decide what is kept.
    if isinstance(optimizer, StreamedOptimizer):
        expected = optimizer.keys_by_group
    else:
        expected = state_keys(inner_optimizer(optimizer))
    for name, needed in ((name, needed) for names, needed in zip(groups, expected, strict=True) for name in names):
        if (keys := held.get(name)) and (missing := needed - set(keys)):
            raise CheckpointError(
                f"The checkpoint is of another optimizer: of {name} it holds {', '.join(sorted(keys))}, and not "
                f"{', '.join(sorted(missing))}. Use the optimizer, and its options, that trained it."
            )


def check_same_update(saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Check by their options that saved groups are of this optimizer. State does not tell: plain SGD keeps none.

    Raises:
        CheckpointError: an option is missing, or one is of Adam and the other of AdamW, whose states are alike.
    """
    options = inner_optimizer(optimizer).defaults.keys()
    if missing := sorted({key for group in saved for key in options - group.keys()}):
        raise CheckpointError(
            f"The checkpoint is of another optimizer: its groups have no {', '.join(missing)}. Use the optimizer that "
            "trained it."
        )
    key = "decoupled_weight_decay"
    if any(key in a and key in b and a[key] != b[key] for a, b in zip(saved, optimizer.param_groups, strict=True)):
        raise CheckpointError("The checkpoint is of another optimizer: one of Adam and AdamW, and this is the other.")


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that computes the updates, which OSS and ``WholeTensorOptimizer`` wrap."""
    return optimizer.inner if isinstance(optimizer, WholeTensorOptimizer) else getattr(optimizer, "optim", optimizer)


def state_shards(shards: Mapping[str, Shard], optimizer: torch.optim.Optimizer) -> Mapping[str, Shard]:
    """Return the shards by which this rank's optimizer state is cut; full tensors under ``WholeTensorOptimizer``."""
    return optimizer.owned if isinstance(optimizer, WholeTensorOptimizer) else shards


def _read_values(saved: SavedState, name: str, shard: Shard) -> None:
    """Fill a parameter's shard, in memory or on disk."""
    if shard.is_on_disk:
        values = torch.empty(shard.local.shape, dtype=shard.local.dtype)
        _read(saved, name, shard, values)
        shard.assign(values)
    else:
        _read(saved, name, shard, shard.local)
        shard.publish()


def _read(saved: SavedState, name: str, shard: Shard, target: Tensor) -> None:
    """Fill ``target``, which is cut as ``shard`` is."""
    # The last ranks may hold no row of a small tensor.
    if not target.numel():
        return
    # Saved elements are in the order of a contiguous tensor; channels_last memory is filled through a copy.
    if target.is_contiguous():
        saved.read_into(name, shard.first_element, target.detach().view(-1))
        return
    flat = torch.empty(target.numel(), dtype=target.dtype)
    saved.read_into(name, shard.first_element, flat)
    target.copy_(flat.view(target.shape))


def _stored_run(shard: Shard, count: int) -> tuple[int, int]:
    """Return begin and end of the elements, of ``count``, that this rank stores among ranks with the same copy."""
    # One rank's end is the next rank's begin: no gap, no overlap.
    return count * shard.copy // shard.num_copies, count * (shard.copy + 1) // shard.num_copies


def _stores_scalars(shard: Shard) -> bool:
    """Check whether this rank stores the scalars of a parameter, such as its step counter; true on one rank."""
    # An empty part may begin at element 0 too: fairscale's full tensors, on ranks that do not own them.
    return shard.copy == 0 and shard.first_element == 0 and (shard.local.numel() > 0 or not shard.full_shape.numel())


def _is_per_element(shard: Shard, key: str, value: Any, per_element: Collection[str]) -> bool:
    """Check whether state has one element per element of the parameter.

    A parameter without dimensions has one element, and so have its counters (torch's ``step``, NAdam's ``mu_product``,
    ASGD's ``eta``): there, names decide.
    """
    return isinstance(value, Tensor) and value.shape == shard.local.shape and (value.dim() > 0 or key in per_element)


def _element_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the keys of the state that has one element per element of a parameter."""
    if isinstance(optimizer, StreamedOptimizer):
        return frozenset(optimizer.keys)
    return element_keys(inner_optimizer(optimizer))


def _part(name: str, shard: Shard, value: Tensor, read: Callable[[], Tensor] | None = None) -> Iterator[Part]:
    """Yield the part of ``value``, cut like ``shard``, that this rank stores; nothing if other ranks store all.

    With ``read``, ``value`` has shape and dtype only, and ``read`` reads the elements from a disk.
    """
    begin, end = _stored_run(shard, value.numel())
    if begin < end or (_stores_scalars(shard) and not shard.full_shape.numel()):
        # A parameter without elements still needs an entry, or a restore would miss its name.
        first, num_elements = shard.first_element + begin, end - begin
        held = value.detach()  # now: fairscale's forward passes give the parameter other memory
        run = partial(_run_of, read or (lambda: held), begin, end)
        yield Part(name, shard.full_shape, first, num_elements, value.dtype, run, is_streamed=read is not None)


def _run_of(read: Callable[[], Tensor], begin: int, end: int) -> Tensor:
    return read().reshape(-1)[begin:end]


def _values_part(name: str, shard: Shard) -> Iterator[Part]:
    """Yield the part of a parameter's values, in memory or on disk."""
    yield from _part(name, shard, shard.local, shard.values if shard.is_on_disk else None)


def _streamed_parts(shards: Mapping[str, Shard], optimizer: StreamedOptimizer) -> Iterator[Part]:
    """Yield state on a disk, to be read part by part. The keys of a parameter are consecutive, to read it once."""
    names = {id(shard.local): name for name, shard in shards.items()}
    read = _reader(optimizer.read_state)
    for param in optimizer.params_with_state():
        shard = shards[names[id(param)]]
        for key in optimizer.keys:
            yield from _part(f"{OPTIMIZER}{key}/{shard.name}", shard, param, partial(read, param, key))


def _whole_parts(shards: Mapping[str, Shard], names: Mapping[int, str], place: WholeStates) -> Iterator[Part]:
    """Yield state of full tensors on a disk, as ``_streamed_parts``; its shape may differ from the parameter's."""
    read = _reader(place.__getitem__)
    for param in place:
        shard = shards[names[id(param)]]
        for stored in place.tensors(param):
            alike = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            name, cut = f"{OPTIMIZER}{stored.key}/{shard.name}", replace(shard, full_shape=stored.shape)
            yield from _part(name, cut, alike, partial(read, param, stored.key))


def _reader(read_state: Callable[[Any], Mapping[str, Any]]) -> Callable[[Tensor, str], Tensor]:
    """Return a reader of state on a disk, which caches the state of the last parameter."""
    latest: list[Any] = [None, {}]

    def read(param: Tensor, key: str) -> Tensor:
        # Cached from one key to the next: each record holds all keys of its elements.
        if latest[0] is not param:
            latest[:] = [param, read_state(param)]
        return latest[1][key]

    return read


def _number(value: Any) -> Any:
    """Convert a scalar to JSON; a tensor keeps its dtype."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    return value


def _tensor_or_number(entry: Any) -> Any:
    if isinstance(entry, dict) and entry.keys() == {"dtype", "value"}:
        return torch.tensor(entry["value"], dtype=getattr(torch, entry["dtype"]))
    return entry


def check_names(kind: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a state of another model.

    Raises:
        CheckpointError: names are missing or unknown.
    """
    missing, extra = sorted(here.keys() - saved.keys()), sorted(saved.keys() - here.keys())
    if missing or extra:
        raise CheckpointError(
            f"The saved state is of another model: {kind} missing from it: {', '.join(missing[:5]) or 'none'}; "
            f"unknown here: {', '.join(extra[:5]) or 'none'}."
        )
