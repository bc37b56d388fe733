"""SGD, Adam and AdamW from torch, in their fused kernels on CPU and CUDA; LARS, Lion and schedule-free AdamW.

A fused kernel reads and writes each element once and needs no temporaries: with 20 M float32 parameters on one CPU
core, 18 ms for SGD and 23 ms for AdamW against 66 and 146 ms (foreach) or 59 and 76 ms (one tensor at a time).

A second form of SGD, Adam and AdamW rounds once per operation, so that an element's update does not depend on its
position. torch's fused kernels compute most of a tensor with vector instructions, and the elements beyond a multiple of
16 without. The two fuse different multiplications and additions (one rounding or two), so last bits depend on how a
ZeRO level splits a tensor. In float32, with pieces of 13 elements and 5 steps, 8 to 10 % of SGD's elements change and
1 % of AdamW's; in float64 by 5.6e-17 after 7 steps. Here every kernel is one multiplication, addition, division or
square root, which IEEE 754 rounds correctly in any code. It costs temporaries and passes over memory, so only
``TRAINER.DETERMINISTIC`` uses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vissl_zero.config.components.optimizers import (
    TRUST_COEFFICIENT,
    TRUST_EPS,
    AdamConfig,
    AdamWConfig,
    LARSConfig,
    LionConfig,
    ScheduleFreeConfig,
    SGDConfig,
)
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.adaptation import Lars
from vissl_zero.optim.update_rule import element_wise
from vissl_zero.registry import OPTIMIZERS


@OPTIMIZERS.register("lars", config=LARSConfig)
def lars(
    groups: Groups,
    momentum: float = 0.9,
    nesterov: bool = False,
    eta: float = TRUST_COEFFICIENT,
    eps: float = TRUST_EPS,
    exclude_bias_and_norm: bool = False,
) -> tuple[torch.optim.Optimizer, Lars]:
    """Build SGD with layer-wise adaptive rates, as in Barlow Twins."""
    return sgd(groups, momentum, nesterov), Lars(eta, eps, exclude_bias_and_norm)


Groups = list[dict[str, Any]]


@OPTIMIZERS.register("sgd", config=SGDConfig)
def sgd(groups: Groups, momentum: float = 0.9, nesterov: bool = False) -> torch.optim.Optimizer:
    """Build SGD with momentum, plain or Nesterov."""
    optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov, fused=True)
    complete_state(optimizer)
    optimizer.register_step_pre_hook(_disable_wrong_kernel)
    return optimizer


@element_wise
def _disable_wrong_kernel(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Switch the fused kernel off for parameters in half precision on the CPU."""
    # On the CPU, the kernel of torch 2.11 to 2.13 leaves tensors of 16 elements or more unchanged, or moves them too
    # little.
    for group in optimizer.param_groups:
        is_half = (param.dtype.itemsize == 2 and param.device.type == "cpu" for param in group["params"])
        group["fused"] = not any(is_half)


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that fused kernels require, in place. Call it for a new optimizer and after a restore.

    Adds zero momenta for SGD with momentum, and moves step counters to the parameters' device.
    """
    # torch's fused SGD raises if some parameters of a group have a momentum and others (thawed later) have none. With a
    # zero momentum, the first step has the same bits as torch's, which copies the gradient.
    # Restored counters are in host memory; torch's ``load_state_dict`` would move them too.
    for group in optimizer.param_groups:
        has_momenta = isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]
        for parameter in group["params"] if group.get("fused") else ():
            if has_momenta and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            step = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(step, Tensor) and step.device != parameter.device:
                optimizer.state[parameter]["step"] = step.to(parameter.device)


@OPTIMIZERS.register("adam", config=AdamConfig)
def adam(
    groups: Groups, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, amsgrad: bool = False
) -> torch.optim.Optimizer:
    """Build Adam, weight decay as an L2 term."""
    return torch.optim.Adam(groups, betas=(betas[0], betas[1]), eps=eps, amsgrad=amsgrad, fused=True)


@OPTIMIZERS.register("adamw", config=AdamWConfig)
def adamw(
    groups: Groups, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, amsgrad: bool = False
) -> torch.optim.Optimizer:
    """Build Adam with decoupled weight decay."""
    return torch.optim.AdamW(groups, betas=(betas[0], betas[1]), eps=eps, amsgrad=amsgrad, fused=True)


@OPTIMIZERS.register("lion", config=LionConfig)
def lion(groups: Groups, betas: Sequence[float] = (0.9, 0.99)) -> torch.optim.Optimizer:
    """Build timm's Lion, which updates by the sign of a running mean."""
    from timm.optim import Lion

    built = Lion(groups, betas=(betas[0], betas[1]))
    assert isinstance(built, torch.optim.Optimizer)
    return built


