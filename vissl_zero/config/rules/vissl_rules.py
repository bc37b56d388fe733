"""VISSL's keys that we do not use: refused where they would change the result, noted where they do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vissl_zero.config.blocks.machine import Slurm
from vissl_zero.config.blocks.output import METERS
from vissl_zero.config.host import Host
from vissl_zero.config.run_config import RunConfig
from vissl_zero.config.vissl import OTHER_LOSSES, VisslKey, vissl_keys
from vissl_zero.errors import Problem


def refused(cfg: RunConfig, host: Host) -> list[Problem]:
    """Keys whose value would change what is trained."""
    return [_problem(key, value) for key, value in _set_keys(cfg) if key.is_refused]


def meters(cfg: RunConfig, host: Host) -> list[Problem]:
    """Figures on TEST that are measured here."""
    names = [cfg.METERS.name, *cfg.METERS.names] if cfg.METERS.name else cfg.METERS.names
    must = f"must be {' or '.join(METERS)}: each image has one class here"
    fix = "Leave it out. For several classes an image, train SVMs (train_svm), which measure average precision."
    return [Problem("config.METERS.names", str(name), must, fix) for name in names if name not in METERS]


def no_effect(cfg: RunConfig) -> list[str]:
    """Keys that were set and do nothing here, as one sentence (or none)."""
    keys = [key.path for key, _ in _set_keys(cfg) if not key.is_refused]
    keys += [f"LOSS.{name}" for name in cfg.LOSS if name in OTHER_LOSSES]
    if not cfg.SLURM.USE_SLURM and Slurm() != cfg.SLURM:
        keys.append("SLURM (USE_SLURM is off)")
    for split in ("TRAIN", "TEST"):
        block = getattr(cfg.DATA, split)
        if block.DATA_PATHS and block.DATA_SOURCES in (["digits"], ["synthetic"]):
            keys.append(f"DATA.{split}.DATA_PATHS")
    return [f"Keys without effect here: {', '.join(keys)}."] if keys else []


def _problem(key: VisslKey, value: Any) -> Problem:
    allowed = " or ".join(str(allowed) for allowed in key.allowed)
    must = f"must be {allowed}: nothing else is implemented"
    return Problem(f"config.{key.path}", str(value), must, f"{key.why} Leave the key out.")


def _set_keys(cfg: RunConfig) -> list[tuple[VisslKey, Any]]:
    """Keys of the tables whose value is not one that changes nothing."""
    found = []
    for key in vissl_keys():
        value = _value(cfg, key.path)
        if value is not _MISSING and value not in key.allowed:
            found.append((key, value))
    return found


_MISSING = object()  # of a block that was deleted, or is no block


def _value(node: Any, path: str) -> Any:
    for part in path.split("."):
        node = node.get(part, _MISSING) if isinstance(node, Mapping) else getattr(node, part, _MISSING)
    return node


RULES = (refused, meters)
