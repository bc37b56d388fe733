"""The results of a run: ``summary.json`` for scripts, and a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import rich
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vissl_zero.atomic import replacing
from vissl_zero.checkpoint.weights import BEST_WEIGHTS_FILE
from vissl_zero.data.source import described, described_splits
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.errors import printable
from vissl_zero.reporting.quantity import bytes_text, figure_text, shown_kinds
from vissl_zero.sharding.memory import Bytes
from vissl_zero.version import __version__

FILE_NAME = "summary.json"
_MOST_RANKS_SHOWN = 4
_MOST_CLASSES_SHOWN = 5


class Summary(Hook):
    """Writes and prints the summary at the end of the run; place it after every hook that adds results."""

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()

    def on_end(self, run: Run) -> None:
        if not run.is_main:
            return
        summary = summarize(run)
        try:
            with replacing(run.folder / FILE_NAME) as temporary:
                temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:  # a full disk: the table below still has the results
            self._console.print(f"warning: {FILE_NAME} cannot be written ({error.strerror}).", markup=False)
        self._console.print(table(run, summary))


def summarize(run: Run) -> dict[str, Any]:
    """Return the content of ``summary.json``; ``docs/run_folder.md`` has keys and units."""
    losses = [record.loss for record in run.records if record.loss is not None]
    return {
        "vissl_zero": __version__,
        "recipe": run.plan.recipe,
        "data": {split.lower(): described(run.plan.config.DATA, split) for split in ("TRAIN", "TEST")},
        "level": run.plan.sharding.level,
        "engine": run.plan.sharding.engine,
        "world_size": run.world_size,
        "num_steps": run.step,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "knn_top1_before": None,
        "knn_top1_after": None,
        "images_per_s": images_per_s(run.records),
        **run.results,
    }


def images_per_s(records: Sequence[StepRecord]) -> float | None:
    """Return the mean speed of a run: the harmonic mean over steps, which have equal numbers of images.

    The first step is left out if there are others, because it measures activations and warms caches.
    """
    speeds = [record.images_per_s for record in (records[1:] or records)]
    return len(speeds) / sum(1 / speed for speed in speeds) if speeds else None


def table(run: Run, summary: dict[str, Any]) -> RenderableType:
    """Return the summary as a table for the terminal."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True, style="bold")
    rows.add_column(overflow="fold")
    for name, text in _lines(run, summary):
        rows.add_row(name, Text(printable(text)))  # as Text, because a folder's name may be markup, such as [best]
    if not summary["num_steps"]:  # nothing was trained, so no memory was measured
        return Group(Text(), rows, Text())
    return Group(Text(), rows, Text(), _memory(run, summary["bytes_per_rank"]), Text())


def _lines(run: Run, summary: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("data", described_splits(run.plan.config, bool(run.loader.source.class_names)))]
    if summary["loss_first"] is not None:
        rates = run.plan.optimizer.head_lr_factors
        of = _last_batch(run) + (f"; the sum of {len(rates)} classifiers, most too fast or slow" if rates else "")
        lines.append(("loss", f"{summary['loss_first']:.4f} -> {summary['loss_last']:.4f}  (first step -> last{of})"))
    if summary["knn_top1_after"] is not None:
        before, after = percent(summary["knn_top1_before"]), percent(summary["knn_top1_after"])
        raw = summary.get("knn_top1_raw_pixels")
        figures = f"{before} -> {after}" if summary["num_steps"] else after
        lines.append(("kNN top-1", figures + (f"  (raw pixels {percent(raw)})" if raw else "")))
    if (rank := summary.get("rankme_after")) is not None:
        first = summary.get("rankme_before")
        figures = f"{first:.1f} -> {rank:.1f}" if first is not None and summary["num_steps"] else f"{rank:.1f}"
        lines.append(("RankMe", f"{figures}  (dimensions that the features use)"))
    if (views := summary.get("lidar")) is not None:
        lines.append(("LiDAR", f"{views:.1f}  (dimensions that tell images apart, over their views)"))
    for layer, share in (summary.get("knn_top1_by_layer") or {}).items():
        lines.append((f"kNN {layer}", percent(share)))
    for vote, share in (summary.get("knn_top1_by_vote") or {}).items():
        lines.append((f"kNN {vote}", percent(share)))
    if summary.get("probe_top1") is not None:
        lines.append(("linear probe", f"{percent(summary['probe_top1'])}  (trained beside the model)"))
    lines += [*_accuracy(summary), *_overlap(summary)]
    if summary["num_steps"]:
        speed, steps = figure_text(summary["images_per_s"], 4), summary["num_steps"]
        lines.append(("speed", f"{speed} images/s, {steps} steps of {run.plan.global_batch} images"))
    ranks = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
    return [
        *lines,
        ("sharding", f"ZeRO level {summary['level']}, {summary['engine']} engine, {ranks} on {run.device.type}"),
        ("run folder", str(run.folder)),
    ]


