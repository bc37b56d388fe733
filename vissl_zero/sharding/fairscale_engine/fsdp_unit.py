"""fairscale's FullyShardedDataParallel as this package needs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairscale.internal.containers import apply_to_tensors
from fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel, TrainingState
from torch import Tensor, nn

from vissl_zero.models.unit import is_recomputing
from vissl_zero.sharding.fairscale_engine.segment import Segment

# fairscale 0.4.13, its last version, uses what torch has renamed since. Both names work, and it will not change.
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\._(all_gather|reduce_scatter)_base` is a private function",
    category=FutureWarning,
)


class FsdpUnit(FullyShardedDataParallel):
    """One unit of the wrap plan.

    Beyond fairscale's own: it may be run again in the backward pass by activation checkpointing around it, its inputs
    are cast to the dtype it computes in, the loss need not depend on all of its parameters, and those of joined
    parameters that it does depend on are noted.

    Args:
        module: the layers; parameters that inner units have taken are left to them.
        use_sync: wait for the GPU before and after each forward pass.
        options: fairscale's.
    """

    def __init__(self, module: nn.Module, use_sync: bool, **options: Any):
        super().__init__(module, **options)
        self._use_sync = use_sync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters and run the module."""
        if is_recomputing():
            # Called in the middle of the backward pass, fairscale's own forward would reset this unit's state:
            # it would free what the backward pass is about to use. The parameters are freed when that is done.
            self._rebuild_full_params()
            return self.module(*args, **kwargs)
        if self._use_sync:
            torch.cuda.synchronize()
        if self.mixed_precision:
            # At the root fairscale itself would cast to float16, whatever the parameters are in.
            args, kwargs = apply_to_tensors(self._cast, args), apply_to_tensors(self._cast, kwargs)
        outputs = super().forward(*args, **kwargs)
        if self._use_sync:
            torch.cuda.synchronize()
        return outputs

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor

    def assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Like fairscale's, but at the end of the backward pass a unit may be one that the loss does not depend on."""
        is_unused = self.training_state in (TrainingState.IDLE, TrainingState.BACKWARD_PRE)
        if not (state is TrainingState.BACKWARD_POST and is_unused):
            super().assert_state(state)

    def _lazy_init(self) -> None:
        """Like fairscale's, but for all units: the end of a backward pass visits those that were never called, too."""
        is_first = self._is_root is None
        super()._lazy_init()
        if is_first and self._is_root:
            for unit in self.modules():
                if isinstance(unit, FsdpUnit):
                    for param in unit.params:
                        unit._init_param_attributes(param)

    def _register_pre_backward_hooks(self, outputs: Any) -> Any:
        """Gather the parameters for the backward pass before any of it runs, whichever output it comes from.

        fairscale hooks the outputs one by one, and leaves out those that it takes for an inner unit's by the ``id`` of
        tensors that may be gone, so that now and then a backward pass meets parameters that are not there.
        """
        if self._output_pre_backward_hook_registered is not None:
            self._output_pre_backward_hook_registered.clear()
        return super()._register_pre_backward_hooks(_joined(outputs))

    def _prep_grads_for_backward(self) -> None:
        """Like fairscale's, which takes the reduced gradient of a single element for one that was never reduced.

        Their shapes are the same; it would add the next micro-batch's to it and reduce both.
        """
        for param in self.params:
            if param._is_sharded and param.grad is not None and param.grad.shape == param._fp32_shard.shape:
                param._saved_grad_shard, param.grad = param.grad.data, None
        super()._prep_grads_for_backward()

    def _wait_for_post_backward(self) -> None:
        """Like fairscale's, which leaves parameters of the root whole where this backward pass did not reach them."""
        self.drop_whole()
        super()._wait_for_post_backward()

    def watch(self, segments: Sequence[Segment]) -> None:
        """Note which of ``segments``, those of this unit, the loss reaches.

        The gradient of joined parameters has zeros where it does not: nothing tells them from a gradient of zero.
        """
        if any(segment.is_joined for segment in segments):
            inner = self.module.module
            inner.register_forward_pre_hook(lambda *_: _watch(inner._unflattened_param_views, segments))

    def drop_whole(self) -> None:
        """Forget full parameters that are kept from an earlier forward pass; the shards are about to change."""
        if self.has_full_params or (self._is_root and self.params):
            self._free_full_params()
            self._use_fp32_param_shard()


class _Joined(torch.autograd.Function):
    """The identity, whose backward pass waits for the gradients of all its outputs. No copy."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def _joined(outputs: Any) -> Any:
    """``outputs`` with all tensors that require a gradient behind one node of the graph."""
    found: list[Tensor] = []
    apply_to_tensors(lambda tensor: found.append(tensor) if tensor.requires_grad else None, outputs)
    if len(found) < 2 or not torch.is_grad_enabled():
        return outputs
    joined = iter(_Joined.apply(*found))
    return apply_to_tensors(lambda tensor: next(joined) if tensor.requires_grad else tensor, outputs)


def _watch(views: Sequence[Tensor], segments: Sequence[Segment]) -> None:
    for view, segment in zip(views, segments, strict=True):
        if view.requires_grad and view.grad_fn is not None:
            view.register_hook(_marker(segment))


def _marker(segment: Segment) -> Callable[[Tensor], None]:
    def mark(grad: Tensor) -> None:
        segment.has_grad = True

    return mark
