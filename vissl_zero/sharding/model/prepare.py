"""Preparation of a model, the same for every engine, before it is sharded."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.models.model import Unit
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.checks.replica_check import require_equal_models
from vissl_zero.sharding.model.batch_norm import batch_norm_group, convert_batch_norms
from vissl_zero.sharding.model.compilation import compile_units
from vissl_zero.sharding.model.float8 import quantize_layers
from vissl_zero.sharding.model.precision import cast_to_master, dtype_of, run_in_precision
from vissl_zero.sharding.model.wrap_plan import WrapPlan, model_units, plan_wrap
from vissl_zero.sharding.param_facts import gathered_bytes, param_facts


def prepare(model: nn.Module, plan: ShardingPlan, device: torch.device) -> WrapPlan:
    """Plan the units of ``model``; set its dtype, float8, batch norm, recomputation and compilation, in place.

    Collective; the process group must be initialized, except at level 0.

    Raises:
        ConfigError: group sizes do not divide the world, the model has no units to recompute, or changes its own
            parameters in the forward pass.
        ModelsDifferError: the ranks hold different weights.
    """
    # Refusals first, while the model is unchanged.
    _refuse_embeddings(model, plan)
    _refuse_shared_memory(model, plan)
    wrap_plan = plan_wrap(model, plan, _ranks_per_copy(plan))
    if collectives.rank() == 0 and (advice := wrap_plan.advice()):
        logging.getLogger(__name__).warning("%s", advice)
    whole_bytes = gathered_bytes(param_facts(model, wrap_plan, ()), plan, wrap_plan.num_ranks)
    # A model of several dtypes keeps them. If all parameters have the master dtype, buffers are not cast either.
    formats = {param.dtype for param in model.parameters()}
    if len(formats) == 1 and (plan.precision.rounding or formats != {dtype_of(plan.precision.master)}):
        cast_to_master(model, plan.precision)
    # Before batch norms and forward methods are replaced: a refused model has changed its dtype at most.
    require_equal_models(model, device)
    norm_group = batch_norm_group(plan.sync_bn_group, plan.timeout_s)
    is_recomputed = bool(wrap_plan.checkpointed)
    convert_batch_norms(model, norm_group, is_recomputed=is_recomputed, only_marked=plan.sync_bn_only_marked)
    for name in wrap_plan.checkpointed:
        unit = model.get_submodule(name)
        assert isinstance(unit, Unit), name
        unit.checkpoint = True
    quantize_layers(model, plan.float8)
    # After the conversion: compilation excludes our batch norm, by its class, from graphs.
    if plan.compile:
        compile_units(model, model_units(model) or [model], plan.compile)
    # Last: it wraps the model's forward, compiled or not.
    run_in_precision(model, plan.precision, device)
    return replace(wrap_plan, whole_bytes=whole_bytes)


def _refuse_embeddings(model: nn.Module, plan: ShardingPlan) -> None:
    """Refuse embeddings that write into their weight, each rank into its own rows, and those with sparse gradients."""
    if collectives.world_size() == 1 and plan.level < 3:
        return
    problems = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            must = "must be None where several ranks train one model: each would rescale the rows of its own batch only"
            fix = "Leave max_norm out, and normalize in the forward pass: F.normalize(embedding(x), dim=-1)."
            problems.append(Problem(f"{name}.max_norm", str(module.max_norm), must, fix))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            must = "must be False where several ranks train one model: gradients are averaged as dense tensors"
            problems.append(Problem(f"{name}.sparse", "True", must, "Leave sparse out: the numbers are the same."))
    if problems:
        raise ConfigError(problems)


def _refuse_shared_memory(model: nn.Module, plan: ShardingPlan) -> None:
    """Refuse parameters that share memory with each other or with a buffer: once sharded, they would diverge."""
    if not plan.level:
        return
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and not tensor.is_meta:
            start = int(tensor.storage_offset())
            # Elements from the first to the last in memory: views of one storage may be disjoint, and are allowed then.
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, start + extent, name))
    names = {name for name, _ in model.named_parameters()}
    for places in spans.values():
        for (_, stop, first), (start, _, second) in pairwise(sorted(places)):
            if start < stop and {first, second} & names:
                must = f"must not share memory with {first} above ZeRO level 0, where parameters are cut"
                fix = "Assign one Parameter to both places (b.weight = a.weight), clone it, or use level 0."
                raise ConfigError([Problem(second, "a view of the same memory", must, fix)])


def _ranks_per_copy(plan: ShardingPlan) -> int:
    """Return how many ranks share one copy of the state; 1 at level 0."""
    world_size = collectives.world_size()
    if plan.level == 0:
        return 1
    if not dist.is_initialized():
        raise VisslZeroError(
            f"ZeRO level {plan.level} needs a process group. Call torch.distributed.init_process_group."
        )
    size = plan.ranks_per_copy(world_size)
    if world_size % size:
        problem = Problem(
            "config.ZERO.SHARD_GROUP_SIZE",
            str(size),
            f"must divide the number of ranks, {world_size}",
            "Write -1 to share one copy of the state among all ranks.",
        )
        raise ConfigError([problem])
    return size
