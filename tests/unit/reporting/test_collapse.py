from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.unit.reporting.example_run import make_record, make_run, play
from vissl_zero.engine.hook import Run, StepRecord
from vissl_zero.methods.health import ClusteringCollapse, trivial_loss
from vissl_zero.methods.method import Method
from vissl_zero.reporting.hooks import CollapseWatch

# SwAV on digits, RegNet of 24 k parameters, 30 prototypes, as measured: step, loss, assignment entropy, effective rank.
COLLAPSED = {  # kNN top-1 fell from .67 to ...
    "adamw, epsilon .05 (.62)": (
        (1, 4.92, 0.85, 11.8),
        (6, 4.18, 0.87, 11.2),
        (11, 3.85, 0.91, 9.5),
        (21, 3.48, 0.979, 5.4),
        (31, 3.43, 0.991, 4.1),
        (61, 3.41, 0.995, 3.4),
        (88, 3.41, 0.995, 3.3),
    ),
    "sgd, lr .3 (.58)": (
        (1, 4.92, 0.85, 11.8),
        (3, 4.63, 0.95, 5.1),
        (11, 4.08, 1.0, 1.3),
        (21, 3.76, 1.0, 1.07),
        (61, 3.59, 1.0, 1.05),
        (81, 3.45, 1.0, 1.05),
        (176, 3.40, 1.0, 1.05),
    ),
    "sgd, lr .05 (.56)": (
        (1, 4.88, 0.54, 11.9),
        (6, 4.18, 0.84, 5.7),
        (11, 3.90, 0.94, 3.2),
        (21, 3.52, 0.995, 1.6),
        (41, 3.42, 0.998, 1.45),
        (176, 3.40, 0.998, 1.42),
    ),
    "adamw, lr .0005 (.54)": (
        (1, 4.91, 0.85, 11.9),
        (11, 4.22, 0.85, 11.9),
        (21, 3.82, 0.90, 10.5),
        (41, 3.53, 0.952, 7.7),
        (61, 3.44, 0.971, 6.6),
        (81, 3.42, 0.979, 5.9),
        (101, 3.42, 0.983, 5.5),
        (176, 3.41, 0.985, 5.2),
    ),
}
LEARNED = {  # the loss fell to 2.1
    "adamw, epsilon .01": (
        (1, 4.84, 0.28, 11.9),
        (6, 4.10, 0.32, 11.2),
        (11, 3.80, 0.39, 9.7),
        (21, 3.46, 0.58, 6.4),
        *(
            (31, 3.36, 0.66, 5.2),
            (41, 3.29, 0.63, 5.1),
            (61, 2.92, 0.46, 6.0),
            (101, 2.31, 0.24, 7.4),
            (176, 2.1, 0.2, 7.8),
        ),
    ),
    "adamw, lr .005": (
        (1, 4.78, 0.28, 11.8),
        (6, 4.02, 0.45, 8.7),
        (11, 3.69, 0.62, 6.3),
        (21, 3.42, 0.85, 3.2),
        (31, 3.34, 0.83, 2.9),
        (41, 3.19, 0.71, 3.2),
        (81, 2.32, 0.37, 4.1),
        (176, 2.2, 0.31, 4.8),
    ),
}


def steps(curve: Sequence[tuple[float, float, float, float]]) -> list[StepRecord]:
    """A record for every step of a measured curve, straight between its points."""
    known = np.array(curve)
    wanted = np.arange(1, known[-1, 0] + 1)
    figures = np.stack([np.interp(wanted, known[:, 0], known[:, column]) for column in (1, 2, 3)], axis=1)
    return [
        make_record(step, loss=loss, watch={"assignment_entropy": entropy, "effective_rank": rank})
        for step, (loss, entropy, rank) in enumerate(figures.tolist(), start=1)
    ]


def update(rule: ClusteringCollapse, record: StepRecord) -> str | None:
    return rule.update(record.step, record.loss, record.watch)


def first_warning(records: list[StepRecord], patience: int = 500) -> tuple[int, str] | None:
    rule = ClusteringCollapse(math.log(30), patience, "a lower learning rate")
    return next(((record.step, text) for record in records if (text := update(rule, record))), None)


@pytest.mark.parametrize("name", COLLAPSED)
def test_a_collapse_is_seen_within_100_steps(name: str) -> None:
    warning = first_warning(steps(COLLAPSED[name]))
    assert warning is not None and 20 <= warning[0] <= 100
    assert "the model collapses" in warning[1] and "guessing gives 3.401" in warning[1]


@pytest.mark.parametrize("name", LEARNED)
def test_a_run_that_learns_is_left_alone(name: str) -> None:
    assert first_warning(steps(LEARNED[name])) is None


def test_a_run_that_never_starts_to_learn_is_said_to_be_stuck() -> None:
    stuck = [(1, 3.401, 0.99, 1.5), (200, 3.401, 0.99, 1.5)]
    warning = first_warning(steps(stuck), patience=100)
    assert warning is not None and warning[0] == 119  # the first mean of 20 steps is known at step 20
    assert "has not learned anything in 100 steps" in warning[1]


def test_a_slow_start_is_not_stuck() -> None:
    slow = [(1, 3.401, 0.99, 1.5), (90, 3.401, 0.99, 1.5), (140, 3.2, 0.9, 4.0), (400, 2.5, 0.6, 8.0)]
    assert first_warning(steps(slow), patience=130) is None


def test_figures_that_are_missing_or_not_finite_are_passed_over() -> None:
    rule = ClusteringCollapse(math.log(30), patience=1, advice="")
    odd = [
        make_record(1, loss=None, skipped=True),
        make_record(2, watch={}),
        make_record(3, watch={"assignment_entropy": math.nan, "effective_rank": 1.0}),
    ]
    assert [update(rule, record) for record in odd * 20] == [None] * 60


def warnings_of(run: Run, records: list[StepRecord]) -> str:
    console = Console(file=io.StringIO(), width=80)
    play(run, CollapseWatch(console), records)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_warning_comes_once_on_one_line(run: Run) -> None:
    text = warnings_of(run, steps(COLLAPSED["sgd, lr .05 (.56)"]))
    assert text.count("warning:") == 1 and text.count("\n") == 1
    assert run.results["collapse_warning_step"] < 60


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank=1)
    assert warnings_of(run, steps(COLLAPSED["sgd, lr .05 (.56)"])) == "" and run.results == {}


def test_a_model_without_prototypes_is_not_watched(run: Run) -> None:
    run.method = Method()
    assert warnings_of(run, steps(COLLAPSED["sgd, lr .05 (.56)"])) == ""


def test_guessing_with_several_layers_of_prototypes() -> None:
    assert trivial_loss([10, 1000]) == pytest.approx((math.log(10) + math.log(1000)) / 2)
