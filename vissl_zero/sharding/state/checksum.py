"""A checksum of tensors, to compare them across ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> Tensor:
    """Compute two numbers (2,) that change with any value and with the order of values, rare coincidences aside."""
    if tensor.is_meta or not tensor.numel() or tensor.is_complex():
        return torch.zeros(2, dtype=torch.float64)
    # NaN is unequal to itself, so equal models that hold one would be refused.
    flat = tensor.detach().flatten().nan_to_num()
    flat = flat if flat.is_floating_point() else flat.double()
    # Weights that differ by position: without them, exchanged values would go unnoticed.
    ramp = torch.linspace(1.0, 2.0, flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.stack([flat.sum(dtype=torch.float64), (flat * ramp).sum(dtype=torch.float64)])
