"""Batch norm across ranks, on any backend, whose statistics count a batch once under recomputation.

``torch.nn.SyncBatchNorm`` refuses the CPU, and every batch norm of torch's updates its running statistics a second time
when activation checkpointing runs the layer again. With the batch norm of this file, N ranks train as one process with
the whole batch, running statistics included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.model import is_recomputing

_CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_is_frozen = False  # read by every layer's forward pass, in the thread that trains


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Keep running statistics unchanged by forward passes in training mode: the batch comes again. A context."""
    global _is_frozen
    layers = (layer for layer in model.modules() if isinstance(layer, _BatchNorm))
    # Without a group of ranks, layers may be torch's own, which have a switch.
    unconverted = [layer for layer in layers if not isinstance(layer, BatchNorm) and layer.track_running_stats]
    for layer in unconverted:
        layer.track_running_stats = False
    outer, _is_frozen = _is_frozen, True
    try:
        yield
    finally:
        _is_frozen = outer
        for layer in unconverted:
            layer.track_running_stats = True


class _Ranks:
    """Holds a layer's process group, which cannot be copied: a copy of the layer shares it."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Ranks:
        return self


class BatchNorm(_BatchNorm):
    """Batch norm over any number of spatial dimensions, with the statistics of all ranks of a group.

    ``synchronize_`` converts a user's layer in place: it stays an instance of its own class (timm's BatchNormAct2d
    becomes a SyncBatchNormAct), with its name, hooks, parameters and buffers.

    Cost per call, with a group of N ranks and C channels: one all-gather of 2C+1 numbers in forward (again in a
    recomputation) and one all-reduce of 2C numbers in backward.
    """

    _ranks: _Ranks

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks that share statistics; None: this rank's batch alone."""
        return self._ranks.group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm expects (rows, channels, ...), got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of ``input`` (rows, C, ...); the result has its dtype."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        # Activation checkpointing runs the layer again in the backward pass, with a batch that is counted already.
        is_counted = self.running_mean is not None and not is_recomputing() and not _is_frozen
        momentum = self._count_batch() if is_counted else 0.0
        if self.group is None:
            running = (self.running_mean, self.running_var)
            if not is_counted and self.running_mean is not None:
                # Copies, not None: a recomputation must save as many tensors for backward as the first run did.
                running = (self.running_mean.clone(), self.running_var.clone())  # type: ignore[union-attr]
            return F.batch_norm(input, *running, self.weight, self.bias, training=True, momentum=momentum, eps=self.eps)
        output, mean, var, count = _Synchronized.apply(input, self.weight, self.bias, self.eps, self.group)
        if is_counted:
            # torch normalizes with the biased variance, and tracks the unbiased one.
            # The clamp is for a batch of one row, which has no unbiased variance.
            unbiased = var * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)  # type: ignore[union-attr]
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)  # type: ignore[union-attr]
        return output

    def _count_batch(self) -> float:
        """Count this batch; return the weight of its statistics in the running ones."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None
        # momentum=None: a cumulative average, as in torch.
        return 1.0 / float(self.num_batches_tracked)

    def extra_repr(self) -> str:
        """Describe as torch does, and how many ranks share statistics."""
        return f"{super().extra_repr()}, ranks={1 if self.group is None else self.group.size()}"


class _Synchronized(torch.autograd.Function):
    """Normalize the rows of all ranks. Return the output, and the group's mean, biased variance and count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _group_statistics(x, group)
        output = F.batch_norm(x, mean, var, weight, bias, eps=eps)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), count)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean, var, count)
        return output, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        # The only gradient that counts is the output's: mean, variance and count are marked non-differentiable.
        grad = grads[0].contiguous()
        grad_weight, grad_bias = mean.new_zeros(2, len(mean))
        if x.numel():  # the kernel divides by the number of rows
            # torch's kernel sums grad * normalized x, and grad, per channel: the part that needs no other rank.
            # No variable for the first result: in a forecast with fake tensors it has full size, whatever the mask
            # says.
            grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, None, None, mean, inv_std, True, ctx.eps, [False, True, True]
            )[1:]
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_bias, grad_weight]).to(mean.dtype)
            # Statistics depend on the rows of all ranks, and so does the gradient through them.
            # Outside the branch above: a rank without rows must take part in the collective too.
            dist.all_reduce(sums, group=ctx.group)
            grad_mean, grad_dot = sums / count
            # weight * inv_std * (grad - grad_mean - (x - mean) * inv_std * grad_dot), as three channel-wise factors
            of_grad = inv_std if weight is None else inv_std * weight.to(inv_std.dtype)
            of_x = -of_grad * inv_std * grad_dot
            constant = -of_grad * grad_mean - of_x * mean
            shape = (1, -1) + (1,) * (x.dim() - 2)
            grad_x = torch.addcmul(constant.view(shape), x.to(mean.dtype), of_x.view(shape))
            grad_x = grad_x.addcmul_(grad.to(mean.dtype), of_grad.view(shape)).to(x.dtype)
        # These stay this rank's own, to be averaged over ranks with all other gradients.
        has_affine = weight is not None
        return grad_x, grad_weight if has_affine else None, grad_bias if has_affine else None, None, None


