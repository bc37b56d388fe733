"""``OPTIMIZER.param_schedulers``: a value over the course of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AutoLrScaling:
    """``auto_lr_scaling``: learning rates from the batch size, https://arxiv.org/abs/1706.02677."""

    auto_scale: bool = False
    """Scale the schedule so that its peak is base_value at base_lr_batch_size."""
    base_value: float = 0.1
    """Learning rate at ``base_lr_batch_size``."""
    base_lr_batch_size: int = 256
    """Source images per optimizer step over all processes that ``base_value`` is meant for."""
    scaling_type: str = "linear"
    """linear (with the batch) or sqrt (with its root)."""


@dataclass
class Scheduler:
    """One schedule; which keys are used depends on ``name``."""

    name: str = "multistep"
    """constant, linear, cosine, step, multistep or composite."""
    update_interval: str = "epoch"
    """epoch or step: how often the value changes."""
    value: float = 0.1
    """constant: the value."""
    start_value: float = 0.1
    """linear, cosine: the first value."""
    end_value: float = 0.0
    """linear, cosine: the last value."""
    values: list[float] = field(default_factory=lambda: [0.1, 0.01, 0.001])
    """step, multistep: the values in order."""
    milestones: list[int] = field(default_factory=lambda: [30, 60])
    """multistep: epochs at which the next value begins."""
    schedulers: list[Any] = field(default_factory=list)
    """composite: the parts, each with the keys of a schedule."""
    lengths: list[float] = field(default_factory=list)
    """composite: share of the run that each part takes, summing to 1."""
    interval_scaling: list[str] = field(default_factory=list)
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
