"""All sharding plans that train the same, each with its forecast; which of them fit, and the cheapest that does."""

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
_TRIES = 6  # recordings of a plan
Found = list[tuple[ShardingPlan, int, int, Forecast]]  # plan, micro-batches of a step, images of one, forecast


@dataclass(frozen=True)
class Budget:
    """The memory that a rank may use, in bytes.

    Attributes:
        memory: where it computes, beyond the process itself.
        host: host memory beside that, where it computes on a GPU; None: not limited.
        disk: None: not limited.
        source: how ``memory`` is known, for people.
        given: ``memory``, where the user has said what there is; None: it was looked up.
    """

    memory: int
    host: int | None = None
    disk: int | None = None
    source: str = ""
    given: int | None = None

    def excess(self, forecast: Forecast) -> int | None:
        """Sum the bytes over the budget in memory, host memory and disk; 0: it fits; None: not known."""
        step = forecast.step
        if step is None:
            return None
        pairs = (step.resident_bytes, self.memory), (step.host_bytes, self.host), (step.disk_bytes, self.disk)
        return sum(max(0, num_bytes - limit) for num_bytes, limit in pairs if limit is not None)


@dataclass(frozen=True)
class Candidate:
    """One way to run.

    Attributes:
        sharding: level, recomputation, tiers.
        micro_batches: per step.
        batch_per_rank: images of one of them.
        forecast: what it would hold.
        world_size: ranks.
        relative_time: relative time of a step, against level 0 without recomputation; None: not known.
        excess: bytes too much for the budget; None: not known.
        is_chosen: the cheapest that fits.
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
        """Return whether it is within the budget; None: not known."""
        return None if self.excess is None else self.excess == 0

    @property
    def is_grouped(self) -> bool:
        """Return whether there are several copies of the state, each shared by a group of ranks (hybrid sharding)."""
        return self.sharding.level > 0 and 1 < self.sharding.shard_group_size < self.world_size

    def settings(self) -> dict[str, Any]:
        """Map key paths under ``config`` to values: what a user would write to get this candidate."""
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
        """Write ``settings`` as words of the command line."""
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
    """Write a value as on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _sharding_plans(
    base: ShardingPlan, world_size: int, num_nodes: int, device_type: str, can_recompute: bool
) -> Iterator[ShardingPlan]:
    """Yield every plan that computes the same as ``base`` and that the rules allow.

    Args:
        base: number formats, clipping, engine, a folder if there is a disk. Where it computes parameters in half
            precision, levels below its own compute otherwise.
        world_size, num_nodes: ranks and machines.
        device_type: "cpu" or "cuda": on the CPU the tier ``cpu`` is where state is anyway.
        can_recompute: the model has units.
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
                        continue  # a single rank: nothing to shard over
                    if params.device != "none" and optimizer.device == "none":
                        continue  # the state is larger, and read once a step
                    for size in _group_sizes(base, world_size, num_nodes) if level else [world_size]:
                        cut = replace(recomputation, level=level, shard_group_size=size)
                        yield replace(cut, offload_optimizer=optimizer, offload_params=params)


def _group_sizes(base: ShardingPlan, world_size: int, num_nodes: int) -> list[int]:
    """List the ranks that may share a copy of the state: all or, with several machines, those of one machine."""
    if 1 < base.shard_group_size < world_size:
        return [base.shard_group_size]  # it was asked for
    local = world_size // num_nodes
    # Groups sum gradients in another order: not the same bits.
    can_be_grouped = base.engine == "torch" and not base.deterministic and 1 < local < world_size
    return [world_size, local] if can_be_grouped else [world_size]


def rank_candidates(plans: Found, budget: Budget, world_size: int, level: int = 0) -> list[Candidate]:
    """Sort candidates, cheapest first, and choose the first that fits.

    Args:
        plans: plan, micro-batches, images of one, forecast.
        budget: budget of a rank.
        world_size: ranks.
        level: level as written; of plans that take equally long it comes first.
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
    """Return the one of ``rank_candidates`` that is chosen; None: nothing fits."""
    return next((candidate for candidate in candidates if candidate.is_chosen), None)


