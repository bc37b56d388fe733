"""Findings on a finished run: sentences on what went wrong, with the likely cause and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import rich
from rich.console import Console

from vissl_zero.engine.hook import Hook, Run
from vissl_zero.terminal import print_line

FINDINGS = "findings"  # the key in the results

_STILL = 0.5  # largest share of its first weights that a teacher should still have at the end
_DEAD = 0.1  # smallest share of the prototypes that a run should use
_GAP = 0.2  # largest gap between the top-1 of probe and kNN; in healthy runs it is some points
_OVER = 0.1  # largest share of steps with a negligible learning rate; a cosine schedule has 2 %
_NOTHING = 1e-6  # a negligible learning rate, as a share of the largest
_MOST_FACTORS = 1000  # most values of the teacher's momentum that are sampled


class FindingsHook(Hook):
    """Prints findings at the end, on rank 0, and adds them to the results; place it after hooks that add results."""

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()

    def on_end(self, run: Run) -> None:
        if not run.is_main or not run.step:
            return
        for sentence in filter(None, (rule(run) for rule in _RULES)):
            add_finding(run, sentence)
            print_line(f"warning: {sentence}", self._console)


def add_finding(run: Run, sentence: str) -> None:
    """Add a sentence to the run's results, for ``summary.json`` and the report."""
    # A resumed run may have findings already.
    run.results[FINDINGS] = list(dict.fromkeys([*run.results.get(FINDINGS, []), sentence]))


def _teacher_stands_still(run: Run) -> str:
    if not (run.method.has_teacher and run.method.teacher_follows):
        return ""
    stride = -(-run.step // _MOST_FACTORS)
    # A sample is enough, since the momentum follows a smooth schedule.
    momenta = [run.method.momentum(step) for step in range(0, run.step, stride)]
    # A momentum of 0 copies the student, and has no logarithm.
    if min(momenta) <= 0.0:
        return ""
    share = math.exp(fmean(map(math.log, momenta)) * run.step)  # the product over all steps
    if share <= _STILL:
        return ""
    return (
        f"the teacher hardly moved: {share:.1%} of its weights are still the first ones after {run.step:,} steps with "
        f"a momentum of {min(momenta):.4g} or more. Train for more steps, or lower the momentum in config.LOSS."
    )


def _prototypes_are_dead(run: Run) -> str:
    # The last five measurements: few prototypes are in use at first in healthy runs too.
    in_use = [record.watch["prototypes_in_use"] for record in run.records if "prototypes_in_use" in record.watch][-5:]
    # Counted per micro-batch, in which no more prototypes than rows can be a first choice.
    rows = run.plan.global_batch // run.plan.accumulation_steps
    reachable = sum(min(count, rows) for count in run.method.num_prototypes)
    if not in_use or fmean(in_use) >= _DEAD * reachable:
        return ""
    return (
        f"{fmean(in_use):.0f} of {sum(run.method.num_prototypes):,} prototypes are the first choice of any image: the "
        "others are dead. Write fewer prototypes, a smaller epsilon of Sinkhorn, or a queue for small batches."
    )


def _probe_is_far_above_knn(run: Run) -> str:
    probe, knn = run.results.get("probe_top1"), run.results.get("knn_top1_after")
    if probe is None or knn is None or probe < knn + _GAP:
        return ""
    return (
        f"the linear probe reaches {probe:.1%} and kNN {knn:.1%}: the features tell classes apart, but a few "
        "directions unrelated to them dominate distances. Stronger color and crop augmentation take those out; more "
        "epochs help too."
    )


def _no_better_than_the_start(run: Run) -> str:
    before, after = run.results.get("knn_top1_before"), run.results.get("knn_top1_after")
    pixels = run.results.get("knn_top1_raw_pixels")
    if before is None or after is None or run.results.get("collapse_warning_step") is not None:
        return ""
    if run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY:
        return ""  # training leaves the features as they are
    if after <= before < 1:  # nothing is better than all
        return (
            f"training did not help: kNN top-1 is {after:.1%}, and was {before:.1%} before the first step. Try a lower "
            "learning rate or a longer warm-up first, then more epochs."
        )
    if pixels is not None and after <= pixels < 1:
        return (
            f"kNN top-1 is {after:.1%}, and that of raw pixels {pixels:.1%}: the features are not yet better than the "
            "images themselves. Train for more epochs."
        )
    return ""


def _learning_rate_ended_early(run: Run) -> str:
    records = list(run.records)
    highest = max((record.lr for record in records), default=0.0)
    last = next((record.step for record in reversed(records) if record.lr > _NOTHING * highest), 0)
    if not highest or run.step - last <= _OVER * run.step:
        return ""
    return (
        f"the learning rate was nothing from step {last + 1:,} to the end, {run.step:,}: these "
        "steps changed nothing. Stretch config.OPTIMIZER.param_schedulers.lr over the run, or end it there."
    )


_RULES: tuple[Callable[[Run], str], ...] = (
    _no_better_than_the_start,
    _teacher_stands_still,
    _prototypes_are_dead,
    _probe_is_far_above_knn,
    _learning_rate_ended_early,
)
