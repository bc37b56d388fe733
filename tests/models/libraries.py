"""Models and loops of further libraries: diffusers, open_clip, peft, vit-pytorch and others. All tiny, all random."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero  # noqa: F401  (lets torchvision be imported beside a CPU torch)
from tests.models.zoo import SCALAR, Entry, outputs_loss

LIBRARIES: dict[str, Entry] = {}
Loss = Callable[[Any, torch.Generator], Tensor]


def library_of(name: str) -> str:
    """Return the module whose models an entry has: what stands before the first dot."""
    return name.partition(".")[0]


def _add(name: str, build: Callable[[], nn.Module], loss: Loss, **facts: Any) -> None:
    assert name not in LIBRARIES, name
    LIBRARIES[name] = Entry(build, loss, num_steps=3, **facts)


def _on(*shape: int, **options: Any) -> Loss:
    """Return the loss of a model of one tensor of noise."""
    return lambda model, g: outputs_loss(model(torch.randn(shape, generator=g), **options), g)


def _made(path: str, **options: Any) -> nn.Module:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(**options).double()


def _entry(path: str, loss: Loss, options: dict[str, Any], *, name: str = "", **facts: Any) -> None:
    """Add the class at ``path``, built with ``options``."""
    parts = path.split(".")
    title = name or ".".join([parts[0], *dict.fromkeys(parts[-2:] if parts[0] in _BY_FILE else parts[-1:])])
    _add(title, functools.partial(_made, path, **options), loss, **facts)


_BY_FILE = ("vit_pytorch",)  # libraries in which several files have a class of one name


# --- diffusers -------------------------------------------------------------------------------------------------------


def _denoised(*shape: int, labels: int = 0, **noise: tuple[int, ...]) -> Loss:
    def loss(model: Any, g: torch.Generator) -> Tensor:
        given: dict[str, Any] = {"timestep": torch.randint(0, 900, shape[:1], generator=g)}
        given |= {key: torch.randn(size, generator=g) for key, size in noise.items()}
        if labels:
            given["class_labels"] = torch.randint(0, labels, shape[:1], generator=g)
        return outputs_loss(model(torch.randn(shape, generator=g), **given)[0], g)

    return loss


def _prior(model: Any, g: torch.Generator) -> Tensor:
    a, b, c = (torch.randn(size, generator=g) for size in ((2, 8), (2, 8), (2, 5, 8)))
    return outputs_loss(model(a, torch.tensor([3, 500]), b, c)[0], g)


def _coded(model: Any, g: torch.Generator) -> Tensor:
    return outputs_loss(model(torch.randn(2, 3, 16, 16, generator=g))[0], g)


def _coded_by_methods(model: Any, g: torch.Generator) -> Tensor:
    """As trainers of latent diffusion do: two methods, and not ``forward``."""
    latents = model.encode(torch.randn(2, 3, 16, 16, generator=g)).latent_dist.mode()
    return outputs_loss(model.decode(latents).sample, g)


_STAGES = {"block_out_channels": (8, 8), "norm_num_groups": 2, "layers_per_block": 1, "sample_size": 8}
_BLOCKS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "patch_size": 2, "sample_size": 8}
_CODES = {
    "block_out_channels": (8, 8),
    "norm_num_groups": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_LATENT = {**_BLOCKS, "in_channels": 4, "out_channels": 4}
_entry(
    "diffusers.UNet2DModel",
    _denoised(2, 3, 8, 8),
    {
        **_STAGES,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
    },
)
_entry(
    "diffusers.UNet2DConditionModel",
    _denoised(2, 4, 8, 8, encoder_hidden_states=(2, 3, 8)),
    {
        **_STAGES,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
    },
)
_entry(
    "diffusers.DiTTransformer2DModel",
    _denoised(2, 4, 8, 8, labels=10),
    {**_BLOCKS, "in_channels": 4, "num_embeds_ada_norm": 10, "norm_num_groups": 1},
)
_entry(
    "diffusers.PixArtTransformer2DModel",
    _denoised(2, 4, 8, 8, encoder_hidden_states=(2, 3, 12)),
    {
        **_LATENT,
        "cross_attention_dim": 16,
        "caption_channels": 12,
        "num_embeds_ada_norm": 10,
        "use_additional_conditions": False,
        "norm_num_groups": 1,
    },
)
_entry(
    "diffusers.SD3Transformer2DModel",
    _denoised(2, 4, 8, 8, encoder_hidden_states=(2, 3, 12), pooled_projections=(2, 12)),
    {
        **_LATENT,
        "joint_attention_dim": 12,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 12,
        "pos_embed_max_size": 8,
    },
)
_entry(
    "diffusers.SanaTransformer2DModel",
    _denoised(2, 4, 8, 8, encoder_hidden_states=(2, 3, 12)),
    {
        **_LATENT,
        "patch_size": 1,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 12,
    },
)
_entry(
    "diffusers.PriorTransformer",
    _prior,
    {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "num_layers": 2,
        "embedding_dim": 8,
        "num_embeddings": 5,
        "additional_embeddings": 4,
    },
)
_entry("diffusers.AutoencoderKL", _coded, {**_CODES, "latent_channels": 4, "sample_size": 16})
_entry("diffusers.VQModel", _coded, {**_CODES, "latent_channels": 3, "num_vq_embeddings": 16})
_entry(
    "diffusers.AutoencoderTiny",
    _coded,
    {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
)
_entry(
    "diffusers.AutoencoderKL",
    _coded_by_methods,
    {**_CODES, "latent_channels": 4, "sample_size": 16},
    name="diffusers.AutoencoderKL_by_methods",
)


# --- open_clip -------------------------------------------------------------------------------------------------------

_TEXT = {"context_length": 6, "vocab_size": 31, "width": 16, "heads": 2, "layers": 2}
_VISION = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 32}


def _pairs(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32, generator=g), torch.randint(1, 30, (4, 6), generator=g)


def _contrasted(image: Tensor, text: Tensor, scale: Any) -> Tensor:
    logits = scale * image @ text.T
    return F.cross_entropy(logits, torch.arange(4)) + F.cross_entropy(logits.T, torch.arange(4))


def _clip_loss(model: Any, g: torch.Generator) -> Tensor:
    return _contrasted(*model(*_pairs(g))[:3])


def _clip_by_methods(model: Any, g: torch.Generator) -> Tensor:
    images, words = _pairs(g)
    return _contrasted(model.encode_image(images, normalize=True), model.encode_text(words, normalize=True), 10)


def _clip(cls: str, vision: dict[str, Any], **options: Any) -> nn.Module:
    return _made(f"open_clip.{cls}", embed_dim=8, vision_cfg=vision, text_cfg=_TEXT, **options)


for _name, _cls, _vision in (
    ("CLIP", "CLIP", {}),
    ("CLIP_resnet", "CLIP", {"layers": (1, 1, 1, 1)}),
    ("CLIP_patch_dropout", "CLIP", {"patch_dropout": 0.5}),
    ("CLIP_average", "CLIP", {"pool_type": "avg", "no_ln_pre": True, "ls_init_value": 0.1}),
    ("CLIP_attentional_pool", "CLIP", {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 2}),
    ("CustomTextCLIP", "CustomTextCLIP", {}),
):
    _add(f"open_clip.{_name}", functools.partial(_clip, _cls, {**_VISION, **_vision}), _clip_loss)
# It multiplies by its text projection outside of any layer.
_add("open_clip.CLIP_by_methods", functools.partial(_clip, "CLIP", _VISION), _clip_by_methods)
_add(
    "open_clip.CLIP_bias",
    functools.partial(_clip, "CLIP", _VISION, init_logit_bias=-10.0),
    _clip_loss,
)
# --- peft on timm ----------------------------------------------------------------------------------------------------


def _adapted(kind: str, **options: Any) -> nn.Module:
    """Build timm's smallest ViT, frozen, with adapters; only those and the head are trained."""
    import peft
    import timm

    base = timm.create_model("test_vit", num_classes=5, img_size=32)
    config = getattr(peft, kind)(modules_to_save=["head"], **options)
    model = peft.get_peft_model(base, config)
    for param in model.parameters():  # some start as zeros, and would not show what the base gets
        if param.requires_grad:
            nn.init.normal_(param, std=0.05)
    return model.double()


