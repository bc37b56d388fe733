"""The rule of DISTILLATION.CACHE_FEATURES: whether a teacher's outputs can be cached on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vissl_zero.config.blocks.data import MIXING_COLLATOR
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.registry import METHODS
from vissl_zero.resolve.components import method_of

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

_KEY = "config.DISTILLATION.CACHE_FEATURES"


def teacher_features(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the teacher is frozen, and that it sees the same views of an image again."""
    if not cfg.DISTILLATION.CACHE_FEATURES:
        return []
    loss, period, problems = cfg.LOSS.get("name"), cfg.DATA.AUGMENTATION_PERIOD, list[Problem]()
    spec = method_of(loss)
    if loss not in (spec.teacher_keys if spec else ()):
        known = [name for method in METHODS.builtin() for name in METHODS.get(method).build().teacher_keys]
        must = f"must be false: {loss} has no teacher that gives the same for the same views of an image"
        return [Problem(_KEY, "True", must, f"Write false, or one of these losses: {', '.join(known)}.")]
    if period is None:
        must = "must be false while each epoch draws new views of an image"
        fix = "Write config.DATA.AUGMENTATION_PERIOD=1 for the same views in every epoch, or 10 for ten in turn."
        problems.append(Problem(_KEY, "True", must, fix))
    elif period >= cfg.OPTIMIZER.num_epochs and not cfg.DISTILLATION.CACHE_FOLDER:
        must = f"must be below the {cfg.OPTIMIZER.num_epochs} epochs of the run, or no features are ever read"
        fix = "Lower it, or write config.DISTILLATION.CACHE_FOLDER=<folder> for runs to come."
        problems.append(Problem("config.DATA.AUGMENTATION_PERIOD", str(period), must, fix))
    if cfg.DATA.TRAIN.COLLATE_FUNCTION == MIXING_COLLATOR:
        must = "must not mix images where the teacher's features are cached: no mixture comes again"
        fix = "Write config.DATA.TRAIN.COLLATE_FUNCTION=multicrop_collator."
        problems.append(Problem("config.DATA.TRAIN.COLLATE_FUNCTION", MIXING_COLLATOR, must, fix))
    return problems
