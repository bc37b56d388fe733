"""A model and its optimizer under one ZeRO level: all that the training loop may call.

The loop never asks which level or engine runs. Every method is a collective unless its docstring says otherwise: all
ranks of the world must call it, in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vissl_zero import collectives
from vissl_zero.errors import CheckpointError, VisslZeroError
from vissl_zero.models.bare import Fill, materialize_
from vissl_zero.optim.adaptation import Adaptation, OptimizerFactory
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.checks.replica_check import ParameterGuard, StepCheck, equal_values, option_text, text_digest
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator
from vissl_zero.sharding.memory import (
    ActivationCounter,
    Bytes,
    Storages,
    gradient_storages,
    optimizer_storages,
    parameter_storages,
    peak_bytes,
)
from vissl_zero.sharding.model.precision import LossScale, rounded
from vissl_zero.sharding.model.prepare import prepare
from vissl_zero.sharding.model.wrap_plan import WrapPlan
from vissl_zero.sharding.state import teacher as teaching
from vissl_zero.sharding.state.missing_gradient import PLAIN_BACKWARD, SPENT
from vissl_zero.sharding.state.rank_state import layout_of, load_rank_state, load_torch_state, rank_state
from vissl_zero.sharding.state.saved_state import (
    NO_TEACHER,
    Part,
    SavedState,
    average_parts,
    check_teacher,
    group_facts,
    parts_of,
    restore_average,
    restore_state,
    restore_teacher,
    saved_buffers,
    scalars_of,
    teacher_parts,
)
from vissl_zero.sharding.state.shard import Shard, WholeTensor, shards_of, whole_shard
from vissl_zero.sharding.state.sharded_tensor import whole
from vissl_zero.sharding.state.teacher import WeightAverage
from vissl_zero.sharding.torch_private import as_plain_tensors, copy_versions, marks
from vissl_zero.sharding.update.stepper import Clipping, Stepper, StepResult
from vissl_zero.sharding.update.whole_tensors import WholeTensorOptimizer

# Set in groups by schedules, where the optimizer's own defaults may lack them.
_SCHEDULED_OPTIONS = {"lr", "weight_decay"}


@dataclass(frozen=True)
class ModelSetup:
    """The parts that every level is built from.

    Attributes:
        module: the model without wrapper; its names are the full names.
        groups: parameter groups by full name.
        build_optimizer: called once with this rank's shards; None for a model that is not trained.
        plan: level, clipping, precision.
        wrap_plan: the units.
        device: device of the computation.
        fill: initializes a unit whose parameters are on the meta device.
    """

    module: nn.Module
    groups: Sequence[ParamGroup]
    build_optimizer: OptimizerFactory | None
    plan: ShardingPlan
    wrap_plan: WrapPlan
    device: torch.device
    fill: Fill

    @property
    def trained(self) -> set[str]:
        """Full names of the parameters that the optimizer updates."""
        return {name for group in self.groups for name in group.params}


class ShardedModel:
    """A model whose parameters this rank holds whole or in part, with its optimizer.

    Subclasses define how micro-batches communicate (``micro_batch``) and what happens before shards change
    (``_before_shards_change``).

    Attributes:
        model: call this (``sharded.model(crops)``), in training and evaluation; under no_grad too.
        optimizer: torch optimizer over this rank's shards. Set ``lr`` and ``weight_decay`` in its ``param_groups``
            (each has the ``name`` of its ParamGroup); never call its ``step`` or ``zero_grad``.
        scales_loss: gradients must come from ``backward``, which scales the loss; ``step`` refuses others.

    Args:
        setup: model, optimizer and plans. The model is already sharded, by the subclass.
        group: the ranks among which parameters are sharded; None where every rank holds them whole.
        shards: this rank's part of every parameter; None: the parts that ``fully_shard`` has cut.
        model: wrapper to call; None: the model itself.
        comm: CPU communicator of the ranks of ``group``; None: torch's collectives.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        setup: ModelSetup,
        group: dist.ProcessGroup | None,
        shards: Iterable[Shard] | None = None,
        model: nn.Module | None = None,
        comm: CpuCommunicator | None = None,
    ):
        module, groups, build_optimizer, plan = setup.module, setup.groups, setup.build_optimizer, setup.plan
        self.model = module if model is None else model
        self._module = module
        self._plan = plan
        self._wrap_plan = setup.wrap_plan
        self._device = setup.device
        shard_table = shards_of(module, group) if shards is None else shards
        self._shards = {shard.name: shard for shard in shard_table}
        # In the order of the groups, the same on every rank: messages pair norms and flags by position.
        self._trained = [self._shards[name] for parameter_group in groups for name in parameter_group.params]
        optimizer_groups: list[dict[str, Any]] = [
            {
                "name": parameter_group.name,
                "params": [self._shards[name].local for name in parameter_group.params],
                # A placeholder: rates are set in these groups before each step.
                "lr": 0.0,
                "weight_decay": parameter_group.weight_decay,
            }
            for parameter_group in groups
        ]
        adaptation: Adaptation | None
        if plan.needs_whole_tensors and build_optimizer is not None and group is not None:
            # Without a group every rank holds full tensors already: the optimizer runs on them directly.
            whole = WholeTensorOptimizer(
                build_optimizer, optimizer_groups, self._trained, group, plan.offload_optimizer, comm
            )
            self.optimizer, adaptation = whole, whole.adaptation
        else:
            build = rounded(build_optimizer, plan, self._trained) if build_optimizer else _no_optimizer
            self.optimizer, adaptation = build(optimizer_groups)
        self._loss_scale = LossScale() if plan.precision.use_loss_scale else None
        self.scales_loss = self._loss_scale is not None
        self._has_scaled = False
        self._stepper = Stepper(self._trained, self.optimizer, adaptation, Clipping.of(plan), self._loss_scale, group)
        self._step_check = StepCheck(setup.device)
        # Last: the guard records the address of each parameter, and the lines above may still move one.
        self._parameter_guard = ParameterGuard(module, self._shards.values(), self.optimizer)
        self._average: WeightAverage | None = None
        self._teacher: ShardedModel | None = None
        self._teacher_follows = True
        self._frozen: frozenset[str] = frozenset()
        self._activation_bytes = 0
        self._whole: dict[str, Tensor] | None = None
        self._readers: list[Callable[[], object]] = []

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Run forward and backward of one micro-batch inside; communicate gradients as late as the level allows."""
        raise NotImplementedError(f"{type(self).__name__} trains nothing")

    def _before_shards_change(self) -> None:
        """Drop full copies of parameters, which a change of the shards would make stale."""

    def _after_update(self) -> None:
        """Send the rows that the optimizer has just updated to the ranks that hold copies of them. A collective."""

    def _after_shards_change(self) -> None:
        """Send shards that were set from outside to the ranks that hold copies of them. May be a collective."""

    def _publish_shards(self) -> None:
        """Send shards that this package has set to the ranks with copies of them; the loop has written nothing."""
        with self._parameter_guard.own_writes():
            self._after_shards_change()

    def _backward_pass(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass that ``backward`` runs."""
        return nullcontext()

    def _problem(self) -> str | None:
        """Explain why an update would be wrong: the loop changed something that sharding does not see; else None."""
        if any(shard.is_spent for shard in self._trained):
            return SPENT
        return self._parameter_guard.problem()

    def _facts(self) -> dict[str, int]:
        """Collect the facts that must be equal on every rank in this step."""
        names = self.optimizer.defaults.keys() | _SCHEDULED_OPTIONS
        options = [
            [(name, *map(option_text, pytree.tree_leaves(group[name]))) for name in sorted(names & group.keys())]
            for group in self.optimizer.param_groups
        ]
        with as_plain_tensors():  # else each read of an attribute calls Python
            trained = [shard.source.requires_grad for shard in self._trained]
        return {
            "the learning rate, weight decay or another option of a group. Set them to the same values on every "
            "rank": text_digest(options),
            "which parameters are frozen. Freeze the same ones on every rank": text_digest(
                sorted(self._frozen), trained
            ),
            "what the loop has written into parameters. Write the same on every rank: load one file on all of them, "
            "draw noise from one seed, and run no optimizer in a hook": self._parameter_guard.written(),
        }

    def _has_gradients(self) -> Sequence[bool]:
        """Return per trained parameter whether this rank had a gradient; empty where an absent gradient stays None."""
        return ()

    def _average_replicated(self) -> None:
        """Average the gradients of parameters that every rank holds whole, unless backward has done so."""

    def _buffers_in_use(self) -> list[Tensor]:
        """List communication buffers: the forward pass allocates them, but they are no activations."""
        return []

    def backward(self, loss: Tensor, weight: float = 1.0, retain_graph: bool = False) -> None:
        """Accumulate gradients of ``loss * weight`` (averaged over ranks), scaled for half precision if needed.

        Args:
            loss: 0-d, this rank's mean over its own samples.
            weight: share of this micro-batch in the step times the correction for uneven batches:
                ``num_local * world_size / num_samples_of_the_step``.
            retain_graph: keep the graph for another backward pass, as in torch.
        """
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        self._has_scaled = True  # step() refuses gradients of a plain loss.backward()
        with self._backward_pass():
            (loss * (weight * scale)).backward(retain_graph=retain_graph)

    def freeze(self, names: Collection[str]) -> None:
        """Exclude parameters, by full name, from every ``step`` until the next ``freeze``.

        Not a collective.

        Raises:
            ValueError: a name is not a parameter's.
        """
        if unknown := sorted(set(names) - self._shards.keys()):
            raise ValueError(f"freeze: not parameters of the model: {', '.join(unknown)}")
        self._frozen = frozenset(names)

    def step(
        self, with_histograms: bool = False, before_update: Callable[[Tensor], object] | None = None
    ) -> StepResult:
        """Unscale, agree on inf, clip, adapt (LARC/LARS), update. One all-reduce for all norms.

        Args:
            with_histograms: count weights and gradients too, before clipping; the same on every rank.
            before_update: called on every rank with the global L2 norm of the gradients, 0-d, while parameters,
                optimizer state, teacher and loss scale are those before the step. It may call collectives.
        """
        # Full copies would keep the old values after the update.
        self._before_shards_change()
        # Before take_grad, which reads the gradients that this averages.
        self._average_replicated()
        for shard in self._trained:
            shard.take_grad()
        # The last moment to refuse: nothing has been updated yet, and all ranks learn of it together.
        has_scaled, self._has_scaled = self._has_scaled or not self.scales_loss, False
        marks = [*self._has_gradients(), has_scaled]
        *present, is_scaled = self._step_check.require_equal(self._problem(), self._facts(), marks)
        # Not for a rank that had no loss in this step, and gets the mean of the others' gradients.
        if not is_scaled and any(shard.local.grad is not None for shard in self._trained):
            raise VisslZeroError(PLAIN_BACKWARD)
        # ``present`` is empty if a gradient that no rank has is None already.
        for shard, is_present in zip(self._trained, present, strict=False):
            # No rank had this gradient. The zeros that filled its message would let decay and momentum move the
            # parameter.
            if not is_present:
                shard.forget_grad()
        # An asynchronous checkpoint may still copy the shards that are about to change.
        self._wait_for_readers()
        with self._parameter_guard.own_step():
            result = self._stepper.step(self._frozen, with_histograms, before_update)
            # Inside own_step: rows that arrive from other ranks are no writes of the loop.
            if not result.skipped:  # equal on all ranks, so all of them call the collective
                self._after_update()
        return result

    def zero_grad(self) -> None:
        """Drop the gradients of the trained parameters. Call it after ``step``, before the next forward pass.

        Other parameters keep their gradients: the loop may train them by another optimizer. Not a collective.
        """
        for shard in self._trained:
            shard.forget_grad()

    def gradient_marks(self) -> list[tuple[int, ...] | None]:
        """Return address and version counters of each gradient; any write changes them. Not a collective."""
        return marks([shard.source for shard in self._trained if not shard.is_on_disk])

    def retire_gradients(self) -> None:
        """Free the gradients after ``step`` in a user's loop, and refuse their further use.

        At level 0 gradients stay, as under DistributedDataParallel.
        """
        with_gradient = [shard for shard in self._trained if shard.local.grad is not None]
        # Clears is_spent too, so shards are marked after it.
        self.zero_grad()
        for shard in with_gradient:
            shard.mark_spent()

    def normalize_rows(self, names: Collection[str]) -> None:
        """Divide each row (dim 0) of the named 2-d parameters by its L2 norm, in place."""
        if names:
            self._wait_for_readers()
            self._before_shards_change()
        with self._parameter_guard.own_writes():
            for name in names:
                self._shards[name].normalize_rows()

    @property
    def teacher(self) -> nn.Module:
        """The teacher, after ``adopt_teacher``. Every rank must call it, without gradient, in the same order."""
        assert self._teacher is not None, "adopt_teacher was never called"
        return self._teacher.model

    def adopt_teacher(self, teacher: nn.Module, follows: bool = True, fill: Fill | None = None) -> None:
        """Shard ``teacher``, a frozen model, with the plan of the trained one. In place.

        Args:
            teacher: if it ``follows``, a copy of the model, possibly without some parts; else any model.
            follows: True: ``follow`` moves the teacher, and its batch norm uses the statistics of its own batches.
                False: the teacher stays in evaluation mode, and saved states leave it out: ``fill`` rebuilds it.
            fill: see ``Strategy.shard``.

        Raises:
            VisslZeroError: this engine cannot cut the teacher as it cuts the model.
        """
        if follows:
            teaching.require_wide(self._plan.precision, "a teacher that follows the student")
        wrap_plan = prepare(teacher, self._plan, self._device)
        with equal_values(fill or partial(materialize_, seed=self._plan.seed), teacher, self._device) as checked:
            setup = ModelSetup(teacher, (), None, self._plan, wrap_plan, self._device, checked)
            self._teacher = self._shard_teacher(setup)
        self._teacher_follows = follows
        if follows:
            teaching.require_same_layout(self._teacher, self)
        teaching.set_modes(self._teacher.model, has_own_statistics=follows)

    def _saved_teacher(self) -> ShardedModel | None:
        """Return the teacher if it follows the student: only training can reproduce its weights, so they are saved."""
        return self._teacher if self._teacher_follows else None

    @torch.no_grad()
    def teacher_checksum(self) -> int | None:
        """Compute a checksum of a teacher that saved states leave out; None without one. Collective.

        Returns:
            The sum of the bits of all elements in float32, read as int32: the same on every rank and in every layout.
        """
        if self._teacher is None or self._teacher_follows:
            return None
        buffers = self._teacher.buffers().values() if collectives.rank() == 0 else ()  # equal on every rank
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for values in (*(part.read for part in teacher_parts(self._teacher._shards)), *(b.detach for b in buffers)):
            # Integers, whose sum does not depend on its order: layouts cut the elements differently. A sum of floats
            # would differ.
            total += values().float().contiguous().view(torch.int32).sum(dtype=torch.int64).to(total.device)
        return int(collectives.all_reduce_sum(total))

    def follow(self, momentum: float, unit_rows: Collection[str] = (), moves_anchor: bool = False) -> None:
        """Move the teacher: ``momentum * teacher + (1 - momentum) * model``; parameters only. Not a collective.

        Args:
            momentum: 0 copies.
            unit_rows: full names of 2-d parameters of the teacher whose rows are first divided by their L2 norms.
            moves_anchor: copy the teacher's trunk into its anchor; False: the anchor stays.
        """
        assert self._teacher is not None
        self._wait_for_readers()
        teaching.follow(self._teacher, self, momentum, unit_rows, moves_anchor)

    def _shard_teacher(self, setup: ModelSetup) -> ShardedModel:
        """Keep the teacher whole on every rank, like the student; engines that cut parameters override this."""
        setup.fill(setup.module, "")
        setup.module.to(setup.device)
        return _WholeTeacher(setup)

    def average(self, decay: float) -> None:
        """Move the running average of all parameters and buffers: ``decay * average + (1 - decay) * value``.

        The first call, and a decay of 0, copy. Each rank averages its own shards. Not a collective.
        """
        # A checkpoint may still read the averages: parts() hands out their own memory.
        self._wait_for_readers()
        if self._average is None:
            teaching.require_wide(self._plan.precision, "a running average of the weights")
            self._average = WeightAverage(self._shards.values(), dict(self._saved_buffers()))
        self._average.update(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Exchange the weights for their running average, to evaluate or export, not to train. A context.

        Cost: a clone of one tensor at a time.

        Raises:
            RuntimeError: ``average`` was never called.
        """
        if self._average is None:
            raise RuntimeError("There is no running average yet: call average(decay) after each step.")
        self._swap_average(self._average)
        try:
            yield
        finally:
            self._swap_average(self._average)

    def _swap_average(self, average: WeightAverage) -> None:
        self._wait_for_readers()
        self._before_shards_change()
        average.swap()
        self._publish_shards()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Swap in the weights for evaluation and export; on exit, restore those for training, bit for bit. A context.

        Only optimizers with ``eval`` and ``train`` (schedule-free ones) have two sets; otherwise this does nothing.
        Cost: a copy of this rank's trainable shards.
        """
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # the base optimizer inside fairscale's OSS
        if not (hasattr(optimizer, "eval") and hasattr(optimizer, "train")):
            yield
            return
        self._wait_for_readers()
        self._before_shards_change()
        # ``optimizer.train()`` would restore the weights with rounding errors, so keep a copy.
        saved = [shard.values().clone() for shard in self._trained]
        optimizer.eval()
        # ``eval`` updates only ``local``. With offload, the model computes with a copy, which must follow.
        for shard in self._trained:
            shard.publish()
        self._publish_shards()
        try:
            yield
        finally:
            self._before_shards_change()
            # The evaluation has gathered units again, from the weights that are about to be replaced.
            optimizer.train()
            for shard, values in zip(self._trained, saved, strict=True):
                shard.assign(values)
            self._publish_shards()

    @torch.no_grad()
    def consolidate_buffers(self) -> None:
        """Make buffers equal on all ranks: floating-point ones become the mean over ranks, others rank 0's."""
        if collectives.world_size() == 1:
            return
        for buffer in self._module.buffers():
            if buffer.is_floating_point():
                # Every rank has seen different samples; the mean accounts for all of them.
                buffer.copy_(collectives.all_reduce_sum(buffer) / collectives.world_size())
            else:
                # A mean of counters need not be a whole number.
                dist.broadcast(buffer, src=0)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Gather all parameters: inside, ``named_parameters`` yields full tensors on every rank (read only).

        The model itself stays as it is. Takes the memory of all parameters.
        """
        self._whole = {name: shard.full_tensor() for name, shard in self._shards.items()}
        try:
            yield
        finally:
            self._whole = None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full names (no wrapper prefix) and this rank's shards, or the full tensors inside ``full_parameters``.

        A tied parameter appears once, under the first of its names.
        """
        if self._whole is not None:
            yield from self._whole.items()
        else:
            yield from (
                (name, shard.values() if shard.is_on_disk else shard.local) for name, shard in self._shards.items()
            )

    def full_teacher_state(self) -> dict[str, Tensor]:
        """Gather the teacher's ``full_state``, its buffers made equal on all ranks first; empty without a teacher."""
        return _gathered(self.whole_teacher_tensors())

    def full_state(self) -> dict[str, Tensor]:
        """Gather full parameters and buffers on the CPU, one by one: the dict on rank 0, empty elsewhere.

        Buffers are rank 0's (``consolidate_buffers`` first, where they may differ). A tied parameter appears once,
        under the first of its names; buffers that are not saved are left out.
        """
        return _gathered(self.whole_tensors())

    def plain_state(self, of_teacher: bool) -> dict[str, Any]:
        """Gather the ``state_dict()`` that the unsharded model would have: on rank 0's CPU, empty on other ranks.

        It has all names of a tied parameter, the changes of the model's state-dict hooks, and the extra state of
        modules. Collective; tensors are gathered one by one.

        Args:
            of_teacher: gather the teacher's state instead of the model's.
        """
        if of_teacher:
            assert self._teacher is not None, "adopt_teacher was never called"
            return self._teacher.plain_state(of_teacher=False)
        self._before_shards_change()  # or units that are still gathered would give plain tensors, on some ranks
        entries = self._module.state_dict()
        # An OrderedDict, not a dict: ``copy_versions`` sets an attribute.
        state = type(entries)()
        for name, entry in entries.items():
            full = whole(entry) if isinstance(entry, Tensor) else entry
            if collectives.rank() == 0:
                # Extra state may be a live object of its module, which training changes before the file is written.
                state[name] = full.detach().to("cpu", copy=True) if isinstance(full, Tensor) else copy.deepcopy(full)
        copy_versions(state, entries)
        return state

    def whole_tensors(self) -> list[WholeTensor]:
        """List parameters and saved buffers, in the same order on every rank, to be gathered one by one.

        Not a collective itself.
        """
        params = [
            WholeTensor(name, shard.local.dtype, tuple(shard.full_shape), shard.full_tensor)
            for name, shard in self._shards.items()
        ]
        buffers = [
            WholeTensor(name, buffer.dtype, tuple(buffer.shape), buffer.detach)
            for name, buffer in self._saved_buffers()
        ]
        return [*params, *buffers]

    def whole_teacher_tensors(self) -> list[WholeTensor]:
        """List the teacher's ``whole_tensors``, its buffers made equal on all ranks first; empty without a teacher."""
        if self._teacher is None:
            return []
        self._teacher.consolidate_buffers()
        return self._teacher.whole_tensors()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of parameters, optimizer state, buffers and loss scale, each with its place.

        Tensors are not copied.
        """
        buffers = dict(self._saved_buffers())
        state = rank_state(self._plan, self._shards, self.optimizer, buffers, self._loss_scale, self._average)
        teacher = self._saved_teacher()
        return state | {"teacher": None if teacher is None else teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned at the same level, engine, world size and rank.

        The state of a plain torch optimizer is accepted too: then every rank must pass the same complete dict.

        Raises:
            CheckpointError: the state is of another layout or another model.
        """
        self._wait_for_readers()
        # Plain torch's state has no parameters, so gathered copies stay valid.
        if "layout" not in state and {"state", "param_groups"} <= state.keys():
            load_torch_state(state, self._shards, self.optimizer)
            return
        teacher, saved_teacher = self._saved_teacher(), state["teacher"]
        if saved_teacher is not None and self._teacher is None:
            raise CheckpointError(NO_TEACHER)
        if saved_teacher is None and teacher is not None:
            raise CheckpointError("The saved state has no teacher. Resume with the method that was trained.")
        self._before_shards_change()
        buffers = dict(self._saved_buffers())
        load_rank_state(state, self._plan, self._shards, self.optimizer, buffers, self._loss_scale)
        if (saved := state.get("average")) is None:
            self._average = None
        else:
            self._average = WeightAverage(self._shards.values(), buffers)
            self._average.load(saved["params"], saved["buffers"])
        if teacher is not None:
            teacher.load_state_dict(saved_teacher)
        self._publish_shards()

    def layout(self) -> dict[str, Any]:
        """Return how the state is cut: engine, level, shard_group_size, world_size, rank. Not a collective."""
        return layout_of(self._plan)

    def parts(self) -> Iterator[Part]:
        """Yield the parts of parameters and optimizer state that this rank stores; all ranks store each element once.

        Not a collective. Memory is shared with training: read it before the next step (``before_next_change``).
        """
        yield from parts_of(self._shards, self.optimizer)
        if self._average is not None:
            yield from average_parts(self._shards, self._average)
        if (teacher := self._saved_teacher()) is not None:
            yield from teacher_parts(teacher._shards)

    def before_next_change(self, wait: Callable[[], object]) -> None:
        """Register ``wait``, to be called once before any tensor of ``parts`` changes: a reader still uses them.

        Forward and backward passes change none of them, so training continues in the meantime. ``wait`` must return
        in the end, and call no collective. Not a collective.
        """
        self._readers.append(wait)

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Return the scalar optimizer state (step counters) that this rank stores, by parameter. Not a collective."""
        return scalars_of(self._shards, self.optimizer)

    def loss_scale_state(self) -> dict[str, float] | None:
        """Return the loss scaler, equal on every rank; None without one. Not a collective."""
        return self._loss_scale.state_dict() if self._loss_scale else None

    def group_facts(self) -> list[dict[str, Any]]:
        """Return parameter groups: names of parameters and options, equal on every rank. Not a collective."""
        return group_facts(self._shards, self.optimizer)

    def buffers(self) -> dict[str, Tensor]:
        """Return buffers that checkpoints contain, by full name; memory is shared. Not a collective."""
        averages = {} if self._average is None else self._average.buffers
        teacher = self._saved_teacher()
        teacher_buffers = {} if teacher is None else teacher.buffers()
        return (
            dict(self._saved_buffers())
            | {f"average:{name}": buffer for name, buffer in averages.items()}
            | {f"teacher:{name}": buffer for name, buffer in teacher_buffers.items()}
        )

    def replicated(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal on all ranks, by full name. Memory is shared. Not a collective.

        These are parameters held whole and, where batch norm is synchronized over all ranks, buffers.
        """
        world_size = collectives.world_size()
        tensors = {name: shard.held() for name, shard in self._shards.items() if shard.is_held_whole}
        # Smaller groups have statistics of their own, so buffers differ between ranks on purpose.
        if self._plan.sync_bn_group in (-1, world_size):
            tensors |= self.buffers()
        if self._teacher is not None:
            alike = self._teacher.replicated().items()
            tensors |= {f"teacher:{name}": tensor for name, tensor in alike}
        return tensors

    def restore(self, saved: SavedState, with_teacher: bool = True) -> None:
        """Load parameters, optimizer state and loss scale from a saved state of any layout.

        Each rank reads its own elements alone, directly into its shards. Buffers are not loaded.

        Args:
            saved: the saved state.
            with_teacher: False: leave the teacher as it is, because ``saved`` has none.

        Raises:
            CheckpointError: the state is of another model, or was trained with another kind of loss scaling.
        """
        self._wait_for_readers()
        self._before_shards_change()
        teacher = self._saved_teacher() if with_teacher else None
        # Before restore_state, which checks everything else: a refused state must change nothing.
        check_teacher(saved, self._teacher is not None, None if teacher is None else teacher._shards)
        restore_state(saved, self._shards, self.optimizer, self._loss_scale)
        self._average = restore_average(saved, self._shards, dict(self._saved_buffers()))
        if teacher is not None:
            # Levels 1 and 2 leave the teacher's units gathered, with the old weights.
            teacher._before_shards_change()
            restore_teacher(saved, teacher._shards)
        self._publish_shards()

    def close(self) -> None:
        """Remove the files of offloaded state. No step may follow. Not a collective."""
        close = getattr(self.optimizer, "close", None)
        if close is not None:
            close()
        if self._teacher is not None:
            self._teacher.close()

    def ledger(self) -> Bytes:
        """Measure this rank's memory by kind, now; ``activations`` are those that ``measure_activations`` counted last.

        Not a collective.
        """
        shards, average = self._shards.values(), self._average
        averaged = [] if average is None else [*average.params.values(), *average.buffers.values()]
        return Bytes(
            params=parameter_storages(self._module, shards).num_bytes,
            grads=gradient_storages(self._module, shards).num_bytes,
            optimizer=optimizer_storages(self.optimizer).num_bytes,
            activations=self._activation_bytes,
            buffers=Storages([*self._module.buffers(), *averaged]).num_bytes,
            teacher=0 if self._teacher is None else self._teacher.held_bytes(),
            peak=peak_bytes(self._device),
            params_step_peak=Storages(shard.local for shard in shards).num_bytes + self._wrap_plan.whole_bytes,
        )

    def held_bytes(self) -> int:
        """Count the bytes of parameters and buffers in memory now, for an untrained model. Not a collective."""
        storages = parameter_storages(self._module, self._shards.values())
        storages.add(self._module.buffers())
        return storages.num_bytes

    @contextmanager
    def measure_activations(self) -> Iterator[None]:
        """Measure the memory that one forward pass keeps alive, for ``ledger``. A context. Slow: for the first step."""
        with ActivationCounter() as counter:
            yield
        # Looked up after the pass: it gathers parameters and takes buffers, which are counted as other kinds.
        shards = self._shards.values()
        buffers = Storages((*self._module.buffers(), *self._buffers_in_use()))
        excluded = (parameter_storages(self._module, shards), buffers)
        self._activation_bytes = counter.alive_bytes(*excluded)

    def describe(self) -> str:
        """Describe the wrap plan for people: units, what stays float32, what is recomputed. Not a collective."""
        return self._wrap_plan.describe()

    def _wait_for_readers(self) -> None:
        while self._readers:
            self._readers.pop()()

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return saved_buffers(self._module)


class _WholeTeacher(ShardedModel):
    """A teacher that every rank holds whole, as it does the student. See ``ShardedModel``."""

    def __init__(self, setup: ModelSetup):
        shards = [whole_shard(name, param) for name, param in setup.module.named_parameters()]
        super().__init__(setup, None, shards)


def _gathered(tensors: Iterable[WholeTensor]) -> dict[str, Tensor]:
    """Gather tensors one by one: the dict on rank 0's CPU, empty elsewhere. Collective."""
    state = {}
    for tensor in tensors:
        whole = tensor.read()
        if collectives.rank() == 0:
            # copy=True: on the CPU, ``to`` would return the live parameter. The file is written later, while
            # training continues.
            state[tensor.name] = whole.to("cpu", copy=True)
    return state


def _no_optimizer(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, None]:
    """Build an optimizer without parameters, for an untrained model. torch's constructor needs at least one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)
    optimizer.param_groups[0]["params"] = []  # the parameter is no shard
    return optimizer, None
