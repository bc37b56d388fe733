"""Early stopping: when it ends a run, what a resumed run remembers, and the figures that it may follow."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.reporting.example_run import make_record, make_run
from vissl_zero.config.blocks.output import EarlyStopping
from vissl_zero.config.compose import compose
from vissl_zero.engine.hook import Run
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.early_stopping import EarlyStoppingHook
from vissl_zero.resolve.resolve import resolve

RECIPE = "digits/swav"


def follow(run: Run, figures: list[float], options: EarlyStopping, killed_after: int = 0) -> int:
    """Give ``figures``, one an epoch of 2 steps, to a hook; returns the step at which the run ends."""
    config = run.plan.config
    config = replace(config, NEAREST_NEIGHBOR=replace(config.NEAREST_NEIGHBOR, USE_KNN=True, EVERY_NUM_EPOCHS=1))
    run.plan = replace(run.plan, config=config)
    run.num_steps = 2 * len(figures)
    hook = EarlyStoppingHook(options, Console(file=io.StringIO()))
    for run.epoch, figure in enumerate(figures):
        if run.step >= run.num_steps:
            break
        run.step += 2
        run.results["knn_top1_latest"] = figure
        hook.on_epoch_end(run)
        if run.epoch + 1 == killed_after:
            run.num_steps, state = 2 * len(figures), hook.state_dict()
            hook = EarlyStoppingHook(options, Console(file=io.StringIO()))
            hook.load_state_dict(state)
            hook.on_start(run)
    return run.step


# Best after epoch 2 (step 4); the third without a better one is epoch 5 (step 10).
FIGURES = [0.5, 0.6, 0.55, 0.6, 0.58, 0.9, 0.95, 0.97]


@pytest.mark.parametrize("killed_after", range(7))
def test_a_run_ends_after_patience_whenever_it_was_killed(tmp_path: Path, killed_after: int) -> None:
    run = make_run(tmp_path)
    assert follow(run, FIGURES, EarlyStopping("knn_top1", PATIENCE=3), killed_after) == 10
    assert run.results["early_stopping"] == {"metric": "knn_top1", "best": 0.6, "best_step": 4}


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (EarlyStopping("knn_top1", PATIENCE=4), 16),
        (EarlyStopping("knn_top1", PATIENCE=2, MODE="min"), 6),
        (EarlyStopping("knn_top1", PATIENCE=2, MIN_DELTA=0.2), 6),
    ],
)
def test_patience_mode_and_delta_decide_when(tmp_path: Path, options: EarlyStopping, end: int) -> None:
    assert follow(make_run(tmp_path), FIGURES, options) == end


def test_the_loss_of_an_epoch_weighs_each_image_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    hook = EarlyStoppingHook(EarlyStopping("loss", PATIENCE=2), Console(file=io.StringIO()))
    hook.on_record(run, make_record(1, loss=1.0, num_samples=12))
    resumed = EarlyStoppingHook(EarlyStopping("loss", PATIENCE=2), Console(file=io.StringIO()))
    resumed.load_state_dict(hook.state_dict())
    resumed.on_record(run, make_record(2, loss=5.0, num_samples=4))
    resumed.on_record(run, make_record(3, loss=None, num_samples=100))  # a step that was skipped
    run.step, run.epoch = 10, 0
    resumed.on_epoch_end(run)
    assert resumed.state_dict()["best"] == 2.0


def test_a_figure_that_nothing_measures_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    written = compose(RECIPE, ["config.HOOKS.EARLY_STOPPING.METRIC=probe_top1"])
    with pytest.raises(ConfigError) as refused:
        resolve(written.run, tmp_path)
    assert "config.HOOKS.EARLY_STOPPING.METRIC" in str(refused.value)
    assert "a figure that this run measures" in str(refused.value)
