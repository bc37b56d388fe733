"""Weights of other libraries are recognized without a hint, and give what the library's own model gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import vissl_zero
from vissl_zero.checkpoint.first_weights import match
from vissl_zero.checkpoint.foreign_layouts import read_foreign
from vissl_zero.cli import main
from vissl_zero.config.blocks.model_and_loss import Trunk
from vissl_zero.config.components.trunks import TRUNK_BLOCKS
from vissl_zero.errors import CheckpointError
from vissl_zero.resolve.components import trunk_of, trunk_options
from vissl_zero.weights.network_name import network_name
from vissl_zero.weights.reading import as_run, find

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
CONVNEXT = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}


def randomized(net: nn.Module) -> nn.Module:
    """``net`` with random numbers everywhere, also where it begins with 0 or 1; large enough to be seen."""
    torch.manual_seed(3)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    for name, buffer in net.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return net.eval()


def images(side: int) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(side))


def require_equal(path: Path | str, expected: Callable[[Tensor], Tensor], sides: tuple[int, ...]) -> str:
    """Load a trunk without a hint and compare its features; returns what it was taken for."""
    trunk = vissl_zero.load_trunk(path)
    with torch.no_grad():
        for side in sides:
            wanted = expected(images(side))
            assert wanted.abs().max() > 1e-3
            torch.testing.assert_close(trunk(images(side)), wanted, rtol=1e-5, atol=1e-5)
    return trunk.recognized


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_that_is_saved_by_the_places_of_its_children_is_read(tmp_path, name):
    """lightly's examples train ``nn.Sequential(*list(resnet.children())[:-1])`` as ``backbone``."""
    net = randomized(getattr(torchvision.models, name)())
    backbone = nn.Sequential(*list(net.children())[:-1])
    state = nn.ModuleDict({"backbone": backbone, "projection_head": nn.Linear(8, 8)}).state_dict()
    for file, content in (("a.pth", state), ("a.ckpt", {"state_dict": state, "epoch": 1})):
        torch.save(content, tmp_path / file)
        require_equal(tmp_path / file, lambda batch: backbone(batch).flatten(1), (32, 64))


HF = {
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(**SIZES, intermediate_size=100), add_pooling_layer=False
    ),
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**SIZES)),
    "gated dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**SIZES, use_swiglu_ffn=True)),
    "dinov2 with registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**SIZES, num_register_tokens=3)
    ),
    "dinov3": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**SIZES, intermediate_size=100, num_register_tokens=2)
    ),
    "gated dinov3": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(
            **SIZES, intermediate_size=100, num_register_tokens=2, use_gated_mlp=True, hidden_act="silu"
        )
    ),
    "convnext": lambda: transformers.ConvNextModel(transformers.ConvNextConfig(**CONVNEXT)),
    "convnextv2": lambda: transformers.ConvNextV2Model(transformers.ConvNextV2Config(**CONVNEXT)),
    "dinov3 convnext": lambda: transformers.DINOv3ConvNextModel(transformers.DINOv3ConvNextConfig(**CONVNEXT)),
}


@pytest.mark.parametrize("name", HF)
def test_a_folder_of_transformers_gives_its_outputs_at_three_sizes(tmp_path, name):
    theirs = randomized(HF[name]())
    theirs.save_pretrained(tmp_path)

    def expected(x: Tensor) -> Tensor:
        found = theirs(x, **({"interpolate_pos_encoding": True} if name == "vit" else {}))
        return found.pooler_output if "convnext" in name else found.last_hidden_state[:, 0]

    text = require_equal(tmp_path, expected, (32, 64, 96))
    assert ("ConvNeXt" if "convnext" in name else "2 blocks of 64, 4 heads, patches of 8") in text


