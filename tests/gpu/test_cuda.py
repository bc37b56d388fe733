"""The same recipe on a GPU: counted as skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vissl_zero.checkpoint.snapshot import HostMemory
from vissl_zero.sharding.state import Part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(280),
]
COMMON = [
    "config=quickstart/swav_digits",
    "config.MACHINE.DEVICE=gpu",
    "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
    "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
    "config.TRAINER.MAX_STEPS=6",
]


def losses(folder: Path, *overrides: str) -> list[float]:
    command = [sys.executable, "-m", "vissl_zero.cli", *COMMON, f"config.CHECKPOINT.DIR={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("gpu") / "run", "config.ZERO.LEVEL=0", "config.TRAINER.DTYPE=float64")


@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_are_equal_in_float64(level, reference, tmp_path):
    found = losses(tmp_path / "run", f"config.ZERO.LEVEL={level}", "config.TRAINER.DTYPE=float64")
    assert found == pytest.approx(reference, abs=1e-10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", [0, 3])
def test_half_precision_trains(dtype, level, reference, tmp_path):
    amp = ["config.MODEL.AMP_PARAMS.USE_AMP=true", f"config.MODEL.AMP_PARAMS.DTYPE={dtype}"]
    found = losses(tmp_path / "run", f"config.ZERO.LEVEL={level}", *amp)
    assert found[0] == pytest.approx(reference[0], rel=0.05)


def test_a_save_copies_what_was_computed_before_it_while_the_next_step_computes():
    large = torch.randn(4096, 4096, device="cuda")
    state = torch.zeros(2**24, device="cuda")
    part = Part("model/a", state.shape, 0, state.numel(), state.dtype, lambda: state)
    memory = HostMemory(torch.device("cuda"))
    with ThreadPoolExecutor(1) as thread:
        for value in (1.0, 2.0):  # the second time into memory that is there
            for _ in range(20):
                large = (large @ large).tanh()
            state.fill_(value)  # queued behind all of that
            memory.begin()
            copy = thread.submit(memory.copy, [part])
            for _ in range(20):
                large = (large @ large).tanh()
            (copied,) = copy.result()  # what the next update waits for
            state.fill_(-1.0)
            assert bool((copied.read() == value).all())
