"""Which records of a file hold which elements of which shards. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vissl_zero.sharding.offload.chunks import Chunk, Segment, cut

CHUNK_ELEMENTS = 128 * 1024  # 512 KiB of float32, beside which Adam's state is 1 MiB


@dataclass(frozen=True)
class StoredParam:
    """One parameter's shard.

    Attributes:
        name: full name.
        num_elements: of this rank's rows; may be 0.
        dtype: of the master copy.
        is_trained: it has a gradient, and the optimizer updates it.
    """

    name: str
    num_elements: int
    dtype: torch.dtype
    is_trained: bool


class Layout:
    """Chunks of the shards of all units; one chunk is one record in every file of this layout.

    No chunk holds shards of two units, or of trained and frozen parameters.

    Args:
        units: shards that are fetched together.
    Attributes:
        params: all shards; a shard is known by its index here.
        index_of: by full name.
        chunks: ``Segment.tensor`` is the index of the shard.
        unit_records: of each unit, the positions of its chunks.
        records_of: of each shard, likewise.
    """

    def __init__(self, units: Sequence[Sequence[StoredParam]]):
        self.params = [param for unit in units for param in unit]
        self.index_of = {param.name: index for index, param in enumerate(self.params)}
        self.chunks: list[Chunk] = []
        self.unit_records: list[range] = []
        for unit in units:
            first = len(self.chunks)
            for is_trained in (True, False):
                self._add([self.index_of[param.name] for param in unit if param.is_trained == is_trained])
            self.unit_records.append(range(first, len(self.chunks)))
        self.records_of: list[list[int]] = [[] for _ in self.params]
        for record, chunk in enumerate(self.chunks):
            for segment in chunk.segments:
                self.records_of[segment.tensor].append(record)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each record."""
        return [chunk.num_elements * chunk.itemsize for chunk in self.chunks]

    def is_trained(self, record: int) -> bool:
        """Whether the shards in a record are."""
        return self.params[self.chunks[record].segments[0].tensor].is_trained

    def view(self, segment: Segment, data: Tensor) -> Tensor:
        """The elements of ``segment`` in its record, whose bytes ``data`` begins with."""
        param = self.params[segment.tensor]
        first = segment.offset * param.dtype.itemsize
        num_bytes = (segment.stop - segment.start) * param.dtype.itemsize
        return data[first : first + num_bytes].view(param.dtype)

    def _add(self, indices: Sequence[int]) -> None:
        params = [self.params[index] for index in indices]
        shapes = [torch.empty(param.num_elements, dtype=param.dtype, device="meta") for param in params]
        for chunk in cut(shapes, CHUNK_ELEMENTS):
            segments = tuple(replace(segment, tensor=indices[segment.tensor]) for segment in chunk.segments)
            self.chunks.append(replace(chunk, segments=segments))
