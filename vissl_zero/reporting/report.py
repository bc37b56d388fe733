"""``report.png``: a finished run on one page. This gathers the content and draws it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from vissl_zero.atomic import replacing
from vissl_zero.data.source import described
from vissl_zero.data.sources.segmentation import voc_colors
from vissl_zero.data.split_pipeline import eval_transforms
from vissl_zero.engine.hook import Run
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.evaluation.pictures import Neighbors
from vissl_zero.evaluation.segmentation import SegmentedImage
from vissl_zero.reporting.findings import FINDINGS
from vissl_zero.reporting.panels import (
    GREEN,
    MARGIN,
    ORANGE,
    PURPLE,
    SOFT,
    STYLE,
    VERMILLION,
    WIDTH,
    CropSample,
    NeighborRow,
    Page,
    ReportContent,
    crops_height,
    denormalized,
    draw_crops,
    draw_figure,
    draw_loss,
    draw_memory,
    draw_neighbors,
    draw_top1,
    first_crops,
    neighbors_height,
    original,
    series,
)
from vissl_zero.reporting.quantity import bytes_text, figure_text, total
from vissl_zero.reporting.summary import percent, summarize
from vissl_zero.sharding.memory import Bytes

_INNER = WIDTH - 2 * MARGIN
_HEADER = 226
_TITLE = 44  # a section's title and the space above it
_PANEL = 230  # height of a panel's drawing area
_PANEL_STEP = _PANEL + 100
_AXIS_ROOM = 62  # pixels left of a panel, for its tick labels
_MOST_RANKS = 16
_FINDING = 24  # height of a line of a finding
_FINDING_WIDTH = 170  # most characters of such a line
_WATCH_COLORS = (PURPLE, GREEN, VERMILLION)


@dataclass(frozen=True)
class Panel:
    """A panel with axes. ``weight``: its share of the row's width."""

    weight: float
    draw: Callable[[Axes], None]


def write_report(content: ReportContent, path: Path) -> None:
    """Draw the page and write it as PNG, 1,600 pixels wide. Cost: 1 to 3 s."""
    page = draw(content)
    # Again with the style: matplotlib reads some settings only when a figure is rendered.
    with mpl.rc_context(STYLE), replacing(path) as temporary:
        page.figure.savefig(temporary, format="png")


@mpl.rc_context(STYLE)
def draw(content: ReportContent) -> Page:
    """Draw the whole page; sections without content take no space."""
    rows = panel_rows(content)
    num_ranks = len(content.bytes_per_rank[:_MOST_RANKS])
    memory = 84 + 40 * num_ranks if num_ranks else 0
    crops = _TITLE + crops_height(content.crops, _INNER) if content.crops else 0
    neighbors = _TITLE + neighbors_height(content.neighbors, _INNER) if content.neighbors else 0
    patches = _TITLE + crops_height(content.patches, _INNER) if content.patches else 0
    segmented = _TITLE + crops_height(content.segmented, _INNER) if content.segmented else 0
    pictures = crops + neighbors + patches + segmented
    findings = [line for sentence in content.findings for line in textwrap.wrap(sentence, _FINDING_WIDTH)]
    header = _HEADER + _FINDING * len(findings)
    # Summed before anything is drawn, because a figure's size is set when it is made.
    page = Page(round(header + len(rows) * _PANEL_STEP + memory + pictures + MARGIN))
    _draw_header(page, content)
    for index, line in enumerate(findings):
        page.text(MARGIN, _HEADER - 36 + index * _FINDING, line, color=VERMILLION)
    top = float(header)
    for row in rows:
        _draw_row(page, row, top)
        top += _PANEL_STEP
    if num_ranks:
        axes = page.axes(MARGIN + _AXIS_ROOM, top, _INNER - _AXIS_ROOM, 40 * num_ranks)
        draw_memory(axes, content.bytes_per_rank[:_MOST_RANKS], content.peak_kind)
        top += memory
    if content.crops:
        page.text(MARGIN, top, "Crops of the first batch", size=13, bold=True)
        draw_crops(page.picture(MARGIN, top + _TITLE - 14, _INNER, crops - _TITLE), content.crops, _INNER)
        top += crops
    if content.neighbors:
        _draw_neighbors(page, content, top, neighbors - _TITLE)
        top += neighbors
    if content.patches:
        page.text(MARGIN, top, "Patches of test images after training", size=13, bold=True)
        has_attention = len(content.patches[0].crops) > 1
        label = "first three principal components" + ", attention of the class token" * has_attention
        draw_crops(page.picture(MARGIN, top + _TITLE - 14, _INNER, patches - _TITLE), content.patches, _INNER, label)
        top += patches
    if content.segmented:
        page.text(MARGIN, top, "Segmented test images", size=13, bold=True)
        axes = page.picture(MARGIN, top + _TITLE - 14, _INNER, segmented - _TITLE)
        draw_crops(axes, content.segmented, _INNER, "mask, prediction")
    return page


