"""``LOSS``: a name and, under that name, the loss's keys. A plain dict, so that a loss of your own needs no leave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vissl_zero.config.components.losses import CrossEntropyConfig, SwAVLossConfig, SwAVQueueConfig
from vissl_zero.config.vissl_block import with_vissl_keys

_PATH = "LOSS.cross_entropy_multiple_output_single_target"


@with_vissl_keys("LOSS.swav_loss.queue")
@dataclass
class SwAVQueueBlock(SwAVQueueConfig):
    """``LOSS.swav_loss.queue`` with VISSL's other keys."""


@with_vissl_keys("LOSS.swav_loss")
@dataclass
class SwAVLossBlock(SwAVLossConfig):
    """``LOSS.swav_loss`` with VISSL's other keys."""

    queue: SwAVQueueBlock = field(default_factory=SwAVQueueBlock)
    """Past embeddings in the assignment."""


@with_vissl_keys(_PATH)
@dataclass
class CrossEntropyBlock(CrossEntropyConfig):
    """Cross-entropy with VISSL's other keys."""


def default_loss() -> dict[str, Any]:
    """The built-in losses with their defaults; typed nodes, so a wrong key or type is refused where it stands."""
    return {
        "name": "CrossEntropyLoss",
        "CrossEntropyLoss": CrossEntropyBlock(),
        "cross_entropy_multiple_output_single_target": CrossEntropyBlock(),
        "swav_loss": SwAVLossBlock(),
    }
