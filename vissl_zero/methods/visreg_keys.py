"""VISReg: views agree, and their embeddings have the scale and the shape of a Gaussian: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class VISRegLossConfig:
    """``visreg_loss``: prediction of the views' mean; center, scale, and shape, https://arxiv.org/abs/2606.02572."""

    lambda_: float = number(0.9, least=0, most=1)
    """Weight of center, scale, and shape; the rest is the weight of the distance from the mean of the views."""
    num_slices: int = number(4096, least=1, most=2**20)
    """Random directions, new ones in each step, along which embeddings are sorted and compared with a normal
    distribution."""
    num_global_crops: int | None = None
    """Crops whose mean the others predict: those of the first size; null: from the transforms, which also win over a
    different number."""


@METHODS.register("visreg")
class VISRegSpec(MethodSpec):
    """VISReg: views agree, and their embeddings have the scale and the shape of a Gaussian."""

    losses = {"visreg_loss": VISRegLossConfig}
    title = "VISReg"
    paper = "https://arxiv.org/abs/2606.02572"
    views = "2 or more crops of any sizes"
    couples = "mean, deviations, and order along random directions of the batch's embeddings"
    recipe = "digits/visreg"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer the crops from the transforms."""
        crops = crops_of(cfg)
        return {"num_global_crops": (crops[0] if crops else None, "transforms")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views or more, one projection head."""
        return [*one_head(cfg, "mlp"), *two_views(cfg, exactly=False)]
