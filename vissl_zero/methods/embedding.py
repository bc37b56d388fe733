"""What methods that compare embeddings of crops have in common: crops out of rows, figures, collapse, momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.health import CollapseRule, RankCollapse, embedding_rank, embedding_sums
from vissl_zero.methods.method import Batch, Method


class EmbeddingMethod(Method):
    """Base of methods whose first head gives an embedding for each crop; call ``_note`` in ``forward``.

    Attributes:
        epoch: the present one, from 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: Tensor | None = None
        self._num_steps = 1
        self.epoch = 0

    def on_step(self, step: int, epoch: int) -> None:
        """Remember the epoch, which masks are keyed by."""
        self.epoch = epoch

    def set_length(self, num_steps: int, steps_per_epoch: int) -> None:
        """Remember the length, for schedules."""
        self._num_steps = max(num_steps, 1)

    def health_sums(self) -> Tensor:
        """``embedding_sums`` of the last micro-batch."""
        return embedding_sums(self._last) if self._last is not None else super().health_sums()

    def health(self, sums: Tensor) -> dict[str, float]:
        """``effective_rank``."""
        return {} if self._last is None else embedding_rank(sums)

    def collapse_rule(self, num_steps: int) -> CollapseRule | None:
        """All images with nearly the same embedding."""
        return RankCollapse(patience=max(500, num_steps // 4))

    def _note(self, embeddings: Tensor) -> None:
        """Rows (m, D) that the figures of this step are about."""
        self._last = embeddings.detach()

    def _cosine_momentum(self, start: float, step: int) -> float:
        """From ``start`` to 1 along half a cosine over the run (https://arxiv.org/abs/2006.07733, section 3.2)."""
        return 1 - (1 - start) * (math.cos(math.pi * step / self._num_steps) + 1) / 2

    def _linear_momentum(self, start: float, step: int) -> float:
        """From ``start`` to 1 in a straight line over the run."""
        return start + (1 - start) * min(step / self._num_steps, 1.0)


def crops_of(rows: Tensor, num_crops: int, batch: Batch) -> tuple[Tensor, ...]:
    """Rows (num_crops * B, D) crop by crop, (B, D) each.

    Raises:
        ConfigError: there are other crops than the method takes.
    """
    if len(rows) != num_crops * batch.num_local:
        must = f"must make {num_crops} crops of an image for this loss"
        raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", str(sum(batch.num_crops)), must, "Correct them.")])
    return rows.unflatten(0, (num_crops, batch.num_local)).unbind(0)


def images_of(batch: Batch, crops: Sequence[int]) -> list[Tensor]:
    """The images of some crops, as a model takes them: a tensor per resolution that has any, rows crop-major.

    Args:
        crops: in ascending order.
    """
    chosen, first = [], 0
    for images, count in zip(batch.images, batch.num_crops, strict=True):
        own = [crop - first for crop in crops if first <= crop < first + count]
        if own:
            chosen.append(images.unflatten(0, (count, batch.num_local))[own].flatten(0, 1))
        first += count
    return chosen


def output_of(outputs: list[Any], name: str) -> Any:
    """The first head's output, which must have a field ``name``.

    Raises:
        ConfigError: it has none.
    """
    if not hasattr(outputs[0], name):
        must = f"needs a first head that gives {name}"
        fix = "vissl-zero list heads has them; docs/methods.md says which method takes which."
        raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", type(outputs[0]).__name__, must, fix)])
    return outputs[0]
