"""The embedding of a vision transformer: patches, masks, positions for any resolution, class and register tokens.

This file does not import timm, which takes a second: reading the weights of any model imports this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.keyed_random import keyed_bits

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer


class TokenEmbedding(nn.Module):
    """Images to tokens: patch embedding, masks, positions, class and register tokens.

    Args:
        vit: vision transformer whose modules are used.
        use_mask_token: create ``mask_token``, (1, 1, D).
        patch_drop_rate: share of patches dropped in training, by keyed random numbers.
        position_resize: see ``interpolated``.
    """

    def __init__(self, vit: TimmVisionTransformer, use_mask_token: bool, patch_drop_rate: float, position_resize: str):
        super().__init__()
        self.position_resize = position_resize
        self.patch_embed = vit.patch_embed
        self.cls_token = vit.cls_token
        self.reg_token = vit.reg_token
        self.pos_embed = vit.pos_embed
        self.mask_token = nn.Parameter(torch.zeros(1, 1, vit.num_features)) if use_mask_token else None
        self.pos_drop = vit.pos_drop
        self.norm_pre = vit.norm_pre
        self.grid_size: tuple[int, int] = vit.patch_embed.grid_size
        self.num_prefix_positions = 0 if vit.no_embed_class else vit.num_prefix_tokens
        self.patch_drop_rate = patch_drop_rate

    def forward(self, images: Tensor, mask: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        """Embed images (b, 3, H, W) as tokens (b, prefix + visible patches, D); see ``TransformerTrunk.forward``."""
        self._require_whole_patches(images.shape[-2:])
        patches = self.patch_embed(images)
        height, width = patches.shape[1:3]
        patches = patches.flatten(1, 2)
        if mask is not None:
            if self.mask_token is None:
                raise ValueError("masks need a trunk with a mask token (USE_MASK_TOKEN: true)")
            # Before the positions are added: a masked patch keeps its position.
            patches = torch.where(mask[:, :, None], self.mask_token.to(patches.dtype), patches)
        prefix = [token.expand(len(patches), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self.pos_embed is not None:
            num_prefix = self.num_prefix_positions
            patches = patches + interpolated(
                self.pos_embed[:, num_prefix:], self.grid_size, (height, width), self.position_resize
            )
            if num_prefix:
                # Class and register tokens have no place in the image, so their positions are not interpolated.
                prefix = [torch.cat(prefix, dim=1) + self.pos_embed[:, :num_prefix]]
        if self.training and self.patch_drop_rate and kept is None:
            num_kept = max(1, int(patches.shape[1] * (1 - self.patch_drop_rate)))
            numbers = keyed_bits(patches.shape[0], patches.shape[1], "trunk.embedding.patch_drop", patches.device)
            # Sorted, so that the order of patches does not depend on the draw.
            kept = numbers.argsort(dim=1)[:, :num_kept].sort(dim=1).values
        # After the positions: a visible patch keeps the position of its place in the image.
        if kept is not None:
            patches = patches.gather(1, kept[:, :, None].expand(-1, -1, patches.shape[2]))
        tokens: Tensor = self.norm_pre(self.pos_drop(torch.cat([*prefix, patches], dim=1)))
        return tokens

    def _require_whole_patches(self, size: Sequence[int]) -> None:
        sides = zip(size, self.patch_embed.patch_size, strict=True)
        wrong = [str(side) for side, patch in sides if side % patch]
        if wrong and not self.patch_embed.dynamic_img_pad:
            must = f"must be whole patches of {self.patch_embed.patch_size[0]} pixels"
            fix = "Make crops of whole patches: config.DATA.TRAIN.TRANSFORMS, or another config.DATA.IMG_SIZE."
            raise ConfigError([Problem("sides of the images", ", ".join(wrong), must, fix)])


_OFFSET = 0.1  # patches, against rounding of the size: https://github.com/facebookresearch/dino/issues/8


def interpolated(positions: Tensor, grid: tuple[int, int], wanted: tuple[int, int], how: str = "antialiased") -> Tensor:
    """Interpolate position embeddings (1, h * w, D) to another grid, bicubic; unchanged if the grids are equal.

    Args:
        positions: position embeddings of ``grid``.
        grid, wanted: height and width of the old and the new grid, in patches.
        how: antialiased, as ``timm.layers.resample_abs_pos_embed``; bicubic, without antialiasing, as transformers'
            ViT and DINOv2; offset, bicubic with a scale factor for 0.1 patches more, as DINO and DINOv2.
    """
    if grid == wanted:
        return positions
    # In float32, as all three implementations.
    wide = positions.to(torch.promote_types(positions.dtype, torch.float32))
    maps = wide.unflatten(1, grid).permute(0, 3, 1, 2)
    if how == "offset":
        factors = [(side + _OFFSET) / before for side, before in zip(wanted, grid, strict=True)]
        maps = F.interpolate(maps, scale_factor=factors, mode="bicubic")
    else:
        maps = F.interpolate(maps, size=wanted, mode="bicubic", antialias=how == "antialiased")
    return maps.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)
