from __future__ import annotations

import io
from dataclasses import fields
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tests.blocks import data_block
from tests.unit.reporting.example_run import make_record
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.loader import Loader, build_loader
from vissl_zero.data.source import Source
from vissl_zero.engine.hook import Run
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.evaluation.pictures import Neighbors
from vissl_zero.reporting.hooks import ReportImage
from vissl_zero.reporting.panels import STYLE, Page, draw_memory
from vissl_zero.reporting.quantity import PeakMemory
from vissl_zero.reporting.report import gather_content, headlines, neighbor_rows
from vissl_zero.sharding.memory import Bytes


@pytest.fixture(scope="module")
def loader() -> Loader:
    """Two crops of 16 and one of 8 pixels of the digits, in batches of 4."""
    crops = {"total_num_crops": 3, "size_crops": [16, 8], "num_crops": [2, 1], "crop_scales": [[0.5, 1], [0.3, 0.5]]}
    split: dict[str, Any] = {
        "DATA_SOURCES": ["digits"],
        "DATA_PATHS": [],
        "DATA_LIMIT": -1,
        "DEFAULT_GRAY_IMG_SIZE": 8,
        "LABEL_SOURCES": [],
        "LABEL_PATHS": [],
        "LABEL_TYPE": "standard",
        "DROP_LAST": True,
        "TRANSFORMS": [
            {"name": "ImgPilToMultiCrop", **crops},
            {"name": "ToTensor"},
            {"name": "Normalize", "mean": [0.5] * 3, "std": [0.5] * 3},
        ],
    }
    data_cfg = {"TRAIN": split, "NUM_DATALOADER_WORKERS": 0, "PIN_MEMORY": False, "ON_BROKEN_IMAGE": "raise"}
    return build_loader(
        data_block(data_cfg), "TRAIN", seed=0, batch_per_rank=4, rank=0, world_size=1, accumulation_steps=1
    )


@pytest.fixture
def finished(run: Run, loader: Loader) -> Run:
    """A run of three steps that is over."""
    run.plan.config.DATA.TRAIN.TRANSFORMS = [{"name": "Normalize", "mean": [0.5] * 3, "std": [0.5] * 3}]
    run.plan.config.NEAREST_NEIGHBOR = {"USE_KNN": True}
    run.loader, run.records, run.step = loader, [make_record(step) for step in (1, 2, 3)], 3
    PeakMemory().on_end(run)
    return run


def finished_knn(run: Run, source: Source) -> KnnHook:
    """The kNN hook of that run, with what it leaves for the report."""
    knn = KnnHook(run.plan)
    knn.curve = [(0, 0.5), (3, 0.75)]
    run.results |= {"knn_top1_before": 0.5, "knn_top1_after": 0.75, "knn_top1_raw_pixels": 0.9}
    knn.neighbors_before = Neighbors(source, source, [0, 1], [[2, 3], [4, 5]], [[True, False], [False, False]])
    knn.neighbors_after = Neighbors(source, source, [0, 1], [[6, 7], [8, 9]], [[True, True], [True, False]])
    return knn


def test_a_finished_run_leaves_a_report(finished: Run, loader: Loader) -> None:
    console = Console(file=io.StringIO())
    ReportImage(finished_knn(finished, loader.source), console).on_end(finished)
    with Image.open(finished.folder / "report.png") as image:
        assert image.width == 1600
    assert str(finished.folder / "report.png") in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_legend_of_the_memory_leaves_title_and_bars_free() -> None:
    """With a teacher there are six kinds, which do not fit beside the title."""
    page = Page(400)
    axes = page.axes(110, 60, 1442, 80)
    memory = Bytes(*[123_456_789] * len(fields(Bytes)))
    with matplotlib.rc_context(STYLE):
        draw_memory(axes, [memory, memory], "resident")
        page.figure.canvas.draw()
    legend, title = axes.get_legend(), axes._left_title  # type: ignore[attr-defined]
    assert legend is not None and len(legend.get_texts()) == 6
    box = legend.get_window_extent()
    assert not box.overlaps(title.get_window_extent())
    assert box.y1 <= min(bar.get_window_extent().y0 for bar in axes.patches) + 1
    assert box.x1 <= page.figure.bbox.x1


def test_everything_a_run_has_is_gathered(finished: Run, loader: Loader) -> None:
    content = gather_content(finished, finished_knn(finished, loader.source))
    assert content.knn == [(0, 0.5), (3, 0.75)] and content.knn_raw_pixels == 0.9
    assert [len(content.records), len(content.bytes_per_rank), len(content.neighbors)] == [3, 1, 2]
    assert ("50.0 → 75.0 %", "kNN top-1, before → after") in content.headlines
    assert content.trivial_loss == pytest.approx(np.log(30))
    finished.results["knn_top1_before"] = None  # it resumes from an imported checkpoint
    assert ("75.0 %", "kNN top-1") in headlines(finished, [])


def test_the_crops_are_those_of_the_first_batch(finished: Run, loader: Loader) -> None:
    content = gather_content(finished, KnnHook(finished.plan))
    batch = next(iter(loader.epoch(0)))[0]
    assert len(content.crops) == 4
    for sample, shown in enumerate(content.crops):
        assert [crop.shape for crop in shown.crops] == [(16, 16, 3), (16, 16, 3), (8, 8, 3)]
        second_large = batch.images[0][4 + sample].numpy().transpose(1, 2, 0) * 0.5 + 0.5
        assert np.abs(shown.crops[1] / 255 - second_large).max() < 0.003
        digit = np.asarray(loader.source.image(int(batch.sample_ids[sample])))
        assert shown.original is not None and (shown.original == digit).all()


def test_without_knn_there_are_no_neighbors(finished: Run) -> None:
    content = gather_content(finished, KnnHook(finished.plan))
    assert content.neighbors == [] and content.knn == []


def test_neighbors_are_shown_with_their_own_images(loader: Loader) -> None:
    source = loader.source
    before = Neighbors(source, source, [10], [[20, 21]], [[True, False]])
    (row,) = neighbor_rows(before, Neighbors(source, source, [10], [[30, 31]], None))
    pictures = [row.query, *row.before, *row.after]
    for picture, index in zip(pictures, (10, 20, 21, 30, 31), strict=True):
        assert (picture == np.asarray(source.image(index))).all()
    assert row.before_matches == [True, False] and row.after_matches is None


def test_a_row_with_an_unreadable_image_is_left_out() -> None:
    class Fragile:
        class_names = ()

        def __len__(self) -> int:
            return 4

        def image(self, index: int) -> Image.Image:
            if index == 3:
                raise BrokenImageError("3.png", "it is cut short")
            return Image.new("RGB", (4, 4))

        def label(self, index: int) -> None:
            return None

        def name(self, index: int) -> str:
            return f"{index}.png"

    source = Fragile()
    before = Neighbors(source, source, [0, 1], [[1], [2]], None)
    after = Neighbors(source, source, [0, 1], [[3], [2]], None)
    assert len(neighbor_rows(before, after)) == 1
