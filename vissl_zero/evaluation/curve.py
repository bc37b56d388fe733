"""The curve of a metric that a hook measures repeatedly; checkpoints save it."""

from __future__ import annotations

from typing import Any, ClassVar

from vissl_zero.engine.hook import Hook, Run


class CurveHook(Hook):
    """Base of hooks that measure one metric; ``<figure>_by_step`` in the results has [step, value] of each measurement.

    Attributes:
        figure: name of the metric in the results.
    """

    figure: ClassVar[str]

    def __init__(self) -> None:
        self._curve: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the curve so far."""
        return {"curve": self._curve}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._curve = [list(point) for point in state["curve"]]

    def _add(self, run: Run, value: float) -> None:
        """Add the value measured after this step, unless the curve has the step already."""
        # A run that resumes at its end measures the last step again.
        if not self._curve or self._curve[-1][0] < run.step:
            self._curve.append([run.step, value])
        run.results[f"{self.figure}_by_step"] = [list(point) for point in self._curve]
