"""Feature distillation in one process: its terms, the queue, what the teacher sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.errors import ConfigError
from vissl_zero.methods.feature_distillation import (
    FeatureDistillation,
    FeatureMaps,
    feature_distance,
    queue_distillation_loss,
    resized,
)


def _rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _batch(num_local: int, num_crops: int = 1, images: Tensor | None = None) -> Any:
    return SimpleNamespace(num_local=num_local, num_crops=[num_crops], images=[] if images is None else [images])


def test_the_queue_s_term_is_lightly_train_s():
    """``KLDivLoss(batchmean)`` of the softmax of similarities, as distillationv3_loss.py at 8bed1c95 has it."""
    student, teacher, queue = (F.normalize(_rows(seed, n, 5), dim=1) for seed, n in ((0, 4), (1, 4), (2, 9)))
    expected = torch.nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(student @ queue.T / 0.07, dim=1), F.softmax(teacher @ queue.T / 0.07, dim=1)
    )
    assert queue_distillation_loss(student, teacher, queue, 0.07) == pytest.approx(expected.item(), rel=1e-12)
    assert queue_distillation_loss(teacher, teacher, queue, temperature=0.07).abs() < 1e-12


def test_the_distance_is_of_unit_vectors_or_of_features_as_they_are():
    student, teacher = _rows(0, 4, 5), _rows(1, 4, 5)
    cosines = F.cosine_similarity(student, teacher, dim=1)
    assert feature_distance(student, teacher, normalize=True) == pytest.approx(
        (2 - 2 * cosines).mean().item(), rel=1e-12
    )
    assert feature_distance(student, teacher, False) == pytest.approx(F.mse_loss(student, teacher).item(), rel=1e-12)


def _method(**keys: Any) -> FeatureDistillation:
    colors = {"teacher_mean": [0.0], "teacher_std": [1.0], "student_mean": [0.0], "student_std": [1.0]}
    return FeatureDistillation(**({"embedding_dim": 5, "queue_size": 6} | colors | keys)).double()


def test_classes_are_the_batch_and_then_the_newest_of_the_past():
    method, first, second = _method(temperature=0.1), _rows(1, 4, 5), _rows(2, 4, 5)
    student = _rows(0, 4, 5)
    for teacher, classes in ((first, first), (second, torch.cat([second, first[:2]]))):
        expected = queue_distillation_loss(*(F.normalize(rows, dim=1) for rows in (student, teacher, classes)), 0.1)
        assert method([student], _batch(4), [teacher]) == pytest.approx(expected.item(), rel=1e-12)
        method.update_state([method.observe([student], _batch(4), [teacher])])


def test_a_batch_beyond_the_queue_is_cut_in_the_order_of_samples():
    """Rows are crop-major, the queue sample-major: else what is dropped would depend on the number of ranks."""
    method, teacher = _method(queue_size=4), _rows(1, 6, 5)
    method.update_state([method.observe([teacher], _batch(3, 2), [teacher])])
    assert method.queue is not None
    assert torch.allclose(method.queue.embeddings[0], F.normalize(teacher[[0, 3, 1, 4]], dim=1))


def test_without_a_queue_the_distance_alone_counts_and_nothing_couples_images():
    method, student, teacher = _method(queue_weight=0, global_weight=2), _rows(0, 4, 5), _rows(1, 4, 5)
    assert method([student], _batch(4), [teacher]) == pytest.approx(
        2 * feature_distance(student, teacher, normalize=True).item()
    )
    assert not method.couples_samples and not list(method.buffers())
    assert _method().couples_samples


def test_maps_are_resized_as_torch_does():
    maps = _rows(0, 2, 5, 3, 4)
    for size in ((7, 2), (3, 4), (1, 9)):
        expected = F.interpolate(maps, size, mode="bilinear", align_corners=False)
        assert torch.allclose(resized(maps, size), expected, rtol=0, atol=1e-12)


def test_places_count_alike_whatever_the_grids_and_must_have_the_teacher_s_channels():
    method, rows = _method(queue_weight=0, global_weight=1, dense_weight=2), _rows(0, 4, 5)
    own, theirs = [_rows(1, 1, 5, 2, 2), _rows(2, 3, 5, 1, 1)], [_rows(3, 1, 5, 4, 4), _rows(4, 3, 5, 2, 2)]
    loss = method([FeatureMaps(rows, own)], _batch(1, 4), [FeatureMaps(rows, theirs)])
    pairs = zip(own, theirs, strict=True)
    by_crop = [(2 - 2 * F.cosine_similarity(resized(a, b.shape[2:]), b)).mean(dim=(1, 2)) for a, b in pairs]
    assert loss == pytest.approx(2 * torch.cat(by_crop).mean().item(), rel=1e-12)
    with pytest.raises(ConfigError, match="must end in the 3 channels of the teacher's maps"):
        method([FeatureMaps(rows, own[:1])], _batch(1, 4), [FeatureMaps(rows, [theirs[0][:, :3]])])


def test_the_teacher_sees_images_normalized_as_its_weights_expect():
    pixels = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    (student_mean, student_std), (mean, std) = ([0.5, 0.4, 0.3], [0.5, 0.25, 0.2]), ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])

    def normalized(mean: list[float], std: list[float]) -> Tensor:
        return (pixels - pixels.new_tensor(mean)[:, None, None]) / pixels.new_tensor(std)[:, None, None]

    seen: list[Tensor] = []
    colors = {"student_mean": student_mean, "student_std": student_std, "teacher_mean": mean, "teacher_std": std}
    method = _method(**colors)
    method.run_teacher(
        lambda images: seen.extend(images) or [], _batch(2, images=normalized(student_mean, student_std))
    )
    assert torch.allclose(seen[0], normalized(mean, std), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "colors",
    [
        {},
        {"student_mean": [0.5, 0.0]},
        {"teacher_mean": [0.0, 0.5]},
        {"student_std": [1.0, 2.0]},
        {"teacher_std": [2.0, 1.0]},
    ],
)
def test_images_are_normalized_for_the_teacher_where_any_color_differs(colors: dict[str, list[float]]) -> None:
    kinds = [f"{who}_{what}" for what in ("mean", "std") for who in ("student", "teacher")]
    keys = {kind: [float(kind.endswith("std"))] * 2 for kind in kinds} | colors
    image = _rows(0, 1, 2, 3, 3)
    mean, their_mean, std, their_std = (image.new_tensor(keys[kind])[:, None, None] for kind in kinds)
    torch.testing.assert_close(_method(**keys)._recolored(image), (image * std + mean - their_mean) / their_std)
