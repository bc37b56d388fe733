"""LARS: momentum SGD on gradients that were scaled tensor by tensor."""

from __future__ import annotations

import torch

from vissl_zero.config.components.optimizers import LARSConfig
from vissl_zero.optim.adaptation import Lars
from vissl_zero.optim.elementwise import Groups, sgd
from vissl_zero.registry import OPTIMIZERS


@OPTIMIZERS.register("lars", config=LARSConfig)
def lars(
    groups: Groups,
    momentum: float = 0.9,
    nesterov: bool = False,
    eta: float = 0.001,
    eps: float = 1e-8,
    exclude_bias_and_norm: bool = False,
) -> tuple[torch.optim.Optimizer, Lars]:
    """SGD with layer-wise adaptive rates, as Barlow Twins has it."""
    return sgd(groups, momentum, nesterov), Lars(eta, eps, exclude_bias_and_norm)
