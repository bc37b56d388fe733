"""When a rank or an entropy is called a collapse, at its limits; whole curves are in reporting/test_collapse.py."""

from __future__ import annotations

import math

import pytest
import torch

from vissl_zero.methods.health import (
    ClusteringCollapse,
    RankCollapse,
    clustering_sums,
    effective_rank,
    embedding_sums,
)

LOW, HIGH = 1.49, 3.0  # LEAST is 1.5, and HIGH twice that


@pytest.mark.parametrize(
    ("ranks", "warned"),
    [
        # 20 steps make the first mean; after it a mean of LOW needs 20 steps of LOW.
        ([HIGH] * 20 + [LOW] * 40, 40),
        ([2 * LOW] * 20 + [LOW] * 40, None),  # it never was at twice the least rank
        ([HIGH] * 20 + [1.5] * 40, None),
        ([LOW] * 80, 20 + 50 - 1),  # stuck for 50 steps, the first of them the 20th
    ],
)
def test_a_fall_from_twice_the_least_rank_is_a_collapse_at_once_and_low_ranks_after_a_while(
    ranks: list[float], warned: int | None
) -> None:
    rule = RankCollapse(patience=50)
    said = [step for step, rank in enumerate(ranks, 1) if rule.update(step, 1.0, {"effective_rank": rank})]
    assert (said[0] if said else None) == warned


def test_where_few_steps_are_measured_a_mean_is_of_five_of_them() -> None:
    """As docs/run_folder.md says."""
    rule, ranks = RankCollapse(patience=500), [HIGH] * 5 + [LOW] * 9
    said = [
        step
        for step, rank in zip(range(10, 150, 10), ranks, strict=True)
        if rule.update(step, 1.0, {"effective_rank": rank})
    ]
    assert said[0] == 100


# (loss, entropy, rank) of 20 steps, and then of 40 more; guessing gives a loss of 1, and patience is 50
@pytest.mark.parametrize(
    ("before", "after", "warned"),
    [
        ((2.0, 0.97, 8.0), (2.0, 0.97, 4.0), 40),  # a mean of 4 needs 20 steps of it
        ((2.0, 0.97, 8.0), (2.0, 0.97, 4.1), None),
        ((2.0, 0.96, 8.0), (2.0, 0.96, 4.0), None),
        ((1.0, 0.97, 8.0), (1.0, 0.97, 8.0), 20 + 50 - 1),
        ((1.009, 0.97, 8.0), (1.009, 0.97, 8.0), 20 + 50 - 1),
        ((1.011, 0.97, 8.0), (1.011, 0.97, 8.0), None),
        ((0.989, 0.97, 8.0), (0.989, 0.97, 8.0), None),
        ((1.0, 0.96, 8.0), (1.0, 0.96, 8.0), None),
    ],
)
def test_equal_assignments_are_a_collapse_where_the_rank_halves_or_the_loss_stays_that_of_guessing(
    before: tuple[float, float, float], after: tuple[float, float, float], warned: int | None
) -> None:
    rule = ClusteringCollapse(1.0, 50, "")
    figures = [before] * 20 + [after] * 60
    watches = [(loss, {"assignment_entropy": entropy, "effective_rank": rank}) for loss, entropy, rank in figures]
    said = [step for step, (loss, watch) in enumerate(watches, 1) if rule.update(step, loss, watch)]
    assert (said[0] if said else None) == warned


@pytest.mark.parametrize("missing", ["loss", "assignment_entropy", "effective_rank"])
def test_a_step_whose_metrics_were_not_all_measured_says_nothing(missing: str) -> None:
    rule, figures = ClusteringCollapse(1.0, 1, ""), {"loss": 1.0, "assignment_entropy": 1.0, "effective_rank": 8.0}
    del figures[missing]
    assert [rule.update(step, figures.get("loss"), figures) for step in range(60)] == [None] * 60


def test_the_effective_rank_of_nothing_and_of_no_numbers() -> None:
    assert effective_rank(torch.zeros(3, 3).double()) == 0.0
    assert math.isnan(effective_rank(torch.tensor([[1.0, math.inf], [math.inf, 1.0]]).double()))
    assert effective_rank(torch.diag(torch.tensor([4.0, 4.0, 0.0])).double()) == pytest.approx(2.0)


def test_rounding_does_not_count_as_rank() -> None:
    gram = torch.diag(torch.tensor([4.0, 4.0, 1e-15, -1e-15])).double()
    assert effective_rank(gram) == pytest.approx(2.0, abs=1e-15)
    assert effective_rank(gram + torch.diag(torch.tensor([0.0, 0.0, 1e-8, 0.0])).double()) > 2.0001


def test_sums_are_of_float64_whatever_the_rows_are() -> None:
    """Over many steps and ranks, sums in float32 would lose the prototypes of few rows."""
    generator = torch.Generator().manual_seed(0)
    rows, shares = torch.randn(64, 5, generator=generator), torch.randn(64, 7, generator=generator).softmax(dim=1)
    assert torch.equal(clustering_sums(rows, [shares]), clustering_sums(rows.double(), [shares.double()]))
    assert torch.equal(embedding_sums(rows), embedding_sums(rows.double()))


def test_the_rank_is_of_the_first_256_features() -> None:
    """As ``embedding_sums`` says."""
    rows = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(embedding_sums(rows), embedding_sums(rows[:, :256]))
    assert len(embedding_sums(rows)) == 256**2
