"""Only a head of one linear layer is a classifier in torchvision's and timm's names."""

from __future__ import annotations

import pytest

from vissl_zero.models.weight_names import to_other_names

TRUNK = ["trunk.stem.0.weight", "trunk.stages.0.0.0.conv1.weight"]


@pytest.mark.parametrize("style", ["torchvision", "timm"])
def test_the_first_layer_of_a_projection_is_no_classifier(style):
    found = to_other_names([*TRUNK, "heads.0.clf.0.weight", "heads.0.clf.0.bias"], style)
    assert {"fc.weight", "fc.bias"} <= found.names.keys() and found.unknown == []
    projection = [f"heads.0.clf.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    found = to_other_names([*TRUNK, *projection], style)
    assert sorted(found.names) == ["conv1.weight", "layer1.0.conv1.weight"] and found.unknown == projection
