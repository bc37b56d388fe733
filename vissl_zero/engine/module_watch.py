"""Statistics of each module in a step: the largest activation and gradient, and whether they are finite."""

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
    """The largest values of one module, over all its calls.

    Attributes:
        name: full name of the module.
        activation: largest absolute value of the outputs; NaN if any output is NaN.
        gradient: largest absolute value of the loss's gradient with respect to the outputs; None: there was none.
    """

    name: str
    activation: float
    gradient: float | None = None

    @property
    def is_finite(self) -> bool:
        """Check whether all outputs were finite."""
        return math.isfinite(self.activation)


@dataclass
class ModuleWatch:
    """Records the largest values of modules, in the order in which they first return: children before parents.

    Slow: waits for the device after every module.

    Attributes:
        seen: statistics by full name.
    """

    seen: dict[str, Seen] = field(default_factory=dict)

    @contextmanager
    def watching(self, models: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Record the modules of models in the context. ``models``: pairs of a prefix for names, and a model."""
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
        if gradient is not None:  # None: the loss does not depend on the output
            record.gradient = _larger(record.gradient or 0.0, _largest(gradient))

    def over_ranks(self, loss_scale: float) -> list[Seen]:
        """Return the statistics over all ranks, with gradients divided by ``loss_scale``. Collective."""
        joined: dict[str, Seen] = {}
        for seen in all_gather_objects(list(self.seen.values())):
            for record in seen:
                known = joined.setdefault(record.name, Seen(record.name, 0.0))
                known.activation = _larger(known.activation, record.activation)
                if record.gradient is not None:
                    known.gradient = _larger(known.gradient or 0.0, record.gradient / loss_scale)
        return list(joined.values())


def _with_one_name(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the submodules with exactly one name: values of a shared module cannot be attributed to one name."""
    places = list(model.named_modules(remove_duplicate=False))
    count = Counter(id(module) for _, module in places)
    return [(name, module) for name, module in places if name and count[id(module)] == 1]


@torch.no_grad()
def _largest(values: Tensor) -> float:
    return float(values.detach().abs().max()) if values.numel() else 0.0


def _larger(left: float, right: float) -> float:
    """Return the larger number, or NaN if either is NaN (``max`` would drop it)."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)
