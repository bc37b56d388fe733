"""The plans of a recipe as a table, as a picture of memory over a step, and as JSON for scripts."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from vissl_zero.planner.candidates import Candidate, because, smallest, without_doubles
from vissl_zero.planner.memory_model import KINDS
from vissl_zero.planner.planning import Planned, remedies
from vissl_zero.reporting.past_plans import Past
from vissl_zero.reporting.quantity import bytes_text

NAMES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "inputs": "images",
    "buffers": "buffers",
    "teacher": "teacher",
    "communication": "communication",
    "offload_buffers": "offload buffers",
}
_BUDGETS = [f"config.ZERO.{key}" for key in ("MEMORY_GB", "HOST_MEMORY_GB", "DISK_GB", "MACHINE_PROFILE")]


def plan_table(planned: Planned) -> Table:
    """Return the table of candidates, cheapest first."""
    table = Table(box=None, pad_edge=False)
    kinds, tiers = _shown(planned), _tiers(planned)
    titles = (
        "",
        "plan",
        "time\n(level 0 = 1)",
        "needed",
        "memory\nat the peak",
        *(NAMES[kind] for kind in kinds),
        *tiers,
        "fits",
    )
    for title in titles:
        table.add_column(title, justify="left" if title in ("", "plan", "fits") else "right", no_wrap=True)
    for candidate in without_doubles(planned.candidates):
        table.add_row(*_row(candidate, kinds, tiers), style="bold green" if candidate.is_chosen else None)
    return table


def plan_lines(planned: Planned, overrides: Sequence[str] = (), recipe_images: int | None = None) -> Iterator[str]:
    """Yield the lines to print below the table.

    Args:
        planned: recipe with its candidates.
        overrides: the user's overrides, for the command that runs the chosen plan.
        recipe_images: images of a step in the recipe without overrides; None: unknown.
    """
    plan, chosen = planned.plan, planned.chosen
    images = f"{plan.global_batch:,} images a step"
    if recipe_images not in (None, plan.global_batch):
        images = f"{recipe_images:,} -> {images}"
    yield (
        f"{plan.recipe}: {plan.world_size} ranks on {plan.num_nodes} machine(s), {plan.device}; "
        f"{images}, {planned.num_images:,} in all"
    )
    if num_doubles := len(planned.candidates) - len(without_doubles(planned.candidates)):
        yield f"not in the table: {num_doubles} plans of level 2, each with the memory and time of the same at level 1"
    yield f"budget: {bytes_text(planned.budget.memory)} a rank ({planned.budget.source})"
    yield f"time: for {planned.machine.name}; it ranks plans, and does not predict seconds (docs/plan.md)"
    yield from (f"assumed: {sentence}" for sentence in planned.assumed)
    unknown = {c.forecast.unknown for c in planned.candidates if c.forecast.unknown}
    yield from (f"not known: {reason}" for reason in sorted(unknown))
    if chosen is None:
        least = smallest(planned.candidates)
        step = None if least is None else least.forecast.step
        at_least = "" if step is None else f" The smallest takes {bytes_text(step.resident_bytes)}: {least}."
        yield f"chosen: none; no plan is known to fit.{at_least}"
        remedy_list = remedies(planned)
        yield from map(str, remedy_list)
        candidate = next((remedy.candidate for remedy in remedy_list if remedy.is_same), least)
        if candidate is not None:
            yield from _speed(planned, candidate)
        sharding = plan.sharding
        if sharding.offload_optimizer.nvme_path is None and sharding.offload_params.nvme_path is None:
            yield "Plans that use a disk join in if config.ZERO.offload_optimizer_config.nvme_path=<folder> names it."
        return
    assert chosen.forecast.step is not None
    step = chosen.forecast.step
    yield f"chosen: {chosen}; {because(planned.candidates, planned.budget)}"
    yield from _own_level(planned, chosen, overrides)
    yield f"its peak falls in the {step.phase}{f', after entering {step.unit}' if step.unit else ''}."
    yield from _speed(planned, chosen)
    yield "write:"
    yield " \\\n    ".join(_command(planned, chosen, overrides))
    if plan.num_nodes > 1 and planned.config.DISTRIBUTED.RUN_ID == "auto" and not planned.config.SLURM.USE_SLURM:
        yield (
            "Where the machines meet: add config.SLURM.USE_SLURM=true, or start it on each machine with "
            f"config.DISTRIBUTED.RUN_ID=<address of machine 0>:<port> node_id=<0 to {plan.num_nodes - 1}> "
            "(docs/cluster.md)."
        )


def _own_level(planned: Planned, chosen: Candidate, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a line on why the level that the user wrote is not chosen."""
    level = planned.plan.sharding.level
    is_written = any(word.startswith("config.ZERO.LEVEL=") for word in overrides)
    candidate_there = next((candidate for candidate in planned.candidates if candidate.sharding.level == level), None)
    if (
        not is_written
        or candidate_there is None
        or str(planned.config.ZERO.LEVEL) == "fit"
        or chosen.sharding.level == level
    ):
        return
    candidate_there = next(
        (each for each in planned.candidates if each.sharding.level == level and each.fits), candidate_there
    )
    time = "unknown" if candidate_there.relative_time is None else f"{candidate_there.relative_time:.3f}"
    than = "unknown" if chosen.relative_time is None else f"{chosen.relative_time:.3f}"
    what = f"{candidate_there} fits" if candidate_there.fits else f"{candidate_there} does not fit"
    yield f"config.ZERO.LEVEL={level} is not taken: {what}, in a time of {time} against {than}."


