"""The answer to "out of memory" asks the memory model what would help, for the run at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vissl_zero.config.compose import compose
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.reporting.out_of_memory import explain, other_numbers, requested_bytes, same_numbers
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.memory import Bytes, is_out_of_memory

MIB = 2**20
CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB"
RECIPE = "digits/supervised"
# 17 M parameters: what ranks exchange through is small beside them.
LARGE = "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 4096, 4096]}], [mlp, {dims: [4096, 10]}]]"
CHECKPOINTS = "config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING"
HELD = Bytes(params=100 * MIB, grads=100 * MIB, optimizer=200 * MIB, activations=10 * MIB)


def planned(*overrides: str) -> ResolvedRun:
    return resolve(compose(RECIPE, overrides).run, "/nowhere", recipe=RECIPE, host=Host(num_cores=1))


def failed(num_bytes: int) -> RuntimeError:
    return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {num_bytes} bytes.")


def first_override(text: str) -> str:
    lines = text.splitlines()
    return lines[lines.index("The cheapest switch that would help:") + 1].split("  saves")[0].strip()


def test_a_failed_allocation_of_the_cpu_is_recognized() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert requested_bytes(raised.value) == 2**58


def test_other_failed_allocations_are_recognized() -> None:
    cuda = torch.OutOfMemoryError(CUDA_MESSAGE)
    assert is_out_of_memory(cuda) and requested_bytes(cuda) == 3 * 2**29
    assert is_out_of_memory(MemoryError()) and requested_bytes(MemoryError()) is None
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid for input of size 3"))


def test_optimizer_state_at_level_0_is_answered_with_a_level_that_shards_it() -> None:
    plan = planned(LARGE, "config.ZERO.LEVEL=0")
    answer = str(explain(failed(40 * MIB), plan, HELD))
    assert first_override(answer) in {f"config.ZERO.LEVEL={level}" for level in (1, 2, 3)}
    assert "an allocation of 40.0 MiB failed" in answer


def test_what_a_switch_saves_is_the_difference_of_two_forecasts() -> None:
    plan = planned(LARGE, "config.ZERO.LEVEL=0")
    before = dry_run(plan).forecast.step
    found = {switch.override: switch.saved for switch in same_numbers(plan)}
    after = dry_run(planned(LARGE, "config.ZERO.LEVEL=1")).forecast.step
    assert before is not None and after is not None
    assert found["config.ZERO.LEVEL=1"] == before.peak_bytes - after.peak_bytes > 0
    assert all(saved > 0 for saved in found.values())


def test_activations_are_answered_with_recomputing() -> None:
    plan = planned("config.ZERO.LEVEL=0", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=256")
    answer = str(explain(failed(2 * MIB), plan, Bytes(params=MIB, activations=9 * MIB)))
    assert first_override(answer) == f"{CHECKPOINTS}=True"
    assert "same numbers, about 1." in answer


def test_what_is_on_already_is_not_advised() -> None:
    offered = [switch.override for switch in same_numbers(planned("config.ZERO.LEVEL=0", f"{CHECKPOINTS}=true"))]
    assert not any("USE_ACTIVATION_CHECKPOINTING=True" in override for override in offered)


def test_one_process_gains_nothing_from_a_level() -> None:
    plan = planned("config.DISTRIBUTED.NUM_PROC_PER_NODE=1", "config.ZERO.LEVEL=0")
    offered = [switch.override for switch in same_numbers(plan)]
    assert offered == [f"{CHECKPOINTS}=True"]


def test_float64_is_answered_with_float32_not_with_bfloat16() -> None:
    offered = {switch.override: switch.saved for switch in other_numbers(planned("config.TRAINER.DTYPE=float64"))}
    assert offered["config.TRAINER.DTYPE=float32"] > 0
    assert not any("AMP" in override for override in offered)


def test_an_odd_batch_says_what_the_global_batch_becomes() -> None:
    odd = replace(planned(), batch_per_rank=5)
    (smaller,) = [switch for switch in other_numbers(odd) if "BATCHSIZE" in switch.override]
    assert "BATCHSIZE_PER_REPLICA=2" in smaller.override and "a global batch of 8," in smaller.price


def test_where_no_switch_is_enough_some_are_listed_by_what_they_save() -> None:
    answer = str(explain(torch.OutOfMemoryError(CUDA_MESSAGE), planned("config.ZERO.LEVEL=0"), HELD))
    _, title, *listed = answer.splitlines()
    assert "No single switch frees enough" in title and 1 < len(listed) <= 3


def test_a_forecast_that_fails_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plan: ResolvedRun) -> None:
        raise MemoryError

    monkeypatch.setattr("vissl_zero.reporting.out_of_memory.set_stage", fail)
    answer = str(explain(failed(MIB), planned(), HELD))
    assert "an allocation of 1.00 MiB failed" in answer and "could not be found here (MemoryError)" in answer


def test_before_the_model_is_built() -> None:
    answer = str(explain(MemoryError(), planned(), None))
    assert "while the model was being built" in answer and "config.DISTRIBUTED.NUM_PROC_PER_NODE" in answer
