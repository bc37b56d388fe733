"""``MODEL.AMP_PARAMS``: half precision."""

from __future__ import annotations

from dataclasses import dataclass, field

from vissl_zero.config.vissl_block import with_vissl_keys


@dataclass
class AmpArgs:
    """``MODEL.AMP_PARAMS.AMP_ARGS``."""

    opt_level: str = "O1"
    """apex's level; only O1, which is what torch.autocast does."""


@with_vissl_keys("MODEL.AMP_PARAMS")
@dataclass
class AmpParams:
    """``MODEL.AMP_PARAMS``: compute the forward pass in half precision; weights and updates stay in float32."""

    USE_AMP: bool = False
    """Switch half precision on."""
    DTYPE: str = "bfloat16"
    """bfloat16 or float16; float16 needs loss scaling (ZERO.dynamic_loss_scale)."""
    AMP_ARGS: AmpArgs = field(default_factory=AmpArgs)
    """apex's arguments."""
