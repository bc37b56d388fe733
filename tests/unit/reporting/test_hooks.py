from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.reporting.example_run import make_plan
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.errors import RegistryError
from vissl_zero.registry import HOOKS
from vissl_zero.reporting.display import Display
from vissl_zero.reporting.hooks import ReportImage, build_hooks
from vissl_zero.reporting.loggers.logging import Logging
from vissl_zero.reporting.summary import Summary
from vissl_zero.resolve.resolved import ResolvedRun


def plan_with(run: Run, extra: tuple[str, ...] = (), use_tensorboard: bool = True) -> ResolvedRun:
    plan = make_plan(run.folder)
    options: dict[str, Any] = {
        "TEST_ONLY": False,
        "HOOKS": {
            "EXTRA": list(extra),
            "LOGGERS": ["tensorboard"],
            "TENSORBOARD_SETUP": {"USE_TENSORBOARD": use_tensorboard},
            "EMA_MODEL": {},
        },
        "NEAREST_NEIGHBOR": {"USE_KNN": False, "EVERY_NUM_EPOCHS": 0},
        "ONLINE_PROBE": {"USE_PROBE": False},
    }
    return replace(plan, config=plan.config | options)


@pytest.fixture
def own_hook() -> Iterator[str]:
    """A user's hook, registered for one test."""

    @HOOKS.register("best_loss")
    class BestLoss(Hook):
        """Adds the lowest loss to the results."""

        def on_end(self, run: Run) -> None:
            run.results["loss_best"] = min(record.loss for record in run.records if record.loss is not None)

    yield "best_loss"
    HOOKS._components.pop("best_loss")


def test_what_a_users_hook_finds_is_in_the_summary(run: Run, records: list[StepRecord], own_hook: str) -> None:
    hooks = build_hooks(plan_with(run, (own_hook,)))
    run.records, run.step = records, 20
    kinds = [type(hook).__name__ for hook in hooks]
    for name in ("BestLoss", "PeakMemory", "Summary"):
        hooks[kinds.index(name)].on_end(run)
    assert kinds.index("BestLoss") < kinds.index("PeakMemory") < kinds.index("Summary")
    assert json.loads((run.folder / "summary.json").read_text())["loss_best"] == records[-1].loss


def test_an_unknown_hook_is_named(run: Run) -> None:
    with pytest.raises(RegistryError, match=r"config.HOOKS.EXTRA.*known hook.*'no_such_hook'"):
        build_hooks(plan_with(run, ("no_such_hook",)))


@pytest.mark.parametrize("use", [True, False])
def test_tensorboard_can_be_switched_off(run: Run, use: bool) -> None:
    hook = build_hooks(plan_with(run, use_tensorboard=use))[-1]
    hook.on_start(run)
    hook.close(run)
    assert (run.folder / "tensorboard").exists() is use


def test_something_is_seen_first_and_results_are_reported_last(run: Run) -> None:
    hooks = build_hooks(plan_with(run))
    assert isinstance(hooks[1], Display)
    assert [type(hook) for hook in hooks[-3:]] == [Summary, ReportImage, Logging]
