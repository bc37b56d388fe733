"""Notices changes of a model that its shards cannot follow, before they make a wrong update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.shard import Shard
from vissl_zero.sharding.torch_private import is_building_data_parallel, runs_in_data_parallel

_FIRST_PASSES = 2
_MOVED = (
    "The memory of {} was replaced after sharding began (by model.to(...), .half() or .data = ...), so updates would "
    "be lost. Do that before initialize(); afterwards, write in place."
)


class ParameterGuard:
    """Looks after the parameters of one model between steps.

    Args:
        module: already sharded.
        shards: this rank's part of every parameter.
        optimizer: that runs on them; from now on only inside ``own_step``.
    """

    def __init__(self, module: nn.Module, shards: Iterable[Shard], optimizer: torch.optim.Optimizer):
        self._shards = [shard for shard in shards if not shard.is_on_disk]
        self._frozen = {shard.name for shard in self._shards if not shard.source.requires_grad}
        self._places = {shard.name: _place(shard.source) for shard in self._shards}
        self._num_hooks = {shard.name: num_hooks(shard.source) for shard in self._shards}
        sources = {id(shard.source): shard for shard in self._shards}
        self._owners = [
            (owner, key, sources[id(param)])
            for owner in module.modules()
            for key, param in owner._parameters.items()
            if id(param) in sources
        ]
        _FirstPasses(module, self._refuse_moved)
        self._is_own_step = False
        self._optimizer = getattr(optimizer, "optim", optimizer)  # fairscale's has the one that runs inside
        self._optimizer.register_step_pre_hook(self._refuse_foreign_step)

    def accept_hooks(self) -> None:
        """The hooks that parameters have by now are sharding's own."""
        self._num_hooks = {shard.name: num_hooks(shard.source) for shard in self._shards}

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Around a step that sharding makes itself."""
        self._is_own_step = True
        try:
            yield
        finally:
            self._is_own_step = False

    def problem(self) -> str | None:
        """The first change that an update would not see, as a sentence for people; None if there is none."""
        for owner, key, shard in self._owners:
            if getattr(owner, key, None) is not shard.source:
                return (
                    f"{shard.name} is not the parameter that was given to initialize(), and would not be trained. "
                    "Change the model before initialize(); write new values into the parameter in place."
                )
        for shard in self._shards:
            source = shard.source
            if source.requires_grad and shard.name in self._frozen:
                return (
                    f"{shard.name} was frozen when sharding began, and now has requires_grad, but would not be "
                    "trained. Give it to initialize() with requires_grad=True, and freeze it afterwards."
                )
            if self._is_moved(shard):
                return _MOVED.format(shard.name)
            if num_hooks(source) != self._num_hooks[shard.name]:
                return (
                    f"A hook was set on {shard.name} after sharding began, where it does not see the gradient that the "
                    "update uses. Set it before initialize() at levels 0 to 2, or put a hook on a module's output."
                )
        return None

    def _is_moved(self, shard: Shard) -> bool:
        return _place(shard.source) != self._places[shard.name]

    def _refuse_moved(self) -> None:
        moved = next((shard.name for shard in self._shards if self._is_moved(shard)), None)
        if moved is not None:
            raise VisslZeroError(_MOVED.format(moved))

    def _refuse_foreign_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer and not self._is_own_step:  # a copy of it may be tried out
            raise VisslZeroError(
                "step() was called on the optimizer that was given to initialize(), which has no gradients. "
                "Call step() of the optimizer that initialize() returned."
            )


class _FirstPasses:
    """Looks at a model after its first forward passes: a layer that converts itself does so there.

    The backward pass would end in torch's words before a step could say what is wrong.
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

    def __reduce__(self) -> str:
        return "_look_at_nothing"


def _look_at_nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    """In a copy, where the hook was."""


def _place(source: Tensor) -> int:
    """Where the values that this rank holds lie in memory."""
    # The tensor itself: to_local() would return a new view, and record it for autograd.
    local = source._local_tensor if isinstance(source, DTensor) else source
    return local.data_ptr()


def num_hooks(source: Tensor) -> int:
    """How many hooks a parameter has, before and after its gradient is accumulated."""
    return len(source._backward_hooks or ()) + len(getattr(source, "_post_accumulate_grad_hooks", None) or ())


def mark_sharded(model: nn.Module) -> None:
    """Have ``DistributedDataParallel`` end in a sentence instead of averaging gradients a second time.

    Around the model itself it is refused when it is built; around a module that holds the model, in the forward pass,
    or, if there are DTensors, which it cannot broadcast, when it asks for them.
    """
    model._ddp_params_and_buffers_to_ignore = _NotToBeWrapped()  # type: ignore[assignment]
    model.register_forward_pre_hook(_refuse_to_run_inside)
    if any(isinstance(param, DTensor) for param in model.parameters()):
        model.__dict__["named_parameters"] = partial(_named_or_refused, model.named_parameters)


def is_marked_sharded(model: nn.Module) -> bool:
    """Whether ``mark_sharded`` has had it; not so for a copy, which is a plain model."""
    return isinstance(getattr(model, "_ddp_params_and_buffers_to_ignore", None), _NotToBeWrapped)


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
    """Where ``DistributedDataParallel`` looks for what to leave alone, before it changes anything of a model."""

    def __iter__(self) -> Iterator[str]:
        raise VisslZeroError(_AVERAGED_TWICE)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tuple, ()  # a copy is a plain model