def panel_rows(content: ReportContent) -> list[list[Panel]]:
    """List the panels with axes, row by row, without panels that have no content."""
    records = content.records
    first = [Panel(2.0, lambda axes: draw_loss(axes, records, content.trivial_loss))]
    if content.knn:
        first.append(Panel(1.0, lambda axes: draw_top1(axes, "kNN top-1", content.knn, content.knn_raw_pixels)))
    if content.top1:
        first.append(Panel(1.0, lambda axes: draw_top1(axes, "Top-1 on TEST", content.top1)))
    if content.miou:
        first.append(Panel(1.0, lambda axes: draw_top1(axes, "mIoU on TEST", content.miou)))
    lr = series(records, lambda record: record.lr)
    norm = series(records, lambda record: record.grad_norm)
    second = [Panel(1.0, lambda axes: draw_figure(axes, "Learning rate", lr, ORANGE, is_noisy=False))]
    if len(norm):
        second.append(
            Panel(1.0, lambda axes: draw_figure(axes, "Gradient norm, before clipping", norm, SOFT, is_noisy=True))
        )
    names = list(dict.fromkeys(name for record in records for name in record.watch))
    watched = [_watch_panel(content, name, color) for name, color in zip(names, cycle(_WATCH_COLORS))]
    per_row = len(_WATCH_COLORS)
    rows = [first, second] if records else []
    return [*rows, *(watched[start : start + per_row] for start in range(0, len(watched), per_row))]


def _watch_panel(content: ReportContent, name: str, color: str) -> Panel:
    curve = series(content.records, lambda record: record.watch.get(name))
    title = "Top-1 on the training batches" if name == "top1" else name.replace("_", " ").capitalize()
    return Panel(1.0, lambda axes: draw_figure(axes, title, curve, color, is_noisy=True))


def _draw_header(page: Page, content: ReportContent) -> None:
    page.text(MARGIN, 34, content.title, size=22, bold=True)
    page.text(MARGIN, 74, content.subtitle, size=11.5, color=SOFT)
    width = _INNER / max(4, len(content.headlines))
    for index, (figure, what) in enumerate(content.headlines):
        page.text(MARGIN + index * width, 116, figure, size=19, bold=True)
        page.text(MARGIN + index * width, 148, what, size=10.5, color=SOFT)


def _draw_row(page: Page, row: Sequence[Panel], top: float) -> None:
    whole = sum(panel.weight for panel in row)
    left = float(MARGIN)
    for panel in row:
        width = _INNER * panel.weight / whole
        is_last = panel is row[-1]
        panel.draw(page.axes(left + _AXIS_ROOM, top, width - _AXIS_ROOM - (0 if is_last else 24), _PANEL))
        left += width


def _draw_neighbors(page: Page, content: ReportContent, top: float, height: float) -> None:
    page.text(MARGIN, top, "Nearest neighbors of test images", size=13, bold=True)
    if any(row.after_matches is not None for row in content.neighbors):
        frames = "blue frame: of the same class; orange: of another"
        page.text(WIDTH - MARGIN, top + 2, frames, size=10.5, color=SOFT)
    axes = page.picture(MARGIN, top + _TITLE - 14, _INNER, height)
    draw_neighbors(axes, content.neighbors, _INNER)


