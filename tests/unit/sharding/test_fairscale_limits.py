"""What the fairscale engine refuses, and what it says to use instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan

DOUBLE = Precision("float64", None, "float64", "float64")
HALF = Precision("float32", None, "bfloat16", "float32")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ALTERNATIVE = "Write config.ZERO.ENGINE=torch"


def _refusal(device: torch.device, **settings: Any) -> str:
    model = nn.Linear(3, 2)
    group = ParamGroup("all", ("weight", "bias"), False, False, 0.0)
    build_optimizer = lambda groups: (torch.optim.SGD(groups), None)  # noqa: E731
    with pytest.raises(ConfigError) as error:
        STRATEGIES.get("fairscale").build().shard(model, [group], build_optimizer, ShardingPlan(**settings), device)
    return str(error.value)


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        (CPU, {"level": 0}, "config.ZERO.LEVEL: must be 1, 2 or 3 on the fairscale engine"),
        (CPU, {"level": 3}, "config.ZERO.ENGINE: fairscale shards parameters (level 3) on CUDA only"),
        (CUDA, {"level": 3, "precision": DOUBLE}, "config.TRAINER.DTYPE: must be float32 at level 3"),
        (
            CPU,
            {"level": 2, "precision": HALF},
            "config.MODEL.FSDP_CONFIG.compute_dtype: must be float32 at levels 1 and 2",
        ),
        (CPU, {"level": 1, "shard_group_size": 2}, "config.ZERO.SHARD_GROUP_SIZE: must be -1 on the fairscale engine"),
        (
            CPU,
            {"level": 1, "offload_optimizer": OffloadPlan(device="nvme", nvme_path="/")},
            "config.ZERO.offload_optimizer_config.device: must be none on the fairscale engine",
        ),
        (
            CUDA,
            {"level": 3, "offload_params": OffloadPlan(device="cpu")},
            "config.ZERO.offload_param_config.device: must be none on the fairscale engine",
        ),
    ],
)
def test_refusals_name_the_key_and_an_alternative(device: torch.device, settings: dict, message: str) -> None:
    refusal = _refusal(device, **settings)
    assert message in refusal
    assert ALTERNATIVE in refusal


def test_all_problems_are_reported_at_once() -> None:
    refusal = _refusal(CPU, level=3, precision=DOUBLE, shard_group_size=2)
    assert refusal.count(ALTERNATIVE) == 3
