"""All sharding plans that train the same model, with their forecasts; which plans fit, and the cheapest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.planner.fit_plans import gib
from vissl_zero.planner.forecast import Forecast, Forecaster, Recomputable
from vissl_zero.resolve.resolved import TIERS, ShardingPlan
from vissl_zero.sharding.model.precision import dtype_of

_GIB = 2**30
_TRIES = 6  # most recordings, or forecasts, of a search
_LEAST_GAIN = 0.01  # share of a step's time that a further recording must promise: one takes 10 s for a ViT-7B
Forecasts = list[tuple[ShardingPlan, int, int, Forecast]]  # plan, micro-batches, images of a micro-batch, forecast


@dataclass(frozen=True)
class Budget:
    """The memory that a rank may use, in bytes.

    Attributes:
        memory: memory of the device on which the rank computes, without the process itself.
        host: host memory in addition, if the rank computes on a GPU; None: no limit.
        disk: disk space; None: no limit.
        source: where ``memory`` comes from, as messages print it.
        given: ``memory`` if the user has set it; None: it was measured.
    """

    memory: int
    host: int | None = None
    disk: int | None = None
    source: str = ""
    given: int | None = None

    def excess(self, forecast: Forecast) -> int | None:
        """Sum the bytes of a plan over the budget in memory, host memory and disk; 0: it fits; None: unknown."""
        step = forecast.step
        if step is None:
            return None
        pairs = (step.resident_bytes, self.memory), (step.host_bytes, self.host), (step.disk_bytes, self.disk)
        return sum(max(0, num_bytes - limit) for num_bytes, limit in pairs if limit is not None)


@dataclass(frozen=True)
class Candidate:
    """A plan with its forecast.

    Attributes:
        sharding: level, recomputation and tiers of the plan.
        micro_batches: micro-batches of a step.
        batch_per_rank: images of a micro-batch on a rank.
        forecast: memory and time of the plan.
        world_size: number of ranks.
        relative_time: time of a step, divided by that of level 0 without recomputation; None: unknown.
        excess: bytes over the budget; None: unknown.
        is_chosen: whether this is the cheapest candidate that fits.
    """

    sharding: ShardingPlan
    micro_batches: int
    batch_per_rank: int
    forecast: Forecast
    world_size: int
    relative_time: float | None
    excess: int | None
    is_chosen: bool = False

    @property
    def fits(self) -> bool | None:
        """Return whether the plan is within the budget; None: unknown."""
        return None if self.excess is None else self.excess == 0

    @property
    def is_grouped(self) -> bool:
        """Return whether several groups of ranks hold a copy of the state each (hybrid sharding)."""
        return self.sharding.level > 0 and 1 < self.sharding.shard_group_size < self.world_size

    def settings(self) -> dict[str, Any]:
        """Return the settings that select this candidate: key path under ``config`` -> value."""
        optimizer, params = self.sharding.offload_optimizer, self.sharding.offload_params
        return {
            "ZERO.LEVEL": self.sharding.level,
            "ZERO.SHARD_GROUP_SIZE": self.sharding.shard_group_size if self.is_grouped else -1,
            "MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING": self.sharding.is_recomputed,
            "MODEL.ACTIVATION_CHECKPOINTING.BLOCKS": list(self.sharding.checkpoint_blocks),
            "ZERO.offload_optimizer_config.device": optimizer.device,
            "ZERO.offload_optimizer_config.nvme_path": optimizer.nvme_path if optimizer.is_on_disk else None,
            "ZERO.offload_param_config.device": params.device,
            "ZERO.offload_param_config.nvme_path": params.nvme_path if params.is_on_disk else None,
            "ZERO.offload_param_config.max_in_cpu": params.max_in_cpu if params.is_on_disk else None,
            "DATA.TRAIN.BATCHSIZE_PER_REPLICA": self.batch_per_rank,
            "ZERO.gradient_accumulation_steps": self.micro_batches,
        }

    def overrides(self) -> list[str]:
        """Return ``settings`` as overrides of the command line."""
        return [f"config.{path}={_word(value)}" for path, value in self.settings().items()]

    def __str__(self) -> str:
        words = [f"level {self.sharding.level}"]
        if self.is_grouped:
            words.append(f"groups of {self.sharding.shard_group_size}")
        if self.sharding.checkpoint_blocks:
            number = len(self.sharding.checkpoint_blocks)
            words.append(f"{number} block{'s' * (number > 1)} recomputed")
        elif self.sharding.is_recomputed:
            words.append("recomputed")
        if self.sharding.offload_optimizer.device != "none":
            words.append(f"optimizer on {self.sharding.offload_optimizer.device}")
        params = self.sharding.offload_params
        if params.device != "none":
            kept = f" ({params.max_in_cpu:,} elements in memory)" if params.max_in_cpu else ""
            words.append(f"parameters on {params.device}{kept}")
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches of {self.batch_per_rank}")
        return ", ".join(words)


def _word(value: Any) -> str:
    """Format a value for the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _sharding_plans(
    base: ShardingPlan, world_size: int, num_nodes: int, device_type: str, can_recompute: bool
) -> Iterator[ShardingPlan]:
    """Yield every plan that trains the same model as ``base`` and that the rules allow.

    Args:
        base: number formats, clipping, engine, and a folder if there is a disk. If it computes parameters in half
            precision, lower levels would train another model and are left out.
        world_size, num_nodes: number of ranks and of machines.
        device_type: "cpu" or "cuda". On the CPU, state is in host memory anyway, so no plan uses the tier ``cpu``.
        can_recompute: whether the model has units that can be recomputed.
    """
    folder = base.offload_optimizer.nvme_path or base.offload_params.nvme_path
    is_half = base.precision.casts_parameters
    is_useful = {"device": True, "host": device_type == "cuda", "disk": bool(folder)}
    devices = [device for device, place in TIERS.items() if is_useful[place]]
    optimizer_tiers, param_tiers = (
        [replace(block, device=device, nvme_path=folder if TIERS[device] == "disk" else None) for device in devices]
        for block in (base.offload_optimizer, base.offload_params)
    )
    recomputations = [base.keeping_activations()] if can_recompute or base.is_recomputed else []
    recomputed = base if base.is_recomputed else replace(base, checkpoint_every=1) if can_recompute else base
    for recomputation in [*recomputations, recomputed]:
        for level in range(base.level if is_half else 0, 4):
            for optimizer in optimizer_tiers if level else optimizer_tiers[:1]:
                for params in param_tiers if level == 3 else param_tiers[:1]:
                    is_offloaded = {optimizer.device, params.device} != {"none"}
                    if world_size == 1 and level and not (is_offloaded or is_half):
                        continue  # a single rank has nothing to shard
                    if params.device != "none" and optimizer.device == "none":
                        continue  # the optimizer state is larger, and is read only once a step
                    for size in _group_sizes(base, world_size, num_nodes) if level else [world_size]:
                        cut = replace(recomputation, level=level, shard_group_size=size)
                        yield replace(cut, offload_optimizer=optimizer, offload_params=params)


