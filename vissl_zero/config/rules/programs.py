"""What VISSL's programs need: images to test on, and keys that go together."""

from __future__ import annotations

from vissl_zero.config.host import Host
from vissl_zero.config.programs import CLUSTERING, PREDICTIONS, PROGRAMS, SVM_PROGRAMS, TRAIN
from vissl_zero.config.rules.limits import one_of
from vissl_zero.config.run import RunConfig
from vissl_zero.config.taps import layer_names
from vissl_zero.errors import Problem

# Names of features that are no inner layer's.
PLAIN_FEATURES = ("heads", "trunk", "lastCLS", "res5avg", "avgpool", "flatten")


def program(cfg: RunConfig, host: Host) -> list[Problem]:
    """The program is known."""
    return one_of("PROGRAM", cfg.PROGRAM, [TRAIN, *PROGRAMS])


def svm(cfg: RunConfig, host: Host) -> list[Problem]:
    """SVMs are tested on TEST's images; LinearSVC solves what is asked for."""
    if cfg.PROGRAM not in SVM_PROGRAMS:
        return []
    found, options = [], cfg.SVM
    if not cfg.DATA.TEST.DATA_SOURCES:
        fix = "Write config.DATA.TEST.DATA_PATHS=<folder of images>."
        found.append(Problem("config.DATA.TEST.DATA_SOURCES", "[]", "must name images: SVMs are tested on them", fix))
    if options.penalty == "l1" and (options.dual or options.loss != "squared_hinge"):
        got = f"'l1', dual {options.dual}, loss {options.loss!r}"
        must = "must be l2 unless dual is false and loss is squared_hinge"
        found.append(Problem("config.SVM.penalty", got, must, "Write config.SVM.penalty=l2, or config.SVM.dual=false."))
    if options.loss == "hinge" and not options.dual:
        found.append(Problem("config.SVM.dual", "false", "must be true with loss hinge", "Write config.SVM.dual=true."))
    powers = options.costs.power_range
    if options.costs.base > 0 and not (len(powers) == 2 and powers[0] < powers[1]):
        must = "must be two exponents, the smaller one first"
        found.append(Problem("config.SVM.costs.power_range", str(powers), must, "Write [4, 20], for example."))
    if not options.costs.costs_list and options.costs.base <= 0:
        fix = "Write config.SVM.costs.costs_list=[0.1,1,10]."
        found.append(Problem("config.SVM.costs.costs_list", "[]", "must list a cost", fix))
    low_shot = options.low_shot
    for name in ("sample_inds", "k_values") if cfg.PROGRAM == "train_svm_low_shot" else ():
        if not getattr(low_shot, name):
            found.append(Problem(f"config.SVM.low_shot.{name}", "[]", "must list a number", "Write [1, 2], say."))
    return found


def clusters(cfg: RunConfig, host: Host) -> list[Problem]:
    """The layer that is clustered is one of those that are extracted."""
    if cfg.PROGRAM != CLUSTERING:
        return []
    entries, name = cfg.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP, cfg.CLUSTERFIT.FEATURES.LAYER_NAME
    known = layer_names(entries)
    if (len(known) < 2 and not name) or name in known or (not known and name in PLAIN_FEATURES):
        return []
    must = f"must name the layer: {', '.join(known or PLAIN_FEATURES)}"
    return [Problem("config.CLUSTERFIT.FEATURES.LAYER_NAME", repr(name), must, "Correct it, or the map of layers.")]


def predictions(cfg: RunConfig, host: Host) -> list[Problem]:
    """Heads that predict have weights."""
    settings, weights = cfg.MODEL.FEATURE_EVAL_SETTINGS, cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE
    if cfg.PROGRAM != PREDICTIONS:
        return []
    if not weights:
        must, fix = "must name weights: new heads predict nothing", "Write a run folder, a checkpoint or a file."
        return [Problem("config.MODEL.WEIGHTS_INIT.PARAMS_FILE", "''", must, fix)]
    if settings.EVAL_MODE_ON and not settings.EVAL_TRUNK_AND_HEAD:
        must, fix = "must be true: else the heads' weights are not loaded", "Write true, or EVAL_MODE_ON: false."
        return [Problem("config.MODEL.FEATURE_EVAL_SETTINGS.EVAL_TRUNK_AND_HEAD", "false", must, fix)]
    return []


RULES = (program, svm, clusters, predictions)
