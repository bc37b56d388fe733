"""Which allocator settings a CPU rank is started with."""

from __future__ import annotations

import pytest

from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.allocator import allocator_advice, allocator_environment


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
