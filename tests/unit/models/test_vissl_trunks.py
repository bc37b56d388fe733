"""Trunks by VISSL's keys: RegNet stage by stage, and those that timm has."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import nn

from tests.blocks import model_block
from tests.unit.config.example_config import complaints, config
from vissl_zero.data.transforms import ImgPil2LabTensor
from vissl_zero.errors import ConfigError
from vissl_zero.models.model import Taps, build_model
from vissl_zero.models.trunks.regnet import RegNet
from vissl_zero.models.trunks.resnet import ResNet
from vissl_zero.models.trunks.timm_trunk import BeitTrunk, build_xcit
from vissl_zero.models.trunks.vision_transformer import VisionTransformer
from vissl_zero.registry import TRUNKS
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.sharding_plan import sharding_plan

BEIT = {
    "IMAGE_SIZE": 16,
    "PATCH_SIZE": 8,
    "NUM_LAYERS": 5,
    "NUM_HEADS": 2,
    "HIDDEN_DIM": 8,
    "MLP_RATIO": 2.0,
    "QKV_BIAS": True,
    "USE_REL_POS_BIAS": True,
    "USE_MEAN_POOLING": False,
    "INIT_VALUES": 0.1,
}
VISSL_LAST = """
-0.1952889273032982 -0.06839417129417687 0.15611824834116503 0.5101175118652006
1.0067854398218963 1.624260313775607 2.297410478242146 2.924767718502578
-0.19528943068331506 -0.06839435149011251 0.15611843580142792 0.5101180009817197
1.0067860328441878 1.6242607135813767 2.2974103773517993 2.924766913537668
"""
VISSL_SUMS = [65.9044418001395, 16.412279340647306]
STAGES = {"depths": [1, 2], "widths": [16, 32], "group_widths": [8, 16], "bottleneck_multipliers": [1.0, 0.5]}


def test_a_regnet_stage_by_stage():
    trunk = RegNet(name="anynet", strides=[2, 1], **STAGES)
    assert [len(stage) for stage in trunk.stages] == [1, 2] and trunk.feature_dim == 32
    groups = [[m.groups for m in s.modules() if getattr(m, "groups", 1) > 1] for s in trunk.stages]
    assert groups == [[2], []]  # 16 channels by 8; 32 * 0.5 by 16 is one group
    maps = []
    trunk.stages[1][1].register_forward_hook(lambda _m, _i, out: maps.append(out[0].shape))
    assert trunk([torch.zeros(2, 3, 16, 16)])[0].shape == (2, 32) and maps == [(2, 32, 4, 4)]


def test_stages_of_unlike_length_and_stages_without_their_name_are_refused():
    block = {f"MODEL__TRUNK__REGNET__{key}": value for key, value in STAGES.items()}
    others = {"MODEL__TRUNK__REGNET__" + key: None for key in ("depth", "w_0", "w_a", "w_m", "group_width")}
    said = complaints(MODEL__TRUNK__REGNET__name="anynet", MODEL__TRUNK__REGNET__strides=[2], **block, **others)
    assert any("an entry of each per stage" in text and "1 strides" in text for text in said)
    none = {f"MODEL__TRUNK__REGNET__{key}": [] for key in (*STAGES, "strides")}
    said = complaints(MODEL__TRUNK__REGNET__name="anynet", **none, **others)
    assert any("an entry of each per stage" in text for text in said)
    said = complaints(MODEL__TRUNK__REGNET__name=None, **block, **others)
    assert any("needs name: anynet" in text for text in said)


@pytest.mark.parametrize(
    ("switch", "flags", "ends"),
    [
        (False, [[True], [True, False]], ((1,), (2,))),  # flags count whatever the switch says
        (True, [[False]], ((), (2, 3))),  # a stage without flags follows the switch
        (True, [], ((1,), (2, 3))),
    ],
)
def test_flags_say_which_stretches_are_recomputed(switch, flags, ends):
    key = "MODEL__TRUNK__REGNET__stage_checkpoint"
    activation = "MODEL__ACTIVATION_CHECKPOINTING__USE_ACTIVATION_CHECKPOINTING"
    cfg = config(**{f"{key}s": [[1], [2, 3]], f"{key}ing": flags, activation: switch})
    host = Host(num_gpus=0, why_no_gpu="", num_cores=1)
    assert sharding_plan(Decisions(cfg, host))[0].stage_checkpoints == ends


@pytest.mark.parametrize("flags", [[[True, True]], [[True], [False, True]]])
def test_flags_that_do_not_fit_are_refused(flags):
    key = "MODEL__TRUNK__REGNET__stage_checkpoint"
    said = complaints(**{f"{key}s": [[1], [2, 3]], f"{key}ing": flags})
    assert any("must have a flag for each of the" in text for text in said)


@torch.no_grad()
def test_beit_is_vissl_s():
    """Outputs of VISSL's BEiT on the same numbers, computed with its beit_transformer.py at 09270ed2."""
    trunk = BeitTrunk(**BEIT).double().eval()
    taps = [trunk.tap(name) for name in ("lastCLS", "concatCLS4", "blkCLS1")]
    names = {name.replace(".unit", ""): tensor for name, tensor in trunk.net.state_dict().items()}
    floats = sorted(name for name, tensor in names.items() if tensor.is_floating_point() and "k_bias" not in name)
    order = sorted([*floats, *(f"blocks.{i}.attn.relative_position_index" for i in range(5))])
    for index, name in enumerate(order):
        if name in floats:
            line = torch.linspace(-1, 1, names[name].numel()).double().view_as(names[name])
            names[name].copy_(line.sin() * 0.3 + 0.01 * index)
    image = torch.linspace(-2, 2, 2 * 3 * 16 * 16).double().view(2, 3, 16, 16).cos()
    features = trunk([image])
    last, four, inner = [tap.combine([], features)[0] for tap in taps]
    assert torch.equal(last, features[0])
    assert (four.shape, inner.shape) == ((2, 32), (2, 8))
    wanted = torch.tensor([*map(float, VISSL_LAST.split())], dtype=torch.float64).view(2, 8)
    torch.testing.assert_close(last, wanted, rtol=0, atol=1e-12)
    sums = torch.tensor(VISSL_SUMS, dtype=torch.float64)
    torch.testing.assert_close(torch.stack([four.sum(), inner.sum()]), sums, rtol=1e-12, atol=0)


