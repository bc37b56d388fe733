"""Bytes of a rank by kind before anything runs: the model with fake tensors, which have shapes and no memory.

Everything in this file happens inside torch's ``FakeTensorMode``. Parameters, gradients and optimizer state are counted
from the shards that the first rank will hold (no rank holds more); activations by one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from vissl_zero.config.resolved import ShardingPlan, keeps_parameters_whole
from vissl_zero.errors import VisslZeroError
from vissl_zero.models.unit import Unit
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.update_rule import UpdateRule
from vissl_zero.sharding.batch_norm import convert_batch_norms
from vissl_zero.sharding.memory import ActivationCounter, Storages
from vissl_zero.sharding.plan import WrapPlan, plan_wrap
from vissl_zero.sharding.precision import dtype_of, run_in_precision
from vissl_zero.sharding.state import saved_buffers
from vissl_zero.sharding.strategy import Bytes, OptimizerFactory, update_rule_of
from vissl_zero.sharding.whole_tensors import deal


@dataclass(frozen=True)
class Forecast:
    """What ``forecast`` found.

    Attributes:
        wrap_plan: the units.
        memory: of the rank that holds most, after the last backward pass of a step, as ``metrics.jsonl`` has it;
            ``peak`` is 0 (it depends on the allocator and the machine).
        no_activations: why activations could not be counted, or empty.
    """

    wrap_plan: WrapPlan
    memory: Bytes
    no_activations: str = ""


def forecast(
    model: nn.Module,
    groups: Sequence[ParamGroup],
    build_optimizer: OptimizerFactory,
    plan: ShardingPlan,
    world_size: int,
    device_type: str,
    run_forward: Callable[[], Tensor],
    is_averaged: bool = False,
    teacher: nn.Module | None = None,
) -> Forecast:
    """Forecast a rank's memory. Call it in ``FakeTensorMode``; no process group is needed and nothing is communicated.

    Args:
        model: built in that mode, with the master dtype; changed in place.
        groups: parameter groups.
        build_optimizer: as for ``Strategy.shard``.
        plan: what will be asked of the strategy.
        world_size: ranks of the run.
        device_type: "cpu" or "cuda".
        run_forward: runs the model and the loss on one micro-batch.
        is_averaged: a running average of the weights is kept (``Sharded.average``).
        teacher: what ``Sharded.adopt_teacher`` will be given.
    Raises:
        ConfigError: what asks for the impossible of this model.
    """
    with unset_fake_temporarily():
        rule = update_rule_of(build_optimizer, model, groups, plan)
    num_ranks = (plan.shard_group_size if plan.shard_group_size > 1 else world_size) if plan.level else 1
    wrap_plan = plan_wrap(model, plan, num_ranks)
    params = dict(model.named_parameters())
    states = _optimizer_bytes(params, groups, build_optimizer, num_ranks, rule)
    reduced = dtype_of(plan.precision.reduce)
    activations, reason = _activations(model, teacher, plan, wrap_plan, run_forward)
    trained = [params[name] for group in groups for name in group.params]
    sharded = sum(_shard(param, num_ranks).nbytes for param in params.values())
    held = sharded
    if keeps_parameters_whole(plan, num_ranks, world_size, device_type):
        held, wrap_plan = sum(param.nbytes for param in params.values()), replace(wrap_plan, whole_bytes=0)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    is_whole = held > sharded
    taught = 0
    if teacher is not None:
        taught = sum((param if is_whole else _shard(param, num_ranks)).nbytes for param in teacher.parameters())
        taught += sum(buffer.nbytes for buffer in teacher.buffers())
    if is_averaged:
        buffers += sharded + sum(buffer.nbytes for _, buffer in saved_buffers(model))
    return Forecast(
        wrap_plan,
        Bytes(
            params=held,
            grads=sum(_shard(param, num_ranks).numel() * reduced.itemsize for param in trained),
            optimizer=states,
            activations=activations,
            buffers=buffers,
            teacher=taught,
            params_step_peak=held + wrap_plan.whole_bytes,
        ),
        reason,
    )


def _shard(param: Tensor, num_ranks: int) -> Tensor:
    """The first rank's rows: ``torch.chunk`` gives it the most."""
    return param if param.dim() == 0 else param.chunk(num_ranks)[0]


def _optimizer_bytes(
    params: dict[str, nn.Parameter],
    groups: Sequence[ParamGroup],
    build: OptimizerFactory,
    num_ranks: int,
    rule: UpdateRule,
) -> int:
    """Of the state after one step of the very optimizer, on shards of the right sizes."""
    tables = []
    trained = [name for group in groups for name in group.params]
    owners = dict(zip(trained, deal([params[name].numel() for name in trained], num_ranks), strict=True))
    for group in groups:
        if rule is UpdateRule.PER_TENSOR:  # the largest tensor is dealt to the first rank
            parts: list[Tensor] = [params[name] for name in group.params if owners[name] == 0]
        else:
            parts = [_shard(params[name], num_ranks) for name in group.params]
        shards = [nn.Parameter(part.detach().clone()) for part in parts]
        for shard in shards:
            shard.grad = torch.zeros_like(shard)
        tables.append({"name": group.name, "params": shards, "lr": 0.0, "weight_decay": group.weight_decay})
    optimizer, _ = build(tables)
    optimizer.step()
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    )


def _activations(
    model: nn.Module,
    teacher: nn.Module | None,
    plan: ShardingPlan,
    wrap_plan: WrapPlan,
    run_forward: Callable[[], Tensor],
) -> tuple[int, str]:
    convert_batch_norms(model, None, is_recomputed=True)
    for name in wrap_plan.checkpointed:
        unit = model.get_submodule(name)
        assert isinstance(unit, Unit), name
        unit.checkpoint = True
    run_in_precision(model, plan.precision, torch.device("cpu"))
    model.train()
    constants = Storages([*model.parameters(), *model.buffers()])
    if teacher is not None:
        convert_batch_norms(teacher, None)
        run_in_precision(teacher, plan.precision, torch.device("cpu"))
        constants.add([*teacher.parameters(), *teacher.buffers()])
    try:
        with ActivationCounter() as counter:
            loss = run_forward()
        assert isinstance(loss, FakeTensor)
        return counter.alive_bytes(constants), ""
    except VisslZeroError:
        raise
    except Exception as error:  # noqa: BLE001 - a model or a loss of the user's may ask a fake tensor for its values
        return 0, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
