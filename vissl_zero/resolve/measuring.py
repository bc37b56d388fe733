"""VISSL's programs that train no trunk: the meaning of their switches, and their rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vissl_zero.atomic import is_folder
from vissl_zero.config.blocks.output import NearestNeighbor
from vissl_zero.config.components.heads import layer_names
from vissl_zero.config.constraints import one_of
from vissl_zero.config.programs import (
    ASSIGNMENTS,
    CLUSTERING,
    LOW_SHOT,
    NEIGHBORS,
    PREDICTIONS,
    PROGRAMS,
    RETRIEVAL,
    SVM_PROGRAMS,
    TRAIN,
)
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

# Names of features of the trunk's output, not of an inner layer.
_PLAIN_FEATURES = ("heads", "trunk", "lastCLS", "res5avg", "avgpool", "flatten")


def program(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the program is known."""
    return one_of("PROGRAM", cfg.PROGRAM, [TRAIN, *PROGRAMS])


def svm(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that SVMs have TEST images, and that LinearSVC supports the loss, penalty and costs."""
    if cfg.PROGRAM not in SVM_PROGRAMS:
        return []
    problems, options = _no_test_images(cfg, "SVMs"), cfg.SVM
    # LinearSVC (liblinear) has no solver for the other combinations.
    if options.penalty == "l1" and (options.dual or options.loss != "squared_hinge"):
        got = f"'l1', dual {options.dual}, loss {options.loss!r}"
        must = "must be l2 unless dual is false and loss is squared_hinge"
        problems.append(
            Problem("config.SVM.penalty", got, must, "Write config.SVM.penalty=l2, or config.SVM.dual=false.")
        )
    if options.loss == "hinge" and not options.dual:
        problems.append(
            Problem("config.SVM.dual", "false", "must be true with loss hinge", "Write config.SVM.dual=true.")
        )
    powers = options.costs.power_range
    # VISSL's default base, -1, means that there are no powers, only the list.
    if options.costs.base > 0 and not (len(powers) == 2 and powers[0] < powers[1]):
        must = "must be two exponents, the smaller one first"
        problems.append(Problem("config.SVM.costs.power_range", str(powers), must, "Write [4, 20], for example."))
    if not options.costs.costs_list and options.costs.base <= 0:
        fix = "Write config.SVM.costs.costs_list=[0.1,1,10]."
        problems.append(Problem("config.SVM.costs.costs_list", "[]", "must list a cost", fix))
    low_shot = options.low_shot
    for name in ("sample_inds", "k_values") if cfg.PROGRAM == "train_svm_low_shot" else ():
        if not getattr(low_shot, name):
            problems.append(Problem(f"config.SVM.low_shot.{name}", "[]", "must list a number", "Write [1, 2], say."))
    return problems


def clusters(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the features of the layer to cluster are extracted."""
    if cfg.PROGRAM != CLUSTERING:
        return []
    entries, name = cfg.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP, cfg.CLUSTERFIT.FEATURES.LAYER_NAME
    known = layer_names(entries)
    if (len(known) < 2 and not name) or name in known or (not known and name in _PLAIN_FEATURES):
        return []
    must = f"must name the layer: {', '.join(known or _PLAIN_FEATURES)}"
    return [Problem("config.CLUSTERFIT.FEATURES.LAYER_NAME", repr(name), must, "Correct it, or the map of layers.")]


def low_shot(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that penalties are numbers above 0, and that there are images to test on."""
    if cfg.PROGRAM != LOW_SHOT:
        return []
    options, key, problems = cfg.LOW_SHOT_BENCHMARK, "config.LOW_SHOT_BENCHMARK", []
    if options.METHOD == "svm":
        fix = "Give the recipe to vissl-zero train_svm; METHOD is logistic_regression."
        problems.append(Problem(f"{key}.METHOD", "'svm'", "must be logistic_regression: SVMs are a program here", fix))
    values, key = options.LOGISTIC_REGRESSION.LAMBDA, f"{key}.LOGISTIC_REGRESSION"
    listed = penalties(values)
    if not listed or not all(type(value) in (int, float) and value > 0 for value in listed):
        must = "must be a number above 0, or a list of such"
        problems.append(Problem(f"{key}.LAMBDA", repr(values), must, f"Write {key}.LAMBDA=[1.0,0.1]."))
    if not options.LOGISTIC_REGRESSION.SEEDS:
        problems.append(Problem(f"{key}.SEEDS", "[]", "must list a seed", f"Write {key}.SEEDS=[0]."))
    return problems + _no_test_images(cfg, "classifiers")


def penalties(value: Any) -> list[Any]:
    """Return ``LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION.LAMBDA``, a number or a list, as a list."""
    return value if isinstance(value, list) else [value]


def _no_test_images(cfg: RunConfig, tested: str) -> list[Problem]:
    if cfg.DATA.TEST.DATA_SOURCES:
        return []
    must, fix = (
        f"must name images: {tested} are tested on them",
        "Write config.DATA.TEST.DATA_PATHS=<folder of images>.",
    )
    return [Problem("config.DATA.TEST.DATA_SOURCES", "[]", must, fix)]


def retrieval(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that there are images to search, and that pooling, whitening and scales are compatible."""
    if cfg.PROGRAM != RETRIEVAL:
        return []
    options, problems = cfg.IMG_RETRIEVAL, []
    path, key = options.DATASET_PATH, "config.IMG_RETRIEVAL"
    if not path or not (cfg.DRY_RUN or is_folder(Path(path).expanduser())):
        must = f"must name the folder that holds {options.EVAL_DATASET_NAME}"
        problems.append(Problem(f"{key}.DATASET_PATH", repr(path), must, f"Write {key}.DATASET_PATH=<folder>."))
    if options.EVAL_DATASET_NAME == "instre":
        must = "must be a data set whose format is read here, and that of INSTRE is not"
        fix = "Write roxford5k, rparis6k or copydays, or put its lists into the form of Oxford's."
        problems.append(Problem(f"{key}.EVAL_DATASET_NAME", "'instre'", must, fix))
    if not options.IMG_SCALINGS:
        problems.append(Problem(f"{key}.IMG_SCALINGS", "[]", "must list a factor", f"Write {key}.IMG_SCALINGS=[1]."))
    if options.FEATS_PROCESSING_TYPE == "rmac" and not options.TRAIN_PCA_WHITENING:
        must, fix = "must be true with rmac, which whitens regions", f"Write {key}.TRAIN_PCA_WHITENING=true, or gem."
        problems.append(Problem(f"{key}.TRAIN_PCA_WHITENING", "false", must, fix))
    if options.FEATS_PROCESSING_TYPE == "rmac" and len(options.IMG_SCALINGS) > 1:
        must, fix = "must have one factor with rmac", f"Write {key}.IMG_SCALINGS=[1], or gem."
        problems.append(Problem(f"{key}.IMG_SCALINGS", str(options.IMG_SCALINGS), must, fix))
    if options.CENTER_CROP and options.RESIZE_IMG < 1:
        must, fix = "must be a side in pixels with CENTER_CROP", f"Write {key}.RESIZE_IMG=224."
        problems.append(Problem(f"{key}.RESIZE_IMG", str(options.RESIZE_IMG), must, fix))
    if options.CENTER_CROP and options.CROP_QUERY_ROI:
        must, fix = "must be false with CENTER_CROP, which the boxes do not fit", f"Write {key}.CROP_QUERY_ROI=false."
        problems.append(Problem(f"{key}.CROP_QUERY_ROI", "true", must, fix))
    if options.TRAIN_PCA_WHITENING and options.TRAIN_DATASET_NAME == "whitening" and not options.WHITEN_IMG_LIST:
        must, fix = "must name a list of images", f"Write {key}.WHITEN_IMG_LIST=<file>."
        problems.append(Problem(f"{key}.WHITEN_IMG_LIST", "''", must, fix))
    return problems


def predictions(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that programs that predict load the weights of the heads."""
    settings, weights = cfg.MODEL.FEATURE_EVAL_SETTINGS, cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE
    if cfg.PROGRAM not in (PREDICTIONS, ASSIGNMENTS):
        return []
    if not weights:
        must, fix = "must name weights: new heads predict nothing", "Write a run folder, a checkpoint or a file."
        return [Problem("config.MODEL.WEIGHTS_INIT.PARAMS_FILE", "''", must, fix)]
    if settings.EVAL_MODE_ON and not settings.EVAL_TRUNK_AND_HEAD:
        must, fix = "must be true: else the heads' weights are not loaded", "Write true, or EVAL_MODE_ON: false."
        return [Problem("config.MODEL.FEATURE_EVAL_SETTINGS.EVAL_TRUNK_AND_HEAD", "false", must, fix)]
    return []


def saved_features(cfg: RunConfig, decided: Decisions | None = None) -> list[Problem]:
    """Check that a program which VISSL gives a folder of features has weights: here the run computes the features."""
    paths = {
        NEIGHBORS: ("NEAREST_NEIGHBOR.FEATURES.PATH", cfg.NEAREST_NEIGHBOR.FEATURES.PATH),  # type: ignore[attr-defined]
        CLUSTERING: ("CLUSTERFIT.FEATURES.PATH", cfg.CLUSTERFIT.FEATURES.PATH),  # type: ignore[attr-defined]
        LOW_SHOT: ("LOW_SHOT_BENCHMARK.FEATURES.PATH", cfg.LOW_SHOT_BENCHMARK.FEATURES.PATH),  # type: ignore[attr-defined]
    }
    key, folder = paths.get(cfg.PROGRAM, ("", ""))
    if folder in ("", ".") or cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE:
        return []
    must = "cannot stand in for weights: the run computes the features itself"
    fix = "Write config.MODEL.WEIGHTS_INIT.PARAMS_FILE=<the weights that these features are of>."
    return [Problem(f"config.{key}", str(folder), must, fix)]


PROGRAM_RULES = (program, svm, clusters, low_shot, retrieval, predictions, saved_features)


# VISSL's names for the trunk's output, the input of the heads.
_FEATURES = ("lastCLS", "res5avg", "avgpool", "flatten")
_ALL_IMAGES = 10**8  # VISSL's kNN has no limit
# The rule ``heads`` wants a head, but features are taken before it.
_NOT_USED = ["mlp", {"dims": [-1, 1]}]


def only_measures(cfg: RunConfig) -> bool:
    """Check whether FREEZE_TRUNK_AND_HEAD or EXTRACT_TRUNK_FEATURES_ONLY leaves nothing to train."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    return settings.EVAL_MODE_ON and (settings.FREEZE_TRUNK_AND_HEAD or settings.EXTRACT_TRUNK_FEATURES_ONLY)


def tests_alone(cfg: RunConfig) -> bool:
    """Check whether the run only evaluates TEST's images: TEST_ONLY is set, and TRAIN has no source."""
    return cfg.TEST_ONLY and not cfg.DATA.TRAIN.DATA_SOURCES and bool(cfg.DATA.TEST.DATA_SOURCES)


def without_training(cfg: RunConfig) -> RunConfig:
    """Return a copy of ``cfg`` with TEST_ONLY set if the run trains nothing.

    Raises:
        ConfigError: the recipe is for another program.
    """
    if tests_alone(cfg):
        # TEST's images serve as TRAIN's. kNN is off: the nearest neighbor of each image would be the image itself.
        images = replace(cfg.DATA, TRAIN=cfg.DATA.TEST)
        cfg = replace(cfg, DATA=images, NEAREST_NEIGHBOR=replace(cfg.NEAREST_NEIGHBOR, USE_KNN=False))
    if not only_measures(cfg):
        return cfg
    if cfg.PROGRAM == TRAIN and (problem := _of_other_program(cfg)):
        raise ConfigError([problem])
    settings, model = cfg.MODEL.FEATURE_EVAL_SETTINGS, cfg.MODEL
    if settings.EXTRACT_TRUNK_FEATURES_ONLY:
        entries = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP
        # A single map of the trunk's output asks for what heads see anyway. Without taps no inner layer must be kept.
        is_plain = len(entries) == 1 and entries[0][0] in _FEATURES and entries[0][1][0] == "Identity"
        model = replace(model, HEAD=replace(model.HEAD, PARAMS=[_NOT_USED]))
        settings = replace(
            settings,
            LINEAR_EVAL_FEAT_POOL_OPS_MAP=[] if is_plain else entries,
            FREEZE_TRUNK_ONLY=True,
            FREEZE_TRUNK_AND_HEAD=False,
            SHOULD_FLATTEN_FEATS=cfg.PROGRAM != RETRIEVAL,  # rows to compare, unless maps are pooled later
        )
    neighbors, unset = cfg.NEAREST_NEIGHBOR, NearestNeighbor()
    # A limit that the recipe writes stays.
    all_images: dict[str, Any] = {
        key: _ALL_IMAGES
        for key in ("MAX_TRAIN_IMAGES", "MAX_TEST_IMAGES")
        if neighbors.USE_KNN and getattr(neighbors, key) == getattr(unset, key)
    }
    return replace(
        cfg,
        MODEL=replace(model, FEATURE_EVAL_SETTINGS=settings),
        NEAREST_NEIGHBOR=replace(neighbors, **all_images),
        LOSS={**cfg.LOSS, "name": "CrossEntropyLoss"},  # not used: a loss with no needs of its own
        TEST_ONLY=True,
    )


# Block -> the one program that reads it; empty: a program of VISSL that does not exist here.
_BLOCKS = {
    "SVM": "train_svm",
    "CLUSTERFIT": CLUSTERING,
    "LOW_SHOT_BENCHMARK": LOW_SHOT,
    "IMG_RETRIEVAL": RETRIEVAL,
    "GEO_LOCALIZATION": "",
}


def _of_other_program(cfg: RunConfig) -> Problem | None:
    """Return a problem if the recipe sets a block of another program, since this run would only measure kNN."""
    unset = RunConfig()
    for key, program in _BLOCKS.items():
        if getattr(cfg, key) != getattr(unset, key):
            ours = (
                f"Give vissl-zero {program} config=<recipe>, or leave" if program else "Extract the features, or leave"
            )
            must = f"is read by {program or 'a program of VISSL that is not here'}, and this run measures kNN"
            return Problem(f"config.{key}", "", must, f"{ours} the block out.")
    return None
