"""Models of the sweep: timm's, Hugging Face's, torchvision's, and odd ones written by hand. All tiny, all random."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import vissl_zero  # noqa: F401  (lets torchvision be imported beside a CPU torch)


@dataclass(frozen=True)
class Entry:
    """A model of the sweep.

    Attributes:
        build: draws it from torch's generator; the caller has set float64.
        loss: from the model and a generator, this rank's mean loss of one micro-batch.
        refused: by level, what the refusal must say; levels that are not named must be exact.
        refused_on: the numbers of ranks on which it is refused.
        refused_ways: the loops in which it is refused; empty: in all.
        num_steps: updates.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    refused: dict[int, str] = field(default_factory=dict)
    refused_on: tuple[int, ...] = (1, 2, 3)
    refused_ways: tuple[str, ...] = ()
    num_steps: int = 2

    def refusal(self, level: int, world_size: int, way: str) -> str | None:
        """What must be said, or None where the cell must be exact."""
        is_meant = world_size in self.refused_on and (not self.refused_ways or way in self.refused_ways)
        return self.refused.get(level) if is_meant else None


ZOO: dict[str, Entry] = {}


def outputs_loss(outputs: Any, generator: torch.Generator) -> Tensor:
    """Of every tensor that can be trained, the distance from noise."""
    found = [leaf for leaf in _leaves(outputs) if leaf.is_floating_point()]
    found = [leaf for leaf in found if leaf.requires_grad or not torch.is_grad_enabled()]
    return torch.stack([F.mse_loss(y, torch.randn(y.shape, generator=generator)) for y in found]).mean()


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _add(name: str, build: Callable[[], nn.Module], loss: Any, **facts: Any) -> None:
    assert name not in ZOO, name
    ZOO[name] = Entry(build, loss, **facts)


def _on(*shape: int) -> Callable[[nn.Module, torch.Generator], Tensor]:
    """The loss of a model of one tensor of noise."""

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        return outputs_loss(model(torch.randn(shape, generator=generator)), generator)

    return loss


# --- timm ------------------------------------------------------------------------------------------------------------

TIMM = {  # name: side of the image in pixels, and further arguments
    "test_byobnet": (32, {"img_size": 32}),
    "coat_tiny": (32, {"img_size": 32}),
    "test_convnext": (32, {}),
    "test_convnext3": (32, {}),
    "cs3darknet_focus_s": (32, {}),
    "cspnext_tiny": (32, {}),
    "dla46x_c": (32, {}),
    "dla46_c": (32, {}),
    "edgenext_xx_small": (32, {}),
    "efficientformerv2_s0": (32, {"img_size": 32}),
    "test_efficientnet": (32, {}),
    "test_efficientnet_gn": (32, {}),
    "efficientvit_b0": (32, {}),
    "efficientvit_m0": (32, {"img_size": 32}),
    "vit_tiny_patch16_dinov3_qkvb": (32, {"img_size": 32}),
    "fasternet_t0": (32, {}),
    "fastvit_t8": (32, {}),
    "ghostnet_050": (32, {}),
    "hardcorenas_b": (32, {}),
    "iformer_t": (32, {}),
    "inception_next_atto": (32, {}),
    "lcnetv2_small": (32, {}),
    "test_mambaout": (32, {}),
    "test_coatnet": (32, {"img_size": 32}),
    "test_maxvit": (32, {"img_size": 32}),
    "mobilenetv3_small_050": (32, {}),
    "lcnet_035": (32, {}),
    "mobilevit_xxs": (32, {"img_size": 32}),
    "mobilevitv2_050": (32, {"img_size": 32}),
    "test_nfnet": (32, {}),
    "pit_ti_224": (32, {"img_size": 32}),
    "pvt_v2_b0": (32, {}),
    "regnetx_002": (32, {}),
    "repghostnet_050": (32, {}),
    "repvit_m1": (32, {"img_size": 32}),
    "test_resnet": (32, {}),
    "rexnet_100": (32, {}),
    "starnet_s050": (32, {}),
    "starnet_s100": (32, {}),
    "swiftformer_xs": (32, {"img_size": 32}),
    "test_vit": (32, {"img_size": 32}),
    "test_vit2": (32, {"img_size": 32}),
    "test_vit_relpos": (32, {"img_size": 32}),
    "ese_vovnet19b_slim_dw": (32, {}),
    "xcit_nano_12_p8_224": (32, {"img_size": 32}),
}


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, **options)


