"""MODEL.PACK_CROPS: a block runs once for all resolutions, no image sees another, and others than ViTs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.blocks import model_block
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.models.init import initialize_
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.model import Model, build_model
from vissl_zero.models.packing import WithinImages, packed, unpacked
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve

SHAPES = ((4, 9), (6, 4), (0, 2))
SMALL = {"IMAGE_SIZE": 12, "PATCH_SIZE": 4, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 8, "MLP_DIM": 12}
KEYS = {**SMALL, "LAYER_SCALE_INIT": 0.5, "NUM_REGISTERS": 1, "DROPOUT_RATE": 0.3, "DROP_PATH_RATE": 0.3}
OURS: dict[str, Any] = {"NAME": "vision_transformer", "VISION_TRANSFORMERS": KEYS}
TINY = {"img_size": 12, "patch_size": 4, "depth": 2, "num_heads": 2, "embed_dim": 8, "mlp_ratio": 1.5}


def _timm(name: str, **more: Any) -> dict[str, Any]:
    return {"NAME": f"timm/{name}", "PARAMS": {"name": name, "model_args": {**TINY, **more}}}


def _model(trunk: dict[str, Any], is_packing: bool) -> Model:
    model = build_model(model_block({"TRUNK": trunk, "PACK_CROPS": is_packing}))
    initialize_(model, seed=0)
    return model.double()


def _images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(b, 3, s, s, dtype=torch.float64, generator=generator) for b, s in ((4, 12), (6, 8))]


def test_tokens_come_back_as_they_were_packed_and_are_not_copied() -> None:
    xs = [torch.rand(*shape, 5) for shape in SHAPES]
    sequence = packed(xs)
    assert sequence.shape == (1, 4 * 9 + 6 * 4, 5)
    for x, back in zip(xs, unpacked(sequence, SHAPES), strict=True):
        assert torch.equal(x, back)
        assert back.untyped_storage().data_ptr() == sequence.untyped_storage().data_ptr()


def test_the_mask_is_that_of_blocks_on_the_diagonal() -> None:
    query, key, value = torch.rand(3, 1, 2, 60, 4, dtype=torch.float64)
    image_of = torch.cat([torch.full((n,), i) for i, n in enumerate([9] * 4 + [4] * 6)])
    expected = functional.scaled_dot_product_attention(query, key, value, image_of[:, None] == image_of)
    actual = functional.scaled_dot_product_attention(query, key, value, attn_mask=WithinImages(SHAPES))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


def test_the_mask_is_for_attention_alone() -> None:
    with pytest.raises(TypeError):
        torch.add(torch.ones(1), WithinImages(SHAPES))


@pytest.mark.parametrize("trunk", [OURS, _timm("vit_tiny_patch16_224", qk_norm=True)])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_features_and_gradients_are_those_of_a_pass_per_resolution(trunk: dict[str, Any], is_recomputed: bool) -> None:
    """Dropout and stochastic depth included; each MLP runs once, on all tokens."""
    outputs, gradients, calls = [], [], []
    for is_packing in (False, True):
        model = _model(trunk, is_packing).train()
        blocks: Any = model.trunk.blocks
        for unit in blocks:
            unit.checkpoint = is_recomputed
            unit.get_submodule("unit.mlp").register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[:2]))
        set_random_key(0, 0, torch.arange(2))
        features = model(_images(), features_only=True)
        loss: Tensor = sum(rows.square().sum() for rows in features)  # type: ignore[assignment]
        loss.backward()
        outputs.append(torch.cat(features).detach())
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
    prefix = 2 if trunk is OURS else 1
    together = (1, 4 * (9 + prefix) + 6 * (4 + prefix))
    assert calls.count(together) == 2 * (1 + is_recomputed)
    assert set(calls) == {(4, 9 + prefix), (6, 4 + prefix), together}


@pytest.mark.parametrize(
    ("trunk", "got"),
    [
        ({"NAME": "resnet", "RESNETS": {"DEPTH": 18}}, "true with ResNet"),
        (_timm("vit_tiny_patch16_224", attn_drop_rate=0.1), "where attention is not fused"),
        (_timm("vit_small_patch16_18x2_224"), "true with ParallelThingsBlock"),
    ],
)
def test_other_layers_are_refused(trunk: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.MODEL\.PACK_CROPS: must be false .*{got}.*eave it out"):
        _model(trunk, is_packing=True)


def _resolved(*words: str) -> list[str]:
    words = ("config.MODEL.PACK_CROPS=true", *words)
    return list(resolve(compose("digits/dino", words).run, "/nowhere", recipe="r", host=Host(num_cores=1)).notes)


def test_crops_of_one_size_are_not_packed_and_a_note_says_so() -> None:
    note = "config.MODEL.PACK_CROPS has no effect: the crops of an image have one size."
    assert note in _resolved()
    crops = "total_num_crops: 3, num_crops: [2, 1], size_crops: [16, 12], crop_scales: [[0.4, 1], [0.1, 0.4]]"
    assert note not in _resolved(
        f"config.DATA.TRAIN.TRANSFORMS=[{{name: ImgPilToMultiCrop, {crops}}},{{name: ToTensor}}]"
    )


def test_heads_of_inner_layers_are_refused() -> None:
    settings = "config.MODEL.FEATURE_EVAL_SETTINGS"
    words = [f"{settings}.EVAL_MODE_ON=true", f"{settings}.FREEZE_TRUNK_ONLY=true"]
    words += [f"{settings}.LINEAR_EVAL_FEAT_POOL_OPS_MAP=[[blocks.0.unit.norm1,[Identity,[]]]]"]
    with pytest.raises(ConfigError, match="PACK_CROPS: must be false where heads or features are those of inner"):
        _resolved(*words)