VIT = transformers.ViTConfig(**SIZES, intermediate_size=100)
MAE = {"intermediate_size": 100, "decoder_hidden_size": 16, "decoder_num_attention_heads": 2}
MAE |= {"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32}
BESIDE_THE_TRUNK = {
    "classifier": (lambda: transformers.ViTForImageClassification(VIT), "classifier left out: classifier.bias, "),
    "pooler": (lambda: transformers.ViTModel(VIT), "pooler left out, as features are taken before it: pooler.dense"),
    "mask token": (HF["dinov2"], "mask token left out, as only methods that mask patches use it: mask_token"),
    "decoder": (
        lambda: transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**SIZES, **MAE)),
        "decoder left out, as it is no part of the trunk: decoder.",
    ),
}


@pytest.mark.parametrize("name", BESIDE_THE_TRUNK)
def test_what_is_beside_the_trunk_is_left_out_with_a_reason(tmp_path, name):
    build, wanted = BESIDE_THE_TRUNK[name]
    build().save_pretrained(tmp_path)
    trunk = vissl_zero.load_trunk(tmp_path)
    shapes = {f"trunk.{key}": tensor.shape for key, tensor in trunk.trunk.state_dict().items()}
    (sentence,) = match(read_foreign(tmp_path), shapes).sentences()
    assert sentence.startswith(wanted)


@pytest.mark.parametrize("name", ["vit", "dinov3", "convnext", "resnet"])
def test_a_run_has_the_name_of_the_network_that_it_begins_with(tmp_path, name):
    """It is built from the class of another one, whose name it must not have."""
    if name == "resnet":
        torch.save(torchvision.models.resnext50_32x4d().state_dict(), tmp_path / "a.pth")
    else:
        HF[name]().save_pretrained(tmp_path)
    found = find(str(tmp_path / "a.pth" if name == "resnet" else tmp_path)).network
    trunk = trunk_of(Trunk(), as_run(found)["MODEL"]["TRUNK"])
    if trunk.NAME not in TRUNK_BLOCKS:
        trunk = replace(trunk, PARAMS=trunk_options(trunk))  # as in config.resolved.yaml
    assert network_name(asdict(trunk)) == found.text
    assert "base" not in found.text and "tiny" not in found.text


def test_names_of_other_networks_have_their_sizes():
    sizes = {"HIDDEN_DIM": 32, "NUM_LAYERS": 2, "NUM_HEADS": 4, "PATCH_SIZE": 4, "NUM_REGISTERS": 2}
    text = "vision transformer: 2 blocks of 32, 4 heads, patches of 4, 2 registers"
    assert network_name({"NAME": "vision_transformer", "VISION_TRANSFORMERS": sizes}) == text
    changed = {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": {"model_args": {"img_size": 32}}}
    assert network_name(changed) == "timm/vit_tiny_patch16_224 with img_size 32"
    assert network_name({"NAME": "regnet", "REGNET": {"name": "regnet_y_400mf"}}) == "regnet_y_400mf"
    assert network_name({"NAME": "regnet", "REGNET": {"depth": 4, "w_0": 8}}) == "regnet with depth 4, w_0 8"
    assert network_name({"NAME": "my_trunk"}) == "my_trunk"


def test_shards_with_an_index_are_one_model(tmp_path):
    theirs = randomized(HF["dinov2"]())
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    require_equal(f"hf:{tmp_path}", lambda x: theirs(x).last_hidden_state[:, 0], (32,))
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"lists model-00002.*which is not in its folder"):
        vissl_zero.load_trunk(tmp_path)


def plain_transformer(**options: object) -> nn.Module:
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 0, "dynamic_img_size": True} | options
    return randomized(timm.create_model("vit_tiny_patch16_224", **options))


