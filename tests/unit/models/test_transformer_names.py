"""Weights of transformers go to and from other libraries by name, and then give what those libraries' models give."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from vissl_zero.models.init import initialize_
from vissl_zero.models.trunks.timm_trunk import build_timm_trunk
from vissl_zero.models.trunks.vision_transformer import VisionTransformer
from vissl_zero.models.weight_names import to_other_names, to_our_names

SMALL = {"IMAGE_SIZE": 16, "PATCH_SIZE": 4, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 8, "MLP_DIM": 16}
LIKE_SMALL = {"img_size": 16, "patch_size": 4, "depth": 2, "num_heads": 2, "embed_dim": 8, "mlp_ratio": 2.0}


def _named(trunk: nn.Module) -> dict[str, Tensor]:
    return {f"trunk.{name}": tensor for name, tensor in trunk.state_dict().items()}


def _images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def _loaded(trunk: nn.Module, theirs: dict[str, Tensor]) -> nn.Module:
    """``trunk`` with the weights of another library, by name; everything must fit."""
    renamed = to_our_names(theirs, _named(trunk))
    state = {name.removeprefix("trunk."): theirs[old] for name, old in renamed.names.items() if "heads." not in name}
    trunk.load_state_dict(state)
    return trunk.eval()


def _timm() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=0, **LIKE_SMALL)


def _torchvision() -> nn.Module:
    model = torchvision.models.VisionTransformer(16, 4, 2, 2, 8, 16)
    model.heads = nn.Identity()
    return model


@pytest.mark.parametrize("prefix", ["", "module.", "model.trunk."])
@pytest.mark.parametrize("make", [_timm, _torchvision])
def test_weights_from_elsewhere_give_their_outputs(make, prefix: str) -> None:
    theirs = make()
    for parameter in theirs.parameters():  # also what starts at 0 or 1
        nn.init.normal_(parameter, std=0.3)
    ours = _loaded(VisionTransformer(**SMALL, QKV_BIAS=True), {prefix + k: v for k, v in theirs.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(ours([_images()])[0], theirs.eval()(_images()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("style", "make"), [("timm", _timm), ("torchvision", _torchvision)])
def test_our_weights_fit_elsewhere(style: str, make) -> None:
    ours = VisionTransformer(**SMALL, QKV_BIAS=True)
    initialize_(ours, 3)
    named = _named(ours)
    renamed = to_other_names(named, style)
    assert not renamed.unknown
    theirs = make()
    theirs.load_state_dict({new: named[old] for new, old in renamed.names.items()})
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()([_images()])[0], theirs.eval()(_images()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["convnext_atto", "resnet18", "regnety_002"])
def test_any_timm_trunk_has_timms_names_outside(name: str) -> None:
    theirs = timm.create_model(name, num_classes=0).eval()
    ours = _loaded(build_timm_trunk(name), theirs.state_dict())
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours([images])[0], theirs(images))
    assert set(to_other_names(_named(ours), "timm").names) == set(theirs.state_dict())
    assert to_other_names(_named(ours), "torchvision").unknown


def test_names_of_torch_hubs_dinov2() -> None:
    """facebookresearch/dinov2 b8931f7 dinov2/models/vision_transformer.py."""
    renamed = to_our_names(
        ["cls_token", "register_tokens", "blocks.3.ls1.gamma", "blocks.3.attn.qkv.bias", "norm.bias"]
    )
    assert list(renamed.names) == [
        "trunk.embedding.unit.cls_token",
        "trunk.embedding.unit.reg_token",
        "trunk.blocks.3.unit.ls1.gamma",
        "trunk.blocks.3.unit.attn.qkv.bias",
        "trunk.norm.unit.bias",
    ]
