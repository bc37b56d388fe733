"""Layer-wise adaptive rates (LARC, LARS) as a change of the gradient, from norms of full tensors.

The caller computes the norms, so the formulas are the same for a full, sharded or flattened tensor. No value is read on
the host: all ranks launch the same kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vissl_zero.config.components.optimizers import TRUST_COEFFICIENT, TRUST_EPS


@dataclass(frozen=True)
class TensorNorms:
    """Squared norms of T full parameters and their gradients, after unscaling and clipping; identical on every rank.

    Attributes:
        param_sq: (T,) squared L2 norm of each parameter.
        grad_sq: (T,) squared L2 norm of each gradient.
        dot: (T,) inner product of each parameter with its gradient; zeros for an adaptation that does not need it.
    """

    param_sq: Tensor
    grad_sq: Tensor
    dot: Tensor


class Adaptation(ABC):
    """Base of rules that scale each tensor's update relative to its norm.

    Attributes:
        needs_dot: whether ``TensorNorms.dot`` is read, which costs a pass over parameters and gradients.
    """

    needs_dot: ClassVar[bool] = True

    @abstractmethod
    def coefficients(
        self, norms: TensorNorms, lr: Tensor, weight_decay: Tensor, num_dims: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute ``scale`` and ``decay``: each gradient becomes ``scale * (grad + decay * param)``.

        The gradient then includes the decay, so the base optimizer must run with a weight decay of 0: see
        ``decay_absorbed``.

        Args:
            norms: norms of T tensors.
            lr: (T,) learning rate of each tensor's group; may be 0.
            weight_decay: (T,) weight decay of each tensor's group.
            num_dims: (T,) integers, dimensions of each full tensor (a shard may have fewer).
        Returns:
            scale (T,) and decay (T,), in the dtype of the norms. Not a collective; no host synchronization.
        """


@dataclass(frozen=True)
class Larc(Adaptation):
    """LARC as in apex: the rate of a tensor is ``trust * |p| / (|g| + decay * |p| + eps)``.

    The rate multiplies the learning rate, or, with ``clip``, limits it. A tensor whose norm or whose gradient's norm is
    zero has an unchanged gradient, without decay.

    Source: https://arxiv.org/abs/1708.03888; clipping and the eps as in NVIDIA's apex.

    Attributes:
        trust_coefficient: share of its norm that a tensor may move per unit of learning rate.
        clip: use the rate as an upper bound for the learning rate instead of a factor.
        eps: added to the denominator.
    """

    needs_dot: ClassVar[bool] = False

    trust_coefficient: float = TRUST_COEFFICIENT
    clip: bool = False
    eps: float = TRUST_EPS

    def coefficients(
        self, norms: TensorNorms, lr: Tensor, weight_decay: Tensor, num_dims: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute rate and decay; see ``Adaptation``."""
        param, grad = norms.param_sq.sqrt(), norms.grad_sq.sqrt()
        decay = weight_decay.to(param)
        rate = self.trust_coefficient * param / (grad + decay * param + self.eps)
        if self.clip:
            rate = (rate / lr.to(param)).clamp(max=1.0)  # for lr 0 it is 1, and the update is 0
        applies = (norms.param_sq > 0) & (norms.grad_sq > 0)
        # torch.where and not a product: with eps 0 the other branch may be NaN.
        return torch.where(applies, rate, 1.0), torch.where(applies, decay, 0.0)


@dataclass(frozen=True)
class Lars(Adaptation):
    """LARS as in Barlow Twins: the decayed gradient is scaled to the norm ``eta * |p|``.

    The rate is ``eta * |p| / (|g + decay * p| + eps)``, or 1 if either norm is zero; the decay applies in any case.

    Source: https://arxiv.org/abs/1708.03888 and https://arxiv.org/abs/2103.03230.

    Attributes:
        eta: trust coefficient.
        eps: added to the denominator; Barlow Twins has none.
        exclude_bias_and_norm: use rate 1 for tensors with at most one dimension; their group decides on decay.
    """

    eta: float = TRUST_COEFFICIENT
    eps: float = TRUST_EPS
    exclude_bias_and_norm: bool = False

    def coefficients(
        self, norms: TensorNorms, lr: Tensor, weight_decay: Tensor, num_dims: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute rate and decay; see ``Adaptation``."""
        decay = weight_decay.to(norms.param_sq)
        update_sq = norms.grad_sq + 2 * decay * norms.dot + decay.square() * norms.param_sq
        update_sq = update_sq.clamp(min=0.0)  # rounding may leave a negative sum of terms that cancel
        applies = (norms.param_sq > 0) & (update_sq > 0)
        if self.exclude_bias_and_norm:
            applies = applies & (num_dims > 1)
        # Without eps, a tensor whose true gradient is zero (a bias before batch norm) would take full steps of rounding
        # noise, which differs with every order of summation.
        rate = self.eta * norms.param_sq.sqrt() / (update_sq.sqrt() + self.eps)
        return torch.where(applies, rate, 1.0), decay


@contextmanager
def decay_absorbed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set weight decay 0 in every group, for a step on gradients that include the decay. A context manager."""
    weight_decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=True):
            group["weight_decay"] = weight_decay


# (torch's groups of local shards, with "name", "params", "lr", "weight_decay") -> (optimizer of these, the layer-wise
# adaptation (LARC, LARS) to apply to gradients first, or None).
OptimizerFactory = Callable[[list[dict[str, Any]]], tuple[torch.optim.Optimizer, Adaptation | None]]
