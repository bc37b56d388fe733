"""Optimizers that look at full tensors: Muon, NorMuon, LAMB and Adafactor, each from the library that has it.

Above level 0, ``sharding/whole_tensors.py`` gives them full tensors, each on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.components.optimizers import AdafactorConfig, LambConfig, MuonConfig, NorMuonConfig
from vissl_zero.optim.elementwise import Groups
from vissl_zero.registry import OPTIMIZERS


class GroupOptimizer(torch.optim.Optimizer):
    """An optimizer of our own: updates the parameters that have a gradient, a group at a time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter with a gradient; returns what ``closure`` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update_group(group, [param for param in group["params"] if param.grad is not None and param.numel()])
        return loss

    def update_group(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """Update ``params`` of a group in place; all have gradients and elements. Gradients are not recorded."""
        raise NotImplementedError


class MuonAdamW(GroupOptimizer):
    """torch's Muon for matrices, torch's AdamW for everything else.

    A tensor of more than two dimensions (a convolution's kernel) counts as the matrix of its first dimension by the
    rest, as Muon's authors have it: https://kellerjordan.github.io/posts/muon/. torch orthogonalises in bfloat16; in
    another number format, or with NorMuon's normalisation, ``Orthogonal`` runs in its place.

    Args:
        params: parameters or groups; a group with ``use_muon=False`` is left to AdamW.
        lr: of both: with ``adjust_lr_fn="match_rms_adamw"`` Muon's updates have the size of AdamW's.
        weight_decay: decoupled, of both.
        momentum, nesterov, ns_steps, adjust_lr_fn: of ``torch.optim.Muon``.
        betas, eps: of ``torch.optim.AdamW``.
        ns_dtype: number format of the Newton-Schulz iterations: bfloat16, float32 or float64.
        row_beta: NorMuon's running mean square of each row of the updates; None: Muon.
    """

    def __init__(
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
        for group in self.param_groups:  # torch checks the values
            self._muon(group, [torch.empty(1, 1)])
            self._adamw(group, [torch.empty(1)])

    def update_group(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """See ``GroupOptimizer``."""
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
        """One step of an optimizer of torch's over views of ``params``, with their state."""
        if not params:
            return
        views = []
        for param in params:
            flat = nn.Parameter(view(param.detach()))
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
        muon = torch.optim.Muon(params, **{key: group[key] for key in keys})  # it checks the values
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
    """Muon of matrices in a number format of choice, by timm's Newton-Schulz; with ``row_beta``, NorMuon.

    NorMuon (https://arxiv.org/abs/2510.05491) divides each row of an orthogonalised update by the root of a running
    mean of its mean square, and gives the whole its former norm back.

    Args:
        params: matrices.
        lr, weight_decay, momentum, nesterov, ns_steps, adjust_lr_fn: of ``torch.optim.Muon``.
        ns_dtype, row_beta: see ``MuonAdamW``.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
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
                    update = self._normalised(state, update, group["row_beta"])
                lr = group["lr"]
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(update, alpha=-lr * _scale(param.shape, group["adjust_lr_fn"]))

    @staticmethod
    def _normalised(state: dict[str, Any], update: Tensor, beta: float) -> Tensor:
        rows = update.square().mean(dim=1, keepdim=True)
        if "row_square" not in state:
            state["row_square"] = torch.zeros_like(rows)
        square = state["row_square"].lerp_(rows, 1 - beta)
        changed = update / (square.sqrt() + _ROW_EPS)
        return changed * (update.norm() / (changed.norm() + _ROW_EPS))


_FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Muon's authors'
_ROW_EPS = 1e-10


def _scale(shape: torch.Size, adjust_lr_fn: str) -> float:
    """By which Muon's updates of a matrix are multiplied, as ``torch.optim.Muon`` has it."""
    num_rows, num_cols = shape
    if adjust_lr_fn == "match_rms_adamw":
        return float(0.2 * max(num_rows, num_cols) ** 0.5)
    return float(max(1, num_rows / num_cols) ** 0.5)


@OPTIMIZERS.register("muon", config=MuonConfig)
def muon(groups: Groups, use_muon_on_heads: bool = False, **options: Any) -> torch.optim.Optimizer:
    """Muon for matrices and convolutions, AdamW for the rest and for heads."""
    for group in groups:
        group["use_muon"] = use_muon_on_heads or not str(group.get("name", "")).startswith("head")
    return MuonAdamW(groups, **options)


@OPTIMIZERS.register("normuon", config=NorMuonConfig)
def normuon(groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """Muon whose updates are normalised row by row, AdamW for the rest and for heads."""
    return muon(groups, **options)


@OPTIMIZERS.register("lamb", config=LambConfig)
def lamb(
    groups: Groups,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-6,
    trust_clip: bool = False,
    always_adapt: bool = False,
) -> torch.optim.Optimizer:
    """LAMB of timm, without its own clipping by the norm of all gradients (that is ``ZERO.clip_grad``)."""
    from timm.optim import Lamb

    options = {"trust_clip": trust_clip, "always_adapt": always_adapt}
    built = Lamb(groups, betas=(betas[0], betas[1]), eps=eps, max_grad_norm=None, **options)
    assert isinstance(built, torch.optim.Optimizer)
    return built


@OPTIMIZERS.register("adafactor", config=AdafactorConfig)
def adafactor(groups: Groups, beta2_decay: float = -0.8, clip_threshold: float = 1.0) -> torch.optim.Optimizer:
    """Adafactor of torch: second moments by row and column."""
    return torch.optim.Adafactor(groups, beta2_decay=beta2_decay, d=clip_threshold)
