"""Histograms count whole tensors, the same at every level and number of ranks, and TensorBoard reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command_line import run_command
from vissl_zero.sharding.update.histograms import EDGES


def trained(folder: Path, level: int, ranks: int, steps: int = 4) -> dict[int, Any]:
    words = ["config=digits/supervised", f"config.ZERO.LEVEL={level}", f"config.DISTRIBUTED.NUM_PROC_PER_NODE={ranks}"]
    words += [f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={32 // ranks}", "config.TRAINER.DTYPE=float64"]
    words += [f"config.TRAINER.MAX_STEPS={steps}", "config.HOOKS.HISTOGRAMS_EVERY=2", "config.ZERO.clip_grad=0.1"]
    run_command(*words, "config.NEAREST_NEIGHBOR.USE_KNN=false", f"config.CHECKPOINT.DIR={folder}")
    rows = map(json.loads, (folder / "histograms.jsonl").read_text().splitlines())
    return {row["step"]: row["counts"] for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_counts_at_every_level_in_the_file_and_in_tensorboard(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", 0, 1)
    assert list(plain) == [2, 4] and any(tag.startswith("gradients/") for tag in plain[2])
    for level in (1, 3):
        assert trained(tmp_path / f"level{level}", level, 2) == plain, level
    trained(tmp_path / "level3", 3, 2, steps=6)  # resumes
    events = EventAccumulator(str(tmp_path / "level3/tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert set(events.Tags()["histograms"]) == set(plain[2])
    for tag, row in plain[4].items():
        shown = events.Histograms(tag)
        assert [event.step for event in shown] == [2, 4, 6]
        value = shown[1].histogram_value
        assert value.num == sum(row.values())
        found = {EDGES.index(limit): count for limit, count in zip(value.bucket_limit, value.bucket, strict=True)}
        assert {place: count for place, count in found.items() if count} == {int(place): n for place, n in row.items()}
