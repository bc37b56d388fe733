"""One case at several levels, beside plain torch in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.dist.case import Case, Outcome
from tests.dist.plain import train_plainly
from tests.dist.training import train_sharded
from tests.ranks import run_on_ranks

_TABLES = ("relative_position_index", "attn_mask")  # computed from sizes alone, so no part of a checkpoint


def largest_distance(case: Case, world_size: int, levels: tuple[int, ...], **plan: Any) -> float:
    """Train ``case`` at each level; return the largest distance from plain torch in losses, norms and tensors."""
    outcomes = run_on_ranks(world_size, _at_levels, case, levels, plan, timeout_s=280)[0]
    reference = train_plainly(case)
    distances = [max(outcome.distance(stored(reference, outcome)).values()) for outcome in outcomes]
    print(f"{world_size} ranks, levels {levels}: {', '.join(f'{distance:.1e}' for distance in distances)}")
    return max(distances)


def stored(reference: Outcome, outcome: Outcome) -> Outcome:
    """Leave out of a reference what a checkpoint may lack; nothing but tables may be lacking."""
    extra = reference.state.keys() - outcome.state.keys()
    assert all(name.endswith(_TABLES) for name in extra)
    return replace(reference, state={name: reference.state[name] for name in reference.state if name not in extra})


def _at_levels(case: Case, levels: tuple[int, ...], plan: dict[str, Any]) -> list[Outcome]:
    return [train_sharded(case, level, plan) for level in levels]