_LAYERS = ["qkv", "fc1"]
for _name, _kind, _options in (
    ("LoRA", "LoraConfig", {"r": 2}),
    ("LoRA_dropout_rank_stabilized", "LoraConfig", {"r": 2, "lora_dropout": 0.2, "use_rslora": True}),
    ("DoRA", "LoraConfig", {"r": 2, "use_dora": True}),
    ("AdaLoRA", "AdaLoraConfig", {"target_r": 1, "init_r": 2, "total_step": 10, "tinit": 0, "tfinal": 0}),
    ("IA3", "IA3Config", {"feedforward_modules": ["fc1"]}),
    ("LoHa", "LoHaConfig", {"r": 2}),
    ("LoKr", "LoKrConfig", {"r": 2}),
    ("OFT", "OFTConfig", {"r": 2, "oft_block_size": 0}),
    ("BOFT", "BOFTConfig", {"boft_block_size": 4}),
    ("VeRA", "VeraConfig", {"r": 2}),
    ("HRA", "HRAConfig", {"r": 2}),
):
    _targets = ["fc1"] if _name == "VeRA" else _LAYERS
    _add(f"peft.{_name}", functools.partial(_adapted, _kind, target_modules=_targets, **_options), _on(4, 3, 32, 32))


# --- vit-pytorch -----------------------------------------------------------------------------------------------------

