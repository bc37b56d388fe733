"""docs/fsdp_keys.md has a row for every key, and every test it names is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.unit.config.example_config import CPU_HOST, config
from vissl_zero.config.blocks.sharding import FsdpConfig, ShardedDdpSetup
from vissl_zero.resolve.placement_plan import placement
from vissl_zero.resolve.sharding_plan import sharding_plan

ROOT = Path(__file__).parents[3]
ROWS = [
    line.split("|")
    for line in (ROOT / "docs/fsdp_keys.md").read_text().splitlines()
    if "_SETUP." in line or "_CONFIG." in line
]


def test_every_key_has_a_row():
    keys = {match for row in ROWS for match in re.findall(r"`((?:FSDP_CONFIG|SHARDED_DDP_SETUP)\.\w+)`", row[1])}
    assert keys == {
        *(f"FSDP_CONFIG.{field.name}" for field in fields(FsdpConfig)),
        *(f"SHARDED_DDP_SETUP.{field.name}" for field in fields(ShardedDdpSetup)),
    }


def test_every_row_has_tests_that_exist():
    written = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        written |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    for row in ROWS:
        named = re.findall(r"`(test_\w+)`", row[4])
        assert named and set(named) <= written, row


@pytest.mark.parametrize("engine", ["torch", "fairscale"])
@pytest.mark.parametrize(
    ("path", "level"),
    [("MODEL__SHARDED_DDP_SETUP__USE_SDP", 2), ("MODEL__FSDP_CONFIG__AUTO_SETUP_FSDP", 3)],
)
def test_both_switches_are_levels(engine, path, level):
    cfg = config(ZERO__LEVEL="auto", ZERO__ENGINE=engine, **{path: True})
    plan, _ = sharding_plan(cfg, placement(cfg, CPU_HOST))
    assert (plan.level, plan.engine) == (level, engine)