def _group_sizes(base: ShardingPlan, world_size: int, num_nodes: int) -> list[int]:
    """List the possible sizes of shard groups: all ranks or, with several machines, the ranks of one machine."""
    if 1 < base.shard_group_size < world_size:
        return [base.shard_group_size]  # the user set it
    local = world_size // num_nodes
    # Groups sum gradients in another order, so the results differ in their last bits.
    can_be_grouped = base.engine == "torch" and not base.deterministic and 1 < local < world_size
    return [world_size, local] if can_be_grouped else [world_size]


def rank_candidates(plans: Forecasts, budget: Budget, world_size: int, level: int = 0) -> list[Candidate]:
    """Make candidates of forecasts, sort them by cost, and mark the first that fits as chosen.

    Args:
        plans: forecasts to compare.
        budget: budget of a rank.
        world_size: number of ranks.
        level: level of the recipe; among plans that take equally long, those of this level come first.
    """
    plain = [forecast.seconds for plan, _, _, forecast in plans if plan.level == 0 and forecast.seconds]
    known = [forecast.seconds for _, _, _, forecast in plans if forecast.seconds]
    unit = min(plain or known or [1.0])
    candidates = []
    for plan, number, batch, forecast in plans:
        time = None if forecast.seconds is None else forecast.seconds / unit
        candidates.append(Candidate(plan, number, batch, forecast, world_size, time, budget.excess(forecast)))
    candidates.sort(key=lambda candidate: _cost(candidate, level))
    chosen = next((index for index, candidate in enumerate(candidates) if candidate.fits), None)
    if chosen is not None:
        candidates[chosen] = replace(candidates[chosen], is_chosen=True)
    return candidates


