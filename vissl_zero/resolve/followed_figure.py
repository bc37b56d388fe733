"""Which figures early stopping and the best weights can follow, and the epochs that measure them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.resolve.inactive import can_measure_top1, segments

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

EARLY_STOPPING, BEST = "config.HOOKS.EARLY_STOPPING.METRIC", "config.CHECKPOINT.BEST_METRIC"


def periods(cfg: RunConfig) -> dict[str, int]:
    """Return the figures that a run measures while it trains, and every how many epochs.

    Args:
        cfg: the whole configuration.
    """
    every = {
        "loss": 1,
        "top1": cfg.TEST_EVERY_NUM_EPOCH if cfg.TEST_MODEL and can_measure_top1(cfg) else 0,
        "miou": cfg.TEST_EVERY_NUM_EPOCH if cfg.TEST_MODEL and segments(cfg) else 0,
        "knn_top1": cfg.NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS if cfg.NEAREST_NEIGHBOR.USE_KNN else 0,
        "probe_top1": cfg.ONLINE_PROBE.EVERY_NUM_EPOCHS if cfg.ONLINE_PROBE.USE_PROBE else 0,
    }
    if cfg.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY:
        every["knn_top1"] = 0  # a frozen trunk is measured once
    return {name: number for name, number in every.items() if number > 0}


def followed_figures(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the run measures the figures that early stopping and the best weights follow."""
    known = periods(cfg)
    wanted = {EARLY_STOPPING: cfg.HOOKS.EARLY_STOPPING.METRIC}
    if cfg.CHECKPOINT.SAVE_BEST and cfg.CHECKPOINT.BEST_METRIC != "top1":
        wanted[BEST] = cfg.CHECKPOINT.BEST_METRIC
    fix = (
        "Write one of them, or have it measured: knn_top1 by config.NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS=1, probe_top1 "
        "by config.ONLINE_PROBE.USE_PROBE=true, top1 by a method that predicts classes and images in DATA.TEST, "
        "miou by config=finetune/segmentation."
    )
    must = f"must be a figure that this run measures ({', '.join(known)})"
    return [Problem(key, repr(metric), must, fix) for key, metric in wanted.items() if metric and metric not in known]


def objective(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that the figure of a search is a name; whether a run's summary has it is known when one has ended."""
    if not cfg.OBJECTIVE or cfg.OBJECTIVE.isidentifier():
        return None
    fix = "Write loss_last or knn_top1_after, for example."
    return Problem("config.OBJECTIVE", repr(cfg.OBJECTIVE), "must name a number of summary.json", fix)


FOLLOWED_FIGURE_RULES = (followed_figures, objective)
