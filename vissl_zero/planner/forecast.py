"""The forecast of a rank's memory before anything runs: the model with fake tensors, which have shapes and no memory.

Everything in this file happens inside torch's ``FakeTensorMode``. Parameters, gradients and optimizer state are counted
from the shards that the first rank will hold (no rank holds more); activations by one recorded micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.models.model import Unit
from vissl_zero.optim.adaptation import OptimizerFactory
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.update_rule import UpdateRule
from vissl_zero.planner.machine_profile import MachineProfile
from vissl_zero.planner.memory_model import ModelFacts, StepMemory, UpdateFacts, step_memory
from vissl_zero.planner.step_time import cause_of, machine_for, step_seconds, work_seconds
from vissl_zero.planner.step_trace import Recorder, StepTrace, record_step
from vissl_zero.resolve.resolved import ShardingPlan, keeps_parameters_whole
from vissl_zero.sharding.memory import Bytes, Storages
from vissl_zero.sharding.model.batch_norm import batch_norm_group, convert_batch_norms, share_among
from vissl_zero.sharding.model.float8 import quantize_layers, require_float8
from vissl_zero.sharding.model.precision import computed_in, dtype_of, rounded, run_in_precision
from vissl_zero.sharding.model.wrap_plan import WrapPlan, plan_wrap
from vissl_zero.sharding.param_facts import ParamFacts, gathered_bytes, param_facts
from vissl_zero.sharding.state.saved_state import saved_buffers
from vissl_zero.sharding.state.shard import whole_shard
from vissl_zero.sharding.strategy import update_rule_of
from vissl_zero.sharding.torch_private import own_buffers, own_parameters, pretended_ranks
from vissl_zero.sharding.update.stepper import Clipping, Stepper
from vissl_zero.sharding.update.whole_tensors import partition


@contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Keep torch from logging tracebacks of operations that fail on fake tensors: the errors are raised. A context."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@dataclass(frozen=True)
class Forecast:
    """The forecast of one plan.

    Attributes:
        wrap_plan: the units.
        memory: bytes of the rank that needs most, after the last backward pass of a step, as in ``metrics.jsonl``;
            ``peak`` is 0 (it depends on the allocator and the machine). Parameters, gradients and optimizer state are
            counted on every tier, the teacher's parameters only in memory.
        step: memory during a step; None: unknown.
        unknown: why the activations are unknown; empty if they are known.
        seconds: estimated seconds of a step, only for comparison with other plans; None: unknown.
        teacher_params: bytes of the teacher's parameters between units, on the tier of the model's parameters.
        teacher_buffers: bytes of the teacher's buffers, which are always on the device.
    """

    wrap_plan: WrapPlan
    memory: Bytes
    step: StepMemory | None
    unknown: str = ""
    seconds: float | None = None
    teacher_params: int = 0
    teacher_buffers: int = 0


class Recomputable(NamedTuple):
    """A block that can be recomputed in the backward pass.

    Attributes:
        name: name of the unit.
        saved_bytes: bytes of activations that recomputing the block saves.
        seconds: estimated seconds of the block's second forward pass, for one micro-batch.
    """

    name: str
    saved_bytes: int
    seconds: float


@dataclass
class Subject:
    """A model to forecast, built with fake tensors in the master dtype, and its training setup.

    Attributes:
        model: model; the forecaster changes it in place.
        groups: parameter groups.
        build_optimizer: see ``Strategy.shard``.
        world_size, num_nodes: number of ranks and of machines.
        device_type: "cpu" or "cuda".
        run_forward: runs model and loss on one micro-batch; returns the loss, and objects that the loop keeps alive.
        inputs: images of that micro-batch.
        passes: passes of a micro-batch; ``run_forward`` runs the largest.
        passes_per_loss: passes that share a loss.
        is_averaged: whether the run keeps a running average of the weights (``Sharded.average``).
        is_uniform: whether parameter groups differ only in learning rate and weight decay.
        teacher: teacher that ``Sharded.adopt_teacher`` will receive.
        loss: loss whose buffers are counted.
        machine: machine whose rates estimate the time; None: the machine assumed for the device.
        num_threads: torch threads of a rank, on the CPU.
        may_recompute: whether plans may recompute units; a loop of the user's own decides that itself.
    """

    model: nn.Module
    groups: Sequence[ParamGroup]
    build_optimizer: OptimizerFactory
    world_size: int
    device_type: str
    run_forward: Callable[[], tuple[Tensor, Any]]
    inputs: Sequence[Tensor] = ()
    passes: int = 1
    passes_per_loss: int = 1
    is_averaged: bool = False
    is_uniform: bool = False
    teacher: nn.Module | None = None
    loss: nn.Module | None = None
    num_nodes: int = 1
    machine: MachineProfile | None = None
    num_threads: int = 1
    may_recompute: bool = True


class Forecaster:
    """Forecasts a model under any sharding plan. Call it in ``FakeTensorMode``; it needs no processes.

    Recordings are kept: a second plan that runs the same operations costs milliseconds.

    Args:
        subject: model and training setup.
        plan: plan with the number formats of all plans to forecast.
    """

    def __init__(self, subject: Subject, plan: ShardingPlan):
        self.subject, self._machine = subject, subject.machine or machine_for(subject.device_type)
        self._traces: dict[tuple[str, ...], StepTrace | str] = {}
        self._wrap_plans: dict[tuple[Any, ...], WrapPlan] = {}
        self._model_facts: dict[int, ModelFacts] = {}
        self._rules: dict[tuple[str, bool, bool, bool], UpdateRule | ConfigError] = {}
        self._updates: dict[tuple[int, UpdateRule], UpdateFacts] = {}
        require_float8(subject.model, plan.float8, torch.device("cpu"))
        for module in filter(None, (subject.model, subject.teacher)):
            quantize_layers(module, plan.float8)
            # All are converted, even without recomputation: only our batch norms can get a group of ranks later.
            convert_batch_norms(module, None, is_recomputed=True, only_marked=plan.sync_bn_only_marked)
            run_in_precision(module, plan.precision, torch.device("cpu"))
        subject.model.train()

    def forecast(self, plan: ShardingPlan, micro_batches: int = 1) -> Forecast:
        """Forecast memory and time under ``plan``.

        Raises:
            ConfigError: this model cannot be trained under ``plan``.
        """
        subject = self.subject
        rule = self._rule(plan)
        num_ranks = plan.ranks_per_copy(subject.world_size)
        wrap_plan = self._wrap_plan(plan, num_ranks)
        facts = self._facts(plan, num_ranks, rule)
        trace = self.trace(plan)
        is_whole = keeps_parameters_whole(plan, num_ranks, subject.world_size, subject.device_type)
        if not is_whole:
            wrap_plan = replace(wrap_plan, whole_bytes=gathered_bytes(facts.params, plan, num_ranks))
        step, seconds = None, None
        unknown = trace if isinstance(trace, str) else ""
        if isinstance(trace, StepTrace):
            ranks, nodes, device = subject.world_size, subject.num_nodes, subject.device_type
            passes = micro_batches * subject.passes
            if plan.engine == "torch":
                with unset_fake_temporarily():  # sums need real tensors
                    step = step_memory(trace, facts, plan, ranks, device, num_nodes=nodes, micro_batches=passes)
            else:
                unknown = f"the {plan.engine} engine's own buffers are not modeled"
            threads = subject.num_threads
            seconds = step_seconds(trace, facts, plan, ranks, nodes, passes, self._machine, device, step, threads)
            losses = work_seconds(trace.loss_work, plan, self._machine)
            seconds -= passes * (1 - 1 / subject.passes_per_loss) * losses
        params, teacher_bytes = (
            sum(param.num_bytes if is_whole else param.padded(num_ranks) for param in held.values())
            for held in (facts.params, facts.teacher)
        )
        shards = {name: param.padded(num_ranks) for name, param in facts.params.items()}
        replicated = sum(p.num_bytes for p in facts.teacher.values() if p.is_replicated)  # never on a disk
        buffers = sum(buffer.nbytes for buffer in subject.model.buffers()) + facts.average_buffer_bytes
        memory = Bytes(  # as ``ShardedModel.ledger`` counts it
            params=params,
            grads=sum(size for name, size in shards.items() if facts.params[name].is_trained),
            optimizer=facts.updates[num_ranks].state_bytes,
            activations=trace.kept_bytes if isinstance(trace, StepTrace) else 0,
            buffers=buffers + (sum(shards.values()) if subject.is_averaged else 0),
            teacher=(replicated if plan.offload_params.is_on_disk else teacher_bytes) + facts.teacher_buffer_bytes,
            params_step_peak=params + wrap_plan.whole_bytes,
        )
        return Forecast(wrap_plan, memory, step, unknown, seconds, teacher_bytes, facts.teacher_buffer_bytes)

    @property
    def can_recompute(self) -> bool:
        """Return whether plans may recompute, and the model has units for it."""
        return self.subject.may_recompute and any(isinstance(module, Unit) for module in self.subject.model.modules())

    def recomputable(self, plan: ShardingPlan) -> list[Recomputable]:
        """List the blocks whose recomputation saves memory, by bytes saved per second, largest first."""
        kept = self.trace(plan.keeping_activations())
        every = replace(plan.keeping_activations(), checkpoint_every=1)
        again = self.trace(every)
        if isinstance(kept, str) or isinstance(again, str):
            return []
        before, after, times = kept.forward_bytes(), again.forward_bytes(), self.subject.passes
        seconds = {name: times * work_seconds(work, plan, self._machine) for name, work in kept.forward_work.items()}
        blocks = [
            Recomputable(name, before[name] - after[name], seconds[name])
            for name in self._wrap_plan(every).checkpointed
            if name in before and name in after
        ]
        useful = [block for block in blocks if block.saved_bytes > 0]
        return sorted(useful, key=lambda block: block.seconds / block.saved_bytes)

    def trace(self, plan: ShardingPlan) -> StepTrace | str:
        """Return the recording of a micro-batch under ``plan``, or a sentence that says why it failed."""
        checkpointed = self._wrap_plan(plan).checkpointed
        if checkpointed not in self._traces:
            self._traces[checkpointed] = self._record(plan, checkpointed)
        return self._traces[checkpointed]

    @contextmanager
    def _pretended(self, plan: ShardingPlan, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let batch norms of ``modules`` share statistics with pretended ranks. A context."""
        changed = [*modules]
        with pretended_ranks(self.subject.world_size):
            group = batch_norm_group(plan.sync_bn_group, plan.timeout_s)
            for module in changed:
                share_among(module, group)
            try:
                yield
            finally:
                for module in changed:
                    share_among(module, None)

    def _rule(self, plan: ShardingPlan) -> UpdateRule:
        """Return the optimizer's update rule; one trial serves all plans that would be refused for the same reason."""
        is_on_disk = plan.offload_optimizer.is_on_disk or plan.offload_params.is_on_disk
        key = plan.engine, plan.level == 0, plan.engine == "fairscale" and plan.level == 3, is_on_disk
        if key not in self._rules:
            subject = self.subject
            with unset_fake_temporarily():
                try:
                    self._rules[key] = update_rule_of(subject.build_optimizer, subject.model, subject.groups, plan)
                except ConfigError as error:
                    self._rules[key] = error
        if isinstance(rule := self._rules[key], ConfigError):
            raise rule
        return rule

    def _record(self, plan: ShardingPlan, checkpointed: Sequence[str]) -> StepTrace | str:
        subject = self.subject
        for name, module in subject.model.named_modules():
            if isinstance(module, Unit):
                module.checkpoint = name in checkpointed
        units = self._wrap_plan(replace(plan, level=3))
        others = [] if subject.loss is None else [*subject.loss.buffers(), *subject.loss.parameters()]
        modules = [subject.model, *([] if subject.teacher is None else [subject.teacher])]
        inputs = subject.run_forward, subject.inputs, subject.teacher, others
        recorders: list[Recorder] = []
        unknown = ""
        for answer in (True, False):
            try:
                with self._pretended(plan, modules), _no_tracebacks(), ExitStack() as half:
                    for module in modules if plan.precision.casts_parameters else ():
                        half.enter_context(computed_in(module, dtype_of(plan.precision.compute), units.units))
                    recorders.append(record_step(subject.model, units, *inputs, answer=answer))
            except VisslZeroError:
                raise
            except Exception as error:  # noqa: BLE001 - a model or a loss may ask a fake tensor for its values
                unknown = unknown or cause_of(error)
            if recorders and not recorders[0].is_asked:
                break
        if not recorders:
            return f"a test step on tensors without values failed; the run may fail too: {unknown}"
        trace = max(recorders, key=lambda recorder: recorder.peak_bytes()).trace
        trace.input_bytes //= subject.passes  # the passes of a micro-batch share its images
        return trace

    def _wrap_plan(self, plan: ShardingPlan, num_ranks: int = 1) -> WrapPlan:
        """Return the plan of ``plan_wrap``; plans with equal settings of units share it."""
        key = plan.level, plan.wrap_threshold, plan.checkpoint_every, plan.checkpoint_blocks, plan.stage_checkpoints
        if key not in self._wrap_plans:
            self._wrap_plans[key] = plan_wrap(self.subject.model, plan, 1)
        return replace(self._wrap_plans[key], num_ranks=num_ranks)

    def _facts(self, plan: ShardingPlan, num_ranks: int, rule: UpdateRule) -> ModelFacts:
        if plan.wrap_threshold not in self._model_facts:
            self._model_facts[plan.wrap_threshold] = self._without_update(plan)
        if (num_ranks, rule) not in self._updates:
            try:
                params = self._model_facts[plan.wrap_threshold].params
                self._updates[num_ranks, rule] = _update(self.subject, params, plan, num_ranks, rule)
            except VisslZeroError:
                raise
            except Exception as error:
                must = f"must step on tensors without values, to be forecast ({cause_of(error)})"
                raise ConfigError([Problem("optimizer", "", must, "Write level 0, 1, 2 or 3.")]) from error
        return replace(self._model_facts[plan.wrap_threshold], updates={num_ranks: self._updates[num_ranks, rule]})

    def _without_update(self, plan: ShardingPlan) -> ModelFacts:
        subject = self.subject
        # Units are those of level 3, which the marks name too: one recording serves all levels.
        units = self._wrap_plan(replace(plan, level=3))
        trained = [name for group in subject.groups for name in group.params]
        buffers = sum(buffer.nbytes for buffer in subject.model.buffers())
        if subject.loss is not None:
            buffers += sum(buffer.nbytes for buffer in subject.loss.buffers())
        teacher = subject.teacher
        return ModelFacts(
            params=param_facts(subject.model, units, trained),
            buffer_bytes=buffers,
            average_buffer_bytes=sum(b.nbytes for _, b in saved_buffers(subject.model)) if subject.is_averaged else 0,
            is_averaged=subject.is_averaged,
            teacher={} if teacher is None else param_facts(teacher, units, ()),
            teacher_buffer_bytes=0 if teacher is None else sum(buffer.nbytes for buffer in teacher.buffers()),
        )


