"""Trunks made of timm's layers give what timm's own models give with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.blocks import model_block
from vissl_zero.errors import ConfigError
from vissl_zero.models.init import initialize_
from vissl_zero.models.keyed_random import key_random_layers, set_random_key
from vissl_zero.models.model import Unit, build_model
from vissl_zero.models.trunks.timm_trunk import TimmTrunk, _trace, build_timm_trunk
from vissl_zero.models.trunks.token_embedding import interpolated
from vissl_zero.models.trunks.vision_transformer import TransformerTrunk, VisionTransformer

SMALL = {"IMAGE_SIZE": 16, "PATCH_SIZE": 4, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 8, "MLP_DIM": 12}
OURS = {"unit", "embedding", "pooling"}


def _timm_names(trunk: nn.Module) -> dict[str, Tensor]:
    state = trunk.state_dict()
    prefix = "net." if isinstance(trunk, TimmTrunk) else ""
    return {".".join(p for p in name.removeprefix(prefix).split(".") if p not in OURS): t for name, t in state.items()}


def _images(*sides: int, rows: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(rows, 3, side, side, generator=generator) for side in sides]


# Model, arguments, sides of two resolutions, whether its units are a chain (None: a vision transformer).
MODELS: list[tuple[str, dict[str, Any], tuple[int, int], bool | None]] = [
    ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64}, (64, 32), None),
    ("vit_small_patch14_reg4_dinov2", {"depth": 2, "img_size": 56}, (56, 28), None),
    ("deit3_small_patch16_224", {"depth": 2, "img_size": 64, "global_pool": "avg"}, (64, 48), None),
    ("vit_base_patch16_siglip_224", {"depth": 1, "img_size": 64, "embed_dim": 32, "num_heads": 2}, (64, 64), None),
    ("convnext_atto", {"depths": (1, 1, 1, 2)}, (64, 32), True),
    ("convnextv2_atto", {"depths": (1, 1, 1, 1)}, (64, 32), True),
    ("swin_tiny_patch4_window7_224", {"depths": (2, 1), "num_heads": (2, 2), "embed_dim": 8}, (224, 112), True),
    ("efficientnet_b0", {}, (64, 32), True),
    ("resnet18", {}, (64, 32), True),
    ("regnety_002", {}, (64, 32), True),
    ("xcit_nano_12_p16_224", {"depth": 2}, (64, 32), False),
    ("deit_tiny_distilled_patch16_224", {"depth": 2, "img_size": 64}, (64, 64), False),
    ("vit_small_patch16_dinov3", {"depth": 2, "img_size": 64}, (64, 32), False),
    ("twins_svt_small", {}, (224, 224), False),
    ("inception_v3", {}, (299, 139), True),
    ("levit_128s", {}, (224, 224), False),
    ("pit_ti_224", {}, (224, 224), False),
]


@pytest.mark.parametrize(("name", "arguments", "sides", "is_chain"), MODELS, ids=[row[0] for row in MODELS])
def test_outputs_are_timms(name: str, arguments: dict[str, Any], sides: tuple[int, int], is_chain: bool | None) -> None:
    trunk = build_timm_trunk(name, model_args=arguments)
    initialize_(trunk, seed=1)
    assert getattr(trunk, "is_chain", None) is is_chain
    assert sum(isinstance(module, Unit) for module in trunk.modules()) >= 2
    dynamic = {"dynamic_img_size": True} if is_chain is None or name.startswith(("swin", "vit", "deit")) else {}
    theirs = timm.create_model(name, num_classes=0, **arguments, **dynamic)
    theirs.load_state_dict(_timm_names(trunk))
    images = _images(*sides)
    with torch.no_grad():
        ours = trunk.eval()(images)
        for image, features in zip(images, ours, strict=True):
            torch.testing.assert_close(features, theirs.eval()(image), rtol=1e-5, atol=1e-5)
            assert features.shape == (2, trunk.feature_dim)


def test_first_weights_are_the_runs_own() -> None:
    for name in ("convnext_atto", "vit_tiny_patch16_224"):
        states = []
        for seed in (1, 1, 2):
            trunk = build_timm_trunk(name, model_args={"depths": (1, 1, 1, 1)} if "convnext" in name else {"depth": 1})
            initialize_(trunk, seed)
            states.append(trunk.state_dict())
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        drawn = [key for key in states[0] if not torch.equal(states[0][key], states[2][key])]
        assert len(drawn) >= 6
        assert all(tensor.isfinite().all() for tensor in states[0].values())
    vit = VisionTransformer(**{**SMALL, "HIDDEN_DIM": 64}, USE_MASK_TOKEN=True, NUM_REGISTERS=2, LAYER_SCALE_INIT=0.1)
    initialize_(vit, 0)
    assert 0.0195 < vit.blocks[0].unit.attn.qkv.weight.std() < 0.0205
    assert (vit.blocks[0].unit.attn.proj.bias == 0).all() and (vit.blocks[0].unit.ls1.gamma == 0.1).all()
    tokens = vit.embedding.unit
    assert all(
        0 < t.abs().max() < 0.2 for t in (tokens.cls_token, tokens.reg_token, tokens.mask_token, tokens.pos_embed)
    )


def test_positions_are_interpolated_as_timm_does() -> None:
    positions = torch.randn(1, 12, 5, generator=torch.Generator().manual_seed(0))
    ours = interpolated(positions, (3, 4), (5, 2))
    theirs = timm.layers.resample_abs_pos_embed(positions, (5, 2), (3, 4), num_prefix_tokens=0)
    torch.testing.assert_close(ours, theirs)
    assert interpolated(positions, (3, 4), (3, 4)) is positions


def test_kept_patches_are_the_only_ones_seen() -> None:
    trunk = VisionTransformer(**SMALL, CLASSIFIER="gap").eval()
    initialize_(trunk, 0)
    (image,) = _images(16)
    kept = torch.tensor([[0, 5, 3], [15, 2, 1]])
    (tokens,) = trunk([image], kept=[kept], return_tokens=True)
    assert tokens.shape == (2, 1 + 3, 8)
    hidden = image.clone()
    hidden[0, :, 12:, 12:] += 9.0  # patch 15, which image 0 does not see
    assert torch.equal(trunk([hidden], kept=[kept], return_tokens=True)[0], tokens)
    hidden[0, :, :4, :4] += 9.0
    assert not torch.equal(trunk([hidden], kept=[kept], return_tokens=True)[0][0], tokens[0])
    everything = torch.arange(16).expand(2, -1)
    torch.testing.assert_close(trunk([image], kept=[everything]), trunk([image]))


def test_masked_patches_are_not_seen() -> None:
    trunk = VisionTransformer(**SMALL, USE_MASK_TOKEN=True).eval()
    initialize_(trunk, 0)
    (image,) = _images(16)
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, 15] = True
    hidden = image.clone()
    hidden[:, :, 12:, 12:] += 9.0
    seen, masked = trunk([hidden])[0], trunk([hidden], masks=[mask])[0]
    assert torch.equal(masked[0], trunk([image], masks=[mask])[0][0]) and not torch.equal(masked[0], seen[0])
    assert torch.equal(masked[1], seen[1])
    with pytest.raises(ValueError, match="USE_MASK_TOKEN"):
        VisionTransformer(**SMALL)([image], masks=[mask])


def test_tokens_of_the_last_blocks_come_before_the_norm() -> None:
    trunk = VisionTransformer(**SMALL).eval()
    images = [*_images(16), *_images(8)]
    tokens = trunk(images, return_tokens=True, last_blocks=2)
    shapes = [(2, 17, 8), (2, 5, 8)]
    assert [tuple(rows.shape) for rows in tokens] == shapes * 3  # after the norm, the last block but one, the last
    normed: list[torch.Tensor] = trunk.norm(trunk.blocks[-1](tokens[2:4]))
    assert all(torch.equal(*pair) for pair in zip(normed, tokens[:2], strict=True))
    assert all(torch.equal(*pair) for pair in zip(trunk.norm(tokens[4:]), tokens[:2], strict=True))


def test_dropped_patches_are_keyed() -> None:
    trunk = VisionTransformer(**SMALL, PATCH_DROP_RATE=0.5).train()
    (image,) = _images(16)
    set_random_key(0, 0, torch.tensor([4, 9]))
    (tokens,) = trunk([image], return_tokens=True)
    assert tokens.shape == (2, 1 + 8, 8)
    set_random_key(0, 0, torch.tensor([9]))
    assert torch.allclose(trunk([image[1:]], return_tokens=True)[0], tokens[1:], atol=1e-6)
    assert trunk.eval()([image], return_tokens=True)[0].shape == (2, 17, 8)


def test_recomputed_blocks_with_dropout_give_the_same_gradients() -> None:
    """Also where a unit is called once per resolution, inside timm's own forward pass."""
    for trunk in (
        VisionTransformer(**SMALL, DROPOUT_RATE=0.3, ATTENTION_DROPOUT_RATE=0.3, DROP_PATH_RATE=0.3),
        build_timm_trunk("xcit_nano_12_p16_224", drop_path_rate=0.5, model_args={"depth": 2, "proj_drop_rate": 0.3}),
    ):
        initialize_(trunk, 0)
        key_random_layers(trunk.train())
        set_random_key(0, 0, torch.arange(2))
        gradients = []
        for is_recomputed in (False, True):
            for module in trunk.modules():
                if isinstance(module, Unit):
                    module.checkpoint = is_recomputed
            trunk.zero_grad()
            for buffer in trunk.buffers():
                buffer.zero_()
            sides = (16, 12) if isinstance(trunk, TransformerTrunk) else (32, 16)
            torch.cat(trunk(_images(*sides))).sin().sum().backward()
            gradients.append([param.grad.clone() for param in trunk.parameters() if param.grad is not None])
        assert len(gradients[0]) > 10
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_wrong_models_and_arguments_are_said() -> None:
    for name, more, said in (
        ("convnext_ato", {}, r"must name a model of timm.*convnext_atto"),
        ("convnext_atto", {"model_args": {"widths": 3}}, "model_args.*unexpected keyword argument 'widths'"),
        ("convnext_atto", {"use_mask_token": True}, "are for plain vision transformers"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_timm_trunk(name, **more)
    for keys, said in (
        ({"HIDDEN_DIM": 9}, "HIDDEN_DIM.*multiple of NUM_HEADS, 2"),
        ({"PATCH_SIZE": 5}, "IMAGE_SIZE.*multiple of PATCH_SIZE, 5"),
        ({"CLASSIFIER": "max"}, "CLASSIFIER.*must be token or gap"),
        ({"DROP_PATH_RATE": 1.0}, "DROP_PATH_RATE.*below 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            VisionTransformer(**{**SMALL, **keys})


SMALL_VIT = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 12, "num_heads": 3}


@pytest.mark.parametrize(
    ("key", "fix"), [("patch_drop_rate", "config.MODEL.TRUNK.PARAMS.patch_drop_rate"), ("drop_rate", "use_dropout")]
)
def test_an_argument_that_would_do_nothing_is_refused(key: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"model_args.{key}: must be left out: .*\(got 0.5\)\. .*{fix}"):
        build_timm_trunk("vit_tiny_patch16_224", model_args={**SMALL_VIT, key: 0.5})
    build_timm_trunk("vit_tiny_patch16_224", model_args={**SMALL_VIT, key: 0.0})


@pytest.mark.parametrize("pool", ["token", "avg", "max", "avgmax", "map", "prr"])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_tokens_are_pooled_as_timm_does(pool: str, with_prefix: bool) -> None:
    arguments = {**SMALL_VIT, "global_pool": pool, "pool_include_prefix": with_prefix}
    trunk = build_timm_trunk("vit_tiny_patch16_224", model_args=arguments)
    initialize_(trunk, seed=1)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=0, **arguments)
    theirs.load_state_dict(_timm_names(trunk))
    (image,) = _images(32)
    with torch.no_grad():
        torch.testing.assert_close(trunk.eval()([image])[0], theirs.eval()(image), rtol=1e-5, atol=1e-5)


def test_rounding_of_norms_is_the_models_own_or_as_written() -> None:
    for each, last in ((None, None), (1e-3, None), (None, 1e-2), (1e-3, 1e-2)):
        norms = {"layer_norm_eps": each, "last_norm_eps": last}
        trunk = build_timm_trunk(name="vit_tiny_patch16_224", model_args={"depth": 1}, **norms)
        found = [module.eps for module in trunk.modules() if isinstance(module, nn.LayerNorm)]
        assert found == [each or 1e-6] * 2 + [last or each or 1e-6]


@pytest.mark.parametrize("pads", [False, True])
def test_images_that_are_not_whole_patches_are_refused_unless_the_model_pads_them(pads: bool) -> None:
    arguments = {"dynamic_img_pad": True} if pads else {}
    trunk = build_timm_trunk(name="vit_tiny_patch16_224", model_args={"depth": 1, **arguments})
    if pads:
        trunk(_images(27))
        return
    with pytest.raises(ConfigError, match="must be whole patches of 16 pixels"):
        trunk(_images(32, 27))


def test_models_are_built_by_name() -> None:
    head = {"PARAMS": [["mlp", {"dims": [-1, 5]}]], "BATCHNORM_EPS": 1e-5, "BATCHNORM_MOMENTUM": 0.1}
    name, params = "timm/vit_tiny_patch16_224", {"name": "vit_tiny_patch16_224", "model_args": {"depth": 1}}
    for trunk in ({"NAME": name, "PARAMS": params}, {"NAME": "vision_transformer", "VISION_TRANSFORMERS": SMALL}):
        model = build_model(model_block({"TRUNK": trunk, "HEAD": head}))
        assert isinstance(model.trunk, TransformerTrunk)
        assert model(_images(16, 32))[0].shape == (4, 5)
        assert len(model.zero_units()) == 1 + len(model.trunk.blocks) + 2 + 1


class _Mix(nn.Module):
    """A convolution of one tensor, or of the sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor | None = None, *, z: Tensor | None = None) -> Tensor:
        others = [other for other in (y, z) if other is not None]
        return self.conv(sum(others, x))


class _Net(nn.Module):
    def __init__(self, second: str) -> None:
        super().__init__()
        self.stem, self.mix, self.second = nn.Conv2d(3, 4, 3, stride=2), _Mix(), second
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.second == "in place":  # the same tensor, with other values
            x.mul_(2)
        calls = {"y": lambda: self.mix(x, x), "z": lambda: self.mix(x, z=x)}
        return self.pool(calls.get(self.second, lambda: self.mix(x))())


@pytest.mark.parametrize(
    ("second", "links"), [("none", ["stem", "mix.conv", "pool"]), ("y", None), ("z", None), ("in place", None)]
)
def test_a_module_of_two_inputs_is_no_link_of_a_chain(second: str, links: list[str] | None) -> None:
    assert _trace(_Net(second))[0] == links
