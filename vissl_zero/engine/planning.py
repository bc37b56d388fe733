"""Ways to run a recipe in the memory there is: all of them with their forecasts, or the cheapest that fits.

``ZERO.LEVEL: fit`` is decided here, before a run is resolved for good. What is chosen is written into the configuration
as if the user had written it, so ``config.resolved.yaml`` repeats the run without choosing again.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vissl_zero.config.compose import Composed
from vissl_zero.config.host import RESERVE, free_memory
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.run import RunConfig
from vissl_zero.engine.rehearsal import set_stage
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.sharding.candidates import Budget, Candidate, because, nothing_fits, rank_candidates

FIT = "fit"
_GIB = 2**30
_ASSUMED_GPU = 80 * _GIB
_SPLITS = (2, 4, 8)  # micro-batches tried, times those of the recipe


@dataclass(frozen=True)
class Planned:
    """A recipe and all ways to run it.

    Attributes:
        plan: the run as it would be at level 0.
        candidates: cheapest first.
        budget: of a rank.
        assumed: sentences on what was assumed of the images.
        num_images: of the run.
    """

    plan: ResolvedRun
    candidates: list[Candidate]
    budget: Budget
    assumed: tuple[str, ...]
    num_images: int

    @property
    def chosen(self) -> Candidate | None:
        """The cheapest that fits."""
        return next((candidate for candidate in self.candidates if candidate.is_chosen), None)


def fitted(composed: Composed) -> tuple[RunConfig, tuple[str, ...], dict[str, Any]]:
    """Decide ``ZERO.LEVEL: fit``: the configuration, notes and written tree to resolve instead.

    What names a level is returned as it is.

    Raises:
        ConfigError, DataError: what the run would be refused for; or nothing fits, with the smallest memory that would.
    """
    cfg = composed.run
    if str(cfg.ZERO.LEVEL) != FIT:
        return cfg, composed.notes, composed.written
    planned = plan_run(cfg, composed.recipe)
    chosen = planned.chosen
    if chosen is None:
        raise ConfigError([_nothing_fits(planned)])
    said = f"config.ZERO.LEVEL=fit took {chosen}: {because(planned.candidates, planned.budget)}"
    # Interpolations are put back into what is saved: none in the place of what was chosen.
    written = copy.deepcopy(composed.written)
    written.pop("ZERO", None)
    written.get("DATA", {}).get("TRAIN", {}).pop("BATCHSIZE_PER_REPLICA", None)
    written.get("MODEL", {}).pop("ACTIVATION_CHECKPOINTING", None)
    return with_candidate(cfg, chosen), (*composed.notes, said), written


def plan_run(cfg: RunConfig, recipe: str = "", run_dir: str | Path = "/nowhere") -> Planned:
    """Forecast every way to run a recipe that trains the same.

    Args:
        cfg: as ``compose`` gives it; with ``DRY_RUN`` images need not be here.
        recipe: what ``config=`` named.
        run_dir: where it would write.
    Raises:
        ConfigError, DataError: what the run would be refused for.
    """
    plain = _without_choice(cfg)
    plan = resolve(plain, run_dir, recipe=recipe)
    tiers = cfg.ZERO.offload_optimizer_config, cfg.ZERO.offload_param_config
    folder = next((tier.nvme_path for tier in tiers if tier.nvme_path), None)
    base = replace(plan.sharding, offload_optimizer=replace(plan.sharding.offload_optimizer, nvme_path=folder))
    plan = replace(plan, sharding=base)
    stage = set_stage(plan)
    found = stage.forecasts()
    if stage.can_split():
        for times in _SPLITS:
            if plan.batch_per_rank % times == 0:
                batch, number = plan.batch_per_rank // times, plan.accumulation_steps * times
                found += set_stage(replace(plan, batch_per_rank=batch, accumulation_steps=number)).forecasts()
    budget = budget_of(cfg, plan)
    return Planned(plan, rank_candidates(found, budget), budget, stage.assumed, len(stage.loader.source))


def budget_of(cfg: RunConfig, plan: ResolvedRun) -> Budget:
    """What a rank may use: as the configuration says, else what the machine has."""
    zero = cfg.ZERO
    host = None if zero.HOST_MEMORY_GB is None else int(zero.HOST_MEMORY_GB * _GIB)
    disk = None if zero.DISK_GB is None else int(zero.DISK_GB * _GIB)
    if zero.MEMORY_GB is not None:
        return Budget(int(zero.MEMORY_GB * _GIB), host, disk, "config.ZERO.MEMORY_GB")
    given = cfg.MACHINE.MEMORY_GIB
    if plan.device == "cuda":
        import torch

        found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else _ASSUMED_GPU
        what = "a GPU of this machine" if torch.cuda.is_available() else "a GPU, assumed"
        memory = int(given * _GIB) if given else found
    else:
        memory = (int(given * _GIB) if given else free_memory()) // plan.procs_per_node
        what = "this machine" if plan.procs_per_node == 1 else f"this machine over {plan.procs_per_node} processes"
    return Budget(max(0, memory - RESERVE), host, disk, f"{what}, less {RESERVE / _GIB:g} GiB for the process itself")


def with_candidate(cfg: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration that a user would write to get this candidate."""
    cfg = copy.deepcopy(cfg)
    cfg.ZERO.MEMORY_GB = cfg.ZERO.HOST_MEMORY_GB = cfg.ZERO.DISK_GB = None
    for path, value in candidate.settings().items():
        *blocks, key = path.split(".")
        setattr(functools.reduce(getattr, blocks, cfg), key, value)
    return cfg


def overrides_of(candidate: Candidate) -> list[str]:
    """The same as words of the command line."""
    return [f"config.{path}={'null' if value is None else value}" for path, value in candidate.settings().items()]


def _without_choice(cfg: RunConfig) -> RunConfig:
    """The configuration at level 0 (or 3, where AMP asks for parameters in half precision), nothing offloaded."""
    plain = copy.deepcopy(cfg)
    for block in (plain.ZERO.offload_optimizer_config, plain.ZERO.offload_param_config):
        block.device, block.nvme_path = "none", None
    if str(plain.ZERO.LEVEL) == FIT:
        plain.ZERO.LEVEL = 0
    return plain


def _nothing_fits(planned: Planned) -> Problem:
    halves = ", or let AMP compute in bfloat16, or halve config.DATA.TRAIN.BATCHSIZE_PER_REPLICA (both change numbers)"
    return nothing_fits(
        planned.candidates,
        planned.budget,
        level="config.ZERO.LEVEL",
        memory="config.ZERO.MEMORY_GB",
        disk=" or name a disk (nvme_path)",
        others="" if planned.plan.sharding.precision.autocast else halves,
    )
