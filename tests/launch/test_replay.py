"""A run that diverges captures the step, and the command that it names runs it again: in one process and sharded."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run_command

WORDS = ["config=digits/supervised", "config.OPTIMIZER.lr=1e6", "config.HOOKS.CAPTURE_BAD_STEP.USE_CAPTURE=true"]
FEW = ["config.NEAREST_NEIGHBOR.USE_KNN=false", "config.HOOKS.LOGGERS=[]", "config.DATA.TRAIN.DATA_LIMIT=320"]


def replayed(command: str, *words: str) -> dict[str, Any]:
    out = run_command(*shlex.split(command)[1:], *words, "--json").stdout
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("level", "ranks"), [pytest.param(0, 1, marks=pytest.mark.soak), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_a_learning_rate_that_is_too_high(level: int, ranks: int, tmp_path: Path) -> None:
    sharded = [f"config.ZERO.LEVEL={level}", f"config.DISTRIBUTED.NUM_PROC_PER_NODE={ranks}"]
    batch = f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={64 // ranks}"
    done = run_command(*WORDS, *FEW, *sharded, batch, f"config.CHECKPOINT.DIR={tmp_path}", returncodes=[2])
    said = re.search(r"Step (\d+) was captured; to look into it: (vissl-zero replay \S+)", done.stderr)
    assert said, done.stderr
    result = replayed(said[2])
    assert result["is_equal"] and not math.isfinite(float(result["loss"])) and result["step"] == int(said[1])
    assert (result["level"], result["world_size"], result["precision"]) == (level, ranks, "float32")
    first = result["first_not_finite"]
    assert first is not None and first.startswith("trunk.")
    wider = replayed(said[2], "--precision", "float64", "--processes", "1")
    assert wider["first_not_finite"] is None and math.isfinite(float(wider["loss"])) and not wider["is_equal"]
