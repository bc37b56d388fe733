from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from tests.unit.reporting.example_run import MIB, make_record
from vissl_zero.reporting.panels import CropSample, NeighborRow, Page, ReportContent
from vissl_zero.reporting.report import draw, write_report
from vissl_zero.sharding.memory import Bytes


def picture(side: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)


def crop_sample() -> CropSample:
    return CropSample(picture(8), [picture(24), picture(24), picture(16), picture(16)])


def neighbor_row() -> NeighborRow:
    near = [picture(8, seed) for seed in range(3)]
    return NeighborRow(picture(8), near, near, [True, False, False], [True, True, True])


FULL = ReportContent(
    title="quickstart/swav_digits",
    subtitle="ZeRO level 3",
    headlines=[("3.40 → 2.51", "loss")],
    records=[make_record(step) for step in range(1, 21)],
    trivial_loss=math.log(30),
    knn=[(0, 0.84), (20, 0.93)],
    knn_raw_pixels=0.98,
    bytes_per_rank=[Bytes(3 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 1024, 700 * MIB)] * 2,
    crops=[crop_sample()] * 3,
    neighbors=[neighbor_row()] * 2,
)
EMPTY = ReportContent("my/recipe", "ZeRO level 0")


def titles(figure: Figure) -> list[str]:
    """What stands on the page as titles: of axes, and of the sections without axes."""
    return [axes.get_title(loc="left") for axes in figure.axes] + [text.get_text() for text in figure.texts]


def test_the_file_is_a_png_of_1600_pixels(tmp_path: Path) -> None:
    write_report(FULL, tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as image:
        assert image.format == "PNG" and image.width == 1600 and image.height > 1200
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


@pytest.fixture(scope="module")
def full_page() -> Page:
    return draw(FULL)


def test_everything_is_there(full_page: Page) -> None:
    shown = titles(full_page.figure)
    for title in (
        "Loss",
        "kNN top-1",
        "Learning rate",
        "Gradient norm, before clipping",
        "Assignment entropy",
        "Prototypes in use",
        "Effective rank",
        "Memory by kind, peak of each rank",
        "Crops of the first batch",
        "Nearest neighbors of test images",
        "3.40 → 2.51",
    ):
        assert title in shown
    records = [make_record(step, watch={"top1": 0.5}) for step in (1, 2)]
    assert "Top-1 on the training batches" in titles(draw(replace(FULL, records=records)).figure)


def test_every_health_metric_has_a_panel(full_page: Page) -> None:
    watch = {"assignment_entropy": 0.5, "prototypes_in_use": 28.0, "effective_rank": 6.0, "mean_cosine": 0.1}
    page = draw(replace(FULL, records=[make_record(step, watch=watch) for step in (1, 2)]))
    assert {"Assignment entropy", "Prototypes in use", "Effective rank", "Mean cosine"} <= set(titles(page.figure))
    assert page.height > full_page.height  # a row holds three


@pytest.mark.parametrize(
    ("missing", "title"),
    [
        ({"knn": []}, "kNN top-1"),
        ({"crops": []}, "Crops of the first batch"),
        ({"neighbors": []}, "Nearest neighbors of test images"),
        ({"bytes_per_rank": []}, "Memory by kind, peak of each rank"),
        ({"records": [make_record(1, watch={})]}, "Effective rank"),
        ({"records": [make_record(1, grad_norm=None, loss=None, skipped=True)]}, "Gradient norm, before clipping"),
    ],
)
def test_what_is_missing_takes_no_room(missing: dict, title: str, full_page: Page) -> None:
    page = draw(replace(FULL, **missing))
    assert title in titles(full_page.figure) and title not in titles(page.figure)
    assert page.height <= full_page.height


@pytest.mark.parametrize(
    "content",
    [
        EMPTY,
        replace(EMPTY, records=[make_record(1)]),
        replace(EMPTY, records=[make_record(1, loss=None, skipped=True, grad_norm=None, watch={})]),
        replace(EMPTY, knn=[(0, 0.5)]),
        replace(EMPTY, crops=[CropSample(None, [picture(3)])]),
        replace(EMPTY, neighbors=[NeighborRow(picture(5), [picture(9)], [picture(4)])]),
        replace(EMPTY, bytes_per_rank=[Bytes()] * 40),
    ],
)
def test_any_part_alone_can_be_drawn(content: ReportContent, tmp_path: Path) -> None:
    write_report(content, tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as image:
        assert image.width == 1600


def test_pictures_stay_inside_the_page() -> None:
    wide = CropSample(picture(32), [picture(24)] * 2 + [picture(16)] * 8)
    page = draw(replace(EMPTY, crops=[wide] * 8))
    (axes,) = page.figure.axes
    left, right, bottom, top = np.array([image.get_extent() for image in axes.images]).T
    assert left.min() >= 0 and right.max() <= axes.get_xlim()[1] and bottom.max() <= axes.get_ylim()[0]
    assert top.min() > 0 and len(axes.images) == 8 * 11


def test_frames_tell_same_class_from_another() -> None:
    axes = draw(replace(EMPTY, neighbors=[neighbor_row()])).figure.axes[-1]
    colors = [patch.get_edgecolor() for patch in axes.patches]
    assert len(colors) == 6 and len(set(colors)) == 2
    assert colors.count(colors[0]) == 4  # one match before, three after
