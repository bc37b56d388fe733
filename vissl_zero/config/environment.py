"""Mask values of environment variables in a configuration (``${oc.env:TOKEN}``), because they may be secrets.

A run's files have ``${...}`` instead of the values (``saved.py``). Output and error messages mask the values
(``errors.masked``).
"""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from vissl_zero.errors import keep_secret


def mask_environment() -> None:
    """Make OmegaConf's ``oc.env`` register each value that it returns as a secret. Idempotent."""
    OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def _env(key: str, *default: Any) -> Any:
    value = oc.env(key, *default)
    # A default stands in the recipe itself, and is no secret.
    if key in os.environ:
        keep_secret(os.environ[key], f"${{oc.env:{key}}}")
    return value
