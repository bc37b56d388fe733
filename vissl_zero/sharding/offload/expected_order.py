"""Which unit is likely to be wanted next: what came after the same two units before."""

from __future__ import annotations

from collections.abc import Iterator

_Pair = tuple[int | None, int | None]


class ExpectedOrder:
    """Learns an order that repeats from step to step.

    Two units tell forward from backward, where the same ones come in the other order. Pure.
    """

    def __init__(self) -> None:
        self._next: dict[_Pair, int] = {}
        self._last: _Pair = (None, None)

    def came(self, unit: int) -> None:
        """``unit`` is wanted now."""
        self._next[self._last] = unit
        self._last = (self._last[1], unit)

    def restart(self) -> None:
        """A step begins: what comes next is what came next the last time one began."""
        self._last = (None, None)

    def expected(self) -> Iterator[int]:
        """Units in the order in which they are expected; may never end."""
        last = self._last
        while last in self._next:
            unit = self._next[last]
            yield unit
            last = (last[1], unit)