def _command(planned: Planned, chosen: Candidate, overrides: Sequence[str]) -> list[str]:
    """Return the command that runs a plan, as words: the user's overrides, and settings that differ from the recipe."""
    recipe = planned.plan.recipe
    changed = {
        f"config.{path}": override
        for (path, value), override in zip(chosen.settings().items(), chosen.overrides(), strict=True)
        if path == "ZERO.LEVEL" or str(value) != str(functools.reduce(getattr, path.split("."), planned.config))
    }
    if planned.config.ZERO.MEMORY_GB is not None:  # a dry run uses this budget too
        changed["config.ZERO.MEMORY_GB"] = f"config.ZERO.MEMORY_GB={planned.config.ZERO.MEMORY_GB:g}"
    elif planned.budget.given is not None and planned.config.MACHINE.MEMORY_GIB is None:  # from a profile
        changed["config.ZERO.MEMORY_GB"] = f"config.ZERO.MEMORY_GB={planned.budget.given / 2**30:g}"
    # Budgets are dropped: they asked for a choice, which the command now states.
    kept = [word for word in overrides if word.lstrip("+").split("=")[0] not in {*changed, *_BUDGETS}]
    name = "<recipe>" if recipe.endswith(".yaml") else recipe
    return [f"vissl-zero config={name}", *map(shlex.quote, [*kept, *changed.values()])]


def _speed(planned: Planned, chosen: Candidate) -> Iterator[str]:
    """Yield a line on the speed of the chosen plan, if its time is known."""
    if seconds := chosen.forecast.seconds:
        rate = planned.plan.global_batch / seconds
        hours = planned.num_images / rate / 3600
        whole = seconds * planned.num_steps / 3600
        yield (
            f"speed: at most about {_short(rate)} images/s, {_short(hours)} hours an epoch, {_short(whole)} hours for "
            "the run; small layers are slower"
        )


def _short(number: float) -> str:
    """Format a number with three significant digits, such as 1,490."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 1000 else f"{number:.3g}"


def history_table(rows: Sequence[Past]) -> Table:
    """Return the table of plans that have run."""
    table = Table(box=None, pad_edge=False)
    for title in ("run", "plan", "steps", "forecast", "measured", "held", "error", "outcome"):
        is_text = title in ("run", "plan", "outcome")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        figures = row.forecast_bytes, row.measured_bytes, row.held_bytes
        sizes = ("?" if size is None else bytes_text(size) for size in figures)
        error = "?" if row.error is None else f"{row.error:+.1%}"
        table.add_row(str(row.folder), row.plan, str(row.steps), *sizes, error, row.outcome)
    return table


def as_json(planned: Planned) -> dict[str, Any]:
    """Return the plan for ``--json``: bytes per rank; None: unknown."""
    return {
        "recipe": planned.plan.recipe,
        "ranks": planned.plan.world_size,
        "budget": {
            "memory_bytes": planned.budget.memory,
            "host_bytes": planned.budget.host,
            "disk_bytes": planned.budget.disk,
            "source": planned.budget.source,
        },
        "machine": asdict(planned.machine),
        "num_images": planned.num_images,
        "assumed": list(planned.assumed),
        "candidates": [_json(candidate) for candidate in planned.candidates],
    }


def draw_plans(plans: Sequence[Planned], path: Path) -> bool:
    """Draw each recipe's memory over a step by kind, for its chosen or smallest plan. Return False if none is known."""
    # Here, since most plans are printed only, and matplotlib takes a second.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from vissl_zero.reporting.panels import DPI, STYLE, WIDTH

    shown = [(planned, planned.chosen or smallest(planned.candidates)) for planned in plans]
    drawn = [(planned, candidate) for planned, candidate in shown if candidate is not None]
    if not drawn:
        return False
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / DPI, 5.2 * len(drawn)), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (planned, candidate) in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
            _draw(axes, planned, candidate)
        figure.savefig(path)
    return True


