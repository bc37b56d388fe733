from __future__ import annotations

import math

import pytest

from tests.unit.reporting.example_run import make_record
from vissl_zero.engine.hook import Run
from vissl_zero.reporting.display import LossHistory, Progress, step_line
from vissl_zero.reporting.quantity import bar, sparkline


def test_time_left_follows_the_speed(run: Run) -> None:
    progress = Progress(run)
    assert math.isnan(progress.time_left_s)
    progress.update(make_record(1, images_per_s=3.2))  # slow, as first steps are
    progress.update(make_record(2, images_per_s=32.0))
    assert progress.time_left_s == pytest.approx(18.0)  # 18 steps of 32 images
    assert progress.images_per_s == pytest.approx(32.0)
    for step in range(3, 21):
        progress.update(make_record(step, images_per_s=64.0))
    assert progress.time_left_s == 0.0 and progress.fraction == 1.0
    assert 55 < progress.images_per_s < 64


def test_the_wait_for_data_is_a_share_of_the_time(run: Run) -> None:
    progress = Progress(run)
    assert math.isnan(progress.data_wait)
    progress.update(make_record(1, images_per_s=1.0, data_wait=0.9))  # workers start
    progress.update(make_record(2, images_per_s=32.0, data_wait=0.0))
    assert progress.data_wait == 0.0
    for step in range(3, 100):
        progress.update(make_record(step, images_per_s=16.0 if step % 2 else 32.0, data_wait=0.5 if step % 2 else 0.0))
    assert progress.data_wait == pytest.approx(1 / 3, abs=0.03)  # 1 of 3 seconds
    assert "data wait 34 %" in step_line(run, make_record(99), progress)


def test_a_resumed_run_starts_where_it_was(run: Run) -> None:
    run.step = 10
    progress = Progress(run)
    assert progress.fraction == 0.5
    progress.update(make_record(11, images_per_s=32.0))
    assert progress.time_left_s == pytest.approx(9.0)


def test_skipped_steps_are_counted_and_have_no_loss(run: Run) -> None:
    progress = Progress(run)
    progress.update(make_record(1, loss=None, skipped=True))
    progress.update(make_record(2, loss=3.0))
    progress.update(make_record(3, loss=2.0))
    assert (progress.loss_first, progress.num_skipped, progress.losses.values()) == (3.0, 1, [3.0, 2.0])


def test_a_long_history_stays_short_and_keeps_the_mean() -> None:
    history = LossHistory(capacity=8)
    for step in range(64):
        history.add(float(step))
    values = history.values()
    assert 4 <= len(values) < 8
    assert sum(values) / len(values) == pytest.approx(31.5)
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0, ""), (1.0, "████"), (0.5, "██"), (0.53, "██▏"), (1e-9, "▏"), (1.7, "████"), (-1.0, "")]
)
def test_bars(fraction: float, text: str) -> None:
    assert bar(fraction, 4) == text


def test_sparklines() -> None:
    assert sparkline([], 8) == sparkline([1.0], 8) == ""
    assert sparkline([0.0, 7.0], 8) == "▁█"
    assert sparkline([3.0, 3.0, 3.0], 8) == "▁▁▁"
    assert sparkline([8.0, 8.0, 4.0, 4.0, 0.0, 0.0], 3) == "█▅▁"
