"""Plans that run a recipe in a given amount of memory: all of them with their forecasts, or the cheapest that fits.

``ZERO.LEVEL: fit`` is decided here, before the run is resolved. The chosen settings are written into the configuration
as if the user had written them, so ``config.resolved.yaml`` repeats the run without choosing again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vissl_zero.config.compose import Composed
from vissl_zero.config.run_config import RunConfig
from vissl_zero.engine.forecast_log import outcomes
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.planner.candidates import (
    Budget,
    Candidate,
    Forecasts,
    because,
    chosen_of,
    kept_in_part,
    nothing_fits,
    rank_candidates,
    recomputed_in_part,
    smallest,
)
from vissl_zero.planner.dry_run import Stage, described_machine, set_stage
from vissl_zero.planner.fit_plans import FitOption, FitPlans, most_bytes, shortfall, with_option
from vissl_zero.planner.machine_profile import MachineProfile
from vissl_zero.planner.step_time import machine_for
from vissl_zero.resolve.host import RESERVE, free_memory
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.model.float8 import device_problems

_FIT = "fit"
_GIB = 2**30
_ASSUMED_GPU = 80 * _GIB
_SPLITS = (2, 4, 8)  # factors to try for the recipe's micro-batches
_PASSES = (4, 16)  # factors to try for the recipe's passes
_FEW = 8  # images; an advised smaller batch is a multiple of it


@dataclass(frozen=True)
class Planned:
    """A recipe and all plans that run it.

    Attributes:
        config: configuration as composed.
        plan: the resolved run without offload, at level 0 if the configuration asks for fit.
        candidates: candidates, cheapest first.
        budget: budget of a rank.
        assumed: sentences on what was assumed about the images.
        num_images, num_steps: number of images of an epoch, and of optimizer steps of the run.
        machine: machine whose rates time the candidates.
    """

    config: RunConfig
    plan: ResolvedRun
    candidates: list[Candidate]
    budget: Budget
    assumed: tuple[str, ...]
    num_images: int
    num_steps: int
    machine: MachineProfile

    @property
    def chosen(self) -> Candidate | None:
        """The cheapest candidate that fits; None: nothing fits."""
        return chosen_of(self.candidates)


def fitted(composed: Composed) -> Composed:
    """Decide ``ZERO.LEVEL: fit``. Return the configuration to resolve.

    A configuration that names a level is returned unchanged.

    Raises:
        ConfigError, DataError: the run would be refused with the same error, or no plan fits; the error names the
            smallest sufficient memory.
    """
    if str(composed.run.ZERO.LEVEL) != _FIT:
        return composed
    plans = fit_plans(composed)
    return with_option(composed, plans.first(), plans.why)


def fit_plans(composed: Composed, run_dir: str | Path = "/nowhere", free_bytes: int | None = None) -> FitPlans:
    """List all plans that ``fit`` may run.

    Args:
        composed: a configuration whose ZERO.LEVEL is fit.
        run_dir: run folder.
        free_bytes: free memory of this machine; measured if None.
    Raises: see ``fitted``.
    """
    planned = plan_run(composed.run, composed.recipe, run_dir, free_bytes)
    if planned.chosen is None:
        raise ConfigError([_nothing_fits(planned)])
    budget = planned.budget
    options = [
        FitOption(str(candidate), candidate.forecast.step.resident_bytes, candidate.settings())
        for candidate in planned.candidates
        if candidate.forecast.step is not None and replace(budget, memory=sys.maxsize).excess(candidate.forecast) == 0
    ]
    why = f"config.ZERO.LEVEL=fit took {planned.chosen}: {because(planned.candidates, budget)}"
    return FitPlans(options, budget.memory, budget.given, why)


def plan_run(
    cfg: RunConfig, recipe: str = "", run_dir: str | Path = "/nowhere", free_bytes: int | None = None
) -> Planned:
    """Forecast every plan of a recipe that trains the same model.

    Args:
        cfg: configuration as ``compose`` returns it; with ``DRY_RUN``, images need not be here.
        recipe: value of ``config=``.
        run_dir: run folder.
        free_bytes: free bytes of this machine; None: this measures them.
    Raises:
        ConfigError, DataError: the run would be refused with the same error.
    """
    plain = _without_choice(cfg)
    plan = resolve(plain, run_dir, recipe=recipe)
    tiers = cfg.ZERO.offload_optimizer_config, cfg.ZERO.offload_param_config
    folder = next((tier.nvme_path for tier in tiers if tier.nvme_path), None)
    machine = described_machine(plan) or machine_for(plan.device)
    if plan.sharding.float8.layers and plan.device == "cuda" and machine.capability is not None:
        capability = divmod(round(10 * machine.capability), 10)
        if problems := device_problems(plan.sharding.float8.scales, capability, "config.MODEL.FLOAT8"):
            raise ConfigError(problems)
    base = replace(plan.sharding, offload_optimizer=replace(plan.sharding.offload_optimizer, nvme_path=folder))
    plan = replace(plan, sharding=base)
    stage = set_stage(plan)
    stages = [stage]
    if stage.can_split():
        for times in _SPLITS:
            if plan.batch_per_rank % times == 0:
                batch, number = plan.batch_per_rank // times, plan.accumulation_steps * times
                part = replace(plan, batch_per_rank=batch, accumulation_steps=number)
                stages.append(set_stage(part))
    budget = _budget_of(cfg, plan, free_bytes)
    candidates = rank_candidates(_forecasts(stages, budget), budget, plan.world_size, base.level)
    num_images, num_steps = len(stage.loader.source), plan.num_steps(stage.loader.steps_per_epoch)
    return Planned(cfg, plan, candidates, budget, stage.assumed, num_images, num_steps, machine)


def _forecasts(stages: Sequence[Stage], budget: Budget) -> Forecasts:
    """Forecast all stages; for the chosen plan also plans that recompute or offload only as much as needed."""
    by_number = {stage.plan.accumulation_steps: stage for stage in stages}
    rows = [row for stage in stages for row in stage.forecasts()]

    def chosen() -> Candidate | None:
        return chosen_of(rank_candidates(rows, budget, stages[0].plan.world_size))

    if (first := chosen()) is not None and first.sharding.is_recomputed:
        same_number = [row for row in rows if row[1] == first.micro_batches]
        rows += by_number[first.micro_batches].apply(partial(recomputed_in_part, same_number, budget))
    if (second := chosen()) is not None:
        rows += by_number[second.micro_batches].apply(partial(kept_in_part, second, budget))
    return rows


def _budget_of(cfg: RunConfig, plan: ResolvedRun, free_bytes: int | None = None) -> Budget:
    """Return the budget of a rank: as configured, or the machine's memory; less after a plan has run out of memory.

    If plans of this run folder ran out of memory, later forecasts must be smaller than theirs. The bytes that these
    plans took beyond their forecasts are subtracted from the budget.
    """
    budget, rows = _plain_budget(cfg, plan, free_bytes), outcomes(Path(plan.run_dir))
    most = most_bytes(rows)
    if most is None:
        return budget
    memory = max(0, min(most, budget.memory - shortfall(rows)))
    return replace(budget, memory=memory, source=f"{budget.source}, where a larger plan ran out of memory")


def _plain_budget(cfg: RunConfig, plan: ResolvedRun, free_bytes: int | None) -> Budget:
    zero = cfg.ZERO
    host, disk = (None if gib is None else int(gib * _GIB) for gib in (zero.HOST_MEMORY_GB, zero.DISK_GB))
    if zero.MEMORY_GB is not None:
        memory = int(zero.MEMORY_GB * _GIB)
        return Budget(memory, host, disk, "config.ZERO.MEMORY_GB", given=memory)
    gib = cfg.MACHINE.MEMORY_GIB
    is_given = bool(gib)
    machine = described_machine(plan)
    if plan.device == "cuda" and zero.MACHINE_PROFILE and machine and machine.memory_gb and not gib:
        memory, what, is_given = int(machine.memory_gb * _GIB), machine.name, True
    elif plan.device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else _ASSUMED_GPU
        what = "a GPU of this machine" if torch.cuda.is_available() else "a GPU, assumed"
        memory, what = (int(gib * _GIB), f"a GPU of {gib:g} GiB") if gib else (total, what)
    else:
        free = free_memory() if free_bytes is None else free_bytes
        memory = (int(gib * _GIB) if gib else free) // plan.procs_per_node
        what = f"a machine of {gib:g} GiB" if gib else "this machine"
        what += "" if plan.procs_per_node == 1 else f" over {plan.procs_per_node} processes"
    memory = max(0, memory - RESERVE)
    source = f"{what}, less {RESERVE / _GIB:g} GiB for the process itself"
    return Budget(memory, host, disk, source, given=memory if is_given else None)


def _without_choice(cfg: RunConfig) -> RunConfig:
    """Return a copy of the configuration without offload, and with level 0 in the place of fit."""
    plain = copy.deepcopy(cfg)
    for block in (plain.ZERO.offload_optimizer_config, plain.ZERO.offload_param_config):
        block.device, block.nvme_path = "none", None
    if str(plain.ZERO.LEVEL) == _FIT:
        plain.ZERO.LEVEL = 0
    return plain


def _nothing_fits(planned: Planned) -> Problem:
    halves = ", or let AMP compute in bfloat16, or halve config.DATA.TRAIN.BATCHSIZE_PER_REPLICA (both change numbers)"
    problem = nothing_fits(
        planned.candidates,
        planned.budget,
        level="config.ZERO.LEVEL",
        memory="config.ZERO.MEMORY_GB",
        disk="" if planned.plan.sharding.offload_optimizer.nvme_path else " or name a disk (nvme_path)",
        others="" if planned.plan.sharding.precision.autocast else halves,
    )
    return replace(problem, fix=" ".join([problem.fix, *(str(remedy) for remedy in remedies(planned))]))


@dataclass(frozen=True)
class Remedy:
    """A change to a recipe that makes a plan fit where none does.

    Attributes:
        candidate: the cheapest plan with this change that fits.
        override: override to add to the command.
        num_images: images of a step.
        is_same: whether a step has as many images as before.
    """

    candidate: Candidate
    override: str
    num_images: int
    is_same: bool

    def __str__(self) -> str:
        step, time = self.candidate.forecast.step, self.candidate.relative_time
        assert step is not None
        begin = "To keep" if self.is_same else "For"
        times = f", {time:.2f} x the time" if self.is_same and time is not None else ""
        forecast = f"forecast {step.resident_bytes / _GIB:.3g} GiB{times}: {self.candidate}"
        return f"{begin} {self.num_images:,} images a step: {self.override} ({forecast})."


def remedies(planned: Planned) -> list[Remedy]:
    """Find changes that make a plan fit if none does: more passes, exact accumulation, or a smaller batch.

    Cost: up to eight forecasts, a few seconds each.
    """
    remedies: list[Remedy] = []
    for remedy in (_passes_remedy, _exact_remedy, _batch_remedy):
        with suppress(VisslZeroError):
            remedies += remedy(planned)
    return remedies


def _passes_remedy(planned: Planned) -> Iterator[Remedy]:
    """Try to split a micro-batch into more passes, fewest first; models whose rows see each other are refused."""
    plan = planned.plan
    for times in _PASSES:
        number = plan.crop_passes * times
        if chosen := _chosen_with(planned, set_stage(replace(plan, crop_passes=number))):
            yield Remedy(chosen, f"config.TRAINER.CROP_PASSES={number}", plan.global_batch, is_same=True)
            return


def _chosen_with(planned: Planned, stage: Stage) -> Candidate | None:
    """Choose among the candidates and the plans of a changed recipe."""
    before = [(c.sharding, c.micro_batches, c.batch_per_rank, c.forecast) for c in planned.candidates]
    rows = [*before, *stage.forecasts(planned.budget)]
    return chosen_of(rank_candidates(rows, planned.budget, planned.plan.world_size))


def _exact_remedy(planned: Planned) -> Iterator[Remedy]:
    """Try micro-batches that share one loss, largest first."""
    plan, key = planned.plan, "config.TRAINER.EXACT_ACCUMULATION=true"
    if plan.exact_accumulation:
        return
    for times in _SPLITS:
        batch, number = plan.batch_per_rank // times, plan.accumulation_steps * times
        if plan.batch_per_rank % times or any(candidate.micro_batches == number for candidate in planned.candidates):
            continue
        stage = set_stage(replace(plan, exact_accumulation=True, batch_per_rank=batch, accumulation_steps=number))
        if not stage.can_split():
            return
        if chosen := _chosen_with(planned, stage):
            yield Remedy(chosen, key, plan.global_batch, is_same=True)
            return


def _batch_remedy(planned: Planned) -> Iterator[Remedy]:
    """Find the largest micro-batch that fits with the smallest plan, by a line through two forecasts and a third."""
    plan, least = planned.plan, smallest(planned.candidates)
    if least is None or least.forecast.step is None or least.batch_per_rank < _FEW:
        return

    def at(batch: int) -> Candidate:
        images = batch * plan.world_size * least.micro_batches
        part = replace(plan, batch_per_rank=batch, accumulation_steps=least.micro_batches, global_batch=images)
        forecast = set_stage(replace(part, sharding=least.sharding)).forecast()
        smaller = [(least.sharding, least.micro_batches, batch, forecast)]
        return rank_candidates(smaller, planned.budget, plan.world_size)[0]

    half = least.batch_per_rank // 2
    fewer = at(half).forecast.step
    if fewer is None:
        return
    per_image = (least.forecast.step.resident_bytes - fewer.resident_bytes) / (least.batch_per_rank - half)
    left = planned.budget.memory - fewer.resident_bytes
    most = min(half + int(left // max(per_image, 1)), least.batch_per_rank - 1)
    if most >= 1 and (remedy := at(most // _FEW * _FEW or most)).fits:
        override = f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={remedy.batch_per_rank}"
        if remedy.micro_batches != plan.accumulation_steps:
            override += f" config.ZERO.gradient_accumulation_steps={remedy.micro_batches}"
        images = remedy.batch_per_rank * plan.world_size * remedy.micro_batches
        yield Remedy(remedy, override, images, is_same=False)
