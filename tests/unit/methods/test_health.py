"""When the rank of embeddings is called a collapse; that of prototypes is in reporting/test_collapse.py."""

from __future__ import annotations

import pytest

from vissl_zero.methods.health import RankCollapse

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