def fake_(module: nn.Module, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008 - it never changes
    """Replace tensors that are not on ``device`` by fake ones there; tied tensors stay tied. In ``FakeTensorMode``."""
    made: dict[int, Tensor] = {}

    def faked(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_param else fake
        return made[id(tensor)]

    for part in module.modules():
        for table in (own_parameters(part), own_buffers(part)):
            for name, tensor in table.items():
                if tensor is not None and tensor.device != device:
                    table[name] = faked(tensor)  # type: ignore[assignment]


_NORM_BYTES = 64  # most bytes of a parameter in tables of norms


@dataclass(frozen=True)
class _Trained:
    """A parameter that the optimizer of the first rank updates.

    Attributes:
        group: parameter group.
        name: full name.
        values: rows of the first rank, or the full tensor if the update needs full tensors.
        kind: key that is equal for parameters that the optimizer treats in the same way.
    """

    group: ParamGroup
    name: str
    values: Tensor
    kind: tuple[Any, ...]


def _trained(subject: Subject, facts: Mapping[str, ParamFacts], num_ranks: int, rule: UpdateRule) -> list[_Trained]:
    """List the parameters of the subject's model that the first rank updates."""
    params = dict(subject.model.named_parameters())
    trained = [(group, name) for group in subject.groups for name in group.params]
    owners = partition([params[name].numel() for _, name in trained], num_ranks)
    is_whole = rule is UpdateRule.PER_TENSOR
    # Rows as ``ParamFacts.padded`` counts them; ``chunk`` would make a tensor for every rank.
    parts = [
        params[name] if is_whole or facts[name].is_replicated else params[name][: -(-len(params[name]) // num_ranks)]
        for _, name in trained
    ]
    treatment = {group.name: group.weight_decay if subject.is_uniform else group.name for group in subject.groups}
    return [
        _Trained(group, name, values, (treatment[group.name], values.shape, values.dtype))
        for (group, name), values, owner in zip(trained, parts, owners, strict=True)
        if not is_whole or owner == 0
    ]


def _update(
    subject: Subject, params: Mapping[str, ParamFacts], plan: ShardingPlan, num_ranks: int, rule: UpdateRule
) -> UpdateFacts:
    """Measure the memory of the optimizer's step on the first rank, which owns the largest tensor.

    Only two of many equal parameters are stepped: state is per parameter, and so are the few bytes of a norm. If the
    second parameter adds more bytes (an update of all tensors at once), all parameters are stepped.
    """
    rows = _trained(subject, params, num_ranks, rule)
    kinds: dict[Any, list[_Trained]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    few, twice = ([row for equal in kinds.values() for row in equal[:number]] for number in (1, 2))
    state, num_keys, temporary = _stepped(subject, plan, few)
    if len(rows) > len(few):
        _, _, with_second = _stepped(subject, plan, twice)
        per_row = (with_second - temporary) / (len(twice) - len(few))
        if per_row > _NORM_BYTES:
            state, num_keys, temporary = _stepped(subject, plan, rows)
        else:
            temporary += int(per_row * (len(rows) - len(few)))
    wholes = [row.values.nbytes for row in rows if rule is UpdateRule.PER_TENSOR]
    state_bytes = sum(state[row.kind] for row in rows)
    return UpdateFacts(state_bytes, num_keys, temporary, sum(wholes), max(wholes, default=0))


def _stepped(subject: Subject, plan: ShardingPlan, rows: Sequence[_Trained]) -> tuple[dict[Any, int], int, int]:
    """Return state bytes of a parameter by kind, state tensors per parameter, and peak bytes of temporaries.

    The optimizer itself steps copies of ``rows`` twice: the first step creates its state.
    """
    shards = {id(row): whole_shard(row.name, nn.Parameter(row.values.detach().clone())) for row in rows}
    tables = [
        {
            "name": group.name,
            "params": [shards[id(row)].local for row in rows if row.group is group],
            "lr": 0.0,
            "weight_decay": group.weight_decay,
        }
        for group in subject.groups
        if any(row.group is group for row in rows)
    ]
    local_shards = [*shards.values()]
    # The recorder counts nothing here; it keeps fused kernels from running on fake tensors.
    with Recorder(Storages(), has_values=True):
        optimizer, adaptation = rounded(subject.build_optimizer, plan, local_shards)(tables)
    stepper = Stepper(local_shards, optimizer, adaptation, Clipping.of(plan), None, None)
    for shard in local_shards:
        shard.local.grad = torch.zeros_like(shard.local)
    with Recorder(Storages(), has_values=True):
        stepper.step(())
    states = {
        row.kind: [(key, value) for key, value in optimizer.state[shards[id(row)].local].items() if key != "step"]
        for row in rows
    }
    constants = Storages([*(shard.local for shard in local_shards), *(shard.local.grad for shard in local_shards)])
    constants.add(value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    with Recorder(constants, has_values=True) as recorder:
        stepper.step(())
    sizes = {
        kind: sum(value.nbytes for _, value in pairs if isinstance(value, Tensor)) for kind, pairs in states.items()
    }
    num_keys = len({key for pairs in states.values() for key, value in pairs if isinstance(value, Tensor)})
    return sizes, num_keys, recorder.peak_bytes()
