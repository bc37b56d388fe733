"""VISReg: views agree, and their embeddings have the scale and the shape of a Gaussian: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass

from vissl_zero.config.constraints import number
from vissl_zero.methods.lejepa_keys import SlicedSpec
from vissl_zero.registry import METHODS


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
class VISRegSpec(SlicedSpec):
    """VISReg: views agree, and their embeddings have the scale and the shape of a Gaussian."""

    losses = {"visreg_loss": VISRegLossConfig}
    title = "VISReg"
    paper = "https://arxiv.org/abs/2606.02572"
    couples = "mean, deviations, and order along random directions of the batch's embeddings"
    recipe = "digits/visreg"
