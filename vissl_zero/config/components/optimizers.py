"""Keys of the built-in base optimizers beyond the learning rate and weight decay, which all of them have."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SGDConfig:
    """``sgd``."""

    momentum: float = 0.9
    """Weight of the past in the running gradient; 0: plain SGD without state."""
    nesterov: bool = False
    """Nesterov's momentum."""


@dataclass
class AdamConfig:
    """``adam``: https://arxiv.org/abs/1412.6980."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Weights of the past in the running mean and the running square of the gradient."""
    eps: float = 1e-8
    """Added to the root of the running square."""
    amsgrad: bool = False
    """Divide by the largest running square so far."""


@dataclass
class AdamWConfig(AdamConfig):
    """``adamw``: https://arxiv.org/abs/1711.05101."""


@dataclass
class LARSConfig:
    """``lars``: https://arxiv.org/abs/1708.03888, as Barlow Twins uses it."""

    momentum: float = 0.9
    """Weight of the past in the running gradient."""
    nesterov: bool = False
    """Nesterov's momentum."""
    eta: float = 0.001
    """Trust coefficient: the largest update of a tensor over its norm, per unit of learning rate."""
    eps: float = 1e-8
    """Added to the gradient's norm: without it a tensor whose true gradient is zero steps by rounding noise."""
    exclude_bias_and_norm: bool = False
    """Tensors with one dimension keep the plain learning rate; whether they decay is up to regularize_bias and _bn."""