for _name, (_side, _options) in TIMM.items():
    _add(f"timm.{_name}", functools.partial(_timm, _name, **_options), _on(4, 3, _side, _side))


# --- Hugging Face ----------------------------------------------------------------------------------------------------

SMALL = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 24),
    **{"n_inner": 24, "head_dim": 8, "d_kv": 8, "vocab_size": 31, "max_position_embeddings": 32, "n_positions": 32},
    **{"image_size": 32, "patch_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "decoder_start_token_id": 1,
}
# fmt: off
WORDS = (
    "albert", "apertus", "arcee", "aria_text", "bart", "beam", "bert", "bert-generation", "big_bird", "bigbird_pegasus",
    "biogpt", "bitnet", "blenderbot", "blenderbot-small", "bloom", "camembert", "clip_text_model", "cohere", "cohere2",
    "cohere2_moe", "convbert", "cwm", "data2vec-text", "deberta", "deberta-v2", "diffllama", "distilbert", "doge",
    "dpr", "electra", "ernie", "ernie4_5", "esmc", "eurobert", "exaone4", "falcon_mamba", "flaubert", "flex_olmo",
    "fnet", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_neox_japanese", "granite", "granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "gte", "helium", "higgs_audio_v2", "hrm_text", "hyperclovax", "ibert", "imagegpt", "internlm3",
    "iquestcoder", "jais2", "jetmoe", "jina_embeddings_v3", "layoutlm", "lfm2", "lfm3", "llama", "llama4_text",
    "longt5", "m2m_100", "mamba", "marian", "mbart", "megatron-bert", "minimax", "ministral3", "mistral", "mixtral",
    "mobilebert", "modernbert", "modernbert-decoder", "molmo2_text", "moshi", "mpnet", "mpt", "mt5",
    "muse_glimmer_text", "mvp", "nanochat", "nllb-moe", "nomic_bert", "nystromformer", "olmo", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "openai-gpt", "opt", "pegasus", "pegasus_x", "persimmon", "phi", "phi3", "phimoe", "plbart",
    "qwen2", "qwen3", "qwen3_vl_text", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roformer",
    "rwkv", "sam3_lite_text_text_model", "seed_oss", "smollm3", "splinter", "squeezebert", "stablelm", "starcoder2",
    "switch_transformers", "t5", "tapas", "tipsv2_text_model", "ultrabert", "umt5", "vaultgemma", "visual_bert", "xglm",
    "xlm", "xlm-roberta", "xlm-roberta-xl", "yoso",
)
PICTURES = (
    "aimv2_vision_model", "beit", "chinese_clip_vision_model", "clip_vision_model", "data2vec-vision", "deit", "dinov2",
    "dinov2_with_registers", "dinov3_vit", "dpt", "idefics3_vision", "ijepa", "internvl_vision", "mlcd",
    "mlcd_vision_model", "pixio", "pixtral", "qianfan_ocr_vision", "sam3_vit_model", "sapiens2", "siglip_vision_model",
    "smolvlm_vision", "tipsv2_vision_model", "vit", "vit_mae", "vit_msn", "vitdet", "yolos",
)
# fmt: on
SOUNDS: tuple[str, ...] = ()
HEADS = {
    "AutoModelForCausalLM": (
        "gpt2",
        "llama",
        "qwen3",
        "mixtral",
        "mamba",
        "gemma2",
        "opt",
        "bloom",
        "gpt_neox",
        "olmoe",
    ),
    "AutoModelForMaskedLM": ("bert", "albert", "distilbert", "electra", "modernbert", "xlm-roberta", "mobilebert"),
    "AutoModelForSeq2SeqLM": ("t5", "bart", "mbart", "pegasus", "marian", "switch_transformers"),
    "AutoModelForSequenceClassification": ("bert", "gpt2", "roberta", "llama", "xlm", "electra", "albert"),
    "AutoModelForImageClassification": ("vit", "dinov2", "beit", "dinov2_with_registers", "vit_msn", "ijepa"),
}


