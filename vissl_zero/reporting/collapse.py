"""A watch on the model itself: one plain warning when it starts to collapse."""

from __future__ import annotations

import rich
from rich.console import Console

from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.methods.health import CollapseRule


class CollapseWatch(Hook):
    """Asks the method's ``collapse_rule``; warns once, on rank 0, and notes the step as ``collapse_warning_step``."""

    def __init__(self, console: Console | None = None):
        self._console = console or rich.get_console()
        self._rule: CollapseRule | None = None

    def on_start(self, run: Run) -> None:
        self._rule = run.method.collapse_rule(run.num_steps) if run.is_main else None
        if self._rule and any(self._update(self._rule, record) for record in run.records):  # those before a resume
            self._rule = None

    def on_record(self, run: Run, record: StepRecord) -> None:
        if self._rule is None:
            return
        warning = self._update(self._rule, record)
        if warning:
            self._rule = None  # never twice
            run.results["collapse_warning_step"] = record.step
            self._console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)

    @staticmethod
    def _update(rule: CollapseRule, record: StepRecord) -> str | None:
        return rule.update(record.step, record.loss, record.watch)
