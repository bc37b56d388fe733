"""AdamW that keeps its state in 8 bits, by blocks of the full tensor: a quarter of float32's memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.components.optimizers import AdamW8bitConfig
from vissl_zero.optim.elementwise import Groups
from vissl_zero.optim.whole_tensor import GroupOptimizer
from vissl_zero.registry import OPTIMIZERS

_ELEMENTS_AT_ONCE = 2**20  # decoded together, or rounded up to a block: bounds what a step takes beside the state


class AdamW8bit(GroupOptimizer):
    """AdamW with block-wise quantised moments: https://arxiv.org/abs/2110.02861.

    Each block of ``block_size`` successive elements (the last may be shorter) is stored as a byte an element, an entry
    of a table of 256 values between -1 and 1 (0 and 1 for squares), and the block's largest magnitude in float32. The
    arithmetic is AdamW's on decoded values. Blocks are counted from the first element of the *whole* tensor.

    State: ``exp_avg`` and ``exp_avg_sq``, uint8 and shaped like the parameter, ``exp_avg_scale`` and
    ``exp_avg_sq_scale``, (blocks,) float32. Tensors with fewer than ``min_elements`` keep AdamW's own state.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: of AdamW.
        block_size: elements that share a scale.
        min_elements: smaller tensors are not quantised.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        block_size: int = 256,
        min_elements: int = 4096,
    ):
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        defaults = {"lr": lr, "betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"block_size": block_size, "min_elements": min_elements})

    def update_group(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """See ``GroupOptimizer``."""
        for param in params:
            assert param.grad is not None
            self._update(group, param, param.grad)

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state, size = self.state[param], group["block_size"]
        is_small = param.numel() < group["min_elements"]
        if not state:
            state["step"] = 0
            for key, zero in (("exp_avg", _zero(is_signed=True)), ("exp_avg_sq", _zero(is_signed=False))):
                if is_small:
                    state[key] = torch.zeros_like(param, memory_format=torch.contiguous_format)
                else:
                    state[key] = torch.full(param.shape, zero, dtype=torch.uint8, device=param.device)
                    num_blocks = -(-param.numel() // size)
                    state[f"{key}_scale"] = torch.zeros(num_blocks, dtype=torch.float32, device=param.device)
        state["step"] += 1
        values, grad = param.reshape(-1), grad.reshape(-1)  # values: a copy where they are not contiguous
        if is_small:
            _adamw(group, state["step"], values, grad, state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        else:
            stride = -(-_ELEMENTS_AT_ONCE // size) * size
            for first in range(0, len(values), stride):
                run, blocks = slice(first, first + stride), slice(first // size, (first + stride) // size)
                moments = [
                    _Quantised(state[key].view(-1)[run], state[f"{key}_scale"][blocks], size, is_signed)
                    for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False))
                ]
                mean, square = (moment.decoded(param.dtype) for moment in moments)
                _adamw(group, state["step"], values[run], grad[run], mean, square)
                for moment, value in zip(moments, (mean, square), strict=True):
                    moment.encode(value)
        if not param.is_contiguous():
            param.copy_(values.view(param.shape))


def _adamw(group: dict[str, Any], step: int, values: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
    """In place."""
    beta1, beta2 = group["betas"]
    mean.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    spread = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    values.mul_(1 - group["lr"] * group["weight_decay"])
    values.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1**step))


class _Quantised:
    """A run of whole blocks: (n,) codes and (blocks,) scales."""

    def __init__(self, codes: Tensor, scales: Tensor, block_size: int, is_signed: bool):
        self._codes, self._scales, self._size = codes, scales, block_size
        self._table = torch.tensor(_table(is_signed), dtype=torch.float64, device=codes.device)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """(n,) values."""
        values = self._table.to(dtype)[self._codes.int()]
        return values.mul_(self._scale_of_each(dtype))

    def encode(self, values: Tensor) -> None:
        """Take (n,) values: each becomes the nearest entry of the table."""
        blocks = torch.nn.functional.pad(values, (0, len(self._scales) * self._size - len(values)))
        self._scales.copy_(blocks.view(-1, self._size).abs().amax(dim=1))
        # The clamp is for a block of zeros, whose scale is zero.
        shares = values / self._scale_of_each(values.dtype).clamp(min=torch.finfo(torch.float32).tiny)
        # The nearest entry is the one whose neighbours' middles a value lies between.
        middles = ((self._table[1:] + self._table[:-1]) / 2).to(values.dtype)
        self._codes.copy_(torch.bucketize(shares, middles))

    def _scale_of_each(self, dtype: torch.dtype) -> Tensor:
        return self._scales.to(dtype).repeat_interleave(self._size)[: len(self._codes)]


@lru_cache(maxsize=2)
def _table(is_signed: bool) -> tuple[float, ...]:
    """Dynamic tree quantisation: seven powers of ten, each cut more finely than the one below; 0 and 1."""
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2 ** (exponent + (0 if is_signed else 1))
        middles = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
        found += middles + ([-value for value in middles] if is_signed else [])
    return tuple(sorted(found))


def _zero(is_signed: bool) -> int:
    return _table(is_signed).index(0.0)


@OPTIMIZERS.register("adamw_8bit", config=AdamW8bitConfig)
def adamw_8bit(groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """AdamW with state of 8 bits an element, by blocks of the full tensor."""
    return AdamW8bit(groups, **options)
