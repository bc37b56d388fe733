"""Tokens of several resolutions as one sequence, for layers that act on single tokens.

Attention gets ``WithinImages`` as its mask, and then runs one kernel per resolution, on views of queries, keys and
values: images do not attend to each other, there is no padding, and the kernels are those of a pass per resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

KEY = "config.MODEL.PACK_CROPS"
Shapes = Sequence[tuple[int, int]]  # (images, tokens per image) of each resolution


def packed(xs: Sequence[Tensor]) -> Tensor:
    """Concatenate tokens (b_r, n_r, ...) of R resolutions to one sequence (1, sum of b_r * n_r, ...). A copy."""
    return torch.cat([x.flatten(0, 1) for x in xs])[None]


def unpacked(x: Tensor, shapes: Shapes, dim: int = 1) -> list[Tensor]:
    """Split a sequence into the tokens of each resolution, without a copy.

    Args:
        x: (1, ..., T, ...).
        shapes: b_r and n_r of R resolutions.
        dim: dimension of the T tokens.
    Returns:
        R tensors (b_r, ..., n_r, ...).
    """
    parts = x.split([images * tokens for images, tokens in shapes], dim)
    return [part.unflatten(dim, shape).movedim(dim, 0).squeeze(1) for part, shape in zip(parts, shapes, strict=True)]


class WithinImages:
    """A mask for ``scaled_dot_product_attention`` by which tokens attend within their image.

    It is no tensor and costs no memory. Like torch's ``CausalBias``, it replaces the attention function.

    Args:
        shapes: (images, tokens per image) of each packed resolution.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attend within images; torch raises TypeError for any other use of the mask."""
        if func is functional.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return NotImplemented


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: WithinImages, **options: Any) -> Tensor:
    """Compute attention (1, heads, T, width) of packed tokens, by resolution."""
    shapes = attn_mask.shapes
    columns = zip(*(unpacked(x, shapes, dim=2) for x in (query, key, value)), strict=True)
    # cuDNN's attention returns None for an empty batch.
    outputs = [functional.scaled_dot_product_attention(*x, **options) if len(x[0]) else x[2] for x in columns]
    return packed([output.transpose(1, 2) for output in outputs]).transpose(1, 2)
