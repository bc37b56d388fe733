"""Transformers of Hugging Face and torch hub come in and go out, and give what those libraries' own models give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from timm.layers import SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from vissl_zero.checkpoint.exchange import export
from vissl_zero.checkpoint.first_weights import Match, match
from vissl_zero.checkpoint.foreign_layouts import _to_timm, read_foreign
from vissl_zero.checkpoint.library_names import renamed
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.weights import open_weights
from vissl_zero.cli import main
from vissl_zero.errors import CheckpointError
from vissl_zero.evaluation.trunk import load_trunk
from vissl_zero.models.trunks.vision_transformer import TransformerTrunk, VisionTransformer

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}
SIZES |= {"layer_norm_eps": 1e-6}
OURS = {"IMAGE_SIZE": 16, "PATCH_SIZE": 4, "NUM_LAYERS": 2, "NUM_HEADS": 3, "HIDDEN_DIM": 12, "MLP_DIM": 48}
TIMM = {"img_size": 16, "patch_size": 4, "depth": 2, "num_heads": 3, "embed_dim": 12, "num_classes": 0}
TIMM |= {"dynamic_img_size": True}


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SIZES, intermediate_size=48), add_pooling_layer=False)


def mae() -> nn.Module:
    # Nothing is hidden: patches come in another order, which the class token does not see.
    return transformers.ViTMAEModel(transformers.ViTMAEConfig(**SIZES, intermediate_size=48, mask_ratio=0.0))


def mae_with_decoder() -> nn.Module:
    decoder = {f"decoder_{key}": SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTMAEConfig(**SIZES, **decoder, intermediate_size=48, mask_ratio=0.0)
    return transformers.ViTMAEForPreTraining(config)


def dinov2() -> nn.Module:
    return transformers.Dinov2Model(transformers.Dinov2Config(**SIZES))


def dinov2_with_registers() -> nn.Module:
    return transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**SIZES, num_register_tokens=2))


def gated_dinov2() -> nn.Module:
    return transformers.Dinov2Model(transformers.Dinov2Config(**SIZES, use_swiglu_ffn=True))


def ours_for(make: Callable[[], nn.Module]) -> TransformerTrunk:
    """A trunk of ours of the same sizes."""
    if make is gated_dinov2:
        hidden = 2 * ((int(12 * 4 * 2 / 3) + 7) // 8 * 8)  # as Dinov2SwiGLUFFN rounds it; gate and value
        net = TimmVisionTransformer(
            **TIMM, mlp_ratio=hidden / 12, mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, init_values=1.0
        )
        return TransformerTrunk(net)
    is_dinov2 = make in (dinov2, dinov2_with_registers)
    registers = 2 if make is dinov2_with_registers else 0
    options = {"LAYER_SCALE_INIT": 1.0 if is_dinov2 else None, "NUM_REGISTERS": registers, "USE_MASK_TOKEN": is_dinov2}
    return VisionTransformer(**OURS, QKV_BIAS=True, **options)


def randomized(model: nn.Module) -> nn.Module:
    """``model`` with random numbers everywhere, also where it begins with 0 or 1."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def their_features(model: nn.Module) -> Tensor:
    """Class token after the last norm."""
    trunk = model.vit if isinstance(model, transformers.ViTMAEForPreTraining) else model
    return trunk(images()).last_hidden_state[:, 0]


def take(path: Path, trunk: nn.Module) -> Match:
    """Load a file into a trunk as PARAMS_FILE does; all of the trunk must be there."""
    tensors = {f"trunk.{name}": tensor for name, tensor in trunk.state_dict().items()}
    found = match(read_foreign(path), {name: tensor.shape for name, tensor in tensors.items()})
    assert not found.lacks("trunk")
    with torch.no_grad():
        for entry in found.entries:
            tensors[entry.key].copy_(entry.read())
    trunk.eval()
    return found


HUGGING_FACE = [vit, mae, mae_with_decoder, dinov2, dinov2_with_registers, gated_dinov2]


