"""The hooks of a run, in the order of their calls; and the hooks for its first lines, its report, and collapse."""

from __future__ import annotations

import rich
from rich.console import Console

from vissl_zero.config.programs import PROGRAMS
from vissl_zero.data.source import described_splits, left_out_of_run
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.errors import counted
from vissl_zero.evaluation.accuracy import AccuracyHook, OnlineProbeHook
from vissl_zero.evaluation.early_stopping import EarlyStoppingHook
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.evaluation.segmentation import SegmentationHook
from vissl_zero.methods.health import CollapseRule
from vissl_zero.registry import HOOKS, require_interface
from vissl_zero.reporting.bad_step_capture import BadStepCapture
from vissl_zero.reporting.display import Display
from vissl_zero.reporting.findings import FindingsHook, add_finding
from vissl_zero.reporting.histogram_file import HistogramFile
from vissl_zero.reporting.loggers.logging import Logging
from vissl_zero.reporting.lossy_output import optional_output
from vissl_zero.reporting.metrics_file import MetricsFile
from vissl_zero.reporting.quantity import PeakMemory
from vissl_zero.reporting.summary import Summary
from vissl_zero.reporting.weight_files import BestWeights, FinalWeights, WeightAverageHook
from vissl_zero.resolve.logger_rules import logger_names
from vissl_zero.resolve.resolved import OffloadPlan, ResolvedRun
from vissl_zero.terminal import print_line
from vissl_zero.version import __version__


def build_hooks(plan: ResolvedRun) -> list[Hook]:
    """Build the hooks that a configuration asks for. Every rank builds the same list: some hooks are collective.

    The display is first, so that the user sees output before the first evaluation, and its last frame is above the
    output of other hooks. The file of metrics is before every hook that may fail. Hooks that add results (evaluation,
    the user's hooks, peak memory) are before hooks that report them.

    Raises:
        RegistryError: config.HOOKS.EXTRA names an unknown hook.
    """
    options = plan.config.HOOKS
    knn, segmentation = KnnHook(plan), SegmentationHook()
    hooks: list[Hook] = [Opening(), Display(), MetricsFile(), CollapseWatch(), knn, AccuracyHook(), segmentation]
    if options.HISTOGRAMS_EVERY:
        hooks.append(HistogramFile())
    if plan.config.ONLINE_PROBE.USE_PROBE:
        hooks.append(OnlineProbeHook())
    if options.CAPTURE_BAD_STEP.USE_CAPTURE:
        hooks.append(BadStepCapture(options.CAPTURE_BAD_STEP))
    if options.EARLY_STOPPING.METRIC:
        hooks.append(EarlyStoppingHook(options.EARLY_STOPPING))
    if plan.config.CHECKPOINT.SAVE_BEST:
        hooks.append(BestWeights(plan.config.CHECKPOINT.BEST_METRIC))
    program = PROGRAMS.get(plan.config.PROGRAM)
    # Once each, if the user also names the program's own hook.
    for name in dict.fromkeys([*([program] if program else []), *options.EXTRA]):
        hooks.append(HOOKS.get(name).build())
        require_interface(HOOKS, name, hooks[-1], base=Hook)
    if (average := options.EMA_MODEL).SAVE_EMA_MODEL:
        hooks.append(WeightAverageHook(average))
    if not plan.config.TEST_ONLY:
        hooks.append(FinalWeights())
    report = ReportImage(knn, segmentation=segmentation)
    return [*hooks, FindingsHook(), PeakMemory(), Summary(), report, Logging(logger_names(plan.config.HOOKS))]


class Opening(Hook):
    """Prints the opening lines on rank 0: the run, all notes of the plan and, if ``verbose``, the wrap plan."""

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()

    def on_start(self, run: Run) -> None:
        if run.is_main:
            for text in opening_lines(run):
                print_line(text, self._console)


def opening_lines(run: Run) -> list[str]:
    """Return the opening lines, ASCII except for the user's names."""
    plan = run.plan
    ranks = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
    lines = [
        f"vissl_zero {__version__}: {plan.recipe}, ZeRO level {plan.sharding.level} "
        f"({plan.sharding.engine} engine), {ranks} on {run.device.type}",
        f"{_length(run)}; run folder {run.folder}",
    ]
    count = "" if plan.config.DATA.TRAIN.DATA_LIMIT > 0 else f"{counted(len(run.loader.source), 'image')}: "
    lines.append(f"data {count}{described_splits(plan.config, bool(run.loader.source.class_names))}")
    tiers = {"optimizer state": plan.sharding.offload_optimizer, "parameters": plan.sharding.offload_params}
    if stored := [f"{what} {_place(tier)}" for what, tier in tiers.items() if tier.device != "none"]:
        lines.append(f"stored {', '.join(stored)}; memory figures include their buffers")
    if rates := plan.optimizer.head_lr_factors:
        lines.append(
            f"{len(rates)} classifiers side by side, learning rates times {', '.join(f'{r:g}' for r in rates)}; "
            "the loss is their sum, and grows where the largest rates diverge; the best classifier counts"
        )
    if run.step:
        lines.append(f"resumed after step {run.step}")
    notes = (*plan.notes, *left_out_of_run(plan.config.DATA, run.loader.source, plan.seed))
    lines += [f"note: {note}" for note in notes]
    if plan.sharding.verbose:
        lines += ["wrap plan:", run.sharded.describe()]
    return lines


def _place(tier: OffloadPlan) -> str:
    return f"on the disk, {tier.nvme_path}" if tier.is_on_disk else "in host memory"


def _length(run: Run) -> str:
    if not run.num_steps:  # TEST_ONLY
        return "nothing is trained"
    return f"{run.num_steps} steps of {run.plan.global_batch} images, {run.steps_per_epoch} steps per epoch"


class ReportImage(Hook):
    """Draws ``report.png`` on rank 0; place it after every hook that adds results.

    Args:
        knn: the run's kNN hook, for its curve and neighbors.
        console: console on which to print the file's path; None: rich's global console.
        segmentation: hook with segmented images; None: the report has none.
    """

    FILE = "report.png"

    def __init__(self, knn: KnnHook, console: Console | None = None, segmentation: SegmentationHook | None = None):
        self._knn, self._segmentation = knn, segmentation
        self._console = console or rich.get_console()

    def on_end(self, run: Run) -> None:
        if not run.is_main:
            return
        path = run.folder / self.FILE
        with optional_output(self.FILE, self._console):
            from vissl_zero.reporting.report import (  # imports matplotlib, which the first step should not wait for
                gather_content,
                write_report,
            )

            pictures = self._segmentation.pictures if self._segmentation else []
            write_report(gather_content(run, self._knn, pictures), path)
            print_line(f"report      {path}", self._console)


class CollapseWatch(Hook):
    """Applies the method's ``collapse_rule``; warns once, on rank 0, and adds ``collapse_warning_step`` to results."""

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()
        self._rule: CollapseRule | None = None

    def on_start(self, run: Run) -> None:
        self._rule = run.method.collapse_rule(run.num_steps) if run.is_main else None
        if self._rule and any(self._update(self._rule, record) for record in run.records):  # before a resume
            self._rule = None

    def on_record(self, run: Run, record: StepRecord) -> None:
        if self._rule is None:
            return
        warning = self._update(self._rule, record)
        if warning:
            self._rule = None  # warn only once
            run.results["collapse_warning_step"] = record.step
            add_finding(run, warning)
            print_line(f"warning: {warning}", self._console)

    @staticmethod
    def _update(rule: CollapseRule, record: StepRecord) -> str | None:
        return rule.update(record.step, record.loss, record.watch)