_DEEP = {"dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24, "dim_head": 8}
_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, **_DEEP}
_IMAGE = _on(2, 3, 32, 32)
for _path, _options in (
    ("vit.ViT", {**_VIT, "dropout": 0.1, "emb_dropout": 0.1}),
    ("simple_vit.SimpleViT", _VIT),
    ("cait.CaiT", {**_VIT, "cls_depth": 2, "layer_dropout": 0.0}),
    ("cct.CCT", {"img_size": 32, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0,
                 "num_classes": 5, "positional_embedding": "learnable", "stochastic_depth_rate": 0.0}),
    ("cross_vit.CrossViT", {"image_size": 32, "num_classes": 5, "sm_dim": 8, "lg_dim": 16, "sm_patch_size": 8,
                            "sm_enc_heads": 2, "sm_enc_mlp_dim": 16, "sm_enc_dim_head": 4, "lg_patch_size": 16,
                            "lg_enc_depth": 2, "lg_enc_heads": 2, "lg_enc_mlp_dim": 16, "lg_enc_dim_head": 4,
                            "cross_attn_depth": 1, "cross_attn_heads": 2, "cross_attn_dim_head": 4, "depth": 2}),
    ("cvt.CvT", {"num_classes": 5, "s1_emb_dim": 8, "s2_emb_dim": 8, "s3_emb_dim": 16, "s3_heads": 2, "s2_heads": 1,
                 "s3_depth": 2, "s2_depth": 1}),
    ("deepvit.DeepViT", _VIT),
    ("look_vit.LookViT", {"dim": 16, "image_size": 32, "num_classes": 5, "depth": 2, "patch_size": 8, "heads": 2,
                          "dim_head": 8, "highres_patch_size": 4, "cross_attn_heads": 2, "cross_attn_dim_head": 8}),
    ("jumbo_vit.JumboViT", {**_VIT, "jumbo_cls_k": 2}),
    ("looped_vit.LoopedViT", {"num_classes": 5, "dim": 16, "image_size": 32, "patch_size": 8, "pre_loop_depth": 1,
                              "num_looped_blocks": 2, "post_loop_depth": 1, "loop_depth": 2, "heads": 2, "dim_head": 8,
                              "mlp_dim": 24}),
    ("max_vit.MaxViT", {"num_classes": 5, "dim": 8, "depth": (1, 1), "dim_head": 4, "dim_conv_stem": 8,
                        "window_size": 4, "mbconv_expansion_rate": 2}),
    ("mobile_vit.MobileViT", {"image_size": (64, 64), "dims": [16, 16, 16], "num_classes": 5,
                              "channels": [8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16], "depths": (1, 1, 2)}),
    ("nest.NesT", {"image_size": 32, "patch_size": 4, "num_classes": 5, "dim": 8, "heads": 2, "num_hierarchies": 2,
                   "block_repeats": (1, 2)}),
    ("normalized_vit.nViT", _VIT),
    ("parallel_vit.ViT", _VIT),
    ("pit.PiT", {**_VIT, "depth": (1, 1), "patch_size": 8}),
    ("regionvit.RegionViT", {"dim": (8, 8, 16, 16), "depth": (1, 1, 2, 1), "window_size": 1, "num_classes": 5}),
    ("rvt.RvT", _VIT),
    ("scalable_vit.ScalableViT", {"num_classes": 5, "dim": 8, "depth": (1, 1), "heads": (2, 2), "window_size": (8, 4),
                                  "reduction_factor": (2, 2)}),
    ("simple_uvit.SimpleUViT", _VIT),
    ("t2t.T2TViT", {"image_size": 32, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24,
                    "t2t_layers": ((7, 4), (3, 2))}),
    ("vit_for_small_dataset.ViT", _VIT),
    ("vit_with_patch_merger.ViT", {**_VIT, "patch_merge_layer": 1, "patch_merge_num_tokens": 4}),
    ("xcit.XCiT", {**_VIT, "cls_depth": 2, "layer_dropout": 0.0}),
    ("ats_vit.ViT", {**_VIT, "max_tokens_per_depth": (8, 4)}),
    ("simple_vit_with_hyper_connections.SimpleViT", {**_VIT, "num_residual_streams": 2}),
    ("simple_vit_with_value_residual.SimpleViT", _VIT),
    ("simple_vit_with_register_tokens.SimpleViT", _VIT),
    ("simple_vit_with_qk_norm.SimpleViT", _VIT),
    ("simple_vit_with_patch_dropout.SimpleViT", _VIT),
    ("vit_with_decorr.ViT", _VIT),
    ("vit_with_keel_post_ln.ViT", _VIT),
):  # fmt: skip
    _side = 64 if _path.startswith(("mobile_vit", "regionvit", "cvt")) else 32
    # It divides attention by a temperature without dimensions, whose gradient the loop must not read.
    _facts: dict[str, Any] = {}
    if "small_dataset" in _path:
        _facts = {"refused": {3: SCALAR}, "refused_ways": ("sgd_kept_gradients",)}
    _entry(f"vit_pytorch.{_path}", _on(2, 3, _side, _side), _options, **_facts)


