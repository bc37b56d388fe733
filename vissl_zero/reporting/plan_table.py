"""Ways to run a recipe, for people (a table, a picture of memory over a step) and for scripts (JSON)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from vissl_zero.planner.candidates import Candidate, because, smallest
from vissl_zero.planner.memory_model import KINDS
from vissl_zero.planner.planning import Past, Planned
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


def plan_table(planned: Planned) -> Table:
    """Draw one row per candidate, cheapest first."""
    table = Table(box=None, pad_edge=False)
    titles = ("", "plan", "time", "needed", "peak", *(NAMES[kind] for kind in _shown(planned)), "host", "disk", "fits")
    for title in titles:
        table.add_column(title, justify="left" if title in ("", "plan", "fits") else "right", no_wrap=True)
    rows = [_row(candidate, _shown(planned)) for candidate in planned.candidates]
    for candidate, row in zip(planned.candidates, rows, strict=True):
        if not _is_double(candidate, row, rows):
            table.add_row(*row, style="bold green" if candidate.is_chosen else None)
    return table


def _is_double(candidate: Candidate, row: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Check for level 2 with all figures of level 1: with several ranks on a CPU both are one program."""
    lower = [row[1].replace("level 2", "level 1", 1), *row[2:]]
    return candidate.sharding.level == 2 and not candidate.is_chosen and lower in [[*other[1:]] for other in rows]


def plan_lines(planned: Planned) -> Iterator[str]:
    """Yield what to print beside the table."""
    plan, chosen = planned.plan, planned.chosen
    yield (
        f"{plan.recipe}: {plan.world_size} ranks on {plan.num_nodes} machine(s), {plan.device}; "
        f"{plan.global_batch} images a step, {planned.num_images:,} in all"
    )
    yield f"budget: {bytes_text(planned.budget.memory)} a rank ({planned.budget.source})"
    machine = planned.machine
    yield f"time: as of {machine.name}{f' ({machine.source})' if machine.source else ''}"
    yield from (f"assumed: {sentence}" for sentence in planned.assumed)
    unknown = {c.forecast.unknown for c in planned.candidates if c.forecast.unknown}
    yield from (f"not known: {reason}" for reason in sorted(unknown))
    if chosen is None:
        least = smallest(planned.candidates)
        step = None if least is None else least.forecast.step
        at_least = "" if step is None else f" The smallest takes {bytes_text(step.resident_bytes)}: {least}."
        yield f"chosen: none; no plan is known to fit.{at_least}"
        sharding = plan.sharding
        if sharding.offload_optimizer.nvme_path is None and sharding.offload_params.nvme_path is None:
            yield (
                "Plans that use a disk join in if config.ZERO.offload_optimizer_config.nvme_path=<folder> names it; a "
                "smaller config.DATA.TRAIN.BATCHSIZE_PER_REPLICA or more processes take less on each."
            )
        return
    assert chosen.forecast.step is not None
    step = chosen.forecast.step
    yield f"chosen: {chosen}; {because(planned.candidates, planned.budget)}"
    yield f"its peak falls in the {step.phase}{f', after entering {step.unit}' if step.unit else ''}."
    yield from _speed(planned, chosen)
    yield "write:"
    yield from (f"  {word}" for word in chosen.overrides())


def _speed(planned: Planned, chosen: Candidate) -> Iterator[str]:
    """Say how fast the chosen plan is, as far as its profile knows."""
    if seconds := chosen.forecast.seconds:
        rate = planned.plan.global_batch / seconds
        hours = planned.num_images / rate / 3600
        yield f"speed: at most about {rate:,.3g} images/s, {hours:,.3g} hours an epoch; small layers are slower"


def history_table(rows: Sequence[Past]) -> Table:
    """Draw one row per plan that was run."""
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
    """Convert the plan for ``--json``: per rank, bytes; null: not known."""
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
    """Draw memory over one step by kind, of each recipe's chosen plan, or its smallest; False: none is known."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from vissl_zero.reporting.panels import DPI, STYLE, WIDTH

    drawn = [(planned, found) for planned in plans if (found := _to_draw(planned)) is not None]
    if not drawn:
        return False
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / DPI, 5.2 * len(drawn)), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (planned, candidate) in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
            _draw(axes, planned, candidate)
        figure.savefig(path)
    return True


def _to_draw(planned: Planned) -> Candidate | None:
    return planned.chosen or smallest(planned.candidates)


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


def _row(candidate: Candidate, kinds: Sequence[str]) -> list[str]:
    step, time = candidate.forecast.step, candidate.relative_time
    head = ["=>" if candidate.is_chosen else "", str(candidate), "?" if time is None else f"{time:.2f}"]
    if step is None:
        return [*head, *["?"] * (len(kinds) + 4), "not known"]
    fits = "yes" if candidate.fits else f"{bytes_text(candidate.excess or 0)} too much"
    held = [bytes_text(step.by_kind[kind]) for kind in kinds]
    sizes = bytes_text(step.resident_bytes), bytes_text(step.peak_bytes)
    return [*head, *sizes, *held, bytes_text(step.host_bytes), bytes_text(step.disk_bytes), fits]


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
