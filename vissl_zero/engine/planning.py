"""Ways to run a recipe in a given amount of memory: all of them with their forecasts, or the cheapest that fits.

``ZERO.LEVEL: fit`` is decided here, before a run is resolved for good. What is chosen is written into the configuration
as if the user had written it, so ``config.resolved.yaml`` repeats the run without choosing again.

``plan --history`` compares forecast and measured memory of all runs under a folder.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vissl_zero.config.compose import Composed
from vissl_zero.config.fit_log import OUT_OF_MEMORY, SHARE_LEFT, STARTED, FitChoice, most_bytes, outcomes
from vissl_zero.config.host import RESERVE, MachineProfile, free_memory
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.run_config import RunConfig
from vissl_zero.config.saved import load_resolved
from vissl_zero.engine.dry_run import described_machine, dry_run, set_stage
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.sharding.candidates import Budget, Candidate, after_failures, because, nothing_fits, rank_candidates
from vissl_zero.sharding.step_time import cache_file, calibrate, machine_for

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
        machine: whose rates time the candidates.
    """

    plan: ResolvedRun
    candidates: list[Candidate]
    budget: Budget
    assumed: tuple[str, ...]
    num_images: int
    machine: MachineProfile

    @property
    def chosen(self) -> Candidate | None:
        """The cheapest that fits."""
        return next((candidate for candidate in self.candidates if candidate.is_chosen), None)


@dataclass(frozen=True)
class Fitted:
    """A configuration that ``fit`` may run: what to resolve instead of the one that says ``fit``.

    Attributes:
        cfg, notes, written: as ``resolve`` takes them.
        candidate: what was taken.
        budget: that it fits into.
    """

    cfg: RunConfig
    notes: tuple[str, ...]
    written: dict[str, Any]
    candidate: Candidate
    budget: Budget

    def choice(self, run: ResolvedRun) -> FitChoice:
        """For the launcher, with ``cfg`` resolved."""
        assert self.candidate.forecast.step is not None
        return FitChoice(run, str(self.candidate), self.candidate.forecast.step.resident_bytes, self.budget.memory)


def fitted(composed: Composed) -> tuple[RunConfig, tuple[str, ...], dict[str, Any]]:
    """Decide ``ZERO.LEVEL: fit``: the configuration, notes and written tree to resolve instead.

    A configuration that names a level is returned unchanged.

    Raises:
        ConfigError, DataError: what the run would be refused for; or nothing fits, with the smallest memory that would.
    """
    if str(composed.run.ZERO.LEVEL) != FIT:
        return composed.run, composed.notes, composed.written
    first = all_fitted(composed)[0]
    return first.cfg, first.notes, first.written


def all_fitted(composed: Composed) -> list[Fitted]:
    """As ``fitted``, followed by the plans to continue with, in turn, should memory run out all the same.

    Raises: as ``fitted``.
    """
    planned = plan_run(composed.run, composed.recipe)
    if planned.chosen is None:
        raise ConfigError([_nothing_fits(planned)])
    # Saved files show interpolations again, but not in place of the chosen values.
    written = copy.deepcopy(composed.written)
    written.pop("ZERO", None)
    written.get("DATA", {}).get("TRAIN", {}).pop("BATCHSIZE_PER_REPLICA", None)
    written.get("MODEL", {}).pop("ACTIVATION_CHECKPOINTING", None)
    first, *others = after_failures(planned.candidates, SHARE_LEFT)
    said = f"config.ZERO.LEVEL=fit took {first}: {because(planned.candidates, planned.budget)}"
    reasons = [
        said,
        *(f"config.ZERO.LEVEL=fit took {other}: a plan forecast to fit ran out of memory." for other in others),
    ]
    return [
        Fitted(with_candidate(composed.run, one), (*composed.notes, reason), written, one, planned.budget)
        for one, reason in zip([first, *others], reasons, strict=True)
    ]


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
    machine = described_machine(plan) or machine_for(plan.device)
    return Planned(plan, rank_candidates(found, budget), budget, stage.assumed, len(stage.loader.source), machine)


def budget_of(cfg: RunConfig, plan: ResolvedRun) -> Budget:
    """What a rank may use: as the configuration says, else what the machine has; less where the run has had too little.

    A plan of this run folder that ran out of memory says what the forecasts of later ones must stay below.
    """
    budget = _given_budget(cfg, plan)
    most = most_bytes(outcomes(Path(plan.run_dir)))
    if most is None or most >= budget.memory:
        return budget
    return replace(budget, memory=most, source=f"{budget.source}, where a larger plan ran out of memory")