def _draw(axes: Any, planned: Planned, candidate: Candidate) -> None:
    from vissl_zero.reporting import panels as page

    colors = {
        "params": page.BLUE,
        "teacher": page.GREEN,
        "optimizer": page.ORANGE,
        "buffers": page.GREY,
        "inputs": page.FAINT,
        "communication": page.SOFT,
        "offload_buffers": page.INK,
        "grads": page.SKY,
        "activations": page.PURPLE,
    }
    step = candidate.forecast.step
    assert step is not None
    kinds = [kind for kind in colors if any(step.timeline[kind])]
    mib = [[value / 2**20 for value in step.timeline[kind]] for kind in kinds]
    axes.stackplot(
        range(len(step.phases)),
        mib,
        labels=[NAMES[kind] for kind in kinds],
        colors=[colors[kind] for kind in kinds],
        step="post",
    )
    totals = [sum(column) for column in zip(*mib, strict=True)]
    at = max(range(len(totals)), key=totals.__getitem__)
    where = f"{step.phase}{f' of {step.unit}' if step.unit else ''}"
    axes.annotate(
        f"{bytes_text(step.peak_bytes)} in the {where}",
        (at, totals[at]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="left" if at < len(totals) / 2 else "right",
    )
    for index in range(1, len(step.phases)):
        if step.phases[index] != step.phases[index - 1]:
            axes.axvline(index, color=page.SOFT, linewidth=0.8, linestyle=":")
    starts = [i for i in range(len(step.phases)) if i == 0 or step.phases[i] != step.phases[i - 1]]
    axes.set_xticks(starts, [step.phases[i] for i in starts], ha="left")
    budget = planned.budget.memory / 2**20
    top = max(totals) * 1.15
    # A budget far above would flatten the curves.
    if budget <= 3 * max(totals):
        axes.axhline(budget, color=page.VERMILLION)
        axes.text(0, budget, f"budget {bytes_text(planned.budget.memory)}", color=page.VERMILLION, va="bottom")
        top = max(top, budget * 1.1)
    axes.set_ylim(0, top)
    axes.set_ylabel("MiB of a rank")
    axes.set_title(f"{planned.plan.recipe}: {candidate}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _shown(planned: Planned) -> list[str]:
    steps = [candidate.forecast.step for candidate in planned.candidates]
    return [kind for kind in KINDS if any(step is not None and step.by_kind[kind] for step in steps)]


def _tiers(planned: Planned) -> list[str]:
    """Return the tiers, apart from the device, on which any candidate has bytes."""
    steps = [candidate.forecast.step for candidate in planned.candidates if candidate.forecast.step is not None]
    used = {"host": any(step.host_bytes for step in steps), "disk": any(step.disk_bytes for step in steps)}
    return [name for name, is_used in used.items() if is_used]


def _row(candidate: Candidate, kinds: Sequence[str], tiers: Sequence[str]) -> list[str]:
    step, time = candidate.forecast.step, candidate.relative_time
    head = ["=>" if candidate.is_chosen else "", str(candidate), "?" if time is None else f"{time:.2f}"]
    if step is None:
        return [*head, *["?"] * (len(kinds) + len(tiers) + 2), "not known"]
    fits = "yes" if candidate.fits else f"{bytes_text(candidate.excess or 0)} too much"
    held = [bytes_text(step.by_kind[kind]) for kind in kinds]
    sizes = bytes_text(step.resident_bytes), bytes_text(step.peak_bytes)
    elsewhere = [bytes_text(getattr(step, f"{name}_bytes")) for name in tiers]
    return [*head, *sizes, *held, *elsewhere, fits]


def _json(candidate: Candidate) -> dict[str, Any]:
    sharding, step = candidate.sharding, candidate.forecast.step
    return {
        "plan": str(candidate),
        "level": sharding.level,
        "shard_group_size": sharding.shard_group_size if sharding.level else 1,
        "recomputed": list(candidate.forecast.wrap_plan.checkpointed),
        "offload_optimizer": sharding.offload_optimizer.device,
        "offload_params": sharding.offload_params.device,
        "micro_batches": candidate.micro_batches,
        "batch_per_rank": candidate.batch_per_rank,
        "peak_bytes": None if step is None else step.peak_bytes,
        "resident_bytes": None if step is None else step.resident_bytes,
        "by_kind": None if step is None else step.by_kind,
        "phase": None if step is None else step.phase,
        "unit": None if step is None else step.unit,
        "host_bytes": None if step is None else step.host_bytes,
        "disk_bytes": None if step is None else step.disk_bytes,
        "relative_time": candidate.relative_time,
        "fits": candidate.fits,
        "excess_bytes": candidate.excess,
        "chosen": candidate.is_chosen,
        "not_known": candidate.forecast.unknown,
        "overrides": candidate.overrides(),
    }
