"""A torch optimizer whose state, and parameters that are on disk, pass through memory once a step."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.sharding.offload.block_file import BlockFile, Cell, Item, RecordPipeline, Tray
from vissl_zero.sharding.offload.layout import ALIGN, Chunk, ChunkSegment, cut
from vissl_zero.sharding.offload.nvme_folder import OffloadError, RunFolder
from vissl_zero.sharding.offload.parameter_store import ParameterStore
from vissl_zero.sharding.offload.state_place import StateInMemory, StateOnDisk, StatePlace, UpdateKernel, UpdatePiece

RECORD_BYTES = 2**20  # of a chunk's state; larger ones stream slower (docs/offload.md)
_STATE, _VALUES, _GRAD = range(3)  # the columns of a tray


class StreamedOptimizer(torch.optim.Optimizer):
    """Updates shards chunk by chunk, while the next chunks are read and the last ones written.

    The arithmetic is the base optimizer's own, on views of the shards or of what was read; only where they are kept
    is different. A parameter without gradient is left alone, and its state too.

    Args:
        kernel: the base optimizer.
        groups: parameters of each of its groups: shards on the CPU, or without memory where they are in ``store``.
        folder: where the file of state goes, removed with this object or at the end of the process; None: the state
            stays in memory.
        is_fast_init: leave the file's blocks untouched until they are first written.
        store: of parameters and gradients on a disk, closed with this object; None: there are none.
        stored: by position in the list of all parameters, the index in ``store`` of those that are there.
    Raises:
        OffloadError: the disk has no room.
    """

    def __init__(
        self,
        kernel: UpdateKernel,
        groups: Sequence[Sequence[nn.Parameter]],
        folder: RunFolder | None,
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
        self._pipeline = RecordPipeline([place.record_bytes, stored_bytes, stored_bytes])
        if isinstance(place, StateOnDisk):
            place.pipeline = self._pipeline
        self._place = place
        self._is_broken = False
        self.state = place.mapping  # type: ignore[assignment]
        # Not a method of this object: the finalizer would keep it alive.
        self._finalizer = weakref.finalize(self, _end, self._pipeline, place.file, folder)

    @property
    def resident_tensors(self) -> list[Tensor]:
        """All memory that it takes: the buffers, and the state unless it is on a disk."""
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
        """Whether state is read from a file when it is asked for."""
        return self._place.file is not None

    @property
    def keys(self) -> tuple[str, ...]:
        """State that has an element for each of a parameter's."""
        return tuple(self._kernel.keys)

    def stored_params(self) -> list[nn.Parameter]:
        """Parameters that have state: all those updated so far."""
        return self._place.params_with_state()

    def scalars_of(self, param: nn.Parameter) -> dict[str, Any]:
        """State of one shard that is one number each."""
        return self._place.scalars(self._place.position_of(param))

    def read_state(self, param: nn.Parameter) -> dict[str, Any]:
        """State of one shard, as the base optimizer would hold it."""
        return self.state[param]

    def close(self) -> None:
        """Remove the files now; the optimizer cannot be used after it."""
        self._distrust()
        self._finalizer()
        if self._store is not None:
            self._store.close()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every shard that has a gradient.

        Raises:
            OffloadError: something could not be read or stored. Some shards are updated and others not, so that nothing
                but the last checkpoint can be trusted; every further call raises too.
        """
        assert closure is None
        if self._is_broken:
            raise OffloadError(
                "Streaming optimizer state failed earlier, or was ended. Resume from the last checkpoint."
            )
        active = [index for index, chunk in enumerate(self._chunks) if any(map(self._has_grad, chunk.segments))]
        # Trusted again only at the end: an error in between leaves some shards updated and others not.
        self._distrust()
        with nullcontext() if self._store is None else self._store.updating():
            pieces: dict[int, UpdatePiece] = {}  # of each tensor one; all of them have made the same step
            firsts = self._first_updates(active)
            items = [self._item(index) for index in active]
            self._pipeline.run(items, lambda k, tray: self._update(active[k], tray, pieces, firsts))
        for tensor, piece in pieces.items():
            self._place.set_scalars(tensor, {key: piece.state[key] for key in self._kernel.scalars})
        self._trust()

    def _distrust(self) -> None:
        self._is_broken = True
        if isinstance(self._place, StateOnDisk):
            self._place.is_sound = False

    def _trust(self) -> None:
        self._is_broken = False
        if isinstance(self._place, StateOnDisk):
            self._place.is_sound = True

    def _item(self, index: int) -> Item:
        record = self._records[index]
        state = None if self._place.file is None else Cell(self._place.file, index)
        if record is None:
            return [state, None, None]
        assert self._store is not None
        values, grad = self._store.parameters, self._store.gradients.records
        return [state, Cell(values, record), Cell(grad, record)]

    def _first_updates(self, active: Sequence[int]) -> set[int]:
        """Tensors whose state the base optimizer is to make in this step."""
        if self._kernel.begins_with_zeros:
            return set()
        # Known before the first chunk: from then on there is state of some of their elements.
        tensors = {segment.tensor for index in active for segment in self._chunks[index].segments}
        return {tensor for tensor in tensors if not self._place.has_state(tensor)}

    def _update(
        self, index: int, tray: Tray, updated: dict[int, UpdatePiece], firsts: Collection[int]
    ) -> tuple[int, ...]:
        pieces = {}
        for segment in filter(self._has_grad, self._chunks[index].segments):
            state = self._place.views(index, segment, tray[_STATE].bytes) | self._place.scalars(segment.tensor)
            values, grad = self._values_and_grad(segment, tray)
            group, is_first = self._group_of[segment.tensor], segment.tensor in firsts
            pieces[segment.tensor] = UpdatePiece(group, values, grad, state, is_first)
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
            return param.detach().view(-1)[span], param.grad.detach().reshape(-1)[span]
        assert self._store is not None
        there = replace(segment, tensor=stored)
        values, grad = (self._store.layout.view(there, tray[column].bytes) for column in (_VALUES, _GRAD))
        self._store.gradients.apply_changes(stored, grad, values)
        return values, grad

    def _has_grad(self, segment: ChunkSegment) -> bool:
        return self._params[segment.tensor].grad is not None

    def _cut(self) -> tuple[list[Chunk], list[int | None]]:
        """Chunks of all parameters, and for those in the store the record each of them is."""
        position_of = {index: position for position, index in self._stored.items()}
        chunks: list[Chunk] = []
        records: list[int | None] = []
        if self._store is not None:
            layout = self._store.layout
            for record in filter(layout.is_trained, range(len(layout.chunks))):
                chunk = layout.chunks[record]
                segments = tuple(replace(segment, tensor=position_of[segment.tensor]) for segment in chunk.segments)
                chunks.append(replace(chunk, segments=segments))
                records.append(record)
        # Empty tensors belong to no chunk, so nothing in the store is cut.
        rest = [param.new_empty(0) if i in self._stored else param for i, param in enumerate(self._params)]
        itemsize = max((param.element_size() for param in self._params), default=8)
        elements = max(RECORD_BYTES // (itemsize * max(1, len(self._kernel.keys))) // ALIGN, 1) * ALIGN
        own = cut(rest, elements)
        return chunks + own, records + [None] * len(own)


def _end(pipeline: RecordPipeline, file: BlockFile | None, folder: RunFolder | None) -> None:
    pipeline.close()
    if file is not None:
        file.close()
    if folder is not None:
        folder.remove()
