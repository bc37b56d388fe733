"""Metrics that early stopping and the best weights can follow, and the epochs that measure them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vissl_zero.config.blocks.output import METERS
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem, did_you_mean
from vissl_zero.resolve.inactive import can_measure_top1, segments

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

# The numbers of summary.json that docs/run_folder.md lists. The names of METERS's metrics end in k.
SUMMARY_NUMBERS = (
    *("level", "world_size", "num_steps", "loss_first", "loss_last", "images_per_s", "memory_before_bytes"),
    *("knn_top1_before", "knn_top1_after", "knn_top1_raw_pixels", "rankme_before", "rankme_after", "lidar"),
    *("top1", "top5", "probe_top1", "probe_top1_train", "miou", "pixel_accuracy"),
    *("loss_best", "top1_best", "knn_top1_best", "probe_top1_best", "miou_best", "best_step"),
    *("best_lr", "best_head", "collapse_warning_step"),
)
EARLY_STOPPING, BEST = "config.HOOKS.EARLY_STOPPING.METRIC", "config.CHECKPOINT.BEST_METRIC"


def periods(cfg: RunConfig) -> dict[str, int]:
    """Map each metric that a run measures during training to its period in epochs.

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
        every["knn_top1"] = 0  # a frozen trunk does not change: kNN is measured once
    return {name: number for name, number in every.items() if number > 0}


def _followed_figures(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the run measures the metrics that early stopping and the best weights follow."""
    known = periods(cfg)
    wanted = {EARLY_STOPPING: cfg.HOOKS.EARLY_STOPPING.METRIC}
    # top1 is the default: where it is not measured, a note reports SAVE_BEST as inactive instead of an error.
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
    """Check the name of the metric that a search optimizes."""
    # Only the name: which numbers this run's summary has is known only after the run.
    return unknown_number(cfg.OBJECTIVE, cfg.HOOKS.EXTRA) if cfg.OBJECTIVE else None


def unknown_number(name: str, own_hooks: Sequence[str]) -> Problem | None:
    """Return the problem of a name that no number of ``summary.json`` can have; user hooks may add any identifier."""
    of_meter = re.fullmatch(f"({'|'.join(METERS.values())})[0-9]+", name)
    if name in SUMMARY_NUMBERS or of_meter or (own_hooks and name.isidentifier()):
        return None
    fix = "Write loss_last or knn_top1_after, for example." + did_you_mean(name, SUMMARY_NUMBERS)
    return Problem("config.OBJECTIVE", repr(name), "must name a number of summary.json", fix)


FOLLOWED_FIGURE_RULES = (_followed_figures, objective)
