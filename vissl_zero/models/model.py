"""A trunk and its heads, as one module that knows nothing of sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.models.unit import Unit


class Model(nn.Module):
    """A trunk that pools each image to a feature vector, and heads on top of it.

    Args:
        trunk: list of R image tensors -> list of R features (b_r, F).
        heads: each takes the rows of all resolutions, concatenated, and optionally a probe (see ``Criterion.probe``).
    """

    def __init__(self, trunk: nn.Module, heads: Sequence[nn.Module]):
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(heads)

    def forward(self, images: list[Tensor], probe: Tensor | None = None, features_only: bool = False) -> list[Any]:
        """One pass over all resolutions.

        Args:
            images: R tensors (b_r, 3, H_r, W_r), crop-major.
            probe: (q, D) rows that the heads score in the same pass, without gradient.
            features_only: stop after the trunk.
        Returns:
            One output per head, or the R features (b_r, F) of the trunk.
        """
        features: list[Tensor] = self.trunk(images)
        if features_only:
            return features
        rows = torch.cat(features)
        # A head that no loss probes need not know what a probe is.
        return [head(rows) if probe is None else head(rows, probe) for head in self.heads]

    def units(self) -> list[nn.Module]:
        """What is gathered and resharded at once, in forward order: the trunk's outermost units, then the heads.

        A trunk without units is one. Parameters of a trunk outside its units belong to the model as a whole.
        """
        units = _outermost_units(self.trunk)
        return [*(units or [self.trunk]), *self.heads]


def _outermost_units(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, Unit):
        return [module]
    return [unit for child in module.children() for unit in _outermost_units(child)]
