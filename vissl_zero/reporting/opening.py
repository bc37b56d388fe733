"""The first lines of a run: what will be trained, what was decided for the user, how the model was wrapped."""

from __future__ import annotations

import rich
from rich.console import Console

import vissl_zero
from vissl_zero.data.source import described
from vissl_zero.engine.hook import Hook, Run


class Opening(Hook):
    """Says once, on rank 0, what the run is, every note of the plan and, if ``verbose``, the wrap plan."""

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()

    def on_start(self, run: Run) -> None:
        if run.is_main:
            for text in opening_lines(run):
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def opening_lines(run: Run) -> list[str]:
    """The lines, ASCII but for what the user named."""
    plan = run.plan
    ranks = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
    lines = [
        f"vissl_zero {vissl_zero.__version__}: {plan.recipe}, ZeRO level {plan.sharding.level} "
        f"({plan.sharding.engine} engine), {ranks} on {run.device.type}",
        f"{_length(run)}; run folder {run.folder}",
    ]
    data = run.plan.config["DATA"]
    lines.append(
        f"data {described(data, 'TRAIN')} ({len(run.loader.source):,} images); "
        + (f"measured on {described(data, 'TEST')}" if data["TEST"]["DATA_SOURCES"] else "no test images")
    )
    if rates := plan.optimizer.head_lr_factors:
        lines.append(
            f"{len(rates)} classifiers side by side, learning rates times {', '.join(f'{r:g}' for r in rates)}; "
            "the loss is their sum"
        )
    if run.step:
        lines.append(f"resumed after step {run.step}")
    lines += [f"note: {note}" for note in plan.notes]
    if plan.sharding.verbose:
        lines += ["wrap plan:", run.sharded.describe()]
    return lines


def _length(run: Run) -> str:
    if not run.num_steps:  # TEST_ONLY
        return "nothing is trained"
    return f"{run.num_steps} steps of {run.plan.global_batch} images, {run.steps_per_epoch} steps per epoch"
