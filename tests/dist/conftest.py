"""Collects what the parity matrix found and prints it at the end of the session, as one table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.dist.cells import CELLS, FEATURES, OPTIMIZERS, Cell

_PROPERTY = "compared"
_ENDS = ("passed", "failed")


@dataclass(frozen=True)
class Compared:
    """One cell that was run.

    Attributes:
        cell: which.
        distance: from the reference, by kind; empty where only loss scales are compared.
        noise: the reference's noise floor; None where there is none.
    """

    cell: Cell
    distance: dict[str, float]
    noise: float | None


@pytest.fixture
def report_cell(record_property: Callable[[str, object], None]) -> Callable[[Compared], None]:
    """Add a cell to the table. It travels with the test's report: another process may have run the test."""
    return lambda found: record_property(_PROPERTY, (str(found.cell), found.distance, found.noise))


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The matrix: a line per feature, counts, and the reason of every exclusion."""
    stats, cells = terminalreporter.stats, {str(cell): cell for cell in CELLS}
    passed, failed = ([r for r in stats.get(word, []) if "test_parity.py::test_equals" in r.nodeid] for word in _ENDS)
    found = [value for report in (*passed, *failed) for name, value in report.user_properties if name == _PROPERTY]
    compared = [Compared(cells[name], distance, noise) for name, distance, noise in found]
    if not compared:
        return
    write = terminalreporter.write_line
    terminalreporter.section("parity matrix")
    columns = "".join(f"{name:>11}" for name in OPTIMIZERS)
    write(f"{'':30}{'cells':>6}  {'largest difference':^20}  noise floor of the float64 reference")
    write(f"{'feature':30}{'':>6}  {'float64':>9}{'float32':>11}  {columns}")
    for name in FEATURES:
        own = [result for result in compared if result.cell.feature == name]
        if own:
            write(f"{name:30}{len(own):>6}  {_largest(own, False):>9}{_largest(own, True):>11}  {_noises(own)}")
    reasons = Counter(cell.excluded for cell in CELLS if cell.excluded)
    write(f"{len(passed)} cells passed, {len(failed)} failed, {sum(reasons.values())} of the table are excluded:")
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        write(f"  {count:4}  {reason}")


def _largest(results: list[Compared], is_float32: bool) -> str:
    values = [max(r.distance.values()) for r in results if r.distance and r.cell.is_float32 == is_float32]
    return f"{max(values):.1e}" if values else "-"


def _noises(results: list[Compared]) -> str:
    noises: dict[str, float] = defaultdict(float)
    for result in results:
        if result.noise is not None and not result.cell.is_float32:
            noises[result.cell.optimizer] = max(noises[result.cell.optimizer], result.noise)
    return "".join(f"{noises[name]:>11.1e}" if name in noises else f"{'-':>11}" for name in OPTIMIZERS)
