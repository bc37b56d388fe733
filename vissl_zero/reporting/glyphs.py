"""Numbers drawn with characters: a bar and a sparkline for the terminal."""

from __future__ import annotations

import itertools

_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_HEIGHTS = "▁▂▃▄▅▆▇█"


def bar(fraction: float, width: int) -> str:
    """A bar of ``fraction`` of ``width`` characters, to an eighth of a character; something above zero is visible."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    if fraction > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + _EIGHTHS[rest]


def sparkline(values: list[float], width: int) -> str:
    """Values as a row of blocks between the lowest and the highest, empty for fewer than two.

    Args:
        values: oldest first.
        width: most characters; with more values than that, each character is the mean of its share.
    """
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_HEIGHTS[round((mean - low) / span * (len(_HEIGHTS) - 1))] for mean in means)
