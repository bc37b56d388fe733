"""A component's own keys, checked against the dataclass it was registered with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vissl_zero.config.components import builtin_keys
from vissl_zero.config.constraints import constraint_problems
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.registry import Component, Registry


def component_keys(registry: Registry, name: str) -> type | None:
    """Dataclass of a registered component's keys; of a built-in one without importing torch."""
    return builtin_keys(registry.kind).get(name) or registry.get(name).config


def typed_options(component: Component | type | None, given: Mapping[str, Any], key_path: str) -> dict[str, Any]:
    """All keys of a component: ``given`` over the defaults, with the types of its dataclass.

    Args:
        component: registered component, or the dataclass itself; None where the component takes no keys.
        given: what the recipe says.
        key_path: where that stands, such as ``config.MODEL.TRUNK.PARAMS``, for messages.
    Raises:
        ConfigError: every unknown key, every value of a wrong type and every missing key.
    """
    schema = component.config if isinstance(component, Component) else component
    if schema is None:
        if given:
            fix = "Register the component with config=<a dataclass of its keys>."
            raise ConfigError(
                [Problem(key_path, str(dict(given)), "must be empty: this component declares no keys", fix)]
            )
        return {}
    node, problems = OmegaConf.structured(schema), []
    names = [f.name for f in fields(schema)]
    for name, value in given.items():
        if name not in names:
            fix = did_you_mean(str(name), names).strip() or f"Known: {', '.join(names)}."
            problems.append(Problem(f"{key_path}.{name}", "", "is not a key", fix))
            continue
        try:
            node.merge_with({name: copy.deepcopy(value)})
        except OmegaConfBaseException as error:
            problems.append(_explained(error, key_path, node))
    for name in OmegaConf.missing_keys(node):
        if not any(problem.key == f"{key_path}.{name}" for problem in problems):
            problems.append(Problem(f"{key_path}.{name}", "", "must be given", "Add it to the recipe."))
    if problems:
        raise ConfigError(problems)
    return _plain(node, key_path)


def _plain(node: Any, key_path: str) -> dict[str, Any]:
    assert isinstance(node, DictConfig)
    try:
        typed = OmegaConf.to_object(node)  # runs __post_init__, where a dataclass checks its own ranges
        if problems := list(constraint_problems(typed, key_path)):
            raise ConfigError(problems)
    except OmegaConfBaseException as error:
        raise ConfigError([_explained(error, key_path)]) from error
    except ValueError as error:
        raise ConfigError([Problem(key_path, "", str(error).rstrip("."), "Correct the value.")]) from error
    return {str(name): value for name, value in OmegaConf.to_container(node, resolve=True).items()}  # type: ignore[union-attr]


def _explained(error: OmegaConfBaseException, key_path: str, node: Any = None) -> Problem:
    from vissl_zero.config.compose import (
        explain_value,  # imports Hydra and the whole tree, for which every rank waits
    )

    return explain_value(error, f"{key_path}.", node)
