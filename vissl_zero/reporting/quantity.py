"""Numbers as people read them: bytes and durations as text, bars and sparklines for the terminal."""

from __future__ import annotations

import itertools
import math

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


def bytes_text(num_bytes: float) -> str:
    """``"1.5 MiB"``: three digits or so, powers of 1024.

    Args:
        num_bytes: may be negative (a difference).
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:  # 1,000, not 1,024: "1.00 MiB" reads better than "1023 KiB"
            return f"{_three_digits(value) if unit != 'B' else int(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def duration_text(seconds: float) -> str:
    """``"0:07"``, ``"12:34"`` (minutes and seconds), ``"3:05:09"`` (hours), ``"2 d 3:05:09"``; ``"?"`` if unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def figure_text(value: float | None, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, ``"-"`` for None."""
    return "-" if value is None else f"{value:.{digits}g}"
