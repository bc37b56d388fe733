"""Keys of the heads that no method owns, written as ``MODEL.HEAD.PARAMS: [["name", {key: value}]]``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number


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
    """First and last width, where the heads have them; -1 as in an mlp."""


@dataclass
class EvalMLPConfig:
    """``eval_mlp``: batch norm over channels, then an mlp; VISSL's probe of a layer's features."""

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
    """Three widths: the trunk's features, the predictor's, a patch's prediction (MAE: 3 times a patch's pixels; I-JEPA:
    the trunk's features)."""
    depth: int = number(8, least=1, most=10000)
    """Blocks."""
    num_heads: int = number(16, least=1, most=2**20)
    """Attention heads; divides the predictor's width."""
