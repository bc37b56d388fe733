"""Spoilt files of every kind that we read weights from end in a sentence: no signal, hang or traceback."""

from __future__ import annotations

import pytest

from tests.unit.checkpoint.hostile_files import fuzz


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_spoilt_files_are_refused_or_read():
    assert fuzz(80, seed=1) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_thousand_spoilt_files_are_refused_or_read():
    assert fuzz(2_000, seed=2) == []
