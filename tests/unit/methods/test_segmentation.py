"""The loss of pixels against torch's own, and the layers of the head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.methods.batches import LossBatch
from vissl_zero.errors import ConfigError
from vissl_zero.methods.segmentation import FCNHead, Segmentation, as_large_as, pixel_cross_entropy


def _batch(masks: torch.Tensor | None, rows: int = 3) -> LossBatch:
    return LossBatch([1], torch.arange(rows), rows, masks=masks)


def test_the_loss_is_torchs_over_pixels_that_count() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, 6, generator=generator, dtype=torch.float64)
    masks = torch.randint(0, 5, (3, 8, 12), generator=generator).to(torch.uint8)
    masks[0, :6], masks[2, 1] = 255, 255
    weight = [1.0, 0.5, 2.0, 3.0, 0.0]
    for given, weights in ((None, None), (weight, torch.tensor(weight, dtype=torch.float64))):
        loss = Segmentation(given)([logits], _batch(masks))
        large = F.interpolate(logits, size=(8, 12), mode="bilinear")
        assert loss.item() == pytest.approx(F.cross_entropy(large, masks.long(), weights, ignore_index=255).item())
    assert torch.equal(as_large_as(logits, masks), large)


def test_a_micro_batch_without_a_pixel_that_counts_has_loss_0() -> None:
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss = pixel_cross_entropy(logits, torch.full((2, 4, 4), 255, dtype=torch.uint8))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


def test_accuracy_is_of_pixels_that_count() -> None:
    masks = torch.tensor([[[0, 1], [1, 255]]], dtype=torch.uint8)
    logits = F.one_hot(torch.tensor([[[0, 1], [0, 0]]]), 3).permute(0, 3, 1, 2).double()
    method = Segmentation()
    method([logits], _batch(masks, 1))
    assert method.health(method.health_sums()) == {"pixel_accuracy": 2 / 3}
    assert method.health(torch.tensor([1.0, 1.0])) == {"pixel_accuracy": 1.0}


def test_images_without_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match="images with masks"):
        Segmentation()([torch.zeros(3, 2, 4, 4)], _batch(None))


def test_two_widths_are_a_linear_head_and_more_a_decoder() -> None:
    assert [type(layer) for layer in FCNHead([6, 3]).layers] == [nn.Conv2d]
    decoder = FCNHead([6, 8, 3])
    assert [type(layer) for layer in decoder.layers] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d]
    assert decoder(torch.zeros(2, 6), [torch.randn(2, 6, 5, 7)]).shape == (2, 3, 5, 7)
