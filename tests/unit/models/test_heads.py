"""Heads one after another, and MobileNet's."""

from __future__ import annotations

import pytest
import torch

from tests.unit.config.example_config import complaints
from vissl_zero.config.compose import compose
from vissl_zero.models.init import initialize_
from vissl_zero.models.mlp_heads import Chain, MobileNetHead, MobileNetHeadOfTimm

PROJECTION = ["mlp", {"dims": [64, 32], "use_relu": True, "skip_last_layer_relu_bn": False}]


@pytest.mark.parametrize("form", ["[{0},{1}]", "[[{0},{1}]]"])
def test_several_heads_of_a_recipe_are_one_after_another(form):
    """VISSL's base_ssl_model.heads_forward, at 09270ed2."""
    first = "[mlp,{dims:[64,32],use_relu:true,skip_last_layer_relu_bn:false}]"
    heads = form.format(first, "[mlp_fsdp,{dims:[32,10]}]")
    (head,) = compose("supervised/digits", [f"config.MODEL.HEAD.PARAMS={heads}"]).run.MODEL.HEAD.PARAMS
    assert head == ["chain", {"heads": [PROJECTION, ["mlp", {"dims": [32, 10]}]], "dims": [64, 10]}]


def test_a_chain_is_its_heads_one_after_another():
    swav = ["swav_head", {"dims": [32, 16], "num_clusters": [], "normalize_feats": False}]
    chain = Chain([["mlp", {"dims": [-1, 32], "use_relu": True, "skip_last_layer_relu_bn": False}], swav,
                   ["mlp", {"dims": [16, -1]}]], dims=[64, 10])  # fmt: skip
    rows = torch.randn(5, 64)
    first, second, third = chain[0].clf[0], chain[1].projection_head[0], chain[2].clf[0]
    wanted = third(second(first(rows).relu()))
    torch.testing.assert_close(chain(rows), wanted)
    assert wanted.shape == (5, 10) and next(iter(chain.state_dict())) == "0.clf.0.weight"


def test_a_head_without_prototypes_only_projects():
    nothing = ["swav_head", {"dims": [64, 16], "num_clusters": []}]
    assert any("at least 1 prototype" in text for text in complaints(MODEL__HEAD__PARAMS=[nothing]))
    chain = ["chain", {"heads": [nothing, ["swav_head", {"dims": [16, 8], "num_clusters": [30]}]], "dims": [64, 8]}]
    assert not any("prototype in each" in text for text in complaints(MODEL__HEAD__PARAMS=[chain]))
    last = ["chain", {"heads": [["mlp", {"dims": [64, 64]}], nothing], "dims": [64, 16]}]
    (said,) = [text for text in complaints(MODEL__HEAD__PARAMS=[last]) if "prototype in each" in text]
    assert said.startswith("config.MODEL.HEAD.PARAMS[0][1].heads[1][1].num_clusters: ")
    assert any(
        "'mpl'" in text for text in complaints(MODEL__HEAD__PARAMS=[["chain", {"heads": [["mpl", {}], nothing]}]])
    )


def test_heads_that_do_not_meet_are_refused():
    heads = [["mlp", {"dims": [64, 32]}], ["mlp", {"dims": [16, 10]}]]
    said = complaints(MODEL__HEAD__PARAMS=[["chain", {"heads": heads, "dims": [64, 10]}]])
    assert any("[64, 32] and then [16, 10]" in text for text in said)


def test_mobilenets_head_of_timm_is_the_other_with_a_convolution():
    """vissl 09270ed mobilenet_v3_head.py: classifier.0 is a convolution, classifier.4 the classes."""
    head, other = MobileNetHeadOfTimm(6, 9, 4, with_bn=True), MobileNetHead(6, 9, 4, with_bn=True)
    initialize_(head, 0)
    bound = 6**-0.5
    assert 0.9 * bound < head.classifier[0].weight.abs().max() <= bound and not head.classifier[4].bias.any()
    for mine, its in ((0, 0), (4, 3)):
        other.classifier[its].weight.data = head.classifier[mine].weight.data.flatten(1)
        other.classifier[its].bias.data = head.classifier[mine].bias.data
    rows = torch.randn(5, 6)
    torch.testing.assert_close(head.eval()(rows), other.eval()(rows))
