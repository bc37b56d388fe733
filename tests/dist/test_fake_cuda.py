"""Whole steps on a CUDA device that is not there: no CPU tensor meets a CUDA one, and the host waits for nothing.

What these cannot see: values, kernels, the order of streams, nccl itself, NVMe (files need real memory).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_cuda.device import compiled

RECIPES = Path("configs/config/digits")
NO_METHOD = {"base", "views", "patches"}
METHODS = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem not in NO_METHOD)
PRECISIONS = {
    "float32": [],
    "bfloat16": ["config.MODEL.AMP_PARAMS.USE_AMP=true", "config.MODEL.AMP_PARAMS.DTYPE=bfloat16"],
    "float16": ["config.MODEL.AMP_PARAMS.USE_AMP=true", "config.MODEL.AMP_PARAMS.DTYPE=float16"],
}
TIERS = {
    "none": [],
    "cpu": ["config.ZERO.offload_param_config.device=cpu"],
    "optimizer": ["config.ZERO.offload_optimizer_config={device: cpu, pin_memory: false}"],  # that is real memory
}
Cell = dict[str, Any]


def cell(
    method: str,
    level: int,
    precision: str = "float32",
    tier: str = "none",
    broken: str = "",
    more: Sequence[str] = (),
) -> Cell:
    overrides = [f"config.ZERO.LEVEL={level}", *PRECISIONS[precision], *TIERS[tier], *more]
    return {"recipe": f"digits/{method}", "overrides": overrides, "broken": broken, "precision": precision}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has a CUDA device of its own, which cannot be replaced")
    try:
        return compiled(tmp_path_factory.mktemp("fake_cuda"))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C++ compiler: {error}")


def trained(library: Path, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What each cell has found, in one process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.cells"],
        env=os.environ | {"LD_PRELOAD": str(library)},
        input=json.dumps(list(cells)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(cells), done.stderr[-3000:]
    return found


def require_no_waiting(cells: Sequence[Cell], found: Sequence[dict[str, Any]]) -> None:
    """A step reads the device under a loss scale alone: whether it overflowed decides what to do.

    Where parameters rest on the host, so do gradients and the flag, and nothing is read.
    """

    def expected(one: Cell) -> list[str]:
        is_on_host = any("config.ZERO.offload_" in override for override in one["overrides"])
        return ["item"] * (one["precision"] == "float16" and not is_on_host)

    wrong = [
        (one["recipe"], one["overrides"], result)
        for one, result in zip(cells, found, strict=False)
        if "error" in result or result["reads"] != expected(one)
    ]
    assert not wrong, "\n".join(map(str, wrong))


ON_DEVICE = ["config.DATA.BACKEND=fast", "config.DATA.AUGMENT_ON=device"]
FAST = [
    cell("simclr", 0),
    cell("simclr", 0, more=ON_DEVICE),
    cell("swav", 1, "bfloat16"),
    cell("dino", 2, "float16"),
    cell("dino", 3, "bfloat16", "cpu"),
    cell("dino", 3, "float16", "optimizer"),
]
MISTAKES = [cell("simclr", 0, broken=how) for how in ("read", "tensor", "upload")]


def test_steps_do_not_wait_for_the_device_and_mistakes_are_found(library):
    found = trained(library, [*FAST, *MISTAKES])
    require_no_waiting(FAST, found)
    right, on_device, (read, mixed, upload) = found[0], found[1], found[len(FAST) :]
    assert on_device["uploads"] == right["uploads"]
    assert read["reads"] == ["item"]
    assert "FakeTensorDeviceMismatchError" in mixed["error"]
    assert upload["uploads"] == right["uploads"] + 1


@pytest.mark.parametrize(
    ("level", "part"),
    # Each method at one of the levels in the slow tests, at the other in the soak.
    [
        pytest.param(level, part, marks=pytest.mark.slow if part % 2 == level % 2 else pytest.mark.soak)
        for level, part in product((0, 3), range(4))
    ],
)
def test_every_method(level, part, library):
    cells = [cell(method, level, "bfloat16") for method in METHODS[part::4]]
    require_no_waiting(cells, trained(library, cells))


@pytest.mark.parametrize(
    "tier", [pytest.param(tier, marks=pytest.mark.soak if tier == "optimizer" else pytest.mark.slow) for tier in TIERS]
)
def test_levels_and_precisions(tier, library):
    levels = {"none": [0, 1, 2, 3], "cpu": [3], "optimizer": [1, 2, 3]}[tier]
    cells = [cell("dino", level, precision, tier) for level in levels for precision in PRECISIONS]
    require_no_waiting(cells, trained(library, cells))


CROPS = "{name: ImgPilToMultiCrop, total_num_crops: 4, num_crops: [2, 2], size_crops: [16, 8]"
TWO_SIZES = [f"config.DATA.TRAIN.TRANSFORMS=[{CROPS}, crop_scales: [[0.4, 1], [0.1, 0.4]]}},{{name: ToTensor}}]"]


@pytest.mark.slow
def test_packed_crops_of_two_sizes(library):
    """They ask the device for nothing, and send what a pass per size sends."""
    packing = "config.MODEL.PACK_CROPS=true"
    cells = [cell("ibot", level, "bfloat16", more=[*TWO_SIZES, *more]) for level in (0, 3) for more in ([], [packing])]
    found = trained(library, cells)
    require_no_waiting(cells, found)
    assert [found[at]["messages"] for at in (1, 3)] == [found[at]["messages"] for at in (0, 2)]
    assert [found[at]["uploads"] for at in (1, 3)] == [found[at]["uploads"] for at in (0, 2)]
