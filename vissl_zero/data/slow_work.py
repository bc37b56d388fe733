"""Progress of slow work: a line every few seconds, none where it is quick."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 5.0


class SlowProgress:
    """Reports how far the work has come.

    Args:
        report: takes a line.
    """

    def __init__(self, report: Callable[[str], object]):
        self._report, self._last = report, time.monotonic()

    def update(self, text: str) -> None:
        """Report ``text`` if it is time to."""
        if time.monotonic() > self._last + EVERY_S:
            self._last = time.monotonic()
            self._report(text)