WRAPPED = {
    "plain": lambda state: state,
    "ddp": lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}},
    "compiled": lambda state: {"model": {f"_orig_mod.{k}": v for k, v in state.items()}},
    "average": lambda state: {"state_dict": {k: v * 0 for k, v in state.items()}, "state_dict_ema": state},
    "dinov2": lambda state: {
        "model": {f"student.backbone.{k}": v * 0 for k, v in state.items()}
        | {f"teacher.backbone.{k}": v for k, v in state.items()}
        | {"teacher.dino_head.last_layer.weight": torch.ones(3, 3)},
        "iteration": 7,
    },
    "dino": lambda state: {
        "student": {f"module.backbone.{k}": v * 0 for k, v in state.items()},
        "teacher": {f"backbone.{k}": v for k, v in state.items()},
        "epoch": 3,
    },
    "moco v3": lambda state: {
        "state_dict": {f"module.base_encoder.{k}": v * 0 for k, v in state.items()}
        | {f"module.momentum_encoder.{k}": v for k, v in state.items()}
    },
    "lightning": lambda state: {"state_dict": {f"net.encoder.{k}": v for k, v in state.items()}},
}


@pytest.mark.parametrize("how", WRAPPED)
def test_the_right_network_of_a_file_is_taken(tmp_path, how):
    net = plain_transformer()
    torch.save(WRAPPED[how](net.state_dict()), tmp_path / "a.pth")
    text = require_equal(tmp_path / "a.pth", net, (32,))
    assert text == "vision transformer: 2 blocks of 192, 3 heads, patches of 8, made for images of 32"


def resized_as_in_dinov2(net: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    """Give features of a ``plain_transformer`` with ``options``, its positions resized as in DINOv2's hub.

    Without registers by the factor of a tenth of a patch more, as in DINO's, with them antialiased to the size:
    facebookresearch/dinov2 b8931f7, ``interpolate_pos_encoding`` and hubconf's ``interpolate_offset``.
    """
    positions, registers = net.state_dict()["pos_embed"], options.get("reg_tokens", 0)

    def features(x: Tensor) -> Tensor:
        side = x.shape[-1] // 8
        maps = positions[:, positions.shape[1] - 16 :].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
        if side != 4 and not registers:
            maps = functional.interpolate(maps, scale_factor=((side + 0.1) / 4,) * 2, mode="bicubic")
        elif side != 4:
            maps = functional.interpolate(maps, size=(side, side), mode="bicubic", antialias=True)
        patches = maps.permute(0, 2, 3, 1).flatten(1, 2)
        whole = patches if registers else torch.cat([positions[:, :1], patches], dim=1)
        other = plain_transformer(img_size=x.shape[-1], no_embed_class=registers > 0, **options)
        other.load_state_dict({**net.state_dict(), "pos_embed": whole})
        return other(x)

    return features


@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2s_own_layout_is_resized_as_dinov2_does(tmp_path, registers):
    net = plain_transformer(init_values=1.0, reg_tokens=registers, no_embed_class=registers > 0)
    state = dict(net.state_dict())
    state["mask_token"] = torch.zeros(1, 192)
    if registers:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat([torch.zeros(1, 1, 192), state["pos_embed"]], dim=1)
    torch.save(state, tmp_path / "dinov2.pth")

    require_equal(
        tmp_path / "dinov2.pth", resized_as_in_dinov2(net, init_values=1.0, reg_tokens=registers), (32, 48, 16)
    )


def in_dinov3s_names(theirs: nn.Module) -> dict[str, Tensor]:
    """Write weights of ``HF["gated dinov3"]`` under facebookresearch/dinov3's names.

    One qkv bias whose keys are masked, periods, storage tokens.
    """
    state, own = {}, theirs.state_dict()
    rename = {"embeddings.cls_token": "cls_token", "embeddings.register_tokens": "storage_tokens"}
    rename |= {f"embeddings.patch_embeddings.{kind}": f"patch_embed.proj.{kind}" for kind in ("weight", "bias")}
    rename |= {f"norm.{kind}": f"norm.{kind}" for kind in ("weight", "bias")}
    state |= {new: own[old] for old, new in rename.items()}
    for block in range(2):
        old, new = f"model.layer.{block}.", f"blocks.{block}."
        state[f"{new}attn.qkv.weight"] = torch.cat([own[f"{old}attention.{p}_proj.weight"] for p in "qkv"])
        q, v = (own[f"{old}attention.{p}_proj.bias"] for p in "qv")
        state[f"{new}attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
        state[f"{new}attn.qkv.bias_mask"] = torch.ones(3 * len(q))
        for theirs_name, name in (("layer_scale1.lambda1", "ls1.gamma"), ("layer_scale2.lambda1", "ls2.gamma")):
            state[new + name] = own[old + theirs_name]
        layers = {"attention.o_proj": "attn.proj", "norm1": "norm1", "norm2": "norm2"}
        layers |= {"mlp.gate_proj": "mlp.w1", "mlp.up_proj": "mlp.w2", "mlp.down_proj": "mlp.w3"}
        for theirs_name, name in layers.items():
            state |= {f"{new}{name}.{k}": own[f"{old}{theirs_name}.{k}"] for k in ("weight", "bias")}
    state |= {"mask_token": torch.zeros(1, 64), "rope_embed.periods": torch.ones(4)}
    return state


def test_dinov3s_own_layout_is_read(tmp_path):
    theirs = randomized(HF["gated dinov3"]())
    state = in_dinov3s_names(theirs)
    torch.save(state, tmp_path / "dinov3.pth")
    with pytest.raises(AssertionError, match="not close"):  # 16 channels a head are no published model's: 64 are
        require_equal(tmp_path / "dinov3.pth", lambda x: theirs(x).last_hidden_state[:, 0], (32,))
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_attention_heads": 4}')
    require_equal(folder, lambda x: theirs(x).last_hidden_state[:, 0], (32, 48))


def without_classifier(net: nn.Module) -> nn.Module:
    """A torchvision classifier without its last linear layer."""
    name = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)][-1]
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, nn.Identity())
    return net


