"""Fixtures of the reporting tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.reporting.example_run import make_record, make_run
from vissl_zero.engine.hook import Run, StepRecord


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


@pytest.fixture
def records() -> list[StepRecord]:
    return [make_record(step) for step in range(1, 21)]
