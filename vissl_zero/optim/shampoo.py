"""Shampoo with Adam's step sizes: gradients preconditioned from both sides by blocks of a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.components.optimizers import ShampooConfig
from vissl_zero.optim.elementwise import Groups
from vissl_zero.optim.whole_tensor import GroupOptimizer
from vissl_zero.registry import OPTIMIZERS


class Shampoo(GroupOptimizer):
    """Shampoo as Distributed Shampoo has it: https://arxiv.org/abs/2309.06497.

    A matrix (a kernel counts as the matrix of its first dimension by the rest) is cut into blocks by a grid that begins
    at its first element. The averaged gradient M of a block becomes ``L^(-1/4) M R^(-1/4)``, with L and R the running
    means of ``G G^T`` and ``G^T G``, at the length of Adam's update of the block (grafting). Other tensors take Adam's
    update. Weight decay is decoupled. Roots are taken in float64.

    State: Adam's, and for a matrix ``left``, ``right`` and their roots: the matrices of all blocks, row by row of the
    grid, flattened one after another.

    Args:
        params: parameters or groups.
        lr: of Adam's size.
        betas: of the running mean, and of all running squares.
        eps: added to the root of Adam's running square.
        matrix_eps: added to L and R before the root, as a share of their largest eigenvalue.
        weight_decay: decoupled.
        frequency: steps between roots.
        block_size: side of the grid's blocks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        matrix_eps: float = 1e-6,
        weight_decay: float = 0.0,
        frequency: int = 10,
        block_size: int = 1024,
    ):
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if frequency < 1 or block_size < 1 or matrix_eps <= 0:
            raise ValueError("frequency and block_size must be at least 1, and matrix_eps above 0")
        rest = {"eps": eps, "matrix_eps": matrix_eps, "weight_decay": weight_decay}
        betas = (betas[0], betas[1])
        super().__init__(params, {"lr": lr, "betas": betas, "frequency": frequency, "block_size": block_size} | rest)

    def update_group(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """See ``GroupOptimizer``."""
        for param in params:
            assert param.grad is not None
            self._update(group, param, param.grad)

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        blocks = list(_grid(param, group["block_size"]))
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            if blocks:
                for side, size in (("left", blocks[-1].left.stop), ("right", blocks[-1].right.stop)):
                    state[side], state[f"{side}_root"] = param.new_zeros(size), param.new_zeros(size)
        state["step"] += 1
        # The first step is due too, for it has no roots yet; 1 % frequency, since a frequency of 1 leaves no remainder
        # of 1.
        is_due = state["step"] % group["frequency"] == 1 % group["frequency"]
        # Adam's corrections for running means that begin at zero: https://arxiv.org/abs/1412.6980
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        mean = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (mean / first).div_((square / second).sqrt_().add_(group["eps"]))
        matrix, mean, grad = (tensor.reshape(len(param), -1) if blocks else tensor for tensor in (update, mean, grad))
        for block in blocks:
            left, right = state["left"][block.left], state["right"][block.right]
            left, right = left.view(block.num_rows, -1), right.view(block.num_cols, -1)
            part = grad[block.place]
            left.mul_(beta2).addmm_(part, part.T, alpha=1 - beta2)
            right.mul_(beta2).addmm_(part.T, part, alpha=1 - beta2)
            left_root = state["left_root"][block.left].view_as(left)
            right_root = state["right_root"][block.right].view_as(right)
            if is_due:
                left_root.copy_(_inverse_fourth_root(left / second, group["matrix_eps"]))
                right_root.copy_(_inverse_fourth_root(right / second, group["matrix_eps"]))
            turned = left_root @ mean[block.place] @ right_root
            length = torch.linalg.vector_norm(matrix[block.place]) / torch.linalg.vector_norm(turned).clamp(min=1e-30)
            matrix[block.place] = turned.mul_(length)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(matrix.view(param.shape), alpha=-group["lr"])


@dataclass(frozen=True)
class _Block:
    """A block of the grid: its place in the matrix, and where its L and R lie in the state."""

    place: tuple[slice, slice]
    left: slice
    right: slice

    @property
    def num_rows(self) -> int:
        return self.place[0].stop - self.place[0].start

    @property
    def num_cols(self) -> int:
        return self.place[1].stop - self.place[1].start


def _grid(param: Tensor, size: int) -> Iterator[_Block]:
    """Blocks of a matrix, row by row; none of what is no matrix."""
    if param.dim() < 2:
        return
    num_rows, num_cols = len(param), param.shape[1:].numel()
    left = right = 0
    for top in range(0, num_rows, size):
        for begin in range(0, num_cols, size):
            place = slice(top, min(top + size, num_rows)), slice(begin, min(begin + size, num_cols))
            height, width = place[0].stop - top, place[1].stop - begin
            yield _Block(place, slice(left, left + height**2), slice(right, right + width**2))
            left, right = left + height**2, right + width**2


def _inverse_fourth_root(matrix: Tensor, eps: float) -> Tensor:
    """``(matrix + eps * its largest eigenvalue)^(-1/4)``; of zeros, zeros."""
    values, vectors = torch.linalg.eigh(matrix.double())
    # L and R have no negative eigenvalues; rounding may leave some.
    values = values.clamp(min=0.0) + eps * values[-1].clamp(min=0.0)
    powers = torch.where(values > 0, values.clamp(min=1e-300).pow(-0.25), 0.0)
    return ((vectors * powers) @ vectors.T).to(matrix.dtype)


@OPTIMIZERS.register("shampoo", config=ShampooConfig)
def shampoo(groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """Shampoo at Adam's step sizes, on blocks of whole matrices."""
    return Shampoo(groups, **options)
