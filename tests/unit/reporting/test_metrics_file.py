from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.unit.reporting.example_run import make_record, make_run, play
from vissl_zero.engine.hook import Run, StepRecord
from vissl_zero.reporting.metrics_file import MetricsFile, line


def read(run: Run) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run.folder / "metrics.jsonl").read_text()
    return [json.loads(entry, parse_constant=refuse) for entry in text.splitlines()]


def test_every_step_is_a_line_with_the_documented_keys(run: Run, records: list[StepRecord]) -> None:
    play(run, MetricsFile(), records)
    entries = read(run)
    assert [entry["step"] for entry in entries] == list(range(1, 21))
    assert [entry["epoch"] for entry in entries] == [0] * 10 + [1] * 10
    assert set(entries[0]) >= {"step", "epoch", "loss", "lr", "images_per_s", "bytes", "skipped", "grad_norm"}
    assert set(entries[0]["bytes"]) >= {"params", "grads", "optimizer", "activations", "buffers", "peak"}
    assert entries[0]["bytes"]["optimizer"] == records[0].bytes.optimizer
    assert entries[0]["watch"] == records[0].watch


def test_floats_keep_every_digit() -> None:
    record = make_record(1, loss=0.1 + 0.2, lr=1 / 3)
    entry = json.loads(line(record))
    assert entry["loss"] == 0.1 + 0.2 != 0.3
    assert entry["lr"] == 1 / 3


def test_a_skipped_step_has_no_loss() -> None:
    entry = json.loads(line(make_record(3, loss=None, grad_norm=None, skipped=True, loss_scale=32768.0)))
    assert entry["loss"] is None and entry["skipped"] is True
    assert entry["grad_norm"] is None and entry["loss_scale"] == 32768.0
    assert "not_finite" not in entry


def test_nan_and_infinity_stay_valid_json(run: Run) -> None:
    watch = {"effective_rank": math.nan, "prototypes_in_use": 3.0}
    play(run, MetricsFile(), [make_record(1, grad_norm=math.inf, watch=watch)])
    (entry,) = read(run)
    assert entry["grad_norm"] is None and entry["watch"] == {"effective_rank": None, "prototypes_in_use": 3.0}
    assert entry["not_finite"] == {"grad_norm": "inf", "watch.effective_rank": "nan"}


def test_a_line_is_on_disk_as_soon_as_its_step_is_done(run: Run) -> None:
    hook = MetricsFile()
    hook.on_start(run)
    hook.on_record(run, make_record(1))
    assert [entry["step"] for entry in read(run)] == [1]
    hook.close(run)


def test_a_resumed_run_appends_and_drops_the_steps_it_does_again(tmp_path: Path) -> None:
    first = make_run(tmp_path)
    play(first, MetricsFile(), [make_record(step) for step in range(1, 8)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 2.')  # cut short by a crash
    resumed = make_run(tmp_path)
    resumed.step = 5
    play(resumed, MetricsFile(), [make_record(step, loss=1.5) for step in (6, 7)])
    entries = read(resumed)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry["loss"] == 1.5 for entry in entries] == [False] * 5 + [True] * 2


def test_only_rank_0_writes(tmp_path: Path, records: list[StepRecord]) -> None:
    play(make_run(tmp_path, rank=1), MetricsFile(), records)
    assert list(tmp_path.iterdir()) == []