def _vit() -> nn.Module:
    return _made("vit_pytorch.ViT", **_VIT, pool="mean")


def _own_loss(model: Any, g: torch.Generator) -> Tensor:
    return model(torch.rand(4, 3, 32, 32, generator=g))


def _masked() -> nn.Module:
    return _made("vit_pytorch.mae.MAE", encoder=_vit(), decoder_dim=16, decoder_heads=2, decoder_dim_head=8)


def _distilled() -> nn.Module:
    import torchvision
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    teacher = torchvision.models.squeezenet1_1(num_classes=5)
    return DistillWrapper(teacher=teacher, student=DistillableViT(**_VIT), temperature=3.0, alpha=0.5)


def _distilled_loss(model: Any, g: torch.Generator) -> Tensor:
    return model(torch.rand(4, 3, 32, 32, generator=g), torch.randint(0, 5, (4,), generator=g))


_add("vit_pytorch.MAE", _masked, _own_loss)
_add("vit_pytorch.DistillWrapper", _distilled, _distilled_loss)


# --- segmentation_models_pytorch -------------------------------------------------------------------------------------


def _segmenter(name: str, **options: Any) -> nn.Module:
    path = f"segmentation_models_pytorch.{name.partition('_')[0]}"
    return _made(path, encoder_name="timm-mobilenetv3_small_minimal_100", encoder_weights=None, classes=2, **options)