def _hugging_face(kind: str, auto: str, **options: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config_class = transformers.CONFIG_MAPPING[kind]
    default = config_class()
    small = {key: value for key, value in SMALL.items() if isinstance(getattr(default, key, None), int)}
    # Loops over experts: the kernel that groups them takes no float64.
    config = config_class(**{**small, **options})
    # Some keep parameters in float32 whatever the default.
    return getattr(transformers, auto).from_config(config, experts_implementation="eager").double()


def _inputs(model: nn.Module, generator: torch.Generator, kind: str) -> dict[str, Tensor]:
    if kind == "pixels":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if kind == "audio":
        return {"input_values": torch.randn(2, 800, generator=generator)}
    inputs = {"input_ids": torch.randint(3, 30, (2, 6), generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, 30, (2, 5), generator=generator)
    return inputs


def _features_loss(kind: str) -> Callable[[nn.Module, torch.Generator], Tensor]:
    return lambda model, generator: outputs_loss(model(**_inputs(model, generator, kind)), generator)


def _task_loss(kind: str) -> Callable[[nn.Module, torch.Generator], Tensor]:
    """The loss that the model computes itself from labels."""

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        inputs = _inputs(model, generator, kind)
        logits = type(model).__name__.endswith(("Classification",))
        ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        labels = torch.randint(0, 2, (2,), generator=generator) if logits else ids
        return model(**inputs, labels=labels).loss

    return loss


OPTIONS = {
    # They change to it by themselves in the first forward pass, and draw weights meanwhile.
    **{key: {"attention_type": "original_full"} for key in ("big_bird", "bigbird_pegasus")},
    # They drop other layers on each rank, which level 3 refuses; odd.layer_drop has that.
    **{key: {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0} for key in ("m2m_100", "nllb-moe")},
}
# Its routers convert themselves to float32 in the first forward pass, which changes nothing in a model in float32.
CONVERTED = {
    "switch_transformers": {
        0: "was replaced after sharding began",
        **dict.fromkeys((1, 2), "was given torch.float32"),
        3: "is converted from torch.float64 to torch.float32",
    }
}
# Without one they take a single text at a time.
PADDING = {key: {"pad_token_id": 0} for key in ("gpt2", "llama")}
for _kind, _names in (("ids", WORDS), ("pixels", PICTURES), ("audio", SOUNDS)):
    for _name in _names:
        _build = functools.partial(_hugging_face, _name, "AutoModel", **OPTIONS.get(_name, {}))
        _add(f"hf.{_name}", _build, _features_loss(_kind), refused=CONVERTED.get(_name, {}))
for _auto, _names in HEADS.items():
    for _name in _names:
        _data = "pixels" if "Image" in _auto else "ids"
        _options = PADDING.get(_name, {}) if "Sequence" in _auto else {}
        _build = functools.partial(_hugging_face, _name, _auto, **_options)
        _add(f"hf.{_name}.{_auto[12:]}", _build, _task_loss(_data), refused=CONVERTED.get(_name, {}))


# --- torchvision -----------------------------------------------------------------------------------------------------


def _torchvision(name: str, **options: Any) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)(num_classes=5, **options)


def _resnet(block: str, **options: Any) -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), [1, 1, 1, 1], num_classes=5, **options)


def _vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 3, 2, 16, 24, num_classes=5)


def _swin(version: str) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    block = {"SwinTransformer": swin.SwinTransformerBlock, "SwinTransformerV2": swin.SwinTransformerBlockV2}[version]
    merge = swin.PatchMerging if version == "SwinTransformer" else swin.PatchMergingV2
    sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    # The second version has float32 tables in a float64 model, which plain torch refuses.
    return swin.SwinTransformer(**sizes, num_classes=5, block=block, downsample_layer=merge).double()


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(4, (2, 2, 2, 2), 8, num_classes=5)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], num_classes=5)


def _video() -> nn.Module:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    return VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=5)


def _segmentation(kind: str) -> nn.Module:
    from torchvision.models import _utils, segmentation

    backbone = _utils.IntermediateLayerGetter(_torchvision("squeezenet1_1").features, {"7": "aux", "12": "out"})
    if kind == "fcn":
        fcn = segmentation.fcn
        return fcn.FCN(backbone, fcn.FCNHead(512, 5), fcn.FCNHead(256, 5))
    return segmentation.DeepLabV3(backbone, segmentation.deeplabv3.DeepLabHead(512, 5))


def _feature_extractor() -> nn.Module:
    from torchvision.models.feature_extraction import create_feature_extractor

    return create_feature_extractor(_resnet("BasicBlock"), ["layer1", "layer3"])


