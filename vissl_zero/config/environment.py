"""Values of environment variables in a configuration, which may be secrets: ``${oc.env:TOKEN}``.

Files of a run keep them as written (``saved.py``). What is printed and every error text mask them (``errors.masked``).
"""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from vissl_zero.errors import keep_secret


def mask_environment() -> None:
    """Make OmegaConf's ``oc.env`` note each value that it gives. Repeating it does nothing."""
    OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def _env(key: str, *default: Any) -> Any:
    value = oc.env(key, *default)
    if key in os.environ:
        keep_secret(os.environ[key], f"${{oc.env:{key}}}")
    return value
