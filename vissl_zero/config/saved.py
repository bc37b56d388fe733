"""``config.resolved.yaml``: the plan of a run on disk, for people and for the workers.

Values that came from ``${...}`` are written as they were written in the recipe, so that nothing an environment variable
holds ends up in a file people keep or share; a worker resolves them again from its own environment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vissl_zero.config.plain_tree import find
from vissl_zero.config.resolved import LarcPlan, OffloadPlan, OptimizerPlan, Precision, ResolvedRun, ShardingPlan

_HEADER = "# Every value of this run after resolution; written by vissl_zero, read by its processes.\n"
_CASTS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: text.lower() in ("true", "1", "yes", "on"),
}
_WRITTEN = "interpolations"


def save_resolved(plan: ResolvedRun, path: Path) -> None:
    """Write a plan with ``${...}`` as written, in the configuration and wherever a value was derived from it.

    Whole numbers that the run counts by (seed, batch, processes) are the exception: they stand as numbers.
    """
    path.write_text(_HEADER + yaml.safe_dump(as_data(plan), sort_keys=False, width=120))


def as_data(plan: ResolvedRun) -> dict[str, Any]:
    """A plan as plain containers with ``${...}`` as written: what may be kept and shared."""
    data = _plain(asdict(plan))
    values, data[_WRITTEN] = _put_back(data["config"], plan.interpolations)
    for block in ("run_dir", "notes", "sharding", "optimizer"):
        data[block] = _masked(data[block], values)
    return data


def _put_back(config: dict[str, Any], interpolations: dict[str, str]) -> tuple[dict[Any, str], dict[str, Any]]:
    """Put each ``${...}`` back in its place; returns value -> text, and what is needed to resolve them again."""
    values: dict[Any, str] = {}
    written: dict[str, Any] = {}
    for key, text in interpolations.items():
        place = find(config, key)
        assert place is not None, key
        holder, name = place
        value = holder[name]
        written[key] = {"text": text, "type": type(value).__name__}
        if value and isinstance(value, (str, float)):
            values[value] = text
        holder[name] = text
    return values, written


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _masked(value: Any, values: dict[Any, str]) -> Any:
    """What equals an interpolated number or contains an interpolated text, with the ``${...}`` in its place."""
    if isinstance(value, dict):
        return {key: _masked(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, values) for item in value]
    if isinstance(value, float):
        return values.get(value, value)
    if isinstance(value, str):
        for found, text in values.items():
            value = value.replace(found, text) if isinstance(found, str) else value
    return value


def load_resolved(path: Path) -> ResolvedRun:
    """Read a plan, ``${...}`` resolved from this process's environment; what cannot be resolved stays as written.

    Raises:
        OSError: the file cannot be read.
    """
    data = yaml.safe_load(path.read_text())
    written = data.pop(_WRITTEN)
    root = OmegaConf.create({"config": copy.deepcopy(data["config"])})
    for key, entry in written.items():
        place = find(data["config"], key)
        assert place is not None, key
        holder, name = place
        holder[name] = _cast(_at(root, key, holder[name]), entry["type"])
    for block in ("run_dir", "notes", "sharding", "optimizer"):
        data[block] = _unmasked(data[block], root)
    sharding, optimizer = data.pop("sharding"), data.pop("optimizer")
    sharding["precision"] = Precision(**sharding["precision"])
    for tier in ("offload_optimizer", "offload_params"):
        sharding[tier] = OffloadPlan(**sharding[tier])
    sharding["stage_checkpoints"] = tuple(tuple(stage) for stage in sharding["stage_checkpoints"])
    optimizer["larc"] = LarcPlan(**optimizer["larc"]) if optimizer["larc"] else None
    optimizer["non_regularized"] = tuple(optimizer["non_regularized"])
    data["notes"] = tuple(data["notes"])
    return ResolvedRun(
        **data,
        sharding=ShardingPlan(**sharding),
        optimizer=OptimizerPlan(**optimizer),
        interpolations={key: entry["text"] for key, entry in written.items()},
    )


def _at(root: DictConfig, key: str, text: str) -> Any:
    """The value at ``key`` of the configuration, or ``text`` if the environment does not have it."""
    try:
        value = OmegaConf.select(root, f"config.{key}")
    except OmegaConfBaseException:
        return text
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _cast(value: Any, type_name: str) -> Any:
    if isinstance(value, str) and "${" not in value and type_name in _CASTS:
        return _CASTS[type_name](value)
    return value


def _unmasked(value: Any, root: DictConfig) -> Any:
    if isinstance(value, dict):
        return {key: _unmasked(item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_unmasked(item, root) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        found = OmegaConf.create({"config": root.config, "value": value}).value
    except OmegaConfBaseException:
        return value
    # A masked number is the whole text; in a longer text ("run_dir") it stays text.
    return _number(found) if value.startswith("${") and value.endswith("}") else found


def _number(text: Any) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text
