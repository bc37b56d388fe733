"""Selection of patches for a vision transformer and its heads: masked, visible, and returned ones.

Draws are keyed by (seed, epoch, image, crop), the same on any number of ranks and micro-batches. They are made on the
images' device for all images at once, and select the same number of patches in each image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vissl_zero.models.keyed_random import NUM_BITS, keyed_bits


class PatchView(NamedTuple):
    """The selected patches of one resolution; a tuple, so that hooks see the tensors in it.

    Every image has the same number of patches, so that shapes do not depend on draws.

    Attributes:
        masked: (b, P) bool, patches replaced by the mask token; None: none.
        kept: (b, k) int64, visible patches, the others being dropped; None: all.
        wanted: (b, ..., m) int64, patches that heads return; None: all.
        last_blocks: number of the trunk's last blocks whose tokens heads get too.
    """

    masked: Tensor | None = None
    kept: Tensor | None = None
    wanted: Tensor | None = None
    last_blocks: int = 0


# (image tensors of all resolutions, height and width of a patch) -> a view of each resolution.
ChoosePatches = Callable[[Sequence[Tensor], tuple[int, int]], list[PatchView]]


class Tokens(NamedTuple):
    """The tokens of one resolution, for a head whose ``forward`` has a parameter ``tokens``.

    Attributes:
        rows: (b, num_prefix + visible patches, D) after the trunk's last norm.
        num_prefix: number of class and register tokens, which are first.
        grid: patches per column and per row, h and w.
        view: selected patches.
        blocks: tokens of the last blocks, in order, before the trunk's last norm; each of the shape of ``rows``.
    """

    rows: Tensor
    num_prefix: int
    grid: tuple[int, int]
    view: PatchView
    blocks: tuple[Tensor, ...] = ()

    def wanted(self) -> Tensor:
        """Return the tokens of ``view.wanted``, (b, ..., m, D). No patch may have been dropped."""
        patches = self.rows[:, self.num_prefix :]
        return patches if self.view.wanted is None else taken(patches, self.view.wanted)


def taken(rows: Tensor, index: Tensor) -> Tensor:
    """Take rows (b, n, D) at positions (b, ..., m) of each image: (b, ..., m, D)."""
    flat = index.flatten(1)
    return rows.gather(1, flat[:, :, None].expand(-1, -1, rows.shape[2])).unflatten(1, index.shape[1:])


def grid_of(images: Tensor, patch_size: tuple[int, int]) -> tuple[int, int]:
    """Count the patches per column and per row of images (b, 3, H, W)."""
    return images.shape[2] // patch_size[0], images.shape[3] // patch_size[1]


def sine_positions(grid: tuple[int, int], dim: int, like: Tensor) -> Tensor:
    """Compute fixed position embeddings (h * w, dim): sines and cosines of the column, then those of the row.

    Args:
        grid: h and w.
        dim: a multiple of 4.
        like: tensor with the device and dtype of the result.
    """
    # The order of facebookresearch/mae util/pos_embed.py and I-JEPA ("here w goes first"), whose predictors then fit.
    rates = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64, device=like.device) / (dim / 4))
    rows, columns = (torch.arange(side, dtype=torch.float64, device=like.device)[:, None] * rates for side in grid)
    angles = torch.stack([columns[None].expand(grid[0], -1, -1), rows[:, None].expand(-1, grid[1], -1)], dim=2)
    return torch.cat([angles.sin(), angles.cos()], dim=3).flatten(2).flatten(0, 1).to(like.dtype)


_NUM_BLOCKS = 10  # blocks drawn per image; a constant number, so that no loop waits for the device


def random_order(images: Tensor, num_patches: int, epoch: int, name: str) -> Tensor:
    """Draw a random order of the patches of each image.

    Args:
        images: (b, 3, H, W), crop-major.
        num_patches: P.
        epoch: number of the epoch, from 0.
        name: name of this draw, part of its key; draws of different names are independent.
    Returns:
        (b, P) int64.
    """
    return keyed_bits(len(images), num_patches, name, images.device, epoch).argsort(dim=1, stable=True)


def with_patches_dropped(
    images: Sequence[Tensor], patch_size: tuple[int, int], share: float, epoch: int
) -> list[PatchView]:
    """Drop a random share of the patches of images of the first size, and no patches of other sizes (MSN)."""
    height, width = grid_of(images[0], patch_size)
    num_kept = max(1, int(height * width * (1 - share)))
    order = random_order(images[0], height * width, epoch, "drop")
    return [PatchView(kept=order[:, :num_kept]), *(PatchView() for _ in images[1:])]


def block_order(images: Tensor, grid: tuple[int, int], counts: Tensor, epoch: int, name: str) -> Tensor:
    """Order the patches of each image so that the first are in blocks (BEiT, https://arxiv.org/abs/2106.08254).

    Ten blocks have at most ``counts`` patches each, and aspect ratios from 0.3 to 1 / 0.3. Patches are ordered by the
    first block that covers them, at random within a block; patches of no block are last.

    Args:
        images: (b, 3, H, W), crop-major.
        grid: patches per column and row, h and w.
        counts: (b,) int64, number of patches that the caller will select in each image.
        epoch, name: as for ``random_order``.
    Returns:
        (b, h * w) int64.
    """
    shares = _shares(images, _NUM_BLOCKS * 4, epoch, f"{name}.blocks").unflatten(1, (_NUM_BLOCKS, 4)).unbind(2)
    most = counts[:, None].double()
    least = most.clamp(max=4.0)
    # At least 4 patches, the default of BEiT's masking_generator.py.
    areas = least + shares[0] * (most - least)
    # Uniform in the logarithm, as in BEiT's masking_generator.py: tall and wide blocks are equally likely.
    ratios = (0.3 ** (1 - 2 * shares[1])).sqrt()
    heights = (areas.sqrt() * ratios).round().long().clamp(1, grid[0])
    widths = (areas.sqrt() / ratios).round().long().clamp(1, grid[1])
    covers = _between(shares[2], heights, grid[0])[:, :, :, None] & _between(shares[3], widths, grid[1])[:, :, None]
    covers = torch.cat([covers.flatten(2), covers.new_ones(len(images), 1, grid[0] * grid[1])], dim=1)
    first = covers.byte().argmax(dim=1)  # the first block that covers a patch
    bits = keyed_bits(len(images), grid[0] * grid[1], name, images.device, epoch)
    # The block in the upper bits, a random number in the lower ones: one sort orders by both.
    return ((first << NUM_BITS) + bits).argsort(dim=1, stable=True)


def block_targets(
    images: Tensor,
    grid: tuple[int, int],
    num_targets: int,
    num_patches: int,
    ratio: tuple[float, float],
    epoch: int,
    name: str,
) -> Tensor:
    """Draw blocks of each image, all with the same number of patches; blocks may overlap.

    Args:
        images: (b, 3, H, W), crop-major.
        grid: patches per column and row, h and w.
        num_targets: T, blocks of an image.
        num_patches: m, patches of a block; at most h * w.
        ratio: smallest and largest height over width.
        epoch, name: as for ``random_order``.
    Returns:
        (b, T, m) int64.
    """
    # Column by column, so that only the last column of a block may be incomplete.
    shares = _shares(images, num_targets * 3, epoch, name).unflatten(1, (num_targets, 3)).unbind(2)
    ratios = ratio[0] + shares[0] * (ratio[1] - ratio[0])
    heights = (num_patches * ratios).sqrt().round().long().clamp(-(-num_patches // grid[1]), min(grid[0], num_patches))
    widths = -(-num_patches // heights)
    tops = (shares[1] * (grid[0] - heights + 1)).long()
    lefts = (shares[2] * (grid[1] - widths + 1)).long()
    index = torch.arange(num_patches, device=images.device)
    heights, tops, lefts = heights[:, :, None], tops[:, :, None], lefts[:, :, None]
    return (tops + index % heights) * grid[1] + lefts + index // heights


def outside(images: Tensor, patches: Tensor, num_patches: int, epoch: int, name: str) -> Tensor:
    """Order all patches of each image at random, with those outside of ``patches`` first.

    Args:
        images: (b, 3, H, W), crop-major.
        patches: (b, ..., m) int64.
        num_patches: P.
        epoch, name: as for ``random_order``.
    Returns:
        (b, P) int64.
    """
    hit = as_mask(patches.flatten(1), num_patches).long()
    bits = keyed_bits(len(images), num_patches, name, images.device, epoch)
    return ((hit << NUM_BITS) + bits).argsort(dim=1, stable=True)


def masked_counts(
    images: Tensor, num_patches: int, ratio: tuple[float, float], probability: float, epoch: int, name: str
) -> Tensor:
    """Draw the number of patches to mask in each image: 0, or a share between two limits.

    Args:
        images: (b, 3, H, W), crop-major.
        num_patches: P.
        ratio: smallest and largest share.
        probability: probability that an image has masked patches.
        epoch, name: as for ``random_order``.
    Returns:
        (b,) int64, at most ``int(ratio[1] * P)``.
    """
    is_masked, place = _shares(images, 2, epoch, name).unbind(1)
    counts = ((ratio[0] + place * (ratio[1] - ratio[0])) * num_patches).long().clamp(min=1)
    return torch.where(is_masked < probability, counts.clamp(max=int(ratio[1] * num_patches)), 0)


def as_mask(patches: Tensor, num_patches: int) -> Tensor:
    """Convert (b, m) int64 positions to (b, P) bool."""
    mask = torch.zeros(len(patches), num_patches, dtype=torch.bool, device=patches.device)
    return mask.scatter(1, patches, True)


def _shares(images: Tensor, count: int, epoch: int, name: str) -> Tensor:
    """Draw (b, count) float64, uniform in [0, 1)."""
    return keyed_bits(len(images), count, name, images.device, epoch).double() / 2**NUM_BITS


def _between(share: Tensor, sizes: Tensor, side: int) -> Tensor:
    """Place intervals of ``sizes`` (b, J) in ``side`` cells, at positions ``share`` in [0, 1): (b, J, side) bool."""
    begin = (share * (side - sizes + 1)).long()[:, :, None]
    cells = torch.arange(side, device=sizes.device)
    return (cells >= begin) & (cells < begin + sizes[:, :, None])