def gather_content(run: Run, knn: KnnHook, segmented: Sequence[SegmentedImage] = ()) -> ReportContent:
    """Collect the report's content from a finished run. Not collective; rank 0 reads some images again."""
    plan = run.plan
    ranks = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
    per_rank = [Bytes(**memory) for memory in run.results.get("bytes_per_rank", [])]
    return ReportContent(
        title=plan.recipe,
        subtitle=(
            f"ZeRO level {plan.sharding.level}, {plan.sharding.engine} engine, {ranks} on {run.device.type}; "
            f"{run.step} steps of {plan.global_batch} images, {run.steps_per_epoch} steps per epoch; "
            f"{described(plan.config.DATA, 'TRAIN')}"
        ),
        headlines=headlines(run, per_rank),
        findings=run.results.get(FINDINGS, []),
        records=run.records,
        trivial_loss=run.method.guessing_loss,
        knn=knn.curve,
        top1=[(int(step), top1) for step, top1 in run.results.get("top1_by_step", [])],
        miou=[(int(step), miou) for step, miou in run.results.get("miou_by_step", [])],
        knn_raw_pixels=run.results.get("knn_top1_raw_pixels"),
        bytes_per_rank=per_rank,
        peak_kind="allocated" if run.device.type == "cuda" else "resident",
        crops=first_crops(run),
        neighbors=neighbor_rows(knn.neighbors_before, knn.neighbors_after),
        patches=_patch_samples(knn),
        segmented=segmented_samples(segmented, eval_transforms(plan.config.DATA)),
    )


def segmented_samples(segmented: Sequence[SegmentedImage], transforms: Sequence[Mapping[str, Any]]) -> list[CropSample]:
    """Return pictures of images at the model's input size, each with mask and prediction in PASCAL VOC's colors.

    Args:
        segmented: images of TEST with their masks.
        transforms: transforms of evaluation, whose mean and standard deviation are undone.
    """
    colors = voc_colors()
    return [
        CropSample(denormalized(one.image, transforms), [colors[one.mask], colors[one.predicted]]) for one in segmented
    ]


def _patch_samples(knn: KnnHook) -> list[CropSample]:
    """Return test images with pictures of their patches; empty if the trunk is no vision transformer."""
    if knn.neighbors_after is None:
        return []
    source = knn.neighbors_after.query_source
    return [
        CropSample(
            original(source, picture.image_id),
            [pixels for pixels in (picture.components, picture.attention) if pixels is not None],
        )
        for picture in knn.pictures
    ]


def headlines(run: Run, per_rank: list[Bytes]) -> list[tuple[str, str]]:
    """List the headlines: pairs of a result and its description."""
    summary = summarize(run)
    lines = []
    if summary["loss_first"] is not None:
        lines.append((f"{summary['loss_first']:.3f} → {summary['loss_last']:.3f}", "loss, first step → last"))
    if summary["knn_top1_after"] is not None:
        before, after = summary["knn_top1_before"], percent(summary["knn_top1_after"])
        # A run that resumes from an imported checkpoint has no measurement before its first step.
        knn = (after, "kNN top-1") if before is None else (f"{100 * before:.1f} → {after}", "kNN top-1, before → after")
        lines.append(knn)
    if summary.get("top1") is not None:
        lines.append((percent(summary["top1"]), "top-1 of the trained classifier"))
    if summary.get("miou") is not None:
        lines.append((percent(summary["miou"]), "mean IoU on TEST"))
    if summary["images_per_s"] is not None:
        lines.append((figure_text(summary["images_per_s"], 3), "images/s over all ranks"))
    if per_rank:
        lines.append((bytes_text(max(total(memory) for memory in per_rank)), "peak memory by kind, largest rank"))
    return lines


def neighbor_rows(before: Neighbors | None, after: Neighbors | None) -> list[NeighborRow]:
    """Pair test images with their neighbors before and after training.

    Args:
        before, after: neighbors of the same queries, in equal number; None if kNN was off.
    Returns:
        A row per test image, without rows that have an unreadable image.
    """
    if before is None or after is None:
        return []
    rows = []
    for place, query_id in enumerate(before.query_ids):
        wanted = [(before.query_source, query_id)]
        for neighbors in (before, after):
            wanted += [(neighbors.index_source, index) for index in neighbors.neighbor_ids[place]]
        pictures = [original(source, index) for source, index in wanted]
        readable = [picture for picture in pictures if picture is not None]
        # Left out whole: the place of a picture in its row is its rank among the neighbors.
        if len(readable) < len(pictures):
            continue
        last = 1 + len(before.neighbor_ids[place])
        matches = [None if neighbors.matches is None else neighbors.matches[place] for neighbors in (before, after)]
        rows.append(NeighborRow(readable[0], readable[1:last], readable[last:], *matches))
    return rows
