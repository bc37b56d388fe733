"""Layer-wise adaptive rates (LARC, LARS) as a change of the gradient, from norms of full tensors.

The norms come from outside, so the formulas are the same whether a tensor is whole, sharded or flattened. Nothing here
reads a value on the host or branches on one: all ranks launch the same kernels.
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
    """Squared norms of T full parameters and their gradients, unscaled and clipped, identical on every rank.

    Attributes:
        param_sq: (T,) squared L2 norm of each parameter.
        grad_sq: (T,) of each gradient.
        dot: (T,) inner product of each parameter with its gradient; zeros for an adaptation that does not need it.
    """

    param_sq: Tensor
    grad_sq: Tensor
    dot: Tensor


class Adaptation(ABC):
    """The distance that each tensor moves, relative to its own norm.

    Attributes:
        needs_dot: reads ``TensorNorms.dot``, which costs a pass over parameters and gradients.
    """

    needs_dot: ClassVar[bool] = True

    @abstractmethod
    def coefficients(
        self, norms: TensorNorms, lr: Tensor, weight_decay: Tensor, num_dims: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute what each gradient becomes: ``scale * (grad + decay * param)``.

        The decay is in the gradient then, so the base optimizer must run without: see ``decay_absorbed``.

        Args:
            norms: norms of T tensors.
            lr: (T,) learning rate of each tensor's group; may be 0.
            weight_decay: (T,) of each tensor's group.
            num_dims: (T,) integers, dimensions of each full tensor (a shard may have fewer).
        Returns:
            scale (T,) and decay (T,), in the dtype of the norms. Not a collective; no host synchronization.
        """


@dataclass(frozen=True)
class Larc(Adaptation):
    """LARC as in apex: the rate of a tensor is ``trust * |p| / (|g| + decay * |p| + eps)``.

    It multiplies the learning rate, or, with ``clip``, takes its place where it is smaller. A tensor whose norm or
    whose gradient's norm is zero is left alone: its gradient stays as it is and it does not decay.

    Source: https://arxiv.org/abs/1708.03888; clipping and the eps as in NVIDIA's apex.

    Attributes:
        trust_coefficient: share of its own norm that a tensor may move per unit of learning rate.
        clip: take the rate as an upper bound for the learning rate instead of a factor.
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
            rate = (rate / lr.to(param)).clamp(max=1.0)  # lr 0 gives inf, hence 1, and the update is 0 all the same
        applies = (norms.param_sq > 0) & (norms.grad_sq > 0)
        # where, not a product: without an eps the branch not taken may be NaN.
        return torch.where(applies, rate, 1.0), torch.where(applies, decay, 0.0)


@dataclass(frozen=True)
class Lars(Adaptation):
    """LARS as Barlow Twins has it: the decayed gradient is scaled to ``eta * |p|``.

    ``eta * |p| / (|g + decay * p| + eps)``, or 1 where either norm is zero; the decay applies in any case. The eps is
    ours: without it a tensor whose true gradient is zero (a bias before batch norm) takes full steps of rounding noise,
    which differ with every order of summation.

    Source: https://arxiv.org/abs/1708.03888 and https://arxiv.org/abs/2103.03230.

    Attributes:
        eta: trust coefficient.
        eps: added to the denominator.
        exclude_bias_and_norm: leave tensors with at most one dimension to the plain learning rate; whether they decay
            is up to their group.
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
        update_sq = update_sq.clamp(min=0.0)  # where the terms cancel, rounding may leave less than nothing
        applies = (norms.param_sq > 0) & (update_sq > 0)
        if self.exclude_bias_and_norm:
            applies = applies & (num_dims > 1)
        rate = self.eta * norms.param_sq.sqrt() / (update_sq.sqrt() + self.eps)
        return torch.where(applies, rate, 1.0), decay


@contextmanager
def decay_absorbed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set weight decay 0 in every group of ``optimizer``: for a step on gradients that hold it. A context."""
    weight_decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=True):
            group["weight_decay"] = weight_decay


# Given torch-style groups (dicts with "name", "params", "lr", "weight_decay") of *local shards*, returns the optimizer
# to run on them and the layer-wise adaptation (LARC, LARS) to apply to the gradients first, if any.
OptimizerFactory = Callable[[list[dict[str, Any]]], tuple[torch.optim.Optimizer, Adaptation | None]]
