"""Every private name of torch that sharding relies on, each with what it is relied on for."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd import graph as _graph
from torch.utils.checkpoint import CheckpointFunction

from vissl_zero.errors import VisslZeroError

_GRAD: Any = torch._C.TensorBase.grad
_REENTRANT = {CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__}


def real_grad(param: Tensor) -> Tensor | None:
    """The gradient that autograd has left on this rank, also where a subclass shows users another one."""
    found: Tensor | None = _GRAD.__get__(param)
    return found


def set_real_grad(param: Tensor, grad: Tensor | None) -> None:
    """Set what ``real_grad`` gives."""
    _GRAD.__set__(param, grad)


@contextmanager
def pretended_ranks(world_size: int) -> Iterator[None]:
    """Inside, collectives on fake tensors have the shapes of ``world_size`` ranks, and nothing is sent.

    Torch's own backend for this lives among its tests. Where a process group is up already it is used as it is: fake
    tensors send nothing through it either.
    """
    if world_size == 1 or dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called at the end of the backward pass that is running on this thread.

    Inside a segment of reentrant checkpointing that is the segment's own backward pass: see ``is_nested_backward``.
    """
    Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Whether a backward pass is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_nested_backward() -> bool:
    """Whether the backward pass on this thread runs inside another one, as reentrant checkpointing does. CPU only."""
    entry = _graph._engine_run_backward.__code__
    frame, depth = sys._getframe(), 0
    while frame is not None:
        depth += frame.f_code is entry
        frame = frame.f_back  # type: ignore[assignment]
    return depth > 1


def is_in_reentrant_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs, first or again, around the caller.

    Costs a walk over the stack where gradients are off or a backward pass is running; elsewhere nothing.
    """
    if torch.is_grad_enabled() and not is_in_backward():
        return False
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return True
        frame = frame.f_back
    return False


def has_saved_tensor_hooks() -> bool:
    """Whether somebody looks at the tensors that the running forward pass saves: only the innermost hooks would run."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def finish_unit_after_backward(state: Any) -> None:
    """Have the ``fully_shard`` ``state`` of a unit reduce and free all units when this backward pass ends."""
    state._register_root_post_backward_final_callback()


def lazy_init(root: Any) -> None:
    """Have ``fully_shard`` settle which module is the root, as it does in the first forward pass of any unit."""
    root._get_fsdp_state()._lazy_init()


def call_on_gradient(params: Iterable[Tensor], method: Callable[[Any], None]) -> None:
    """Have the bound ``method`` called with each parameter whose gradient has just been accumulated.

    torch keeps such a hook in C++, where Python's garbage collector does not see it. So the hook holds the object of
    ``method`` weakly: else a model, its optimizer and their process groups would live until the process ends.

    Raises (in the backward pass):
        VisslZeroError: the object is gone, and nobody would average the gradient.
    """
    target = weakref.WeakMethod(method)

    def hook(param: Tensor) -> None:
        alive = target()
        if alive is None:
            raise VisslZeroError(
                "The optimizer that initialize() returned is gone, so gradients are not averaged over ranks. "
                "Keep it as long as the model trains."
            )
        alive(param)

    for param in params:
        param.register_post_accumulate_grad_hook(hook)
