"""A watch on the model itself: one plain warning when it starts to collapse."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import rich
from rich.console import Console

from vissl_zero.engine.hook import Hook, Run, StepRecord


class CollapseWatch(Hook):
    """Warns once, on rank 0, and notes the step as ``collapse_warning_step`` in the results."""

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()
        self._rule: CollapseRule | None = None

    def on_start(self, run: Run) -> None:
        num_prototypes = prototype_counts(run.plan.config["MODEL"]["HEAD"]["PARAMS"])
        if run.is_main and num_prototypes:
            self._rule = CollapseRule(trivial_loss(num_prototypes), patience=max(500, run.num_steps // 4))
            if any(self._rule.update(record) for record in run.records):  # those before a resume
                self._rule = None

    def on_step(self, run: Run, record: StepRecord) -> None:
        if self._rule is None:
            return
        warning = self._rule.update(record)
        if warning:
            self._rule = None  # never twice
            run.results["collapse_warning_step"] = record.step
            self._console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)


class CollapseRule:
    """Decides from the criterion's figures whether a clustering method collapses.

    A collapsed model gives every image the same embedding: the effective rank of the embeddings goes to 1, every
    assignment becomes uniform (entropy 1 as a share of its maximum), and the loss stays at that of guessing. None of
    them is enough alone: an untrained model may have all three, and a model that learns few clusters loses rank too.
    So there are two ways to a warning, both on means over the last ``WINDOW`` steps:

    - *falling*: the entropy is at least ``UNIFORM`` and the rank at most half of the highest such mean so far;
    - *stuck*: the entropy is at least ``UNIFORM`` and the loss within 1 % of guessing, for ``patience`` steps on end.

    Measured on SwAV on digits, a RegNet of 24 k parameters, 30 prototypes, 88 to 176 steps: in five runs that ended
    worse than they began (kNN .67 -> .53 to .62) the entropy passed .97 within 20 to 90 steps while the rank fell from
    12 to between 1.0 and 5.3; in runs that learned (loss 3.4 -> 2.1) the entropy stayed below .86, though the rank fell
    to between 2.9 and 5.1 before it rose again. The loss reached that of guessing up to 80 steps after the entropy.

    Args:
        guessing: loss of a model that gives every prototype the same probability.
        patience: steps without any progress before *stuck* is said.
    """

    WINDOW = 20
    UNIFORM = 0.97

    def __init__(self, guessing: float, patience: int):
        self._guessing = guessing
        self._patience = patience
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=self.WINDOW)
        self._highest_rank = 0.0
        self._num_stuck = 0

    def update(self, record: StepRecord) -> str | None:
        """Take in one step; the sentence to warn with, or None."""
        entropy, rank = record.watch.get("assignment_entropy"), record.watch.get("effective_rank")
        if record.loss is None or entropy is None or rank is None:
            return None
        figures = (record.loss, entropy, rank)
        if not all(math.isfinite(figure) for figure in figures):
            return None
        self._recent.append(figures)
        if len(self._recent) < self.WINDOW:
            return None
        loss, entropy, rank = (sum(figure) / self.WINDOW for figure in zip(*self._recent, strict=True))
        self._highest_rank = max(self._highest_rank, rank)
        is_uniform = entropy >= self.UNIFORM
        is_guessing = abs(loss - self._guessing) <= 0.01 * self._guessing
        self._num_stuck = self._num_stuck + 1 if is_uniform and is_guessing else 0
        if is_uniform and rank <= 0.5 * self._highest_rank:
            sign = f"the effective rank of its embeddings fell from {self._highest_rank:.1f} to {rank:.1f}"
        elif self._num_stuck >= self._patience:
            sign = f"it has not learned anything in {self._num_stuck} steps"
        else:
            return None
        return (
            f"the model collapses (step {record.step}): {sign}, all images get nearly the same assignment "
            f"({100 * entropy:.0f} % of the largest entropy), and the loss is {loss:.3f} where guessing gives "
            f"{self._guessing:.3f}. What helps: a lower config.LOSS.swav_loss.epsilon, a lower learning rate, milder "
            "crops, or prototypes frozen for longer (config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP)."
        )


def trivial_loss(num_prototypes: list[int]) -> float:
    """Mean of ``ln(prototypes)`` over the prototype layers of a head."""
    return sum(math.log(count) for count in num_prototypes) / len(num_prototypes)


def prototype_counts(heads: list[Any]) -> list[int]:
    """Prototypes per layer, from ``MODEL.HEAD.PARAMS``; empty for a model without prototypes."""
    for _, options in heads:
        if "num_clusters" in options:
            return [int(count) for count in options["num_clusters"]]
    return []
