"""Number formats: what parameters, forward pass and outputs are in, and dynamic loss scaling for float16.

The training loop has no case for any of it: it gives images in the master precision and gets float32 (or float64) back.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.resolved import Precision


@dataclass
class LossScale:
    """The factor the loss is multiplied by. Halves after a step with an inf or NaN, doubles after many without.

    The rule and its constants are those of https://arxiv.org/abs/1710.03740 and of torch.amp.GradScaler. Equal on all
    ranks as long as every rank is given the same outcome of every step.

    Attributes:
        scale: the factor now.
        growth_interval: steps without inf after which it doubles.
        good_steps: steps without inf since it last changed.
    """

    # A power of two, so that scaling and unscaling change no digit of a gradient.
    scale: float = 65536.0
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, found_inf: bool) -> None:
        """Adapt the scale to what the last step, done or skipped, found in the gradients."""
        if found_inf:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """For checkpoints."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what ``state_dict`` gave."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name such as ``"bfloat16"``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def run_in_precision(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Make ``model.forward`` enter autocast, where asked for, and give its outputs in float32 at least. In place.

    The method is replaced rather than the model wrapped, so that names carry no prefix and hooks stay outside. Where
    nothing is computed in half precision the model is left as it is.
    """
    if precision.autocast is None and precision.compute == precision.master:
        return
    given = model.__dict__.get("forward")

    def in_precision(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(self).forward, self) if given is None else given
        if precision.autocast is None:
            return widened(forward(*args, **kwargs))
        with torch.autocast(device.type, dtype_of(precision.autocast)):
            outputs = forward(*args, **kwargs)
        return widened(outputs)

    # A bound method: a deep copy of the model gets one that is bound to the copy.
    model.forward = MethodType(in_precision, model)


def widened(outputs: Any) -> Any:
    """``outputs`` with half-precision tensors in float32, in any nesting of tuples, lists, dicts and dataclasses."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    if isinstance(outputs, MutableMapping):
        changed = copy.copy(outputs)  # subclasses have constructors of their own
        for key, value in outputs.items():
            changed[key] = widened(value)
        return changed
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(widened, outputs))
    if isinstance(outputs, tuple | list):
        return type(outputs)(map(widened, outputs))
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return replace(outputs, **{f.name: widened(getattr(outputs, f.name)) for f in fields(outputs) if f.init})
    return outputs