def test_beit_without_its_last_norm():
    plain, pooled = BeitTrunk(**BEIT), BeitTrunk(**BEIT | {"USE_MEAN_POOLING": True})
    assert {name for name in plain.state_dict() if name not in pooled.state_dict()} == {
        "net.norm.weight",
        "net.norm.bias",
    }


def test_xcit_takes_images_of_any_size_and_names_its_class_token():
    options = {"IMAGE_SIZE": 32, "HIDDEN_DIM": 16, "NUM_LAYERS": 2, "NUM_HEADS": 2, "DROP_PATH_RATE": 0.0}
    trunk = build_xcit(**options).eval()
    with torch.no_grad():
        features = trunk([torch.randn(2, 3, 32, 32), torch.randn(3, 3, 48, 48)])
    assert [tuple(rows.shape) for rows in features] == [(2, 16), (3, 16)]
    tap = trunk.tap("lastCLS")
    assert tap.combine([], features) is features and trunk.tap("res5") is None


@pytest.mark.parametrize("build", [BeitTrunk, build_xcit])
def test_sizes_that_make_no_transformer_are_refused(build):
    with pytest.raises(ConfigError, match="must be a multiple of NUM_HEADS, 3"):
        build(HIDDEN_DIM=16, NUM_HEADS=3)


def test_without_a_class_token_the_feature_is_the_mean_of_the_patches():
    keys = {"IMAGE_SIZE": 16, "PATCH_SIZE": 8, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 8, "MLP_DIM": 16}
    trunk = VisionTransformer(**keys, USE_CLASS_TOKEN=False).double()
    assert not any(name.endswith("cls_token") for name, _ in trunk.named_parameters())
    images = [torch.rand(3, 3, 16, 16, dtype=torch.float64)]
    (tokens,) = trunk(images, return_tokens=True)
    (features,) = trunk(images)
    assert tokens.shape == (3, 4, 8)
    assert torch.allclose(features, tokens.mean(dim=1), atol=1e-12)