def chosen_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the chosen candidate among those of ``rank_candidates``; None: nothing fits."""
    return next((candidate for candidate in candidates if candidate.is_chosen), None)


def because(candidates: Sequence[Candidate], budget: Budget) -> str:
    """Explain in a clause why ``rank_candidates`` chose its candidate."""
    index = next(index for index, candidate in enumerate(candidates) if candidate.is_chosen)
    step = candidates[index].forecast.step
    assert step is not None
    text = f"the cheapest that fits, {gib(step.resident_bytes)} of {gib(budget.memory)} GiB ({budget.source})"
    rows = without_doubles(candidates[: index + 1])
    if len(rows) == 1:
        return f"{text}."
    last = rows[-2]
    if last.forecast.step is None:
        return f"{text}; the memory of {last} is unknown."
    return f"{text}; the next cheaper plan ({last}) needs {gib(last.forecast.step.resident_bytes)} GiB."


def without_doubles(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Remove each plan of level 2 whose printed values equal those of level 1, unless it is chosen."""
    figures = {(candidate.sharding, candidate.micro_batches): _figures(candidate) for candidate in candidates}
    lower = [(replace(candidate.sharding, level=1), candidate.micro_batches) for candidate in candidates]
    return [
        candidate
        for candidate, key in zip(candidates, lower, strict=True)
        if candidate.sharding.level != 2 or candidate.is_chosen or figures.get(key) != _figures(candidate)
    ]


def _figures(candidate: Candidate) -> tuple[Any, ...]:
    """Return the values of a plan that tables print; the time is rounded to a hundredth."""
    step, time = candidate.forecast.step, candidate.relative_time
    return (
        None if time is None else round(time, 2),
        None if step is None else (step.resident_bytes, step.host_bytes, step.disk_bytes, *step.by_kind.values()),
    )


