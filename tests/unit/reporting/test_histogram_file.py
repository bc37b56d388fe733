"""Histograms: each element in its bucket, one line a step, none lost or doubled by a resume, shown by the loggers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.reporting.example_run import make_record, make_run
from tests.unit.reporting.test_loggers import log_records
from vissl_zero.engine.hook import Run
from vissl_zero.reporting.histogram_file import FILE_NAME, HistogramFile, read_histograms
from vissl_zero.reporting.loggers.logger import run_id
from vissl_zero.reporting.loggers.logging import Logging
from vissl_zero.sharding.state.shard import whole_shard
from vissl_zero.sharding.update.histograms import EDGES, Histograms, histograms_of


def counted(values: list[float]) -> Histograms:
    param = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    param.grad = torch.zeros_like(param)
    return histograms_of([whole_shard("w", param)], None)


def test_each_element_is_in_its_bucket() -> None:
    values = [0.0, 1e-12, 0.5, -0.5, 1e6, -1e6]
    found = counted(values)
    (row,) = found.weights
    assert row.sum() == len(values) and row[0] == row[-1] == 1  # the open buckets
    assert row[len(EDGES) // 2] == 2  # around zero
    place = next(index for index, edge in enumerate(EDGES) if edge > 0.5)
    assert row[place] == row[len(EDGES) - place] == 1
    assert found.gradients[0][len(EDGES) // 2] == len(values)


def play(run: Run, hooks: list[HistogramFile | Logging], steps: range) -> None:
    run.step = run.first_step = steps[0] - 1
    for hook in hooks:
        hook.on_start(run)
    for step in steps:
        run.step, run.histograms = step, counted([float(step)] * step) if step % 2 == 0 else None
        record = make_record(step)
        for hook in hooks:
            hook.on_step(run, record)
            hook.on_record(run, record)
    for hook in hooks:
        hook.close(run)


def test_a_resume_drops_what_it_repeats(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    play(run, [HistogramFile()], range(1, 7))
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"step": 8, "cou')  # killed here
    play(run, [HistogramFile()], range(4, 9))
    rows = dict(read_histograms(tmp_path / FILE_NAME))
    assert list(rows) == [2, 4, 6, 8]
    assert sum(rows[8]["weights/w"].values()) == 8


@pytest.mark.slow
def test_wandb_shows_them(tmp_path: Path) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    play(make_run(tmp_path), [HistogramFile(), Logging(["wandb"])], range(1, 5))
    wandb.teardown()  # its service writes the end of the file when it ends
    (path,) = (tmp_path / "wandb").glob(f"offline-run-*/run-{run_id(tmp_path)}.wandb")
    found = {}
    for data in log_records(path.read_bytes()):
        record = Record.FromString(data)
        row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if "weights/w/values" in row:
            found[record.history.step.num] = sum(json.loads(row["weights/w/values"]))
    assert found == {2: 2, 4: 4}
