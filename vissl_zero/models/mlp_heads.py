"""MLP heads with optional batch norm, ReLU and dropout, VISSL's probe of feature maps, and chains of heads.

``SiameseHead`` has the projector and the predictor of BYOL, SimSiam and MoCo v3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vissl_zero.config.components import component_keys, typed_options
from vissl_zero.config.components.heads import (
    ChainConfig,
    EvalMLPConfig,
    IdentityHeadConfig,
    MLPConfig,
    MobileNetHeadConfig,
    SiameseHeadConfig,
    VisionTransformerHeadConfig,
)
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import HEADS


@HEADS.register("chain", config=ChainConfig)
class Chain(nn.Sequential):
    """A sequence of heads; a head with embeddings and scores passes its embeddings on.

    Args:
        heads: [name, keys] of each head.
        dims: first and last width of the chain, after -1 has been replaced.
    """

    def __init__(self, heads: Sequence[Any], dims: Sequence[int] = ()):
        built: list[nn.Module] = []
        for index, (name, params) in enumerate(heads):
            keys = dict(params)
            if dims and keys.get("dims"):
                # In the chain's own widths, -1 is already replaced.
                first = dims[0] if index == 0 else keys["dims"][0]
                last = dims[-1] if index == len(heads) - 1 else keys["dims"][-1]
                keys["dims"] = [first, *keys["dims"][1:-1], last]
            options = typed_options(component_keys(HEADS, name), keys, f"heads[{index}][1]")
            built.append(HEADS.get(name).build(**options))
        super().__init__(*built)

    def forward(self, features: Tensor) -> Any:
        """Return the last head's output for features (n, F)."""
        x: Any = features
        for head in self:
            x = head(getattr(x, "embeddings", x))
        return x


@HEADS.register("mlp", config=MLPConfig)
class MLP(nn.Module):
    """Linear layers with optional batch norm, ReLU and dropout after each except the last.

    Args: the fields of ``MLPConfig``.
    """

    def __init__(
        self,
        dims: Sequence[int],
        use_bn: bool = False,
        use_relu: bool = False,
        use_dropout: bool = False,
        dropout_rate: float = 0.5,
        use_bias: bool = True,
        skip_last_layer_relu_bn: bool = True,
    ):
        super().__init__()
        if len(dims) < 2:
            must = "dims of mlp must have at least two widths, from the features to the outputs"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", str(list(dims)), must, "Write dims: [440, 10].")])
        layers: list[nn.Module] = []
        for index, (width_in, width_out) in enumerate(pairwise(dims)):
            layers.append(nn.Linear(width_in, width_out, bias=use_bias))
            if index == len(dims) - 2 and skip_last_layer_relu_bn:
                break
            if use_bn:
                layers.append(nn.BatchNorm1d(width_out))
            if use_relu:
                layers.append(nn.ReLU(inplace=True))
            if use_dropout:
                layers.append(nn.Dropout(dropout_rate))
        self.clf = nn.Sequential(*layers)
        self.first_scale = 1.0

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Multiply the initial weights of the layers, drawn before, by ``MODEL.HEAD.PARAMS_MULTIPLIER``."""
        for layer in self.clf:
            if isinstance(layer, nn.Linear):
                for parameter in layer.parameters():
                    parameter.mul_(self.first_scale)

    def forward(self, features: Tensor) -> Tensor:
        """Compute outputs (n, dims[-1]) of features (n, F), or maps (n, F, 1, 1)."""
        outputs: Tensor = self.clf(features.flatten(1))
        return outputs


@HEADS.register("eval_mlp", config=EvalMLPConfig)
class EvalMLP(nn.Module):
    """Batch norm over channels, then an ``mlp`` of all channels and positions: VISSL's ``eval_mlp``.

    Parameters have VISSL's names (``channel_bn.weight``, ``clf.clf.0.weight``).

    Args: the fields of ``EvalMLPConfig``.
    """

    def __init__(self, in_channels: int, dims: Sequence[int], use_bn: bool = False, use_relu: bool = False):
        super().__init__()
        self.channel_bn = nn.BatchNorm2d(in_channels)
        self.clf = MLP(dims, use_bn=use_bn, use_relu=use_relu)

    def forward(self, features: Tensor) -> Tensor:
        """Map (n, in_channels, H, W) or (n, in_channels) to outputs (n, dims[-1])."""
        maps = features[:, :, None, None] if features.ndim == 2 else features
        outputs: Tensor = self.clf(self.channel_bn(maps).flatten(1))
        return outputs


@HEADS.register("identity", config=IdentityHeadConfig)
class IdentityHead(nn.Module):
    """The identity, for losses that compare features."""

    def forward(self, features: Tensor) -> Tensor:
        """Return features (n, F) unchanged."""
        return features


class _DrawnHead(nn.Module):
    """Base of heads whose linear layers are drawn from VISSL's truncated normal, with biases of 0."""

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw weights with the standard deviation ``_deviation``, truncated at -2 and 2; set biases to 0."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                drawn, generator = torch.empty(module.weight.shape), generator_for(f"{name}.weight")
                nn.init.trunc_normal_(drawn, std=self._deviation(name, module), generator=generator)
                module.weight.data.copy_(drawn)
                nn.init.zeros_(module.bias)

    def _deviation(self, name: str, module: nn.Linear) -> float:
        raise NotImplementedError


