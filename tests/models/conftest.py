"""Prints what the sweep over real models found, as a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts by level, and each refusal's sentence with how often it was said."""
    reports = (report for word in ("passed", "failed") for report in terminalreporter.stats.get(word, []))
    cells = [value for report in reports for key, value in report.user_properties if key == "cell"]
    if not cells:
        return
    write = terminalreporter.write_line
    terminalreporter.section("real models")
    words = ("exact", "refused", "DIFFERENT", "CRASH")
    write(f"{'':12}" + "".join(f"{word:>11}" for word in words))
    for level in range(4):
        counts = Counter(cell[4] for cell in cells if cell[3] == level)
        write(f"level {level:<6}" + "".join(f"{counts[word]:>11}" for word in words))
    counts = Counter(cell[4] for cell in cells)
    write(f"{'all':12}" + "".join(f"{counts[word]:>11}" for word in words))
    for sentence, count in Counter(cell[5] for cell in cells if cell[4] == "refused").most_common():
        write(f"refused {count} times: {sentence}")
