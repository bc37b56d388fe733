"""Progress of slow work: a line every few seconds, none where it is quick."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 5.0


class SlowWork:
    """Says how far the work has come.

    Args:
        say: gets a line.
    """

    def __init__(self, say: Callable[[str], object]):
        self._say, self._said = say, time.monotonic()

    def tell(self, text: str) -> None:
        """Say ``text`` if it is time to."""
        if time.monotonic() > self._said + EVERY_S:
            self._said = time.monotonic()
            self._say(text)
