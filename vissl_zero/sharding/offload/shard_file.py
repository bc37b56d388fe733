"""One tensor per shard, values or gradients, in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vissl_zero.sharding.offload.block_file import BlockFile
from vissl_zero.sharding.offload.layout import Layout, Segment
from vissl_zero.sharding.offload.pipeline import Cell, Pipeline, Tray


class ShardFile:
    """Flat tensors by index of the shard.

    Args:
        layout: of the file.
        file: with a record per chunk of the layout.
        pipeline: of one column, wide enough for any record.
    """

    def __init__(self, layout: Layout, file: BlockFile, pipeline: Pipeline):
        self.records = file
        self._layout = layout
        self._pipeline = pipeline

    def read(self, index: int) -> Tensor:
        """One shard, flat."""
        param = self._layout.params[index]
        found = torch.empty(param.num_elements, dtype=param.dtype)
        records = self._layout.records_of[index]

        def copy(position: int, tray: Tray) -> tuple[int, ...]:
            for segment in self._layout.chunks[records[position]].segments:
                if segment.tensor == index:
                    found[segment.start : segment.stop] = self._layout.view(segment, tray[0].bytes)
            return ()

        self._pipeline.run([[Cell(self.records, record)] for record in records], copy)
        return found

    def write(
        self,
        values: Mapping[int, Tensor],
        is_read: Callable[[int], bool],
        combine: Callable[[int, Tensor, Tensor], object],
    ) -> None:
        """Change some shards.

        Args:
            values: flat tensors by index.
            is_read: whether a record holds anything that must be kept.
            combine: called with the index, and the stored and the given elements, of which it changes the first.
        """
        records = sorted({record for index in values for record in self._layout.records_of[index]})

        def update(position: int, tray: Tray) -> tuple[int, ...]:
            for segment in self._segments(records[position], values):
                stored = self._layout.view(segment, tray[0].bytes)
                combine(segment.tensor, stored, values[segment.tensor][segment.start : segment.stop])
            return (0,)

        self._pipeline.run([[Cell(self.records, record, is_read(record))] for record in records], update)

    def _segments(self, record: int, values: Mapping[int, Tensor]) -> list[Segment]:
        return [segment for segment in self._layout.chunks[record].segments if segment.tensor in values]
