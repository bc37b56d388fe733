"""Supervised cross-entropy against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.methods.batches import LossBatch
from vissl_zero.errors import ConfigError
from vissl_zero.methods.method import Method, build_method

NAME = "cross_entropy_multiple_output_single_target"
TARGETS = torch.tensor([2, 0, 1, 2])


def _loss(name: str = NAME, **options: Any) -> Method:
    return build_method({"name": name, name: options}).double()


def _logits(crops: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(crops * len(TARGETS), 3, dtype=torch.float64, generator=generator).requires_grad_()


def _batch(crops: list[int], targets: Tensor | None = TARGETS) -> LossBatch:
    return LossBatch(crops, torch.arange(len(TARGETS)), len(TARGETS), targets)


@pytest.mark.parametrize("name", [NAME, "CrossEntropyLoss"])
def test_equals_torchs_with_gradients(name: str) -> None:
    logits = _logits()
    loss, expected = _loss(name)([logits], _batch([1])), F.cross_entropy(logits, TARGETS)
    torch.testing.assert_close(loss, expected)
    one = LossBatch([1], torch.arange(1), 1, TARGETS[:1])
    torch.testing.assert_close(_loss(name)([logits[:1]], one), F.cross_entropy(logits[:1], TARGETS[:1]))
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


def test_every_crop_has_the_label_of_its_image() -> None:
    logits = _logits(crops=3)
    expected = F.cross_entropy(logits, torch.cat([TARGETS] * 3))
    torch.testing.assert_close(_loss()([logits], _batch([1, 2])), expected)


def test_heads_are_summed() -> None:
    one, two = _logits(), _logits(seed=1)
    expected = F.cross_entropy(one, TARGETS) + F.cross_entropy(two, TARGETS)
    torch.testing.assert_close(_loss()([one, two], _batch([1])), expected)


@pytest.mark.parametrize("ignore_index", [-1, -100, 255])
@pytest.mark.parametrize("weight", [None, [0.5, 2.0, 1.5]])
def test_ignored_images_and_class_weights(ignore_index: int, weight: list[float] | None) -> None:
    targets = torch.tensor([2, ignore_index, 1, 2])
    logits = _logits()
    loss = _loss(ignore_index=ignore_index, weight=weight)([logits], _batch([1], targets))
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, weights, ignore_index=ignore_index))


def test_only_ignored_images_give_zero_and_no_gradient() -> None:
    logits = _logits()
    loss = _loss()([logits], _batch([1], torch.full((4,), -1)))
    assert loss == 0
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.eq(0).all()


def test_temperature_and_normalized_outputs() -> None:
    logits = _logits()
    loss = _loss(temperature=0.2, normalize_output=True)([logits], _batch([1]))
    torch.testing.assert_close(loss, F.cross_entropy(F.normalize(logits, dim=1) / 0.2, TARGETS))


def test_half_precision_is_computed_in_float32() -> None:
    assert _loss()([_logits().to(torch.bfloat16)], _batch([1])).dtype == torch.float32


def test_health_is_top1_of_counted_images() -> None:
    criterion = _loss()
    assert criterion.health(criterion.health_sums().double()) == {}
    logits = F.one_hot(torch.tensor([2, 0, 0, 1]), 3).double()
    criterion([logits], _batch([1], torch.tensor([2, 0, 1, -1])))
    assert criterion.health(criterion.health_sums().double()) == {"top1": pytest.approx(2 / 3)}
    assert criterion.health(torch.tensor([1.0, 1.0])) == {"top1": 1.0}  # a single image


def test_images_without_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs one label for each image, and the images have none"):
        _loss()([_logits()], _batch([1], None))
    with pytest.raises(ConfigError, match="temperature: must be positive"):
        _loss(temperature=0.0)


def test_fewer_outputs_than_classes_are_refused() -> None:
    narrow = _logits().detach()[:, :2]
    with pytest.raises(ConfigError, match=r"HEAD.PARAMS: must end in an output per class: .* class 2, .*got 2 outputs"):
        _loss()([narrow], _batch([1]))
