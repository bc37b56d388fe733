"""Keys of a user's own source or transform, checked against the dataclass it was registered with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vissl_zero.errors import ConfigError, Problem


def typed_options(config: type, given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """``given`` over the defaults of the dataclass ``config``, as plain values.

    Args:
        key: where ``given`` stands in the configuration, for messages.
    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a value that is missing.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), dict(given))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        known = ", ".join(field.name for field in fields(config))
        problem = Problem(key, str(dict(given)), str(error).split("\n", 1)[0], f"Known keys: {known}.")
        raise ConfigError([problem]) from error
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}
