"""``hydra/launcher=local``, imported as ``hydra_plugins.vissl_zero_local``: the package of launchers for Hydra."""

from __future__ import annotations

from vissl_zero.launch.sweep import SideBySide as _SideBySide


class SideBySide(_SideBySide):
    """Run the jobs of a sweep side by side on this machine."""