for _name, _side, _options in (
    ("squeezenet1_1", 64, {}),
    ("mobilenet_v2", 32, {}),
    ("mobilenet_v3_small", 32, {}),
    ("shufflenet_v2_x0_5", 32, {}),
    ("mnasnet0_5", 32, {}),
    ("efficientnet_b0", 32, {}),
    ("regnet_x_400mf", 32, {}),
    ("regnet_y_400mf", 32, {}),
    ("googlenet", 64, {"aux_logits": False, "init_weights": False}),
):
    _add(f"torchvision.{_name}", functools.partial(_torchvision, _name, **_options), _on(4, 3, _side, _side))
_add("torchvision.resnet_basic", functools.partial(_resnet, "BasicBlock"), _on(4, 3, 32, 32))
_add("torchvision.resnext", functools.partial(_resnet, "Bottleneck", groups=2, width_per_group=8), _on(4, 3, 32, 32))
_add("torchvision.vit", _vision_transformer, _on(4, 3, 32, 32))
_add("torchvision.swin", functools.partial(_swin, "SwinTransformer"), _on(4, 3, 32, 32))
_add("torchvision.swin_v2", functools.partial(_swin, "SwinTransformerV2"), _on(4, 3, 32, 32))
_add("torchvision.densenet", _densenet, _on(4, 3, 32, 32))
_add("torchvision.convnext", _convnext, _on(4, 3, 32, 32))
_add("torchvision.fcn", functools.partial(_segmentation, "fcn"), _on(4, 3, 64, 64))
_add("torchvision.deeplab", functools.partial(_segmentation, "deeplab"), _on(4, 3, 64, 64))
_add("torchvision.feature_extractor", _feature_extractor, _on(4, 3, 32, 32))


# --- written by hand -------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Parts by name, and a forward pass that uses them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def linears(number: int, size: int = 6) -> list[nn.Module]:
    """Square layers."""
    return [nn.Linear(size, size) for _ in range(number)]


def odd(*shape: int, loss: Any = None, **facts: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a model; its input is noise of ``shape``."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        _add(f"odd.{build.__name__}", build, loss or _on(*(shape or (4, 6))), num_steps=3, **facts)
        return build

    return register


def _through(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = x + torch.tanh(block(x))
    return x


@odd()
def blocks() -> nn.Module:
    return Model(_through, blocks=nn.ModuleList(linears(4)))


@odd()
def lists_of_lists_of_lists() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for stage in self.stages:
            for group in stage:
                for layer in group:
                    x = torch.tanh(layer(x))
        return x

    stages = [nn.ModuleList([nn.ModuleList(linears(2)) for _ in range(2)]) for _ in range(2)]
    return Model(run, stages=nn.ModuleList(stages))


@odd()
def sequential_of_sequentials() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])


@odd()
def dict_of_lists() -> nn.Module:
    def run(self: Any, x: Tensor) -> dict[str, Tensor]:
        return {name: self.parts[name][1](torch.tanh(self.parts[name][0](x))) for name in self.parts}

    return Model(run, parts=nn.ModuleDict({name: nn.ModuleList(linears(2)) for name in ("a", "weight", "c")}))


@odd()
def tied_layers() -> nn.Module:
    layers = linears(3)
    layers[2].weight = layers[0].weight
    return Model(_through, blocks=nn.ModuleList(layers))


@odd()
def one_block_many_times() -> nn.Module:
    block = nn.Linear(6, 6)
    return Model(_through, blocks=nn.ModuleList([block, nn.Linear(6, 6), block, block]))


@odd()
def tied_to_the_root() -> nn.Module:
    model = Model(lambda self, x: F.linear(_through(self, x), self.head), blocks=nn.ModuleList(linears(3)))
    model.head = model.blocks[1].weight
    return model


@odd(
    loss=lambda model, g: F.cross_entropy(
        model(torch.randint(0, 9, (4, 5), generator=g)).flatten(0, 1), torch.randint(0, 9, (20,), generator=g)
    )
)
def tied_embedding() -> nn.Module:
    def run(self: Any, tokens: Tensor) -> Tensor:
        return F.linear(_through(self, self.words(tokens)), self.words.weight)

    return Model(run, words=nn.Embedding(9, 6, padding_idx=0), blocks=nn.ModuleList(linears(2)))


