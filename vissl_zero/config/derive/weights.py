"""``MODEL.TRUNK.NAME: auto``: the trunk of the run that the weights to begin with are of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from vissl_zero.config.blocks.model import RegNetBlock
from vissl_zero.config.components.trunks import ResNetConfig
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import ConfigError, Problem

AUTO = "auto"
_KEY = "config.MODEL.TRUNK.NAME"
_STEP = re.compile(r"step_\d{9,}")


def with_trunk_of_weights(cfg: RunConfig) -> RunConfig:
    """``cfg``, or a copy with the trunk filled in where it says auto.

    What the saved configuration says is taken as data: nothing in it is imported or resolved.

    Raises:
        ConfigError: there are no weights, or the run they are of is not known.
    """
    if cfg.MODEL.TRUNK.NAME != AUTO:
        return cfg
    path = cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE
    if not path:
        fix = "Write config.MODEL.WEIGHTS_INIT.PARAMS_FILE=<run folder>, or a trunk: regnet or resnet, and its keys."
        raise ConfigError([Problem(_KEY, AUTO, "needs weights to begin with", fix)])
    if problem := missing_weights(path):
        raise ConfigError([problem])
    saved = _saved_trunk(Path(path).expanduser())
    if saved is None:
        fix = "Write the trunk, regnet or resnet, and its keys."
        raise ConfigError([Problem(_KEY, AUTO, f"needs a run folder or a checkpoint of one, which {path} is not", fix)])
    own, filled = cfg.MODEL.TRUNK, dict[str, Any](NAME=str(saved.get("NAME", "")))
    if isinstance(given := saved.get("REGNET"), Mapping):
        filled["REGNET"] = replace(own.REGNET, **_known(given, RegNetBlock))
    if isinstance(given := saved.get("RESNETS"), Mapping):
        filled["RESNETS"] = replace(own.RESNETS, **_known(given, ResNetConfig))
    if isinstance(saved.get("PARAMS"), Mapping):
        filled["PARAMS"] = dict(saved["PARAMS"])
    return replace(cfg, MODEL=replace(cfg.MODEL, TRUNK=replace(own, **filled)))


def missing_weights(path: str) -> Problem | None:
    """A problem if PARAMS_FILE names what does not exist."""
    if not path or Path(path).expanduser().exists():
        return None
    must = "must name a run folder, a checkpoint or a file of weights that exists"
    return Problem("config.MODEL.WEIGHTS_INIT.PARAMS_FILE", repr(path), must, "Correct the path.")


def _known(given: Mapping[Any, Any], block: type[RegNetBlock] | type[ResNetConfig]) -> dict[str, Any]:
    names = {field.name for field in fields(block)}
    return {str(key): value for key, value in given.items() if key in names}


def _saved_trunk(path: Path) -> Mapping[str, Any] | None:
    """MODEL.TRUNK of the run at ``path``: a run folder, one of its checkpoints, or a file in it."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, *sorted(folder.glob("checkpoints/step_*"), reverse=True)):
        for name, read in (("manifest.json", _manifest), ("config.resolved.yaml", yaml.safe_load)):
            file = place / name
            if not file.is_file() or (name == "manifest.json" and not _STEP.fullmatch(place.name)):
                continue
            try:
                trunk = read(file.read_text())["config"]["MODEL"]["TRUNK"]
            except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(trunk, Mapping):
                return trunk
    return None


def _manifest(text: str) -> Any:
    return json.loads(text)["body"]["config"]
