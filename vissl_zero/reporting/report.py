"""``report.png``: the run on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from vissl_zero.atomic import replacing
from vissl_zero.reporting.curves import draw_figure, draw_loss, draw_memory, draw_top1, series
from vissl_zero.reporting.image_sheets import crops_height, draw_crops, draw_neighbours, neighbours_height
from vissl_zero.reporting.report_content import ReportContent
from vissl_zero.reporting.report_page import (
    GREEN,
    MARGIN,
    ORANGE,
    PURPLE,
    SOFT,
    STYLE,
    VERMILLION,
    WIDTH,
    Page,
)

_INNER = WIDTH - 2 * MARGIN
_HEADER = 226
_TITLE = 44  # a section's title and the space above it
_PANEL = 230  # height of a panel's drawing area
_PANEL_STEP = _PANEL + 100
_AXIS_ROOM = 62  # pixels left of a panel, for its tick labels
_MOST_RANKS = 16
_WATCH_COLORS = (PURPLE, GREEN, VERMILLION)


@dataclass(frozen=True)
class Panel:
    """One panel with axes. ``weight``: its share of the row's width."""

    weight: float
    draw: Callable[[Axes], None]


def write_report(content: ReportContent, path: Path) -> None:
    """Draw the page and write it as PNG, 1,600 pixels wide. Cost: 1 to 3 s."""
    page = draw(content)
    with mpl.rc_context(STYLE), replacing(path) as temporary:
        page.figure.savefig(temporary, format="png")


@mpl.rc_context(STYLE)
def draw(content: ReportContent) -> Page:
    """The whole page; parts that are missing take no room."""
    rows = panel_rows(content)
    num_ranks = len(content.bytes_per_rank[:_MOST_RANKS])
    memory = 52 + 40 * num_ranks if num_ranks else 0
    crops = _TITLE + crops_height(content.crops, _INNER) if content.crops else 0
    neighbours = _TITLE + neighbours_height(content.neighbours, _INNER) if content.neighbours else 0
    patches = _TITLE + crops_height(content.patches, _INNER) if content.patches else 0
    page = Page(round(_HEADER + len(rows) * _PANEL_STEP + memory + crops + neighbours + patches + MARGIN))
    _draw_header(page, content)
    top = float(_HEADER)
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
    if content.neighbours:
        _draw_neighbours(page, content, top, neighbours - _TITLE)
        top += neighbours
    if content.patches:
        page.text(MARGIN, top, "Patches of test images after training", size=13, bold=True)
        label = "first three principal components" + (", attention of the class token" * _has_attention(content))
        draw_crops(page.picture(MARGIN, top + _TITLE - 14, _INNER, patches - _TITLE), content.patches, _INNER, label)
    return page


def _has_attention(content: ReportContent) -> bool:
    return len(content.patches[0].crops) > 1


def panel_rows(content: ReportContent) -> list[list[Panel]]:
    """The panels with axes, row by row: only those with something to show."""
    records = content.records
    first = [Panel(2.0, lambda axes: draw_loss(axes, records, content.trivial_loss))]
    if content.knn:
        first.append(Panel(1.0, lambda axes: draw_top1(axes, "kNN top-1", content.knn, content.knn_raw_pixels)))
    if content.top1:
        first.append(Panel(1.0, lambda axes: draw_top1(axes, "Top-1 on TEST", content.top1)))
    lr = series(records, lambda record: record.lr)
    norm = series(records, lambda record: record.grad_norm)
    second = [Panel(1.0, lambda axes: draw_figure(axes, "Learning rate", lr, ORANGE, is_noisy=False))]
    if len(norm):
        second.append(
            Panel(1.0, lambda axes: draw_figure(axes, "Gradient norm, before clipping", norm, SOFT, is_noisy=True))
        )
    watched = [_watch_panel(content, name, index) for index, name in enumerate(_watched(content))]
    rows = [first, second] if records else []
    return [*rows, *([watched] if watched else [])]


def _watched(content: ReportContent) -> list[str]:
    names = dict.fromkeys(name for record in content.records for name in record.watch)
    return list(names)[:3]


def _watch_panel(content: ReportContent, name: str, index: int) -> Panel:
    curve = series(content.records, lambda record: record.watch.get(name))
    title = "Top-1 on the training batches" if name == "top1" else name.replace("_", " ").capitalize()
    return Panel(1.0, lambda axes: draw_figure(axes, title, curve, _WATCH_COLORS[index], is_noisy=True))


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


def _draw_neighbours(page: Page, content: ReportContent, top: float, height: float) -> None:
    page.text(MARGIN, top, "Nearest neighbours of test images", size=13, bold=True)
    if any(row.after_matches is not None for row in content.neighbours):
        frames = "blue frame: of the same class; orange: of another"
        page.text(WIDTH - MARGIN, top + 2, frames, size=10.5, color=SOFT)
    axes = page.picture(MARGIN, top + _TITLE - 14, _INNER, height)
    draw_neighbours(axes, content.neighbours, _INNER)
