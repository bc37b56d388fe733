"""Gradients on a disk: backward passes add to them, and what clipping changes is carried out when they are read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vissl_zero.sharding.offload.block_file import BlockFile
from vissl_zero.sharding.offload.layout import Layout, TensorFile
from vissl_zero.sharding.offload.record_pipeline import RecordPipeline


class GradientStore:
    """One gradient per trained shard, or none.

    Changes (unscaling, clipping, adaptation) are noted and carried out on what is read, so that they cost no pass over
    the file; element by element they are what they would be on the whole.

    Args:
        layout, file, pipeline: as for ``TensorFile``.
    """

    def __init__(self, layout: Layout, file: BlockFile, pipeline: RecordPipeline):
        self.records = file
        self._layout = layout
        self._file = TensorFile(layout, file, pipeline)
        self._stored: set[int] = set()
        self._zero: set[int] = set()
        self._changes: dict[int, list[tuple[Tensor | float, Tensor | None]]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._stored or index in self._zero

    def add(self, grads: Mapping[int, Tensor]) -> None:
        """Add what a backward pass has given; flat tensors by index."""

        def is_read(record: int) -> bool:
            # A record without stored gradients is overwritten; what that leaves for other shards is not marked as
            # stored, and so never read.
            return any(segment.tensor in self._stored for segment in self._layout.chunks[record].segments)

        def combine(index: int, stored: Tensor, new: Tensor) -> None:
            if index in self._stored:
                stored.add_(new)
            else:
                stored.copy_(new)

        self._file.write(grads, is_read, combine)
        self._stored |= grads.keys()

    def read(self, index: int, values: Tensor | None = None) -> Tensor:
        """One gradient, flat, as the changes made so far have it.

        Args:
            index: of a shard that has one.
            values: its parameters, where a change needs them.
        """
        grad = self._file.read(index)
        self.apply_changes(index, grad, values)
        return grad

    def needs_values(self, index: int) -> bool:
        """Whether a noted change adds parameters to the gradient."""
        return any(param_factor is not None for _, param_factor in self._changes.get(index, ()))

    def set_zero(self, index: int) -> None:
        """The gradient is zero, without storing it."""
        self._zero.add(index)

    def change(self, index: int, factor: Tensor | float, param_factor: Tensor | None = None) -> None:
        """From now on the gradient is ``factor * grad + param_factor * param``."""
        self._changes.setdefault(index, []).append((factor, param_factor))

    def apply_changes(self, index: int, grad: Tensor, values: Tensor | None) -> None:
        """Carry them out on some elements of a gradient as it was stored, in place."""
        if index in self._zero:
            grad.zero_()
        for factor, param_factor in self._changes.get(index, ()):
            grad.mul_(factor)
            if param_factor is not None:
                assert values is not None
                grad.addcmul_(values, param_factor)

    def forget(self, index: int) -> None:
        """There is none any more."""
        self._stored.discard(index)
        self._zero.discard(index)
        self._changes.pop(index, None)