@OPTIMIZERS.register("adamw_schedule_free", config=ScheduleFreeConfig)
def adamw_schedule_free(groups: Groups, betas: Sequence[float] = (0.9, 0.999), **options: Any) -> torch.optim.Optimizer:
    """Build schedule-free AdamW; an average of its weights is evaluated and exported."""
    from schedulefree import AdamWScheduleFree

    built = AdamWScheduleFree(groups, betas=(betas[0], betas[1]), **options)
    # It refuses steps until it is told that training begins.
    built.train()
    assert isinstance(built, torch.optim.Optimizer)
    return built


# torch's kernels may contract a product and a sum into one rounding in the vector loop and not in its remainder. Where
# a tensor is cut then decides its last bits, and levels cut differently. Each operation here rounds by itself.
@element_wise
class SingleRoundingSGD(torch.optim.SGD):
    """SGD with momentum, plain or Nesterov, with one rounding per operation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter with a gradient once."""
        for group, param, grad in _with_gradient(self):
            update = _decayed(param, grad, group["weight_decay"])
            if momentum := group["momentum"]:
                state = self.state[param]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param)
                buffer = state["momentum_buffer"].mul_(momentum).add_(update)
                update = update + buffer * momentum if group["nesterov"] else buffer
            param.sub_(update * group["lr"])


@element_wise
class SingleRoundingAdam(torch.optim.Adam):
    """Adam, or with ``decoupled_weight_decay`` AdamW, with one rounding per operation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter with a gradient once."""
        for group, param, grad in _with_gradient(self):
            state, (beta1, beta2) = self.state[param], group["betas"]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
            count = float(state["step"])
            # grad * (1 - beta) and not add_(alpha=): a fused multiply-add would round once.
            if group["decoupled_weight_decay"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
            else:
                grad = _decayed(param, grad, group["weight_decay"])
            mean = state["exp_avg"].mul_(beta1).add_(grad * (1 - beta1))
            square = state["exp_avg_sq"].mul_(beta2).add_((grad * grad).mul_(1 - beta2))
            if group["amsgrad"]:
                square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
            spread = square.sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
            param.sub_(mean.div(spread).mul_(group["lr"] / (1 - beta1**count)))


@element_wise
class SingleRoundingAdamW(SingleRoundingAdam, torch.optim.AdamW):
    """AdamW with one rounding per operation."""


SINGLE_ROUNDING: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.SGD: SingleRoundingSGD,
    torch.optim.Adam: SingleRoundingAdam,
    torch.optim.AdamW: SingleRoundingAdamW,
}


def single_rounded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Change the class of ``optimizer`` to its single-rounding form; groups, state and the object stay.

    Raises:
        ConfigError: the optimizer is none of SGD, Adam and AdamW.
    """
    kind = SINGLE_ROUNDING.get(type(optimizer))
    if kind is None:
        must = f"gives the same bits at every level with sgd, lars, adam and adamw, not with {type(optimizer).__name__}"
        fix = "Use one of them, or config.TRAINER.DETERMINISTIC=false."
        raise ConfigError([Problem("config.TRAINER.DETERMINISTIC", "true", must, fix)])
    optimizer.__class__ = kind
    return optimizer


def _with_gradient(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
    return [
        (group, param, param.grad)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]


def _decayed(param: Tensor, grad: Tensor, weight_decay: float) -> Tensor:
    return grad + param * weight_decay if weight_decay else grad
