"""Vision transformers: timm's layers (https://arxiv.org/abs/2010.11929), cut into units that take all resolutions.

Sharding and self-supervised methods need units, and the embedding of ``token_embedding.py``; the rest is timm's.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, global_pool_nlc
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from vissl_zero.config.components.trunks import VisionTransformerConfig, vision_transformer_problems
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.keyed_random import packed_scope
from vissl_zero.models.model import LayerTap, Unit
from vissl_zero.models.packing import KEY as PACKING
from vissl_zero.models.packing import WithinImages, packed, unpacked
from vissl_zero.models.patches import grid_of
from vissl_zero.models.trunks.token_embedding import TokenEmbedding
from vissl_zero.registry import TRUNKS

_INIT_STD = 0.02
_LAYER_NORM_EPS = 1e-6

# A mask or None for each resolution; None: no masks at all.
PatchMasks = Sequence[Tensor | None] | None


class TransformerTrunk(nn.Module):
    """A timm vision transformer as a list of units: embedding, blocks, last norm, pooling.

    Parameters have timm's names below ``embedding.unit``, ``blocks.<i>.unit``, ``norm.unit`` and ``pooling.unit``.

    Args:
        vit: built with ``dynamic_img_size=True`` and without a classifier; its modules are moved into units.
        use_mask_token: create the vector that replaces masked patches.
        patch_drop_rate: share of patches dropped in training.
        position_resize: see ``interpolated``.

    Attributes:
        feature_dim: D, width of pooled features and of tokens.
        patch_size: height and width of a patch, in pixels.
        num_prefix_tokens: number of class and register tokens, which are before the patches.
        is_packing: blocks take the tokens of all resolutions as one sequence; see ``pack_crops``.
    """

    is_packing = False

    def __init__(
        self,
        vit: TimmVisionTransformer,
        use_mask_token: bool = False,
        patch_drop_rate: float = 0.0,
        position_resize: str = "antialiased",
    ):
        super().__init__()
        self.feature_dim: int = vit.num_features
        self.num_prefix_tokens: int = vit.num_prefix_tokens
        self.patch_size: tuple[int, int] = vit.patch_embed.patch_size
        self.embedding = _EmbeddingUnit(TokenEmbedding(vit, use_mask_token, patch_drop_rate, position_resize))
        self.blocks = nn.ModuleList(_BlockUnit(OrderedDict(unit=block)) for block in vit.blocks)
        self.norm = _unit(vit.norm)
        self.pooling = _unit(_Pooling(vit))
        self._tapped: set[int] = set()
        self._normed: dict[int, list[Tensor]] = {}

    def forward(
        self,
        images: list[Tensor],
        masks: PatchMasks = None,
        kept: PatchMasks = None,
        return_tokens: bool = False,
        last_blocks: int = 0,
        return_maps: bool = False,
    ) -> list[Tensor]:
        """Run one pass over all resolutions.

        Args:
            images: R tensors (b_r, 3, H_r, W_r); sides are multiples of the patch size.
            masks: per resolution (b_r, P_r) bool, patches replaced by the mask token; None: none.
            kept: per resolution (b_r, k_r) int64, visible patches, the others being dropped; None: all.
            return_tokens: return tokens after the last norm instead of features.
            last_blocks: number of last blocks whose tokens, before the norm, are returned too.
            return_maps: also return the patches' tokens after the last norm as maps (b_r, D, h_r, w_r), before the
                features; all patches must be visible.
        Returns:
            R pooled features (b_r, D), or R tensors of tokens (b_r, num_prefix_tokens + visible patches, D), followed
            by R tensors for each of the last blocks, in order.
        """
        xs: list[Tensor] = self.embedding(images, masks, kept)
        shapes = [(x.shape[0], x.shape[1]) for x in xs]
        masks_of_attention: list[list[WithinImages]] = []
        if self.is_packing and len(xs) > 1:
            # Linear layers and norms then run once on all tokens: small crops alone leave a GPU idle.
            masks_of_attention, xs = [[WithinImages(shapes)]], [packed(xs)]
        caught: dict[int, list[Tensor]] = {}
        last: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            xs = block(xs, *masks_of_attention)
            if index in self._tapped:
                caught[index] = xs
            if index >= len(self.blocks) - last_blocks:
                last += xs
        # One call for all tapped blocks: calling a unit gathers its parameters.
        flat: list[Tensor] = self.norm([x for tokens in (*caught.values(), xs) for x in tokens])
        if masks_of_attention:
            flat, last = ([part for x in rows for part in unpacked(x, shapes)] for rows in (flat, last))
        *tapped, xs = [flat[start : start + len(images)] for start in range(0, len(flat), len(images))]
        # Kept until the next pass: taps combine blocks only after the trunk has returned.
        self._normed = dict(zip(caught, tapped, strict=True))
        if return_tokens:
            return [*xs, *last]
        shown = zip(xs, images, strict=True) if return_maps else ()
        return [*(self._as_map(tokens, image) for tokens, image in shown), *self.pooled(xs)]

    def pack_crops(self) -> None:
        """Make each block run on the tokens of all resolutions as one sequence. Call it before sharding.

        Raises:
            ConfigError: blocks are not timm's ``Block``, or attention is not fused.
        """
        for block in (unit.get_submodule("unit") for unit in self.blocks):
            if type(block) is not Block or type(block.attn) is not Attention:
                must = "must be false for blocks of another form than timm's Block with its Attention"
                raise ConfigError([Problem(PACKING, f"true with {type(block).__name__}", must, "Leave it out.")])
            if not block.attn.fused_attn:
                must = "must be false where attention is not fused: it has dropout, or TIMM_FUSED_ATTN=0 is set"
                raise ConfigError([Problem(PACKING, "true", must, "Write ATTENTION_DROPOUT_RATE: 0, or leave it out.")])
        self.is_packing = True

    @property
    def map_dim(self) -> int:
        """Width of a token."""
        return self.feature_dim

    def _as_map(self, tokens: Tensor, image: Tensor) -> Tensor:
        patches = tokens[:, self.num_prefix_tokens :]
        return patches.transpose(1, 2).unflatten(2, grid_of(image, self.patch_size))

    tap_names = ("lastCLS", "concatCLS4", "blkCLS0", "lastPOOL", "concatPOOL4", "stridePOOL_4", "lastBLK", "lastMAP")

    def tap(self, name: str) -> LayerTap | None:
        """Tap VISSL's names, all after the last norm.

        Names are the class token (CLS), the mean of the patches (POOL) or all tokens (BLK) of the last block, of the
        last n concatenated (concat...n), of n blocks at a stride, or of block n (blkCLSn); and the last patches as a
        map (n, h, w, D) (lastMAP).

        https://github.com/facebookresearch/vissl/blob/main/vissl/models/trunks/vision_transformer.py
        """
        depth, prefix = len(self.blocks), self.num_prefix_tokens
        match = re.fullmatch(r"(last|concat|blk|stride)(CLS|POOL|BLK|MAP)_?(\d*)(?:_(\d+))?", name)
        if match is None:
            return None
        kind, part, first, second = match[1], match[2], int(match[3] or 0), int(match[4] or 0)
        if (part == "CLS" and not prefix) or (part == "MAP" and kind != "last") or (kind == "last") == bool(match[3]):
            return None
        blocks = {
            "last": [depth - 1],
            "concat": [*range(max(0, depth - first), depth)],
            "blk": [first],
            "stride": [*range(depth - 1, -1, -(second or -(-depth // max(first, 1))))][:first],
        }[kind]
        if not blocks or max(blocks) >= depth or (kind == "concat" and first > depth):
            return None
        pick = {
            "CLS": lambda tokens: tokens[:, 0],
            "POOL": lambda tokens: tokens[:, prefix:].mean(dim=1),
            "BLK": lambda tokens: tokens,
            "MAP": lambda tokens: tokens[:, prefix:].unflatten(1, _square(tokens.shape[1] - prefix)),
        }[part]
        self._tapped |= set(blocks)

        def combine(_caught: list[list[Tensor]], features: list[Tensor]) -> list[Tensor]:
            normed = [self._normed[block] for block in blocks]
            return [torch.cat([pick(tokens[r]) for tokens in normed], dim=-1) for r in range(len(features))]

        return LayerTap((), combine)

    def pooled(self, tokens: list[Tensor]) -> list[Tensor]:
        """Compute features (b_r, D) of tokens after the last norm."""
        features: list[Tensor] = self.pooling(tokens)
        return features


class _TransformerUnit(Unit):
    """A unit with the initialization of DINO and DeiT."""

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw linear layers and learned vectors from a truncated normal of deviation 0.02; set biases to 0.

        Norms and layer scale keep timm's initialization; the patches' convolution has torch's.
        """
        initialize_transformer_(self, generator_for)


