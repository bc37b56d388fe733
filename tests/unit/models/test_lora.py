"""MODEL.LORA: what is adapted, what it begins with, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.unit.config.example_config import complaints
from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.model_and_loss import Lora, ModelConfig
from vissl_zero.errors import ConfigError
from vissl_zero.models.bare import build_bare
from vissl_zero.models.init import FirstWeights, initialize_
from vissl_zero.models.model import Model, build_model
from vissl_zero.resolve import model_rules

OWN_VIT = {"IMAGE_SIZE": 8, "PATCH_SIZE": 4, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 8, "MLP_DIM": 16}
OWN = {"NAME": "vision_transformer", "VISION_TRANSFORMERS": OWN_VIT}
VIT = {"name": "vit_tiny_patch16_224", "model_args": {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2}}
SWIN = {"name": "swin_tiny_patch4_window7_224", "model_args": {"img_size": 56, "depths": (1, 1, 1, 1), "embed_dim": 24}}


def settings(trunk: dict[str, Any] = OWN, **lora: Any) -> ModelConfig:
    return block_of(ModelConfig, {"TRUNK": trunk, "HEAD": {"PARAMS": []}, "LORA": {"USE_LORA": True, "R": 2, **lora}})


def timm(options: dict[str, Any]) -> dict[str, Any]:
    return {"NAME": f"timm/{options['name']}", "PARAMS": options}


def drawn(config: ModelConfig, seed: int = 3) -> Model:
    model = build_model(config)
    initialize_(model, seed)
    return model


@pytest.mark.parametrize(("trunk", "targets"), [(OWN, ["attn.qkv", "fc1"]), (timm(SWIN), ".*[.]attn[.](qkv|proj)")])
def test_a_model_begins_as_without_adapters(trunk: dict[str, Any], targets: Any) -> None:
    adapted, plain = drawn(settings(trunk, TARGET_MODULES=targets)), drawn(settings(trunk, USE_LORA=False))
    tensors = plain.state_dict()
    for name, tensor in adapted.state_dict().items():
        if ".lora_B." in name:
            assert not tensor.any()
        elif ".lora_A." in name:
            assert 0.8 < tensor.abs().max() * tensor.shape[1] ** 0.5 <= 1
        else:
            assert torch.equal(tensor, tensors.pop(name.replace(".base_layer", ""))), name
    assert not tensors
    assert all(param.requires_grad == (".lora_" in name) for name, param in adapted.named_parameters())
    side = 8 if trunk is OWN else 56
    images = [torch.randn(2, 3, side, side)]
    torch.testing.assert_close(adapted.eval()(images, features_only=True), plain.eval()(images, features_only=True))


def test_a_model_without_memory_is_filled_with_the_same_numbers() -> None:
    bare = build_bare(lambda: build_model(settings()))
    assert bare.trunk.get_submodule("blocks.0.unit.attn.qkv.lora_A.default").weight.is_meta
    FirstWeights(bare, 3).fill_("")
    whole = drawn(settings()).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in bare.state_dict().items())


@pytest.mark.parametrize(
    ("trunk", "targets", "said"),
    [
        (OWN, ["attn.qvk"], "must name layers of the trunk (got 'attn.qvk'). Linear layers: blocks.0.attn.qkv, "),
        (OWN, ["attn.qkv", "wrong"], "(got 'wrong')"),
        (OWN, "qkv", "(got 'qkv')"),  # a pattern is of whole names
        (OWN, ["proj"], "must name linear layers (torch.nn.Linear) alone (got patch_embed.proj, Conv2d)"),
        (OWN, "blocks.0", "(got blocks.0, Block)"),
        ({"NAME": "resnet", "RESNETS": {"DEPTH": 18}}, ["fc"], "(got batch norm at stem.1). Take a vision transformer"),
    ],
)
def test_what_cannot_be_adapted_is_refused(trunk: dict[str, Any], targets: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(settings(trunk, TARGET_MODULES=targets))
    assert said in str(caught.value)


def test_a_trunk_that_reads_a_weight_past_its_layer_is_refused() -> None:
    options = {"name": "beit_base_patch16_224", "model_args": {"depth": 1, "embed_dim": 24, "num_heads": 2}}
    model = build_model(settings(timm(options)))
    with pytest.raises(ConfigError, match="the trunk reads itself"):
        model([torch.zeros(1, 3, 224, 224)], features_only=True)


def test_rules() -> None:
    weights = {"MODEL__WEIGHTS_INIT__PARAMS_FILE": __file__}  # it exists
    assert complaints(**weights, MODEL__LORA=Lora(True)) == []
    assert "needs weights" in complaints(MODEL__LORA=Lora(True))[0]
    for targets in ([], "", "(", [1], 3):
        (said,) = complaints(**weights, MODEL__LORA=Lora(True, TARGET_MODULES=targets))
        assert "must be a list of names of layers" in said
    said = "\n".join(complaints(**weights, MODEL__LORA=Lora(True, R=0, LORA_DROPOUT=1.0)))
    assert "config.MODEL.LORA.R: must be at least 1" in said and "config.MODEL.LORA.LORA_DROPOUT" in said
    assert "cannot go with LORA" in complaints(**weights, MODEL__LORA=Lora(True), MODEL__FLOAT8__USE_FLOAT8=True)[0]
    assert "not available on fairscale" in complaints(**weights, MODEL__LORA=Lora(True), ZERO__ENGINE="fairscale")[0]
    with patch.object(model_rules, "find_spec", lambda _: None):
        (said,) = complaints(**weights, MODEL__LORA=Lora(True))
    assert "needs the package peft" in said and "pip install 'vissl-zero[lora]'" in said
