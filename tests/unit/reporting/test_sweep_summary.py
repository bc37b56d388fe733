"""The table of a sweep shows what its jobs measured."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from vissl_zero.reporting.comparison import ComparedRun, Group, rows_of
from vissl_zero.reporting.sweep_summary import Row, join_seeds, print_sweep


def printed(**summary: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_sweep([Row("0", {"config.OPTIMIZER.lr": "0.1"}, "done", {"loss_last": 1.5, "bytes": {}, **summary})], console)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_a_sweep_of_classifiers_shows_their_accuracy() -> None:
    text = printed(top1=0.764, knn_top1_after=0.842)
    assert "loss top-1 kNN top-1 images/s" in text and "1.5 76.4 % 84.2 % -" in text
    assert "top-1 kNN" not in printed(knn_top1_after=0.842)


def test_means_over_seeds_hold_top_5() -> None:
    runs = [ComparedRun(Path(str(seed)), "", {"SEED_VALUE": seed}, [], {"top5": 0.9 + seed / 10}) for seed in (0, 1)]
    assert list(rows_of([Group("", runs)])) == [("top-5", ["95.0 % [90.0 %, 100.0 %]"])]


def test_runs_with_one_seed_are_no_seeds() -> None:
    runs = [ComparedRun(Path(str(number)), "", {"SEED_VALUE": 0}, [], {"top5": 0.9}) for number in range(2)]
    assert Group("", runs).size == "2 runs" and Group("", runs[:1]).size == "1 run"
    assert list(rows_of([Group("", runs)])) == [("top-5", ["90.0 %"])]


def test_a_sweep_over_values_that_make_one_run_has_no_means_over_seeds(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.resolved.yaml").write_text("config: {SEED_VALUE: 0}\nrecipe: a/b\n")
        (tmp_path / str(number) / "metrics.jsonl").touch()
    rows = [Row(str(number), {"config.OPTIMIZER.lr": value}, "done", {}) for number, value in enumerate(["0", "0.0"])]
    assert not join_seeds(tmp_path, rows)
    (tmp_path / "1" / "config.resolved.yaml").write_text("config: {SEED_VALUE: 1}\nrecipe: a/b\n")
    assert join_seeds(tmp_path, rows)
