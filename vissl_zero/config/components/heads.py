"""Keys of the heads that no method owns, written as ``MODEL.HEAD.PARAMS: [["name", {key: value}]]``.

And ``LINEAR_EVAL_FEAT_POOL_OPS_MAP``, which says what layers the heads of a linear evaluation see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem, did_you_mean

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig


@dataclass
class MLPConfig:
    """``mlp``: linear layers."""

    dims: list[int] = MISSING
    """Widths, from the trunk's features (-1: as many as it has) to the outputs (-1: as many as there are classes)."""
    use_bn: bool = False
    """Batch norm after each layer."""
    use_relu: bool = False
    """ReLU after each layer."""
    use_dropout: bool = False
    """Dropout after each layer."""
    dropout_rate: float = number(0.5, least=0, below=1)
    """Share of activations dropped where ``use_dropout``."""
    use_bias: bool = True
    """Bias in each layer."""
    skip_last_layer_relu_bn: bool = True
    """Nothing after the last layer."""


@dataclass
class ChainConfig:
    """``chain``: heads one after another; several heads on one feature become one, as VISSL applies them."""

    heads: list[Any] = MISSING
    """The heads, each ["name", {key: value}]; all but the last give vectors."""
    dims: list[int] = field(default_factory=list)
    """First and last width, where the heads have them; -1 as in the head mlp."""


@dataclass
class EvalMLPConfig:
    """``eval_mlp``: batch norm over channels, then the head mlp; VISSL's probe of a layer's features."""

    in_channels: int = number(MISSING, least=1, most=2**20)
    """Channels of the features."""
    dims: list[int] = MISSING
    """Widths, from the pooled features (channels times positions) to the outputs (-1: as many as there are classes)."""
    use_bn: bool = False
    """Batch norm after each layer but the last."""
    use_relu: bool = False
    """ReLU after each layer but the last."""


@dataclass
class MobileNetHeadConfig:
    """``mobilenet_v3_head`` and ``mobilenet_v3_head_timm``: a layer with hard swish and dropout, then classes."""

    in_channels: int = number(960, least=1, most=2**20)
    """Width of the features."""
    mid_channels: int = number(1280, least=1, most=2**20)
    """Width of the layer between."""
    num_classes: int = number(1000, least=1, most=2**31)
    """Outputs."""
    drop_out: float = number(0.2, least=0, below=1)
    """Share of the layer's activations that is dropped."""
    with_bn: bool = False
    """Batch norm of the features first."""


@dataclass
class VisionTransformerHeadConfig:
    """``vision_transformer_head``: one linear layer, or two with tanh between, of https://arxiv.org/abs/2010.11929."""

    in_plane: int = number(MISSING, least=1, most=2**20)
    """Width of the features."""
    num_classes: int = number(MISSING, least=1, most=2**31)
    """Outputs."""
    hidden_dim: int | None = number(None, least=1, most=2**20)
    """Width of the layer between; null: none."""


@dataclass
class IdentityHeadConfig:
    """``identity``: the features as they are."""


@dataclass
class SiameseHeadConfig:
    """``siamese_head``: a projector and a predictor on top of it; BYOL, SimSiam and MoCo v3 need it."""

    dims: list[int] = MISSING
    """Widths of the projector, from the trunk's features to the embedding."""
    predictor_dims: list[int] = MISSING
    """Widths of the predictor's hidden layers; it ends in the embedding's width."""
    use_bn: bool = True
    """Batch norm between the layers."""
    projector_last_bn: bool = False
    """Batch norm without weights after the projector's last layer (SimSiam, MoCo v3)."""
    predictor_last_bn: bool = False
    """The same after the predictor's last layer (MoCo v3)."""


@dataclass
class PatchPredictorConfig:
    """``patch_predictor``: a small transformer that predicts hidden patches from those seen; MAE and I-JEPA need it."""

    dims: list[int] = MISSING
    """Three widths: the trunk's features, the predictor's, a patch's prediction (MAE: a patch's pixels in all
    channels, -1: those of the trunk; I-JEPA: the trunk's features)."""
    depth: int = number(8, least=1, most=10000)
    """Blocks."""
    num_heads: int = number(16, least=1, most=2**20)
    """Attention heads; divides the predictor's width."""


KEY = "config.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP"
# torch's classes, by VISSL's names, which are torch's.
POOLINGS = ("AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool2d", "MaxPool2d", "Identity")


def are_tapped(cfg: RunConfig) -> bool:
    """Check whether heads read inner layers. As in VISSL, the map counts only if the trunk is frozen for evaluation."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    is_frozen = settings.EVAL_MODE_ON and settings.FREEZE_TRUNK_ONLY and not settings.EXTRACT_TRUNK_FEATURES_ONLY
    return bool(settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP) and is_frozen


def features_are_tapped(cfg: RunConfig) -> bool:
    """Check whether kNN and extraction read inner layers instead of the trunk's features."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    is_extracted = settings.EVAL_MODE_ON and settings.EXTRACT_TRUNK_FEATURES_ONLY
    return bool(settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP) and is_extracted


def layer_names(entries: Sequence[Any]) -> list[str]:
    """Return a unique name per entry: the layer, with its pooling if it occurs twice, with a number if both do."""
    layers = [str(name) for name, _ in entries]
    names = [
        layer if layers.count(layer) == 1 else f"{layer} {pooling}{list(args)}"
        for layer, (_, (pooling, args)) in zip(layers, entries, strict=True)
    ]
    return distinct_names(names)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names with the index in ``HEAD.PARAMS`` added to duplicates: metrics of heads are stored by name."""
    return [name if names.count(name) == 1 else f"{name}, head {index}" for index, name in enumerate(names)]


def problems(cfg: RunConfig) -> list[Problem]:
    """Check that each entry is [layer, [pooling, [arguments]]], and that there is one for each head."""
    if not (are_tapped(cfg) or features_are_tapped(cfg)):
        return []
    entries, problems = cfg.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP, []
    for entry in entries:
        if not _is_entry(entry):
            fix = 'Write ["res5", ["AdaptiveAvgPool2d", [[2, 2]]]], or ["res5avg", ["Identity", []]].'
            problems.append(Problem(KEY, str(entry), "must list [layer, [pooling, [arguments]]]", fix))
        elif entry[1][0] not in POOLINGS:
            fix = did_you_mean(entry[1][0], POOLINGS).strip() or "Choose one of them."
            problems.append(Problem(KEY, repr(entry[1][0]), f"must name a pooling: {', '.join(POOLINGS)}", fix))
    heads = len(cfg.MODEL.HEAD.PARAMS)
    if heads != len(entries) and are_tapped(cfg):
        must = f"must list a head for each of the {len(entries)} layers of {KEY}"
        problems.append(Problem("config.MODEL.HEAD.PARAMS", f"{heads} heads", must, "Give the lists the same length."))
    return problems


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[0], str):
        return False
    pooling = entry[1]
    is_pair = isinstance(pooling, (list, tuple)) and len(pooling) == 2
    return is_pair and isinstance(pooling[0], str) and isinstance(pooling[1], (list, tuple))
