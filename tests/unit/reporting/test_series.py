from __future__ import annotations

import math

import numpy as np
import pytest

from tests.unit.reporting.example_run import make_record
from vissl_zero.reporting.panels import series


def test_missing_figures_are_left_out() -> None:
    records = [make_record(1, loss=None, skipped=True), make_record(2, loss=3.0), make_record(3, loss=math.nan)]
    curve = series(records, lambda record: record.loss)
    assert curve.steps.tolist() == [2.0] and curve.values.tolist() == [3.0]


def test_a_long_run_is_thinned_by_means() -> None:
    records = [make_record(step, lr=float(step)) for step in range(1, 6001)]
    curve = series(records, lambda record: record.lr)
    assert len(curve) == 1500
    assert np.allclose(curve.steps, curve.values)
    assert curve.values.mean() == pytest.approx(3000.5)


def test_smoothing_does_not_lag() -> None:
    records = [make_record(step, lr=2.0 * step) for step in range(1, 401)]
    curve = series(records, lambda record: record.lr)
    inner = slice(20, -20)
    assert np.allclose(curve.smooth().values[inner], curve.values[inner])


def test_smoothing_of_a_few_points() -> None:
    curve = series([make_record(1, loss=1.0), make_record(2, loss=3.0)], lambda record: record.loss)
    assert curve.smooth().values.tolist() == [2.0, 2.0]
