from __future__ import annotations

from dataclasses import field, make_dataclass

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from vissl_zero.config.copies import Copies
from vissl_zero.config.run_config import new_schema, schema


def test_a_copy_of_classes_made_at_run_time_is_typed_and_shares_nothing() -> None:
    block = make_dataclass("Block", [("size", int, 3)])
    root = make_dataclass("Root", [("block", block, field(default_factory=block))])
    copies = Copies(OmegaConf.structured(root))
    first = copies.new()
    first.block.size = 4
    with pytest.raises(ValidationError):
        first.block.size = "large"
    assert OmegaConf.get_type(first.block) is block
    assert copies.new() == {"block": {"size": 3}}


def test_a_new_schema_is_the_schema() -> None:
    tree = new_schema()
    assert OmegaConf.to_container(tree) == OmegaConf.to_container(schema())
    assert OmegaConf.get_type(tree.config.LOSS.swav_loss) is OmegaConf.get_type(schema().config.LOSS.swav_loss)
    tree.config.SEED_VALUE = 5
    assert schema().config.SEED_VALUE == new_schema().config.SEED_VALUE == 0