def library_model(name: str) -> tuple[nn.Module, Callable[[nn.Module], nn.Module]]:
    library, model = name.split("/")
    if library == "torchvision":
        return randomized(torchvision.models.get_model(model)), without_classifier
    net = randomized(timm.create_model(model))

    def bare(net: nn.Module) -> nn.Module:
        net.reset_classifier(0, **({"global_pool": "token"} if "dinov3" in model else {}))
        return net

    return net, bare


FAST = ("torchvision/resnet18", "torchvision/swin_t", "timm/convnextv2_atto", "timm/xcit_nano_12_p16_224")
SLOW = (
    *(
        f"torchvision/{name}"
        for name in ("convnext_tiny", "swin_v2_t", "efficientnet_b0", "vit_b_32", "regnet_y_400mf")
    ),
    *(
        f"torchvision/{name}"
        for name in ("regnet_x_400mf", "mobilenet_v3_small", "resnet34", "resnet50", "densenet121")
    ),
    *(f"torchvision/{name}" for name in ("resnext50_32x4d", "wide_resnet50_2", "shufflenet_v2_x0_5", "mnasnet0_5")),
    *(f"timm/{name}" for name in ("resnet18", "resnext50_32x4d", "resnet26d", "regnety_002", "efficientnet_b0")),
    *(f"timm/{name}" for name in ("convnext_atto", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224")),
    *(f"timm/{name}" for name in ("deit3_small_patch16_224", "vit_tiny_patch16_dinov3_qkvb", "mobilenetv3_small_100")),
    *(
        f"timm/{name}"
        for name in ("vit_base_patch32_clip_224", "beit_base_patch16_224", "vit_small_patch14_reg4_dinov2")
    ),
    *(f"timm/{name}" for name in ("xcit_tiny_12_p8_224", "swinv2_cr_tiny_ns_224", "ghostnet_050", "repvgg_a0")),
)
FIXED = ("vit", "swin", "xcit", "beit", "deit")  # of timm's and torchvision's own, one size each


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_file_of_timm_or_torchvision_gives_its_outputs(tmp_path, name):
    net, bare = library_model(name)
    torch.save(net.state_dict(), tmp_path / "a.pth")
    side = 518 if "dinov2" in name else 224
    sides = (side,) if any(part in name for part in FIXED) else (side, 128)
    require_equal(tmp_path / "a.pth", bare(net), sides)


def test_what_is_known_by_no_library_is_refused_with_a_way_out(tmp_path):
    torch.save({"layer.weight": torch.ones(2, 2)}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"No network that is known here has the 1 tensor .*TRUNK.NAME=timm/"):
        vissl_zero.load_trunk(tmp_path / "a.pth")
    net = plain_transformer(embed_dim=24, num_heads=3)
    torch.save(net.state_dict(), tmp_path / "b.pth")
    with pytest.raises(CheckpointError, match=r"width 24.*attention heads are not known.*as pytorch_model.bin or"):
        vissl_zero.load_trunk(tmp_path / "b.pth")
    (tmp_path / "own").mkdir()
    (tmp_path / "b.pth").rename(tmp_path / "own" / "pytorch_model.bin")
    (tmp_path / "own" / "config.json").write_text('{"num_attention_heads": 3}')
    vissl_zero.load_trunk(tmp_path / "own")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("timm:resnet18.a1_in1k", "hf download timm/resnet18.a1_in1k"),
        ("timm:resnet1", "timm has no such model. Did you mean"),
        ("hf:facebook/dinov2-small", "hf download facebook/dinov2-small"),
        ("hf:no repo", "neither a folder nor <owner>/<name>"),
        ("torchvision:resnet18", "curl -L --create-dirs -o .*resnet18-f37072fd.pth https://download.pytorch.org"),
        ("torchvision:resnet18.V3", "must be one of IMAGENET1K_V1"),
        ("torchhub:dinov2_vitb14_reg", "curl .*dinov2_vitb14_reg4_pretrain.pth https://dl.fbaipublicfiles.com/dinov2"),
        ("torchhub:dinov2_vitb", "must be one of dinov2_vits14"),
        ("/no/such/file.pth", "There is no"),
    ],
)
def test_what_is_not_on_this_machine_is_refused_with_the_command_that_brings_it(tmp_path, monkeypatch, name, wanted):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=wanted):
        vissl_zero.load_trunk(name)