@pytest.mark.parametrize("how", ["as saved", "as in memory"])
@pytest.mark.parametrize("make", HUGGING_FACE)
def test_hugging_faces_weights_give_their_outputs(tmp_path, make, how):
    theirs, ours = randomized(make()), ours_for(make)
    if how == "as saved":  # under the names of the Hub's files
        theirs.save_pretrained(tmp_path)
        assert any(".query." in name for name in load_file(tmp_path / "model.safetensors"))
    else:
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    found = take(tmp_path / "model.safetensors", ours)
    # What is left is no part of a trunk: MAE's decoder.
    assert all("decoder" in name or "mask_token" in name for name in found.unknown)
    with torch.no_grad():
        torch.testing.assert_close(ours([images()])[0], their_features(theirs), rtol=1e-5, atol=1e-5)


def exported(tmp_path: Path, ours: nn.Module, names: str, ending: str = "safetensors") -> Path:
    """A file of ours, exported with another library's names."""
    state = {f"trunk.{name}": tensor for name, tensor in randomized(ours).state_dict().items()}
    save_file(state, tmp_path / "ours.safetensors")
    with open_weights(tmp_path / "ours.safetensors") as weights:
        return export(weights, tmp_path / f"model.{ending}", "trunk", names).path


@pytest.mark.parametrize("make", [vit, mae, dinov2, dinov2_with_registers])
def test_our_weights_go_into_hugging_faces_models(tmp_path, make):
    ours, theirs = ours_for(make), make()
    exported(tmp_path, ours, "hugging_face")
    theirs.config.save_pretrained(tmp_path)
    options = {"add_pooling_layer": False} if make is vit else {}
    theirs, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True, **options)
    assert not any(info.values()), info
    with torch.no_grad():
        torch.testing.assert_close(ours([images()])[0], their_features(theirs.eval()), rtol=1e-5, atol=1e-5)


def test_a_gated_transformer_goes_both_ways(tmp_path):
    """Under DINOv2's own names (w12, w3) and under Hugging Face's (weights_in, weights_out)."""
    ours = ours_for(gated_dinov2)
    for names, expected in (
        ("dinov2", "blocks.1.mlp.w12.bias"),
        ("hugging_face", "encoder.layer.1.mlp.weights_in.bias"),
    ):
        path = exported(tmp_path, ours, names, "pt" if names == "dinov2" else "safetensors")
        again = ours_for(gated_dinov2)
        assert take(path, again).unknown == []
        assert expected in (torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path))
        with torch.no_grad():
            torch.testing.assert_close(ours([images()])[0], again([images()])[0], rtol=0, atol=1e-12)


def test_dinov2_with_registers_goes_out_as_timm_reads_it(tmp_path):
    """timm's own reader of torch hub's layout takes the file; the class token's position is in both or in neither."""
    ours = ours_for(dinov2_with_registers)
    state = torch.load(exported(tmp_path, ours, "dinov2", "pt"), weights_only=True)
    assert state["pos_embed"].shape == (1, 17, 12)
    assert state["mask_token"].shape == (1, 12)
    theirs = TimmVisionTransformer(**TIMM, init_values=1.0, reg_tokens=2, no_embed_class=True)
    theirs.load_state_dict(checkpoint_filter_fn(state, theirs))
    with torch.no_grad():
        expected = theirs.eval()(images())
        torch.testing.assert_close(ours([images()])[0], expected, rtol=1e-5, atol=1e-5)


# What torch hub's models and training checkpoints call a block's parts: facebookresearch/dino 45801c3
# vision_transformer.py and main_dino.py, dinov2 b8931f7 models/vision_transformer.py, mae be47fef models_mae.py,
# bytedance/ibot c24f870 models/vision_transformer.py. They are timm's but for these.
HUB = {
    "dino": lambda name: name,
    "dino's checkpoint": lambda name: f"module.backbone.{name}",
    "dinov2's checkpoint, in chunks": lambda name: "backbone." + name.replace("blocks.", "blocks.0.", 1),
    "mae": lambda name: name,
    "ibot": lambda name: name,
    "vissl's ibot": lambda name: name,
}
MASK_TOKENS = {"ibot": "masked_embed", "vissl's ibot": "patch_masking.masked_embed"}


@pytest.mark.parametrize("missing", ["register_tokens", "cls_token", "pos_embed"])
def test_a_class_token_keeps_its_values_without_registers_or_positions(missing):
    entries = [Entry.of(name, torch.ones(1, 2, 3)) for name in ("register_tokens", "cls_token", "pos_embed")]
    found = _to_timm([entry for entry in entries if entry.key != missing])
    assert len(found) == 2 and all(torch.equal(entry.read(), torch.ones(1, 2, 3)) for entry in found)


