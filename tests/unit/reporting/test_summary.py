from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.reporting.example_run import MIB, make_record, make_run, play
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.reporting.quantity import PeakMemory, largest, total
from vissl_zero.reporting.summary import Summary, images_per_s
from vissl_zero.sharding.memory import Bytes


class Results(Hook):
    """Adds results, as evaluation does."""

    def __init__(self, **results: Any):
        self.results = results

    def on_end(self, run: Run) -> None:
        run.results.update(self.results)


def finish(run: Run, records: list[StepRecord], **results: Any) -> tuple[dict[str, Any], str]:
    """Runs to the end; the JSON and what was printed."""
    console = Console(file=io.StringIO(), width=80)
    run.records, run.step = records, len(records)
    for hook in (Results(**results), PeakMemory(), Summary(console)):
        hook.on_end(run)
    assert isinstance(console.file, io.StringIO)
    return json.loads((run.folder / "summary.json").read_text()), console.file.getvalue()


def test_the_documented_keys(run: Run, records: list[StepRecord]) -> None:
    summary, _ = finish(run, records, knn_top1_before=0.842, knn_top1_after=0.939)
    expected = {
        "level": 3,
        "engine": "torch",
        "world_size": 2,
        "num_steps": 20,
        "loss_first": records[0].loss,
        "loss_last": records[-1].loss,
        "knn_top1_before": 0.842,
        "knn_top1_after": 0.939,
    }
    assert {key: summary[key] for key in expected} == expected
    assert set(summary["bytes"]) >= {"params", "grads", "optimizer", "activations", "buffers", "peak"}
    assert "top1" not in summary


def test_bytes_are_the_peak_of_each_kind(run: Run) -> None:
    memory = [Bytes(params=5, grads=1, peak=70), Bytes(params=3, grads=9, peak=80)]
    summary, _ = finish(run, [make_record(step + 1, bytes=held) for step, held in enumerate(memory)])
    assert {kind: summary["bytes"][kind] for kind in ("params", "grads", "peak")} == {
        "params": 5,
        "grads": 9,
        "peak": 80,
    }
    assert summary["bytes_per_rank"] == [summary["bytes"]]


def test_skipped_steps_are_no_loss(run: Run) -> None:
    skipped = make_record(1, loss=None, skipped=True, grad_norm=None)
    summary, _ = finish(run, [skipped, make_record(2, loss=3.0), make_record(3, loss=2.0)])
    assert (summary["loss_first"], summary["loss_last"]) == (3.0, 2.0)


def test_no_steps_at_all(run: Run) -> None:
    summary, _ = finish(run, [])
    assert summary["num_steps"] == 0
    assert summary["loss_first"] is summary["images_per_s"] is summary["knn_top1_after"] is None


def test_speed_is_images_over_time_and_leaves_out_the_first_step() -> None:
    records = [make_record(1, images_per_s=1.0), make_record(2, images_per_s=100.0), make_record(3, images_per_s=300.0)]
    assert images_per_s(records) == pytest.approx(150.0)  # 2 steps of n images in n/100 + n/300 s
    assert images_per_s(records[:1]) == 1.0


def test_the_table(run: Run, records: list[StepRecord]) -> None:
    _, text = finish(run, records, knn_top1_before=0.842, knn_top1_after=0.9389, knn_top1_raw_pixels=0.9806, top1=0.5)
    for part in (
        "84.2 % -> 93.9 %  (raw pixels 98.1 %)",
        "3.2825 -> 2.4821",
        "ZeRO level 3, torch engine, 2 processes",
    ):
        assert part in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "top-1 50.0 %" in lines and "activations 8.00 MiB" in lines
    assert str(run.folder) in text.replace("\n", "").replace(" ", "")
    assert max(map(len, text.splitlines())) <= 80


def test_only_rank_0_reports(tmp_path: Path, records: list[StepRecord]) -> None:
    console = Console(file=io.StringIO())
    play(make_run(tmp_path, rank=1), Summary(console), records)
    assert list(tmp_path.iterdir()) == [] and console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_kinds_add_up_without_the_peak() -> None:
    memory = Bytes(1, 2, 3, 4, 5, 900 * MIB)
    assert total(memory) == 15
    assert largest([]) == Bytes()


def test_the_data_are_named_and_a_probe_below_knn_says_so(run: Run, records: list[StepRecord]) -> None:
    rates = {"0.1": 0.2, "1": 0.27}
    results = {"knn_top1_before": 0.32, "knn_top1_after": 0.32, "top1": 0.27, "top1_by_lr": rates, "best_lr": 1.0}
    summary, text = finish(run, records, **results)
    assert summary["data"] == {"train": "disk_folder /cats", "test": "digits (90 of the images)"}
    said = " ".join(text.split())
    assert "data disk_folder /cats" in said
    assert "1 was best (0.1: 20.0 %, 1: 27.0 %)" in said and "the probe is below kNN" in said
    run.plan = replace(run.plan, optimizer=replace(run.plan.optimizer, head_lr_factors=(0.1, 1.0)))
    _, text = finish(run, records, **{**results, "top1": 0.4})
    assert "below kNN" not in text and "the sum of 2 classifiers" in " ".join(text.split())


def test_a_folder_with_brackets_keeps_its_name_and_a_small_last_batch_is_named(
    tmp_path: Path, records: list[StepRecord]
) -> None:
    (tmp_path / "[best]").mkdir()
    _, text = finish(make_run(tmp_path / "[best]"), records)
    assert "[best]" in text.replace("\n", "").replace(" ", "")
    assert "(first step -> last, which has 12 of 32 images)" in " ".join(text.split())  # 300 images
