"""The SwAV loss and its gradients against SwAV written out by hand, in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.methods.batches import LossBatch
from tests.unit.methods.slow_swav import slow_swav
from vissl_zero.errors import ConfigError
from vissl_zero.methods.health import trivial_loss
from vissl_zero.methods.method import build_method
from vissl_zero.methods.swav import SwAVHead, SwAVLoss, SwAVOutput

NUM_CROPS, NUM_SAMPLES, DIM, PROTOTYPES = 4, 5, 6, [7, 3]


def _loss(**options: Any) -> SwAVLoss:
    keys: dict[str, Any] = {"num_crops": NUM_CROPS, "num_prototypes": PROTOTYPES, "embedding_dim": DIM, **options}
    criterion = build_method({"name": "swav_loss", "swav_loss": keys}).double()
    assert isinstance(criterion, SwAVLoss)
    return criterion


def _head() -> SwAVHead:
    torch.manual_seed(0)
    return SwAVHead(dims=[8, DIM], num_clusters=PROTOTYPES).double()


def _features(seed: int = 1) -> Tensor:
    return torch.randn(NUM_CROPS * NUM_SAMPLES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _batch(num_samples: int = NUM_SAMPLES) -> LossBatch:
    return LossBatch([2, NUM_CROPS - 2], torch.arange(num_samples), num_samples)


def _train_step(criterion: SwAVLoss, head: SwAVHead, features: Tensor, step: int, epoch: int = 0) -> Tensor:
    """What the training loop does in one step."""
    criterion.on_step(step, epoch)
    outputs = [head(features, criterion.probe())]
    loss = criterion(outputs, _batch())
    criterion.update_state([criterion.observe(outputs, _batch())])
    return loss


def _slow(head: SwAVHead, features: Tensor, queues: list[Tensor], **options: Any) -> Tensor:
    embeddings = head(features).embeddings.view(NUM_CROPS, NUM_SAMPLES, DIM)
    prototypes = [head.prototypes0.weight, head.prototypes1.weight]
    keys: dict[str, Any] = {"crops_for_assign": [0, 1], "epsilon": 0.05, "num_iters": 3, "temperature": 0.1, **options}
    return slow_swav(embeddings, prototypes, queues, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "slow_options"),
    [
        ({}, {}),
        ({"temperature": 0.3, "epsilon": 0.2, "num_iters": 5}, {"temperature": 0.3, "epsilon": 0.2, "num_iters": 5}),
        ({"crops_for_assign": [2]}, {"crops_for_assign": [2]}),
        ({"crops_for_assign": [3, 0, 1]}, {"crops_for_assign": [3, 0, 1]}),
        ({"temp_hard_assignment_iters": 1}, {"is_hard": True}),
        ({"use_double_precision": True}, {}),
    ],
    ids=["plain", "other-numbers", "one-crop", "three-crops", "hard", "double"],
)
def test_loss_and_gradients_equal_the_slow_one(options: dict[str, Any], slow_options: dict[str, Any]) -> None:
    head, features = _head(), _features().requires_grad_()
    loss = _train_step(_loss(**options), head, features, step=0)
    tensors = [features, *head.parameters()]
    gradients = torch.autograd.grad(loss, tensors)
    no_queue = [features.new_zeros(0, DIM)] * len(slow_options.get("crops_for_assign", [0, 1]))
    expected = _slow(head, features, no_queue, **slow_options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_hard_assignments_end_when_told() -> None:
    head, criterion = _head(), _loss(temp_hard_assignment_iters=2)
    soft = _loss()
    for step in range(3):
        is_equal = bool(_train_step(criterion, head, _features(), step) == _train_step(soft, head, _features(), step))
        assert is_equal == (step >= 2)


def test_a_queue_without_rows_costs_no_pass_through_the_head() -> None:
    criterion = _loss(queue={"queue_length": 12, "start_iter": 1})
    for step in (0, 1):
        criterion.on_step(step, 0)
        assert criterion.probe() is None


def test_queue_joins_the_assignment_newest_first_and_drops_the_oldest() -> None:
    head, criterion = _head(), _loss(queue={"queue_length": 12, "start_iter": 1})
    past: list[Tensor] = []
    for step in range(5):
        features = _features(step)
        queues = [torch.cat([features.new_zeros(0, DIM), *(e[c] for e in past)])[:12] for c in (0, 1)]
        expected = _slow(head, features, queues)
        torch.testing.assert_close(_train_step(criterion, head, features, step), expected, rtol=1e-12, atol=0)
        if step >= 1:
            past.insert(0, head(features).embeddings.detach().view(NUM_CROPS, NUM_SAMPLES, DIM))
    assert criterion.queue is not None and criterion.queue.num_filled == 12


def test_queue_starts_at_the_later_of_step_and_epoch() -> None:
    criterion = _loss(queue={"queue_length": 12, "start_iter": 2, "start_epoch": 1})
    assert criterion.queue is not None
    filled = []
    for step, epoch in ((0, 1), (2, 0), (2, 1), (3, 1)):
        _train_step(criterion, _head(), _features(), step, epoch)
        filled.append(criterion.queue.num_filled)
    assert filled == [0, 0, 5, 10]


def test_queue_survives_saving_and_a_bad_step() -> None:
    head, criterion = _head(), _loss(queue={"queue_length": 12})
    _train_step(criterion, head, _features(), 0)
    _train_step(criterion, head, _features() * math.nan, 1)
    assert criterion.queue is not None and criterion.queue.embeddings.isfinite().all()
    restored = _loss(queue={"queue_length": 12})
    restored.load_state_dict(criterion.state_dict())
    assert restored.queue is not None and restored.queue.num_filled == 10
    losses = [_train_step(c, head, _features(2), 2) for c in (criterion, restored)]
    assert torch.equal(*losses)


def test_formats() -> None:
    def loss_dtype(dtype: torch.dtype, **options: Any) -> torch.dtype:
        output = SwAVOutput(torch.randn(20, DIM), [torch.randn(20, k).to(dtype) for k in PROTOTYPES], None)
        return _loss(**options)([output], _batch()).dtype

    assert loss_dtype(torch.bfloat16) == loss_dtype(torch.float32) == torch.float32
    assert loss_dtype(torch.float32, use_double_precision=True) == loss_dtype(torch.float64) == torch.float64


def test_a_rank_without_samples_has_a_loss_of_zero() -> None:
    output = SwAVOutput(torch.randn(0, DIM), [torch.randn(0, k) for k in PROTOTYPES], None)
    criterion = _loss()
    # Alone, nobody has samples, so the shares are 0 / 0; what counts is that no row makes no loss.
    assert criterion([output], _batch(0)) == 0


def test_prototypes_are_normalized_unless_told_not_to() -> None:
    assert _loss().normalized_rows() == ["heads.0.prototypes0.weight", "heads.0.prototypes1.weight"]
    assert _loss(normalize_last_layer=False).normalized_rows() == []


@pytest.mark.parametrize(("num_steps", "patience"), [(100, 500), (2000, 500), (4000, 1000)])
def test_a_quarter_of_the_run_and_at_least_500_steps_without_progress_are_a_collapse(
    num_steps: int, patience: int
) -> None:
    criterion = _loss()
    watch = {"assignment_entropy": 1.0, "effective_rank": 30.0}
    rule, guessing = criterion.collapse_rule(num_steps), trivial_loss(criterion.num_prototypes)
    warnings = (rule.update(step, guessing, watch) for step in range(1, patience + 50))
    first = next(step for step, warning in enumerate(warnings, 1) if warning)
    assert first == 20 + patience - 1  # figures are means of 20 steps


def test_health_tells_a_collapsed_model_from_a_spread_one() -> None:
    def health(embeddings: Tensor) -> dict[str, float]:
        criterion = SwAVLoss(num_crops=2, num_prototypes=[DIM], embedding_dim=DIM, epsilon=0.02)
        output = SwAVOutput(embeddings, [embeddings @ torch.eye(DIM, dtype=torch.float64)], None)
        criterion([output], LossBatch([2], torch.arange(len(embeddings) // 2), len(embeddings) // 2))
        return criterion.health(criterion.health_sums().double())

    spread = health(torch.eye(DIM, dtype=torch.float64).repeat(2, 1))
    assert spread["effective_rank"] == pytest.approx(DIM)
    assert spread["prototypes_in_use"] == DIM
    assert spread["assignment_entropy"] < 1e-6
    collapsed = health(torch.eye(DIM, dtype=torch.float64)[:1].repeat(2 * DIM, 1))
    assert collapsed["effective_rank"] == pytest.approx(1.0)
    assert collapsed["prototypes_in_use"] == 1
    assert collapsed["assignment_entropy"] == pytest.approx(1.0)
    assert _loss().health(torch.empty(0)) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_crops": 1, "crops_for_assign": [0]}, r"num_crops: must be at least 2"),
        ({"crops_for_assign": [0, 4]}, r"crops_for_assign: must name crops from 0 to 3 \(got \[0, 4\]\)"),
        ({"num_prototypes": [0]}, r"num_prototypes: .* at least 1 \(got \[0\]\)"),
        ({"epsilon": 0.0}, r"swav_loss.epsilon: must be positive"),
    ],
)
def test_impossible_keys_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _loss(**options)


def test_a_model_that_does_not_fit_is_refused() -> None:
    criterion, output = _loss(), _head()(_features())
    with pytest.raises(ConfigError, match="needs swav_head as the first head"):
        criterion([torch.zeros(20, 3)], _batch())
    with pytest.raises(ConfigError, match="must be the head's num_clusters"):
        _loss(num_prototypes=[7])([output], _batch())
    with pytest.raises(ConfigError, match="that the transforms make, 4"):
        _loss(num_crops=2)([output], _batch())


def test_micro_batches_join_to_the_outputs_of_the_whole_batch_and_one_copy_of_the_queue_s_scores() -> None:
    def outputs(views: Tensor, queue_scores: list[Tensor]) -> list[Any]:
        rows = views.flatten(0, 1)
        return [SwAVOutput(rows[:, :DIM], [rows[:, :7], rows[:, 7:]], queue_scores)]

    views = torch.randn(NUM_CROPS, NUM_SAMPLES, 10)
    queue_scores = [torch.randn(2, count) for count in PROTOTYPES]
    parts = [outputs(part, queue_scores) for part in views.split([2, 3], dim=1)]
    joined, whole = _loss().join(parts, [2, 3])[0], outputs(views, queue_scores)[0]
    assert torch.equal(joined.embeddings, whole.embeddings)
    assert all(map(torch.equal, joined.scores, whole.scores)) and joined.probe_scores is queue_scores
