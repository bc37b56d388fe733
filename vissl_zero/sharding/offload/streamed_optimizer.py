"""A torch optimizer whose state lives in a file and passes through memory once a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.sharding.offload.block_file import BlockFile, PageBuffer
from vissl_zero.sharding.offload.chunks import ALIGN, Chunk, Segment, cut
from vissl_zero.sharding.offload.errors import OffloadError
from vissl_zero.sharding.offload.kernel import Kernel, Piece
from vissl_zero.sharding.offload.pipeline import Pipeline
from vissl_zero.sharding.offload.run_folder import RunFolder

RECORD_BYTES = 4 * 2**20  # of a chunk's state; larger ones stream slower (docs/offload.md)
_FILE = "optimizer.state"


class StreamedOptimizer(torch.optim.Optimizer):
    """Updates shards chunk by chunk: read the state of chunk k+1, update chunk k, write the state of chunk k-1.

    The arithmetic is the base optimizer's own, on views of the shards; only where its state rests is different. A
    parameter without gradient is left alone, and its state too.

    Args:
        kernel: the base optimizer.
        groups: parameters of each of its groups: shards on the CPU.
        folder: where the file goes; removed with this object, or at the end of the process.
        is_fast_init: leave the file's blocks untouched until they are first written.
    Raises:
        OffloadError: the disk has no room.
    """

    def __init__(self, kernel: Kernel, groups: Sequence[Sequence[nn.Parameter]], folder: RunFolder, is_fast_init: bool):
        for group, params in zip(kernel.optimizer.param_groups, groups, strict=True):
            group["params"] = list(params)
        super().__init__(kernel.optimizer.param_groups, kernel.optimizer.defaults)
        self.param_groups = kernel.optimizer.param_groups
        self._kernel = kernel
        self._params = [param for params in groups for param in params]
        self._group_of = [index for index, params in enumerate(groups) for _ in params]
        itemsize = max((param.element_size() for param in self._params), default=8)
        elements = max(RECORD_BYTES // (itemsize * len(kernel.keys)) // ALIGN, 1) * ALIGN
        self._chunks = cut(self._params, elements)
        sizes = [len(kernel.keys) * chunk.num_elements * chunk.itemsize for chunk in self._chunks]
        self._file = BlockFile(folder, _FILE, sizes, is_touched=not is_fast_init)
        self._pipeline = Pipeline(self._file, max(sizes, default=0))
        self._is_broken = False
        self.state = _FileState(self)  # type: ignore[assignment]
        self.scalars: dict[int, dict[str, Any]] = {}
        if kernel.is_eager:
            self.scalars = {index: {} for index in range(len(self._params))}
        self._finalizer = weakref.finalize(self, _end, self._pipeline, self._file, folder)

    @property
    def resident_tensors(self) -> list[Tensor]:
        """The buffers, which is all the memory there is to it; the state itself is on the disk."""
        return self._pipeline.memory

    @property
    def disk_bytes(self) -> int:
        """Size of the file."""
        return self._file.num_bytes

    def close(self) -> None:
        """Remove the files now; the optimizer cannot be used after it."""
        self._is_broken = True
        self._finalizer()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every shard that has a gradient.

        Raises:
            OffloadError: state could not be read or stored. Some shards are updated and others not, so that nothing but
                the last checkpoint can be trusted; every further call raises too.
        """
        assert closure is None
        self._require_sound()
        active = [index for index, chunk in enumerate(self._chunks) if any(map(self._has_grad, chunk.segments))]
        self._is_broken = True
        self._pipeline.run(active, self._update)
        self._is_broken = False

    def _update(self, index: int, buffer: PageBuffer) -> bool:
        chunk, pieces, last = self._chunks[index], [], {}
        for segment in filter(self._has_grad, chunk.segments):
            param = self._params[segment.tensor]
            assert param.grad is not None
            # A copy for each piece of a tensor: all of them make the same step, counted once, with the last piece.
            scalars = {key: _copied(value) for key, value in self._scalars_of(segment.tensor).items()}
            views = {
                key: self._view(chunk, segment, buffer, position) for position, key in enumerate(self._kernel.keys)
            }
            span = slice(segment.start, segment.stop)
            piece = Piece(
                self._group_of[segment.tensor],
                param.detach().view(-1)[span],
                param.grad.detach().reshape(-1)[span],
                views | scalars,
            )
            pieces.append(piece)
            if segment.stop == param.numel():
                last[segment.tensor] = piece
        self._kernel.update(pieces)
        for tensor, piece in last.items():
            self.scalars[tensor] = {key: piece.state[key] for key in self._kernel.scalars}
        return True

    def _view(self, chunk: Chunk, segment: Segment, buffer: PageBuffer, position: int) -> Tensor:
        """The state of a segment under the key at ``position``: records hold one key after another."""
        dtype = self._params[segment.tensor].dtype
        first = position * chunk.num_elements + segment.offset
        whole = buffer.bytes[: len(self._kernel.keys) * chunk.num_elements * chunk.itemsize].view(dtype)
        return whole[first : first + segment.stop - segment.start]

    def _has_grad(self, segment: Segment) -> bool:
        return self._params[segment.tensor].grad is not None

    def _scalars_of(self, tensor: int) -> dict[str, Any]:
        return self.scalars.get(tensor) or self._kernel.scalars

    def _require_sound(self) -> None:
        if self._is_broken:
            raise OffloadError(
                "Streaming optimizer state failed earlier, or was ended. Go on from the last checkpoint."
            )

    # --- whole state, for checkpoints ---

    def stored_params(self) -> list[nn.Parameter]:
        """Parameters that have state: all those updated so far."""
        return [self._params[index] for index in sorted(self.scalars)]

    @property
    def keys(self) -> tuple[str, ...]:
        """State that has an element for each of a parameter's."""
        return tuple(self._kernel.keys)

    def scalars_of(self, param: nn.Parameter) -> dict[str, Any]:
        """State of one shard that is one number each."""
        return dict(self._scalars_of(self._index_of(param)))

    def read_state(self, param: nn.Parameter) -> dict[str, Any]:
        """State of one shard, as the base optimizer would hold it. Reads the records it is in."""
        self._require_sound()
        tensor = self._index_of(param)
        state: dict[str, Any] = {key: torch.empty_like(param) for key in self._kernel.keys}

        def copy(index: int, buffer: PageBuffer) -> bool:
            for segment in self._segments(index, tensor):
                for position, key in enumerate(self._kernel.keys):
                    view = self._view(self._chunks[index], segment, buffer, position)
                    state[key].view(-1)[segment.start : segment.stop] = view
            return False

        self._pipeline.run(self._records_of(tensor), copy)
        return state | {key: _copied(value) for key, value in self._scalars_of(tensor).items()}

    def write_state(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """Store what ``read_state``, or the base optimizer, had for one shard."""
        self._require_sound()
        tensor = self._index_of(param)

        def copy(index: int, buffer: PageBuffer) -> bool:
            for segment in self._segments(index, tensor):
                for position, key in enumerate(self._kernel.keys):
                    view = self._view(self._chunks[index], segment, buffer, position)
                    view.copy_(state[key].reshape(-1)[segment.start : segment.stop])
            return True

        self._pipeline.run(self._records_of(tensor), copy)
        self.scalars[tensor] = {key: _copied(state[key]) for key in self._kernel.scalars}

    def forget_state(self) -> None:
        """As before the first step."""
        self._file.forget()
        self.scalars.clear()

    def _index_of(self, param: nn.Parameter) -> int:
        return next(index for index, own in enumerate(self._params) if own is param)

    def _segments(self, chunk: int, tensor: int) -> Iterator[Segment]:
        return (segment for segment in self._chunks[chunk].segments if segment.tensor == tensor)

    def _records_of(self, tensor: int) -> list[int]:
        return [index for index in range(len(self._chunks)) if any(self._segments(index, tensor))]


class _FileState(MutableMapping[Any, dict[str, Any]]):
    """``optimizer.state`` of a streamed optimizer: each access to an entry reads or writes the file."""

    def __init__(self, optimizer: StreamedOptimizer):
        self._optimizer = weakref.ref(optimizer)

    def _owner(self) -> StreamedOptimizer:
        owner = self._optimizer()
        assert owner is not None
        return owner

    def __getitem__(self, param: Any) -> dict[str, Any]:
        if not any(param is stored for stored in self._owner().stored_params()):
            raise KeyError(param)
        return self._owner().read_state(param)

    def __setitem__(self, param: Any, state: dict[str, Any]) -> None:
        self._owner().write_state(param, state)

    def __delitem__(self, param: Any) -> None:
        raise OffloadError("State of single parameters cannot be removed from NVMe.")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._owner().stored_params())

    def __len__(self) -> int:
        return len(self._owner().stored_params())

    def clear(self) -> None:
        """Forget all of it."""
        self._owner().forget_state()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _end(pipeline: Pipeline, file: BlockFile, folder: RunFolder) -> None:
    pipeline.close()
    file.close()
    folder.remove()
