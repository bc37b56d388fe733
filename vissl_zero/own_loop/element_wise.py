"""Does an optimizer update every element from that element alone? Tried out, not looked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.trial import trial

_NUM_STEPS = 2
_TOLERANCE = 1e-5  # relative to the step; a layer-wise norm or an orthogonalised matrix is off by far more


def require_element_wise(optimizer: torch.optim.Optimizer) -> None:
    """Run ``optimizer``'s update on a small matrix whole, and on the same matrix in two pieces; they must agree.

    A rank holds pieces of tensors, so anything that looks at a whole tensor (LARS, LAMB, Muon, Adafactor) or at all of
    them (LBFGS) would train another model at every world size, and nothing would raise.

    Args:
        optimizer: left as it is; a shallow copy runs.
    Raises:
        ConfigError: it cannot be cut.
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 6, generator=generator).to(device) for _ in range(1 + _NUM_STEPS))
    name = type(optimizer).__name__
    try:
        whole = _run(optimizer, [start], [[grad] for grad in grads])
        pieces = _run(optimizer, list(start.split(2)), [list(grad.split(2)) for grad in grads])
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        fix = "Use an element-wise optimizer, such as SGD, Adam or AdamW."
        raise ConfigError([Problem("optimizer", name, f"cannot run on a piece of a tensor: {error}", fix)]) from error
    moved = (whole - start).abs().max()
    if (whole - pieces).abs().max() > _TOLERANCE * moved.clamp(min=1e-12):
        must = "must update each element from that element alone: a rank holds pieces of tensors"
        fix = "Use SGD, Adam, AdamW, or LARC or LARS by optimizer=dict(type='LARC', ...), or zero=dict(level=0)."
        raise ConfigError([Problem("optimizer", name, must, fix)])


def _run(optimizer: torch.optim.Optimizer, pieces: list[Tensor], grads: list[list[Tensor]]) -> Tensor:
    params = [nn.Parameter(piece.clone()) for piece in pieces]
    copied = trial(optimizer, params)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        copied.step()
    return torch.cat([param.detach() for param in params])
