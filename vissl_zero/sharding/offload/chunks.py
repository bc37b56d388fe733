"""How the elements of many shards are cut into chunks of equal size, each updated and stored as one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

# A cut inside a tensor falls on a multiple of this many elements, so that the kernels' vector loops, and with them the
# last bit of every result, are what they are without a cut.
ALIGN = 1024


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one shard.

    Attributes:
        tensor: position of the shard in the list that was cut.
        start, stop: elements, in the shard's flat order.
        offset: of the first of them in the chunk.
    """

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Segments of one dtype that are updated together.

    Attributes:
        segments: in the order of the shards, at most one of each.
        num_elements: of all of them.
        itemsize: bytes per element.
    """

    segments: tuple[Segment, ...]
    num_elements: int
    itemsize: int


def cut(tensors: Sequence[Tensor], chunk_elements: int) -> list[Chunk]:
    """Chunks of at most ``chunk_elements`` elements that cover every element of ``tensors`` once, in order.

    Args:
        tensors: shards of any shapes; empty ones take part in no chunk.
        chunk_elements: a multiple of ``ALIGN``.
    """
    assert chunk_elements % ALIGN == 0
    chunks: list[Chunk] = []
    segments: list[Segment] = []
    filled, itemsize = 0, 0

    def close() -> None:
        nonlocal segments, filled
        if segments:
            chunks.append(Chunk(tuple(segments), filled, itemsize))
        segments, filled = [], 0

    for index, tensor in enumerate(tensors):
        if tensor.element_size() != itemsize:
            close()
            itemsize = tensor.element_size()
        start = 0
        while start < tensor.numel():
            room = chunk_elements - filled
            if tensor.numel() - start > room:
                room = room // ALIGN * ALIGN
            if room == 0:
                close()
                continue
            stop = min(start + room, tensor.numel())
            segments.append(Segment(index, start, stop, filled))
            filled += stop - start
            start = stop
    close()
    return chunks
