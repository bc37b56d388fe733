"""Are all ranks about to shard the same model? Asked once, when it can still be answered."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vissl_zero.errors import VisslZeroError


class ModelsDifferError(VisslZeroError):
    """The ranks did not build the same model, so that training it together would be wrong from the first step."""


def require_equal_models(model: nn.Module, device: torch.device) -> None:
    """Compare parameter names, shapes and values across ranks by checksums.

    Every rank must call it. Parameters on the meta device have no values yet and are compared by name and shape.

    Raises:
        ModelsDifferError: on every rank, with the first parameter that differs.
    Cost: two all-reduces, of 4 and of 4 numbers per parameter; one pass over the parameters.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    named = list(model.named_parameters())
    layout = ";".join(f"{name}{tuple(param.shape)}" for name, param in named)
    digest = hashlib.sha256(layout.encode()).digest()
    halves = [int.from_bytes(digest[start : start + 4], "big") for start in (0, 4)]
    if _differing(torch.tensor(halves, dtype=torch.float64, device=device)):
        raise ModelsDifferError(
            "The ranks built different models: names or shapes of parameters differ. "
            "Build the model from the same configuration on every rank."
        )
    sums = torch.stack([_checksum(param) for _, param in named]).to(device)
    if differing := _differing(sums):
        raise ModelsDifferError(
            f"The ranks start from different weights: {named[differing[0]][0]} differs between them. "
            "Draw the initial weights from one seed, or load them from one file, on every rank."
        )


def _checksum(param: Tensor) -> Tensor:
    """Two numbers (2,) that differ if a value or the order of values does, but for rare accidents."""
    if param.is_meta or not param.numel():
        return torch.zeros(2, dtype=torch.float64)
    flat = param.detach().flatten().nan_to_num()
    ramp = torch.linspace(1.0, 2.0, flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.stack([flat.sum(dtype=torch.float64), (flat * ramp).sum(dtype=torch.float64)])


def _differing(values: Tensor) -> list[int]:
    """Rows of ``values`` that are not the same on every rank; the same list everywhere."""
    bounds = torch.stack([values, -values])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    rows = (bounds[0] != -bounds[1]).reshape(len(values), -1).any(dim=1)
    return rows.nonzero().flatten().tolist()
