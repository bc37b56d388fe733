"""The parity matrix: every level of both engines on 1 to 4 ranks trains what plain torch trains in one process.

In float64 to 1e-10: losses, gradient norms, parameters, running statistics and averages. Level 3 of fairscale, whose
FSDP takes float32 alone, to 4e-6, with a stand-in for CUDA's streams. ``cells.py`` has the table, docs/parity.md
explains it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests.dist.case import Case, Outcome
from tests.dist.cells import CELLS, FEATURES, OPTIMIZERS, PLACES, SETTINGS, WORLDS, Cell
from tests.dist.conftest import Compared
from tests.dist.cuda_streams import streams_on_cpu
from tests.dist.plain import train_plainly
from tests.dist.training import DEVICE, train_sharded
from tests.ranks import RankError, run_on_ranks

TOLERANCE, NOISE_FLOOR = 1e-10, 5e-12  # processors round differently
FLOAT32_TOLERANCE = 4e-6  # 32 roundings: Adam divides small gradients by their own size
HALF_TOLERANCE = 0.02  # of a loss, relative

RUN = [cell for cell in CELLS if cell.excluded is None]


@cache
def _reference(case: Case, num_ranks: int) -> Outcome:
    return train_plainly(case, num_ranks=num_ranks)


@cache
def _noise(case: Case, num_ranks: int) -> float:
    """How far rounding alone carries this recipe: the reference against itself with every batch's rows reversed."""
    other = train_plainly(case, reverse_rows=True, num_ranks=num_ranks)
    return max(_reference(case, num_ranks).distance(other).values())


@cache
def _outcomes(feature: str, world_size: int) -> dict[Cell, Outcome] | RankError:
    """All cells of a feature and a number of ranks, in one task of the pool: they share its process group.

    Nothing is tried again: a race that a second try would hide fails every cell of the batch, with the cell it hit.
    """
    cells = [cell for cell in RUN if (cell.feature, cell.world_size) == (feature, world_size)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_on_ranks(world_size, _train, cells, folder, timeout_s=240)[0]
        except RankError as error:
            return error


def _outcome(cell: Cell) -> Outcome:
    outcomes = _outcomes(cell.feature, cell.world_size)
    if isinstance(outcomes, RankError):
        raise outcomes
    return outcomes[cell]


def _train(cells: list[Cell], folder: str) -> dict[Cell, Outcome]:
    outcomes = {}
    for cell in cells:
        plan = cell.plan
        for name in ("offload_optimizer", "offload_params"):
            if (tier := plan.get(name)) and tier.device == "nvme":
                plan[name] = replace(tier, nvme_path=folder)
        try:
            with _streams(cell):
                outcomes[cell] = train_sharded(cell.case, cell.level, plan)
        except Exception as error:
            error.add_note(f"in the cell {cell}")
            raise
    return outcomes


def _streams(cell: Cell) -> AbstractContextManager[None]:
    return streams_on_cpu() if cell.is_float32 and DEVICE.type == "cpu" else nullcontext()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cell",
    # Every feature at every level on 2 ranks is a minute or two; the other numbers of ranks are for `make test-slow`.
    [pytest.param(cell, marks=[pytest.mark.slow] if cell.world_size != 2 else []) for cell in RUN],
    ids=str,
)
def test_equals_plain_torch(cell: Cell, report_cell: Callable[[Compared], None]) -> None:
    outcome, case, num_ranks = _outcome(cell), cell.case, cell.num_batches
    if FEATURES[cell.feature].compares == "scales":
        reference = _reference(case, num_ranks)
        assert outcome.scales == reference.scales
        assert outcome.losses == pytest.approx(reference.losses, rel=HALF_TOLERANCE)
        report_cell(Compared(cell, {}, None))
        return
    reference, noise = _reference(case, num_ranks), _noise(case, num_ranks)
    distance = outcome.relative_distance(reference) if cell.is_float32 else outcome.distance(reference)
    report_cell(Compared(cell, distance, noise))
    print(f"{cell}: {distance}, noise floor {noise:.1e}")
    if not cell.is_float32:
        assert noise < NOISE_FLOOR, "the recipe amplifies rounding; lower its learning rate"
    assert max(distance.values()) < (FLOAT32_TOLERANCE if cell.is_float32 else TOLERANCE), distance


def test_the_cells_cover() -> None:
    """What docs/parity.md says of the covering array, excluded cells apart; and there are at least 500."""
    assert len({str(cell) for cell in CELLS}) == len(CELLS)
    assert len(RUN) >= 500
    triples = {(cell.feature, cell.engine, cell.level, cell.world_size) for cell in CELLS}
    places = [place for place in PLACES if place != ("fairscale", 0)]
    assert triples >= {(name, *place, world) for name, place, world in product(FEATURES, PLACES, (1, 2, 3))}
    fours = [(name, engine, level) for name, engine, level, world in triples if world == 4]
    assert {(name, engine) for name, engine, _ in fours} == set(product(FEATURES, ("torch", "fairscale")))
    assert {(engine, level) for _, engine, level in fours} == set(places)
    assert {(cell.optimizer, cell.feature) for cell in RUN} == set(product(OPTIMIZERS, FEATURES))
    assert {(cell.optimizer, cell.engine, cell.level) for cell in RUN} == {
        (optimizer, *place) for optimizer, place in product(OPTIMIZERS, places)
    }
    assert {(cell.optimizer, cell.world_size) for cell in RUN} == set(product(OPTIMIZERS, WORLDS))


def test_the_cases_differ() -> None:
    """A feature that trains what plain training trains tests nothing, unless it must not change the numbers."""
    for name, feature in FEATURES.items():
        case = Case(**SETTINGS | feature.case | {"dtype": "float64", "autocast": None})
        plain = replace(Case(**SETTINGS), num_steps=case.num_steps)
        if name != "unused_parameter" and case != plain:
            ours, other = _reference(case, 2 if case.norm == "local_batch" else 1), _reference(plain, 1)
            same = ours.losses == other.losses and ours.state.keys() == other.state.keys()
            assert not same or ours.distance(other)["state"] > 1e-6, name