@HEADS.register("mobilenet_v3_head", config=MobileNetHeadConfig)
class MobileNetHead(_DrawnHead):
    """MobileNet v3's classifier, as in torchvision and VISSL. Args: the fields of ``MobileNetHeadConfig``."""

    def __init__(
        self,
        in_channels: int = 960,
        mid_channels: int = 1280,
        num_classes: int = 1000,
        drop_out: float = 0.2,
        with_bn: bool = False,
    ):
        super().__init__()
        self.channel_bn = nn.BatchNorm2d(in_channels) if with_bn else None
        self.classifier = nn.Sequential(
            nn.Linear(in_channels, mid_channels),
            nn.Hardswish(),
            nn.Dropout(drop_out),
            nn.Linear(mid_channels, num_classes),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Compute outputs (n, num_classes) of features (n, in_channels), or maps (n, in_channels, 1, 1)."""
        maps = features[:, :, None, None] if features.ndim == 2 else features
        outputs: Tensor = self.classifier((self.channel_bn(maps) if self.channel_bn is not None else maps).flatten(1))
        return outputs

    def _deviation(self, name: str, module: nn.Linear) -> float:
        return 0.01


@HEADS.register("mobilenet_v3_head_timm", config=MobileNetHeadConfig)
class MobileNetHeadOfTimm(MobileNetHead):
    """MobileNet v3's classifier with a convolution as the first layer, as in timm and VISSL."""

    def __init__(
        self,
        in_channels: int = 960,
        mid_channels: int = 1280,
        num_classes: int = 1000,
        drop_out: float = 0.2,
        with_bn: bool = False,
    ):
        super().__init__(in_channels, mid_channels, num_classes, drop_out, with_bn)
        # The same layers in another order: timm flattens after its first layer, a convolution.
        _, activation, dropout, last = self.classifier
        self.classifier = nn.Sequential(
            nn.Conv2d(in_channels, mid_channels, 1), activation, nn.Flatten(1), dropout, last
        )

    def forward(self, features: Tensor) -> Tensor:
        """Compute outputs (n, num_classes) of features (n, in_channels), or maps (n, in_channels, 1, 1)."""
        maps = features[:, :, None, None] if features.ndim == 2 else features
        outputs: Tensor = self.classifier(self.channel_bn(maps) if self.channel_bn is not None else maps)
        return outputs

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw weights as ``MobileNetHead``, and the convolution as torch: uniform within 1 / sqrt(fan-in)."""
        super().init_parameters(generator_for)
        first = self.classifier[0]
        assert isinstance(first, nn.Conv2d) and first.bias is not None
        bound = 1 / sqrt(first.in_channels)
        for name, tensor in (("weight", first.weight), ("bias", first.bias)):
            drawn = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator_for(f"classifier.0.{name}"))
            tensor.data.copy_(drawn)


@HEADS.register("vision_transformer_head", config=VisionTransformerHeadConfig)
class VisionTransformerHead(_DrawnHead):
    """VISSL's classifier of vision transformers. Args: the fields of ``VisionTransformerHeadConfig``."""

    def __init__(self, in_plane: int, num_classes: int, hidden_dim: int | None = None):
        super().__init__()
        layers: list[tuple[str, nn.Module]] = []
        if hidden_dim is not None:
            layers = [("pre_logits", nn.Linear(in_plane, hidden_dim)), ("act", nn.Tanh())]
        layers.append(("head", nn.Linear(hidden_dim or in_plane, num_classes)))
        self.layers = nn.Sequential(OrderedDict(layers))

    def forward(self, features: Tensor) -> Tensor:
        """Compute outputs (n, num_classes) of features (n, in_plane)."""
        outputs: Tensor = self.layers(features)
        return outputs

    def _deviation(self, name: str, module: nn.Linear) -> float:
        return sqrt(1 / module.in_features) if name.endswith("pre_logits") else 0.02  # LeCun's normal for pre_logits


class SiameseOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        projections: (n, D), from the projector.
        predictions: (n, D), from the predictor; None from a teacher, which has no predictor.
    """

    projections: Tensor
    predictions: Tensor | None


@HEADS.register("siamese_head", config=SiameseHeadConfig)
class SiameseHead(nn.Module):
    """Projector and predictor: linear layers with batch norm and ReLU between them.

    Args: the fields of ``SiameseHeadConfig``.

    Attributes:
        student_only: modules that the teacher's copy does not have.
    """

    student_only = ("predictor",)

    def __init__(
        self,
        dims: Sequence[int],
        predictor_dims: Sequence[int],
        use_bn: bool = True,
        projector_last_bn: bool = False,
        predictor_last_bn: bool = False,
    ):
        super().__init__()
        self.projector = _mlp(dims, use_bn, projector_last_bn)
        self.predictor: nn.Sequential | None = _mlp((dims[-1], *predictor_dims, dims[-1]), use_bn, predictor_last_bn)

    def forward(self, features: Tensor) -> SiameseOutput:
        """Project features (n, F) of all crops, crop-major."""
        projections = self.projector(features)
        return SiameseOutput(projections, None if self.predictor is None else self.predictor(projections))


def _mlp(dims: Sequence[int], use_bn: bool, last_bn: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (width_in, width_out) in enumerate(pairwise(dims)):
        is_last = index == len(dims) - 2
        has_bn = last_bn if is_last else use_bn
        layers.append(nn.Linear(width_in, width_out, bias=not has_bn))  # batch norm subtracts a bias
        if has_bn:
            # Not affine after the last layer, as in SimSiam's and MoCo v3's builder.py.
            layers.append(nn.BatchNorm1d(width_out, affine=not is_last))
        if not is_last:
            layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)