@odd()
def adapters_over_a_base_in_half_precision() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        features = x.bfloat16()  # of the input alone: gradients in half precision depend on how the loss is scaled
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            features = torch.tanh(base(features))
            x = torch.tanh(features.to(x.dtype) + up(down(x)))
        return x

    base = nn.ModuleList(linears(3)).bfloat16().requires_grad_(False)
    down, up = ([nn.Linear(*sizes, bias=False) for _ in range(3)] for sizes in ((6, 2), (2, 6)))
    return Model(run, base=base, down=nn.ModuleList(down), up=nn.ModuleList(up))


@odd()
def frozen_trunk() -> nn.Module:
    model = Model(lambda self, x: self.head(_through(self, x)), blocks=nn.ModuleList(linears(3)), head=nn.Linear(6, 3))
    model.blocks.requires_grad_(False)
    return model


@odd()
def frozen_bias_of_every_block() -> nn.Module:
    model = blocks()
    for block in model.blocks:
        block.bias.requires_grad_(False)
    return model


class LowRank(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@odd()
def low_rank_adapters() -> nn.Module:
    return Model(_through, blocks=nn.ModuleList(LowRank() for _ in range(3)))


@odd()
def unused_block_and_head() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[2](self.blocks[0](x)))

    return Model(run, blocks=nn.ModuleList(linears(3)), unused=nn.Linear(3, 3))


SCALAR = "The gradient of a scalar, or of batch norm in half precision, was read"


@odd(refused={3: SCALAR}, refused_ways=("sgd_kept_gradients",))
def scalars_and_empty_parameters() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        return torch.cat([_through(self, x) * self.scale + self.shift, self.nothing])

    model = Model(run, blocks=nn.ModuleList(linears(2)), scale=nn.Parameter(torch.tensor(1.5)))
    model.shift, model.nothing = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.empty(0, 6))
    return model


@odd()
def parameters_of_the_root_only() -> nn.Module:
    return Model(
        lambda self, x: torch.tanh(x @ self.a) @ self.b,
        a=nn.Parameter(torch.randn(6, 7)),
        b=nn.Parameter(torch.randn(7, 2)),
    )


@odd()
def parameter_lists_and_dicts() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.named["scale"]

    weights = nn.ParameterList([torch.randn(6, 6) / 3 for _ in range(3)])
    return Model(run, weights=weights, named=nn.ParameterDict({"scale": torch.ones(6)}))


@odd(2, 3, 8, 8)
def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return model.to(memory_format=torch.channels_last)


@odd(3, 5, 9)
def transposed_and_one_dimensional_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(5, 4, 3), nn.GELU(), nn.ConvTranspose1d(4, 2, 3))


@odd()
def non_contiguous_parameter() -> nn.Module:
    return Model(
        lambda self, x: _through(self, x @ self.mix),
        blocks=nn.ModuleList(linears(2)),
        mix=nn.Parameter(torch.randn(6, 6).T),
    )


@dataclasses.dataclass
class Output:
    """What some models return."""

    logits: Tensor
    hidden: list[Tensor]


@odd(
    loss=lambda model, g: (lambda out: outputs_loss([out.logits, *out.hidden], g))(
        model(torch.randn(4, 6, generator=g))
    )
)
def dataclass_outputs() -> nn.Module:
    def run(self: Any, x: Tensor) -> Output:
        hidden = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            hidden.append(x)
        return Output(self.head(x), hidden)

    return Model(run, blocks=nn.ModuleList(linears(3)), head=nn.Linear(6, 2))


