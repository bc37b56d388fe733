"""Heads one after another, as VISSL applies several heads to one feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vissl_zero.config.components.heads import ChainConfig
from vissl_zero.config.options import component_keys, typed_options
from vissl_zero.registry import HEADS


@HEADS.register("chain", config=ChainConfig)
class Chain(nn.Sequential):
    """Each head on what the one before it gives; of a head with embeddings and scores, the embeddings.

    Args:
        heads: [name, keys] each.
        dims: first and last width, with the trunk's features and the number of classes filled in.
    """

    def __init__(self, heads: Sequence[Any], dims: Sequence[int] = ()):
        built: list[nn.Module] = []
        for index, (name, given) in enumerate(heads):
            keys = dict(given)
            if dims and keys.get("dims"):
                first = dims[0] if index == 0 else keys["dims"][0]
                last = dims[-1] if index == len(heads) - 1 else keys["dims"][-1]
                keys["dims"] = [first, *keys["dims"][1:-1], last]
            options = typed_options(component_keys(HEADS, name), keys, f"config.MODEL.HEAD.PARAMS.{name}")
            built.append(HEADS.get(name).build(**options))
        super().__init__(*built)

    def forward(self, features: Tensor) -> Any:
        """(n, F) -> what the last head gives."""
        x: Any = features
        for head in self:
            x = head(getattr(x, "embeddings", x))
        return x
