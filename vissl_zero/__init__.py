"""Large vision models trained from a YAML file, on whatever memory there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vissl_zero.torchvision_compat import install as _let_torchvision_import
from vissl_zero.version import __version__

if TYPE_CHECKING:
    from vissl_zero.evaluation.trunk import load_trunk
    from vissl_zero.integration.ema import ema
    from vissl_zero.integration.initialize import initialize
    from vissl_zero.integration.verification import verify

_let_torchvision_import()

__all__ = ["__version__", "ema", "initialize", "load_trunk", "verify"]


def __getattr__(name: str) -> Any:
    # Lazy: `import vissl_zero` and a config error must not pay for importing torch.
    if name == "load_trunk":
        from vissl_zero.evaluation.trunk import load_trunk

        return load_trunk
    if name == "ema":
        from vissl_zero.integration.ema import ema

        return ema
    if name == "initialize":
        from vissl_zero.integration.initialize import initialize

        return initialize
    if name == "verify":
        from vissl_zero.integration.verification import verify

        return verify
    raise AttributeError(f"module 'vissl_zero' has no attribute {name!r}")
