"""Optimizers that need full tensors: Muon, NorMuon, LAMB, Adafactor, Shampoo, and AdamW with its state in 8 bits.

Above level 0, ``sharding/update/whole_tensors.py`` gathers each full tensor on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.components.optimizers import (
    AdafactorConfig,
    AdamW8bitConfig,
    LambConfig,
    MuonConfig,
    NorMuonConfig,
    ShampooConfig,
)
from vissl_zero.optim.elementwise import Groups
from vissl_zero.registry import OPTIMIZERS


class GroupOptimizer(torch.optim.Optimizer):
    """Base of our optimizers, which updates the parameters with a gradient, group by group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient once; return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update_group(group, [param for param in group["params"] if param.grad is not None and param.numel()])
        return loss

    def update_group(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """Update ``params`` of a group in place; all have gradients and elements. Called under ``no_grad``."""
        for param in params:
            assert param.grad is not None
            self.update_tensor(group, param, param.grad)

    def update_tensor(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        """Update one tensor of a group in place. A subclass defines this or ``update_group``."""
        raise NotImplementedError


class MuonAdamW(GroupOptimizer):
    """torch's Muon for matrices, torch's AdamW for everything else.

    A tensor of more than two dimensions (a convolution's kernel) is reshaped to the matrix of its first dimension by
    the rest, as by Muon's authors: https://kellerjordan.github.io/posts/muon/. torch orthogonalizes in bfloat16;
    ``Orthogonal`` replaces it for another number format and for NorMuon's normalization.

    Args:
        params: parameters or groups; a group with ``use_muon=False`` uses AdamW.
        lr: learning rate of both: with ``adjust_lr_fn="match_rms_adamw"`` Muon's updates have the size of AdamW's.
        weight_decay: decoupled weight decay of both.
        momentum, nesterov, ns_steps, adjust_lr_fn: see ``torch.optim.Muon``.
        betas, eps: see ``torch.optim.AdamW``.
        ns_dtype: number format of the Newton-Schulz iterations: bfloat16, float32 or float64.
        row_beta: NorMuon's running mean square of each row of the updates; None: Muon.
    """

    def __init__(  # noqa: PLR0913 - hyperparameters
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_dtype: str = "bfloat16",
        row_beta: float | None = None,
    ):
        if ns_dtype not in _FORMATS:
            raise ValueError(f"ns_dtype must be one of {', '.join(_FORMATS)}, got {ns_dtype}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": (betas[0], betas[1]),
            "eps": eps,
            "ns_dtype": ns_dtype,
            "row_beta": row_beta,
            "use_muon": True,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:  # torch's constructors check the values
            self._muon(group, [torch.empty(1, 1)])
            self._adamw(group, [torch.empty(1)])

    def update_group(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """Update one group; see ``GroupOptimizer``."""
        matrices = [param for param in params if group["use_muon"] and param.dim() > 1]
        others = [param for param in params if not (group["use_muon"] and param.dim() > 1)]
        self._run(self._muon, group, matrices, lambda tensor: tensor.reshape(len(tensor), -1))
        self._run(self._adamw, group, others, lambda tensor: tensor)

    def _run(
        self,
        build: Callable[[dict[str, Any], Sequence[Tensor]], torch.optim.Optimizer],
        group: dict[str, Any],
        params: Sequence[nn.Parameter],
        view: Callable[[Tensor], Tensor],
    ) -> None:
        """Run one step of one of torch's optimizers over views of ``params``, with their state."""
        if not params:
            return
        views = []
        for param in params:
            flat = nn.Parameter(view(param))
            assert param.grad is not None
            flat.grad = view(param.grad)
            views.append(flat)
        optimizer = build(group, views)
        for param, flat in zip(params, views, strict=True):
            if state := self.state[param]:
                optimizer.state[flat] = {key: view(v) if v.dim() else v for key, v in state.items()}
        optimizer.step()
        for param, flat in zip(params, views, strict=True):
            if not param.is_contiguous():  # ``view`` may have been a copy
                param.copy_(flat.view(param.shape))
            state = optimizer.state[flat]
            self.state[param] = {
                key: v.view(param.shape) if v.numel() == param.numel() and v.dim() else v for key, v in state.items()
            }

    @staticmethod
    def _muon(group: dict[str, Any], params: Sequence[Tensor]) -> torch.optim.Optimizer:
        keys = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        muon = torch.optim.Muon(params, **{key: group[key] for key in keys})  # built in any case: it checks the values
        if group["ns_dtype"] == "bfloat16" and group["row_beta"] is None:
            return muon
        return Orthogonal(params, **{key: group[key] for key in (*keys, "ns_dtype", "row_beta")})

    @staticmethod
    def _adamw(group: dict[str, Any], params: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, **{key: group[key] for key in ("lr", "weight_decay", "betas", "eps")})


class NorMuonAdamW(MuonAdamW):
    """``MuonAdamW`` with NorMuon's ``row_beta``."""

    def __init__(self, params: Any, row_beta: float = 0.95, **options: Any):
        super().__init__(params, row_beta=row_beta, **options)


class Orthogonal(torch.optim.Optimizer):
    """Muon for matrices in a choice of number formats, by timm's Newton-Schulz; with ``row_beta``, NorMuon.

    NorMuon (https://arxiv.org/abs/2510.05491) divides each row of an orthogonalized update by the root of a running
    mean of its mean square, and then restores the norm of the update.

    Args:
        params: matrices.
        lr, weight_decay, momentum, nesterov, ns_steps, adjust_lr_fn: see ``torch.optim.Muon``.
        ns_dtype, row_beta: see ``MuonAdamW``.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix once."""
        from timm.optim.muon import zeropower_via_newtonschulz

        for group in self.param_groups:
            for param in group["params"]:
                state, grad = self.state[param], param.grad
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(grad)
                mean = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
                update = grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
                coefficients, dtype = [_COEFFICIENTS] * group["ns_steps"], _FORMATS[group["ns_dtype"]]
                update = zeropower_via_newtonschulz(update, group["ns_steps"], coefficients, dtype=dtype)
                update = update.to(param.dtype)
                if group["row_beta"] is not None:
                    update = self._normalized(state, update, group["row_beta"])
                lr = group["lr"]
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(update, alpha=-lr * _scale(param.shape, group["adjust_lr_fn"]))

    @staticmethod
    def _normalized(state: dict[str, Any], update: Tensor, beta: float) -> Tensor:
        rows = update.square().mean(dim=1, keepdim=True)
        if "row_square" not in state:
            state["row_square"] = torch.zeros_like(rows)
        square = state["row_square"].lerp_(rows, 1 - beta)
        changed = update / (square.sqrt() + _ROW_EPS)
        return changed * (update.norm() / (changed.norm() + _ROW_EPS))


_FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz, by Muon's authors
_ROW_EPS = 1e-10


def _scale(shape: torch.Size, adjust_lr_fn: str) -> float:
    """Compute the factor of a matrix's update, as in ``torch.optim.Muon``."""
    num_rows, num_cols = shape
    # https://arxiv.org/abs/2502.16982, section 2.2: the root mean square of AdamW's updates is about 0.2.
    if adjust_lr_fn == "match_rms_adamw":
        return float(0.2 * max(num_rows, num_cols) ** 0.5)
    return float(max(1, num_rows / num_cols) ** 0.5)


@OPTIMIZERS.register("muon", config=MuonConfig)
def muon(groups: Groups, use_muon_on_heads: bool = False, **options: Any) -> torch.optim.Optimizer:
    """Build Muon for matrices and convolutions, AdamW for the rest and for heads."""
    for group in groups:
        group["use_muon"] = use_muon_on_heads or not str(group.get("name", "")).startswith("head")
    return MuonAdamW(groups, **options)


@OPTIMIZERS.register("normuon", config=NorMuonConfig)
def normuon(groups: Groups, row_beta: float = 0.95, **options: Any) -> torch.optim.Optimizer:
    """Build Muon with updates normalized row by row, AdamW for the rest and for heads."""
    return muon(groups, row_beta=row_beta, **options)


@OPTIMIZERS.register("lamb", config=LambConfig)
def lamb(
    groups: Groups,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-6,
    trust_clip: bool = False,
    always_adapt: bool = False,
) -> torch.optim.Optimizer:
    """Build timm's LAMB, without its clipping by the norm of all gradients (use ``ZERO.clip_grad``)."""
    from timm.optim import Lamb

    options = {"trust_clip": trust_clip, "always_adapt": always_adapt}
    # Its norm would be of the tensors that this rank holds, and so another on each rank.
    built = Lamb(groups, betas=(betas[0], betas[1]), eps=eps, max_grad_norm=None, **options)
    assert isinstance(built, torch.optim.Optimizer)
    return built


@OPTIMIZERS.register("adafactor", config=AdafactorConfig)
def adafactor(groups: Groups, beta2_decay: float = -0.8, clip_threshold: float = 1.0) -> torch.optim.Optimizer:
    """Build torch's Adafactor, with second moments by row and column."""
    return torch.optim.Adafactor(groups, beta2_decay=beta2_decay, d=clip_threshold)


class Shampoo(GroupOptimizer):
    """Shampoo as in Distributed Shampoo: https://arxiv.org/abs/2309.06497.

    A matrix (a kernel is reshaped to its first dimension by the rest) is split into blocks by a grid from its first
    element. The update of a block is ``L^(-1/4) M R^(-1/4)``, with M the running mean of gradients G, and L and R those
    of ``G G^T`` and ``G^T G``, scaled to the norm of Adam's update of the block (grafting). Other tensors have Adam's
    update. Weight decay is decoupled. Roots are computed in float64.

    State: Adam's, and for a matrix ``left``, ``right`` and their roots: the flattened matrices of all blocks, row by
    row of the grid.

    Args:
        params: parameters or groups.
        lr: learning rate, as for Adam.
        betas: betas of the running mean, and of all running squares.
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

    def update_tensor(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        """Update one tensor; see ``GroupOptimizer``."""
        state, (beta1, beta2) = self.state[param], group["betas"]
        blocks = list(_grid(param, group["block_size"]))
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            if blocks:
                for side, size in (("left", blocks[-1].left.stop), ("right", blocks[-1].right.stop)):
                    state[side], state[f"{side}_root"] = param.new_zeros(size), param.new_zeros(size)
        state["step"] += 1
        # Steps 1, 1 + frequency, ...: the first step has no roots yet. 1 % frequency is 0 for a frequency of 1.
        is_due = state["step"] % group["frequency"] == 1 % group["frequency"]
        # Adam's bias corrections (https://arxiv.org/abs/1412.6980, section 3).
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
            preconditioned = left_root @ mean[block.place] @ right_root
            # Grafting: the direction is Shampoo's, the norm Adam's.
            # clamp: a block that has had no gradient yet has norm 0, and 0 / 0 would be NaN.
            norm = torch.linalg.vector_norm(preconditioned).clamp(min=1e-30)
            matrix[block.place] = preconditioned.mul_(torch.linalg.vector_norm(matrix[block.place]) / norm)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(matrix.view(param.shape), alpha=-group["lr"])


@dataclass(frozen=True)
class _Block:
    """A block of the grid: its slices of the matrix, and the slices of its L and R in the state."""

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
    """Yield the blocks of a matrix, row by row; none for a vector."""
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
    """Compute ``(matrix + eps * its largest eigenvalue)^(-1/4)``; zeros for a zero matrix."""
    values, vectors = torch.linalg.eigh(matrix.double())
    # L and R are positive semidefinite; rounding may make eigenvalues negative.
    # eigh sorts eigenvalues in ascending order: the last is the largest.
    values = values.clamp(min=0.0) + eps * values[-1].clamp(min=0.0)
    powers = torch.where(values > 0, values.clamp(min=1e-300).pow(-0.25), 0.0)
    return ((vectors * powers) @ vectors.T).to(matrix.dtype)


@OPTIMIZERS.register("shampoo", config=ShampooConfig)
def shampoo(groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """Build Shampoo at Adam's step sizes, on blocks of whole matrices."""
    return Shampoo(groups, **options)


_ELEMENTS_AT_ONCE = 2**20  # decoded at once, rounded up to a block: limits a step's temporaries


class AdamW8bit(GroupOptimizer):
    """AdamW with block-wise quantized moments: https://arxiv.org/abs/2110.02861.

    A block of ``block_size`` consecutive elements (the last may be shorter) is stored as the block's largest magnitude
    in float32, and a byte per element: an index into a table of 256 values between -1 and 1 (0 and 1 for squares). The
    arithmetic is AdamW's on decoded values. Blocks are counted from the first element of the *full* tensor.

    State: ``exp_avg`` and ``exp_avg_sq``, uint8 and shaped like the parameter, ``exp_avg_scale`` and
    ``exp_avg_sq_scale``, (blocks,) float32. Tensors with fewer than ``min_elements`` have AdamW's state.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: see AdamW.
        block_size: elements that share a scale.
        min_elements: smaller tensors are not quantized.
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

    def update_tensor(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        """Update one tensor; see ``GroupOptimizer``."""
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
                    _Quantized(state[key].view(-1)[run], state[f"{key}_scale"][blocks], size, is_signed)
                    for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False))
                ]
                mean, square = (moment.decoded(param.dtype) for moment in moments)
                _adamw(group, state["step"], values[run], grad[run], mean, square)
                for moment, value in zip(moments, (mean, square), strict=True):
                    moment.encode(value)
        if not param.is_contiguous():
            param.copy_(values.view(param.shape))


def _adamw(group: dict[str, Any], step: int, values: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
    """Apply AdamW's update to ``values``, and to its moments, in place."""
    beta1, beta2 = group["betas"]
    mean.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    spread = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    values.mul_(1 - group["lr"] * group["weight_decay"])
    values.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1**step))


class _Quantized:
    """Consecutive blocks of a quantized moment: (n,) codes and (blocks,) scales."""

    def __init__(self, codes: Tensor, scales: Tensor, block_size: int, is_signed: bool):
        self._codes, self._scales, self._size = codes, scales, block_size
        self._table = torch.tensor(_table(is_signed), dtype=torch.float64, device=codes.device)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decode (n,) values."""
        values = self._table.to(dtype)[self._codes.int()]
        return values.mul_(self._scale_of_each(dtype))

    def encode(self, values: Tensor) -> None:
        """Store (n,) values: a scale for each block, and the nearest entry of the table for each value."""
        blocks = torch.nn.functional.pad(values, (0, len(self._scales) * self._size - len(values)))
        # Padded with zeros, which change no maximum.
        self._scales.copy_(blocks.view(-1, self._size).abs().amax(dim=1))
        # clamp: a block of zeros has scale zero.
        shares = values / self._scale_of_each(values.dtype).clamp(min=torch.finfo(torch.float32).tiny)
        # The nearest entry, by the midpoints between entries.
        middles = ((self._table[1:] + self._table[:-1]) / 2).to(values.dtype)
        self._codes.copy_(torch.bucketize(shares, middles))

    def _scale_of_each(self, dtype: torch.dtype) -> Tensor:
        return self._scales.to(dtype).repeat_interleave(self._size)[: len(self._codes)]


@lru_cache(maxsize=2)
def _table(is_signed: bool) -> tuple[float, ...]:
    """Build the table of dynamic tree quantization: seven decades, each with twice the values of the last; 0 and 1."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        count = 2 ** (exponent + (0 if is_signed else 1))
        middles = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
        levels += middles + ([-value for value in middles] if is_signed else [])
    return tuple(sorted(levels))


def _zero(is_signed: bool) -> int:
    return _table(is_signed).index(0.0)


@OPTIMIZERS.register("adamw_8bit", config=AdamW8bitConfig)
def adamw_8bit(groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """Build AdamW with state of 8 bits an element, by blocks of the full tensor."""
    return AdamW8bit(groups, **options)
