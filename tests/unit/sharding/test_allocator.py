"""Which allocator settings a rank is started with."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.launch import launcher
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.allocator import allocator_advice, allocator_environment, gpu_allocator_environment


def test_a_rank_gets_them_unless_the_user_has_chosen() -> None:
    given = allocator_environment(ShardingPlan(level=3), {"PATH": "/bin"})
    assert set(given) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    assert allocator_environment(ShardingPlan(level=3), given) == {}
    assert allocator_environment(ShardingPlan(level=0), {}).keys() == given.keys()


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_a_choice_of_the_users_is_left_alone(name: str) -> None:
    assert allocator_environment(ShardingPlan(level=3), {name: "1"}) == {}
    assert allocator_advice(ShardingPlan(level=3), {name: "1"}) == ""


def test_a_rank_of_another_launcher_says_what_to_set() -> None:
    assert "MALLOC_MMAP_THRESHOLD_=4194304" in allocator_advice(ShardingPlan(level=1), {})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_level_3_on_a_gpu_gets_segments_that_grow_unless_the_user_has_chosen(name: str) -> None:
    assert gpu_allocator_environment(ShardingPlan(level=2), {}) == {}
    given = gpu_allocator_environment(ShardingPlan(level=3), {"PATH": "/bin"})
    assert given == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert gpu_allocator_environment(ShardingPlan(level=3), {name: "max_split_size_mb:64"}) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_inherit_the_settings_of_their_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    plan = dataclasses.replace(make_plan(make_config(), "/nowhere"), device=device)
    plan = dataclasses.replace(plan, sharding=ShardingPlan(level=3))
    environment = launcher._environment(plan, None, began=0.0)
    assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == (device == "cuda")
    assert ("MALLOC_MMAP_THRESHOLD_" in environment) == (device == "cpu")
