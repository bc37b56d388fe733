"""The lines that ``config.DRY_RUN=true`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from vissl_zero.data.source import described_splits
from vissl_zero.errors import printable
from vissl_zero.planner.candidates import Budget
from vissl_zero.planner.dry_run import DryRun
from vissl_zero.reporting.out_of_memory import Switch, other_numbers, same_numbers
from vissl_zero.reporting.quantity import bytes_text, shown_kinds
from vissl_zero.resolve.host import RESERVE, available_memory
from vissl_zero.resolve.logger_rules import logger_names
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.memory import Bytes
from vissl_zero.version import __version__

# Names of a rank's tiers, by device.
PLACES = {
    "cpu": {"device": "memory", "disk": "disk"},
    "cuda": {"device": "GPU memory", "host": "host memory", "disk": "disk"},
}
_CLASSES_SHOWN = 10
_GIB = 2**30
_ASSUMED_GPU = 80 * _GIB


def room(plan: ResolvedRun) -> tuple[int, str]:
    """Return the bytes of memory of a rank's device, and a phrase on their source.

    They are MACHINE.MEMORY_GIB, or measured. On a CPU, processes share the memory of the machine or container.
    """
    gib = plan.config.MACHINE.MEMORY_GIB
    if plan.device == "cuda":
        if gib:
            return int(gib * _GIB), f"a GPU of {gib:g} GiB"
        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(0).total_memory
            return total, f"a GPU of this machine, {bytes_text(total)}"
        return (
            _ASSUMED_GPU,
            f"a GPU of {_ASSUMED_GPU // _GIB} GiB, assumed (config.MACHINE.MEMORY_GIB sets another number)",
        )
    whole = int(gib * _GIB) if gib else available_memory()
    what = f"a machine of {bytes_text(whole)}" if gib else f"this machine, {bytes_text(whole)}"
    procs = plan.procs_per_node
    # An even share: ranks have about the same memory, and none may take what others need.
    return whole // procs, what if procs == 1 else f"{what}, for {procs} processes"


def verdict(run: DryRun, budget: Budget | None = None) -> tuple[bool, list[str]]:
    """Return whether the run fits into its device's memory, and the lines to print about it.

    Args:
        run: forecast of the run.
        budget: budget for which ``fit`` chose the plan; None: ZERO.MEMORY_GB, or the machine's memory without the
            process itself.
    """
    if budget is None:
        available, what = room(run.plan)
        budget = Budget(available - RESERVE, source=f"{what}, less {RESERVE / _GIB:g} GiB for the process itself")
        if (gb := run.plan.config.ZERO.MEMORY_GB) is not None:
            budget = Budget(int(gb * _GIB), source="config.ZERO.MEMORY_GB")
    at_start = run.start_bytes if run.plan.device == "cpu" else 0  # on a GPU, it takes host memory
    need, available = max(run.needed, at_start), budget.memory
    figures = f"{bytes_text(need)} of {bytes_text(available)} ({budget.source})"
    # A custom layer that cannot be counted is no proof that the run does not fit.
    if run.forecast.unknown:
        return True, [f"unknown: activations were not counted; {figures}"]
    if need <= available:
        return True, [f"fits: {figures}, {bytes_text(available - need)} to spare"]
    lines = [f"does not fit: {figures}, {bytes_text(need - available)} too much. What would help:"]
    helps = sorted([*same_numbers(run.plan), *other_numbers(run.plan)], key=lambda switch: -switch.saved)
    if run.plan.sharding.offload_optimizer.device == "none":
        price = "slower: docs/offload.md"
        tier = "cpu" if run.plan.device == "cuda" else "nvme"
        path = "" if tier == "cpu" else ", nvme_path: /a/local/disk"
        block = f"config.ZERO.offload_optimizer_config={{device: {tier}{path}}}"
        helps.append(Switch(block, run.forecast.memory.optimizer, price))
    return False, [*lines, *(f"  {switch}" for switch in helps if switch.saved > 0)]


def title(plan: ResolvedRun) -> str:
    """Return the first line, which is printed before the forecast is made."""
    return f"vissl_zero {__version__}, dry run of {plan.recipe}: nothing was started"


def dry_run_lines(run: DryRun, budget: Budget | None = None) -> Iterator[str]:
    """Yield the lines after the title, ASCII except for the user's names; the verdict is last."""
    plan, tiers = run.plan, {**run.tiers, "device": run.needed}
    events = "tensorboard/ " if "tensorboard" in logger_names(plan.config.HOOKS) else ""
    rows = {
        "sharding": f"ZeRO level {plan.sharding.level}, {plan.sharding.engine} engine, {_ranks(plan)}",
        "precision": _precision(plan),
        "model": f"{run.num_params:,} parameters, {run.num_trained:,} of them trained",
        "images": described_splits(plan.config, bool(run.class_names or run.assumed)),
        "data": f"{run.num_images:,} images{_classes(run.class_names)}; {plan.global_batch} a step = "
        f"{plan.batch_per_rank} x {plan.world_size} processes x {plan.accumulation_steps} micro-batches",
        "crops": ", ".join(f"{number} of {height} x {width} pixels" for number, height, width in run.crops),
        "length": f"{run.num_steps:,} steps, {run.steps_per_epoch:,} an epoch",
        "optimizer": f"{plan.optimizer.name}{' with LARC' if plan.optimizer.larc else ''}, weight decay "
        f"{plan.optimizer.weight_decay:g}",
        "lr": f"{run.lr_first:.4g} at the first step, {run.lr_peak:.4g} at most, {run.lr_last:.4g} at the last "
        "(after scaling)",
        **{PLACES[run.plan.device][name]: f"{bytes_text(held)} a rank at most" for name, held in tiers.items()},
        **({"start": f"{bytes_text(run.start_bytes)} a rank: {_whole(run)}"} if run.start_bytes else {}),
        "memory by kind": "a rank, after the backward pass",
        **{f"  {name}": text for name, text in _memory(run)},
        "writes to": plan.run_dir,
        "": f"config.user.yaml config.resolved.yaml metrics.jsonl summary.json weights.safetensors report.png "
        f"checkpoints/ {events}logs/",
    }
    yield from (f"{name:20}{text}" for name, text in rows.items())
    yield from (f"note: {note}" for note in (*plan.notes, *run.assumed, *run.left_out))
    yield "wrap plan:"
    yield run.forecast.wrap_plan.describe()
    first, *rest = verdict(run, budget)[1]
    yield f"{'verdict':20}{first}"
    yield from rest


