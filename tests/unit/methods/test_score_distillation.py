"""Scores of a frozen teacher, centered: DINO's loss with a teacher that stays as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vissl_zero.methods.dino import DINO
from vissl_zero.methods.distillation import (
    DINODistillation,
    IBOTDistillation,
    KnowledgeDistillation,
    dino_distillation_loss,
)
from vissl_zero.methods.feature_distillation import FeatureDistillation
from vissl_zero.methods.health import embedding_sums
from vissl_zero.methods.swav import SwAVOutput
from vissl_zero.models.keyed_random import set_random_key


def test_with_a_center_and_other_crops_alone_it_is_dinos_loss():
    generator = torch.Generator().manual_seed(0)

    def output(rows: int) -> list[Any]:
        scores = torch.randn(rows, 7, generator=generator, dtype=torch.float64)
        return [SwAVOutput(scores[:, :3], [scores], None)]

    warm = {"teacher_temp_min": 0.07, "teacher_temp_max": 0.07, "teacher_temp_warmup_iters": 0}
    dino = DINO(output_dim=7, ema_center=0.6, **warm).double()
    frozen = DINODistillation(student_num_crops=3, output_dim=7, ema_center=0.6, swapped_assignment=True).double()
    batch: Any = SimpleNamespace(num_local=4, num_crops=[3])
    losses = []
    for step in range(3):
        student, teacher = output(12), output(8)
        for method in (dino, frozen):
            method.on_step(step, 0)
            losses.append(method(student, batch, teacher).item())
            method.update_state([method.observe(student, batch, teacher)])
    assert losses[::2] == pytest.approx(losses[1::2], rel=1e-12)
    assert frozen.center is not None and frozen.center.mean.abs().max() > 0.01
    assert frozen.couples_samples and not DINODistillation(3).couples_samples and DINODistillation(3).center is None


def test_without_a_center_targets_are_the_teachers_scores_at_its_temperature():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(n, 7, generator=generator, dtype=torch.float64) for n in (12, 8))
    method = DINODistillation(student_num_crops=3, teacher_temperature=0.05, student_temperature=0.2)
    batch: Any = SimpleNamespace(num_local=4, num_crops=[3])
    outputs, theirs = ([SwAVOutput(scores[:, :3], [scores], None)] for scores in (student, teacher))
    targets = F.softmax(teacher / 0.05, dim=1).view(2, 4, 7)
    expected = dino_distillation_loss(student.view(3, 4, 7), targets, 0.2, False)
    torch.testing.assert_close(method(outputs, batch, theirs), expected)
    assert torch.equal(method.health_sums(), embedding_sums(student))
    assert method.observe(outputs, batch, theirs) is None and not method.couples_samples


@pytest.mark.parametrize(
    "method",
    [DINODistillation(2), IBOTDistillation(2), FeatureDistillation(5), KnowledgeDistillation()],
)
def test_a_teacher_that_is_named_is_frozen(method):
    model = torch.nn.Linear(2, 2)
    assert method.make_teacher(model) is model and not any(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_student_alone_misses_patches_where_some_are_dropped(share):
    seen: list[dict[str, Any]] = []

    def model(images: list[torch.Tensor], *probe: Any, **keys: Any) -> list[Any]:
        seen.append(keys)
        return []

    set_random_key(0, 0, torch.arange(3))
    images = [torch.zeros(6, 3, 16, 16), torch.zeros(3, 3, 8, 8)]
    batch: Any = SimpleNamespace(images=images, num_local=3, num_crops=[2, 1])
    method = DINODistillation(3, patch_drop=share)
    method.run_student(model, batch)
    method.run_teacher(model, batch)
    student, teacher = seen
    assert teacher == {} and bool(student) == bool(share)
    if share:
        large, small = student["choose_patches"](images, (4, 4))
        assert large.kept.shape == (6, 8) and small.kept is None
