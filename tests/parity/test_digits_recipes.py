"""Every ``digits/<method>`` recipe through the front door: it honors what a script may change and is the same model.

As it stands a recipe has 2 processes at level 3. One process at level 0 that takes as many images in two micro-batches,
with one loss over both, trains the same weights, in float64 to 1e-10. Each micro-batch has batch statistics of its own,
as each of two processes without synchronized batch norm has.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import run_command
from vissl_zero.registry import METHODS

NUM_STEPS = 3
TOLERANCE = 1e-10
COMMON = (
    "config.TRAINER.DTYPE=float64",
    f"config.TRAINER.MAX_STEPS={NUM_STEPS}",
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.MODEL.SYNC_BN_CONFIG.CONVERT_BN_TO_SYNC_BN=false",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
)
ALONE = (
    "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
    "config.ZERO.LEVEL=0",
    "config.ZERO.gradient_accumulation_steps=2",
    "config.TRAINER.EXACT_ACCUMULATION=true",
)


def train(recipe: str, folder: Path, *overrides: str) -> tuple[dict[str, int], list[float], dict[str, torch.Tensor]]:
    """Level and processes, losses, and weights of student and teacher after a run of the command line."""
    run_command(f"config={recipe}", f"config.CHECKPOINT.DIR={folder}", *COMMON, *overrides, timeout_s=240)
    summary = json.loads((folder / "summary.json").read_text())
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = {
        f"{path.stem}:{name}": tensor.double()
        for path in sorted(folder.glob("weights*.safetensors"))
        for name, tensor in load_file(path).items()
        if "running_" not in name and "num_batches" not in name  # micro-batches come in turn, ranks side by side
    }
    return {key: summary[key] for key in ("level", "world_size")}, losses, weights


# A clustering and a teacher in the slow tests; all of them take minutes.
OFTEN = ("swav", "dino")
CASES = [
    pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.soak) for name in METHODS.builtin()
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", CASES)
def test_two_processes_at_level_3_train_what_one_with_two_micro_batches_does(method: str, tmp_path: Path) -> None:
    recipe = METHODS.get(method).build().recipe
    assert recipe == f"digits/{method}"
    layout, losses, weights = train(recipe, tmp_path / "two")
    assert layout == {"level": 3, "world_size": 2}
    layout, losses_alone, weights_alone = train(recipe, tmp_path / "one", *ALONE)
    assert layout == {"level": 0, "world_size": 1}
    assert len(losses) == len(losses_alone) == NUM_STEPS
    assert len(set(losses)) == NUM_STEPS  # training moves
    assert weights.keys() == weights_alone.keys()
    gaps = [abs(one - other) for one, other in zip(losses, losses_alone, strict=True)]
    gaps += [(tensor - weights_alone[name]).abs().max().item() for name, tensor in weights.items()]
    print(f"{recipe}: largest difference {max(gaps):.1e}")
    assert max(gaps) < TOLERANCE
