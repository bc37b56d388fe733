"""One vector of an image's feature maps, to find images by: regional maxima (R-MAC), generalised means (GeM).

Sources: https://arxiv.org/abs/1511.05879 (R-MAC), https://arxiv.org/abs/1711.02512 (GeM); constants of VISSL's
``vissl/utils/instance_retrieval_utils`` at 09270ed2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_OVERLAP = 0.4  # of neighbouring regions, as wanted
_MOST_STEPS = 7


def unit_vectors(rows: Tensor, epsilon: float = 0.0) -> Tensor:
    """Vectors (..., F) divided by their L2 norm plus ``epsilon``; those of zeros stay so."""
    norms = rows.norm(dim=-1, keepdim=True) + epsilon
    return rows / torch.where(norms > 0, norms, torch.ones_like(norms))


def regions(height: int, width: int, levels: int) -> list[tuple[int, int, int]]:
    """Squares on a map: top, left and side of each, level by level.

    Level l has l squares along the shorter side, and as many more along the longer one at every level as make
    neighbours overlap by about 40 %. Levels that are finer than the map are left out.
    """
    short, long = min(height, width), max(height, width)
    steps = np.arange(2, _MOST_STEPS + 1, dtype=np.float64)  # as NumPy 2 runs VISSL; NumPy 1 breaks ties in float32
    overlaps = (short**2 - short * ((long - short) / (steps - 1))) / short**2
    more = int(np.abs(overlaps - _OVERLAP).argmin()) + 1
    found = []
    for level in range(1, levels + 1):
        side = 2 * short // (level + 1)
        if side:
            tops = _places(height, side, level + more * (height > width))
            lefts = _places(width, side, level + more * (width > height))
            found += [(top, left, side) for top in tops for left in lefts]
    return found


def _places(length: int, side: int, count: int) -> list[int]:
    """Where ``count`` squares begin, spread over a length; around their centres, so that VISSL's are rounded alike."""
    gap = (length - side) / (count - 1) if count > 1 else 0.0
    centre = np.floor(side / 2 - 1)
    return [min(int(np.floor(centre + gap * index) - centre), length - side) for index in range(count)]


def regional_maxima(maps: Tensor, levels: int, normalize: bool = True) -> Tensor:
    """The largest value of each channel in each region.

    Args:
        maps: (B, C, H, W).
        levels: of ``regions``.
        normalize: to unit length.
    Returns:
        (B, R, C).
    """
    found = [
        maps[:, :, top : top + side, left : left + side].amax(dim=(2, 3))
        for top, left, side in regions(maps.shape[2], maps.shape[3], levels)
    ]
    rows = torch.stack(found, dim=1)
    return unit_vectors(rows) if normalize else rows


def generalized_mean(maps: Tensor, power: float) -> Tensor:
    """Means of powers over the map, then their roots, and a constant 1 behind them, as in VISSL.

    Args:
        maps: (B, C, H, W); values below 1e-6 count as that.
        power: 1: the mean, of negative values too.
    Returns:
        (B, C + 1).
    """
    rows = maps.mean(dim=(2, 3)) if power == 1 else maps.clamp(min=1e-6).pow(power).mean(dim=(2, 3)).pow(1 / power)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)


def descriptor(maps: Sequence[Tensor], kind: str, power: float, normalize: bool) -> Tensor:
    """One vector (B, D) of the maps (B, C, H, W) of an image at each scale: the mean over scales.

    Args:
        maps: one tensor a scale; of equal shape unless ``kind`` is gem.
        kind: "gem", or "" for the maps themselves, as vectors.
        power: of gem.
        normalize: to unit length, with 1e-6 added to the norm.
    """
    if kind == "gem":
        rows = torch.stack([generalized_mean(of_scale, power) for of_scale in maps]).mean(dim=0)
    else:
        rows = torch.stack([of_scale.flatten(1) for of_scale in maps]).mean(dim=0)
    return unit_vectors(rows, 1e-6) if normalize else rows
