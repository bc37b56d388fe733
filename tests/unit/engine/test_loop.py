"""What the loop does of its own: when memory is measured, what it tells hooks of a request to stop."""

from __future__ import annotations

import pytest
import torch

from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.engine import stopping
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError


class _Watcher(Hook):
    """Asks after step 3; notes at which steps hooks hear of it."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_step(self, run: Run, record: StepRecord) -> None:
        if run.is_asked_to_stop:
            self.heard.append(run.step)
        if run.step == 3:
            stopping.ask("a test")


def test_memory_is_measured_at_few_steps_and_a_request_to_stop_is_known_at_the_next_step(tmp_path):
    plan = make_plan(make_config() | {"LOG_FREQUENCY": 4}, tmp_path, max_steps=7)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    ledger, measured = run.sharded.ledger, []
    run.sharded.ledger = lambda: measured.append(run.step + 1) or ledger()  # type: ignore[method-assign]
    watcher = _Watcher()
    try:
        train(run, schedules, frozen, [watcher])
    finally:
        stopping.forget()
    assert measured == [1, 2, 4, 7]
    assert watcher.heard == [4, 5, 6, 7]  # what follows from it is for a hook to decide
    assert run.records[4].bytes == run.records[3].bytes and all(record.bytes.grads > 0 for record in run.records)


def test_a_trunk_with_a_layer_that_draws_from_the_global_generator_is_refused_in_the_first_step(tmp_path):
    run, schedules, frozen = build_run(make_plan(make_config(), tmp_path, max_steps=2), torch.device("cpu"))
    block = next(module for module in run.sharded.model.modules() if isinstance(module, torch.nn.ReLU))
    block.register_forward_hook(lambda _module, _inputs, output: torch.nn.functional.dropout(output, 0.1))
    with pytest.raises(ConfigError, match=r"layer '(trunk|heads)\..*global generator.* \(got ReLU\)"):
        train(run, schedules, frozen, [])
    assert not run.records