_CHANNELS = {"decoder_channels": (16, 8, 8, 4, 4)}
for _name, _options in (
    ("Unet", _CHANNELS),
    ("Unet_with_classes", {**_CHANNELS, "aux_params": {"classes": 3}}),
    ("UnetPlusPlus", _CHANNELS),
    ("MAnet", _CHANNELS),
    ("Linknet", {}),
    ("FPN", {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32}),
    ("PSPNet", {"psp_out_channels": 16}),
    ("DeepLabV3", {"decoder_channels": 8}),
    ("DeepLabV3Plus", {"decoder_channels": 8}),
    ("Segformer", {"decoder_segmentation_channels": 8}),
    ("UPerNet", {"decoder_channels": 8}),
):
    _add(f"segmentation_models_pytorch.{_name}", functools.partial(_segmenter, _name, **_options), _on(2, 3, 64, 64))


# --- torch_geometric -------------------------------------------------------------------------------------------------


class _Graphs(nn.Module):
    """Two layers of one kind over a graph, and a mean over its nodes."""

    def __init__(self, kind: str, **options: Any):
        super().__init__()
        from torch_geometric import nn as geometric

        layer = getattr(geometric, kind)
        self.convs = nn.ModuleList(layer(6, 6, **options) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + torch.tanh(conv(x, edges))
        return self.head(x)


class _Isomorphism(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GINConv

        mlps = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)]
        self.convs = nn.ModuleList(GINConv(mlp, train_eps=True) for mlp in mlps)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edges)
        return x


def _edges(g: torch.Generator) -> Tensor:
    return torch.randint(0, 8, (2, 20), generator=g)


def _graph_loss(model: Any, g: torch.Generator) -> Tensor:
    return outputs_loss(model(torch.randn(8, 6, generator=g), _edges(g)), g)


for _kind, _options in (
    ("GCNConv", {}),
    ("GATConv", {}),
    ("GATv2Conv", {}),
    ("SAGEConv", {}),
    ("TransformerConv", {}),
    ("ChebConv", {"K": 2}),
    ("TAGConv", {"K": 2}),
    ("ARMAConv", {"num_stacks": 2}),
):
    _add(f"torch_geometric.{_kind}", functools.partial(_Graphs, _kind, **_options), _graph_loss)
_add("torch_geometric.GINConv", _Isomorphism, _graph_loss)
for _name, _options in (
    ("GCN", {"jk": "cat"}),
    ("GraphSAGE", {"norm": "batch_norm"}),
    ("GAT", {"heads": 2}),
    ("PNA", {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 1, 2, 3])}),
):
    _widths = {"in_channels": 6, "hidden_channels": 8, "num_layers": 3, "out_channels": 2}
    _entry(f"torch_geometric.nn.models.{_name}", _graph_loss, {**_widths, **_options})


# --- lightly ---------------------------------------------------------------------------------------------------------


