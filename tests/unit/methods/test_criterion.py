"""A loss of the user's own needs forward and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.methods.batches import LossBatch
from vissl_zero.errors import RegistryError
from vissl_zero.methods.method import Batch, Method, build_method
from vissl_zero.registry import LOSSES


@dataclass
class _Config:
    scale: float = 1.0


@pytest.fixture
def own_loss() -> Iterator[None]:
    @LOSSES.register("own_loss", config=_Config)
    class OwnLoss(Method):
        def __init__(self, scale: float = 1.0):
            super().__init__()
            self.scale = scale

        def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
            return self.scale * outputs[0].square().mean()

    yield
    del LOSSES._components["own_loss"]


def test_everything_but_forward_has_a_default(own_loss: None) -> None:
    criterion = build_method({"name": "own_loss", "own_loss": {"scale": 3.0}})
    outputs, batch = [torch.full((4, 1), 2.0)], LossBatch([1], torch.arange(4), 4)
    criterion.on_step(0, 0)
    assert criterion.probe() is None
    assert criterion(outputs, batch) == 12.0
    criterion.update_state([criterion.observe(outputs, batch)])
    assert (
        criterion.health(criterion.health_sums().double()) == {}
        and criterion.normalized_rows() == []
        and criterion.state_dict() == {}
    )


def test_a_loss_without_keys_needs_no_block(own_loss: None) -> None:
    assert build_method({"name": "own_loss"})([torch.ones(2)], LossBatch([1], torch.arange(2), 2)) == 1.0


def test_mistakes_are_named() -> None:
    with pytest.raises(RegistryError, match=r"config.LOSS.name: must be a known loss .*Did you mean 'swav_loss'"):
        build_method({"name": "swav_los"})
    with pytest.raises(NotImplementedError, match="Method must define forward"):
        Method()([], LossBatch([1], torch.arange(2), 2))
