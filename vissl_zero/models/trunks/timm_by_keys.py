"""BEiT and XCiT by VISSL's keys, from timm's classes of the same architectures."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from timm.models.beit import Beit
from timm.models.xcit import Xcit
from torch import Tensor, nn

from vissl_zero.config.components.trunks import BeitConfig, XcitConfig, size_problems
from vissl_zero.errors import ConfigError
from vissl_zero.models.keyed_random import resolution_scope
from vissl_zero.models.taps import LayerTap
from vissl_zero.models.trunks.timm_trunk import TimmTrunk
from vissl_zero.registry import TRUNKS

_NORM = partial(nn.LayerNorm, eps=1e-6)


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
        config = BeitConfig(**options)
        if problems := size_problems("config.MODEL.TRUNK.BEIT", config):
            raise ConfigError(problems)
        self._tapped: set[int] = set()
        self._classes: list[dict[int, Tensor]] = []
        super().__init__(_beit(config), partial(_beit, config))

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


@TRUNKS.register("xcit", config=XcitConfig)
class XcitTrunk(TimmTrunk):
    """XCiT by width, depth, heads and patch size. Images may have any size.

    Args:
        options: fields of ``XcitConfig``.
    Raises:
        ConfigError: the keys make no XCiT.
    """

    tap_names = ("lastCLS",)

    def __init__(self, **options: Any):
        config = XcitConfig(**options)
        if problems := size_problems("config.MODEL.TRUNK.XCIT", config):
            raise ConfigError(problems)
        super().__init__(_xcit(config), partial(_xcit, config))

    def tap(self, name: str) -> LayerTap | None:
        """The class token after the last norm, VISSL's lastCLS, which is the trunk's feature."""
        return LayerTap((), lambda _, features: features) if name == "lastCLS" else None


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