class _Views(nn.Module):
    """A trunk and heads of lightly over two views, with its loss, which the model returns."""

    def __init__(self, heads: Callable[[], dict[str, nn.Module]], loss: Callable[[], nn.Module], pair: str):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.heads, self.loss, self.pair = nn.ModuleDict(heads()), loss(), pair

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        a, b = (self.heads["projection"](self.trunk(view)) for view in (one, two))
        if self.pair == "predicted":
            first, second = self.heads["prediction"](a), self.heads["prediction"](b)
            return (self.loss(first, b.detach()) + self.loss(second, a.detach())) / 2
        if self.pair == "prototypes":
            a, b = (self.heads["prototypes"](F.normalize(z, dim=1)) for z in (a, b))
            return self.loss([a, b], [])
        return self.loss(a, b)


def _views_loss(model: Any, g: torch.Generator) -> Tensor:
    return model(*(torch.randn(6, 3, 12, 12, generator=g) for _ in range(2)))


def _lightly(head: str, sizes: tuple[int, ...], loss: str, pair: str = "", **options: Any) -> nn.Module:
    from lightly import loss as losses
    from lightly.models.modules import heads as all_heads

    def build() -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {"projection": getattr(all_heads, f"{head}ProjectionHead")(*sizes)}
        if pair == "predicted":
            found["prediction"] = getattr(all_heads, f"{head}PredictionHead")(8, 8, 8)
        if pair == "prototypes":
            found["prototypes"] = all_heads.SwaVPrototypes(8, 12)
        return found

    return _Views(build, lambda: getattr(losses, loss)(**options), pair)


for _name, _head, _sizes, _loss, _pair in (
    ("SimCLR", "SimCLR", (8, 8, 8), "NTXentLoss", ""),
    ("BarlowTwins", "BarlowTwins", (8, 8, 8), "BarlowTwinsLoss", ""),
    ("VICReg", "VICReg", (8, 8, 8, 2), "VICRegLoss", ""),
    ("SimSiam", "SimSiam", (8, 8, 8), "NegativeCosineSimilarity", "predicted"),
    ("BYOL", "BYOL", (8, 8, 8), "NegativeCosineSimilarity", "predicted"),
    ("SwaV", "SwaV", (8, 8, 8), "SwaVLoss", "prototypes"),
    ("DCL", "SimCLR", (8, 8, 8), "DCLLoss", ""),
):
    _add(f"lightly.{_name}", functools.partial(_lightly, _head, _sizes, _loss, _pair), _views_loss)


# --- pytorch_metric_learning: losses with parameters ------------------------------------------------------------------


class _Metric(nn.Module):
    """A trunk and a loss of the library that has class centers of its own."""

    def __init__(self, kind: str, **options: Any):
        super().__init__()
        from pytorch_metric_learning import losses

        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.loss = getattr(losses, kind)(**options)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.trunk(x), labels)


def _metric_loss(model: Any, g: torch.Generator) -> Tensor:
    labels = torch.randint(0, 4, (8,), generator=g)
    return model(torch.randn(8, 6, generator=g), labels)


_CENTERS = {"num_classes": 4, "embedding_size": 8}
for _kind in (
    "ArcFaceLoss",
    "CosFaceLoss",
    "LargeMarginSoftmaxLoss",
    "NormalizedSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
):
    _add(f"pytorch_metric_learning.{_kind}", functools.partial(_Metric, _kind, **_CENTERS), _metric_loss)


def _metric_by_parts(model: Any, g: torch.Generator) -> Tensor:
    """As the library's examples do: the loop calls the trunk, and then the loss."""
    labels = torch.randint(0, 4, (8,), generator=g)
    return model["loss"](model["trunk"](torch.randn(8, 6, generator=g)), labels)


def _trunk_and_loss() -> nn.Module:
    both = _Metric("ArcFaceLoss", **_CENTERS)
    return nn.ModuleDict({"trunk": both.trunk, "loss": both.loss})


_add("pytorch_metric_learning.ArcFaceLoss_apart", _trunk_and_loss, _metric_by_parts)


# --- x_transformers --------------------------------------------------------------------------------------------------


