"""What can go wrong with state that lives on a disk."""

from __future__ import annotations

from vissl_zero.errors import VisslZeroError


class OffloadError(VisslZeroError):
    """Offloaded state cannot be stored, or did not come back as it was stored; training must not continue with it."""
