"""Large vision models trained from a YAML file, on whatever memory there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vissl_zero.imports import import_at_once
from vissl_zero.torchvision_compat import install as _let_torchvision_import
from vissl_zero.version import __version__

if TYPE_CHECKING:
    from vissl_zero.commands.from_python import Run, embed, evaluate, plan, train
    from vissl_zero.data.views import load_views
    from vissl_zero.evaluation.trunk import load_trunk
    from vissl_zero.integration.ema import ema
    from vissl_zero.integration.initialize import initialize
    from vissl_zero.integration.verification import verify

_let_torchvision_import()

__all__ = [
    "Run",
    "__version__",
    "ema",
    "embed",
    "evaluate",
    "initialize",
    "load_trunk",
    "load_views",
    "plan",
    "train",
    "verify",
]

_FROM = {
    "Run": "vissl_zero.commands.from_python",
    "ema": "vissl_zero.integration.ema",
    "embed": "vissl_zero.commands.from_python",
    "evaluate": "vissl_zero.commands.from_python",
    "initialize": "vissl_zero.integration.initialize",
    "load_trunk": "vissl_zero.evaluation.trunk",
    "load_views": "vissl_zero.data.views",
    "plan": "vissl_zero.commands.from_python",
    "train": "vissl_zero.commands.from_python",
    "verify": "vissl_zero.integration.verification",
}


def __dir__() -> list[str]:
    """Return the public names, which a notebook completes: they are not in the module before their first use."""
    return __all__


def __getattr__(name: str) -> Any:
    # Lazy: `import vissl_zero` and a config error must not pay for importing torch.
    if name not in _FROM:
        raise AttributeError(f"module 'vissl_zero' has no attribute {name!r}")
    return getattr(import_at_once(_FROM[name]), name)
