"""Recipes of VISSL's programs that train nothing, kNN and extraction: what their switches stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vissl_zero.config.blocks.output import NearestNeighbor
from vissl_zero.config.run_config import RunConfig
from vissl_zero.config.vissl_programs import ASSIGNMENTS, CLUSTERING, LOW_SHOT, PREDICTIONS, RETRIEVAL, TRAIN
from vissl_zero.errors import ConfigError, Problem

# VISSL's names of what the trunk gives to its heads.
_FEATURES = ("lastCLS", "res5avg", "avgpool", "flatten")
_ALL_IMAGES = 10**8  # VISSL takes all of them
_NOT_USED = ["mlp", {"dims": [-1, 1]}]


def begin_program(run: RunConfig, name: str) -> None:
    """Make of a recipe a run of a program, in place: nothing is trained, and trunk and heads are frozen.

    Args:
        run: as it was written; with heads of VISSL's names.
        name: of ``PROGRAMS``.
    """
    run.PROGRAM, run.TEST_ONLY = name, True
    run.CHECKPOINT.CHECKPOINT_FREQUENCY = run.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY = -1
    run.NEAREST_NEIGHBOR.USE_KNN = name == "nearest_neighbor_test"
    settings = run.MODEL.FEATURE_EVAL_SETTINGS
    if name in (PREDICTIONS, ASSIGNMENTS):
        run.LOSS = {**run.LOSS, "name": "CrossEntropyLoss"}  # no loss counts
        if settings.FREEZE_TRUNK_AND_HEAD:  # the same here, and it lets the heads see layers
            settings.FREEZE_TRUNK_ONLY, settings.FREEZE_TRUNK_AND_HEAD = True, False
        return
    settings.EVAL_MODE_ON = True
    if not settings.FREEZE_TRUNK_AND_HEAD:
        settings.EXTRACT_TRUNK_FEATURES_ONLY = True
    if name == RETRIEVAL:
        settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP[:1]  # VISSL takes the first
        # What builds the run's loader, which nothing reads.
        options, side = run.IMG_RETRIEVAL, max(run.IMG_RETRIEVAL.RESIZE_IMG, 32)
        run.DATA.TRAIN.DATA_SOURCES = ["disk_folder"]
        run.DATA.TRAIN.DATA_PATHS = [str(Path(options.DATASET_PATH).expanduser() / options.EVAL_DATASET_NAME)]
        run.DATA.TRAIN.TRANSFORMS = [
            {"name": "Resize", "size": side}, {"name": "CenterCrop", "size": side}, {"name": "ToTensor"}
        ]  # fmt: skip
        run.DATA.TEST.DATA_SOURCES = []


def only_measures(cfg: RunConfig) -> bool:
    """Whether FREEZE_TRUNK_AND_HEAD or EXTRACT_TRUNK_FEATURES_ONLY leaves nothing to train."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    return settings.EVAL_MODE_ON and (settings.FREEZE_TRUNK_AND_HEAD or settings.EXTRACT_TRUNK_FEATURES_ONLY)


def tests_alone(cfg: RunConfig) -> bool:
    """Whether images are only measured: TEST_ONLY, and TRAIN names none."""
    return cfg.TEST_ONLY and not cfg.DATA.TRAIN.DATA_SOURCES and bool(cfg.DATA.TEST.DATA_SOURCES)


def without_training(cfg: RunConfig) -> RunConfig:
    """``cfg``, or a copy that is TEST_ONLY where nothing is to be trained: its loss does not count.

    Where TRAIN names no images, TEST's stand for them, and there is no kNN, which would find each image itself.

    Raises:
        ConfigError: the recipe is for a program that was not asked for.
    """
    if tests_alone(cfg):
        images = replace(cfg.DATA, TRAIN=cfg.DATA.TEST)
        cfg = replace(cfg, DATA=images, NEAREST_NEIGHBOR=replace(cfg.NEAREST_NEIGHBOR, USE_KNN=False))
    if not only_measures(cfg):
        return cfg
    if cfg.PROGRAM == TRAIN and (problem := _of_other_program(cfg)):
        raise ConfigError([problem])
    settings, model = cfg.MODEL.FEATURE_EVAL_SETTINGS, cfg.MODEL
    if settings.EXTRACT_TRUNK_FEATURES_ONLY:
        entries = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP
        is_plain = len(entries) == 1 and entries[0][0] in _FEATURES and entries[0][1][0] == "Identity"
        model = replace(model, HEAD=replace(model.HEAD, PARAMS=[_NOT_USED]))
        settings = replace(
            settings,
            LINEAR_EVAL_FEAT_POOL_OPS_MAP=[] if is_plain else entries,
            FREEZE_TRUNK_ONLY=True,
            FREEZE_TRUNK_AND_HEAD=False,
            SHOULD_FLATTEN_FEATS=cfg.PROGRAM != RETRIEVAL,  # rows to compare, unless maps are pooled later
        )
    neighbours, unset = cfg.NEAREST_NEIGHBOR, NearestNeighbor()
    all_images: dict[str, Any] = {
        key: _ALL_IMAGES
        for key in ("MAX_TRAIN_IMAGES", "MAX_TEST_IMAGES")
        if neighbours.USE_KNN and getattr(neighbours, key) == getattr(unset, key)
    }
    return replace(
        cfg,
        MODEL=replace(model, FEATURE_EVAL_SETTINGS=settings),
        NEAREST_NEIGHBOR=replace(neighbours, **all_images),
        LOSS={**cfg.LOSS, "name": "CrossEntropyLoss"},
        TEST_ONLY=True,
    )


# Blocks that a program alone reads, by the program's name here; empty: the program is not here.
_BLOCKS = {
    "SVM": "train_svm",
    "CLUSTERFIT": CLUSTERING,
    "LOW_SHOT_BENCHMARK": LOW_SHOT,
    "IMG_RETRIEVAL": RETRIEVAL,
    "GEO_LOCALIZATION": "",
}


def _of_other_program(cfg: RunConfig) -> Problem | None:
    """The recipe has a block of a program that was not asked for: kNN is not what it is about."""
    unset = RunConfig()
    for key, program in _BLOCKS.items():
        if getattr(cfg, key) != getattr(unset, key):
            ours = (
                f"Give vissl-zero {program} config=<recipe>, or leave" if program else "Extract the features, or leave"
            )
            must = f"is read by {program or 'a program of VISSL that is not here'}, and this run measures kNN"
            return Problem(f"config.{key}", "", must, f"{ours} the block out.")
    return None
