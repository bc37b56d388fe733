"""What the loop does of its own: how often it waits for the device, when it measures, what it tells hooks."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.evaluation.example_run import make_config, make_plan
from tests.unit.reporting.example_run import make_record
from vissl_zero.checkpoint import find_checkpoints
from vissl_zero.checkpoint.saver import CheckpointHook, Saver
from vissl_zero.engine import stopping
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Records, Run, Step, StepRecord
from vissl_zero.engine.loop import DivergedError, train
from vissl_zero.engine.loop import explaining_single_images as _explained
from vissl_zero.errors import ConfigError


class _Watcher(Hook):
    """Asks after step 3; notes at which steps hooks hear of it."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_step(self, run: Run, step: Step) -> None:
        if run.is_asked_to_stop:
            self.heard.append(run.step)
        if run.step == 3:
            stopping.request_stop("a test")


def test_batch_norm_of_one_value_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"must leave more than one image to a rank.*DROP_LAST=True"), _explained():
        torch.nn.BatchNorm1d(3)(torch.ones(1, 3))
    with pytest.raises(ValueError, match="another"), _explained():
        raise ValueError("another")


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
    assert watcher.heard == [
        5,
        6,
        7,
    ]  # step 4 carries it to all ranks; what follows is for a hook
    assert run.records[4].bytes == run.records[3].bytes and all(record.bytes.grads > 0 for record in run.records)
    assert [record.step for record in run.records if record.watch] == [1, 2, 4, 7]


def test_the_wait_for_the_loader_is_a_share_of_the_step(tmp_path):
    run, schedules, frozen = build_run(make_plan(make_config(), tmp_path, max_steps=3), torch.device("cpu"))
    epoch = run.loader.epoch

    def slow(*arguments: int) -> Iterator[Any]:
        for number, step in enumerate(epoch(*arguments)):
            time.sleep(0.4 if number == 1 else 0.0)
            yield step

    run.loader.epoch = slow  # type: ignore[method-assign]
    train(run, schedules, frozen, [])
    waited = [record.data_wait * run.plan.global_batch / record.images_per_s for record in run.records]
    assert waited[1] >= 0.4 and all(0 < record.data_wait < 1 for record in run.records)


def test_a_trunk_with_a_layer_that_draws_from_the_global_generator_is_refused_in_the_first_step(tmp_path):
    run, schedules, frozen = build_run(make_plan(make_config(), tmp_path, max_steps=2), torch.device("cpu"))
    block = next(module for module in run.sharded.model.modules() if isinstance(module, torch.nn.ReLU))
    block.register_forward_hook(lambda _module, _inputs, output: torch.nn.functional.dropout(output, 0.1))
    with pytest.raises(ConfigError, match=r"layer '(trunk|heads)\..*global generator.* \(got ReLU\)"):
        train(run, schedules, frozen, [])
    assert not run.records