class _BlockUnit(_TransformerUnit):
    """A block of attention and an MLP, for the tokens of each resolution, or for packed tokens with their mask."""

    def each(self, xs: list[Tensor], *others: Sequence[Any] | None) -> list[Tensor]:
        masks: Any = others[0] if others else None
        with packed_scope(masks[0].shapes if masks else ()):
            return super().each(xs, *others)

    def apply_layers(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block on tokens (b, n, D); ``args`` is the mask of attention. See ``Unit``."""
        tokens: Tensor = self[0](x, *args, **kwargs)
        return tokens


class _EmbeddingUnit(_TransformerUnit):
    """The first unit, which also takes masks. It is never recomputed: one convolution has little to save."""

    def __init__(self, embedding: TokenEmbedding):
        super().__init__(OrderedDict(unit=embedding))

    def forward(self, xs: list[Tensor], *others: PatchMasks) -> list[Tensor]:
        return self.each(xs, *others)

    def apply_layers(self, x: Tensor, *args: Tensor | None, **kwargs: Any) -> Tensor:
        """Embed patches of one resolution, with its mask and the patches kept; see ``Unit``."""
        tokens: Tensor = self[0](x, *args)
        return tokens


class _Pooling(nn.Module):
    """timm's pooling of tokens, and the norm after it, if there is one."""

    def __init__(self, vit: TimmVisionTransformer):
        super().__init__()
        self.attn_pool = vit.attn_pool
        self.fc_norm = vit.fc_norm
        self.kind: str = vit.global_pool or "token"
        self.num_left_out: int = 0 if vit.pool_include_prefix else vit.num_prefix_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        if self.attn_pool is not None:
            pooled: Tensor = self.attn_pool(tokens[:, self.num_left_out :])
        else:
            pooled = global_pool_nlc(tokens, self.kind, self.num_left_out)
        normalized: Tensor = self.fc_norm(pooled)
        return normalized


@TRUNKS.register("vision_transformer", config=VisionTransformerConfig)
class VisionTransformer(TransformerTrunk):
    """Vision transformer by width, depth, heads and patch size, with VISSL's keys.

    Args:
        options: fields of ``VisionTransformerConfig``.

    Raises:
        ConfigError: the keys make no vision transformer.
    """

    def __init__(self, **options: Any):
        config = VisionTransformerConfig(**options)
        if problems := vision_transformer_problems(config):
            raise ConfigError(problems)
        vit = TimmVisionTransformer(
            img_size=config.IMAGE_SIZE,
            patch_size=config.PATCH_SIZE,
            num_classes=0,
            class_token=config.USE_CLASS_TOKEN,
            global_pool="token" if config.CLASSIFIER == "token" and config.USE_CLASS_TOKEN else "avg",
            # The norm after the last block stays also for averaged features, as in VISSL.
            fc_norm=False,
            embed_dim=config.HIDDEN_DIM,
            depth=config.NUM_LAYERS,
            num_heads=config.NUM_HEADS,
            mlp_ratio=config.MLP_DIM / config.HIDDEN_DIM,
            qkv_bias=config.QKV_BIAS,
            init_values=config.LAYER_SCALE_INIT,
            reg_tokens=config.NUM_REGISTERS,
            # Registers have no positions (DINOv2 with registers), and timm drops those of the class token with them.
            no_embed_class=config.NUM_REGISTERS > 0,
            dynamic_img_size=True,
            proj_drop_rate=config.DROPOUT_RATE,
            pos_drop_rate=config.DROPOUT_RATE,
            attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
            drop_path_rate=config.DROP_PATH_RATE,
            norm_layer=layer_norm,
        )
        super().__init__(vit, config.USE_MASK_TOKEN, config.PATCH_DROP_RATE)


def _square(patches: int) -> tuple[int, int]:
    side = math.isqrt(patches)
    return side, patches // side


@torch.no_grad()
def initialize_transformer_(net: nn.Module, generator_for: Callable[[str], torch.Generator]) -> None:
    """Draw weights as ``_TransformerUnit.init_parameters`` does; parameters of other modules do not change."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            truncated_normal_(module.weight, generator_for(f"{name}.weight"))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            bound = 1 / math.sqrt(module.weight[0].numel())
            for key, tensor in module.named_parameters(recurse=False):
                drawn = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator_for(f"{name}.{key}"))
                tensor.data.copy_(drawn)
        elif isinstance(module, TokenEmbedding):
            for key, tensor in module.named_parameters(recurse=False):
                truncated_normal_(tensor, generator_for(f"{name}.{key}"))


def layer_norm(dim: int, **options: Any) -> nn.LayerNorm:
    """Build timm's ``norm_layer``, with the epsilon of vision transformers."""
    return nn.LayerNorm(dim, eps=_LAYER_NORM_EPS, **{k: v for k, v in options.items() if k in ("device", "dtype")})


def _unit(layer: nn.Module) -> Unit:
    return _TransformerUnit(OrderedDict(unit=layer))


def truncated_normal_(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a tensor, of any device and dtype, from a truncated normal of deviation 0.02."""
    # Drawn in float32 on the CPU: the same bits for every device and dtype, up to the cast.
    drawn = nn.init.trunc_normal_(torch.empty(tensor.shape), std=_INIT_STD, generator=generator)
    tensor.data.copy_(drawn)
