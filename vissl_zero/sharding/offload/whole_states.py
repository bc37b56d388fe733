"""State of an optimizer that looks at full tensors, in a file: read before a tensor is updated, written after it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.sharding.offload.block_file import BlockFile, Cell, RecordPipeline, Tray
from vissl_zero.sharding.offload.nvme_folder import OffloadError, RunFolder
from vissl_zero.sharding.offload.state_place import copied
from vissl_zero.sharding.offload.streamed_optimizer import RECORD_BYTES

_FILE = "optimizer.state"
_ALIGNMENT = 16  # bytes: a tensor in the file may be read as any number format


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a parameter's state.

    Attributes:
        key: its name.
        shape, dtype: of it, which need not be the parameter's.
        first: place of its first byte among those of the parameter.
    """

    key: str
    shape: torch.Size
    dtype: torch.dtype
    first: int

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return self.shape.numel() * self.dtype.itemsize


class WholeStates(MutableMapping[Any, dict[str, Any]]):
    """What ``optimizer.state`` is: an entry is read from the file when it is asked for, and written when it is set.

    Tensors rest in the file; numbers, and tensors without dimensions, in memory.

    Args:
        params: that this rank updates.
        sizes: bytes of room for the state of each; see ``padded_bytes``.
        folder: of the file, removed with this object or at the end of the process.
        is_fast_init: leave the file's blocks untouched until they are first written.
    Raises:
        OffloadError: the disk has no room.
    """

    def __init__(self, params: Sequence[nn.Parameter], sizes: Sequence[int], folder: RunFolder, is_fast_init: bool):
        self._indices = {param: index for index, param in enumerate(params)}
        self._params = list(params)
        self._sizes = list(sizes)
        pieces = [[min(RECORD_BYTES, size - at) for at in range(0, size, RECORD_BYTES)] for size in sizes]
        self._firsts = [0, *accumulate(map(len, pieces))]
        self._file = BlockFile(folder, _FILE, [piece for own in pieces for piece in own], is_touched=not is_fast_init)
        self.disk_bytes = self._file.num_bytes
        self._pipeline = RecordPipeline([max((piece for own in pieces for piece in own), default=0)])
        self._stored: dict[int, list[StoredTensor]] = {}
        self._numbers: dict[int, dict[str, Any]] = {}
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end, self._pipeline, self._file, folder)

    @property
    def resident_tensors(self) -> list[Tensor]:
        """The buffers."""
        return self._pipeline.memory

    def numbers(self, param: nn.Parameter) -> dict[str, Any]:
        """What of a parameter's state is one number each. Reads nothing."""
        return {key: copied(value) for key, value in self._numbers[self._indices[param]].items()}

    def tensors(self, param: nn.Parameter) -> list[StoredTensor]:
        """What of it is in the file. Reads nothing."""
        return self._stored[self._indices[param]]

    def __getitem__(self, param: Any) -> dict[str, Any]:
        index = self._index_of(param)
        stored = self._stored[index]
        found = {tensor.key: torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in stored}

        def copy(first: int, record: Tensor) -> None:
            for flat, begin, end, place in _overlaps(stored, found, first, len(record)):
                flat[begin:end] = record[place : place + end - begin]

        self._run(index, copy, is_written=False)
        return found | self.numbers(param)

    def __setitem__(self, param: Any, state: dict[str, Any]) -> None:
        index = self._indices[param]
        tensors = {key: value.detach().cpu() for key, value in state.items() if _is_stored(value)}
        stored, first = [], 0
        for key, value in tensors.items():
            stored.append(StoredTensor(key, value.shape, value.dtype, first))
            first += padded_bytes(value)
        if first > self._sizes[index]:
            raise OffloadError(
                f"The optimizer keeps {first} bytes of state of a tensor of shape {tuple(param.shape)}, and a trial "
                f"found {self._sizes[index]}. Write device: cpu."
            )
        whole = {key: value.contiguous() for key, value in tensors.items()}

        def copy(first: int, record: Tensor) -> None:
            for flat, begin, end, place in _overlaps(stored, whole, first, len(record)):
                record[place : place + end - begin] = flat[begin:end]

        self._run(index, copy, is_written=True)
        self._stored[index] = stored
        self._numbers[index] = {key: copied(value) for key, value in state.items() if key not in tensors}

    def __delitem__(self, param: Any) -> None:
        index = self._index_of(param)
        del self._stored[index], self._numbers[index]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter([self._params[index] for index in sorted(self._stored)])

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, param: object) -> bool:
        return self._indices.get(param) in self._stored  # type: ignore[call-overload]

    def clear(self) -> None:
        """Forget all of it."""
        self._file.forget()
        self._stored.clear()
        self._numbers.clear()

    def close(self) -> None:
        """Remove the file now."""
        self._is_closed = True
        self._finalizer()

    def _index_of(self, param: Any) -> int:
        if param not in self:
            raise KeyError(param)
        return self._indices[param]

    def _run(self, index: int, copy: Any, is_written: bool) -> None:
        if self._is_closed:
            raise OffloadError("Streaming optimizer state was ended. Resume from the last checkpoint.")
        records = range(self._firsts[index], self._firsts[index + 1])

        def update(position: int, tray: Tray) -> tuple[int, ...]:
            first = position * RECORD_BYTES
            copy(first, tray[0].bytes[: min(RECORD_BYTES, self._sizes[index] - first)])
            return (0,) if is_written else ()

        self._pipeline.run([[Cell(self._file, record, is_read=not is_written)] for record in records], update)


def padded_bytes(value: Any) -> int:
    """Room that an entry of a state takes in the file."""
    return -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT if _is_stored(value) else 0


def _is_stored(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _overlaps(
    stored: Sequence[StoredTensor], tensors: dict[str, Tensor], first: int, length: int
) -> Iterator[tuple[Tensor, int, int, int]]:
    """Where a record that begins at byte ``first`` meets tensors: bytes, begin and end in them, place in the record."""
    for tensor in stored:
        begin, end = max(first - tensor.first, 0), min(first + length - tensor.first, tensor.num_bytes)
        if begin < end:
            flat = tensors[tensor.key].view(-1).view(torch.uint8)
            yield flat, begin, end, tensor.first + begin - first


def _end(pipeline: RecordPipeline, file: BlockFile, folder: RunFolder) -> None:
    pipeline.close()
    file.close()
    folder.remove()
