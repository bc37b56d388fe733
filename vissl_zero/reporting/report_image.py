"""``report.png`` at the end of a run: gathers what there is to show and has it drawn."""

from __future__ import annotations

import numpy as np
import rich
from rich.console import Console

from vissl_zero.data.source import described
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.evaluation.knn_hook import KnnHook
from vissl_zero.evaluation.neighbours import Neighbours
from vissl_zero.reporting.image_sheets import first_crops, original
from vissl_zero.reporting.memory_kinds import total
from vissl_zero.reporting.quantity import bytes_text, figure_text
from vissl_zero.reporting.report_content import CropSample, NeighbourRow, ReportContent
from vissl_zero.reporting.summary import percent, summarise
from vissl_zero.sharding.strategy import Bytes

FILE_NAME = "report.png"


class ReportImage(Hook):
    """Draws the page on rank 0, after every hook that adds results.

    Args:
        knn: the run's kNN hook, for its curve and neighbours.
        console: where to print the file's path.
    """

    def __init__(self, knn: KnnHook, console: Console | None = None):
        self._knn = knn
        self._console = console or rich.get_console()

    def on_end(self, run: Run) -> None:
        if not run.is_main:
            return
        from vissl_zero.reporting.report import write_report  # imports matplotlib: 1 s, on this rank only

        path = run.folder / FILE_NAME
        try:
            write_report(gather_content(run, self._knn), path)
        except OSError as error:
            self._console.print(f"warning: {FILE_NAME} cannot be written ({error.strerror}).", markup=False)
            return
        self._console.print(f"report      {path}", markup=False, highlight=False, soft_wrap=True)


def gather_content(run: Run, knn: KnnHook) -> ReportContent:
    """Everything a finished run has to show. Not a collective; rank 0 reads some images again."""
    plan = run.plan
    ranks = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
    per_rank = [Bytes(**memory) for memory in run.results.get("bytes_per_rank", [])]
    return ReportContent(
        title=plan.recipe,
        subtitle=(
            f"ZeRO level {plan.sharding.level}, {plan.sharding.engine} engine, {ranks} on {run.device.type}; "
            f"{run.step} steps of {plan.global_batch} images, {run.steps_per_epoch} steps per epoch; "
            f"{described(plan.config['DATA'], 'TRAIN')}"
        ),
        headlines=headlines(run, per_rank),
        records=run.records,
        trivial_loss=run.method.guessing_loss,
        knn=knn.curve,
        top1=[(int(step), top1) for step, top1 in run.results.get("top1_by_step", [])],
        knn_raw_pixels=run.results.get("knn_top1_raw_pixels"),
        bytes_per_rank=per_rank,
        peak_kind="allocated" if run.device.type == "cuda" else "resident",
        crops=first_crops(run),
        neighbours=neighbour_rows(knn.neighbours_before, knn.neighbours_after),
        patches=patch_samples(knn),
    )


def patch_samples(knn: KnnHook) -> list[CropSample]:
    """Test images with pictures of their patches, where the trunk is a vision transformer."""
    if knn.neighbours_after is None:
        return []
    source = knn.neighbours_after.query_source
    return [
        CropSample(original(source, picture.image_id), [picture.components, *_if_any(picture.attention)])
        for picture in knn.pictures
    ]


def _if_any(picture: np.ndarray | None) -> list[np.ndarray]:
    return [] if picture is None else [picture]


def headlines(run: Run, per_rank: list[Bytes]) -> list[tuple[str, str]]:
    """The few figures at the top: (figure, what it is)."""
    summary = summarise(run)
    found = []
    if summary["loss_first"] is not None:
        found.append((f"{summary['loss_first']:.3f} → {summary['loss_last']:.3f}", "loss, first step → last"))
    if summary["knn_top1_after"] is not None:
        before, after = summary["knn_top1_before"], percent(summary["knn_top1_after"])
        # A run that resumes from an imported checkpoint has not seen its own beginning.
        knn = (after, "kNN top-1") if before is None else (f"{100 * before:.1f} → {after}", "kNN top-1, before → after")
        found.append(knn)
    if summary.get("top1") is not None:
        found.append((percent(summary["top1"]), "top-1 of the trained classifier"))
    if summary["images_per_s"] is not None:
        found.append((figure_text(summary["images_per_s"], 3), "images/s over all ranks"))
    if per_rank:
        found.append((bytes_text(max(total(memory) for memory in per_rank)), "peak memory by kind, largest rank"))
    return found


def neighbour_rows(before: Neighbours | None, after: Neighbours | None) -> list[NeighbourRow]:
    """The same test images with what was near them before and after training.

    Args:
        before, after: with the same queries and the same number of neighbours; None where kNN was off.
    Returns:
        A row per test image; those with an image that cannot be read any more are left out.
    """
    if before is None or after is None:
        return []
    rows = []
    for place, query_id in enumerate(before.query_ids):
        wanted = [(before.query_source, query_id)]
        for found in (before, after):
            wanted += [(found.index_source, index) for index in found.neighbour_ids[place]]
        pictures = [original(source, index) for source, index in wanted]
        readable = [picture for picture in pictures if picture is not None]
        if len(readable) < len(pictures):
            continue
        last = 1 + len(before.neighbour_ids[place])
        matches = [None if found.matches is None else found.matches[place] for found in (before, after)]
        rows.append(NeighbourRow(readable[0], readable[1:last], readable[last:], *matches))
    return rows