def smallest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Find the candidate closest to the budget, and among equals the smallest peak; None: no memory is known."""
    known = [candidate for candidate in candidates if candidate.forecast.step is not None]
    return min(known, key=lambda c: (c.excess or 0, c.forecast.step.resident_bytes), default=None)  # type: ignore[union-attr]


def nothing_fits(
    candidates: Sequence[Candidate], budget: Budget, *, level: str, memory: str, disk: str, others: str, block: str = ""
) -> Problem:
    """Return the problem that no candidate fits; it names the smallest sufficient memory, if known.

    Args:
        level, memory: names of the two keys, as the user writes them.
        disk: advice to name a disk; empty if one is named.
        others: further advice.
        block: prefix of the two keys in messages.
    """
    least = smallest(candidates)
    if least is None or least.forecast.step is None:
        must = f"needs a forecast, and there is none ({candidates[0].forecast.unknown})"
        return Problem(f"{block}{level}", "'fit'", must, f"Set {level}=0, 1, 2 or 3.")
    need = least.forecast.step.resident_bytes
    must = f"is too little for every plan that trains the same model; the smallest takes {gib(need)} GiB ({least})"
    # Rounded up to the next thousandth, so that the advised memory suffices.
    fix = f"Write {memory}={(int(need / _GIB * 1000) + 1) / 1000:g}{disk}, add ranks{others}."
    return Problem(f"{block}{memory}", gib(budget.memory), must, fix)


def forecast_all(
    forecaster: Forecaster, base: ShardingPlan, micro_batches: int, batch: int, budget: Budget | None = None
) -> Forecasts:
    """Forecast all plans with ``micro_batches`` that no rule refuses. Call it in ``FakeTensorMode``.

    Args:
        forecaster: forecaster of the model, for the ranks and the device of the run.
        base: see ``_sharding_plans``.
        micro_batches, batch: micro-batches of a step, and images of a micro-batch.
        budget: if no plan that recomputes fits it, skip the others, which take more memory and another recording.
    Raises:
        ConfigError: every plan is refused; this is the error of the first. Not every optimizer can use a disk.
    """
    subject = forecaster.subject
    machines = subject.world_size, subject.num_nodes, subject.device_type
    plans = list(_sharding_plans(base, *machines, forecaster.can_recompute))
    if budget is not None:
        plans.sort(key=lambda plan: not plan.is_recomputed)
    rows: Forecasts = []
    refusals: list[ConfigError] = []
    for plan in plans:
        is_first_other = not plan.is_recomputed and bool(rows) and rows[-1][0].is_recomputed
        if budget is not None and is_first_other and all(budget.excess(forecast) for *_, forecast in rows):
            break
        try:
            rows.append((plan, micro_batches, batch, forecaster.forecast(plan, micro_batches)))
        except ConfigError as error:
            refusals.append(error)
    if refusals and not rows:
        raise refusals[0]
    return rows


def recomputed_in_part(plans: Forecasts, budget: Budget, forecaster: Forecaster) -> Forecasts:
    """Forecast plans that recompute only as many blocks as are needed to fit the budget.

    They start from plans without recomputation that do not fit. Blocks that save most bytes per second of
    recomputation are recomputed first. Call it in ``FakeTensorMode``. Cost: at most ``_TRIES`` recordings, and none if
    a plan without recomputation is the cheapest that fits.

    Args:
        plans: forecasts of ``forecaster``, all with the same number of micro-batches.
        budget: budget of a rank.
    """
    best = min((row[3].seconds for row in plans if row[3].seconds and budget.excess(row[3]) == 0), default=None)
    parts = [
        _PartialRecomputation(row, budget.excess(row[3]) or 0)
        for row in plans
        if not row[0].is_recomputed and row[3].seconds and budget.excess(row[3])
    ]
    blocks = forecaster.recomputable(parts[0].row[0]) if parts else []
    more: Forecasts = []
    for _ in range(_TRIES):
        tried = [(part.seconds(blocks, number), number) for part in parts if (number := part.guess(blocks))]
        seconds, number = min(tried, default=(0.0, 0))
        if best is None or not number or seconds > (1 - _LEAST_GAIN) * best:
            break
        names = tuple(block.name for block in blocks[:number])
        for part in parts:  # all share one recording
            plan, micro_batches, batch, _ = part.row
            outcome = forecaster.forecast(replace(plan, checkpoint_blocks=names), micro_batches)
            is_fitting = budget.excess(outcome) == 0
            part.note(blocks, number, outcome, is_fitting)
            if outcome.seconds and outcome.seconds < best and is_fitting:
                best = outcome.seconds
                named = replace(plan, checkpoint_blocks=outcome.wrap_plan.checkpointed)  # in the model's order
                more.append((named, micro_batches, batch, outcome))
    return more


def kept_in_part(chosen: Candidate, budget: Budget, forecaster: Forecaster) -> Forecasts:
    """Forecast ``chosen`` with as many parameters in memory as fit; empty if its parameters are not on a disk.

    Call it in ``FakeTensorMode``. Cost: at most ``_TRIES`` forecasts, and no recording.

    Args:
        chosen: candidate that ``rank_candidates`` chose.
        budget: budget of a rank.
        forecaster: forecaster that forecast ``chosen``.
    """
    plan, forecast = chosen.sharding, chosen.forecast
    if forecast.step is None or not plan.offload_params.is_on_disk or plan.offload_params.max_in_cpu is not None:
        return []
    room = budget.memory - forecast.step.resident_bytes
    if forecaster.subject.device_type != "cpu":  # then parameters are kept in host memory
        room = 0 if budget.host is None else budget.host - forecast.step.host_bytes
    # The parameter, its gradient, and the teacher's parameter.
    num_bytes = (3 if forecast.teacher_params else 2) * dtype_of(plan.precision.master).itemsize
    for _ in range(_TRIES):
        if room < num_bytes:
            break
        kept = replace(plan, offload_params=replace(plan.offload_params, max_in_cpu=room // num_bytes))
        outcome = forecaster.forecast(kept, chosen.micro_batches)
        excess = budget.excess(outcome)
        if not excess:
            return [(kept, chosen.micro_batches, chosen.batch_per_rank, outcome)]
        room -= excess
    return []


@dataclass
class _PartialRecomputation:
    """The search for the number of recomputed blocks with which a plan fits.

    Attributes:
        row: the plan without recomputation, and its forecast.
        excess: bytes by which the plan exceeds the budget.
        failed: largest number of blocks known to be too small.
        enough: smallest number known to suffice; None: unknown.
        share: bytes that blocks save together, divided by the sum of what each saves alone.
    """

    row: tuple[ShardingPlan, int, int, Forecast]
    excess: int
    failed: int = 0
    enough: int | None = None
    share: float = 1.0

    def guess(self, blocks: Sequence[Recomputable]) -> int:
        """Return the next number of blocks to try, less than ``enough``; 0: every number has been tried."""
        sums = accumulate(block.saved_bytes * self.share for block in blocks)
        number = next((index for index, freed in enumerate(sums, 1) if freed >= self.excess), len(blocks))
        if self.enough is not None:
            number = min(number, self.enough - 1)
        number = max(number, self.failed + 1)
        return number if number < (self.enough or len(blocks)) else 0

    def seconds(self, blocks: Sequence[Recomputable], number: int) -> float:
        """Estimate the seconds of a step that recomputes the first ``number`` blocks."""
        _, micro_batches, _, kept = self.row
        return (kept.seconds or 0.0) + micro_batches * sum(block.seconds for block in blocks[:number])

    def note(self, blocks: Sequence[Recomputable], number: int, outcome: Forecast, is_fitting: bool) -> None:
        """Narrow the search: a forecast with the first ``number`` blocks recomputed fits or does not."""
        before, after = self.row[3].step, outcome.step
        if before is not None and after is not None:
            freed = before.resident_bytes - after.resident_bytes
            self.share = max(0.1, freed / sum(block.saved_bytes for block in blocks[:number]))
        if is_fitting:
            self.enough = min(number, self.enough or number)
        else:
            self.failed = max(number, self.failed)


def _cost(candidate: Candidate, level: int) -> tuple[float, bool, int, int, int]:
    """Return the sort key of a candidate: its time, then its complexity."""
    sharding = candidate.sharding
    # Rounded: times are estimates, and a smaller difference must not decide against the plainer plan.
    time = float("inf") if candidate.relative_time is None else round(candidate.relative_time, 3)
    num_tiers = (sharding.offload_optimizer.device != "none") + (sharding.offload_params.device != "none")
    return time, sharding.level != level, sharding.level, num_tiers + candidate.is_grouped, candidate.micro_batches
