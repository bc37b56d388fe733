"""Keys of the built-in base optimizers beyond the learning rate and weight decay, which all of them have."""

from __future__ import annotations

from dataclasses import dataclass, field

from vissl_zero.config.constraints import number

# What LARC and LARS do where a recipe does not say: the share of its own norm that a tensor may move per unit of
# learning rate, and what is added to the denominator.
TRUST_COEFFICIENT, TRUST_EPS = 0.001, 1e-8


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
    eta: float = number(TRUST_COEFFICIENT, above=0)
    """Trust coefficient: the largest update of a tensor over its norm, per unit of learning rate."""
    eps: float = number(TRUST_EPS, above=0)
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
    """Newton-Schulz iterations that orthogonalize an update."""
    ns_dtype: str = "bfloat16"
    """Number format of these iterations: bfloat16, float32 or float64."""
    adjust_lr_fn: str = "match_rms_adamw"
    """match_rms_adamw: Muon's updates are as large as AdamW's, for one learning rate; original: the authors' scale."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Weights of the past in AdamW's running mean and square."""
    eps: float = 1e-8
    """Added to the root of AdamW's running square."""
    use_muon_on_heads: bool = False
    """Muon updates the matrices of heads too, not AdamW."""


@dataclass
class NorMuonConfig(MuonConfig):
    """``normuon``: https://arxiv.org/abs/2510.05491; AdamW runs on what is no matrix, and on heads."""

    row_beta: float = number(0.95, least=0, below=1)
    """Weight of the past in the running mean square of each row of the updates."""


@dataclass
class ShampooConfig:
    """``shampoo``: https://arxiv.org/abs/2309.06497, at the step sizes of Adam; Adam runs on what is no matrix."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Weights of the past in the running mean, and in the running squares of elements, rows, and columns."""
    eps: float = number(1e-8, above=0)
    """Added to the root of the running square of an element."""
    matrix_eps: float = number(1e-6, above=0)
    """Added to the matrices of rows and columns before their roots, as a share of their largest eigenvalue."""
    frequency: int = number(10, least=1)
    """Steps between roots."""
    block_size: int = number(1024, least=1)
    """Rows and columns of the blocks that a larger matrix is cut into."""


@dataclass
class AdamW8bitConfig:
    """``adamw_8bit``: https://arxiv.org/abs/2110.02861 with the update of AdamW."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Weights of the past in the running mean and the running square of the gradient."""
    eps: float = number(1e-8, above=0)
    """Added to the root of the running square."""
    block_size: int = number(256, least=1)
    """Successive elements of a tensor that share a scale."""
    min_elements: int = number(4096, least=0)
    """Tensors with fewer elements keep their state in full."""


@dataclass
class LionConfig:
    """``lion``: https://arxiv.org/abs/2302.06675, as timm has it."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """Weights of the past in the update, and in the running mean that is kept."""


@dataclass
class ScheduleFreeConfig:
    """``adamw_schedule_free``: https://arxiv.org/abs/2405.15682, as its authors have it; use a constant lr."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Share of the average in the weights that gradients are taken at, and weight of the past in the running square."""
    eps: float = number(1e-8, above=0)
    """Added to the root of the running square."""
    warmup_steps: int = number(0, least=0)
    """Steps over which the learning rate grows from 0."""
    r: float = 0.0
    """Power of the step's number by which it counts in the average."""
    weight_lr_power: float = 2.0
    """Power of the largest learning rate so far by which a step counts in the average."""


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