def _decoder(**options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=31, max_seq_len=8, attn_layers=layers).double()


def _picture(**options: Any) -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    return ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers).double()


def _words_loss(model: Any, g: torch.Generator) -> Tensor:
    return outputs_loss(model(torch.randint(0, 31, (2, 8), generator=g)), g)


for _name, _options in (
    ("Decoder", {}),
    ("Decoder_rotary_swiglu", {"rotary_pos_emb": True, "ff_swish": True, "ff_glu": True, "use_rmsnorm": True}),
    ("Decoder_alibi_gated", {"alibi_pos_bias": True, "attn_gate_values": True, "sandwich_norm": True}),
    ("Decoder_t5_bias_tied", {"rel_pos_bias": True, "attn_kv_heads": 1, "use_scalenorm": True}),
    ("Decoder_memory_tokens_talking", {"attn_num_mem_kv": 4, "attn_pre_talking_heads": True}),
    ("Decoder_macaron", {"macaron": True, "attn_qk_norm": True, "gate_residual": True}),
    ("Decoder_dropout", {"attn_dropout": 0.1, "ff_dropout": 0.1, "shift_tokens": 1}),
):
    _add(f"x_transformers.{_name}", functools.partial(_decoder, **_options), _words_loss)
_add("x_transformers.ViTransformerWrapper", _picture, _IMAGE)


# --- monai -----------------------------------------------------------------------------------------------------------

for _path, _shape, _options in (
    ("UNet", (2, 1, 16, 16), {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 8),
                              "strides": (2, 2), "num_res_units": 1}),
    ("UNETR", (1, 1, 32, 32), {"in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 4,
                               "hidden_size": 12, "mlp_dim": 16, "num_heads": 2, "spatial_dims": 2}),
    ("SwinUNETR", (1, 1, 64, 64), {"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2,
                                   "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2), "window_size": 4}),
    ("SegResNet", (2, 1, 16, 16), {"spatial_dims": 2, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,),
                                   }),
    ("DenseNet", (2, 1, 32, 32), {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "init_features": 8,
                                  "growth_rate": 4, "block_config": (2, 2)}),
    ("DynUNet", (2, 1, 16, 16), {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": [3, 3, 3],
                                 "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 8],
                                 "deep_supervision": True, "deep_supr_num": 1}),
    ("AttentionUnet", (2, 1, 16, 16), {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 8),
                                       "strides": (2, 2)}),
    ("ViT", (2, 1, 16, 16), {"in_channels": 1, "img_size": 16, "patch_size": 8, "hidden_size": 12, "mlp_dim": 16,
                             "num_layers": 2, "num_heads": 2, "spatial_dims": 2, "classification": True}),
):  # fmt: skip
    _entry(f"monai.networks.nets.{_path}", _on(*_shape), _options, name=f"monai.{_path}")


# --- kornia ----------------------------------------------------------------------------------------------------------

for _name in ("HardNet", "SOSNet", "TFeat"):
    _entry(f"kornia.feature.{_name}", _on(3, 1, 32, 32), {"pretrained": False})
_entry(
    "kornia.feature.DISK",
    lambda model, g: outputs_loss(model.heatmap_and_dense_descriptors(torch.randn(1, 3, 32, 32, generator=g)), g),
    {"desc_dim": 8},
)
_entry(
    "kornia.models.RRDBNet",
    _on(1, 3, 8, 8),
    {"num_in_ch": 3, "num_out_ch": 3, "num_feat": 8, "num_block": 2, "num_grow_ch": 4},
)
_entry(
    "kornia.contrib.TinyViT",
    _on(2, 3, 32, 32),
    {
        "img_size": 32,
        "num_classes": 5,
        "embed_dims": (8, 8, 16, 16),
        "depths": (1, 1, 2, 1),
        "num_heads": (2, 2, 2, 2),
        "window_sizes": (2, 2, 2, 1),
    },
)
