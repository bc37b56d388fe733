"""``OPTIMIZER``: the update rule, in every form that VISSL's users write it, and its schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vissl_zero.config.constraints import choice, number
from vissl_zero.vissl.keys import with_vissl_keys


@dataclass
class AutoLrScaling:
    """``auto_lr_scaling``: learning rates from the batch size, https://arxiv.org/abs/1706.02677."""

    auto_scale: bool = False
    """Scale the schedule so that its rate is base_value at base_lr_batch_size."""
    base_value: float = number(0.1, above=0)
    """Learning rate at ``base_lr_batch_size``."""
    base_lr_batch_size: int = number(256, least=1)
    """Source images per optimizer step over all processes that ``base_value`` is meant for."""
    scaling_type: str = choice("linear", "sqrt", default="linear")
    """linear (with the batch) or sqrt (with its root)."""
    keep_shape: bool = False
    """One factor for the whole schedule, warm-up included; false: as VISSL scales, see docs/optimizer_forms.md."""


@dataclass
class Scheduler:
    """One schedule; which keys are used depends on ``name``."""

    name: str = "multistep"
    """constant, linear, cosine, cosine_warm_restart, step, multistep or composite."""
    update_interval: str = choice("step", "epoch", default="epoch")
    """epoch or step: how often the value changes."""
    stretch: float = number(1.0, least=1, most=1000)
    """Lay the schedule out over this many times the run, which ends before it (MSN: 1.25); of a composite, over all of
    its parts."""
    value: float = number(0.1, least=0)
    """constant: the value."""
    start_value: float = number(0.1, least=0)
    """linear, cosine, cosine_warm_restart: the first value."""
    end_value: float = number(0.0, least=0)
    """linear, cosine, cosine_warm_restart: the last value."""
    restart_interval_length: float = number(0.5, above=0, most=1)
    """cosine_warm_restart: length of half a wave, as a share of the schedule."""
    wave_type: str = choice("half", "full", default="half")
    """cosine_warm_restart: half (falls, then starts again at the top) or full (falls and rises again)."""
    lr_multiplier: float = number(1.0, above=0, most=1)
    """cosine_warm_restart: each restart's top over the one before, unless is_adaptive."""
    is_adaptive: bool = False
    """cosine_warm_restart: each restart's top lies on one cosine over the whole schedule."""
    values: list[float] = number([0.1, 0.01, 0.001], least=0)
    """step, multistep: the values in order."""
    milestones: list[int] = number([30, 60], least=0)
    """multistep: epochs at which the next value begins."""
    schedulers: list[Any] = field(default_factory=list)
    """composite: the parts, each with the keys of a schedule."""
    lengths: list[float] = field(default_factory=list)
    """composite: share of the run that each part takes, summing to 1."""
    interval_scaling: list[str] = choice("rescaled", "fixed", default=[])
    """composite: per part, rescaled (runs its whole course within its share) or fixed (is cut out of the run)."""
    auto_lr_scaling: AutoLrScaling = field(default_factory=AutoLrScaling)
    """Learning rates from the batch size."""


@dataclass
class WeightDecayScheduler(Scheduler):
    """A schedule that is off unless named."""

    name: str | None = None  # type: ignore[assignment]
    """As in a schedule of the learning rate; null: no schedule."""


@dataclass
class ParamSchedulers:
    """``OPTIMIZER.param_schedulers``."""

    lr: Scheduler = field(default_factory=Scheduler)
    """Learning rate."""
    lr_head: Scheduler = field(default_factory=Scheduler)
    """Learning rate of the heads, where head_optimizer_params.use_different_lr."""
    weight_decay: WeightDecayScheduler = field(default_factory=WeightDecayScheduler)
    """Weight decay over time."""
    weight_decay_head: WeightDecayScheduler = field(default_factory=WeightDecayScheduler)
    """The heads' weight decay over time; unless named, like the trunk's."""


@dataclass
class LarcConfig:
    """``larc_config``: LARC, https://arxiv.org/abs/1708.03888."""

    clip: bool | None = None
    """Never enlarge the learning rate of a tensor (apex's clipping); null: false."""
    trust_coefficient: float | None = number(None, above=0)
    """Largest update of a tensor over its norm, per unit of learning rate; null: 0.001."""
    eps: float | None = number(None, least=0)
    """Added to the gradient's norm; null: 1e-8."""


@dataclass
class BaseOptimizer:
    """``OPTIMIZER.base_optimizer``: what runs under ``name: zero``. What it leaves out comes from the flat block."""

    name: str | None = None
    """sgd, adam, adamw, lars or one of your own; null: as in the flat block."""
    weight_decay: float | None = number(None, least=0)
    """Per step and unit of learning rate; null: as in the flat block."""
    momentum: float | None = number(None, least=0)
    """Weight of the past in the running gradient (sgd, lars); null: as in the flat block."""
    nesterov: bool | None = None
    """Nesterov's momentum (sgd, lars); null: as in the flat block."""
    betas: list[float] | None = None
    """Weights of the past in the running mean and square (adam, adamw); null: as in the flat block."""
    exclude_bias_and_norm: bool | None = None
    """Tensors with one dimension keep the plain rate (lars); null: as in the flat block."""
    use_larc: bool | None = None
    """LARC on top; null: as in the flat block."""
    larc_config: LarcConfig = field(default_factory=LarcConfig)
    """LARC's keys; what is null comes from the flat block."""
    PARAMS: dict[str, Any] = field(default_factory=dict)
    """The optimizer's other keys, such as eps or eta."""


