"""First weights of heads that draw them in ways of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vissl_zero.models.init import initialize_
from vissl_zero.registry import HEADS

CLASSIFIER = {"in_channels": 400, "mid_channels": 300, "num_classes": 200}
TRANSFORMERS = {"in_plane": 400, "num_classes": 200, "hidden_dim": 300}


@pytest.mark.parametrize(
    ("name", "keys", "deviations"),
    [
        ("mobilenet_v3_head", CLASSIFIER, [0.01, 0.01]),
        ("vision_transformer_head", TRANSFORMERS, [400**-0.5, 0.02]),
        ("vision_transformer_head", TRANSFORMERS | {"hidden_dim": None}, [0.02]),
    ],
)
def test_weights_are_normal_and_biases_zero(name: str, keys: dict[str, Any], deviations: list[float]) -> None:
    head = HEADS.get(name).build(**keys)
    for param in head.parameters():
        nn.init.constant_(param, 7.0)
    initialize_(nn.ModuleDict({"head": head}), 0)
    layers = [module for module in head.modules() if isinstance(module, nn.Linear)]
    assert [float(layer.weight.detach().std()) for layer in layers] == pytest.approx(deviations, rel=0.02)
    assert not any(layer.bias.any() for layer in layers)
    assert head(torch.ones(2, 400)).shape == (2, 200)