def test_resnet_200_has_its_published_size():
    with torch.device("meta"):
        trunk = ResNet(DEPTH=200)
    num_convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in trunk.modules())
    assert num_convolutions == 1 + 3 * (3 + 24 + 36 + 3) + 4  # stem, blocks, and a projection in each stage
    assert sum(p.numel() for p in trunk.parameters()) == pytest.approx(62.62e6, rel=1e-3)  # timm's resnet200 without fc


HEAD = {"PARAMS": [["mlp", {"dims": [512, 2]}]], "BATCHNORM_EPS": 1e-5, "BATCHNORM_MOMENTUM": 0.1}
SMALL = {
    "convnext": {"DEPTH": [1, 1, 1, 1], "DIMS": [8, 8, 8, 16]},
    "swin_transformer": {"IMAGE_SIZE": 32, "EMBED_DIM": 8, "DEPTHS": [1, 1], "NUM_HEADS": [2, 2], "WINDOW_SIZE": 4},
    "convit": {
        "IMAGE_SIZE": 32,
        "PATCH_SIZE": 8,
        "NUM_LAYERS": 2,
        "NUM_HEADS": 4,
        "HIDDEN_DIM": 16,
        "MLP_DIM": 16,
        "N_GPSA_LAYERS": 1,
    },
}


@pytest.mark.parametrize(
    ("name", "options", "width", "sides", "taps"),
    [
        ("convnext", SMALL["convnext"], 16, (32, 48), {"lastCLS": (2, 16)}),
        ("swin_transformer", SMALL["swin_transformer"], 16, (32, 24), {"lastCLS": (2, 16)}),
        ("convit", SMALL["convit"], 16, (32, 32), {}),
        ("efficientnet", {}, 1280, (32, 48), {"conv_final": (2, 1280, 1, 1), "flatten": (2, 1280)}),
        ("mobilenetv3_tv", {"NAME": "mobilenetv3_small_100"}, 576, (32, 48), {"trunk": (2, 576, 1, 1)}),
        ("mobilenetv3_timm", {"TRUNK_ONLY": False}, 1280, (32, 48), {"flatten": (2, 1280), "trunk_pool": (2, 960)}),
        ("alexnet_deepcluster", {}, 9216, (224, 224), {"conv1": (2, 96, 55, 55), "conv5": (2, 256, 13, 13)}),
        ("alexnet_colorization", {}, 9216, (227, 227), {"pool1": (2, 96, 27, 27), "flatten": (2, 9216)}),
    ],
)
@torch.no_grad()
def test_a_trunk_of_vissl_s_gives_its_feature_and_its_layers(name, options, width, sides, taps):
    trunk = TRUNKS.get(name).build(**options).eval()
    assert trunk.feature_dim == width
    assert [rows.shape for rows in trunk([torch.zeros(2, 3, side, side) for side in sides])] == [(2, width)] * 2
    wanted = Taps(trunk, [[layer, ["Identity", []]] for layer in taps], should_flatten=False)
    assert [rows.shape for rows in wanted(trunk([torch.zeros(2, 3, sides[0], sides[0])]))] == [*taps.values()]


_POOL = "3 /2 pool"
_LRN = "5 0.0001 0.75 1 norm"
# Caffe's AlexNet has groups in the second, fourth and fifth convolution; channels, side, stride, padding, groups.
_GROUPS_OF_TWO = ["96-256 5 /1 +2 *2", "256-384 3 /1 +1 *1", "384-384 3 /1 +1 *2", "384-256 3 /1 +1 *2"]
_ONE_GROUP = ["96-256 5 /1 +2 *1", "256-384 3 /1 +1 *1", "384-384 3 /1 +1 *1", "384-256 3 /1 +1 *1"]
_NARROW = ["64-192 5 /1 +2 *1", "192-384 3 /1 +1 *1", "384-256 3 /1 +1 *1", "256-256 3 /1 +1 *1"]


