"""iBOT's head: prototypes for the class token and for patches (https://arxiv.org/abs/2111.07832, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from vissl_zero.methods.ibot.keys import IBOTHeadConfig
from vissl_zero.methods.swav.head import SwAVHead
from vissl_zero.models.patches import Tokens
from vissl_zero.registry import HEADS


class IBOTOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (n, D) of all crops, of unit length.
        features: (n, F) of all crops, as they came from the trunk.
        scores: (n, K) of all crops.
        patch_scores: (b, m, K') of the patches asked for in the crops of the first size.
        is_masked: (b, m) bool, which of these were masked; None if nothing was.
    """

    embeddings: Tensor
    features: Tensor
    scores: Tensor
    patch_scores: Tensor
    is_masked: Tensor | None


@HEADS.register("ibot_head", config=IBOTHeadConfig)
class IBOTHead(nn.Module):
    """Projection MLP and prototypes of unit length, for class tokens and patches, shared or separate.

    Args: the fields of ``IBOTHeadConfig``.

    Attributes:
        class_head: of all crops.
        patch_head: of patches; None where they share ``class_head``.
    """

    def __init__(self, dims: Sequence[int], num_clusters: Sequence[int], activation_name: str = "GELU"):
        super().__init__()
        heads = [
            SwAVHead(dims, [count], activation_name=activation_name, use_weight_norm_prototypes=True)
            for count in num_clusters
        ]
        self.class_head = heads[0]
        self.patch_head: SwAVHead | None = heads[1] if len(heads) > 1 else None

    def forward(self, features: Tensor, tokens: list[Tokens]) -> IBOTOutput:
        """Score all crops, and patches of those of the first size."""
        crops, first = self.class_head(features), tokens[0]
        patches, view = first.wanted(), first.view
        scores = (self.patch_head or self.class_head)(patches.flatten(0, 1)).scores[0]
        is_masked = None
        if view.masked is not None:
            is_masked = view.masked if view.wanted is None else view.masked.gather(1, view.wanted)
        return IBOTOutput(
            crops.embeddings, features, crops.scores[0], scores.unflatten(0, patches.shape[:2]), is_masked
        )
