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
            self._rule = CollapseRule(trivial_loss(num_prototypes))

    def on_step(self, run: Run, record: StepRecord) -> None:
        if self._rule is None:
            return
        warning = self._rule.update(record)
        if warning:
            self._rule = None  # never twice
            run.results["collapse_warning_step"] = record.step
            self._console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)


class CollapseRule:
    """Decides from the loss and the effective rank of the embeddings whether a clustering method collapses.

    A collapsed model gives every image the same embedding. Every assignment is then uniform, the loss is that of
    guessing, ``ln(prototypes)``, and the effective rank of the embeddings goes to 1. Neither sign is enough alone: an
    untrained model has that loss too, and a good model of a few clusters has a low rank. So the rule asks for both, as
    means over ``window`` steps: the loss within 1 % of ``trivial_loss``, and the effective rank below half of the
    highest such mean so far.

    Args:
        trivial_loss: loss of a model that gives every prototype the same probability.
        window: steps that are averaged.
    """

    def __init__(self, trivial_loss: float, window: int = 20):
        self._trivial_loss = trivial_loss
        self._losses: deque[float] = deque(maxlen=window)
        self._ranks: deque[float] = deque(maxlen=window)
        self._highest_rank = 0.0

    def update(self, record: StepRecord) -> str | None:
        """Take in one step; the sentence to warn with, or None."""
        rank = record.watch.get("effective_rank")
        if record.loss is None or rank is None or not math.isfinite(record.loss):
            return None
        self._losses.append(record.loss)
        self._ranks.append(rank)
        if len(self._losses) < (self._losses.maxlen or 0):
            return None
        loss, rank = sum(self._losses) / len(self._losses), sum(self._ranks) / len(self._ranks)
        self._highest_rank = max(self._highest_rank, rank)
        is_guessing = abs(loss - self._trivial_loss) <= 0.01 * self._trivial_loss
        if not (is_guessing and rank < 0.5 * self._highest_rank):
            return None
        return (
            f"the model seems to collapse at step {record.step}: the loss ({loss:.3f}) is that of guessing "
            f"({self._trivial_loss:.3f}) and the embeddings fell to an effective rank of {rank:.1f} (from "
            f"{self._highest_rank:.1f}), so all images begin to look the same to it. Lower the learning rate, freeze "
            "the prototypes for longer (config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP) or use milder crops."
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
