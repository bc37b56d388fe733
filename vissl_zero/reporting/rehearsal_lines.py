"""A rehearsed run for people: what ``config.DRY_RUN=true`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import vissl_zero
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.engine.rehearsal import Rehearsal
from vissl_zero.reporting.memory_kinds import KINDS, total
from vissl_zero.reporting.quantity import bytes_text


def rehearsal_lines(run: Rehearsal) -> Iterator[str]:
    """The plan for people, ASCII but for what the user named."""
    plan = run.plan
    yield f"vissl_zero {vissl_zero.__version__}, dry run of {plan.recipe}: nothing was started"
    rows = {
        "sharding": f"ZeRO level {plan.sharding.level}, {plan.sharding.engine} engine, {_ranks(plan)}",
        "precision": _precision(plan),
        "model": f"{run.num_params:,} parameters, {run.num_trained:,} of them trained",
        "data": f"{run.num_images:,} images; {plan.global_batch} a step = {plan.batch_per_rank} x {plan.world_size} "
        f"processes x {plan.accumulation_steps} micro-batches",
        "length": f"{run.num_steps:,} steps, {run.steps_per_epoch:,} an epoch",
        "optimizer": f"{plan.optimizer.name}{' with LARC' if plan.optimizer.larc else ''}, weight decay "
        f"{plan.optimizer.weight_decay:g}",
        "lr": f"{run.lr_first:.4g} at the first step, {run.lr_peak:.4g} at most, {run.lr_last:.4g} at the last "
        "(after scaling)",
        "memory": f"{bytes_text(total(run.forecast.memory))} a rank at most, of which",
        **{f"  {name}": text for name, text in _memory(run)},
        "writes to": plan.run_dir,
        "": f"config.user.yaml config.resolved.yaml metrics.jsonl summary.json weights.safetensors report.png "
        f"checkpoints/ {'tensorboard/ ' if _has_events(plan) else ''}logs/",
    }
    yield from (f"{name:20}{text}" for name, text in rows.items())
    yield from (f"note: {note}" for note in plan.notes)
    yield "wrap plan:"
    yield run.forecast.wrap_plan.describe()


def _has_events(plan: ResolvedRun) -> bool:
    return bool(plan.config["HOOKS"]["TENSORBOARD_SETUP"]["USE_TENSORBOARD"])


def _ranks(plan: ResolvedRun) -> str:
    ranks = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    machines = f" ({plan.num_nodes} machines x {plan.procs_per_node})" if plan.num_nodes > 1 else ""
    return f"{ranks}{machines} on {plan.device}, {plan.backend}"


def _precision(plan: ResolvedRun) -> str:
    formats = plan.sharding.precision
    if formats.autocast:
        return f"{formats.master}, autocast to {formats.autocast}"
    return formats.master if formats.compute == formats.master else f"{formats.master}, computed in {formats.compute}"


def _memory(run: Rehearsal) -> Iterator[tuple[str, str]]:
    rests: Mapping[str, str] = {
        "optimizer": run.plan.sharding.offload_optimizer.device,
        "params": run.plan.sharding.offload_params.device,
    }
    for kind, name in KINDS.items():
        text = bytes_text(getattr(run.forecast.memory, kind))
        if kind == "activations" and run.forecast.no_activations:
            text = f"not counted ({run.forecast.no_activations})"
        if rests.get(kind, "none") != "none":
            text += f", at rest on {rests[kind]}"
        if kind == "params":
            text += f"; {bytes_text(run.forecast.memory.params_step_peak)} at the fullest moment of a step"
        yield name, text
