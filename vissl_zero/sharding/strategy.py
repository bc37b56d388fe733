"""The one interface that every ZeRO level and engine implements, and all that the training loop may call.

The loop never asks which level or engine runs. Every method is a collective unless it says otherwise: all ranks of the
world must call it, in the same order.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.bare import Fill, materialize_
from vissl_zero.optim.adaptation import Adaptation
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.update_rule import UpdateRule, update_rule
from vissl_zero.sharding.float8 import require_float8
from vissl_zero.sharding.replica_check import equal_values

if TYPE_CHECKING:
    from vissl_zero.sharding.state import Part, SavedState

# Given torch-style groups (dicts with "name", "params", "lr", "weight_decay") of *local shards*, returns the optimizer
# to run on them and the layer-wise adaptation (LARC, LARS) to apply to the gradients first, if any.
OptimizerFactory = Callable[[list[dict[str, Any]]], tuple[torch.optim.Optimizer, Adaptation | None]]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on every rank.

    Attributes:
        grad_norm: global L2 norm of the unscaled gradients before clipping, a 0-d tensor on the device (reading it
            synchronises).
        skipped: the gradients held an inf or NaN under dynamic loss scaling, so nothing was updated.
        loss_scale: the scale that was used, 1.0 without loss scaling.
        names: full names of the parameters that took part, in the order of the optimizer's groups.
        grad_sq: (len(names),) squared norms of their gradients, on the device.
    """

    grad_norm: Tensor
    skipped: bool
    loss_scale: float
    names: Sequence[str]
    grad_sq: Tensor

    def nonfinite_gradients(self) -> list[str]:
        """Full names of the parameters whose gradient held an inf or NaN on any rank. Waits for the device."""
        finite = self.grad_sq.isfinite().tolist()
        return [name for name, is_finite in zip(self.names, finite, strict=True) if not is_finite]

    @property
    def is_stuck(self) -> bool:
        """Skipped with a loss that was not scaled up any more: the next steps would be skipped as well."""
        return self.skipped and self.loss_scale <= 1.0


@dataclass(frozen=True)
class Bytes:
    """Memory of this rank by kind, in bytes. See ``sharding/memory.py`` for how each is counted.

    Attributes:
        params: parameters: this rank's shards, and whole ones where units are gathered at this moment.
        grads: gradients, counted in the same way.
        optimizer: state of the optimizer, its step counters apart.
        activations: what the forward pass that was measured kept alive for the backward pass.
        buffers: running statistics and other buffers, and the running average of the weights.
        teacher: parameters and buffers of the teacher in memory: its shards unless they are on a disk, and whole
            parameters where units are gathered.
        peak: largest so far: resident memory on CPU, allocated on CUDA.
        params_step_peak: parameters at the peak of a step, by the wrap plan: shards, and the units that are
            whole at once.
    """

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    peak: int = 0
    params_step_peak: int = 0
    teacher: int = 0