@pytest.mark.parametrize(
    ("layout", "token_shape"), [(layout, (1, 12)) for layout in HUB] + [(layout, (1, 1, 12)) for layout in MASK_TOKENS]
)
def test_torch_hubs_layouts_come_in_whole(tmp_path, layout, token_shape):
    theirs = randomized(TimmVisionTransformer(**TIMM))
    state = {HUB[layout](name): tensor for name, tensor in theirs.state_dict().items()}
    if layout == "mae":
        state |= {"mask_token": torch.ones(1, 1, 8), "decoder_embed.weight": torch.ones(8, 12)}
    token = torch.randn(token_shape)
    if layout in MASK_TOKENS:
        state |= {MASK_TOKENS[layout]: token}
    content = {"teacher": state} if "checkpoint" in layout else {"model": state} if layout == "mae" else state
    if layout == "vissl's ibot":
        content = {"classy_state_dict": {"base_model": {"model": {"trunk": state, "heads": {}}}}}
    torch.save(content, tmp_path / "hub.pth")
    ours = VisionTransformer(**OURS, QKV_BIAS=True, USE_MASK_TOKEN=layout in MASK_TOKENS)
    found = take(tmp_path / "hub.pth", ours)
    if layout in MASK_TOKENS:
        assert torch.equal(ours.embedding.unit.mask_token.detach(), token.view(1, 1, 12))
    assert sorted(found.unknown) == (["decoder_embed.weight", "decoder_mask_token"] if layout == "mae" else [])
    with torch.no_grad():
        torch.testing.assert_close(ours([images()])[0], theirs(images()), rtol=1e-5, atol=1e-5)


def test_what_no_other_model_has_is_refused_by_name(tmp_path):
    save_file({"trunk.stem.0.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    wanted = r"hugging_face has no names for conv1\.weight: it has them for plain"
    with open_weights(tmp_path / "other.safetensors") as weights, pytest.raises(CheckpointError, match=wanted):
        export(weights, tmp_path / "b.safetensors", "trunk", "hugging_face")


KEYS = {**OURS, "QKV_BIAS": True, "LAYER_SCALE_INIT": 1.0}
RECIPE = [
    "config=digits/mae",
    "config.DATA.TEST.DATA_SOURCES=[]",
    "config.MODEL.TRUNK.VISION_TRANSFORMERS.CLASSIFIER=token",
]
RECIPE += [f"config.MODEL.TRUNK.VISION_TRANSFORMERS.{key}={value}" for key, value in KEYS.items()]


def test_a_hugging_face_file_becomes_a_trunk_to_use(tmp_path, capsys):
    """``checkpoint import`` into a folder, then ``load_trunk``."""
    theirs = randomized(dinov2())
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    assert main(["checkpoint", "import", str(file), "--to", str(tmp_path / "run"), *RECIPE]) == 0
    with pytest.warns(UserWarning, match="has no final weights yet"):
        trunk = load_trunk(tmp_path / "run")
    with torch.no_grad():
        torch.testing.assert_close(trunk(images()), their_features(theirs), rtol=1e-5, atol=1e-5)
    capsys.readouterr()


def test_too_few_matches_are_an_error_with_counts(tmp_path, capsys):
    """A file that lacks a block."""
    state = randomized(dinov2()).state_dict()
    save_file({name: t for name, t in state.items() if ".layer.1." not in name}, tmp_path / "half.safetensors")
    target = tmp_path / "ours.safetensors"
    assert main(["checkpoint", "import", str(tmp_path / "half.safetensors"), "--to", str(target), *RECIPE]) == 1
    assert "20 of 21 tensors fit" in capsys.readouterr().out
    assert not target.exists()


def test_the_outermost_of_several_networks_in_a_file_is_read() -> None:
    names = ["a.teacher.storage_tokens", "z.storage_tokens", "z.blocks.0.ls1.gamma", "a.teacher.blocks.0.ls1.gamma"]
    found = [entry.key for entry in renamed([Entry.of(name, torch.ones(1)) for name in names])]
    assert found == ["a.teacher.storage_tokens", "reg_token", "blocks.0.gamma_1", "a.teacher.blocks.0.ls1.gamma"]
