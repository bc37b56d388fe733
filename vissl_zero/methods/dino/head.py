"""DINO's head (https://arxiv.org/abs/2104.14294, appendix C), with VISSL's names of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.dino.keys import DINOHeadConfig
from vissl_zero.methods.swav.head import SwAVOutput
from vissl_zero.registry import HEADS

_INIT_STD = 0.02


class NormalizedPrototypes(nn.Module):
    """Scores against rows ``weight_v`` of length ``weight_g``: what ``torch.nn.utils.weight_norm`` computes.

    Attributes:
        weight_v: (K, D), directions.
        weight_g: (K, 1), lengths, 1 at the start; not trained where ``is_unit``.
    """

    def __init__(self, width: int, num_prototypes: int, is_unit: bool):
        super().__init__()
        self.weight_v = nn.Parameter(torch.zeros(num_prototypes, width))
        self.weight_g = nn.Parameter(torch.ones(num_prototypes, 1), requires_grad=not is_unit)

    def forward(self, rows: Tensor) -> Tensor:
        """(n, D) -> (n, K)."""
        return F.linear(rows.to(self.weight_v.dtype), F.normalize(self.weight_v, dim=1) * self.weight_g)

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Directions as a linear layer of torch begins, lengths 1."""
        bound = 1 / math.sqrt(self.weight_v.shape[1])
        drawn = torch.empty(self.weight_v.shape).uniform_(-bound, bound, generator=generator_for("weight_v"))
        self.weight_v.data.copy_(drawn)
        self.weight_g.data.fill_(1.0)


@HEADS.register("dino_head", config=DINOHeadConfig)
class DINOHead(nn.Module):
    """An MLP with GELU, embeddings of unit length, weight-normalised prototypes.

    Args: the fields of ``DINOHeadConfig``.
    """

    def __init__(
        self,
        in_dim: int,
        num_clusters: Sequence[int],
        use_bn: bool = False,
        normalize_last_layer: bool = True,
        num_layers: int = 3,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
    ):
        super().__init__()
        if len(num_clusters) != 1 or num_clusters[0] < 1:
            must = "num_clusters of dino_head must have one number, at least 1"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", str(list(num_clusters)), must, "Write [65536].")])
        layers: list[nn.Module] = []
        for width_in in [in_dim, *[hidden_dim] * (num_layers - 1)][: num_layers - 1]:
            layers += [nn.Linear(width_in, hidden_dim), *([nn.BatchNorm1d(hidden_dim)] if use_bn else []), nn.GELU()]
        last = nn.Linear(in_dim if num_layers == 1 else hidden_dim, bottleneck_dim)
        self.mlp: nn.Module = nn.Sequential(*layers, last) if layers else last
        self.prototypes0 = NormalizedPrototypes(bottleneck_dim, num_clusters[0], normalize_last_layer)

    def forward(self, features: Tensor) -> SwAVOutput:
        """Features (n, in_dim) of all crops -> embeddings and scores."""
        x = self.mlp(features)
        embeddings = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)
        return SwAVOutput(embeddings, [self.prototypes0(embeddings)], None)

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Truncated normal of deviation 0.02 for the MLP, biases 0."""
        for name, module in self.mlp.named_modules(prefix="mlp"):
            if isinstance(module, nn.Linear):
                drawn = torch.empty(module.weight.shape)
                nn.init.trunc_normal_(drawn, std=_INIT_STD, generator=generator_for(f"{name}.weight"))
                module.weight.data.copy_(drawn)
                nn.init.zeros_(module.bias)
