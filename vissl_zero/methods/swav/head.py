"""SwAV's head: a projection MLP and layers of prototypes (https://arxiv.org/abs/2006.09882)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.swav.keys import SwAVHeadConfig
from vissl_zero.registry import HEADS

_ACTIVATIONS: dict[str, type[nn.Module]] = {"ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}


class SwAVOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (n, D), of unit length where ``normalize_feats``; at least float32.
        scores: per layer of prototypes (n, K_i).
        probe_scores: per layer (q, K_i) without gradient; None without a probe.
    """

    embeddings: Tensor
    scores: list[Tensor]
    probe_scores: list[Tensor] | None


@HEADS.register("swav_head", config=SwAVHeadConfig)
class SwAVHead(nn.Module):
    """Projection MLP and prototypes, as SwAV and DINO have them.

    Args: the fields of ``SwAVHeadConfig``.

    Attributes:
        prototypes0, prototypes1, ...: linear layers without bias, one per entry of ``num_clusters``.
    """

    def __init__(
        self,
        dims: Sequence[int],
        num_clusters: Sequence[int],
        use_bn: bool = False,
        use_bias: bool = True,
        skip_last_bn: bool = True,
        normalize_feats: bool = True,
        activation_name: str = "ReLU",
        return_embeddings: bool = True,
        use_weight_norm_prototypes: bool = False,
    ):
        super().__init__()
        _check(dims, num_clusters, activation_name)
        layers: list[nn.Module] = []
        for index, (width_in, width_out) in enumerate(pairwise(dims)):
            layers.append(nn.Linear(width_in, width_out, bias=use_bias))
            if index == len(dims) - 2 and skip_last_bn:
                break
            if use_bn:
                layers.append(nn.BatchNorm1d(width_out))
            layers.append(_ACTIVATIONS[activation_name]())
        self.projection_head = nn.Sequential(*layers)
        self.num_layers = len(num_clusters)
        for index, num_prototypes in enumerate(num_clusters):
            self.add_module(f"prototypes{index}", nn.Linear(dims[-1], num_prototypes, bias=False))
        self.normalize_feats = normalize_feats
        self.use_weight_norm_prototypes = use_weight_norm_prototypes

    def forward(self, features: Tensor, probe: Tensor | None = None) -> SwAVOutput:
        """Embed and score the rows of all crops; score the probe too, with the same prototypes.

        Args:
            features: (n, F), all crops of all resolutions, crop-major.
            probe: (q, D) embeddings to be scored without gradient, such as the loss's queue.
        """
        x = self.projection_head(features)
        embeddings = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.normalize_feats:
            embeddings = F.normalize(embeddings, dim=1)
        scores = self._score(embeddings)
        if probe is None:
            return SwAVOutput(embeddings, scores, None)
        with torch.no_grad():
            return SwAVOutput(embeddings, scores, self._score(probe))

    def _score(self, embeddings: Tensor) -> list[Tensor]:
        scores = []
        for index in range(self.num_layers):
            layer: nn.Linear = getattr(self, f"prototypes{index}")
            rows = embeddings.to(layer.weight.dtype)
            if self.use_weight_norm_prototypes:
                scores.append(F.linear(rows, F.normalize(layer.weight, dim=1)))
            else:
                scores.append(layer(rows))
        return scores


def _check(dims: Sequence[int], num_clusters: Sequence[int], activation_name: str) -> None:
    key = "config.MODEL.HEAD.PARAMS"
    problems = []
    if len(dims) < 2:
        must = "dims of swav_head must have at least two widths, from the features to the embedding"
        problems.append(Problem(key, str(list(dims)), must, "Write dims: [features, hidden, embedding]."))
    if num_clusters and min(num_clusters) < 1:
        must = "num_clusters of swav_head must be numbers of at least 1"
        problems.append(Problem(key, str(list(num_clusters)), must, "Write num_clusters: [3000]."))
    if activation_name not in _ACTIVATIONS:
        must = f"activation_name of swav_head must be one of {', '.join(_ACTIVATIONS)}"
        problems.append(Problem(key, repr(activation_name), must, "Choose one of them."))
    if problems:
        raise ConfigError(problems)
