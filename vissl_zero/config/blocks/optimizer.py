"""``OPTIMIZER``: the update rule, in every form that VISSL's users write it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vissl_zero.config.blocks.schedulers import ParamSchedulers
from vissl_zero.config.vissl_block import with_vissl_keys


@dataclass
class LarcConfig:
    """``larc_config``: LARC, https://arxiv.org/abs/1708.03888."""

    clip: bool | None = None
    """Never enlarge the learning rate of a tensor (apex's clipping); null: false."""
    trust_coefficient: float | None = None
    """Largest update of a tensor over its norm, per unit of learning rate; null: 0.001."""
    eps: float | None = None
    """Added to the gradient's norm; null: 1e-8."""


@dataclass
class BaseOptimizer:
    """``OPTIMIZER.base_optimizer``: what runs under ``name: zero``. What it leaves out comes from the flat block."""

    name: str | None = None
    """sgd, adam, adamw, lars or one of your own; null: as in the flat block."""
    weight_decay: float | None = None
    """Per step and unit of learning rate; null: as in the flat block."""
    momentum: float | None = None
    """Weight of the past in the running gradient (sgd, lars); null: as in the flat block."""
    nesterov: bool | None = None
    """Nesterov's momentum (sgd, lars); null: as in the flat block."""
    betas: list[float] | None = None
    """Weights of the past in the running mean and square (adam, adamw); null: as in the flat block."""
    use_larc: bool | None = None
    """LARC on top; null: as in the flat block."""
    larc_config: LarcConfig = field(default_factory=LarcConfig)
    """LARC's keys; what is null comes from the flat block."""
    PARAMS: dict[str, Any] = field(default_factory=dict)
    """The optimizer's other keys, such as eps or eta."""


@dataclass
class HeadOptimizerParams:
    """``OPTIMIZER.head_optimizer_params``."""

    use_different_lr: bool = False
    """The heads follow param_schedulers.lr_head instead of lr."""
    use_different_wd: bool = False
    """The heads have the weight decay below."""
    weight_decay: float = 1e-4
    """Of the heads, where ``use_different_wd``."""


@with_vissl_keys("OPTIMIZER")
@dataclass
class Optimizer:
    """``OPTIMIZER``; docs/optimizer_forms.md has every form."""

    name: str | None = None
    """sgd (also when null), adam, adamw, lars, one of your own, or zero (shard base_optimizer's state)."""
    use_zero: bool | None = None
    """Shard the optimizer's state: ZeRO level 1."""
    base_optimizer: BaseOptimizer = field(default_factory=BaseOptimizer)
    """The optimizer under ``name: zero``; wins over the flat keys."""
    weight_decay: float | None = None
    """Per step and unit of learning rate; null: 1e-4."""
    momentum: float | None = None
    """Weight of the past in the running gradient (sgd, lars); null: 0.9."""
    nesterov: bool | None = None
    """Nesterov's momentum (sgd, lars); null: false."""
    betas: list[float] | None = None
    """Weights of the past in the running mean and square (adam, adamw); null: [0.9, 0.999]."""
    use_larc: bool | None = None
    """LARC on top of the optimizer; null: false."""
    larc_config: LarcConfig = field(default_factory=LarcConfig)
    """LARC's keys."""
    PARAMS: dict[str, Any] = field(default_factory=dict)
    """The optimizer's other keys, such as eps or eta."""
    num_epochs: int = 90
    """Passes over the training images."""
    regularize_bn: bool = False
    """Weight decay on norm layers too."""
    regularize_bias: bool = True
    """Weight decay on biases too."""
    non_regularized_parameters: list[str] = field(default_factory=list)
    """Parameters whose full name contains one of these have no weight decay."""
    head_optimizer_params: HeadOptimizerParams = field(default_factory=HeadOptimizerParams)
    """What differs for the heads."""
    param_schedulers: ParamSchedulers = field(default_factory=ParamSchedulers)
    """Learning rate and weight decay over time."""
