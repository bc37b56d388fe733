"""LeJEPA: views agree, and their embeddings are an isotropic Gaussian: keys and rules."""

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
class LeJEPALossConfig:
    """``lejepa_loss``: prediction of the views' mean, and SIGReg, https://arxiv.org/abs/2511.08544."""

    lambda_: float = number(0.05, least=0, most=1)
    """Weight of SIGReg; the rest is the weight of the distance from the mean of the views."""
    num_slices: int = number(1024, least=1, most=2**20)
    """Random directions, new ones in each step, along which embeddings are compared with a normal distribution."""
    num_points: int = number(17, least=2, most=10_000)
    """Points at which characteristic functions are compared, from 0 to max_point."""
    max_point: float = number(3.0, above=0, most=1000)
    """The last of these points."""
    num_global_crops: int | None = None
    """Crops whose mean the others predict: those of the first size; null: from the transforms, which also win over a
    different number."""


class SlicedSpec(MethodSpec):
    """Base of the specs of methods that compare the batch with a Gaussian along random directions."""

    views = "2 or more crops of any sizes"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer the crops from the transforms."""
        crops = crops_of(cfg)
        return {"num_global_crops": (crops[0] if crops else None, "transforms")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views or more, one projection head."""
        return [*one_head(cfg, "mlp"), *two_views(cfg, exactly=False)]


@METHODS.register("lejepa")
class LeJEPASpec(SlicedSpec):
    """LeJEPA: views agree, and their embeddings are an isotropic Gaussian."""

    losses = {"lejepa_loss": LeJEPALossConfig}
    title = "LeJEPA"
    paper = "https://arxiv.org/abs/2511.08544"
    couples = "SIGReg: the distribution of the batch's embeddings"
    recipe = "digits/lejepa"