def _last_batch(run: Run) -> str:
    """Return a clause if the last step has fewer images than others, which makes its loss noisier; else ""."""
    rest = len(run.loader.source) % run.plan.global_batch
    is_end = run.steps_per_epoch > 0 and run.step % run.steps_per_epoch == 0
    is_smaller = is_end and rest and not run.plan.config.DATA.TRAIN.DROP_LAST
    return f", which has {rest} of {run.plan.global_batch} images" if is_smaller else ""


def _accuracy(summary: dict[str, Any]) -> list[tuple[str, str]]:
    if "top1" not in summary:
        return []
    lines = [("top-1", percent(summary["top1"]))]
    if summary.get("top5") is not None:
        lines.append(("top-5", percent(summary["top5"])))
    if "best_layer" in summary:
        others = ", ".join(f"{layer}: {percent(top1)}" for layer, top1 in summary["top1_by_layer"].items())
        lines.append(("layer", f"{summary['best_layer']} was best  ({others})"))
    if "best_lr" in summary:
        others = ", ".join(f"{lr}: {percent(top1)}" for lr, top1 in summary["top1_by_lr"].items())
        lines.append(("learning rate", f"{summary['best_lr']:g} was best  ({others})"))
    if "top1_best" in summary:
        lines.append(("best", _best_text(summary, "top1_best")))
    knn = summary["knn_top1_after"]
    if "best_lr" in summary and knn is not None and summary["top1"] is not None and summary["top1"] < knn:
        why = "the classifier is undertrained: try more epochs (config.OPTIMIZER.num_epochs) or other learning rates"
        lines.append(("warning", f"the probe is below kNN ({percent(summary['top1'])} < {percent(knn)}); {why}"))
    return lines


def _overlap(summary: dict[str, Any]) -> list[tuple[str, str]]:
    if summary.get("miou") is None:
        return []
    step, first = summary["miou_by_step"][0]
    before = f"{percent(first)} -> " if step == 0 and summary["num_steps"] else ""
    lines = [
        ("mIoU", f"{before}{percent(summary['miou'])}  (mean intersection over union on TEST)"),
        ("pixels", f"{percent(summary['pixel_accuracy'])} have their class"),
    ]
    by_class = sorted((share, name) for name, share in summary["iou_by_class"].items() if share is not None)
    worst = ", ".join(f"{name}: {percent(share)}" for share, name in by_class[:_MOST_CLASSES_SHOWN])
    lines.append(("least IoU", worst))
    if "miou_best" in summary:
        lines.append(("best", _best_text(summary, "miou_best")))
    return lines


def _best_text(summary: Mapping[str, Any], name: str) -> str:
    return f"{percent(summary[name])} at step {summary['best_step']:.0f}: {BEST_WEIGHTS_FILE}"


def percent(fraction: float | None) -> str:
    """Format a fraction as ``"93.9 %"``; None as ``"-"``."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def _memory(run: Run, per_rank: list[dict[str, int]]) -> RenderableType:
    """Return the table of memory, with kinds as rows and ranks as columns; it fits 80 characters."""
    columns = {f"rank {rank}": memory for rank, memory in enumerate(per_rank[:_MOST_RANKS_SHOWN])}
    if len(per_rank) > _MOST_RANKS_SHOWN:
        kinds = per_rank[0]
        columns[f"largest of {len(per_rank)}"] = {kind: max(memory[kind] for memory in per_rank) for kind in kinds}
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("peak memory", no_wrap=True)
    for name in columns:
        grid.add_column(name, justify="right", no_wrap=True)
    outside = "allocated on the GPU" if run.device.type == "cuda" else "resident set size"
    held = shown_kinds(*(Bytes(**memory) for memory in per_rank))
    rows = {**held, "params_step_peak": "parameters, peak", "peak": outside}
    for kind, name in rows.items():
        grid.add_row(name, *(bytes_text(memory[kind]) for memory in columns.values()))
    return grid
