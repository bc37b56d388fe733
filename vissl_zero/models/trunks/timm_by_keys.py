"""Networks by VISSL's keys, from the classes that timm has of the same architectures; one from torchvision."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import timm
import torch
import torchvision
from timm.models.beit import Beit
from timm.models.convit import ConVit
from timm.models.convnext import ConvNeXt
from timm.models.swin_transformer import SwinTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn
from torch.nn import functional

from vissl_zero.config.components.trunks import (
    BeitConfig,
    ConvitConfig,
    ConvNextConfig,
    EfficientNetConfig,
    MobileNetConfig,
    SwinConfig,
    XcitConfig,
    size_problems,
)
from vissl_zero.errors import ConfigError
from vissl_zero.models.keyed_random import resolution_scope
from vissl_zero.models.taps import LayerTap
from vissl_zero.models.trunks.timm_trunk import TimmTrunk
from vissl_zero.registry import TRUNKS

_NORM = partial(nn.LayerNorm, eps=1e-6)
_Keys = TypeVar("_Keys", BeitConfig, XcitConfig, ConvNextConfig, SwinConfig)


@TRUNKS.register("beit", config=BeitConfig)
class BeitTrunk(TimmTrunk):
    """BEiT by width, depth, heads and patch size. Images have one size.

    Args:
        options: fields of ``BeitConfig``.
    Raises:
        ConfigError: the keys make no BEiT.
    """

    tap_names = ("lastCLS", "concatCLS4", "blkCLS0")

    def __init__(self, **options: Any):
        self._tapped: set[int] = set()
        self._classes: list[dict[int, Tensor]] = []
        build = _checked("BEIT", _beit, BeitConfig(**options))
        super().__init__(build(), build)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        """R image tensors (b_r, 3, H, W) -> R class tokens (b_r, F)."""
        features, self._classes = [], []
        for index, x in enumerate(images):
            with resolution_scope(index, len(x)):
                last, inner = self.net.forward_intermediates(  # type: ignore[operator]
                    x, indices=sorted(self._tapped), return_prefix_tokens=True, norm=True, output_fmt="NLC"
                )
            features.append(last[:, 0])
            self._classes.append({b: t[1][:, 0] for b, t in zip(sorted(self._tapped), inner, strict=True)})
        return features

    def tap(self, name: str) -> LayerTap | None:
        """VISSL's names, class tokens after the last norm: of the last block (lastCLS), of the last n concatenated
        (concatCLSn), of block n (blkCLSn)."""
        depth = len(self.net.blocks)  # type: ignore[arg-type]
        found = re.fullmatch(r"(last|concat|blk)CLS(\d*)", name)
        if found is None or (found[1] == "last") == bool(found[2]):
            return None
        count = int(found[2] or 1)
        blocks = [count] if found[1] == "blk" else [*range(max(0, depth - count), depth)]
        if max(blocks, default=depth) >= depth or (found[1] != "blk" and count > depth):
            return None
        self._tapped |= set(blocks)

        def combine(_caught: list[list[Tensor]], features: list[Tensor]) -> list[Tensor]:
            return [torch.cat([tokens[block] for block in blocks], dim=1) for tokens in self._classes]

        return LayerTap((), combine)


def _beit(config: BeitConfig) -> nn.Module:
    net = Beit(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        global_pool="token",
        embed_dim=config.HIDDEN_DIM,
        depth=config.NUM_LAYERS,
        num_heads=config.NUM_HEADS,
        qkv_bias=config.QKV_BIAS,
        mlp_ratio=config.MLP_RATIO,
        pos_drop_rate=config.DROPOUT_RATE,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
        norm_layer=_NORM,  # type: ignore[arg-type]  # timm passes partials itself
        init_values=float(config.INIT_VALUES) or None,
        use_abs_pos_emb=config.USE_ABS_POS_EMB,
        use_rel_pos_bias=config.USE_REL_POS_BIAS,
        use_shared_rel_pos_bias=config.USE_SHARED_REL_POS_BIAS,
    )
    if config.USE_MEAN_POOLING:
        net.norm = nn.Identity()
    return net


class _OneFeature(TimmTrunk):
    """A network with one feature. VISSL gives it whatever layer is asked for; here the names that its recipes write.

    Args:
        build: gives the network.
    """

    tap_names = ("lastCLS",)

    def __init__(self, build: Callable[[], nn.Module]):
        super().__init__(build(), build)

    def tap(self, name: str) -> LayerTap | None:
        """The feature, called lastCLS in VISSL's recipes: of a transformer the class token after the last norm."""
        return LayerTap((), lambda _, features: features) if name == "lastCLS" else None


