"""Optimizers that look at whole tensors: Muon, LAMB and Adafactor, each from the library that has it.

Above level 0, ``sharding/whole_tensors.py`` gives them whole tensors, each on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.components.optimizers import AdafactorConfig, LambConfig, MuonConfig
from vissl_zero.optim.elementwise import Groups
from vissl_zero.registry import OPTIMIZERS


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for matrices, torch's AdamW for everything else.

    A tensor of more than two dimensions (a convolution's kernel) counts as the matrix of its first dimension by the
    rest, as Muon's authors have it: https://kellerjordan.github.io/posts/muon/. torch orthogonalises in bfloat16.

    Args:
        params: parameters or groups; a group with ``use_muon=False`` is left to AdamW.
        lr: of both: with ``adjust_lr_fn="match_rms_adamw"`` Muon's updates have the size of AdamW's.
        weight_decay: decoupled, of both.
        momentum, nesterov, ns_steps, adjust_lr_fn: of ``torch.optim.Muon``.
        betas, eps: of ``torch.optim.AdamW``.
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
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": (betas[0], betas[1]),
            "eps": eps,
            "use_muon": True,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:  # torch checks the values
            self._muon(group, [torch.empty(1, 1)])
            self._adamw(group, [torch.empty(1)])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter with a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            chosen = [param for param in group["params"] if param.grad is not None and param.numel()]
            matrices = [param for param in chosen if group["use_muon"] and param.dim() > 1]
            others = [param for param in chosen if not (group["use_muon"] and param.dim() > 1)]
            self._run(self._muon, group, matrices, lambda tensor: tensor.reshape(len(tensor), -1))
            self._run(self._adamw, group, others, lambda tensor: tensor)
        return loss

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
            if flat.data_ptr() != param.data_ptr():  # not contiguous: ``view`` was a copy
                param.copy_(flat.view(param.shape))
            state = optimizer.state[flat]
            self.state[param] = {
                key: v.view(param.shape) if v.numel() == param.numel() and v.dim() else v for key, v in state.items()
            }

    @staticmethod
    def _muon(group: dict[str, Any], params: Sequence[Tensor]) -> torch.optim.Optimizer:
        keys = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        return torch.optim.Muon(params, **{key: group[key] for key in keys})

    @staticmethod
    def _adamw(group: dict[str, Any], params: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, **{key: group[key] for key in ("lr", "weight_decay", "betas", "eps")})


@OPTIMIZERS.register("muon", config=MuonConfig)
def muon(groups: Groups, use_muon_on_heads: bool = False, **options: Any) -> torch.optim.Optimizer:
    """Muon for matrices and convolutions, AdamW for the rest and for heads."""
    for group in groups:
        group["use_muon"] = use_muon_on_heads or not str(group.get("name", "")).startswith("head")
    return MuonAdamW(groups, **options)


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