@pytest.mark.parametrize(
    ("name", "convs", "normed", "ends"),
    [
        ("bvlc", ["3-96 11 /4 +0 *1", *_GROUPS_OF_TWO], "", [f"{_LRN} {_POOL}", f"{_LRN} {_POOL}"]),
        ("jigsaw", ["3-96 11 /2 +0 *1", *_GROUPS_OF_TWO], "345", [f"{_POOL} {_LRN}", f"{_POOL} {_LRN}"]),
        ("colorization", ["1-96 11 /4 +0 *1", *_GROUPS_OF_TWO], "12345", [_POOL, _POOL]),
        ("deepcluster", ["2-96 11 /4 +2 *1", *_ONE_GROUP], "12345", [_POOL, _POOL]),
        ("rotnet", ["3-64 11 /4 +2 *1", *_NARROW], "12345", [_POOL, _POOL]),
    ],
)
def test_the_layers_of_alexnets_are_those_of_vissl(name: str, convs: list[str], normed: str, ends: list[str]) -> None:
    """vissl 09270ed vissl/models/trunks/alexnet_*.py."""

    def layer(module: nn.Module) -> str:
        if isinstance(module, nn.Conv2d):
            (side, _), (stride, _), (padding, _) = module.kernel_size, module.stride, module.padding
            return f"{module.in_channels}-{module.out_channels} {side} /{stride} +{padding} *{module.groups}"
        if isinstance(module, nn.MaxPool2d):
            return f"{module.kernel_size} /{module.stride} pool"
        if isinstance(module, nn.LocalResponseNorm):
            return f"{module.size} {module.alpha} {module.beta} {module.k:g} norm"
        return f"{module.num_features} bn" if isinstance(module, nn.BatchNorm2d) else type(module).__name__

    with torch.device("meta"):
        trunk = TRUNKS.get(f"alexnet_{name}").build()
    layers = [layer(module) for module in trunk.modules() if not list(module.children())]
    sight = {"colorization": ["_Lightness"], "deepcluster": ["_Sobel"]}.get(name, [])
    wanted = list(sight)
    for number, (conv, end) in enumerate(zip(convs, [*ends, "", "", _POOL], strict=True), 1):
        width = conv.split()[0].split("-")[1]
        wanted += [conv, *([f"{width} bn"] if str(number) in normed else []), "ReLU", *([end] if end else [])]
    assert " ".join(layers) == " ".join([*wanted, "Flatten"])


def test_alexnets_see_lightness_and_slopes() -> None:
    """Lightness is the first channel of three; slopes are Sobel's, across and down, of the mean color."""
    image = torch.zeros(1, 3, 5, 5, dtype=torch.float64)
    image[..., :, 3:] = 3.0  # a step across
    image[:, 0] += 1.0
    lightness, slopes = (
        next(module for module in TRUNKS.get(f"alexnet_{name}").build().modules() if type(module).__name__ == kind)
        for name, kind in (("colorization", "_Lightness"), ("deepcluster", "_Sobel"))
    )
    assert torch.equal(lightness(image), image[:, :1])
    across, down = slopes(image)[0]
    torch.testing.assert_close(across[2, 1:4], torch.tensor([0.0, -12.0, -12.0]).double())
    torch.testing.assert_close(down[2, 1:4], torch.zeros(3).double())
    torch.testing.assert_close(slopes(image.transpose(2, 3))[0, 1], across.T)


@torch.no_grad()
def test_selective_kernels_mix_two_convolutions():
    trunk = TRUNKS.get("resnet_sk").build(DEPTH=50, WIDTH_MULTIPLIER=1)
    kernel = next(module for module in trunk.modules() if type(module).__name__ == "_SelectiveKernel").eval()
    x = torch.rand(2, 64, 8, 8)
    kernel.mixing_conv[-1].weight.zero_()  # equal shares
    both = kernel.main_conv(x)
    torch.testing.assert_close(kernel(x), (both[:, :64] + both[:, 64:]) / 2)


_NARROW, _MIXED = "7x7-64/2 bn-64 ReLU", "3x3-32/2 bn-32 ReLU 3x3-32 bn-32 ReLU 3x3-64 bn-64 ReLU"


