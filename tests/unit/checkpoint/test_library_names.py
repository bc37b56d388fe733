"""Names of other libraries become timm's, and tensors that it stores otherwise are cut, joined or flattened."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vissl_zero.checkpoint.library_names import renamed
from vissl_zero.checkpoint.shard_file import Entry


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    entries = renamed([Entry.of(name, tensor) for name, tensor in tensors.items()])
    for entry in entries:
        assert entry.read().shape == entry.shape
    assert len({entry.key for entry in entries}) == len(entries)
    return {entry.key: entry.read() for entry in entries}


CONVNEXT = {
    "net.encoder.stages.0.layers.0.dwconv.weight": "stages.0.blocks.0.conv_dw.weight",
    "net.embeddings.patch_embeddings.bias": "stem.0.bias",
    "net.embeddings.layernorm.weight": "stem.1.weight",
    "net.encoder.stages.1.downsampling_layer.1.weight": "stages.1.downsample.1.weight",
    "net.encoder.stages.2.layers.1.layer_scale_parameter": "stages.2.blocks.1.gamma",
    "net.encoder.stages.2.layers.1.layernorm.bias": "stages.2.blocks.1.norm.bias",
    "net.encoder.stages.2.layers.1.pwconv1.bias": "stages.2.blocks.1.mlp.fc1.bias",
    "net.encoder.stages.2.layers.1.pwconv2.bias": "stages.2.blocks.1.mlp.fc2.bias",
    "net.layernorm.bias": "head.norm.bias",
    "classifier.weight": "classifier.weight",
}
CONVNEXT_DINOV3 = {
    "model.stages.0.layers.0.depthwise_conv.weight": "stages.0.blocks.0.conv_dw.weight",
    "model.stages.0.downsample_layers.1.weight": "stem.1.weight",
    "model.stages.3.downsample_layers.0.bias": "stages.3.downsample.0.bias",
    "model.stages.3.layers.2.gamma": "stages.3.blocks.2.gamma",
    "model.stages.3.layers.2.layer_norm.weight": "stages.3.blocks.2.norm.weight",
    "model.stages.3.layers.2.pointwise_conv2.weight": "stages.3.blocks.2.mlp.fc2.weight",
    "layer_norm.weight": "head.norm.weight",
}
RESNET = {
    "resnet.embedder.embedder.convolution.weight": "conv1.weight",
    "resnet.embedder.embedder.normalization.bias": "bn1.bias",
    "resnet.encoder.stages.0.layers.1.layer.2.convolution.weight": "layer1.1.conv3.weight",
    "resnet.encoder.stages.3.layers.0.layer.0.normalization.bias": "layer4.0.bn1.bias",
    "resnet.encoder.stages.1.layers.0.shortcut.convolution.weight": "layer2.0.downsample.0.weight",
    "resnet.encoder.stages.1.layers.0.shortcut.normalization.weight": "layer2.0.downsample.1.weight",
}
CHILDREN = {
    "backbone.4.0.conv1.weight": "layer1.0.conv1.weight",
    "backbone.0.weight": "conv1.weight",
    "backbone.1.running_mean": "bn1.running_mean",
    "backbone.7.2.bn3.bias": "layer4.2.bn3.bias",
    "projection_head.0.weight": "projection_head.0.weight",
}
UNKNOWN = {"conv1.weight": "conv1.weight", "my.encoder.stages.0.layers.0.dwconv": "my.encoder.stages.0.layers.0.dwconv"}


@pytest.mark.parametrize("names", [CONVNEXT, CONVNEXT_DINOV3, RESNET, CHILDREN, UNKNOWN])
def test_names_of_a_layout_become_timms(names: dict[str, str]) -> None:
    tensors = {name: torch.full((2, 1), float(at)) for at, name in enumerate(names)}
    found = _renamed(tensors)
    assert list(found) == list(names.values())
    assert all(torch.equal(found[new], tensors[old]) for old, new in names.items())


def test_the_norm_of_responses_has_one_dimension() -> None:
    start = "encoder.stages.0.layers.0"
    tensors = {f"{start}.dwconv.weight": torch.ones(2, 1, 3), f"{start}.grn.weight": torch.arange(4.0).view(1, 1, 1, 4)}
    found = _renamed(tensors)
    assert found["stages.0.blocks.0.conv_dw.weight"].shape == (2, 1, 3)
    assert torch.equal(found["stages.0.blocks.0.mlp.grn.weight"], torch.arange(4.0))


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_dinov3_of_transformers_is_fused(is_gated: bool) -> None:
    parts = {part: torch.randn(4, 4) for part in "kqv"}  # in any order
    tensors = {
        "embeddings.patch_embeddings.weight": torch.ones(4, 3, 2, 2),
        "embeddings.cls_token": torch.ones(1, 1, 4),
        "embeddings.register_tokens": torch.ones(1, 2, 4),
        **{f"model.layer.1.attention.{part}_proj.weight": tensor for part, tensor in parts.items()},
        "model.layer.1.attention.q_proj.bias": torch.zeros(4),
        "model.layer.1.attention.v_proj.bias": torch.ones(4),
        "model.layer.1.attention.o_proj.bias": torch.ones(4),
        "model.layer.1.layer_scale2.lambda1": torch.ones(4),
        "model.layer.1.norm1.weight": torch.ones(4),
        "model.layer.1.mlp.up_proj.weight": torch.zeros(8, 4),
        "model.layer.1.mlp.down_proj.weight": torch.ones(4, 8),
        "norm.weight": torch.ones(4),
    }
    if is_gated:
        tensors["model.layer.1.mlp.gate_proj.weight"] = torch.ones(8, 4)
    found = _renamed(tensors)
    block = "blocks.1"
    assert torch.equal(found.pop(f"{block}.attn.qkv.weight"), torch.cat([parts[part] for part in "qkv"]))
    assert not found[f"{block}.attn.q_bias"].any() and found[f"{block}.attn.v_bias"].all()
    assert not found[f"{block}.mlp.fc1_x.weight" if is_gated else f"{block}.mlp.fc1.weight"].any()
    names = ["attn.q_bias", "attn.v_bias", "attn.proj.bias", "gamma_2", "norm1.weight", "mlp.fc2.weight"]
    names += ["mlp.fc1_x.weight", "mlp.fc1_g.weight"] if is_gated else ["mlp.fc1.weight"]
    outer = {"patch_embed.proj.weight", "cls_token", "reg_token", "norm.weight"}
    assert found.keys() == {f"{block}.{name}" for name in names} | outer


def test_a_dinov3_of_its_authors_has_no_bias_of_keys() -> None:
    bias = torch.arange(12.0)
    found = _renamed(
        {
            "storage_tokens": torch.ones(1, 4, 4),
            "blocks.0.attn.qkv.weight": torch.ones(12, 4),
            "blocks.0.attn.qkv.bias": bias,
            "blocks.0.attn.qkv.bias_mask": torch.zeros(12),
            "blocks.0.ls2.gamma": torch.ones(4),
            "blocks.0.mlp.w1.weight": torch.ones(8, 4),
            "blocks.0.mlp.w2.weight": torch.zeros(8, 4),
            "blocks.0.mlp.w3.bias": torch.ones(4),
            "rope_embed.periods": torch.ones(2),
            "local_cls_norm.weight": torch.ones(4),
            "local_cls_norm.bias": torch.ones(4),
        }
    )
    assert list(found) == [
        "reg_token",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.q_bias",
        "blocks.0.attn.v_bias",
        "blocks.0.gamma_2",
        "blocks.0.mlp.fc1_g.weight",
        "blocks.0.mlp.fc1_x.weight",
        "blocks.0.mlp.fc2.bias",
    ]
    assert torch.equal(found["blocks.0.attn.q_bias"], bias[:4]) and torch.equal(found["blocks.0.attn.v_bias"], bias[8:])
    assert found["blocks.0.mlp.fc1_g.weight"].all() and not found["blocks.0.mlp.fc1_x.weight"].any()
