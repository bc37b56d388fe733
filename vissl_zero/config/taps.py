"""``LINEAR_EVAL_FEAT_POOL_OPS_MAP``: which layers the heads of a linear evaluation see; its form, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem, did_you_mean

KEY = "config.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP"
# torch's classes, by VISSL's names, which are torch's.
POOLINGS = ("AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool2d", "MaxPool2d", "Identity")


def are_tapped(cfg: RunConfig) -> bool:
    """Whether heads see inner layers. As in VISSL, the map counts where the trunk is frozen in evaluation mode."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    is_frozen = settings.EVAL_MODE_ON and settings.FREEZE_TRUNK_ONLY and not settings.EXTRACT_TRUNK_FEATURES_ONLY
    return bool(settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP) and is_frozen


def features_are_tapped(cfg: RunConfig) -> bool:
    """Whether kNN and extraction look at inner layers in place of the trunk's features."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    is_extracted = settings.EVAL_MODE_ON and settings.EXTRACT_TRUNK_FEATURES_ONLY
    return bool(settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP) and is_extracted


def layer_names(entries: Sequence[Any]) -> list[str]:
    """What the accuracy of each entry is called: the layer, and the pooling where a layer stands there twice."""
    layers = [str(name) for name, _ in entries]
    return [
        layer if layers.count(layer) == 1 else f"{layer} {pooling}{list(args)}"
        for layer, (_, (pooling, args)) in zip(layers, entries, strict=True)
    ]


def problems(cfg: RunConfig) -> list[Problem]:
    """Entries that are no [layer, [pooling, [arguments]]], and a map that is not as long as the heads."""
    if not (are_tapped(cfg) or features_are_tapped(cfg)):
        return []
    entries, found = cfg.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP, []
    for entry in entries:
        if not _is_entry(entry):
            fix = 'Write ["res5", ["AdaptiveAvgPool2d", [[2, 2]]]], or ["res5avg", ["Identity", []]].'
            found.append(Problem(KEY, str(entry), "must list [layer, [pooling, [arguments]]]", fix))
        elif entry[1][0] not in POOLINGS:
            fix = did_you_mean(entry[1][0], POOLINGS).strip() or "Choose one of them."
            found.append(Problem(KEY, repr(entry[1][0]), f"must name a pooling: {', '.join(POOLINGS)}", fix))
    heads = len(cfg.MODEL.HEAD.PARAMS)
    if heads != len(entries) and are_tapped(cfg):
        must = f"must list a head for each of the {len(entries)} layers of {KEY}"
        found.append(Problem("config.MODEL.HEAD.PARAMS", f"{heads} heads", must, "Give the lists the same length."))
    return found


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[0], str):
        return False
    pooling = entry[1]
    is_pair = isinstance(pooling, (list, tuple)) and len(pooling) == 2
    return is_pair and isinstance(pooling[0], str) and isinstance(pooling[1], (list, tuple))
