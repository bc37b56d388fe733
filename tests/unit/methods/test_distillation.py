"""Distillation by a frozen classifier: images without a class, and what a teacher from a file of weights needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.config.example_config import CPU_HOST
from tests.unit.methods.batches import LossBatch
from vissl_zero.config.compose import compose
from vissl_zero.errors import Problem
from vissl_zero.methods.distillation import KnowledgeDistillation
from vissl_zero.resolve.components import method_of
from vissl_zero.resolve.decisions import Decisions

TEACHER = "config.DISTILLATION.TEACHER_MODEL"
VIT = "{IMAGE_SIZE: 16, PATCH_SIZE: 8, NUM_LAYERS: 1, NUM_HEADS: 2, HIDDEN_DIM: 8, MLP_DIM: 8}"
WEIGHTS = f"{TEACHER}.WEIGHTS_INIT.PARAMS_FILE"


def _logits(seed: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_an_image_without_a_class_learns_from_the_teacher_alone() -> None:
    """https://arxiv.org/abs/1503.02531: a weighted mean of both losses; a label of -1 does not count."""
    student, teacher, targets = _logits(0), _logits(1), torch.tensor([2, -1, 0, -1])
    batch: Any = LossBatch([1], torch.arange(4), 4, targets)
    loss = KnowledgeDistillation(temperature=2.0, soft_target_alpha=0.7)([student], batch, [teacher])
    soft = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean") * 4
    hard = F.cross_entropy(student[[0, 2]], targets[[0, 2]])
    torch.testing.assert_close(loss, 0.7 * soft + 0.3 * hard)


def _problems(*words: str) -> list[Problem]:
    keys = ["config.LOSS.distillation_loss.teacher=''", f"{TEACHER}.HEAD.PARAMS=[[mlp,{{dims:[-1,10]}}]]"]
    trunk = [f"{TEACHER}.TRUNK.NAME=vision_transformer", f"{TEACHER}.TRUNK.VISION_TRANSFORMERS={VIT}"]
    cfg = compose("digits/distillation", [*keys, *trunk, *words]).run
    return method_of(cfg.LOSS["name"]).problems(cfg, Decisions(cfg, CPU_HOST))


def test_a_teacher_needs_weights_that_are_there(tmp_path: Path) -> None:
    for path in ("''", str(tmp_path / "none.pth")):
        (problem,) = _problems(f"{WEIGHTS}={path}")
        assert (problem.key, problem.must) == (WEIGHTS, "must name the teacher's weights")
    (tmp_path / "some.pth").touch()
    assert _problems(f"{WEIGHTS}={tmp_path}/some.pth") == []


@pytest.mark.parametrize("word", ["TRUNK.NAME=resnett", "TRUNK.VISION_TRANSFORMERS.NUM_HEADS=3"])
def test_what_is_wrong_in_the_teachers_model_is_named_under_its_own_key(word: str, tmp_path: Path) -> None:
    (tmp_path / "some.pth").touch()
    (problem,) = _problems(f"{WEIGHTS}={tmp_path}/some.pth", f"{TEACHER}.{word}")
    assert problem.key.startswith(f"{TEACHER}.TRUNK.")
