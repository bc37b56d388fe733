"""Progress of slow work: a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 5.0


class SlowProgress:
    """Reports progress, at most once every ``EVERY_S`` seconds.

    Args:
        report: receives a line.
    """

    def __init__(self, report: Callable[[str], object]):
        self._report, self._last = report, time.monotonic()

    def update(self, text: str) -> None:
        """Report ``text`` if the last report was more than ``EVERY_S`` seconds ago."""
        if time.monotonic() > self._last + EVERY_S:
            self._last = time.monotonic()
            self._report(text)
