"""The first losses of every method, written down: parity compares a method with itself, and would not see it change.

A commit that changes a number on purpose writes them again: ``python -m tests.unit.methods.test_first_losses``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.dist.test_method_parity import CASES, make_method_plan, plain
from vissl_zero.methods.method import Method, build_method
from vissl_zero.registry import LOSSES, METHODS

PAGE = Path(__file__).with_name("first_losses.json")
FIRST = json.loads(PAGE.read_text()) if PAGE.exists() else {}


def _numbers(method: str) -> dict[str, float]:
    """Four losses, the figures of the last step, and what all weights and all state of the loss add up to."""
    result = plain(method, "batch")
    totals = {"weights": 0.0, "teacher": 0.0, "loss": 0.0}
    for name, tensor in result.state.items():
        kind = name.partition(":")[0]
        totals[kind if kind in totals else "weights"] += float(tensor.double().abs().sum())
    losses = {f"loss {step}": loss for step, loss in enumerate(result.losses)}
    figures = {f"figure {name}": value for name, value in result.figures.items()}
    return losses | figures | {f"sum of {name}": total for name, total in totals.items()}


@pytest.mark.parametrize("method", CASES)
def test_a_method_learns_as_it_did(method: str) -> None:
    assert _numbers(method) == pytest.approx(FIRST[method], rel=1e-8, abs=1e-9)


TEACHERS = {
    "byol",
    "moco_v2",
    "moco_v3",
    "swav_momentum",
    "ijepa",
    "data2vec",
    "ibot",
    "dinov2",
    "dinov3",
    "msn",
    "dino",
}
FROZEN = {"distillation", "feature_distillation"}
# What a method tells the loop of itself -> the methods that say otherwise than ``Method``.
SAID = {
    "has_teacher": TEACHERS | FROZEN,
    "teacher_follows": FROZEN,
    "couples_samples": {"supervised", "maskfeat", "data2vec", "rotnet", "jigsaw"},
    "needs_initial_embeddings": {"deepcluster_v2"},
    "remembers_images": {"npid", "pirl", "deepcluster_v2"},
    "loss_sees_images": {"mae", "simmim", "maskfeat"},
    "ignored_label": {"supervised"},
    "predicts_pixels": {"segmentation"},
}
# Loss of a model that tells nothing apart: of guessing among 5 prototypes, 4 angles, 7 permutations.
GUESSING = {
    "simsiam": 0.0,
    "byol": 4.0,
    **dict.fromkeys(("swav", "swav_momentum", "msn", "dino"), math.log(5)),
    "ibot": math.log(5) + 0.5 * math.log(7),
    "deepcluster_v2": (math.log(5) + math.log(3)) / 2,
    "rotnet": math.log(4),
    "jigsaw": math.log(7),
}


def test_what_a_method_tells_the_loop() -> None:
    methods = {name: build_method(make_method_plan(name, 0, 1, "batch").config.LOSS, 24) for name in CASES}
    for fact, expected in SAID.items():
        assert {name for name, m in methods.items() if getattr(m, fact) != getattr(Method, fact)} == expected, fact
    assert {n: m.guessing_loss for n, m in methods.items() if m.guessing_loss is not None} == pytest.approx(GUESSING)
    prototypes = {name: list(m.num_prototypes) for name, m in methods.items() if m.num_prototypes}
    assert prototypes == {"swav": [5], "swav_momentum": [5]}


def test_a_method_and_its_losses_agree_about_the_teacher() -> None:
    for name in METHODS.builtin():
        spec = METHODS.get(name).build()
        for loss in spec.losses:
            method = LOSSES.get(loss).build
            assert method.has_teacher == (spec.teacher != "none"), loss
            assert (method.has_teacher and method.teacher_follows) == spec.teacher_follows, loss


if __name__ == "__main__":
    PAGE.write_text(json.dumps({method: _numbers(method) for method in CASES}, indent=1) + "\n")