def _whole(run: DryRun) -> str:
    return f"the model is built whole ({run.built_whole}) in the host's memory, and then sharded"


def _classes(names: Sequence[str]) -> str:
    """Format " in 2 classes (train, val)": the names show if the folder is a level too high."""
    if not names:
        return ""
    shown = ", ".join(printable(name) for name in names[:_CLASSES_SHOWN])
    return f" in {len(names):,} classes ({shown}{', ...' if len(names) > _CLASSES_SHOWN else ''})"


def _ranks(plan: ResolvedRun) -> str:
    ranks = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    machines = f" ({plan.num_nodes} machines x {plan.procs_per_node})" if plan.num_nodes > 1 else ""
    return f"{ranks}{machines} on {plan.device}, {plan.backend}"


def _precision(plan: ResolvedRun) -> str:
    formats = plan.sharding.precision
    tf32 = ", TF32 in products" if plan.config.MACHINE.TF32 and plan.device == "cuda" else ""
    if formats.autocast:
        return f"{formats.master}, autocast to {formats.autocast}{tf32}"
    compute = f", computed in {formats.compute}" if formats.casts_parameters else ""
    return f"{formats.master}{compute}{tf32}"


def _memory(run: DryRun) -> Iterator[tuple[str, str]]:
    rests: Mapping[str, str] = {
        "optimizer": run.plan.sharding.offload_optimizer.device,
        "params": run.plan.sharding.offload_params.device,
    }
    teacher = Bytes(teacher=run.forecast.teacher_params)  # all of it may be offloaded
    for kind, name in shown_kinds(run.forecast.memory, teacher).items():
        text = bytes_text(getattr(run.forecast.memory, kind))
        if kind == "activations" and run.forecast.unknown:
            text = f"not counted ({run.forecast.unknown})"
        if rests.get(kind, "none") != "none":
            text += f", stored on {rests[kind]}"
        if kind == "params":
            text += f"; {bytes_text(run.forecast.memory.params_step_peak)} at the peak of a step"
        if kind == "teacher" and rests["params"] != "none":
            stored, is_besides = bytes_text(run.forecast.teacher_params), run.plan.sharding.offload_params.is_on_disk
            text += f"; {stored} {'more' if is_besides else 'of it'} stored on {rests['params']}"
        yield name, text