def _group_statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean (C,), biased variance (C,) and count (0-d) over rows and positions of all ranks, float32 at least.

    Each rank's mean and variance are combined as in https://doi.org/10.1080/00031305.1983.10483115 (no difference of
    large sums), in the order of ranks, so that all ranks get the same bits.
    """
    wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    num_channels = x.shape[1]
    local = wide.new_zeros(2 * num_channels + 1)
    if x.numel():
        # The kernel that batch norm uses: 5 times faster on the CPU than torch.var_mean.
        mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
        local[:num_channels], local[num_channels:-1] = mean, var
        # A rank without rows sends a count of 0, and so a weight of 0.
        local[-1] = x.numel() // num_channels
    gathered = local.new_empty(group.size(), local.numel())
    # Gathered, not all-reduced: each rank sums in the order of ranks, so that all get the same bits.
    collectives.all_gather_into(gathered.view(-1), local, group)
    means, variances, counts = gathered.split([num_channels, num_channels, 1], dim=1)
    count = counts.sum()
    weights = counts / count
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return mean, var, count


def batch_norm_group(ranks_per_group: int, timeout_s: float) -> dist.ProcessGroup | None:
    """Return the group of ranks that share batch statistics with this one; None if that is this rank alone.

    Args:
        ranks_per_group: consecutive ranks that share statistics; -1: all; 0: none.
        timeout_s: timeout of the collectives of a new group, in seconds.
    Raises:
        ConfigError: ``ranks_per_group`` does not divide the number of ranks.
    Cost: a collective over the world, unless the group is all ranks or one.
    """
    world_size = collectives.world_size()
    size = world_size if ranks_per_group == -1 else ranks_per_group
    if world_size == 1 or size <= 1:
        return None
    if world_size % size:
        problem = Problem(
            "config.MODEL.SYNC_BN_CONFIG.GROUP_SIZE",
            str(ranks_per_group),
            f"must divide the number of ranks, {world_size}",
            "Write -1 for all ranks.",
        )
        raise ConfigError([problem])
    if size == world_size:
        return dist.group.WORLD
    mine, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))
    return mine


def synchronize_(layer: _BatchNorm, group: dist.ProcessGroup | None) -> None:
    """Make ``layer`` share its statistics among ``group``, in place.

    Args:
        layer: a batch norm of torch's, timm's BatchNormAct2d, or of a subclass of ``nn.SyncBatchNorm`` whose forward
            pass calls its parent's.
        group: every member must run the same layers in the same order, with any number of rows, zero included. None:
            this rank's batch alone.
    """
    layer.__class__ = _class_of(type(layer))  # type: ignore[arg-type]
    layer.__dict__["_ranks"] = _Ranks(group)


def share_among(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give converted batch norms of ``model`` another group, in place."""
    for layer in model.modules():
        if isinstance(layer, BatchNorm):
            layer.__dict__["_ranks"] = _Ranks(group)


def _is_known(kind: type[_BatchNorm]) -> bool:
    return kind in _CONVERTIBLE or _has_activation(kind)


def _has_activation(kind: type[_BatchNorm]) -> bool:
    """Check for timm's batch norm with an activation, which timm also derives from ``nn.SyncBatchNorm``."""
    return kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")


@cache
def _class_of(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    if _has_activation(kind):
        import timm.layers

        kind = timm.layers.SyncBatchNormAct
    # Our forward replaces that of torch's classes. A derived class comes first: its forward calls ours as its parent's.
    bases = (BatchNorm, kind) if kind in _CONVERTIBLE else (kind, _SyncBatchNorm)
    return type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _SyncBatchNorm(BatchNorm, nn.SyncBatchNorm):
    """Base of converted subclasses of ``nn.SyncBatchNorm``, whose own forward pass runs first and calls this one."""


def convert_batch_norms(
    model: nn.Module, group: dist.ProcessGroup | None, *, is_recomputed: bool, only_marked: bool
) -> int:
    """Synchronize the batch norms of ``model``, in place (see ``synchronize_``).

    Args:
        model: any module; changed.
        group: ranks that share statistics. None: each rank has its own; then only layers that need it are converted.
        is_recomputed: the forward pass may run twice: convert all batch norms, so that each batch is counted once.
        only_marked: convert ``nn.SyncBatchNorm`` alone: the user wants other batch norms local.
    Returns:
        The number of converted layers.
    Raises:
        ConfigError: a layer to synchronize is of a subclass with a forward pass of its own.
    """
    num_changed = 0
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, BatchNorm):
            continue
        if isinstance(layer, nn.SyncBatchNorm):
            synchronize_(layer, group if layer.process_group is None or group is None else layer.process_group)
        elif only_marked or (group is None and not (is_recomputed and _is_known(type(layer)))):
            continue
        elif not _is_known(type(layer)):
            raise ConfigError([_unknown_batch_norm(name, layer)])
        else:
            synchronize_(layer, group)
        num_changed += 1
    return num_changed


def _unknown_batch_norm(name: str, layer: nn.Module) -> Problem:
    return Problem(
        "config.MODEL.SYNC_BN_CONFIG.CONVERT_BN_TO_SYNC_BN",
        "true",
        f"cannot synchronize {name}, a {type(layer).__name__} with a forward of its own",
        "Use torch's BatchNorm1d, 2d or 3d there, or turn the synchronization off.",
    )
