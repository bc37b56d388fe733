"""Trunk and heads together: what build_model makes of config.MODEL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.blocks import model_block
from vissl_zero.errors import ConfigError
from vissl_zero.methods.swav import SwAVHead, SwAVOutput
from vissl_zero.models.init import initialize_
from vissl_zero.models.keyed_random import KeyedDropout
from vissl_zero.models.mlp_heads import MLP
from vissl_zero.models.model import Model, Unit, build_model
from vissl_zero.registry import TRUNKS

TRUNK = {
    "NAME": "regnet",
    "REGNET": {"depth": 3, "w_0": 8, "w_a": 8.0, "w_m": 2.0, "group_width": 8, "stem_width": 8},
}
SWAV = ("swav_head", {"dims": [32, 12, 6], "use_bn": True, "num_clusters": [7, 5]})


def _config(*heads: Any, trunk: dict[str, Any] | None = None) -> dict[str, Any]:
    head = {"PARAMS": [list(head) for head in heads], "BATCHNORM_EPS": 1e-3, "BATCHNORM_MOMENTUM": 0.2}
    return {"TRUNK": trunk or TRUNK, "HEAD": head}


def _images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(4, 3, 12, 12, generator=generator), torch.rand(6, 3, 8, 8, generator=generator)]


def test_heads_see_the_rows_of_all_resolutions() -> None:
    model = build_model(model_block(_config(SWAV, ("mlp", {"dims": [32, 3]}))))
    initialize_(model, 0)
    model.eval()
    features = model(_images(), features_only=True)
    assert [tuple(f.shape) for f in features] == [(4, 32), (6, 32)]
    swav, logits = model(_images())
    assert isinstance(swav, SwAVOutput)
    assert [tuple(s.shape) for s in swav.scores] == [(10, 7), (10, 5)]
    torch.testing.assert_close(swav.embeddings.norm(dim=1), torch.ones(10))
    torch.testing.assert_close(logits, model.heads[1](torch.cat(features)))
    weight = model.get_parameter("heads.0.prototypes1.weight")
    torch.testing.assert_close(swav.scores[1], swav.embeddings @ weight.T)


def test_units_are_in_forward_order_and_hold_every_parameter() -> None:
    model = build_model(model_block(_config(SWAV)))
    called: list[nn.Module] = []
    for unit in model.zero_units():
        unit.register_forward_hook(lambda module, *_: called.append(module))
    model(_images())
    assert called == model.zero_units()
    assert {id(p) for unit in model.zero_units() for p in unit.parameters()} == {id(p) for p in model.parameters()}
    assert sum(isinstance(unit, Unit) for unit in model.zero_units()) == 4


def test_a_trunk_without_units_is_one() -> None:
    trunk, head = nn.Linear(2, 2), nn.Linear(2, 2)
    assert Model(trunk, [head]).zero_units() == [trunk, head]


def test_probe_is_scored_by_the_same_prototypes_without_gradient() -> None:
    head = SwAVHead(dims=[4, 6], num_clusters=[7])
    probe = torch.randn(3, 6)
    output = head(torch.randn(2, 4), probe)
    assert output.probe_scores is not None and not output.probe_scores[0].requires_grad
    torch.testing.assert_close(output.probe_scores[0], probe @ head.prototypes0.weight.T)
    trunk = nn.Identity()
    trunk.feature_dim = 4
    both = Model(trunk, [head, nn.Linear(4, 3)])([torch.randn(2, 4)], probe)
    torch.testing.assert_close(both[0].probe_scores[0], output.probe_scores[0])
    assert both[1].shape == (2, 3)
    assert output.scores[0].requires_grad
    assert head(torch.randn(2, 4)).probe_scores is None


def test_swav_head_options() -> None:
    plain = SwAVHead(dims=[4, 6, 3], num_clusters=[2], use_bias=False, normalize_feats=False, activation_name="GELU")
    assert [type(layer) for layer in plain.projection_head] == [nn.Linear, nn.GELU, nn.Linear]
    assert plain.projection_head[0].bias is None
    x = torch.randn(5, 4)
    torch.testing.assert_close(plain(x).embeddings, plain.projection_head(x))
    full = SwAVHead(dims=[4, 6, 3], num_clusters=[2], use_bn=True, skip_last_bn=False)
    expected = [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert [type(layer) for layer in full.projection_head] == expected * 2


def test_mlp_options() -> None:
    head = MLP(dims=[4, 6, 3], use_bn=True, use_relu=True, use_dropout=True, dropout_rate=0.2)
    assert [type(layer) for layer in head.clf] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout, nn.Linear]
    head = MLP(dims=[4, 6, 3], use_relu=True, skip_last_layer_relu_bn=False, use_bias=False)
    assert [type(layer) for layer in head.clf] == [nn.Linear, nn.ReLU] * 2
    assert head.clf[0].bias is None


def test_batch_norm_keys_reach_every_head_and_no_trunk() -> None:
    model = build_model(model_block(_config(SWAV, ("mlp", {"dims": [32, 4, 3], "use_bn": True}))))
    norms = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    values = {name.split(".")[0]: (norm.eps, norm.momentum) for name, norm in norms.items()}
    assert values == {"heads": (1e-3, 0.2), "trunk": (1e-5, 0.1)}
    assert len([name for name in norms if name.startswith("heads")]) == 2


def test_dropout_is_keyed_by_its_place() -> None:
    model = build_model(model_block(_config(("mlp", {"dims": [32, 4, 3], "use_dropout": True}))))
    (layer,) = (module for module in model.modules() if isinstance(module, KeyedDropout))
    assert (layer.layer, layer.p) == ("heads.0.clf.1", 0.5)


def test_keys_of_others_in_the_trunks_block_are_left_to_them() -> None:
    trunk = {**TRUNK, "REGNET": {**TRUNK["REGNET"], "stage_checkpoints": [[1], [], []]}, "PARAMS": {"size": 3}}
    assert len(build_model(model_block(_config(SWAV, trunk=trunk))).zero_units()) == 5


@pytest.fixture
def own_trunk() -> Iterator[None]:
    @TRUNKS.register("own_trunk")
    class OwnTrunk(nn.Module):
        def __init__(self, size: int):
            super().__init__()
            self.layer = nn.Linear(3, size)
            self.feature_dim = size

        def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
            return [self.layer(image.mean(dim=(2, 3))) for image in images]

    yield
    del TRUNKS._components["own_trunk"]


def test_a_trunk_of_the_users_own_takes_params(own_trunk: None) -> None:
    config = _config(("mlp", {"dims": [6, 2]}), trunk={"NAME": "own_trunk", "PARAMS": {"size": 6}})
    assert build_model(model_block(config))(_images())[0].shape == (10, 2)


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    build_model(model_block(_config(SWAV)))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (("mlp", {"dims": [440, 3]}), r"dims of mlp must begin with the trunk's 32 features .*\[32, 3\]"),
        (
            ("chain", {"heads": [["mlp", {"dims": [440, 8]}], ["mlp", {"dims": [8, 3]}]], "dims": [440, 3]}),
            r"dims of mlp must begin with the trunk's 32 features \(got \[440, 8\]\)\. Write dims: \[32, 8\]",
        ),
        (("swav_head", {"dims": [32], "num_clusters": [3]}), r"at least two widths"),
        (
            ("swav_head", {"dims": [32, 4], "num_clusters": [0]}),
            r"num_clusters of swav_head .* at least 1 \(got \[0\]\)",
        ),
        (("swav_head", {"dims": [32, 4], "num_clusters": [3], "activation_name": "relu"}), r"one of ReLU, GELU"),
        (("swav", {"dims": [32, 4]}), r"must be a known head .*Did you mean 'swav_head'"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_way_out(head: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(model_block(_config(head)))