@pytest.mark.parametrize(
    ("ratio", "stem", "projection", "middle"),
    [
        (0, _NARROW, "1x1-512/2 bn-512 Identity", "3x3-128/2 bn-128 ReLU"),
        (
            0.0625,
            _MIXED,
            "ZeroPad2d AvgPool2d 1x1-512 bn-512 Identity",
            "3x3-256/2 bn-256 ReLU 1x1-32 bn-32 ReLU 1x1-256",
        ),
    ],
)
def test_selective_kernels_have_the_published_layers(ratio: float, stem: str, projection: str, middle: str) -> None:
    """https://github.com/google-research/simclr, tf2/resnet.py."""

    def layers(module: nn.Module) -> str:
        return " ".join(map(layer, (leaf for leaf in module.modules() if not list(leaf.children()))))

    def layer(leaf: nn.Module) -> str:
        if isinstance(leaf, nn.Conv2d):
            side, stride = leaf.kernel_size[0], leaf.stride[0]
            assert leaf.padding[0] == side // 2 and leaf.bias is None
            return f"{side}x{side}-{leaf.out_channels}" + (f"/{stride}" if stride > 1 else "")
        return f"bn-{leaf.num_features}" if isinstance(leaf, nn.BatchNorm2d) else type(leaf).__name__

    with torch.device("meta"):
        trunk = TRUNKS.get("resnet_sk").build(DEPTH=50, WIDTH_MULTIPLIER=1, SK_RATIO=ratio)
    blocks = [module for module in trunk.modules() if type(module).__name__ == "_Bottleneck"]
    assert [type(block.projection).__name__ for block in blocks].count("Identity") == 12
    assert layers(blocks[3].projection) == projection  # the first of the second stage
    assert layers(blocks[3].net) == f"1x1-128 bn-128 ReLU {middle} 1x1-512 bn-512 Identity"
    text = layers(trunk)
    assert text.startswith(f"{stem} MaxPool2d ") and text.endswith(" AdaptiveAvgPool2d Flatten")


@pytest.mark.parametrize(
    ("depth", "width", "ratio", "millions"),
    [(50, 1, 0, 24), (50, 1, 0.0625, 35), (50, 2, 0.0625, 140), (152, 3, 0.0625, 795)],
)
def test_selective_kernels_have_the_published_numbers_of_parameters(depth, width, ratio, millions):
    """https://arxiv.org/abs/2006.10029, table 1, without the classifier."""
    with torch.device("meta"):
        trunk = TRUNKS.get("resnet_sk").build(DEPTH=depth, WIDTH_MULTIPLIER=width, SK_RATIO=ratio)
    assert sum(param.numel() for param in trunk.parameters()) / 1e6 == pytest.approx(millions, abs=0.5)


def test_sizes_that_make_no_network_are_refused():
    key = "MODEL__TRUNK__"
    said = complaints(**{f"{key}NAME": "swin_transformer", f"{key}SWIN_TRANSFORMER__NUM_HEADS": [5, 6, 12, 24]})
    assert any("divide the widths of the stages" in text for text in said)
    said = complaints(**{f"{key}NAME": "convnext", f"{key}CONVNEXT__DIMS": [8, 8]})
    assert any("must have four entries, as DIMS" in text for text in said)
    said = complaints(**{f"{key}NAME": "convit", f"{key}VISION_TRANSFORMERS__NUM_REGISTERS": 4})
    assert any("must be 0 for a convit" in text for text in said)


@torch.no_grad()
def test_a_trunk_sees_lightness_alone_or_the_colors_in_the_other_order():
    config = {"TRUNK": {"NAME": "resnet", "RESNETS": {"DEPTH": 18}}, "HEAD": HEAD}
    image = torch.rand(2, 3, 16, 16)
    plain, other = (build_model(model_block({**config, "INPUT_TYPE": kind})).eval() for kind in ("rgb", "bgr"))
    assert torch.equal(plain([image], features_only=True)[0], other([image.flip(1)], features_only=True)[0])
    gray = build_model(model_block({**config, "INPUT_TYPE": "lab"})).eval()
    other_colors = torch.cat((image[:, :1], torch.rand(2, 2, 16, 16)), dim=1)
    (seen,), (again,) = (gray([x], features_only=True) for x in (image, other_colors))
    assert torch.equal(seen, again) and gray.trunk.stem[0].in_channels == 1


@pytest.mark.parametrize(
    ("rgb", "lab"), [((255, 255, 255), (50, 0, 0)), ((0, 0, 0), (-50, 0, 0)), ((255, 0, 0), (3.333, 80, 67))]
)
def test_lab_is_opencv_s(rgb, lab):
    """OpenCV's documented 8-bit values of white, black and red: (255, 128, 128), (0, 128, 128), (136, 208, 195)."""
    (pixel,) = ImgPil2LabTensor()(Image.new("RGB", (1, 1), rgb)).flatten(1).T
    torch.testing.assert_close(pixel, torch.tensor(lab, dtype=torch.float32), atol=1e-3, rtol=0)
