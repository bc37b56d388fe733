from __future__ import annotations

import math

import pytest

from vissl_zero.reporting.quantity import bytes_text, duration_text, figure_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (15 * 2**20, "15.0 MiB"),
        (812 * 2**20, "812 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (5000 * 2**40, "5000 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (754, "12:34"),
        (11109, "3:05:09"),
        (183909, "2 d 3:05:09"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_figures() -> None:
    assert figure_text(None) == "-"
    assert figure_text(0.000123456, 3) == "0.000123"
