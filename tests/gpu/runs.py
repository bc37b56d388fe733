"""Short runs of a recipe on the GPU or the CPU, by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.command_line import run_command


def run(folder: Path, recipe: str, *overrides: str, device: str = "gpu") -> dict[str, Any]:
    """Run a recipe in one process; return its summary."""
    words = [f"config={recipe}", f"config.MACHINE.DEVICE={device}", f"config.CHECKPOINT.DIR={folder}"]
    run_command(*words, "config.DISTRIBUTED.NUM_PROC_PER_NODE=1", *overrides, timeout_s=240)
    return dict(json.loads((folder / "summary.json").read_text()))


def losses(folder: Path, recipe: str, *overrides: str, device: str = "gpu") -> list[float]:
    """Train a recipe; return the loss of each step."""
    plain = ["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16", "config.NEAREST_NEIGHBOR.USE_KNN=false"]
    run(folder, recipe, *plain, *overrides, device=device)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
