"""Every key of FSDP_CONFIG that torch reads does what docs/fsdp_keys.md says; the others are said to do nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.dist.training import Case, loss_of, micro_batches, shard
from tests.ranks import log_messages, run_on_ranks
from tests.unit.config.example_config import CPU_HOST, config
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.resolved import Precision
from vissl_zero.resolve.sharding_plan import sharding_plan

CASE = Case(dtype="float32", lr=0.01)
FSDP = "MODEL__FSDP_CONFIG__"
NO_EFFECT = {
    "MODEL__SHARDED_DDP_SETUP__reduce_buffer_size": 100,
    f"{FSDP}flatten_parameters": False,
    f"{FSDP}bucket_cap_mb": 25.0,
    f"{FSDP}clear_autocast_cache": False,
    f"{FSDP}FORCE_SYNC_CUDA": True,
    f"{FSDP}reshard_after_forward": False,
}


def _observe(level: int, changes: dict[str, Any]) -> dict[str, Any]:
    """One backward pass, seen from outside."""
    with log_messages(level=logging.INFO) as messages:
        sharded = shard(CASE, level, **changes)
    seen: dict[str, Any] = {"dtypes": set(), "messages": messages}
    units = [module for module in sharded.model.modules() if isinstance(module, FSDPModule)]
    convolution = next(module for module in sharded.model.modules() if isinstance(module, torch.nn.Conv2d))
    convolution.register_forward_pre_hook(lambda module, x: seen["dtypes"].add((x[0].dtype, module.weight.dtype)))
    norms = [module for module in sharded.model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    images = [crops[:, dist.get_rank() :: 2].flatten(0, 1) for crops in next(micro_batches(CASE, 0))]
    loss = loss_of(sharded.model(images), len(images[1]))
    sharded.backward(loss)
    return seen | {
        "loss": float(loss),
        "units": len(units),
        "reduce": {unit._get_fsdp_state()._mp_policy.reduce_dtype for unit in units},
        "norms": {(type(norm.weight.data).__name__, norm.weight.dtype) for norm in norms},
        "stored": {tensor.dtype for _, tensor in sharded.named_parameters()},
    }


def _seen(level: int = 3, **changes: Any) -> dict[str, Any]:
    return run_on_ranks(2, _observe, level, changes)[0]


@pytest.mark.timeout(60)
def test_wrap_threshold_and_verbose_on_torch() -> None:
    default, seen = _seen(), _seen(wrap_threshold=300, verbose=True)
    assert default["messages"] == []
    assert seen["units"] == default["units"] + 3  # the filters of all blocks but the stem
    (message,) = seen["messages"]
    assert "ZeRO level 3 over 2 ranks" in message and "trunk.blocks.1.0" in message
    assert seen["loss"] == pytest.approx(default["loss"], abs=1e-6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("reduce", ["float32", "half"])
def test_compute_dtype_and_fp32_reduce_scatter_on_torch(compute: str, reduce: str) -> None:
    half = getattr(torch, compute)
    seen = _seen(precision=Precision("float32", None, compute, compute if reduce == "half" else "float32", False))
    assert seen["dtypes"] == {(half, half)}
    assert seen["stored"] == {torch.float32}
    assert seen["norms"] == {("Tensor", torch.float32)}  # whole on every rank, in no unit
    assert seen["reduce"] == {half if reduce == "half" else torch.float32}


@pytest.mark.parametrize("path", NO_EFFECT)
def test_what_only_fairscale_reads_is_said_once_on_torch(path: str) -> None:
    cfg = config(ZERO__LEVEL=3, **{path: NO_EFFECT[path]})
    notes = sharding_plan(Decisions(cfg, CPU_HOST))[1]
    assert notes == (f"config.{path.replace('__', '.')} has no effect on the torch engine.",)


def test_resharding_off_at_level_3_is_level_2() -> None:
    """What ``reshard_after_forward: false`` would do is a level of its own."""
    levels = [run_on_ranks(2, _whole_after_forward, level)[0] for level in (2, 3)]
    assert levels[0] > 0 == levels[1]


def _whole_after_forward(level: int) -> int:
    """Elements of parameters that are whole after a forward pass."""
    sharded = shard(CASE, level)
    sharded.model([crops[:, dist.get_rank() :: 2].flatten(0, 1) for crops in next(micro_batches(CASE, 0))])
    return sum(param.numel() for param in sharded.model.parameters() if not hasattr(param, "to_local"))
