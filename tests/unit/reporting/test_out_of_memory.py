from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.reporting.example_run import make_plan
from vissl_zero.config.resolved import OptimizerPlan, Precision, ResolvedRun, ShardingPlan
from vissl_zero.reporting.out_of_memory import (
    explain,
    is_out_of_memory,
    requested_bytes,
    state_bytes,
    switches,
    whole_state,
)
from vissl_zero.sharding.strategy import Bytes

MIB = 2**20
CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB"


def plan(level: int, ranks: int = 4, optimizer: str = "adamw", **sharding: Any) -> ResolvedRun:
    sharding_plan = ShardingPlan(level=level, shard_group_size=ranks, **sharding)
    return make_plan(Path("run"), sharding=sharding_plan, optimizer=OptimizerPlan(optimizer), world_size=ranks)


def at_level(level: int, ranks: int = 4, activations: int = 0) -> Bytes:
    """What a rank of an AdamW run of 100 MiB of float32 parameters holds."""

    def share(num_bytes: int, first: int) -> int:
        return num_bytes // ranks if level >= first else num_bytes

    return Bytes(share(100 * MIB, 3), share(100 * MIB, 2), share(200 * MIB, 1), activations)


def first_override(text: str) -> str:
    lines = text.splitlines()
    return lines[lines.index("The cheapest switch that would help:") + 1].split("  saves")[0].strip()


def test_a_failed_allocation_of_the_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert requested_bytes(raised.value) == 2**58


def test_other_failed_allocations_are_recognised() -> None:
    cuda = torch.OutOfMemoryError(CUDA_MESSAGE)
    assert is_out_of_memory(cuda) and requested_bytes(cuda) == 3 * 2**29
    assert is_out_of_memory(MemoryError()) and requested_bytes(MemoryError()) is None
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid for input of size 3"))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_whole_state_is_the_same_seen_from_every_level(level: int) -> None:
    whole = whole_state(at_level(level), plan(level))
    assert whole == Bytes(100 * MIB, 100 * MIB, 200 * MIB)
    held = at_level(level)
    assert state_bytes(whole, level, 4) == held.params + held.grads + held.optimizer


def test_state_that_is_still_to_come_is_counted() -> None:
    before_the_first_step = Bytes(params=100 * MIB)
    assert whole_state(before_the_first_step, plan(0)).optimizer == 200 * MIB
    assert whole_state(before_the_first_step, plan(0, optimizer="sgd")).optimizer == 0


def test_optimizer_state_at_level_0_is_answered_with_level_1() -> None:
    answer = str(explain(MemoryError(), plan(0), at_level(0, activations=10 * MIB)))
    assert first_override(answer) == "config.ZERO.LEVEL=1"
    assert "saves about 150 MiB per rank" in answer  # 3/4 of 200 MiB
    assert "this rank held 410 MiB (parameters 100 MiB, gradients 100 MiB, optimizer state 200 MiB" in answer


def test_a_larger_allocation_needs_a_higher_level() -> None:
    error = RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 262144000 bytes."
    )  # 250 MiB
    answer = str(explain(error, plan(0), at_level(0, activations=10 * MIB)))
    assert first_override(answer) == "config.ZERO.LEVEL=3"  # 225 MiB at level 2, 300 MiB at level 3
    assert "an allocation of 250 MiB failed" in answer


def test_parameters_at_level_2_are_answered_with_level_3() -> None:
    assert first_override(str(explain(MemoryError(), plan(2), at_level(2)))) == "config.ZERO.LEVEL=3"


def test_activations_are_answered_with_recomputing() -> None:
    answer = str(explain(MemoryError(), plan(3), at_level(3, activations=800 * MIB)))
    expected = "config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING=True"
    assert first_override(answer) == expected
    assert "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8 config.ZERO.gradient_accumulation_steps=2" in answer
    assert "the same global batch" in answer


def test_what_is_on_already_is_not_advised() -> None:
    full = plan(3, checkpoint_every=1, precision=Precision(autocast="bfloat16"))
    offered = [switch.override for switch in switches(full, at_level(3, activations=800 * MIB))]
    assert offered == ["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8 config.ZERO.gradient_accumulation_steps=2"]


def test_one_process_gains_nothing_from_a_level() -> None:
    offered = [switch.override for switch in switches(plan(0, ranks=1), at_level(0, ranks=1))]
    assert not any("LEVEL" in override for override in offered)


def test_float64_is_answered_with_float32_not_with_bfloat16() -> None:
    offered = [s.override for s in switches(plan(3, precision=Precision("float64", None, "float64")), at_level(3))]
    assert "config.TRAINER.DTYPE=float32" in offered
    assert not any("AMP" in override for override in offered)


def test_an_odd_batch_says_what_the_global_batch_becomes() -> None:
    odd = replace(plan(3, ranks=2), batch_per_rank=5)
    (smaller,) = [switch for switch in switches(odd, at_level(3, activations=MIB)) if "BATCHSIZE" in switch.override]
    assert "BATCHSIZE_PER_REPLICA=2" in smaller.override and "a global batch of 8," in smaller.price


def test_where_no_switch_is_enough_all_are_listed_by_what_they_save() -> None:
    error = torch.OutOfMemoryError(CUDA_MESSAGE)
    answer = str(explain(error, plan(2), at_level(2, activations=100 * MIB)))
    assert "No single switch frees enough" in answer
    assert answer.index("LEVEL=3") < answer.index("USE_ACTIVATION_CHECKPOINTING") < answer.index("USE_AMP=True")


def test_before_the_model_is_built() -> None:
    answer = str(explain(MemoryError(), plan(0), None))
    assert "while the model was being built" in answer and "config.DISTRIBUTED.NUM_PROC_PER_NODE" in answer