@dataclass(frozen=True)
class WholeTensor:
    """A parameter or buffer that can be gathered in full, one at a time.

    Attributes:
        name: full name.
        dtype, shape: of the full tensor.
        read: gathers it; only rank 0 uses the result. A collective: every rank reads the same ones in the same order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class Sharded(ABC):
    """A model and its optimizer under one ZeRO level of one engine.

    Attributes:
        model: call this (``sharded.model(crops)``), in training and evaluation; under no_grad too.
        optimizer: torch optimizer over this rank's shards. Set ``lr`` and ``weight_decay`` in its ``param_groups``
            (each has the ``name`` of its ParamGroup); never call its ``step`` or ``zero_grad``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients are communicated as late as the level allows."""

    @abstractmethod
    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Accumulate gradients of ``loss * weight`` (averaged over ranks), scaled for half precision if need be.

        Args:
            loss: 0-d, this rank's mean over its own samples.
            weight: share of this micro-batch in the step times the correction for uneven batches:
                ``num_local * world_size / num_samples_of_the_step``.
        """

    @abstractmethod
    def freeze(self, names: Collection[str]) -> None:
        """Full names of parameters that ``step`` must leave untouched until the next ``freeze``. Not a collective."""

    @abstractmethod
    def step(self) -> StepResult:
        """Unscale, agree on inf, clip, adapt (LARC/LARS), update. One all-reduce for all norms."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradients; after ``step``, before the next forward. Not a collective."""

    @abstractmethod
    def retire_gradients(self) -> None:
        """After ``step``, in a loop of the user's: free gradients as ``zero_grad`` does, and refuse their further use.

        At level 0 they stay, as under DistributedDataParallel.
        """

    @abstractmethod
    def normalize_rows(self, names: Collection[str]) -> None:
        """Divide each row (dim 0) of the named 2-d parameters by its L2 norm, in place."""

    @property
    @abstractmethod
    def teacher(self) -> nn.Module:
        """The teacher, after ``adopt_teacher``: call it without gradient. Every rank must, in the same order."""

    @abstractmethod
    def adopt_teacher(self, teacher: nn.Module, follows: bool = True, fill: Fill | None = None) -> None:
        """Shard a frozen model as the trained one is sharded. Changed in place.

        Args:
            teacher: if it ``follows``, a copy of the model, possibly without some parts; else any model.
            follows: ``follow`` will be called, and batch norm takes the statistics of the teacher's own batches; else
                it runs in evaluation mode throughout.
            fill: as for ``Strategy.shard``.

        Raises:
            VisslZeroError: this engine cannot cut it as the model.
        """

    @abstractmethod
    def follow(self, momentum: float, unit_rows: Collection[str] = ()) -> None:
        """Move the teacher: ``momentum * teacher + (1 - momentum) * model``; parameters only. Not a collective.

        Args:
            momentum: 0 copies.
            unit_rows: full names of 2-d parameters whose rows are brought back to unit length.
        """

    @abstractmethod
    def full_teacher_state(self) -> dict[str, Tensor]:
        """As ``full_state``, of the teacher, buffers made equal on all ranks first; empty without one."""

    @abstractmethod
    def average(self, decay: float) -> None:
        """Move the running average of all parameters and buffers: ``decay * average + (1 - decay) * value``.

        The first call, and a decay of 0, copy. Each rank averages its own shards. Not a collective.
        """

    @abstractmethod
    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model holds the running average in place of its weights: to evaluate or export, not to train.

        Raises:
            RuntimeError: ``average`` was never called.
        """

    @abstractmethod
    def evaluated(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights to evaluate and export; afterwards those to train, bit for bit.

        They differ where the optimizer has ``eval`` and ``train`` (schedule-free ones); elsewhere this does nothing.
        """

    @abstractmethod
    def consolidate_buffers(self) -> None:
        """Make buffers equal on all ranks: floating-point ones become the mean over ranks, others rank 0's."""

    @abstractmethod
    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, ``named_parameters`` yields full tensors on every rank (read only). Takes the memory of all."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full names (no wrapper prefix) and this rank's shard, or the full tensors inside ``full_parameters``."""

    @abstractmethod
    def whole_tensors(self) -> list[WholeTensor]:
        """Parameters and saved buffers, in the same order on every rank, to be gathered one by one.

        Not a collective itself.
        """

    @abstractmethod
    def whole_teacher_tensors(self) -> list[WholeTensor]:
        """As ``whole_tensors``, of the teacher, buffers made equal on all ranks first; empty without one."""

    @abstractmethod
    def full_state(self) -> dict[str, Tensor]:
        """Full parameters and buffers on the CPU, gathered one by one: the dict on rank 0, empty elsewhere."""

    @abstractmethod
    def plain_state(self, of_teacher: bool = False) -> dict[str, Any]:
        """What ``state_dict()`` of the model would be if it were not sharded: on rank 0's CPU, empty on other ranks.

        All names of what is shared, what the model's hooks make of it, and the extra state of modules. Tensors are
        gathered one by one.

        Args:
            of_teacher: the teacher's, in place of the model's.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's shards of parameters, optimizer state, buffers and loss scale, with their place in the whole."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` of the same level, engine, world size and rank gave.

        Or take over optimizer state alone, as plain torch saved it: the same complete dict on every rank.

        Raises:
            CheckpointError: it comes from another layout or another model.
        """

    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """How the state is cut: engine, level, shard_group_size, world_size, rank. Not a collective."""

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """What this rank stores of parameters and optimizer state: over all ranks, each element once.

        Not a collective. Memory is shared with training: read it before the next step (``before_next_change``).
        """

    @abstractmethod
    def before_next_change(self, wait: Callable[[], object]) -> None:
        """Call ``wait`` once, before anything that ``parts`` returned changes, because a reader still uses it.

        Forward and backward passes change none of it, so training continues in the meantime. ``wait`` must return in
        the end, and call no collective. Not a collective.
        """

    @abstractmethod
    def scalars(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is one number per parameter, of those this rank answers for. Not a collective."""

    @abstractmethod
    def loss_scale_state(self) -> dict[str, float] | None:
        """The loss scaler, equal on every rank; None without one. Not a collective."""

    @abstractmethod
    def group_facts(self) -> list[dict[str, Any]]:
        """Parameter groups: names of their parameters and their options, equal on every rank. Not a collective."""

    @abstractmethod
    def buffers(self) -> dict[str, Tensor]:
        """Buffers that belong into a checkpoint, by full name; memory is shared. Not a collective."""

    @abstractmethod
    def replicated(self) -> dict[str, Tensor]:
        """Tensors that must be equal on all ranks, by full name; memory is shared. Not a collective."""

    @abstractmethod
    def restore(self, saved: SavedState, with_teacher: bool = True) -> None:
        """Take parameters, optimizer state and loss scale from a store, whatever layout wrote it.

        Each rank reads the runs of elements it needs, straight into where they rest. Buffers are not touched.

        Args:
            saved: the store.
            with_teacher: false where it has none: the teacher stays as it is.

        Raises:
            CheckpointError: it is of another model, or was trained with another kind of loss scaling.
        """

    @abstractmethod
    def ledger(self) -> Bytes:
        """This rank's memory by kind now. Not a collective."""

    @abstractmethod
    def measure_activations(self) -> AbstractContextManager[None]:
        """Around one forward pass: count what it keeps alive, for ``ledger``. Slow; meant for the first step."""

    def close(self) -> None:
        """Remove files that hold offloaded state; no step after it. Not a collective."""
        close = getattr(self.optimizer, "close", None)
        if close is not None:
            close()

    @abstractmethod
    def describe(self) -> str:
        """The wrap plan for people: units, what stays float32, what is recomputed. Not a collective."""


_WHOLE_TENSORS = (
    "The optimizer needs full tensors: each is gathered to one rank, updated there and sent back. A step moves "
    "gradients once more and parameters twice more than with an element-wise optimizer; state is 1/N on each rank."
)


class Strategy(ABC):
    """Turns a built model into a ``Sharded`` one. Registered in ``STRATEGIES`` under the engine's name."""

    def shard(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory,
        plan: ShardingPlan,
        device: torch.device,
        fill: Fill | None = None,
    ) -> Sharded:
        """Shard ``model`` (initialised, on any device, equal on all ranks) as ``plan`` says.

        Args:
            model: whole model; it is changed in place.
            groups: parameter groups by full parameter name; every trainable parameter in exactly one.
            build_optimizer: called with the local shards; before that, above level 0, with tiny tensors, to find out
                whether its update may be cut.
            plan: level, thresholds, precision.
            device: where to train.
            fill: gives values to what is on the meta device, unit by unit; by default through ``reset_parameters``.
        Raises:
            ConfigError: the combination cannot be run, with the reason and what to use instead; the model is as it
                was.
        """
        self._check(plan, device)
        require_float8(model, plan.float8, device)
        # Before _shard, which changes the model: a refusal must leave it as it was.
        rule = update_rule_of(build_optimizer, model, groups, plan)
        if rule is UpdateRule.PER_TENSOR:
            plan = dataclasses.replace(plan, needs_whole_tensors=True)
            if collectives.rank() == 0 and plan.level:
                logging.getLogger(__name__).warning("%s", _WHOLE_TENSORS)
        with equal_values(fill or partial(materialize_, seed=plan.seed), model, device) as checked:
            return self._shard(model, groups, build_optimizer, plan, device, checked)

    @abstractmethod
    def _check(self, plan: ShardingPlan, device: torch.device) -> None:
        """Raise ConfigError for what this engine cannot do."""

    @abstractmethod
    def _shard(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        build_optimizer: OptimizerFactory,
        plan: ShardingPlan,
        device: torch.device,
        fill: Fill,
    ) -> Sharded:
        """``shard``, once everything has been checked."""


def update_rule_of(
    build_optimizer: OptimizerFactory, model: nn.Module, groups: Sequence[ParamGroup], plan: ShardingPlan
) -> UpdateRule:
    """What the update of one element depends on: see ``optim/update_rule.py``.

    Not tried at level 0, unless all levels are to give the same bits or the optimizer gets pieces there too.

    Args:
        build_optimizer: is called with tiny tensors of as many dimensions as the parameters have.
        model: whole, on any device.
        groups: parameter groups by full name.
        plan: what is to run.
    Raises:
        ConfigError: its update couples tensors, or cannot be tried, or needs full tensors where ``plan`` asks for
            something that cannot give them.
    """
    if plan.level == 0 and not (plan.deterministic or plan.precision.rounding):
        return UpdateRule.ELEMENT_WISE
    params = dict(model.named_parameters())
    shapes = [[tuple(params[name].shape) for name in group.params] for group in groups]
    optimizer, _ = build_optimizer(
        [
            {
                "name": group.name,
                # The trial makes tensors of its own: only the number of dimensions matters to the constructor.
                "params": [nn.Parameter(torch.zeros([min(n, 2) for n in shape])) for shape in own],
                "lr": 0.0,
                "weight_decay": group.weight_decay,
            }
            for group, own in zip(groups, shapes, strict=True)
        ]
    )
    is_on_disk = plan.offload_optimizer.is_on_disk or plan.offload_params.is_on_disk  # streamed in runs of elements
    is_flattened = (plan.engine == "fairscale" and plan.level == 3) or is_on_disk
    rule = update_rule(optimizer, shapes, is_flattened=is_flattened or bool(plan.precision.rounding))
    if rule is UpdateRule.PER_TENSOR and plan.precision.rounding:
        must = "updates full tensors, which cannot go with parameters in bfloat16: they are updated piece by piece"
        fix = "Use an element-wise optimizer such as AdamW, or config.TRAINER.DTYPE=float32 (no zero.rounding)."
        raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, fix)])
    if rule is UpdateRule.PER_TENSOR and plan.engine == "fairscale":
        name, must = type(optimizer).__name__, "updates full tensors, which cannot go with the fairscale engine"
        fix = "Use an element-wise optimizer such as AdamW, or ZERO.ENGINE: torch."
        raise ConfigError([Problem("optimizer", name, must, fix)])
    return rule