class InDataclasses(nn.Module):
    """A block with a dataclass in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, given: Output) -> Output:
        y = torch.tanh(self.layer(given.logits))
        return Output(y, [*given.hidden, y * 2])


@odd(
    loss=lambda model, g: (lambda out: outputs_loss([out.logits, *out.hidden], g))(
        model(torch.randn(4, 6, generator=g))
    )
)
def dataclasses_between_blocks() -> nn.Module:
    def run(self: Any, x: Tensor) -> Output:
        out = Output(x, [])
        for block in self.blocks:
            out = block(out)
        return out

    return Model(run, blocks=nn.ModuleList(InDataclasses() for _ in range(3)))


@odd()
def checkpointed_blocks() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, torch.tanh(x), use_reentrant=False)
        return x

    return Model(run, blocks=nn.ModuleList(linears(3)))


REENTRANT = "use_reentrant=True"


@odd(refused={3: REENTRANT})
def checkpointed_reentrantly() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, torch.tanh(x), use_reentrant=True)
        return x

    return Model(run, blocks=nn.ModuleList(linears(3)))


class Experts(nn.Module):
    """The best of four, by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.ModuleDict({str(i): nn.Linear(6, 6) for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mask = chosen == index
            y[mask] = self.experts[str(index)](x[mask]) * weight[mask][:, None]
        return x + y


@odd()
def experts_in_blocks() -> nn.Module:
    return Model(_through, blocks=nn.ModuleList(Experts() for _ in range(2)))


class DropsLayers(nn.Module):
    """Skips a block at random, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(linears(4)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.5:
                x = x + torch.tanh(block(x))
        return self.head(x * x)


@odd(refused={3: "Ranks run different units"}, refused_on=(2, 3))
def layer_drop() -> nn.Module:
    return DropsLayers()


@odd()
def layer_drop_in_one_unit() -> nn.Module:
    model = DropsLayers()
    model.zero_units = lambda: []
    return model


@odd(4, 5, 6)
def dropout_everywhere() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True), 2)


@odd(4, 5, 6)
def attention_and_transformer() -> nn.Module:
    layer = nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
    return Model(
        lambda self, x: self.decoder(x, self.memory.expand(len(x), -1, -1)),
        decoder=nn.TransformerDecoder(layer, 2),
        memory=nn.Parameter(torch.randn(1, 3, 6)),
    )


@odd(3, 5, 6)
def recurrent() -> nn.Module:
    return Model(
        lambda self, x: self.head(self.rnn(x)[0]),
        rnn=nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True),
        head=nn.Linear(10, 3),
    )


@odd(3, 5, 6)
def gated_recurrent() -> nn.Module:
    return Model(
        lambda self, x: self.head(self.rnn(x)[0][:, -1]), rnn=nn.GRU(6, 5, batch_first=True), head=nn.Linear(5, 3)
    )


@odd(3, 5, 6)
def recurrent_cells() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 6)
        for step in x.unbind(1):
            h = self.cells[1](h, self.cells[0](step, h))
        return h

    return Model(run, cells=nn.ModuleList([nn.GRUCell(6, 6), nn.GRUCell(6, 6)]))


@odd()
def weight_norm() -> nn.Module:
    return Model(_through, blocks=nn.ModuleList(nn.utils.parametrizations.weight_norm(layer) for layer in linears(3)))


@odd()
def spectral_norm() -> nn.Module:
    return Model(_through, blocks=nn.ModuleList(nn.utils.parametrizations.spectral_norm(layer) for layer in linears(2)))


@odd()
def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Model(_through, blocks=nn.ModuleList(nn.utils.weight_norm(layer) for layer in linears(3)))


@odd()
def orthogonal() -> nn.Module:
    return Model(_through, blocks=nn.ModuleList(nn.utils.parametrizations.orthogonal(layer) for layer in linears(2)))


@odd()
def pruned() -> nn.Module:
    model = blocks()
    for block in model.blocks:
        prune.random_unstructured(block, "weight", 0.5)
    return model


@odd(8, 6)
def batch_norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False)
    )


@odd(3, 4, 6, 6)
def group_and_instance_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    )


@odd()
def lazy_layers() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(1, 6))
    return model


@odd()
def names_of_our_own() -> nn.Module:
    model = Model(
        lambda self, x: self.units(_through(self, x)), blocks=nn.ModuleList(linears(2)), units=nn.Linear(6, 2)
    )
    model.level, model.group, model.step, model.module = 3, "group", lambda: None, nn.Linear(2, 2)
    return model


@odd()
def blocks_by_forward() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block.forward(x))
        return x

    return Model(run, blocks=nn.ModuleList(linears(3)))


@odd(loss=lambda model, g: outputs_loss(model(torch.randn(4, 6, generator=g), scale=torch.ones(4, 1)), g))
def keywords_and_none() -> nn.Module:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(linears(2))

        def forward(self, x: Tensor, *, scale: Tensor | None = None, mask: Any = None) -> tuple[Tensor, None]:
            return _through(self, x) * scale, None

    return Keywords()


@odd(refused={3: "must not be compiled by torch.jit"})
def scripted_part() -> nn.Module:
    return Model(
        lambda self, x: self.gate(_through(self, x)),
        blocks=nn.ModuleList(linears(2)),
        gate=torch.jit.script(nn.Sequential(nn.Linear(6, 3), nn.ReLU())),
    )


@odd()
def forward_hooks() -> nn.Module:
    model = blocks()
    model.blocks[1].register_forward_hook(lambda module, inputs, output: output * 2)
    model.blocks[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return model


@odd()
def backward_hooks() -> nn.Module:
    model = blocks()
    model.blocks[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    return model


@odd(4, 5, 6)
def outputs_changed_in_place() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
            x.clamp_(max=2)
        return x

    return Model(run, blocks=nn.ModuleList(linears(3)))


@odd()
def loss_inside() -> nn.Module:
    return Model(lambda self, x: (_through(self, x) - x).square().mean(), blocks=nn.ModuleList(linears(3)))


@odd(
    loss=lambda model, g: (lambda out: outputs_loss(out, g) + 0.1 * sum(b.kept.abs().mean() for b in model.blocks))(
        model(torch.randn(4, 6, generator=g))
    )
)
def auxiliary_losses() -> nn.Module:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return torch.tanh(self.kept)

    return Model(_through, blocks=nn.ModuleList(Keeps(6, 6) for _ in range(3)))


@odd(
    loss=lambda model, g: (
        outputs_loss(model(torch.randn(4, 6, generator=g)), g)
        + 1e-3 * sum(p.square().sum() for p in model.parameters())
    ),
)
def penalty_on_weights() -> nn.Module:
    return blocks()


@odd(refused={3: SCALAR}, refused_ways=("sgd_kept_gradients",))
def two_towers() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        a, b = F.normalize(self.a(x), dim=-1), F.normalize(self.b(x.flip(0)), dim=-1)
        return a @ b.T * self.temperature.exp()

    tower = lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 4))  # noqa: E731
    return Model(run, a=tower(), b=tower(), temperature=nn.Parameter(torch.tensor(0.5)))


@odd()
def detached_branch() -> nn.Module:
    return Model(
        lambda self, x: (_through(self, x.detach()), self.probe(_through(self, x).detach())),
        blocks=nn.ModuleList(linears(2)),
        probe=nn.Linear(6, 2),
    )


@odd(4, 3, 6)
def vectorized_over_the_batch() -> nn.Module:
    return Model(
        lambda self, x: torch.vmap(lambda row: torch.tanh(self.b(self.a(row))))(x), a=nn.Linear(6, 6), b=nn.Linear(6, 6)
    )


@odd()
def custom_autograd() -> nn.Module:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clamp(-1, 1)

    return Model(lambda self, x: self.blocks[1](Straight.apply(self.blocks[0](x))), blocks=nn.ModuleList(linears(2)))


@odd()
def complex_numbers_inside() -> nn.Module:
    return Model(
        lambda self, x: torch.fft.irfft(torch.fft.rfft(_through(self, x)) * torch.view_as_complex(self.filter), n=6),
        blocks=nn.ModuleList(linears(2)),
        filter=nn.Parameter(torch.randn(4, 2)),
    )


@odd(refused=dict.fromkeys(range(4), "must have floating-point parameters"))
def complex_parameters() -> nn.Module:
    return Model(
        lambda self, x: self.real(torch.view_as_real(x.to(torch.complex128) @ self.mix)),
        mix=nn.Parameter(torch.randn(6, 6, dtype=torch.complex128)),
        real=nn.Linear(2, 2),
    )


@odd()
def buffers_of_all_kinds() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return _through(self, x - self.mean) * self.mask

    model = Model(run, blocks=nn.ModuleList(linears(2)))
    model.register_buffer("count", torch.tensor(0))
    model.register_buffer("mean", torch.zeros(6))
    model.register_buffer("mask", torch.ones(6) * 2, persistent=False)
    return model


@odd(2, 6)
def fewer_rows_than_ranks() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))


@odd()
def deeper_than_it_is_wide() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.Tanh())])


BASE = (
    "odd.blocks",
    "odd.low_rank_adapters",
    "odd.batch_norms",
    "odd.tied_embedding",
    "odd.dropout_everywhere",
    "odd.channels_last",
    "odd.scalars_and_empty_parameters",
    "odd.experts_in_blocks",
)
