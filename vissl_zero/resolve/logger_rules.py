"""The loggers of a run, and the packages that they need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from vissl_zero.config.blocks.output import Hooks
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.registry import LOGGERS

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

KEY = "config.HOOKS.LOGGERS"
# Logger -> packages that its extra of setup.py installs, under the names that are imported.
PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}


def logger_names(hooks: Hooks) -> list[str]:
    """Return the loggers of a run, each once: LOGGERS, without tensorboard where VISSL's switch is off.

    Args:
        hooks: the block ``HOOKS``.
    """
    uses_events = hooks.TENSORBOARD_SETUP.USE_TENSORBOARD
    return [name for name in dict.fromkeys(hooks.LOGGERS) if name != "tensorboard" or uses_events]


def loggers(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that every logger is known, and its package is installed."""
    problems = []
    for name in dict.fromkeys(cfg.HOOKS.LOGGERS):
        if name not in LOGGERS:
            problems.append(LOGGERS.unknown(name))
        elif missing := [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]:
            must = f"needs the package {' and '.join(missing)}, which is not installed"
            problems.append(Problem(KEY, name, must, f"Run pip install 'vissl-zero[{name}]', or leave {name} out."))
    return problems


LOGGER_RULES = (loggers,)
