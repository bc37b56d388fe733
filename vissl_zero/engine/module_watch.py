"""Statistics of each module in a step: the largest activation, the largest gradient, and where numbers end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vissl_zero.collectives import all_gather_objects
from vissl_zero.models.weight_names import without_wrappers


@dataclass
class Seen:
    """The values that went through one module, over all its calls.

    Attributes:
        name: full name.
        activation: largest absolute value of its outputs; NaN if one was.
        gradient: the same of the loss's gradient with respect to them; None: none came back.
    """

    name: str
    activation: float
    gradient: float | None = None

    @property
    def is_finite(self) -> bool:
        """Return whether all outputs were finite."""
        return math.isfinite(self.activation)


@dataclass
class ModuleWatch:
    """Watches modules, in the order in which they first give something: parts before what they are parts of.

    Every value is read on the host at once, so a step under watch is slow.

    Attributes:
        seen: by full name.
    """

    seen: dict[str, Seen] = field(default_factory=dict)

    @contextmanager
    def watching(self, models: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Watch models, each with what its names begin with. A context; outputs and gradients stay as they are."""
        handles = [
            module.register_forward_hook(partial(self._forward, start + without_wrappers(name)))
            for start, model in models
            for name, module in _with_one_name(model)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for value in pytree.tree_leaves(output):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            record = self.seen.setdefault(name, Seen(name, 0.0))
            record.activation = _larger(record.activation, _largest(value))
            if value.requires_grad:
                value.register_hook(partial(self._backward, record))

    @staticmethod
    def _backward(record: Seen, gradient: Tensor | None) -> None:
        if gradient is not None:  # None where the output had no part in the loss
            record.gradient = _larger(record.gradient or 0.0, _largest(gradient))

    def over_ranks(self, loss_scale: float) -> list[Seen]:
        """Join what all ranks have seen, in the order of the first pass, gradients unscaled. Collective."""
        joined: dict[str, Seen] = {}
        for seen in all_gather_objects(list(self.seen.values())):
            for record in seen:
                known = joined.setdefault(record.name, Seen(record.name, 0.0))
                known.activation = _larger(known.activation, record.activation)
                if record.gradient is not None:
                    known.gradient = _larger(known.gradient or 0.0, record.gradient / loss_scale)
        return list(joined.values())


def _with_one_name(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the parts of a model, less those at several places: what they give belongs to no one of them."""
    places = list(model.named_modules(remove_duplicate=False))
    count = Counter(id(module) for _, module in places)
    return [(name, module) for name, module in places if name and count[id(module)] == 1]


@torch.no_grad()
def _largest(values: Tensor) -> float:
    return float(values.detach().abs().max()) if values.numel() else 0.0


def _larger(left: float, right: float) -> float:
    """Return the larger number; NaN if one is, which ``max`` would lose."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)
