"""Which steps are bad, how many are captured, and that a run which captures trains the same model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.bad_step import open_state, read_batches, read_facts
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.engine.loop import DivergedError, train
from vissl_zero.launch.replay import replay
from vissl_zero.reporting.bad_step_capture import BadStepCapture, BadStepRule
from vissl_zero.reporting.replay_lines import replay_lines

STEADY = [(2.0, 3.0)] * 20


def verdicts(figures: Sequence[tuple[float, float]], factor: float | None = 10.0, scale: float = 1.0) -> list[str]:
    rule = BadStepRule(factor)
    return [rule.verdict(pair, scale) for pair in figures]


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ((math.nan, 3.0), "the loss is nan"),
        ((math.inf, math.nan), "the loss is inf"),
        ((2.0, math.inf), "the gradient norm is inf"),
        ((20.0, 3.0), "the loss is 20, 10 times its median"),
        ((19.9, 30.3), "the gradient norm is 30.3, 10.1 times its median"),
        ((40.0, 60.0), "the loss is 40, 20 times its median and the gradient norm is 60, 20 times its median"),
        ((19.9, 29.9), ""),
    ],
)
def test_a_step_is_bad_if_a_figure_is_not_finite_or_far_above_its_median(pair: Any, said: str) -> None:
    assert verdicts([*STEADY, pair]) == [""] * 20 + [said]


def test_no_spike_among_the_first_steps_nor_of_a_negative_loss_nor_without_a_factor() -> None:
    assert verdicts([*STEADY[:19], (99.0, 99.0)]) == [""] * 20
    assert verdicts([(-2.0, 3.0)] * 20 + [(99.0, 3.0)]) == [""] * 21
    assert verdicts([*STEADY, (99.0, 99.0)], factor=None) == [""] * 21


def test_gradients_that_overflow_while_the_loss_scale_is_sought_are_not_bad() -> None:
    assert verdicts([(2.0, math.inf)], scale=1024.0) == [""]
    assert verdicts([(2.0, math.inf)], scale=1.0) == ["the gradient norm is inf"]


def test_the_medians_outlive_a_resume_and_are_of_the_last_hundred_steps() -> None:
    rule, resumed = BadStepRule(10.0), BadStepRule(10.0)
    for _ in range(30):
        rule.verdict((2.0, 3.0), 1.0)
    resumed.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert resumed.verdict((20.0, 3.0), 1.0) == "the loss is 20, 10 times its median"
    for _ in range(100):
        resumed.verdict((20.0, 3.0), 1.0)
    assert resumed.verdict((20.0, 3.0), 1.0) == ""


class Poison(Hook):
    """Makes a pixel of the first image of some steps infinite, as a broken file would."""

    def __init__(self, *steps: int):
        self.steps = steps

    def on_batch(self, run: Run, micro_batches: Any) -> None:
        if run.step + 1 in self.steps:
            micro_batches[0].images[0][0, 0, 0, 0] = math.inf


class Chosen(BadStepRule):
    """Finds these steps bad."""

    def __init__(self, *steps: int):
        super().__init__(None)
        self.steps, self.step = steps, 0

    def verdict(self, figures: Sequence[float], loss_scale: float) -> str:
        self.step += 1
        return "chosen" if self.step in self.steps else ""


class Trained(NamedTuple):
    state: dict[str, Tensor]
    results: dict[str, Any]
    error: str


def trained(folder: Path, *hooks: Hook, rule: BadStepRule | None = None, **options: Any) -> Trained:
    """Train 8 steps."""
    config = make_config()
    config["HOOKS"]["CAPTURE_BAD_STEP"] |= {"USE_CAPTURE": True, **options}
    plan, error = make_plan(config, folder), ""
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    capture = BadStepCapture(plan.config.HOOKS.CAPTURE_BAD_STEP)
    capture._rule = rule or capture._rule
    try:
        train(run, schedules, frozen, [*hooks, capture])
    except DivergedError as diverged:
        error = str(diverged)
    return Trained(run.sharded.full_state(), run.results, error)


def test_a_run_without_a_bad_step_writes_nothing_and_trains_the_same_model(tmp_path: Path) -> None:
    plan = make_plan(make_config(), tmp_path)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [])
    with_capture = trained(tmp_path)
    plain = run.sharded.full_state()
    assert all(torch.equal(plain[name], with_capture.state[name]) for name in plain)
    assert not list(tmp_path.iterdir()) and "findings" not in with_capture.results


def test_the_batch_is_kept_as_the_loop_saw_it_and_the_errors_name_the_command(tmp_path: Path) -> None:
    found = trained(tmp_path, Poison(3))
    folder = tmp_path / "bad_steps/3"
    assert f"Step 3 was captured; to look into it: vissl-zero replay {folder}" in found.error
    assert found.results["findings"] == [
        f"step 3 was bad: the loss is nan. It is captured (0.1 MB); to look into it: vissl-zero replay {folder}"
    ]
    facts = read_facts(folder)
    assert (facts.step, facts.why, facts.loss, facts.grad_norm) == (3, "the loss is nan", "nan", "nan")
    with open_state(folder) as state:
        (batch,) = read_batches(state, 0, 1)
        parts = [read_batches(state, rank, 3)[0] for rank in range(3)]
    assert batch.images[0][0, 0, 0, 0] == math.inf and batch.num_global == 16 and batch.targets is not None
    assert [part.num_local for part in parts] == [6, 5, 5]
    assert torch.equal(torch.cat([part.images[0] for part in parts]), batch.images[0])
    assert torch.equal(torch.cat([part.sample_ids for part in parts]), batch.sample_ids)
    result = replay(make_plan(make_config(), tmp_path), folder)
    assert result["is_equal"] and result["first_not_finite"] == "trunk.stem.0"
    assert [row["sample"] for row in result["samples_not_finite"]] == [int(batch.sample_ids[0])]
    lines = replay_lines(result, most_modules=3)
    assert lines[:2] == ["step 3 of a/test: the loss is nan", "replayed at ZeRO level 0 in 1 process, in float64"]
    assert "equal, bit for bit" in lines and "the first module whose output is not finite: trunk.stem.0" in lines
    name = result["samples_not_finite"][0]["name"]
    assert f"samples whose pixels are not finite, 1 of them: {batch.sample_ids[0]} ({name})" in lines


def test_figures_that_differ_name_what_differs_and_else_the_hardware(tmp_path: Path) -> None:
    trained(tmp_path, rule=Chosen(3))
    result = replay(make_plan(make_config(), tmp_path), tmp_path / "bad_steps/3")
    assert "equal, bit for bit" in replay_lines(result, 3)
    result["is_equal"] = False
    at_fault = "not equal, although state and batch are. A hook of your own, or the hardware, may be at fault"
    assert at_fault in replay_lines(result, 3)
    result["written"] |= {"level": 3, "world_size": 2, "compile": "inductor", "torch": "1.0"}
    named = "not equal; it was captured with ZeRO level 3, 2 processes, torch 1.0, compiled units"
    assert named in replay_lines(result, 3)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "bad_steps").iterdir())


def test_a_run_captures_the_first_of_a_row_and_at_most_so_many_again_after_a_restart(tmp_path: Path) -> None:
    found = trained(tmp_path, rule=Chosen(2, 3, 5, 7), MOST=2)
    assert steps_in(tmp_path) == ["2", "5"] and len(found.results["findings"]) == 2
    restarted = trained(tmp_path, rule=Chosen(2, 6, 8), MOST=3)
    assert steps_in(tmp_path) == ["2", "5", "6"] and len(restarted.results["findings"]) == 1


def test_a_disk_without_room_costs_the_capture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = trained(tmp_path, Poison(3))
    assert "Bad step 3 (the loss is nan) could not be captured: it takes 0.00 GB, and 0.00 GB are free" in caplog.text
    assert not (tmp_path / "bad_steps").exists()
    assert found.error.endswith("It was not captured: the run has its 3, or lacked room.")
