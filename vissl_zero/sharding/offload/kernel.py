"""The base optimizer, run on a few elements at a time, with their state passed in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.optim.elementwise import SINGLE_ROUNDING

STREAMABLE = (*SINGLE_ROUNDING.keys(), *SINGLE_ROUNDING.values())


class Kernel:
    """Runs one update of a torch optimizer on pieces of tensors whose state comes from elsewhere.

    Args:
        optimizer: built over proxies of one element per group; its group dicts are kept, so that learning rates set in
            them take effect.
        key: what asks for streaming, to name it in errors.
    Attributes:
        keys: names of the state that has one value per element.
        scalars: further state, one number per tensor, with its value before the first step.
        is_eager: the optimizer makes state for all parameters at once, not when each is first updated.
    Raises:
        ConfigError: its state cannot be cut.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, key: str = "offload_optimizer_config.device"):
        _require_streamable(optimizer, key)
        self.optimizer = optimizer
        self.is_eager = any(optimizer.state.values())
        state = self._probe()
        self.keys = tuple(key for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0)
        self.scalars: dict[str, Any] = {
            key: torch.zeros_like(value) for key, value in state.items() if key not in self.keys and value is not None
        }
        # The trial step has left state of the proxies.
        optimizer.state = defaultdict(dict)

    def _probe(self) -> Mapping[str, Any]:
        """The state one step makes for one element; the same for all, they have one class and its options."""
        proxies = [param for group in self.optimizer.param_groups for param in group["params"]]
        for proxy in proxies:
            proxy.grad = torch.zeros_like(proxy)
        self.optimizer.step()
        return dict(self.optimizer.state.get(proxies[0], {}))

    @torch.no_grad()
    def update(self, pieces: Sequence[Piece]) -> None:
        """One step on ``pieces``; parameters and per-element state change in place, scalars in ``Piece.state``."""
        # Schedules set rates in these very dicts, so the groups are borrowed for the step and not made anew.
        groups = self.optimizer.param_groups
        held = [group["params"] for group in groups]
        chosen: list[list[nn.Parameter]] = [[] for _ in groups]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for piece in pieces:
            # A parameter over the same memory: what the step writes arrives in the buffer.
            param = nn.Parameter(piece.values)
            param.grad = piece.grad
            state[param] = piece.state
            chosen[piece.group].append(param)
        self.optimizer.state = state
        try:
            for group, params in zip(groups, chosen, strict=True):
                group["params"] = params
            self.optimizer.step()
        finally:
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            self.optimizer.state = defaultdict(dict)


class Piece:
    """Elements to update: views, all of one length.

    Attributes:
        group: position of the parameter group.
        values, grad: (n,) elements and their gradient.
        state: the optimizer's: (n,) views by key, and a copy of the tensor's scalars.
    """

    def __init__(self, group: int, values: Tensor, grad: Tensor, state: dict[str, Any]):
        self.group, self.values, self.grad, self.state = group, values, grad, state


def _require_streamable(optimizer: torch.optim.Optimizer, key: str) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in STREAMABLE:
        must = "can be nvme only with SGD, LARC, LARS, Adam or AdamW, which are updated piece by piece"
        fix = "Use one of them, or write device: cpu."
        raise ConfigError([Problem(key, name, must, fix)])
    if any(group.get("dampening") for group in optimizer.param_groups):
        must = "with nvme needs SGD without dampening: its first step differs from the others"
        fix = "Write dampening=0, or device: cpu."
        raise ConfigError([Problem(key, "nvme", must, fix)])
