"""Optimizers that update a few elements at a time: state and parameters on a disk pass through memory once a step.

``StreamedOptimizer`` updates chunk by chunk. ``WholeStates`` is the state of an optimizer that needs full tensors: it
is read from its file before a tensor is updated, and written afterward.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.sharding.offload.block_file import (
    BlockFile,
    Cell,
    Item,
    NoRecords,
    OffloadError,
    OffloadFolder,
    RecordPipeline,
    Tray,
)
from vissl_zero.sharding.offload.layout import ALIGN, Chunk, ChunkSegment, cut
from vissl_zero.sharding.offload.parameter_store import ParameterStore
from vissl_zero.sharding.offload.state_place import (
    UNSOUND,
    StateInMemory,
    StateOnDisk,
    StatePlace,
    UpdateKernel,
    UpdatePiece,
    copied,
)

RECORD_BYTES = 2**20  # of a chunk's state; larger ones stream slower (docs/offload.md)
_DEVICE_BYTES = 2**25  # of a chunk on a GPU, where starting a kernel takes as long as a MiB
_STATE, _VALUES, _GRAD = range(3)  # the columns of a tray


class StreamedOptimizer(torch.optim.Optimizer):
    """Updates shards chunk by chunk, while the next chunks are read and the last ones written.

    The base optimizer itself computes, on views of the shards or of the buffers; only the storage differs. A parameter
    without gradient stays as it is, and so does its state.

    Args:
        kernel: the base optimizer.
        groups: parameters of each of its groups; meta tensors for those in ``store``.
        folder: where the file of state goes, removed with this object or at the end of the process; None: the state
            stays in memory.
        is_fast_init: leave the file's blocks untouched until they are first written.
        store: store of parameters and gradients on a disk, closed with this object; None: there are none.
        stored: index in ``store`` of the parameters that are there, by position in the list of all parameters.
    Raises:
        OffloadError: the disk has no room.
    """

    def __init__(
        self,
        kernel: UpdateKernel,
        groups: Sequence[Sequence[nn.Parameter]],
        folder: OffloadFolder | None,
        is_fast_init: bool,
        store: ParameterStore | None = None,
        stored: dict[int, int] | None = None,
    ):
        for group, params in zip(kernel.optimizer.param_groups, groups, strict=True):
            group["params"] = list(params)
        super().__init__(kernel.optimizer.param_groups, kernel.optimizer.defaults)
        self.param_groups = kernel.optimizer.param_groups
        self._kernel = kernel
        self._params = [param for params in groups for param in params]
        self._group_of = [index for index, params in enumerate(groups) for _ in params]
        self._store = store
        self._stored = stored or {}
        self._chunks, self._records = self._cut()
        place: StatePlace = StateInMemory(self._params, kernel)
        if folder is not None:
            place = StateOnDisk(self._params, kernel, self._chunks, folder, is_fast_init)
        stored_bytes = 0 if store is None else store.record_bytes
        columns = [place.record_bytes, stored_bytes, stored_bytes]
        self._pipeline = RecordPipeline(columns) if any(columns) else NoRecords()
        if isinstance(place, StateOnDisk):
            place.pipeline = self._pipeline
        self._place = place
        self._is_broken = False
        self.state = place.mapping  # type: ignore[assignment]
        # Not a method of this object: the finalizer would keep it alive.
        self._finalizer = weakref.finalize(self, _end, self._pipeline, place.file, folder)

    @property
    def resident_tensors(self) -> list[Tensor]:
        """Memory in use: the buffers, and the state unless it is on a disk."""
        buffers = self._pipeline.memory
        if self._store is not None:
            buffers += self._store.resident_tensors
        if self._place.file is not None:
            return buffers
        states = (value for state in self.state.values() for key, value in state.items() if key in self._kernel.keys)
        return [*buffers, *states]

    @property
    def disk_bytes(self) -> int:
        """Size of the files."""
        files = [self._place.file, self._store]
        return sum(file.num_bytes if isinstance(file, BlockFile) else file.disk_bytes for file in files if file)

    @property
    def is_on_disk(self) -> bool:
        """Return whether reading ``state`` reads a file."""
        return self._place.file is not None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the state that has one element per element of a parameter."""
        return tuple(self._kernel.keys)

    @property
    def keys_by_group(self) -> list[frozenset[str]]:
        """The names among ``keys`` that the options of each group need."""
        return self._kernel.keys_by_group()

    def params_with_state(self) -> list[nn.Parameter]:
        """List the parameters that have state: all those updated so far."""
        return self._place.params_with_state()

    def scalars_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return a copy of the scalars of one shard's state by key."""
        return self._place.scalars(self._place.position_of(param))

    def format_of(self, key: str, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of the state ``key`` of a parameter."""
        return self._kernel.format_of(key, param.dtype)

    def read_state(self, param: nn.Parameter) -> dict[str, Any]:
        """Read the state of one shard, as the base optimizer would keep it."""
        return self.state[param]

    def close(self) -> None:
        """Remove the files now; the optimizer cannot be used after it."""
        self._set_sound(False)
        self._finalizer()
        if self._store is not None:
            self._store.close()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every shard that has a gradient.

        Raises:
            OffloadError: something could not be read or stored. Some shards are updated and others not, so that nothing
                but the last checkpoint can be trusted; every further call raises too.
            VisslZeroError: changed options need other state; nothing is updated.
        """
        assert closure is None
        if self._is_broken:
            raise OffloadError(UNSOUND)
        self._kernel.require_known_state()
        # A chunk without gradients is neither read nor written.
        active = [index for index, chunk in enumerate(self._chunks) if any(map(self._has_grad, chunk.segments))]
        # Sound again only at the end: an error in between leaves some shards updated and others not.
        self._set_sound(False)
        with nullcontext() if self._store is None else self._store.updating():
            pieces: dict[int, UpdatePiece] = {}  # the last per tensor: all its pieces have counted the same step
            firsts = self._first_updates(active)
            items = [self._item(index) for index in active]
            self._pipeline.run(items, lambda k, tray: self._update(active[k], tray, pieces, firsts))
        # After all chunks: the pieces of a tensor in several chunks must begin with the same counters.
        for tensor, piece in pieces.items():
            self._place.set_scalars(tensor, {key: piece.state[key] for key in self._kernel.scalars})
        self._set_sound(True)

    def _set_sound(self, is_sound: bool) -> None:
        self._is_broken = not is_sound
        if isinstance(self._place, StateOnDisk):
            self._place.is_sound = is_sound

    def _item(self, index: int) -> Item:
        record = self._records[index]
        state = None if self._place.file is None else Cell(self._place.file, index)
        if record is None:
            return [state, None, None]
        assert self._store is not None
        values, grad = self._store.parameters, self._store.gradients.records
        return [state, Cell(values, record), Cell(grad, record)]

    def _first_updates(self, active: Sequence[int]) -> set[int]:
        """Return the tensors whose state the base optimizer creates in this step."""
        if self._kernel.begins_with_zeros:
            return set()
        # Before the first chunk: after it, a tensor in several chunks has state of some elements.
        tensors = {segment.tensor for index in active for segment in self._chunks[index].segments}
        return {tensor for tensor in tensors if not self._place.has_state(tensor)}

    def _update(
        self, index: int, tray: Tray, updated: dict[int, UpdatePiece], firsts: Collection[int]
    ) -> tuple[int, ...]:
        pieces = {}
        for segment in filter(self._has_grad, self._chunks[index].segments):
            state = self._place.views(index, segment, tray) | self._place.scalars(segment.tensor)
            values, grad = self._values_and_grad(segment, tray)
            group, is_first = self._group_of[segment.tensor], segment.tensor in firsts
            pieces[segment.tensor] = UpdatePiece(
                group, values, grad, state, is_first, tensor=segment.tensor, start=segment.start
            )
        self._kernel.update(list(pieces.values()))
        updated |= pieces
        # The gradient's column is never among them: the update has consumed it.
        changed = () if self._place.file is None else (_STATE,)
        return changed if self._records[index] is None else (*changed, _VALUES)

    def _values_and_grad(self, segment: ChunkSegment, tray: Tray) -> tuple[Tensor, Tensor]:
        stored = self._stored.get(segment.tensor)
        if stored is None:
            param, span = self._params[segment.tensor], slice(segment.start, segment.stop)
            assert param.grad is not None
            # A view of the values, into which the update writes; the gradient is only read, and may be copied.
            return param.detach().view(-1)[span], param.grad.detach().reshape(-1)[span]
        assert self._store is not None
        stored_segment = replace(segment, tensor=stored)
        values, grad = (self._store.layout.view(stored_segment, tray[column].bytes) for column in (_VALUES, _GRAD))
        # Unscaling, clipping and adaptation, which were only noted.
        self._store.gradients.apply_changes(stored, grad, values)
        return values, grad

    def _has_grad(self, segment: ChunkSegment) -> bool:
        return self._params[segment.tensor].grad is not None

    def _cut(self) -> tuple[list[Chunk], list[int | None]]:
        """Cut all parameters into chunks; return also each chunk's record in the store, None outside."""
        position_of = {index: position for position, index in self._stored.items()}
        chunks: list[Chunk] = []
        records: list[int | None] = []
        if self._store is not None:
            layout = self._store.layout
            # Stored parameters keep the chunks of their file: a chunk then reads and writes one record.
            for record in filter(layout.is_trained, range(len(layout.chunks))):
                chunk = layout.chunks[record]
                segments = tuple(replace(segment, tensor=position_of[segment.tensor]) for segment in chunk.segments)
                chunks.append(replace(chunk, segments=segments))
                records.append(record)
        # Empty tensors belong to no chunk, so nothing in the store is cut.
        rest = [param.new_empty(0) if i in self._stored else param for i, param in enumerate(self._params)]
        itemsize = max((param.element_size() for param in self._params), default=8)
        num_bytes = _DEVICE_BYTES if any(param.is_cuda for param in self._params) else RECORD_BYTES
        elements = max(num_bytes // (itemsize * max(1, len(self._kernel.keys))) // ALIGN, 1) * ALIGN
        chunks_in_memory = cut(rest, elements)
        return chunks + chunks_in_memory, records + [None] * len(chunks_in_memory)


def _end(pipeline: RecordPipeline, file: BlockFile | None, folder: OffloadFolder | None) -> None:
    pipeline.close()
    if file is not None:
        file.close()
    if folder is not None:
        folder.remove()


_FILE = "optimizer.state"
_ALIGNMENT = 16  # bytes: a tensor in the file may be read as any number format


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a parameter's state.

    Attributes:
        key: key in the state.
        shape, dtype: shape and dtype, which may differ from the parameter's.
        first: offset of its first byte in the parameter's bytes of the file.
    """

    key: str
    shape: torch.Size
    dtype: torch.dtype
    first: int

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return self.shape.numel() * self.dtype.itemsize


class WholeStates(MutableMapping[Any, dict[str, Any]]):
    """The mapping behind ``optimizer.state``: reading an entry reads the file, and setting one writes it.

    Tensors are kept in the file; numbers and 0-d tensors in memory.

    Args:
        params: parameters that this rank updates.
        sizes: bytes to reserve for the state of each parameter; see ``padded_bytes``.
        folder: folder of the file, removed with this object or at the end of the process.
        is_fast_init: leave the file's blocks untouched until they are first written.
    Raises:
        OffloadError: the disk has no room.
    """

    def __init__(self, params: Sequence[nn.Parameter], sizes: Sequence[int], folder: OffloadFolder, is_fast_init: bool):
        self._indices = {param: index for index, param in enumerate(params)}
        self._params = list(params)
        self._sizes = list(sizes)
        pieces = [[min(RECORD_BYTES, size - at) for at in range(0, size, RECORD_BYTES)] for size in sizes]
        self._firsts = [0, *accumulate(map(len, pieces))]
        self._file = folder.file(
            _FILE, [piece for group_pieces in pieces for piece in group_pieces], is_touched=not is_fast_init
        )
        self.disk_bytes = self._file.num_bytes
        self._pipeline = RecordPipeline([max((piece for group_pieces in pieces for piece in group_pieces), default=0)])
        self._stored: dict[int, tuple[list[StoredTensor], dict[str, Any]]] = {}  # with the scalars
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end, self._pipeline, self._file, folder)

    @property
    def resident_tensors(self) -> list[Tensor]:
        """The buffers."""
        return self._pipeline.memory

    def numbers(self, param: nn.Parameter) -> dict[str, Any]:
        """Return a copy of the scalars of a parameter's state. Does not read the file."""
        _, numbers = self._stored[self._indices[param]]
        return {key: copied(value) for key, value in numbers.items()}

    def tensors(self, param: nn.Parameter) -> list[StoredTensor]:
        """Return descriptions of a parameter's state tensors. Does not read the file."""
        stored, _ = self._stored[self._indices[param]]
        return stored

    def __getitem__(self, param: Any) -> dict[str, Any]:
        index = self._index_of(param)
        stored, _ = self._stored[index]
        tensors = {tensor.key: torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in stored}

        def copy(first: int, record: Tensor) -> None:
            for flat, begin, end, place in _overlaps(stored, tensors, first, len(record)):
                flat[begin:end] = record[place : place + end - begin]

        self._run(index, copy, is_written=False)
        return tensors | self.numbers(param)

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
        numbers = {key: copied(value) for key, value in state.items() if key not in tensors}
        self._stored[index] = stored, numbers

    def __delitem__(self, param: Any) -> None:
        del self._stored[self._index_of(param)]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter([self._params[index] for index in sorted(self._stored)])

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, param: object) -> bool:
        return self._indices.get(param) in self._stored  # type: ignore[call-overload]

    def clear(self) -> None:
        """Forget the state of all parameters."""
        self._file.forget()
        self._stored.clear()

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

        # No record has two parameters, so a write needs no read.
        self._pipeline.run([[Cell(self._file, record, is_read=not is_written)] for record in records], update)


def padded_bytes(value: Any) -> int:
    """Return the bytes that an entry of a state takes in the file; 0 for a scalar."""
    return -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT if _is_stored(value) else 0


def _is_stored(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _overlaps(
    stored: Sequence[StoredTensor], tensors: dict[str, Tensor], first: int, length: int
) -> Iterator[tuple[Tensor, int, int, int]]:
    """Yield the overlaps of a record that begins at byte ``first`` with tensors.

    Each is a tensor as flat bytes, begin and end of the overlap in it, and its offset in the record.
    """
    for tensor in stored:
        begin, end = max(first - tensor.first, 0), min(first + length - tensor.first, tensor.num_bytes)
        if begin < end:
            flat = tensors[tensor.key].view(-1).view(torch.uint8)
            yield flat, begin, end, tensor.first + begin - first
