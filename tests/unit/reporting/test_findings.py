"""What went wrong in a run that came to its end: said with a cause, and a healthy run is left alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.reporting.example_run import make_record, make_run, play
from vissl_zero.engine.hook import Run, StepRecord
from vissl_zero.methods.method import Method
from vissl_zero.reporting.findings import FindingsHook


class Follower(Method):
    """A teacher that follows with the same momentum at every step."""

    has_teacher = True

    def __init__(self, momentum: float):
        super().__init__()
        self._momentum = momentum

    def momentum(self, step: int) -> float:
        return self._momentum


def findings_of(run: Run, records: list[StepRecord], **results: Any) -> tuple[list[str], str]:
    run.results |= results
    console = Console(file=io.StringIO(), width=80)
    play(run, FindingsHook(console), records)
    assert isinstance(console.file, io.StringIO)
    return run.results.get("findings", []), console.file.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def steps(count: int = 20, **changes: Any) -> list[StepRecord]:
    return [make_record(step, **changes) for step in range(1, count + 1)]


def test_a_healthy_run_is_left_alone(run: Run) -> None:
    healthy = {"knn_top1_before": 0.5, "knn_top1_after": 0.8, "knn_top1_raw_pixels": 0.6, "probe_top1": 0.9}
    assert findings_of(run, steps(), **healthy) == ([], "")
    nothing_to_gain = {"knn_top1_before": 1.0, "knn_top1_after": 1.0, "knn_top1_raw_pixels": 1.0}
    assert findings_of(run, steps(), **nothing_to_gain) == ([], "")


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ({"knn_top1_before": 0.5, "knn_top1_after": 0.5}, "training did not help: kNN top-1 is 50.0%, and was 50.0%"),
        ({"knn_top1_before": 0.3, "knn_top1_after": 0.5, "knn_top1_raw_pixels": 0.5}, "that of raw pixels 50.0%"),
        ({"knn_top1_after": 0.5, "probe_top1": 0.75}, "the linear probe reaches 75.0% and kNN 50.0%"),
    ],
)
def test_figures_that_do_not_go_together_are_explained(run: Run, results: dict[str, float], sentence: str) -> None:
    found, shown = findings_of(run, steps(), **results)
    assert len(found) == 1 and sentence in found[0] and shown == f"warning: {found[0]}\n"


def test_features_of_a_frozen_trunk_are_not_blamed_on_training(run: Run) -> None:
    run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY = True
    same = {"knn_top1_before": 0.5, "knn_top1_after": 0.5, "knn_top1_raw_pixels": 0.6}
    assert findings_of(run, steps(), **same) == ([], "")


@pytest.mark.parametrize(("momentum", "share"), [(0.99, "81.8%"), (0.96, None)])
def test_a_teacher_that_stands_still(run: Run, momentum: float, share: str | None) -> None:
    run.method = Follower(
        momentum
    )  # after 20 steps .99 ** 20 = .818 of the first weights are left, and .96 ** 20 = .442
    findings, _ = findings_of(run, steps(watch={}))
    assert [f"{share} of its weights are still the first ones after 20 steps" in text for text in findings] == (
        [True] if share else []
    )


@pytest.mark.parametrize(("in_use", "is_dead"), [(2.0, True), (3.0, False)])
def test_prototypes_that_no_image_chooses(run: Run, in_use: float, is_dead: bool) -> None:
    found, _ = findings_of(run, steps(watch={"prototypes_in_use": in_use}))  # of 30, which 32 images can all reach
    assert found == [] or ("2 of 30 prototypes are the first choice" in found[0] and len(found) == 1)
    assert bool(found) == is_dead


def test_a_learning_rate_that_ends_before_the_run(run: Run) -> None:
    ended = [make_record(step, lr=0.1 if step <= 15 else 0.0) for step in range(1, 21)]
    assert "nothing from step 16 to the end, 20" in findings_of(run, ended)[0][0]


def test_a_schedule_that_ends_at_zero_is_healthy(run: Run) -> None:
    cosine = [make_record(step, lr=0.1 * (20 - step)) for step in range(1, 21)]
    assert findings_of(run, cosine) == ([], "")


def test_other_ranks_and_runs_without_a_step_say_nothing(tmp_path: Path) -> None:
    worse = {"knn_top1_before": 0.5, "knn_top1_after": 0.4}
    assert findings_of(make_run(tmp_path, rank=1), steps(), **worse) == ([], "")
    assert findings_of(make_run(tmp_path), [], **worse) == ([], "")
