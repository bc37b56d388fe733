"""Jigsaw's keys and rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, heads_of, one_head, one_size
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig

GRIDS = {4: 2, 9: 3}  # tiles -> of a side


@dataclass
class JigsawHeadConfig:
    """``jigsaw_head``: each tile through an MLP, then all tiles of an image side by side through a linear layer."""

    dims: list[int] = MISSING
    """Widths of the MLP, from the trunk's features."""
    num_towers: int = 9
    """Tiles of an image: 4 or 9."""
    num_permutations: int = number(1000, least=2)
    """Orders to tell apart; at most 24 with 4 tiles."""


@dataclass
class JigsawLossConfig:
    """``jigsaw_loss``: in which order are the tiles, https://arxiv.org/abs/1603.09246."""

    num_towers: int | None = None
    """Tiles of an image; null: from the head, which also wins over a different number."""
    num_permutations: int | None = None
    """Orders to tell apart; null: from the head, which also wins over a different number."""


@METHODS.register("jigsaw")
class JigsawSpec(MethodSpec):
    """Jigsaw: predicts the order of an image's shuffled tiles."""

    losses = {"jigsaw_loss": JigsawLossConfig}
    heads = {"jigsaw_head": JigsawHeadConfig}
    title = "Jigsaw"
    paper = "https://arxiv.org/abs/1603.09246"
    views = "1 or more crops of one size, in 4 or 9 shuffled tiles"
    recipe = "digits/jigsaw"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """num_towers and num_permutations from the head."""
        orders = _head(cfg).get("num_permutations", 1000) if _head(cfg) else None
        return {"num_towers": (towers_of(cfg, 9), "head"), "num_permutations": (orders, "head")}

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """One size, a head that takes tiles, no more orders than there are."""
        return [*one_head(cfg, "jigsaw_head"), *one_size(cfg), *wrong_towers(cfg, GRIDS), *self._orders(cfg)]

    def _orders(self, cfg: RunConfig) -> list[Problem]:
        found = {key: value for key, (value, _) in self.inferred(cfg).items()}
        tiles, orders = found["num_towers"], found["num_permutations"]
        if tiles not in GRIDS or not isinstance(orders, int) or orders <= math.factorial(tiles):
            return []
        must = f"num_permutations must be at most the {math.factorial(tiles)} orders of {tiles} tiles"
        return [Problem("config.MODEL.HEAD.PARAMS", str(orders), must, "Lower it.")]


def towers_of(cfg: RunConfig, default: int) -> int | None:
    """Tiles that the first head takes."""
    head = _head(cfg)
    return head.get("num_towers", default) if head else None


def wrong_towers(cfg: RunConfig, grids: Mapping[int, int]) -> list[Problem]:
    """A problem unless the head takes a number of tiles that an image can be cut into."""
    towers = towers_of(cfg, 9)
    if towers is None or towers in grids:
        return []
    must = f"num_towers must be {' or '.join(map(str, grids))}"
    return [Problem("config.MODEL.HEAD.PARAMS", str(towers), must, "Write num_towers: 9.")]


def _head(cfg: RunConfig) -> Mapping[str, Any]:
    return next((options for _, options in heads_of(cfg)), {})
