"""The resolved MODEL and LOSS blocks: every key of the chosen trunk, heads and loss, typed and filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from vissl_zero.config.components import builtin_keys
from vissl_zero.config.components.trunks import FURTHER_BLOCKS, TRUNK_BLOCKS, trunk_component, trunk_params
from vissl_zero.config.options import component_keys, typed_options
from vissl_zero.config.run import RunConfig
from vissl_zero.registry import HEADS, LOSSES, METHODS, TRUNKS


def trunk_options(cfg: RunConfig) -> dict[str, Any]:
    """All keys of the chosen trunk. Raises ConfigError for keys of a user's trunk that it does not have."""
    trunk = cfg.MODEL.TRUNK
    if trunk.NAME in TRUNK_BLOCKS:
        given = asdict(getattr(trunk, FURTHER_BLOCKS[trunk.NAME])) if trunk.NAME in FURTHER_BLOCKS else {}
        given |= asdict(getattr(trunk, TRUNK_BLOCKS[trunk.NAME]))
        return _only_fields(given, builtin_keys("trunk")[trunk.NAME])
    keys = component_keys(TRUNKS, trunk_component(trunk.NAME))
    return typed_options(keys, trunk_params(trunk.NAME, trunk.PARAMS), "config.MODEL.TRUNK.PARAMS")


def takes_other_model(cfg: RunConfig) -> bool:
    """Whether the loss learns from the model under DISTILLATION."""
    method = method_of(cfg.LOSS["name"])
    return method is not None and bool(method.takes_other_model(cfg))


def as_teacher(cfg: RunConfig) -> RunConfig:
    """A configuration whose MODEL is the teacher under DISTILLATION, for rules and for its resolved keys."""
    given = cfg.DISTILLATION.TEACHER_MODEL
    model = type(cfg.MODEL)(TRUNK=given.TRUNK, HEAD=given.HEAD, INPUT_TYPE=given.INPUT_TYPE)
    model.WEIGHTS_INIT = given.WEIGHTS_INIT
    return replace(cfg, MODEL=model)


def head_options(cfg: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """Name and all keys of each head. Raises ConfigError for wrong keys."""
    heads = []
    for name, options in cfg.MODEL.HEAD.PARAMS:
        heads.append(
            (name, typed_options(component_keys(HEADS, name), options or {}, f"config.MODEL.HEAD.PARAMS.{name}"))
        )
    return heads


def loss_options(cfg: RunConfig) -> dict[str, Any]:
    """All keys of the chosen loss; those that other blocks decide filled in. Raises ConfigError for wrong keys."""
    name = cfg.LOSS["name"]
    block: Any = cfg.LOSS.get(name) or {}
    schema = component_keys(LOSSES, name)
    given = _only_fields(asdict(block), schema) if is_dataclass(block) and not isinstance(block, type) else block
    options = typed_options(schema, given, f"config.LOSS.{name}")
    inferred = _inferred(cfg).items()
    return options | {key: value for key, (value, _) in inferred if value is not None}


def inferred_notes(cfg: RunConfig) -> list[str]:
    """Notes where the loss's keys say something else than the blocks they are taken from."""
    name, notes = cfg.LOSS["name"], []
    for key, (value, origin) in _inferred(cfg).items():
        said = getattr(cfg.LOSS[name], key)
        if said is not None and value is not None and said != value:
            notes.append(f"config.LOSS.{name}.{key}: {value} is used, taken from the {origin}, not {said}.")
    return notes


def method_of(loss: Any) -> Any:
    """The ``MethodSpec`` that a built-in loss belongs to; None for a loss of your own."""
    specs = (METHODS.get(name).build() for name in METHODS)
    return next((spec for spec in specs if loss in spec.losses), None)


def _inferred(cfg: RunConfig) -> dict[str, tuple[Any, str]]:
    method = method_of(cfg.LOSS["name"])
    return method.inferred(cfg) if method else {}


def _only_fields(given: Mapping[str, Any], schema: type | None) -> dict[str, Any]:
    """What of a block belongs to the component: blocks also hold VISSL's other keys."""
    assert schema is not None
    kept: dict[str, Any] = {}
    for item in fields(schema):
        value = given[item.name]
        default = item.default_factory() if callable(item.default_factory) else None
        is_block = is_dataclass(default) and isinstance(value, Mapping)
        kept[item.name] = _only_fields(value, type(default)) if is_block else value
    return kept