def because(candidates: Sequence[Candidate], budget: Budget) -> str:
    """Explain why the chosen one of ``rank_candidates`` was chosen, as one clause."""
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
    """Leave out each plan of level 2 with all figures of level 1, unless it is chosen."""
    figures = {(candidate.sharding, candidate.micro_batches): _figures(candidate) for candidate in candidates}
    lower = [(replace(candidate.sharding, level=1), candidate.micro_batches) for candidate in candidates]
    return [
        candidate
        for candidate, key in zip(candidates, lower, strict=True)
        if candidate.sharding.level != 2 or candidate.is_chosen or figures.get(key) != _figures(candidate)
    ]


def _figures(candidate: Candidate) -> tuple[Any, ...]:
    """Return what people see of a plan, time to a hundredth."""
    step, time = candidate.forecast.step, candidate.relative_time
    return (
        None if time is None else round(time, 2),
        None if step is None else (step.resident_bytes, step.host_bytes, step.disk_bytes, *step.by_kind.values()),
    )


def smallest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Find the candidate closest to its budget, of equal ones that with the smallest peak; None: none is known."""
    known = [candidate for candidate in candidates if candidate.forecast.step is not None]
    return min(known, key=lambda c: (c.excess or 0, c.forecast.step.resident_bytes), default=None)  # type: ignore[union-attr]


def nothing_fits(
    candidates: Sequence[Candidate], budget: Budget, *, level: str, memory: str, disk: str, others: str, block: str = ""
) -> Problem:
    """Make the problem where ``rank_candidates`` chose none: the smallest sufficient memory, or that none is known.

    Args:
        level, memory: the names of the two keys, as a user writes them.
        disk: how a disk is named; empty: one is.
        others: what else would help.
        block: the prefix of the two keys in messages.
    """
    least = smallest(candidates)
    if least is None or least.forecast.step is None:
        must = f"needs a forecast, and there is none ({candidates[0].forecast.unknown})"
        return Problem(f"{block}{level}", "'fit'", must, f"Set {level}=0, 1, 2 or 3.")
    need = least.forecast.step.resident_bytes
    must = f"is too little for every plan that trains the same model; the smallest takes {gib(need)} GiB ({least})"
    # To a thousandth and a bit.
    fix = f"Write {memory}={(int(need / _GIB * 1000) + 1) / 1000:g}{disk}, add ranks{others}."
    return Problem(f"{block}{memory}", gib(budget.memory), must, fix)


def forecast_all(
    forecaster: Forecaster, base: ShardingPlan, micro_batches: int, batch: int, budget: Budget | None = None
) -> Found:
    """Forecast all plans at one number of micro-batches that are not refused. Call it in ``FakeTensorMode``.

    Args:
        forecaster: forecaster of the model, for the ranks and the device of the run.
        base: as for ``_sharding_plans``.
        micro_batches, batch: per step, and images of one.
        budget: if no plan that recomputes fits it, leave out the others: they take more, and a recording of their own.
    Raises:
        ConfigError: each of them would be refused, as the first is: not every optimizer can have a disk.
    """
    subject = forecaster.subject
    machines = subject.world_size, subject.num_nodes, subject.device_type
    plans = list(_sharding_plans(base, *machines, forecaster.can_recompute))
    if budget is not None:
        plans.sort(key=lambda plan: not plan.is_recomputed)
    rows: Found = []
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


def recomputed_in_part(plans: Found, budget: Budget, forecaster: Forecaster) -> Found:
    """Forecast plans that recompute only as many blocks as the budget asks for.

    Each lies between two of ``plans``: one that does not fit, and the same with every block recomputed. The
    blocks that save most bytes per second of recomputation come first. Call it in ``FakeTensorMode``. Cost: at most
    ``_TRIES`` recordings, and none where a plan without recomputation is the cheapest that fits.

    Args:
        plans: all at one number of micro-batches, made by ``forecaster``.
        budget: budget of a rank.
    """
    best = min((row[3].seconds for row in plans if row[3].seconds and budget.excess(row[3]) == 0), default=None)
    parts = [
        _Part(row, budget.excess(row[3]) or 0)
        for row in plans
        if not row[0].is_recomputed and row[3].seconds and budget.excess(row[3])
    ]
    blocks = forecaster.recomputable(parts[0].row[0]) if parts else []
    more: Found = []
    for _ in range(_TRIES):
        tried = [(part.seconds(blocks, number), number) for part in parts if (number := part.guess(blocks))]
        seconds, number = min(tried, default=(0.0, 0))
        if best is None or not number or seconds >= best:
            break
        names = tuple(block.name for block in blocks[:number])
        for part in parts:  # one recording serves all of them
            plan, micro_batches, batch, _ = part.row
            outcome = forecaster.forecast(replace(plan, checkpoint_blocks=names), micro_batches)
            is_fitting = budget.excess(outcome) == 0
            part.note(blocks, number, outcome, is_fitting)
            if outcome.seconds and outcome.seconds < best and is_fitting:
                best = outcome.seconds
                named = replace(plan, checkpoint_blocks=outcome.wrap_plan.checkpointed)  # in the model's order
                more.append((named, micro_batches, batch, outcome))
    return more


def kept_in_part(chosen: Candidate, budget: Budget, forecaster: Forecaster) -> Found:
    """Find a plan with as many parameters kept in memory as have room; none if its parameters are not on a disk.

    Call it in ``FakeTensorMode``. Cost: at most ``_TRIES`` forecasts, and no recording.

    Args:
        chosen: the candidate chosen among those of ``rank_candidates``.
        budget: budget of a rank.
        forecaster: forecaster that made its forecast.
    """
    plan, forecast = chosen.sharding, chosen.forecast
    if forecast.step is None or not plan.offload_params.is_on_disk or plan.offload_params.max_in_cpu is not None:
        return []
    room = budget.memory - forecast.step.resident_bytes
    if forecaster.subject.device_type != "cpu":  # they are in host memory then
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
class _Part:
    """A plan that does not fit, and how many blocks it may have to recompute to fit.

    Attributes:
        row: without recomputation.
        excess: bytes that have to be freed.
        failed: a number of blocks that is too small.
        enough: a number that suffices; None: none is known.
        share: bytes that blocks save together over the sum of what each saves alone.
    """

    row: tuple[ShardingPlan, int, int, Forecast]
    excess: int
    failed: int = 0
    enough: int | None = None
    share: float = 1.0

    def guess(self, blocks: Sequence[Recomputable]) -> int:
        """Return the number to try next, one fewer than suffices at most; 0: there is none left."""
        sums = accumulate(block.saved_bytes * self.share for block in blocks)
        number = next((index for index, freed in enumerate(sums, 1) if freed >= self.excess), len(blocks))
        if self.enough is not None:
            number = min(number, self.enough - 1)
        number = max(number, self.failed + 1)
        return number if number < (self.enough or len(blocks)) else 0

    def seconds(self, blocks: Sequence[Recomputable], number: int) -> float:
        """Estimate a step that recomputes the first ``number`` blocks."""
        _, micro_batches, _, kept = self.row
        return (kept.seconds or 0.0) + micro_batches * sum(block.seconds for block in blocks[:number])

    def note(self, blocks: Sequence[Recomputable], number: int, outcome: Forecast, is_fitting: bool) -> None:
        """Learn from a forecast with the first ``number`` blocks recomputed."""
        before, after = self.row[3].step, outcome.step
        if before is not None and after is not None:
            freed = before.resident_bytes - after.resident_bytes
            self.share = max(0.1, freed / sum(block.saved_bytes for block in blocks[:number]))
        if is_fitting:
            self.enough = min(number, self.enough or number)
        else:
            self.failed = max(number, self.failed)


def _cost(candidate: Candidate, level: int) -> tuple[float, bool, int, int, int]:
    """Sort candidates by time, then by simplicity."""
    sharding = candidate.sharding
    # Rounded: times are estimates, and a smaller difference must not decide against the plainer plan.
    time = float("inf") if candidate.relative_time is None else round(candidate.relative_time, 3)
    num_tiers = (sharding.offload_optimizer.device != "none") + (sharding.offload_params.device != "none")
    return time, sharding.level != level, sharding.level, num_tiers + candidate.is_grouped, candidate.micro_batches