@TRUNKS.register("xcit", config=XcitConfig)
def build_xcit(**options: Any) -> nn.Module:
    """XCiT by width, depth, heads and patch size; images of any size. Raises ConfigError where the keys make none."""
    return _OneFeature(_checked("XCIT", _xcit, XcitConfig(**options)))


def _xcit(config: XcitConfig) -> nn.Module:
    return Xcit(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        embed_dim=config.HIDDEN_DIM,
        depth=config.NUM_LAYERS,
        num_heads=config.NUM_HEADS,
        mlp_ratio=config.MLP_RATIO,
        qkv_bias=config.QKV_BIAS,
        pos_drop_rate=config.DROPOUT_RATE,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
        eta=config.ETA,
        tokens_norm=config.TOKENS_NORM,
    )


@TRUNKS.register("convnext", config=ConvNextConfig)
def build_convnext(**options: Any) -> nn.Module:
    """ConvNeXt by depth and width of each stage. Raises ConfigError where the keys make none."""
    return _OneFeature(_checked("CONVNEXT", _convnext, ConvNextConfig(**options)))


def _convnext(config: ConvNextConfig) -> nn.Module:
    return ConvNeXt(
        num_classes=0, depths=tuple(config.DEPTH), dims=tuple(config.DIMS), drop_path_rate=config.DROP_PATH_RATE
    )


@TRUNKS.register("swin_transformer", config=SwinConfig)
def build_swin(**options: Any) -> nn.Module:
    """Swin by width, and depth and heads of each stage. Raises ConfigError where the keys make none."""
    return _OneFeature(_checked("SWIN_TRANSFORMER", _swin, SwinConfig(**options)))


def _swin(config: SwinConfig) -> nn.Module:
    return SwinTransformer(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        embed_dim=config.EMBED_DIM,
        depths=tuple(config.DEPTHS),
        num_heads=tuple(config.NUM_HEADS),
        window_size=config.WINDOW_SIZE,
        dynamic_img_size=True,
        mlp_ratio=config.MLP_RATIO,
        qkv_bias=config.QKV_BIAS,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
    )


@TRUNKS.register("convit", config=ConvitConfig)
def build_convit(**options: Any) -> nn.Module:
    """ConViT by width, depth, heads and number of gated blocks. Images have one size."""
    build = partial(_convit, ConvitConfig(**options))
    return TimmTrunk(build(), build)


def _convit(config: ConvitConfig) -> nn.Module:
    return ConVit(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        global_pool="token" if config.CLASSIFIER == "token" else "avg",
        embed_dim=config.HIDDEN_DIM // config.NUM_HEADS,  # timm's is that of a head
        depth=config.NUM_LAYERS,
        num_heads=config.NUM_HEADS,
        mlp_ratio=config.MLP_DIM / config.HIDDEN_DIM,
        qkv_bias=config.QKV_BIAS,
        pos_drop_rate=config.DROPOUT_RATE,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
        norm_layer=nn.LayerNorm,
        local_up_to_layer=config.N_GPSA_LAYERS,
        locality_strength=config.LOCALITY_STRENGTH,
    )


_FEATURE_DROPOUT = {"B0": 0.2, "B1": 0.2, "B2": 0.3, "B3": 0.3, "B4": 0.4, "B5": 0.4, "B6": 0.5, "B7": 0.5}


@TRUNKS.register("efficientnet", config=EfficientNetConfig)
class EfficientNetTrunk(TimmTrunk):
    """EfficientNet B0 to B7, padded as in TensorFlow and classy-vision; its feature goes through dropout, as in VISSL.

    Args:
        options: fields of ``EfficientNetConfig``.
    """

    tap_names = ("conv_final", "flatten")

    def __init__(self, **options: Any):
        build = partial(_efficientnet, EfficientNetConfig(**options))
        super().__init__(build(), build)

    def tap(self, name: str) -> LayerTap | None:
        """VISSL's conv_final, the maps before pooling, and flatten, their mean."""
        maps = (self.last_link("bn2"),)
        if name == "conv_final":
            return LayerTap(maps)
        return LayerTap(maps, lambda caught, _: [x.mean(dim=(2, 3)) for x in caught[0]]) if name == "flatten" else None