@dataclass
class ParamGroupKeys:
    """An entry of ``OPTIMIZER.param_groups``."""

    match: str = ""
    """Part of the full names of its parameters; empty: any."""
    max_dims: int | None = number(None, least=0, most=64)
    """Most dimensions that they have; 1: biases, norms, and other vectors; null: any number."""
    lr_factor: float = number(1.0, least=0, most=10**9)
    """Multiplies their learning rate."""
    wd_factor: float = number(1.0, least=0, most=10**9)
    """Multiplies their weight decay."""
    constant_lr: bool = False
    """Their learning rate is the largest that the schedule takes, throughout (SimSiam's predictor)."""


@dataclass
class LinearEvalHead:
    """An entry of ``OPTIMIZER.linear_eval_heads``."""

    lr: float = number(1.0, above=0, most=10**9)
    """Multiplies the head's learning rate."""
    weight_decay: float | None = number(None, least=0)
    """The head's weight decay; null: OPTIMIZER.weight_decay."""
    regularize_bn: bool | None = None
    """Weight decay on the head's norm layers too; null: OPTIMIZER.regularize_bn."""


@dataclass
class HeadOptimizerParams:
    """``OPTIMIZER.head_optimizer_params``."""

    use_different_lr: bool = False
    """The heads follow param_schedulers.lr_head instead of lr."""
    use_different_wd: bool = False
    """The heads have the weight decay below."""
    weight_decay: float = number(1e-4, least=0)
    """Weight decay of the heads; used if ``use_different_wd`` is true."""
    lr_factors: list[float] = number([], above=0, most=10**9)
    """Train a copy of the head per factor of the learning rate, side by side on a frozen trunk; the best counts."""


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
    weight_decay: float | None = number(None, least=0)
    """Per step and unit of learning rate; null: 1e-4."""
    momentum: float | None = number(None, least=0)
    """Weight of the past in the running gradient (sgd, lars); null: 0.9."""
    nesterov: bool | None = None
    """Nesterov's momentum (sgd, lars); null: false."""
    betas: list[float] | None = None
    """Weights of the past in the running mean and square (adam, adamw); null: [0.9, 0.999]."""
    exclude_bias_and_norm: bool | None = None
    """Tensors with one dimension keep the plain rate (lars); null: false."""
    use_larc: bool | None = None
    """LARC on top of the optimizer; null: false."""
    larc_config: LarcConfig = field(default_factory=LarcConfig)
    """LARC's keys."""
    PARAMS: dict[str, Any] = field(default_factory=dict)
    """The optimizer's other keys, such as eps or eta."""
    lr: float | None = number(None, above=0)
    """Peak learning rate: param_schedulers.lr is scaled to it, warm-up included; null: the schedule as written."""
    num_epochs: int = number(90, least=1, most=10**9)
    """Passes over the training images."""
    regularize_bn: bool = False
    """Weight decay on norm layers too."""
    regularize_bias: bool = True
    """Weight decay on biases too."""
    construct_single_param_group_only: bool = False
    """One group of all parameters: norms, biases, and heads decay and follow the rate as the trunk's weights do."""
    param_group_constructor: str = choice("default", "dino", "linear_eval_heads", default="default")
    """default: by trunk, heads, norms, and biases, as the keys around say; linear_eval_heads: as that list says;
    dino: two groups. There neither biases nor what has norm in its name
    decays, and heads have no rate or decay of their own."""
    linear_eval_heads: list[Any] = field(default_factory=list)
    """A block {lr, weight_decay, regularize_bn} for each head, where param_group_constructor is linear_eval_heads."""
    non_regularized_parameters: list[str] = field(default_factory=list)
    """Parameters whose full name contains one of these have no weight decay."""
    layer_decay: float = number(1.0, above=0, most=1)
    """Rates of a transformer's blocks, as BEiT and MAE are fine-tuned. Block i of n learns at the rate times this to
    the power n + 1 - i; layers before the blocks have the power n + 1, those after have 0. 1: all at the same rate."""
    param_groups: list[Any] = field(default_factory=list)
    """Parameters with a rate or decay of their own: a list of {match, max_dims, lr_factor, wd_factor, constant_lr}. The
    first entry that fits a parameter counts; its factors multiply those of layer_decay and the heads."""
    head_optimizer_params: HeadOptimizerParams = field(default_factory=HeadOptimizerParams)
    """What differs for the heads."""
    param_schedulers: ParamSchedulers = field(default_factory=ParamSchedulers)
    """Learning rate and weight decay over time."""
