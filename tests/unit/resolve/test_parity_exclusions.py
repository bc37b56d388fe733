"""What the parity matrix leaves out, a user cannot get by accident: it is refused, or said to have no effect."""

from __future__ import annotations

import pytest

from tests.dist import cells
from tests.unit.config.example_config import CPU_HOST, complaints, config
from vissl_zero.resolve.placement_plan import placement
from vissl_zero.resolve.sharding_plan import sharding_plan

_FOUR = {"DISTRIBUTED__NUM_PROC_PER_NODE": 4}
TOLD = {
    cells.FAIRSCALE_SHARDS: [({"ZERO__LEVEL": 0, "ZERO__ENGINE": "fairscale"}, "fairscale has no level 0")],
    cells.FAIRSCALE_HAS_NONE: [
        (
            {"ZERO__LEVEL": 2, "ZERO__ENGINE": "fairscale", "ZERO__offload_optimizer_config__device": "cpu"},
            "must be torch or auto where state is offloaded",
        ),
        (
            {"ZERO__LEVEL": 2, "ZERO__ENGINE": "fairscale", "ZERO__SHARD_GROUP_SIZE": 2, **_FOUR},
            "SHARD_GROUP_SIZE: must be -1 on fairscale",
        ),
    ],
    cells.NOTHING_TO_SHARD: [
        (
            {"ZERO__LEVEL": 0, "ZERO__offload_optimizer_config__device": "cpu"},
            "offload_optimizer_config.device: needs ZeRO level 1, 2 or 3",
        ),
        ({"ZERO__LEVEL": 0, "ZERO__SHARD_GROUP_SIZE": 2, **_FOUR}, "SHARD_GROUP_SIZE has no effect at level 0"),
    ],
    cells.PARAMETERS_STAY: [
        ({"ZERO__LEVEL": level, "ZERO__offload_param_config__device": "cpu"}, "device: needs ZeRO level 3")
        for level in (1, 2)
    ],
    cells.NOT_A_GROUP: [
        ({"ZERO__SHARD_GROUP_SIZE": 2, "DISTRIBUTED__NUM_PROC_PER_NODE": number}, f"divide the {number} processes")
        for number in (1, 3)
    ],
}


def test_every_reason_is_told():
    assert {cell.excluded for cell in cells.CELLS} - {None} == TOLD.keys()


@pytest.mark.parametrize("reason", TOLD)
def test_an_excluded_combination_is_refused_or_said(reason):
    for values, text in TOLD[reason]:
        cfg = config(**values)
        said = complaints(**values) or sharding_plan(cfg, placement(cfg, CPU_HOST))[1]
        assert any(text in sentence for sentence in said), (values, said)
