"""A loss of the user's own needs forward and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.methods.batches import LossBatch
from vissl_zero.errors import ConfigError, RegistryError
from vissl_zero.methods.contrastive import SupCon
from vissl_zero.methods.distillation import KnowledgeDistillation, SwAVDistillation
from vissl_zero.methods.method import Batch, EmbeddingMethod, Method, build_method
from vissl_zero.methods.pretext import RotNet
from vissl_zero.methods.prototypes import MSN, DeepClusterV2
from vissl_zero.methods.supervised import CrossEntropy
from vissl_zero.methods.two_views import BYOL, SimCLR
from vissl_zero.registry import LOSSES


@dataclass
class _Config:
    scale: float = 1.0


@pytest.fixture
def own_loss() -> Iterator[None]:
    @LOSSES.register("own_loss", config=_Config)
    class OwnLoss(Method):
        def __init__(self, scale: float = 1.0):
            super().__init__()
            self.scale = scale

        def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
            return self.scale * outputs[0].square().mean()

    yield
    del LOSSES._components["own_loss"]


def test_everything_but_forward_has_a_default(own_loss: None) -> None:
    criterion = build_method({"name": "own_loss", "own_loss": {"scale": 3.0}})
    outputs, batch = [torch.full((4, 1), 2.0)], LossBatch([1], torch.arange(4), 4)
    criterion.on_step(0, 0)
    assert criterion.probe() is None
    assert criterion(outputs, batch) == 12.0
    criterion.update_state([criterion.observe(outputs, batch)])
    assert (
        criterion.health(criterion.health_sums().double()) == {}
        and criterion.normalized_rows() == []
        and criterion.state_dict() == {}
    )
    asks_for = ("has_teacher", "needs_initial_embeddings", "remembers_images", "loss_sees_images", "predicts_pixels")
    assert not any(getattr(criterion, name) for name in (*asks_for, "views_apart", "mixing", "num_prototypes"))
    assert criterion.couples_samples  # whoever does not say otherwise gets no samples apart
    assert criterion.teacher_follows and criterion.teacher_crops is None
    assert criterion.ignored_label is criterion.guessing_loss is None
    assert criterion.heaviest_step() == 0 and not criterion.moves_anchor(1)


def test_a_loss_without_keys_needs_no_block(own_loss: None) -> None:
    assert build_method({"name": "own_loss"})([torch.ones(2)], LossBatch([1], torch.arange(2), 2)) == 1.0


def test_mistakes_are_named() -> None:
    with pytest.raises(RegistryError, match=r"config.LOSS.name: must be a known loss .*Did you mean 'swav_loss'"):
        build_method({"name": "swav_los"})
    with pytest.raises(NotImplementedError, match="Method must define forward"):
        Method()([], LossBatch([1], torch.arange(2), 2))


ROWS = torch.ones(6, 5)
CROPS = LossBatch([2], torch.arange(3), 3)


def _swav_distillation(**keys: Any) -> SwAVDistillation:
    return SwAVDistillation(num_crops=2, num_prototypes=[7], embedding_dim=4, queue_length=0, **keys)


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda: RotNet()([ROWS], CROPS), "must end in 4 outputs (got 5 outputs)"),
        (lambda: BYOL()([ROWS], CROPS, [ROWS]), "needs a first head that gives predictions (got Tensor)"),
        (lambda: SimCLR()([ROWS[:5]], CROPS), "must make 2 crops of an image for this loss (got 2)"),
        (lambda: SupCon()([ROWS], CROPS), "must have a class for each image for supcon_loss"),
        (lambda: DeepClusterV2(3, [2, 5]).set_images(4), "must be at most the 4 training images (got [2, 5])"),
        (
            lambda: KnowledgeDistillation()([ROWS], CROPS, [torch.ones(6, 7)]),
            "must end in the teacher's 7 outputs (got 5 outputs)",
        ),
        (lambda: _swav_distillation()([ROWS], CROPS, []), "must end in 7, the teacher's prototypes (got 5)"),
        (
            lambda: _swav_distillation(use_teacher_prototypes=True)([ROWS], CROPS, []),
            "must end in 4, the width of the teacher's embeddings (got 5)",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(compute: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compute()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_as_many_clusters_as_images_are_none_too_many_and_in_a_dry_run_none_are_known() -> None:
    for num_images in (0, 5):
        DeepClusterV2(3, [2, 5]).set_images(num_images)


def test_a_method_with_a_teacher_and_no_momentum_says_what_it_must_define() -> None:
    with pytest.raises(NotImplementedError, match=r"EmbeddingMethod has a teacher and must define momentum\(step\)"):
        EmbeddingMethod().momentum(0)


@pytest.mark.parametrize("lengths", [None, (0, 0), (1, 1)])
def test_a_run_whose_length_nobody_knows_has_one_step(lengths: tuple[int, int] | None) -> None:
    cosine, line = BYOL(momentum=0.5), MSN(output_dim=4, momentum=0.5)
    for method in (cosine, line):
        if lengths is not None:
            method.set_length(*lengths)
        assert [method.momentum(step) for step in (0, 1)] == [0.5, 1.0]
        assert method._steps_per_epoch == 1


def test_nothing_is_measured_before_the_first_batch() -> None:
    for method in (RotNet(), SimCLR(), CrossEntropy()):
        assert method.health(method.health_sums()) == {}