def test_torch_hubs_cache_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    net = randomized(torchvision.models.resnet18())
    torch.save(net.state_dict(), file)
    assert require_equal("torchvision:resnet18", without_classifier(net), (64,)) == "ResNet-18"


def test_a_recipe_takes_its_trunk_from_the_file(tmp_path, capsys):
    torch.save(plain_transformer(img_size=64).state_dict(), tmp_path / "a.pth")
    words = ["config=digits/supervised", "config.MODEL.TRUNK={NAME: auto}", "--cfg", "job"]
    assert main([*words, f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={tmp_path / 'a.pth'}"]) == 0
    capsys.readouterr()


def test_a_file_takes_size_and_normalization_of_the_config_beside_it_and_says_so(tmp_path):
    net = plain_transformer(img_size=32, depth=1)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    told = {"input_size": [3, 48, 48], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.25, 0.5]}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "x", "pretrained_cfg": told}))
    words = "Transform(shorter side resized to 48, center crop 48 x 48, mean 0.5, 0.5, 0.5, std 0.5, 0.25, 0.5)"
    for path in (tmp_path, tmp_path / "model.safetensors"):
        transform = vissl_zero.load_trunk(path).transform
        assert repr(transform) == words and transform(Image.new("RGB", (60, 90))).shape == (3, 48, 48)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")  # whose config.json that is, nobody knows
    shown = repr(vissl_zero.load_trunk(tmp_path / "other.safetensors").transform)
    assert shown.startswith("Transform(shorter side resized to 32") and shown.endswith("(those of ImageNet))")


def test_a_classifier_that_is_left_out_is_no_riddle(tmp_path):
    torch.save(plain_transformer(depth=1, num_classes=9).state_dict(), tmp_path / "tiny.pth")
    foreign = read_foreign(tmp_path / "tiny.pth")
    foreign.entries.append(replace(foreign.entries[0], key="surprise"))
    classifier, rest = match(foreign, {}).sentences(most=100)
    assert classifier == "classifier left out: head.weight, head.bias"
    assert "\n  surprise" in rest and "\n  head." not in rest