def _given_budget(cfg: RunConfig, plan: ResolvedRun) -> Budget:
    zero = cfg.ZERO
    host = None if zero.HOST_MEMORY_GB is None else int(zero.HOST_MEMORY_GB * _GIB)
    disk = None if zero.DISK_GB is None else int(zero.DISK_GB * _GIB)
    if zero.MEMORY_GB is not None:
        return Budget(int(zero.MEMORY_GB * _GIB), host, disk, "config.ZERO.MEMORY_GB")
    given = cfg.MACHINE.MEMORY_GIB
    machine = described_machine(plan)
    if plan.device == "cuda" and zero.MACHINE_PROFILE and machine and machine.memory_gb and not given:
        memory, what = int(machine.memory_gb * _GIB), machine.name
    elif plan.device == "cuda":
        import torch

        found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else _ASSUMED_GPU
        what = "a GPU of this machine" if torch.cuda.is_available() else "a GPU, assumed"
        memory = int(given * _GIB) if given else found
    else:
        memory = (int(given * _GIB) if given else free_memory()) // plan.procs_per_node
        what = "this machine" if plan.procs_per_node == 1 else f"this machine over {plan.procs_per_node} processes"
    return Budget(max(0, memory - RESERVE), host, disk, f"{what}, less {RESERVE / _GIB:g} GiB for the process itself")


def measure_machine(folder: Path) -> tuple[MachineProfile, Path]:
    """Measure this machine's CPU, and the disk of ``folder``, and remember it; what was found, and the file of it.

    Raises:
        OSError: the folder or that file cannot be written.
    """
    return calibrate(folder), cache_file()


def with_candidate(cfg: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration that a user would write to get this candidate."""
    cfg = copy.deepcopy(cfg)
    cfg.ZERO.MEMORY_GB = cfg.ZERO.HOST_MEMORY_GB = cfg.ZERO.DISK_GB = None
    cfg.ZERO.MACHINE_PROFILE = None
    for path, value in candidate.settings().items():
        *blocks, key = path.split(".")
        setattr(functools.reduce(getattr, blocks, cfg), key, value)
    return cfg


def overrides_of(candidate: Candidate) -> list[str]:
    """What ``with_candidate`` changes, as words of the command line."""
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


@dataclass(frozen=True)
class Past:
    """A plan that was run.

    Attributes:
        folder: of the run.
        plan: for people.
        forecast_bytes: most a rank would hold (``StepMemory.resident_bytes``); None: not known.
        measured_bytes: of rank 0: what the process grew by over what it held before the model was built (CPU), or what
            torch had allocated at most (GPU); None: the run has not come to its end, or ran out of memory.
        outcome: "done", "out of memory" or "not done".
    """

    folder: Path
    plan: str
    forecast_bytes: int | None
    measured_bytes: int | None
    outcome: str

    @property
    def error(self) -> float | None:
        """Forecast over measured, less 1."""
        if self.forecast_bytes is None or not self.measured_bytes:
            return None
        return self.forecast_bytes / self.measured_bytes - 1


def history(folder: Path) -> Iterator[Past]:
    """All runs under ``folder``. Where ``fit`` did not choose, the forecast is made now, in a second or two."""
    for path in sorted(folder.rglob("config.resolved.yaml")):
        rows, place = outcomes(path.parent), path.parent
        for row in rows:
            if row.outcome == OUT_OF_MEMORY:
                yield Past(place, row.plan, row.forecast_bytes, None, OUT_OF_MEMORY)
        measured = _measured(place)
        chosen = next((row for row in reversed(rows) if row.outcome == STARTED), None)
        if chosen is None:
            plan, forecast = _forecast(path)
        else:
            plan, forecast = chosen.plan, chosen.forecast_bytes
        if not rows or rows[-1].outcome != OUT_OF_MEMORY:
            yield Past(place, plan, forecast, measured, "not done" if measured is None else "done")


def _measured(folder: Path) -> int | None:
    """Of the run's rank 0."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = int(json.loads((folder / "summary.json").read_text())["memory_before_bytes"])
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return max(int(json.loads(line)["bytes"]["peak"]) for line in lines) - before
    return None


def _forecast(path: Path) -> tuple[str, int | None]:
    try:
        forecast = dry_run(load_resolved(path)).forecast
    except VisslZeroError:
        return "?", None
    return f"level {forecast.wrap_plan.level}", None if forecast.step is None else forecast.step.resident_bytes
