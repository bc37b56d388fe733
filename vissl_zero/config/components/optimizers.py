"""Keys of the built-in base optimizers beyond the learning rate and weight decay, which all of them have."""

from __future__ import annotations

from dataclasses import dataclass, field

from vissl_zero.config.constraints import number


@dataclass
class SGDConfig:
    """``sgd``."""

    momentum: float = number(0.9, least=0)
    """Weight of the past in the running gradient; 0: plain SGD without state."""
    nesterov: bool = False
    """Nesterov's momentum."""


@dataclass
class AdamConfig:
    """``adam``: https://arxiv.org/abs/1412.6980."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Weights of the past in the running mean and the running square of the gradient."""
    eps: float = number(1e-8, above=0)
    """Added to the root of the running square."""
    amsgrad: bool = False
    """Divide by the largest running square so far."""


@dataclass
class AdamWConfig(AdamConfig):
    """``adamw``: https://arxiv.org/abs/1711.05101."""


@dataclass
class LARSConfig:
    """``lars``: https://arxiv.org/abs/1708.03888, as Barlow Twins uses it."""

    momentum: float = number(0.9, least=0)
    """Weight of the past in the running gradient."""
    nesterov: bool = False
    """Nesterov's momentum."""
    eta: float = number(0.001, above=0)
    """Trust coefficient: the largest update of a tensor over its norm, per unit of learning rate."""
    eps: float = number(1e-8, above=0)
    """Added to the gradient's norm: without it a tensor whose true gradient is zero steps by rounding noise."""
    exclude_bias_and_norm: bool = False
    """Tensors with one dimension keep the plain learning rate; whether they decay is up to regularize_bias and _bn."""


@dataclass
class MuonConfig:
    """``muon``: https://kellerjordan.github.io/posts/muon/; AdamW runs on what is no matrix, and on heads."""

    momentum: float = 0.95
    """Weight of the past in Muon's running gradient."""
    nesterov: bool = True
    """Nesterov's momentum in Muon."""
    ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalise an update, in bfloat16."""
    adjust_lr_fn: str = "match_rms_adamw"
    """match_rms_adamw: Muon's updates are as large as AdamW's, for one learning rate; original: the authors' scale."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Weights of the past in AdamW's running mean and square."""
    eps: float = 1e-8
    """Added to the root of AdamW's running square."""
    use_muon_on_heads: bool = False
    """Muon updates the matrices of heads too, not AdamW."""


@dataclass
class LambConfig:
    """``lamb``: https://arxiv.org/abs/1904.00962, as timm has it; clipping is ZERO.clip_grad's."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Weights of the past in the running mean and the running square of the gradient."""
    eps: float = 1e-6
    """Added to the root of the running square."""
    trust_clip: bool = False
    """The rate of a tensor is at most the learning rate (LAMBC)."""
    always_adapt: bool = False
    """Tensors without weight decay have a rate of their own too."""


@dataclass
class AdafactorConfig:
    """``adafactor``: https://arxiv.org/abs/1804.04235, as torch has it."""

    beta2_decay: float = -0.8
    """Exponent by which the weight of the past in the running square grows to 1 over the steps."""
    clip_threshold: float = 1.0
    """Largest root mean square of a tensor's update, per unit of learning rate."""
