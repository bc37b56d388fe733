from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.unit.reporting.example_run import make_record, make_run, play
from vissl_zero.engine.hook import Run, StepRecord
from vissl_zero.reporting import tensorboard
from vissl_zero.reporting.tensorboard import TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show: tag -> (step, value)."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_figure_of_every_step(run: Run, records: list[StepRecord]) -> None:
    run.results["knn_top1_before"] = 0.5
    play(run, TensorBoard(), records)
    written = scalars(run.folder)
    assert [step for step, _ in written["train/loss"]] == list(range(1, 21))
    assert [value for _, value in written["train/loss"]] == pytest.approx([record.loss for record in records])
    assert written["memory/optimizer"][0] == (1, float(records[0].bytes.optimizer))
    assert written["watch/effective_rank"][-1] == (20, 6.0)
    assert written["evaluation/knn_top1_before"] == [(0, 0.5)]


def test_skipped_and_not_finite_figures_are_left_out(run: Run) -> None:
    skipped = make_record(1, loss=None, grad_norm=None, skipped=True)
    play(run, TensorBoard(), [skipped, make_record(2, grad_norm=math.inf)])
    written = scalars(run.folder)
    assert [step for step, _ in written["train/loss"]] == [2]
    assert "train/grad_norm" not in written


def test_a_resumed_run_hides_the_steps_it_does_again(tmp_path: Path) -> None:
    play(make_run(tmp_path), TensorBoard(), [make_record(step) for step in range(1, 8)])
    resumed = make_run(tmp_path)
    resumed.step = 5
    play(resumed, TensorBoard(), [make_record(6, loss=1.5)])
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("fails", ["at the start", "later"])
def test_a_file_that_cannot_be_written_ends_the_events_and_not_the_run(
    run: Run, records: list[StepRecord], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes nothing, as a disk that is full or broken; a file is buffered, so that it fails when flushed."""
    (run.folder / "tensorboard").mkdir()
    name = run.folder / "tensorboard" / "events"
    monkeypatch.setattr(tensorboard, "_file_name", lambda: name.name)
    if fails == "at the start":
        name.symlink_to("/dev/full")
    output = Console(file=io.StringIO(), width=60)
    hook = TensorBoard(output)
    hook.on_start(run)
    if fails == "later":
        full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the hook closes it
        hook._events._file = full  # type: ignore[union-attr, assignment]
        hook._events._records = RecordWriter(full)  # type: ignore[union-attr]
    for record in records:
        hook.on_record(run, record)
    hook.on_end(run)
    hook.close(run)
    said = output.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("\n") == 1 and "warning: tensorboard cannot be written (No space left on device)" in said


def test_a_folder_that_is_a_file_is_a_warning(run: Run, records: list[StepRecord]) -> None:
    (run.folder / "tensorboard").touch()
    play(run, TensorBoard(Console(file=io.StringIO())), records)


def test_only_rank_0_writes(tmp_path: Path, records: list[StepRecord]) -> None:
    play(make_run(tmp_path, rank=1), TensorBoard(), records)
    assert list(tmp_path.iterdir()) == []
