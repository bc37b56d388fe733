"""The piece of a model that is gathered, resharded and recomputed at once.

A unit takes the list of all resolutions of a step, so that its parameters are gathered once a step and not once per
resolution. Sharding hangs on the unit's ``__call__``: call units, never their layers from outside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vissl_zero.models.keyed_random import resolution_scope

_thread = threading.local()


def is_recomputing() -> bool:
    """Whether the calling thread is running a forward pass again for the backward pass.

    Layers with side effects in forward (running statistics of batch norm) must leave them out the second time.
    """
    return getattr(_thread, "depth", 0) > 0


class Unit(nn.Sequential):
    """Layers applied one after another to each resolution of a list.

    Attributes:
        checkpoint: keep only the inputs in the forward pass of training and run the layers again in the backward pass.
    """

    checkpoint: bool = False

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """Apply all layers to each of the R tensors of ``xs``; their leading dimensions may differ."""
        if self.checkpoint and self.training and torch.is_grad_enabled():
            # Reentrant checkpointing of sharded modules gives wrong gradients with two forwards in one backward.
            result: list[Tensor] = checkpoint(self.each, xs, use_reentrant=False, context_fn=recomputation_contexts)
            return result
        return self.each(xs)

    def each(self, xs: list[Tensor], *others: Sequence[Any] | None) -> list[Tensor]:
        """``apply_layers`` for each resolution, and give keyed random layers its index.

        Args:
            xs: R tensors.
            others: further arguments, one per resolution each; None: None for all of them.
        """
        outputs = []
        for index, x in enumerate(xs):
            with resolution_scope(index, len(x)):
                outputs.append(self.apply_layers(x, *(other[index] if other else None for other in others)))
        return outputs

    def apply_layers(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layers on one resolution; of the unit's forward pass this is what is compiled."""
        return super().forward(x)


def recomputation_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the first run and the recomputation of a checkpointed unit are wrapped in."""
    return nullcontext(), _recomputing()


@contextmanager
def _recomputing() -> Iterator[None]:
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1
