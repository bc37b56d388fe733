"""Partition of the elements of many shards into chunks, and of chunks into records of a file. Pure.

``TensorFile`` keeps one tensor per shard, values or gradients, in such a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vissl_zero.sharding.offload.block_file import BlockFile, Cell, RecordPipeline, Tray

# A cut inside a tensor falls on a multiple of this many elements, so that the kernels' vector loops, and with them the
# last bit of every result, are what they are without a cut.
ALIGN = 1024


@dataclass(frozen=True)
class ChunkSegment:
    """Consecutive elements of one shard.

    Attributes:
        tensor: position of the shard in the list that was cut.
        start, stop: elements, in the shard's flat order.
        offset: offset of the first of them in the chunk.
    """

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Segments of one dtype that are updated together.

    Attributes:
        segments: segments in the order of the shards, at most one of each.
        num_elements: number of elements of all of them.
        itemsize: bytes per element.
    """

    segments: tuple[ChunkSegment, ...]
    num_elements: int
    itemsize: int


def cut(tensors: Sequence[Tensor], chunk_elements: int) -> list[Chunk]:
    """Cut ``tensors`` into chunks of at most ``chunk_elements`` that cover every element once, in order.

    Args:
        tensors: shards of any shapes; empty ones take part in no chunk.
        chunk_elements: a multiple of ``ALIGN``.
    """
    assert chunk_elements % ALIGN == 0
    chunks: list[Chunk] = []
    segments: list[ChunkSegment] = []
    filled, itemsize = 0, 0

    def close() -> None:
        nonlocal segments, filled
        if segments:
            chunks.append(Chunk(tuple(segments), filled, itemsize))
        segments, filled = [], 0

    for index, tensor in enumerate(tensors):
        # One itemsize per chunk: it determines where each key begins in a record.
        if tensor.element_size() != itemsize:
            close()
            itemsize = tensor.element_size()
        start = 0
        while start < tensor.numel():
            room = chunk_elements - filled
            if tensor.numel() - start > room:
                # A cut inside this tensor; its end may be anywhere.
                room = room // ALIGN * ALIGN
            if room == 0:
                close()
                continue
            stop = min(start + room, tensor.numel())
            segments.append(ChunkSegment(index, start, stop, filled))
            filled += stop - start
            start = stop
    close()
    return chunks


def kept_in_memory(sizes: Iterable[int], most: int) -> Iterator[bool]:
    """Yield for each shard whether it stays in memory: in order, those that still fit into ``most`` elements.

    Args:
        sizes: elements of each shard, in the order of the units.
        most: elements that ``max_in_cpu`` allows.
    """
    for size in sizes:
        keeps = size <= most
        most -= size * keeps
        yield keeps


CHUNK_ELEMENTS = 128 * 1024  # 512 KiB of float32; Adam's state of them is 1 MiB


@dataclass(frozen=True)
class StoredParam:
    """One parameter's shard.

    Attributes:
        name: full name.
        num_elements: number of elements of this rank's rows; may be 0.
        dtype: data type of the master copy.
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
        params: all shards; a shard is identified by its index here.
        index_of: index of each parameter, by full name.
        chunks: ``ChunkSegment.tensor`` is the index of the shard.
        unit_records: positions of the chunks of each unit.
        records_of: the records of each shard.
    """

    def __init__(self, units: Sequence[Sequence[StoredParam]]):
        self.params = [param for unit in units for param in unit]
        self.index_of = {param.name: index for index, param in enumerate(self.params)}
        self.chunks: list[Chunk] = []
        self.unit_records: list[range] = []
        for unit in units:
            first = len(self.chunks)
            # Apart, since frozen parameters have no gradients to store and are never updated.
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
        """Check whether the shards in a record are trained."""
        return self.params[self.chunks[record].segments[0].tensor].is_trained

    def view(self, segment: ChunkSegment, data: Tensor) -> Tensor:
        """View the elements of ``segment`` in its record, whose bytes ``data`` begins with."""
        param = self.params[segment.tensor]
        first = segment.offset * param.dtype.itemsize
        num_bytes = (segment.stop - segment.start) * param.dtype.itemsize
        return data[first : first + num_bytes].view(param.dtype)

    def _add(self, indices: Sequence[int]) -> None:
        params = [self.params[index] for index in indices]
        # Only sizes are cut here; values come later.
        shapes = [torch.empty(param.num_elements, dtype=param.dtype, device="meta") for param in params]
        for chunk in cut(shapes, CHUNK_ELEMENTS):
            segments = tuple(replace(segment, tensor=indices[segment.tensor]) for segment in chunk.segments)
            self.chunks.append(replace(chunk, segments=segments))


class TensorFile:
    """Flat tensors by index of the shard.

    Args:
        layout: layout of the file.
        file: file with a record per chunk of the layout.
        pipeline: pipeline of one column, wide enough for any record.
    """

    def __init__(self, layout: Layout, file: BlockFile, pipeline: RecordPipeline):
        self.records = file
        self._layout = layout
        self._pipeline = pipeline

    def read(self, index: int) -> Tensor:
        """Read one shard, flat."""
        param = self._layout.params[index]
        tensor = torch.empty(param.num_elements, dtype=param.dtype)
        records = self._layout.records_of[index]

        def copy(position: int, tray: Tray) -> tuple[int, ...]:
            for segment in self._layout.chunks[records[position]].segments:
                if segment.tensor == index:
                    tensor[segment.start : segment.stop] = self._layout.view(segment, tray[0].bytes)
            return ()

        self._pipeline.run([[Cell(self.records, record)] for record in records], copy)
        return tensor

    def write(
        self,
        values: Mapping[int, Tensor],
        is_read: Callable[[int], bool],
        combine: Callable[[int, Tensor, Tensor], object],
        is_behind: bool = False,
    ) -> None:
        """Update stored shards with ``values``.

        Args:
            values: flat tensors by index of the shard.
            is_read: whether a record has elements that must be kept, so that it is read before it is written.
            combine: called with the index, stored elements and new ones; writes the result into the stored ones.
            is_behind: see ``RecordPipeline.run``.
        """
        records = sorted({record for index in values for record in self._layout.records_of[index]})

        def update(position: int, tray: Tray) -> tuple[int, ...]:
            for segment in self._layout.chunks[records[position]].segments:
                if segment.tensor in values:
                    stored = self._layout.view(segment, tray[0].bytes)
                    combine(segment.tensor, stored, values[segment.tensor][segment.start : segment.stop])
            return (0,)

        items = [[Cell(self.records, record, is_read(record))] for record in records]
        self._pipeline.run(items, update, is_behind)
