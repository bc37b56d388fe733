"""I-JEPA's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, one_size, patch_trunk, share
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class IJEPALossConfig:
    """``ijepa_loss``: regression of a teacher's patch embeddings, https://arxiv.org/abs/2301.08243."""

    momentum: float = 0.996
    """Weight of the teacher's past at the start; it grows to 1 in a straight line."""
    num_targets: int = number(4, least=1, most=100)
    """Blocks of an image that are predicted, each by itself; they may overlap."""
    target_scale: float = number(0.175, above=0, most=1)
    """Share of the patches in each of them."""
    target_ratio: list[float] = field(default_factory=lambda: [0.75, 1.5])
    """Least and largest height of a block over its width."""
    context_scale: float = number(0.3, above=0, most=1)
    """Share of the patches that the student sees, at random among those that are in no target."""
    beta: float = number(1.0, above=0, most=1000)
    """Differences below it are squared."""


@METHODS.register("ijepa")
class IJEPASpec(MethodSpec):
    """I-JEPA: a teacher's embeddings of blocks from the patches around them."""

    losses = {"ijepa_loss": IJEPALossConfig}
    title = "I-JEPA"
    paper = "https://arxiv.org/abs/2301.08243"
    views = "crops of one size; the student sees a part, the teacher all"
    teacher = "momentum, linear to 1"
    recipe = "digits/ijepa"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """A vision transformer, a predictor, one size of crops, room for context beside the targets."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        found = [*one_head(cfg, "patch_predictor"), *patch_trunk(cfg), *one_size(cfg)]
        found += share(f"{path}.momentum", keys.momentum)
        if len(keys.target_ratio) != 2 or not 0 < keys.target_ratio[0] <= keys.target_ratio[1]:
            got, must = str(list(keys.target_ratio)), "must be two numbers above 0, the least and the largest"
            found.append(Problem(f"config.{path}.target_ratio", got, must, "Write [0.75, 1.5]."))
        taken = keys.num_targets * keys.target_scale
        if taken + keys.context_scale > 1 + 1e-9:
            must = f"must leave room for the context: {taken:g} of the patches may be targets"
            fix = f"Write context_scale={max(1 - taken, 0):.2g}, or lower target_scale."
            found.append(Problem(f"config.{path}.context_scale", str(keys.context_scale), must, fix))
        return found
