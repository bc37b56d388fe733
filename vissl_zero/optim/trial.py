"""Trying an optimizer out: what it does with a few numbers, without touching what it trains."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

_NOT_OPTIONS = {"params", "param_names"}


def trial(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """A shallow copy that updates ``params``, with the options of the first group and no state; to call ``step`` on.

    Args:
        optimizer: left as it is.
        params: with gradients.
    """
    copied = object.__new__(type(optimizer))
    copied.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}  # a scheduler wraps step
    first = {key: copy.copy(value) for key, value in optimizer.param_groups[0].items() if key not in _NOT_OPTIONS}
    rate = first.get("lr")
    copied.param_groups = [first | {"params": list(params)} | ({} if rate is None or rate else {"lr": 1e-3})]
    copied.state = defaultdict(dict)
    return copied


def state_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Names of what the optimizer keeps for each parameter; empty for one that cannot be tried out."""
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    copied = trial(optimizer, [param])
    try:
        copied.step()
    except (TypeError, RuntimeError, ValueError, AssertionError):  # it asks for a closure, say
        return frozenset()
    return frozenset(key for key, value in copied.state[param].items() if value is not None)
