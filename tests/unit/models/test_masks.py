"""Masks: as many patches of every image, in blocks where asked for, keyed by seed, epoch, image and crop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.patches import as_mask, block_order, block_targets, masked_counts, outside, random_order

GRID, IMAGES = (6, 8), torch.zeros(10, 3, 12, 16)  # two crops of five images
COUNTS = torch.tensor([0, 1, 5, 12, 24] * 2)
DRAWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "random": lambda images, epoch: random_order(images, 48, epoch, "m"),
    "blocks": lambda images, epoch: block_order(images, GRID, torch.full((len(images),), 12), epoch, "m"),
    "targets": lambda images, epoch: block_targets(images, GRID, 4, 7, (0.75, 1.5), epoch, "m"),
    "counts": lambda images, epoch: masked_counts(images, 48, (0.1, 0.5), 0.5, epoch, "m"),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_masks_belong_to_an_image_and_its_epoch(draw: Callable[[Tensor, int], Tensor]) -> None:
    set_random_key(1, 7, torch.arange(5))
    both = draw(IMAGES, 3)
    set_random_key(1, 9, torch.tensor([3, 4]))  # in another step, beside other images
    assert torch.equal(draw(IMAGES[:4], 3), both[[3, 4, 8, 9]])
    assert not torch.equal(draw(IMAGES[:4], 4), both[[3, 4, 8, 9]])
    set_random_key(2, 9, torch.tensor([3, 4]))
    assert not torch.equal(draw(IMAGES[:4], 3), both[[3, 4, 8, 9]])
    assert not torch.equal(both[:5], both[5:])


def test_blocks_lie_together() -> None:
    """Neighbors of a masked patch are masked far more often than at random."""
    set_random_key(1, 0, torch.arange(500))
    images = torch.zeros(500, 3, 12, 16)
    shares = {}
    for name, order in (
        ("blocks", block_order(images, GRID, torch.full((500,), 12), 0, "m")),
        ("random", DRAWS["random"](images, 0)),
    ):
        assert torch.equal(order.sort(dim=1).values, torch.arange(48).expand(500, -1))
        mask = as_mask(order[:, :12], 48).view(500, *GRID)
        assert (mask.flatten(1).sum(dim=1) == 12).all()
        shares[name] = (mask[:, :, 1:] & mask[:, :, :-1]).sum() / mask[:, :, 1:].sum()
        assert mask.any(dim=0).all()
    assert shares["random"] < 0.3 and shares["blocks"] > 0.5


def test_targets_are_blocks_and_the_context_has_none_of_them() -> None:
    set_random_key(1, 0, torch.arange(5))
    targets = DRAWS["targets"](IMAGES, 0)
    assert targets.shape == (10, 4, 7) and targets.min() >= 0 and targets.max() < 48
    for block in targets.flatten(0, 1):
        rows, columns = block // 8, block % 8
        assert len(set(block.tolist())) == 7
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert height * (width - 1) < 7 <= height * width
    order = outside(IMAGES, targets, 48, 0, "context")
    for own, seen in zip(targets, order[:, : 48 - 28], strict=True):
        assert not set(own.flatten().tolist()) & set(seen.tolist())


def test_half_of_the_images_are_masked_by_shares_between_the_limits() -> None:
    set_random_key(1, 0, torch.arange(2000))
    counts = masked_counts(torch.zeros(2000, 3, 4, 4), 100, (0.1, 0.5), 0.5, 0, "m")
    masked = counts[counts > 0]
    assert abs(len(masked) - 1000) < 110 and masked.min() >= 10 and masked.max() <= 50
    assert abs(masked.double().mean() - 30) < 1.5