def _efficientnet(config: EfficientNetConfig) -> nn.Module:
    net: nn.Module = timm.create_model(
        f"tf_efficientnet_{config.model_version.lower()}",
        num_classes=0,
        bn_momentum=config.bn_momentum,
        bn_eps=config.bn_epsilon,
        drop_path_rate=config.drop_connect_rate,
        channel_divisor=config.width_divisor,
    )
    net.classifier = nn.Dropout(_FEATURE_DROPOUT[config.model_version])
    return net


class _MobileNetTrunk(TimmTrunk):
    """MobileNet v3.

    Args:
        build: gives the network.
        maps: module whose output is pooled.
        has_wide_feature: the feature is wider than the pooled maps.
    """

    tap_names = ("trunk", "trunk_pool", "trunk_pool_norm", "flatten", "flatten_norm")

    def __init__(self, build: Any, maps: str, has_wide_feature: bool):
        super().__init__(build(), build)
        self._maps = self.last_link(maps)
        self._has_wide_feature = has_wide_feature

    def tap(self, name: str) -> LayerTap | None:
        """VISSL's trunk, the last maps, their mean trunk_pool, timm's feature flatten; _norm: on the unit sphere."""
        kind = name.removesuffix("_norm")
        if kind == "trunk" and kind == name:
            return LayerTap((self._maps,))
        if kind not in ("trunk_pool", "flatten") or (kind == "flatten" and not self._has_wide_feature):
            return None

        def combine(caught: list[list[Tensor]], features: list[Tensor]) -> list[Tensor]:
            rows = features if kind == "flatten" else [x.mean(dim=(2, 3)) for x in caught[0]]
            return [functional.normalize(x, dim=-1) for x in rows] if kind != name else rows

        return LayerTap((self._maps,), combine)


@TRUNKS.register("mobilenetv3_tv", config=MobileNetConfig)
def build_torchvision_mobilenet(**options: Any) -> nn.Module:
    """MobileNet v3 of torchvision, without its classifier. Args: the fields of ``MobileNetConfig``."""
    return _MobileNetTrunk(partial(_torchvision_mobilenet, MobileNetConfig(**options)), "features", False)


def _torchvision_mobilenet(config: MobileNetConfig) -> nn.Module:
    size = config.NAME.split("_")[1]
    norm = partial(nn.BatchNorm2d, eps=1e-5, momentum=0.1) if config.TIMM_BN else None
    net: Any = getattr(torchvision.models, f"mobilenet_v3_{size}")(weights=None, norm_layer=norm)
    # torchvision flattens in its forward pass; as a layer, so that the whole is a chain.
    return nn.Sequential(OrderedDict(features=net.features, avgpool=net.avgpool, flatten=nn.Flatten()))


@TRUNKS.register("mobilenetv3_timm", config=MobileNetConfig)
def build_timm_mobilenet(**options: Any) -> nn.Module:
    """MobileNet v3 of timm, without its classifier. Args: the fields of ``MobileNetConfig``."""
    config = MobileNetConfig(**options)
    return _MobileNetTrunk(partial(_timm_mobilenet, config), "blocks", not config.TRUNK_ONLY)


def _timm_mobilenet(config: MobileNetConfig) -> nn.Module:
    net: nn.Module = timm.create_model(config.NAME, num_classes=0)
    if config.TRUNK_ONLY:
        net.conv_head, net.norm_head, net.act2 = nn.Identity(), nn.Identity(), nn.Identity()
    return net


def _checked(block: str, build: Callable[[_Keys], nn.Module], config: _Keys) -> Callable[[], nn.Module]:
    """``build`` with its keys. Raises ConfigError where those of ``MODEL.TRUNK.<block>`` make no network."""
    if problems := size_problems(f"config.MODEL.TRUNK.{block}", config):
        raise ConfigError(problems)
    return partial(build, config)
