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


@pytest.mark.parametrize(
    ("trunk", "timm", "torchvision"),
    [
        (["trunk.blocks.0.unit.norm1.weight", "trunk.embedding.unit.cls_token"], "head", "heads.head"),
        (["trunk.net.blocks.0.norm1.weight", "trunk.net.patch_embed.proj.weight"], "head", None),
        (["trunk.net.conv1.weight", "trunk.net.layer1.0.conv1.weight"], "fc", None),
        (["trunk.net.stages.0.blocks.0.gamma"], None, None),  # ConvNeXt's, MaxViT's: their names differ
        (["trunk.stem.0.weight", "trunk.stages.0.0.0.f.c.weight"], "head.fc", "fc"),
    ],
)
def test_a_classifier_has_the_librarys_name_or_none(trunk: list[str], timm: str | None, torchvision: str | None):
    for style, name in (("timm", timm), ("torchvision", torchvision)):
        found = to_other_names([*trunk, "heads.0.clf.0.weight"], style)
        theirs = [new for new, old in found.names.items() if old == "heads.0.clf.0.weight"]
        if style == "timm" or name:
            assert theirs == ([f"{name}.weight"] if name else [])
