"""Short runs of a recipe on the GPU or the CPU, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command_line import run_command

EVERY = [
    "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
    "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
]


def losses(folder: Path, recipe: str, *overrides: str, device: str = "gpu") -> list[float]:
    """Train a recipe; return the loss of each step."""
    words = [f"config={recipe}", *EVERY, f"config.MACHINE.DEVICE={device}", f"config.CHECKPOINT.DIR={folder}"]
    run_command(*words, *overrides, timeout_s=240)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