class HostReads(TorchFunctionMode):
    """Counts what brings values of tensors to the host, by the file of ours that does it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        outer = self

        class Inside(TorchDispatchMode):
            """``item``, ``bool``, ``float`` and what torch reads on its own come down to these."""

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2"):
                    outer.note()
                return func(*args, **(kwargs or {}))

        self._inside = Inside()

    def __enter__(self) -> HostReads:
        self._inside.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frame = sys._getframe(2)
        while frame.f_back and ("vissl_zero" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename):
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.parent.name not in ("data", "transforms"):  # their tensors have never been on a device
            self.found[path.name] += 1


class _Count(Hook):
    """Reads of the host in each step but the first two, from one ``on_step`` to the next."""

    def __init__(self) -> None:
        self.reads = HostReads()
        self.by_step: dict[int, dict[str, int]] = {}

    def on_step(self, run: Run, step: Step) -> None:
        if step.step > 2:
            self.reads.__exit__(None, None, None)
            self.by_step[step.step] = dict(self.reads.found)
        if 2 <= step.step < run.num_steps:
            self.reads = HostReads().__enter__()


def test_a_step_waits_for_the_device_once_and_for_a_step_that_is_over(tmp_path):
    plan = make_plan(make_config() | {"LOG_FREQUENCY": 4}, tmp_path, max_steps=7)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    count = _Count()
    train(run, schedules, frozen, [count])
    is_logged = {"supervised.py": 1}  # health of steps 2 and 4, out of the message that the loop has read
    assert count.by_step == {step: {"loop.py": 1} | (is_logged if step in (3, 5) else {}) for step in range(3, 8)}


def test_figures_of_health_are_not_held_beside_the_next_steps_activations(tmp_path):
    run, schedules, frozen = build_run(
        make_plan(make_config() | {"LOG_FREQUENCY": 4}, tmp_path, max_steps=7), torch.device("cpu")
    )
    held = []
    run.sharded.model.register_forward_pre_hook(lambda *_: held.append(run.unsettled is not None))
    train(run, schedules, frozen, [])
    assert held == [False, False, False, True, False, True, True]  # steps 1, 2 and 4 have such figures; others a few


class _Spoil(Hook):
    """From step ``step`` on the loss is no number. Notes which steps had a record."""

    def __init__(self, step: int):
        self.step, self.seen = step, [0]

    def on_step(self, run: Run, step: Step) -> None:
        if step.step == self.step - 1:
            run.method.register_forward_hook(lambda module, inputs, loss: loss * math.nan)

    def on_record(self, run: Run, record: StepRecord) -> None:
        self.seen.append(record.step)


@pytest.mark.parametrize(("every", "saved", "reached"), [(2, [2], 4), (3, [], 3)])
def test_a_loss_that_is_no_number_is_found_a_step_late_and_never_saved(tmp_path, every, saved, reached):
    run, schedules, frozen = build_run(make_plan(make_config(), tmp_path, max_steps=7), torch.device("cpu"))
    spoil = _Spoil(3)
    saver = Saver(tmp_path, is_async=False, keep_last=-1, keep_every=-1)
    hooks = [spoil, CheckpointHook(saver, [spoil], epochs=-1, steps=every)]
    with pytest.raises(DivergedError, match=r"became nan at step 3 .* Gradients that are not finite: trunk"):
        train(run, schedules, frozen, hooks)
    assert run.step == reached and spoil.seen == [0, 1, 2]
    assert [int(path.name.removeprefix("step_")) for path in find_checkpoints(tmp_path)] == saved
    assert json.loads((tmp_path / "diverged.json").read_text())["step"] == 3


class _Ask(Hook):
    """Asks for a stop after step ``step``."""

    def __init__(self, step: int):
        self.step = step

    def on_step(self, run: Run, step: Step) -> None:
        if step.step == self.step:
            stopping.request_stop("a test")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_stops_has_saved_its_last_step_when_it_says_so(tmp_path, is_async):
    run, schedules, frozen = build_run(make_plan(make_config(), tmp_path, max_steps=7), torch.device("cpu"))
    saver = Saver(tmp_path, is_async=is_async, keep_last=-1, keep_every=-1)
    console = Console(file=io.StringIO(), width=200)
    try:
        train(run, schedules, frozen, [_Ask(3), CheckpointHook(saver, [], epochs=-1, steps=100, console=console)])
    finally:
        stopping.forget()
    assert run.stop == stopping.Stop("a test") and run.step == 5
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_000000005"]
    said = "Stopping after step 5 (a test); the checkpoint of step 5 is saved. The same command resumes from there."
    assert said in " ".join(console.file.getvalue().split())


def test_records_of_a_long_run_are_thinned_out():
    records, record = Records(), make_record(1)
    for place in range(20_000):
        records.append(record if place not in (0, 19_999) else make_record(place + 1))
    assert len(records) <= Records.MOST + 1
    assert records[0].step == 1 and records[-1].step == 20_000
    many = Records(make_record(step) for step in range(1, 5001))
    steps = [record.step for record in many]
    assert steps[:64] == list(range(1, 65)) and steps[64:] == [*range(65, 5001, 2), 5000]
