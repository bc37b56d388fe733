"""One recipe, every level and several world sizes: the same losses and weights to 1e-10, through the front door.

RegNet, multi-crop, synchronized batch norm, LARC, clipping, float64. Each run is the real command line in its own
processes. The global batch is 16 images throughout. The noise floor is the difference between one process and the same
process with another global order of summation: here, one process against two.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import run_command
from tests.small_trunk import SMALL_TRUNK

NUM_STEPS = 8
TOLERANCE = 1e-10
CROPS = (
    "[{name: ImgPilToMultiCrop, total_num_crops: 4, size_crops: [32, 24], num_crops: [2, 2], "
    "crop_scales: [[0.6, 1.0], [0.4, 0.8]]}, {name: ToTensor}]"
)
RECIPE = [
    "config=quickstart/swav_digits",
    *SMALL_TRUNK,
    f"config.DATA.TRAIN.TRANSFORMS={CROPS}",
    "config.TRAINER.DTYPE=float64",
    f"config.TRAINER.MAX_STEPS={NUM_STEPS}",
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.DATA.NUM_DATALOADER_WORKERS=0",
    "config.MODEL.SYNC_BN_CONFIG.CONVERT_BN_TO_SYNC_BN=true",
    "config.OPTIMIZER.name=sgd",
    "config.OPTIMIZER.use_larc=true",
    "config.ZERO.clip_grad=1.0",
]
# name -> (level, processes, images per process)
RUNS = {
    "level 0": (0, 2, 8),
    "level 1": (1, 2, 8),
    "level 2": (2, 2, 8),
    "level 3": (3, 2, 8),
    "level 0, one process": (0, 1, 16),
    "level 3, one process": (3, 1, 16),
    "level 3, four processes": (3, 4, 4),
    "level 1, four processes": (1, 4, 4),
}
# Each is three starts of the program; tests/dist has every level at every number of ranks without them.
SLOW = ("level 0", "level 1", "level 2", "level 3, four processes", "level 1, four processes")


def train(folder: Path, level: int, num_procs: int, batch: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses per step and final weights of one run of the command line."""
    overrides = [
        f"config.ZERO.LEVEL={level}",
        f"config.DISTRIBUTED.NUM_PROC_PER_NODE={num_procs}",
        f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={batch}",
        f"config.CHECKPOINT.DIR={folder}",
    ]
    run_command(*RECIPE, *overrides, timeout_s=240)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    """One process with the whole batch at level 0: plain, unsharded training."""
    return train(tmp_path_factory.mktemp("reference") / "run", *RUNS["level 0, one process"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else [])
        for name in RUNS
        if name != "level 0, one process"
    ],
)
def test_same_losses_and_weights(name, reference, tmp_path):
    losses, weights = train(tmp_path / "run", *RUNS[name])
    expected_losses, expected_weights = reference
    assert len(losses) == len(expected_losses) == NUM_STEPS
    assert len(set(losses)) == NUM_STEPS  # training moves
    loss_gap = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    assert weights.keys() == expected_weights.keys()
    weight_gap = max(float((weights[k].double() - expected_weights[k].double()).abs().max()) for k in weights)
    print(f"{name}: largest difference in losses {loss_gap:.1e}, in weights {weight_gap:.1e}")
    assert loss_gap <= TOLERANCE
    assert weight_gap <= TOLERANCE
