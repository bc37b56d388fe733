"""Builds the optimizer, and the store of parameters, for the tiers of the two offload plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.optim.adaptation import Adaptation, OptimizerFactory
from vissl_zero.optim.elementwise import Groups
from vissl_zero.optim.update_rule import trial_state
from vissl_zero.resolve.resolved import OffloadPlan, ShardingPlan
from vissl_zero.sharding.allocator import give_back_large_blocks
from vissl_zero.sharding.offload.block_file import (
    OffloadError,
    OffloadFolder,
    new_run_name,
    remove_dead_attempts,
    stale_runs,
)
from vissl_zero.sharding.offload.layout import StoredParam, kept_in_memory
from vissl_zero.sharding.offload.parameter_store import DiskShard, ParameterStore
from vissl_zero.sharding.offload.state_place import UpdateKernel
from vissl_zero.sharding.offload.streamed_optimizer import StreamedOptimizer, WholeStates, padded_bytes
from vissl_zero.sharding.state.shard import Shard

Built = TypeVar("Built")
_KEY, _PARAM_KEY = "offload_optimizer_config.device", "offload_param_config.device"


def stored_parameters(units: Sequence[Sequence[StoredParam]], plan: OffloadPlan) -> ParameterStore | None:
    """Build the store of the parameters that do not stay in memory, or None if all of them do. Collective.

    Args:
        units: the shards of each unit. The first of them stay in memory, as many as ``plan.max_in_cpu`` allows.
        plan: plan of parameters.
    Raises:
        OffloadError: a rank has no disk space or cannot use the folder.
    """
    if not plan.is_on_disk:
        return None
    # Memory of units that are gathered and freed in turn would otherwise stay with the process.
    give_back_large_blocks()
    keeps = kept_in_memory((param.num_elements for unit in units for param in unit), plan.max_in_cpu or 0)
    on_disk = [[param for param in unit if not next(keeps)] for unit in units]
    return _build_on_every_rank(plan, lambda folder: ParameterStore(on_disk, folder, plan.fast_init))


def offloaded(
    build_optimizer: OptimizerFactory,
    plan: ShardingPlan,
    store: ParameterStore | None,
    shards: Sequence[Shard],
) -> OptimizerFactory:
    """Wrap ``build_optimizer`` to keep its state in the tier of ``plan.offload_optimizer``.

    Every rank must call the result. Tier ``cpu`` needs no wrapper: the base optimizer makes its state next to its
    shards, on the host.

    Args:
        build_optimizer: builds the base optimizer over local shards.
        plan: level and tiers.
        store: store of parameters on a disk, or None.
        shards: shards of all parameters.
    Raises:
        ConfigError: (from the result) the optimizer cannot be streamed.
        OffloadError: (from the result) a rank has no disk space or cannot use the folder.
    """
    is_on_disk = plan.offload_optimizer.is_on_disk
    if plan.needs_whole_tensors:  # WholeTensorOptimizer streams full tensors itself
        return build_optimizer
    index_of = {id(shard.local): shard.index for shard in shards if isinstance(shard, DiskShard)}
    if not (is_on_disk or index_of):
        return build_optimizer

    def factory(groups: Groups) -> tuple[torch.optim.Optimizer, Adaptation | None]:
        optimizer, adaptation = build_optimizer([{**group, "params": _proxies(group)} for group in groups])
        kernel = UpdateKernel(optimizer, _KEY if is_on_disk else _PARAM_KEY)
        params = [list(group["params"]) for group in groups]
        together = [param for group_params in params for param in group_params]
        stored = {k: index_of[id(param)] for k, param in enumerate(together) if id(param) in index_of}
        if is_on_disk and kernel.keys:
            fast_init = plan.offload_optimizer.fast_init
            return _build_on_every_rank(
                plan.offload_optimizer,
                lambda folder: StreamedOptimizer(kernel, params, folder, fast_init, store, stored),
            ), adaptation
        if is_on_disk and collectives.rank() == 0:
            name = type(kernel.optimizer).__name__
            logging.getLogger(__name__).warning(
                "%s=%s has no effect: %s keeps no state with these settings.", _KEY, plan.offload_optimizer.device, name
            )
        if stored:
            return StreamedOptimizer(kernel, params, None, False, store, stored), adaptation
        # Nothing is streamed, so the base optimizer gets the real parameters instead of the proxies.
        for group, group_params in zip(optimizer.param_groups, params, strict=True):
            group["params"] = group_params
        return optimizer, adaptation

    return factory


def whole_states(
    plan: OffloadPlan, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]
) -> WholeStates | None:
    """Open a place on the disk for the state of full tensors, or None if it stays in memory. Collective.

    Args:
        plan: plan of the optimizer.
        optimizer: unchanged; a trial step on each parameter measures its state.
        params: parameters that this rank updates, in groups of ``optimizer``.
    Raises:
        OffloadError: a rank has no disk space or cannot use the folder.
    """
    if not plan.is_on_disk:
        return None
    groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    sizes = [sum(map(padded_bytes, trial_state(optimizer, groups[param], param).values())) for param in params]
    return _build_on_every_rank(plan, lambda folder: WholeStates(params, sizes, folder, plan.fast_init))


def _proxies(group: dict[str, Any]) -> list[nn.Parameter]:
    """Make a parameter of one element in the group's dtype, to build the base optimizer with."""
    # Frozen parameters of integers may be in a group, but cannot be trained.
    dtypes = [param.dtype for param in group["params"] if param.is_floating_point()]
    return [nn.Parameter(torch.zeros(1, dtype=dtypes[0] if dtypes else torch.float32))]


def _build_on_every_rank(plan: OffloadPlan, build: Callable[[OffloadFolder], Built]) -> Built:
    """Build on every rank or on none: a rank that continued alone would hang in its next collective."""
    assert plan.nvme_path is not None
    built, failure = None, None
    try:
        remove_dead_attempts(plan.nvme_path, plan.run)
    except OffloadError as error:
        failure = error
    # Wait until all ranks have removed them: a new folder that is not locked yet would look like a dead attempt.
    is_usable = not collectives.all_reduce_sum(torch.tensor(float(failure is not None)))
    run_name = new_run_name(plan.run, plan.keep_files)
    try:
        if failure is not None or not is_usable:
            raise failure or OffloadError(f"nvme_path: another rank cannot use {plan.nvme_path}; see its message.")
        folder = OffloadFolder(plan.nvme_path, run_name, collectives.rank(), plan.keep_files)
        try:
            built = build(folder)
        except OffloadError:
            folder.remove()
            raise
    except OffloadError as error:
        failure = error
    # Before anything is raised: a rank that has failed must take part, or the others would wait for it.
    num_failed = collectives.all_reduce_sum(torch.tensor(float(failure is not None)))
    if failure is not None:
        raise failure
    assert built is not None
    # Another rank has raised: give the disk back, and fail as it does.
    if num_failed:
        built.close()  # type: ignore[attr-defined]
        raise OffloadError(
            f"nvme_path: {int(num_failed)} other rank(s) cannot use {plan.nvme_path}; see their messages."
        )
    if collectives.rank() == 0 and (stale := stale_runs(plan.nvme_path)):
        logging.getLogger(__name__).warning(
            "%s holds files of earlier runs that were killed or kept their files: %s. They are not used; "
            "remove them to free the disk.",
            plan.nvme_path,
            ", ".join(stale),
        )
    return built
