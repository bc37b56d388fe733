"""The memory bound of training from NVMe, where more than the bound is killed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offload_memory.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_takes_three_units_and_the_buffers_where_the_plain_run_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    bound = runpy.run_path(str(SCRIPT))["bound"]
    found = bound(str(tmp_path), width=1024, num_blocks=36, num_steps=2)
    if "cgroup" not in found["kind"]:
        pytest.skip("no memory cgroup can be made here")
    assert found["allowed"] == 3 * found["unit"] + found["buffers"]
    assert found["state"] >= 5 * found["allowed"]
    assert found["offloaded"] is not None, "killed"
    assert found["plain"] is None, "the limit is no limit"
