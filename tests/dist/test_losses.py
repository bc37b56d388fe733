"""Losses over several ranks are the losses of one process with the whole batch, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.unit.methods.batches import LossBatch
from tests.unit.methods.slow_swav import slow_swav
from vissl_zero import collectives
from vissl_zero.methods.gather import sinkhorn
from vissl_zero.methods.method import Method, build_method
from vissl_zero.methods.swav import SwAVHead

NUM_CROPS, DIM, WIDTH, PROTOTYPES = 3, 4, 5, [6, 3]
BATCHES = [7, 7, 2, 7]  # samples of each step; two of them over three ranks leave one rank with nothing
QUEUE = {"queue_length": 10, "start_iter": 1}


def _health(criterion: Method) -> dict[str, float]:
    """As the training loop has it."""
    return criterion.health(collectives.all_reduce_sum(criterion.health_sums().double()))


def _features(step: int) -> Tensor:
    """(V, B, F) of the whole batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_CROPS, BATCHES[step], WIDTH, dtype=torch.float64, generator=generator)


def _head() -> SwAVHead:
    torch.manual_seed(0)
    return SwAVHead(dims=[WIDTH, DIM], num_clusters=PROTOTYPES).double()


def _mine(num_samples: int) -> Tensor:
    """This rank's samples: i goes to rank i * N // B."""
    samples = torch.arange(num_samples)
    return samples[samples * collectives.world_size() // num_samples == collectives.rank()]


def _swav_run() -> list[tuple[float, list[Tensor], dict[str, float]]]:
    """Per step: the loss and gradients summed as the training loop does it, and the health."""
    head = _head()
    keys = {"num_crops": NUM_CROPS, "num_prototypes": PROTOTYPES, "embedding_dim": DIM, "queue": QUEUE}
    criterion = build_method({"name": "swav_loss", "swav_loss": keys}).double()
    results = []
    for step, num_samples in enumerate(BATCHES):
        mine = _mine(num_samples)
        batch = LossBatch([2, 1], mine, num_samples)
        criterion.on_step(step, 0)
        outputs = [head(_features(step)[:, mine].flatten(0, 1), criterion.probe())]
        loss = criterion(outputs, batch) * (len(mine) / num_samples)
        gradients = torch.autograd.grad(loss, list(head.parameters()))
        criterion.update_state([criterion.observe(outputs, batch)])
        total = collectives.all_reduce_sum(loss).item()
        results.append((total, [collectives.all_reduce_sum(g) for g in gradients], _health(criterion)))
    return results


def _slow_run() -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """The same by hand, whole batches."""
    head = _head()
    past: list[Tensor] = [torch.zeros(2, 0, DIM, dtype=torch.float64)]
    results = []
    for step in range(len(BATCHES)):
        embeddings = head(_features(step).flatten(0, 1)).embeddings.view(NUM_CROPS, BATCHES[step], DIM)
        queue = torch.cat(past, dim=1)[:, : QUEUE["queue_length"]]
        weights: list[Tensor] = [head.prototypes0.weight, head.prototypes1.weight]  # type: ignore[list-item]
        loss = slow_swav(embeddings, weights, list(queue), [0, 1], epsilon=0.05, num_iters=3, temperature=0.1)
        results.append((loss, torch.autograd.grad(loss, list(head.parameters()))))
        if step >= QUEUE["start_iter"]:
            past.insert(0, embeddings[:2].detach())
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_swav_over_ranks_is_swav_by_hand(world_size: int) -> None:
    ranks = run_on_ranks(world_size, _swav_run)
    for step, (expected_loss, expected_gradients) in enumerate(_slow_run()):
        healths = [rank[step][2] for rank in ranks]
        assert all(health == healths[0] for health in healths)
        for loss, gradients, _ in (rank[step] for rank in ranks):
            assert loss == pytest.approx(expected_loss.item(), rel=1e-12)
            for gradient, expected in zip(gradients, expected_gradients, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)


def test_health_does_not_depend_on_the_number_of_ranks() -> None:
    one, three = run_on_ranks(1, _swav_run)[0], run_on_ranks(3, _swav_run)[0]
    for (_, _, expected), (_, _, got) in zip(one, three, strict=True):
        assert got == pytest.approx(expected, rel=1e-9)


def _sinkhorn_part(scores: Tensor) -> Tensor:
    return sinkhorn(scores[:, _mine(scores.shape[1])], 0.05, 3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_assignments_of_a_sample_do_not_depend_on_its_rank(world_size: int) -> None:
    scores = torch.rand(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = run_on_ranks(world_size, _sinkhorn_part, scores)
    torch.testing.assert_close(torch.cat(parts, dim=1), sinkhorn(scores, 0.05, 3), rtol=1e-12, atol=1e-14)


TARGETS = torch.tensor([0, -1, -1, 2, 1, 1, 2])  # ignored ones fall on one rank
LOGITS = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _cross_entropy_run(weight: list[float] | None) -> tuple[float, Tensor, dict[str, float]]:
    mine = _mine(len(TARGETS))
    criterion = build_method({"name": "CrossEntropyLoss", "CrossEntropyLoss": {"weight": weight}}).double()
    logits = LOGITS.clone().requires_grad_()
    batch = LossBatch([2], mine, len(TARGETS), TARGETS[mine])
    loss = criterion([logits[:, mine].flatten(0, 1)], batch) * (len(mine) / len(TARGETS))
    (gradient,) = torch.autograd.grad(loss, logits)
    return collectives.all_reduce_sum(loss).item(), collectives.all_reduce_sum(gradient), _health(criterion)


@pytest.mark.parametrize("weight", [None, [0.5, 2.0, 1.5]])
@pytest.mark.parametrize("world_size", [2, 3])
def test_cross_entropy_over_ranks_is_torchs(world_size: int, weight: list[float] | None) -> None:
    logits = LOGITS.clone().requires_grad_()
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    targets = torch.cat((TARGETS, TARGETS))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, weights, ignore_index=-1)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    is_right = (logits.flatten(0, 1).argmax(dim=1) == targets).sum().item()
    for loss, gradient, health in run_on_ranks(world_size, _cross_entropy_run, weight):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
        assert health == {"top1": pytest.approx(is_right / 10)}


def _gather(counts: list[int]) -> tuple[Tensor, Any]:
    rank = collectives.rank()
    rows = torch.full((counts[rank], 2), float(rank))
    return collectives.all_gather_rows(rows), collectives.broadcast_object({"rank": rank})


def test_rows_of_all_ranks_are_gathered_in_order() -> None:
    counts = [2, 0, 3]
    for gathered, from_first in run_on_ranks(3, _gather, counts):
        assert gathered.tolist() == [[0.0, 0.0]] * 2 + [[2.0, 2.0]] * 3
        assert from_first == {"rank": 0}
    assert run_on_ranks(2, _gather, [0, 0])[0][0].shape == (0, 2)
