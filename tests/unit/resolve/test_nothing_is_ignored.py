"""Every key of sharding that is set away from its default changes the plan, is refused, or is said to do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.example_config import CPU_HOST, GPU_HOST, config
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import problems
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.resolve.sharding_plan import IMPLIED, sharding_plan

MODEL, FSDP, ZERO = "MODEL__", "MODEL__FSDP_CONFIG__", "ZERO__"
OPTIMIZER, PARAM = "ZERO__offload_optimizer_config__", "ZERO__offload_param_config__"
NVME = {"device": "nvme", "nvme_path": str(Path(__file__).parent)}
AMP = {f"{MODEL}AMP_PARAMS__USE_AMP": True}
# What surrounds a key may decide what it does.
SURROUNDINGS: list[dict[str, Any]] = [
    {**AMP, f"{FSDP}AMP_TYPE": "O2"},
    {**AMP, f"{FSDP}AUTO_SETUP_FSDP": True},
    {f"{FSDP}compute_dtype": "bfloat16"},
    {"TRAINER__DTYPE": "float64"},
]
KEYS: dict[str, Any] = {
    f"{MODEL}SHARDED_DDP_SETUP__reduce_buffer_size": 100,
    f"{FSDP}AUTO_WRAP_THRESHOLD": 100,
    f"{FSDP}AMP_TYPE": "02",
    f"{FSDP}FORCE_SYNC_CUDA": True,
    f"{FSDP}flatten_parameters": False,
    f"{FSDP}mixed_precision": False,
    f"{FSDP}fp32_reduce_scatter": True,
    f"{FSDP}compute_dtype": "float16",
    f"{FSDP}bucket_cap_mb": 25.0,
    f"{FSDP}clear_autocast_cache": False,
    f"{FSDP}reshard_after_forward": False,
    f"{FSDP}verbose": True,
    f"{ZERO}SHARD_GROUP_SIZE": 2,
    f"{ZERO}dynamic_loss_scale": False,
    f"{ZERO}clip_grad": 1.0,
    f"{ZERO}clip_grad_per": "tensor",
    **{f"{ZERO}{key}": 1.0 for key in ("MEMORY_GB", "HOST_MEMORY_GB", "DISK_GB")},
    f"{ZERO}MACHINE_PROFILE": "h200x8",
    f"{MODEL}ACTIVATION_CHECKPOINTING__EVERY_N_BLOCKS": 2,
    f"{MODEL}GRAD_CLIP__MAX_NORM": 3.0,
    f"{MODEL}SYNC_BN_CONFIG__GROUP_SIZE": 2,
    f"{MODEL}AMP_PARAMS__DTYPE": "float16",
    **{f"{OPTIMIZER}{key}": value for key, value in {**NVME, "pin_memory": False, "fast_init": True}.items()},
    f"{OPTIMIZER}keep_files": True,
    **{f"{PARAM}{key}": value for key, value in {**NVME, "pin_memory": False, "fast_init": 5}.items()},
    f"{PARAM}max_in_cpu": 7.0,
    "TRAINER__COMPILE": True,
    "MODEL__FLOAT8__USE_FLOAT8": True,
    "MODEL__FLOAT8__GATHER": True,
}


def _answer(host: Host, values: dict[str, Any]) -> tuple[ShardingPlan | None, set[str]]:
    """The plan and what is said; no plan where it is refused."""
    cfg = config(DISTRIBUTED__NUM_PROC_PER_NODE=2 if host.num_gpus else 4, **values)
    if found := problems(Decisions(cfg, host)):
        return None, set(map(str, found))
    plan, notes = sharding_plan(Decisions(cfg, host))
    return plan, set(notes)


OF_ALL_RANKS = (f"{ZERO}SHARD_GROUP_SIZE", f"{MODEL}SYNC_BN_CONFIG__GROUP_SIZE")  # 2 are all ranks of 2
OF_FORMATS = ("AMP_TYPE", "mixed_precision", "fp32_reduce_scatter", "compute_dtype", "dynamic_loss_scale", "DTYPE")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "host", "level"),
    [*(("torch", CPU_HOST, level) for level in (0, 1, 3)), *(("fairscale", GPU_HOST, level) for level in (2, 3))],
)
def test_every_key_does_something_or_is_said_to_do_nothing(engine: str, host: Host, level: int) -> None:
    silent = []
    for around in [{}, *SURROUNDINGS]:
        base = {"ZERO__LEVEL": level, "ZERO__ENGINE": engine, **around}
        plan, notes = _answer(host, base)
        for key, value in KEYS.items() if plan else ():
            name = key.rpartition("__")[2]
            if key in around or (around and name not in OF_FORMATS) or (host.num_gpus and key in OF_ALL_RANKS):
                continue
            other, said = _answer(host, {**base, key: value})
            if other == plan and not any(name in note for note in said - notes):
                silent.append((key, sorted(around)))
    assert not silent


@pytest.mark.parametrize("level", [1, 2, 3])
def test_wrapping_by_size_where_parameters_stay_whole(level: int) -> None:
    for host in (CPU_HOST, GPU_HOST):
        _, said = _answer(host, {"ZERO__LEVEL": level, f"{FSDP}AUTO_WRAP_THRESHOLD": 5})
        assert any("where parameters stay whole" in note for note in said) == (level < 3 and host is CPU_HOST)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_level_as_colossalai_writes_it(level: int) -> None:
    plan, notes = _answer(CPU_HOST, {"ZERO__LEVEL": "auto", "ZERO__type": f"ZeroRedundancyOptimizer_Level_{level}"})
    assert plan is not None and plan.level == level and not notes
    assert plan.precision.autocast is None, "a recipe's precision is what it states"


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_weights_are_sent_in_float8_at_level_3_alone_and_others_say_so(level: int) -> None:
    keys = {"MODEL__FLOAT8__USE_FLOAT8": True, "MODEL__FLOAT8__GATHER": True}
    plan, notes = _answer(CPU_HOST, {"ZERO__LEVEL": level, **keys})
    assert plan is not None and plan.float8.gather
    assert any("MODEL.FLOAT8.GATHER" in note and "sends none in float8" in note for note in notes) == (level < 3)


def test_a_block_without_level_whose_parameters_are_offloaded_is_level_3() -> None:
    blocks = {f"{prefix}{key}": value for prefix in (OPTIMIZER, PARAM) for key, value in NVME.items()}
    plan, notes = _answer(CPU_HOST, {"ZERO__LEVEL": "auto", **blocks})
    assert plan is not None and plan.level == 3
    assert IMPLIED.format(key="config.ZERO.LEVEL") in notes


SWITCHES = [
    # in vain, where the same key does something, what is said
    (
        {f"{FSDP}mixed_precision": False, f"{FSDP}AUTO_SETUP_FSDP": True, "ZERO__LEVEL": "auto"},
        {f"{FSDP}mixed_precision": False, f"{FSDP}compute_dtype": "bfloat16", "ZERO__LEVEL": 3},
        "mixed_precision=False has no effect: AUTO_SETUP_FSDP derives it from AMP.",
    ),
    (
        {f"{FSDP}mixed_precision": False, "ZERO__LEVEL": 2},
        {f"{FSDP}mixed_precision": False, f"{FSDP}compute_dtype": "bfloat16", "ZERO__LEVEL": 3},
        "mixed_precision=False has no effect below level 3.",
    ),
    (
        {f"{FSDP}mixed_precision": False, "ZERO__LEVEL": 3},
        {f"{FSDP}mixed_precision": False, f"{FSDP}compute_dtype": "bfloat16", "ZERO__LEVEL": 3},
        "mixed_precision=False has no effect: compute_dtype is not in half precision.",
    ),
    (
        {f"{MODEL}AMP_PARAMS__DTYPE": "float16"},
        {f"{MODEL}AMP_PARAMS__DTYPE": "float16", **AMP},
        "config.MODEL.AMP_PARAMS.DTYPE has no effect: USE_AMP is off.",
    ),
    (
        {f"{ZERO}clip_grad_per": "tensor"},
        {f"{ZERO}clip_grad_per": "tensor", f"{ZERO}clip_grad": 1.0},
        "config.ZERO.clip_grad_per has no effect: config.ZERO.clip_grad is not given.",
    ),
    (
        {f"{ZERO}MEMORY_GB": 1.0},
        {f"{ZERO}MEMORY_GB": 1.0, "DRY_RUN": True},
        "config.ZERO.MEMORY_GB has an effect on dry runs only: config.ZERO.LEVEL is not fit.",
    ),
    (
        {f"{FSDP}AUTO_WRAP_THRESHOLD": 5, "ZERO__LEVEL": 0},
        {f"{FSDP}AUTO_WRAP_THRESHOLD": 5, "ZERO__LEVEL": 3},
        "config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD has no effect at level 0.",
    ),
]


@pytest.mark.parametrize(("in_vain", "in_effect", "note"), SWITCHES)
def test_a_switch_says_when_it_does_nothing(in_vain: dict[str, Any], in_effect: dict[str, Any], note: str) -> None:
    for values, is_noted in ((in_vain, True), (in_effect, False)):
        plan, notes = _answer(CPU_HOST, values)
        assert plan is not None and any(note in text for text in notes) == is_noted, notes
