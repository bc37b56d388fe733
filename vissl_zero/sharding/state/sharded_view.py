"""A view of a tensor of which each rank holds some rows: a row of a weight, or all of it in another shape.

Rows of several ranks share no memory, so a view has none. Each use gathers the full tensor, takes the view of it and,
after a write, copies the full tensor back into the shards. So a view has the values of its tensor at the time of use,
as in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.torch_private import as_plain_tensors, num_writes, without_values

# Operations that return views of their first argument, or write into one. Some copy for some arguments: the address of
# the result tells.
VIEWS = {
    "views": "__getitem__ __iter__ __setitem__ chunk diagonal expand expand_as flatten hsplit movedim moveaxis narrow "
    "permute ravel reshape reshape_as select split squeeze swapaxes swapdims t tensor_split transpose unbind unflatten "
    "unfold unsqueeze view view_as vsplit H T mH mT"
}
_VIEWS = frozenset(" ".join(VIEWS.values()).split())
_NO_VALUES = "shape dtype device layout ndim size dim ndimension numel nelement requires_grad is_leaf"
_FACTS = frozenset(_NO_VALUES.split())
_Step = Callable[[Tensor], Any]

_TRACKED = (
    "{}() would write into a view of a sharded parameter that requires a gradient. Write inside torch.no_grad(), as "
    "plain torch requires."
)


class ShardedView(Tensor):
    """A view of a sharded tensor. It has a shape, a dtype and a device, but no memory.

    Attributes:
        whole: the sharded tensor.
        steps: operations, in order, that take the view from the full tensor.
    """

    whole: Tensor
    steps: tuple[_Step, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(func) in _FACTS:
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        return run_on_views(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_on_views(func, args, kwargs or {})


def is_view(func: Any) -> bool:
    """Check whether ``func``, a function of torch, is a view operation of the table above."""
    return _name(func) in _VIEWS


def run_on_views(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on gathered full tensors, and copy those it writes back into the shards. Collective.

    Args:
        func: a function of torch.
        args, kwargs: its arguments, views and sharded tensors among them.
    Returns:
        A ``ShardedView`` if the result is a view of the first argument; else full tensors.
    Cost: an all-gather of each tensor that is viewed.
    """
    if func is Tensor.__iter__:
        return iter(run_on_views(Tensor.unbind, args, kwargs))
    if func is Tensor.data.__get__:  # type: ignore[attr-defined]  # a write to the data would not be counted
        func = Tensor.detach
    leaves = pytree.tree_leaves((args, kwargs))
    places = {id(leaf): _place(leaf) for leaf in leaves if isinstance(leaf, DTensor | ShardedView)}
    bases = {id(base): base for base, _ in places.values()}
    # Rolled by 0: a full copy with autograd history. Without it, a loss made of the result would silently give no
    # gradient; with it, the gradient reaches the sharded tensor, which refuses it.
    full = {key: torch.roll(base, 0, 0) for key, base in bases.items()}
    before = {key: num_writes(tensor) for key, tensor in full.items()}
    values = {key: _applied(steps, full[id(base)]) for key, (base, steps) in places.items()}
    full_args, options = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
    result = func(*full_args, **options)
    for key, base in bases.items():
        if num_writes(full[key]) != before[key]:
            _write_back(func, full[key], base)
    if not args or id(args[0]) not in places:
        return result
    base, steps = places[id(args[0])]
    memory = full[id(base)].untyped_storage().data_ptr()
    step = partial(_step, func, args[1:], kwargs)

    def view_of(part: Any, *taken: _Step) -> Any:
        if part is full_args[0]:
            # The operation returned its argument, as ``x.view_as(x)`` or ``ravel`` may.
            return args[0]
        if not isinstance(part, Tensor) or not part.numel() or part.untyped_storage().data_ptr() != memory:
            return part
        return _view(part, base, (*steps, *taken))

    if isinstance(result, tuple | list):
        parts = [view_of(part, step, itemgetter(index)) for index, part in enumerate(result)]
        return type(result)(parts)
    return view_of(result, step)


def _write_back(func: Any, full: Tensor, base: Tensor) -> None:
    if base.requires_grad and torch.is_grad_enabled():
        raise VisslZeroError(_TRACKED.format(_name(func)))
    with torch.no_grad():
        base.copy_(full)


def _place(tensor: Any) -> tuple[Any, tuple[_Step, ...]]:
    """Return the sharded tensor that ``tensor`` is a view of, and the steps to the view."""
    return (tensor.whole, tensor.steps) if isinstance(tensor, ShardedView) else (tensor, ())


def _view(values: Tensor, whole: Tensor, steps: tuple[_Step, ...]) -> ShardedView:
    view: ShardedView = without_values(ShardedView, values)
    view.whole, view.steps = whole, steps
    return view


def _step(func: Any, args: Any, kwargs: Any, value: Tensor) -> Any:
    return func(value, *args, **kwargs)


def _applied(steps: tuple[_Step, ...], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name
