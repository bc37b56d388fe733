"""What is run with real tensors to time a step."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vissl_zero.config.compose import compose
from vissl_zero.lifetime import forked
from vissl_zero.planner.planning import plan_run
from vissl_zero.planner.step_time import Rehearsal, calibrate, real_copies

RECIPE = "quickstart/swav_digits"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_second_rehearsal_of_the_same_runs_nothing(tmp_path):
    runs = tmp_path / "runs"
    runs.touch()

    def run():
        with runs.open("a") as file:
            file.write(".")

    for _ in range(2):
        found = Rehearsal(1).seconds("update", "facts", 1e-6, 0, lambda: run)
    number = len(runs.read_text())
    assert found > 0 and 2 <= number <= 6
    assert Rehearsal(1).seconds("update", "others", 1e-6, 0, lambda: run) > 0 and len(runs.read_text()) > number


def test_calibrating_forgets_what_was_rehearsed_under_another_load(tmp_path):
    first, second = (Rehearsal(1).seconds("update", 1, 1e-6, 0, lambda: lambda: None) for _ in range(2))
    assert first == second
    calibrate(tmp_path, seconds=0.2)
    assert Rehearsal(1).seconds("update", 1, 1e-6, 0, lambda: lambda: torch.ones(10**6).sum()) > 2 * first


def test_addresses_of_functions_do_not_count():
    functions = (lambda: 1, lambda: 2)
    found = [
        Rehearsal(1).seconds("update", functions[index], 1e-6, 0, lambda size=10**index: torch.ones(size).sum)
        for index in range(2)
    ]
    assert found[0] == found[1]


def _fail():
    raise RuntimeError("no such\nluck")


def test_what_is_too_long_or_fails_is_estimated_by_the_roofline():
    rehearsal = Rehearsal(1)
    assert rehearsal.seconds("micro-batch", 1, 100.0, 0, _fail) == 100.0
    assert Rehearsal(1).seconds("micro-batch", 1, 1e-6, 2**60, _fail) == 1e-6
    assert not rehearsal.failures
    rehearsal = Rehearsal(1)
    assert rehearsal.seconds("micro-batch", 1, 1e-6, 0, _fail) == 1e-6
    assert rehearsal.failures == ["the time of the micro-batch, as running it failed (RuntimeError: no such)"]
    assert rehearsal.seconds("micro-batch", 2, 1e-6, 0, lambda: lambda: None) == 1e-6  # to be compared with the first


def test_a_model_that_ends_its_process_ends_no_plan():
    rehearsal = Rehearsal(1)
    assert rehearsal.seconds("update", 1, 1e-6, 0, lambda: lambda: os.kill(os.getpid(), signal.SIGKILL)) == 1e-6
    assert "failed (ChildProcessError: ended with exit code -9)" in rehearsal.failures[0]


def test_a_rehearsal_that_hangs_is_given_up():
    with pytest.raises(ChildProcessError, match="-9"):
        forked(time.sleep, 1000.0, timeout_s=0.2)


def test_copies_have_values_and_stay_tied():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        model[2].weight = model[0].weight
    copy, nothing = real_copies((model, None))
    assert nothing is None and copy[0].weight is copy[2].weight
    assert not any(isinstance(tensor, FakeTensor) for tensor in (*copy.parameters(), *copy.buffers()))
    assert isinstance(model[0].weight, FakeTensor) and torch.isfinite(copy(torch.randn(4, 3))).all()


def test_a_profile_leaves_rehearsals_out(monkeypatch):
    kinds: list[str] = []

    def note(self, kind, facts, expected_s, num_bytes, prepare):
        kinds.append(kind)
        return expected_s

    monkeypatch.setattr(Rehearsal, "seconds", note)
    words = ["config.DRY_RUN=true", "config.DISTRIBUTED.NUM_PROC_PER_NODE=2"]
    plan_run(compose(RECIPE, [*words, "config.ZERO.MACHINE_PROFILE=cpu_core"]).run, RECIPE)
    assert not kinds
    plan_run(compose(RECIPE, words).run, RECIPE)
    assert sorted(kinds) == ["micro-batch", "micro-batch", "update", "update"]  # kept, recomputed; whole, in halves
