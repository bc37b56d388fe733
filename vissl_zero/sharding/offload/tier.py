"""From ``offload_optimizer_config`` to the optimizer that runs: where the base optimizer's state rests."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from vissl_zero import collectives
from vissl_zero.config.resolved import OffloadPlan, ShardingPlan
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.adaptation import Adaptation
from vissl_zero.sharding.offload.errors import OffloadError
from vissl_zero.sharding.offload.kernel import Kernel
from vissl_zero.sharding.offload.run_folder import RunFolder, new_run_name, stale_runs
from vissl_zero.sharding.offload.streamed_optimizer import StreamedOptimizer
from vissl_zero.sharding.strategy import OptimizerFactory

Groups = list[dict[str, Any]]
_KEY = "config.ZERO.offload_optimizer_config.device"


def offloaded(build_optimizer: OptimizerFactory, plan: ShardingPlan, device: torch.device) -> OptimizerFactory:
    """``build_optimizer`` with its state where ``plan.offload_optimizer`` says.

    Every rank must call the result. With the shards in host memory already, ``cpu`` is where the state is built anyway,
    and the optimizer is the base optimizer itself.

    Args:
        build_optimizer: of the base optimizer, over local shards.
        plan: level and tiers.
        device: where training computes.
    Raises:
        ConfigError: the tier cannot be had there.
        OffloadError: (from the result) a rank has no disk space or cannot use the folder.
    """
    where = plan.offload_optimizer.device
    if where == "none":
        return build_optimizer
    if plan.level == 0:
        fix = "Write level 1, 2 or 3, or device: none."
        must = "needs ZeRO level 1 to 3: at level 0 every rank would stream the same whole state"
        raise ConfigError([Problem(_KEY, repr(where), must, fix)])
    if device.type != "cpu" and plan.offload_params.device == "none":
        fix = "Write device: cpu for offload_param_config too, at level 3."
        must = f"must be none where parameters are on {device.type}: the update runs where the parameters rest"
        raise ConfigError([Problem(_KEY, repr(where), must, fix)])
    if where == "cpu":
        return build_optimizer

    def factory(groups: Groups) -> tuple[torch.optim.Optimizer, Adaptation | None]:
        optimizer, adaptation = build_optimizer([{**group, "params": _proxies(group)} for group in groups])
        kernel = Kernel(optimizer)
        params = [list(group["params"]) for group in groups]
        if kernel.keys:
            return _streamed(kernel, params, plan.offload_optimizer), adaptation
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = own
        return optimizer, adaptation

    return factory


def _proxies(group: dict[str, Any]) -> list[nn.Parameter]:
    """One element of the group's format, for the base optimizer to be built and tried on."""
    dtypes = [param.dtype for param in group["params"]]
    return [nn.Parameter(torch.zeros(1, dtype=dtypes[0] if dtypes else torch.float32))]


def _streamed(kernel: Kernel, params: list[list[nn.Parameter]], plan: OffloadPlan) -> StreamedOptimizer:
    """Build on every rank or on none: a rank that went on alone would wait for the others."""
    assert plan.nvme_path is not None
    run_name = new_run_name()
    built, failure = None, None
    try:
        folder = RunFolder(plan.nvme_path, run_name, collectives.rank(), plan.keep_files)
        try:
            built = StreamedOptimizer(kernel, params, folder, plan.fast_init)
        except OffloadError:
            folder.remove()
            raise
    except OffloadError as error:
        failure = error
    num_failed = collectives.all_reduce_sum(torch.tensor(float(failure is not None)))
    if failure is not None:
        raise failure
    assert built is not None
    if num_failed:
        built.close()
        raise OffloadError(
            f"nvme_path: {int(num_failed)} other rank(s) cannot use {plan.nvme_path}; see their messages."
        )
    if collectives.rank() == 0 and (stale := stale_runs(plan.nvme_path)):
        logging.getLogger(__name__).warning(
            "%s holds files of runs that did not end cleanly: %s. They are not used; remove them to free the disk.",
            plan.nvme_path,
            ", ".join(stale),
        )
    return built
