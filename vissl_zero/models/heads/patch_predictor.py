"""A transformer that predicts hidden patches from those seen: MAE's decoder and I-JEPA's predictor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vissl_zero.config.components.heads import PatchPredictorConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.model import Unit
from vissl_zero.models.patches import Tokens, sine_positions
from vissl_zero.models.trunks.vision_transformer import initialize_transformer_, layer_norm, truncated_normal_
from vissl_zero.registry import HEADS

_NORM: Any = layer_norm  # timm wants a class, and calls it


class PatchOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (b, F) pooled features.
        wanted: (b, ..., m) int64, the patches asked for.
        grid: patches per column and per row.
        patches: (b, ..., m, F) the trunk's own embeddings of them; None where patches were left out.
        predictions: (b, ..., m, E); None from a teacher, which has no predictor.
    """

    embeddings: Tensor
    wanted: Tensor
    grid: tuple[int, int]
    patches: Tensor | None
    predictions: Tensor | None


@HEADS.register("patch_predictor", config=PatchPredictorConfig)
class PatchPredictor(nn.Module):
    """Predicts each group of hidden patches from the patches seen and a learned vector at each hidden place.

    Args: the fields of ``PatchPredictorConfig``.

    Attributes:
        student_only: what a teacher's copy lacks.
    """

    student_only = ("predictor",)

    def __init__(self, dims: Sequence[int], depth: int = 8, num_heads: int = 16):
        super().__init__()
        key = "config.MODEL.HEAD.PARAMS.patch_predictor"
        if len(dims) != 3:
            must = "must have three widths: of the trunk, of the predictor, of a prediction"
            raise ConfigError(
                [Problem(f"{key}.dims", str(list(dims)), must, "Write dims: [-1, 512, 768], for example.")]
            )
        if dims[1] % num_heads or dims[1] % 4:
            must = f"must be a multiple of 4 and of num_heads, {num_heads}"
            raise ConfigError([Problem(f"{key}.dims", str(dims[1]), must, "Change one of them.")])
        self.predictor: _Predictor | None = _Predictor(dims, depth, num_heads)

    def forward(self, features: Tensor, tokens: list[Tokens]) -> PatchOutput:
        """Predictions for the patches asked for of images of one resolution."""
        (own,) = tokens
        wanted = own.view.wanted
        assert wanted is not None, "a method that has predictions asks for patches"
        predictions = None if self.predictor is None else self.predictor(own.rows, own, wanted)
        return PatchOutput(features, wanted, own.grid, own.wanted() if own.view.kept is None else None, predictions)


class _Predictor(nn.Module):
    def __init__(self, dims: Sequence[int], depth: int, num_heads: int):
        super().__init__()
        self.width = dims[1]
        self.embedding = nn.Linear(dims[0], dims[1])
        self.mask_token = nn.Parameter(torch.zeros(dims[1]))
        blocks = (Block(dims[1], num_heads, qkv_bias=True, norm_layer=_NORM) for _ in range(depth))
        self.blocks = nn.ModuleList(Unit(OrderedDict(unit=block)) for block in blocks)
        self.norm = layer_norm(dims[1])
        self.output = nn.Linear(dims[1], dims[2])

    def forward(self, rows: Tensor, tokens: Tokens, wanted: Tensor) -> Tensor:
        """(b, ..., m, E): each group (m) of patches from the prefix tokens and patches in ``rows``, by itself."""
        seen: Tensor = self.embedding(rows)
        positions = sine_positions(tokens.grid, self.width, seen)
        num_prefix, kept = tokens.num_prefix, tokens.view.kept
        places = positions.expand(len(seen), -1, -1) if kept is None else positions[kept]
        seen = torch.cat([seen[:, :num_prefix], seen[:, num_prefix:] + places], dim=1)
        groups = wanted.flatten(1, -2) if wanted.ndim > 2 else wanted[:, None]  # (b, T, m)
        num_groups, num_wanted = groups.shape[1:]
        hidden = (self.mask_token.to(seen.dtype) + positions[groups]).flatten(0, 1)
        xs = [torch.cat([seen.repeat_interleave(num_groups, dim=0), hidden], dim=1)]
        for block in self.blocks:
            xs = block(xs)
        # In its shape before the last layer: FSDP warns of outputs that are views.
        predictions: Tensor = self.output(self.norm(xs[0][:, -num_wanted:]).view(*wanted.shape, -1))
        return predictions

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """As a vision transformer's."""
        initialize_transformer_(self, generator_for)
        truncated_normal_(self.mask_token, generator_for("mask_token"))
