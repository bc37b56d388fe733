"""Storage of a streamed optimizer's per-element state: in memory, or in a file of records.

The base optimizer runs on a few elements at a time, with their state passed in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.optim.elementwise import SINGLE_ROUNDING
from vissl_zero.optim.update_rule import counter_keys, set_own, trial_state, with_params
from vissl_zero.sharding.offload.block_file import BlockFile, Cell, OffloadError, OffloadFolder, RecordPipeline, Tray
from vissl_zero.sharding.offload.layout import Chunk, ChunkSegment

_BEGIN_WITH_ZEROS = (*SINGLE_ROUNDING.keys(), *SINGLE_ROUNDING.values())


class UpdateKernel:
    """Runs one update of a torch optimizer on pieces of tensors, whose state is passed in.

    Args:
        optimizer: built over proxies of one element per group; its group dicts are kept, so that learning rates set in
            them take effect.
        key, what, instead: for errors: the key that requires pieces, its value, and what to write instead.
    Attributes:
        keys: names of the state that has one value per element.
        scalars: further state, one number per tensor, with its value before the first step.
    Raises:
        ConfigError: its state cannot be cut.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        key: str = "offload_optimizer_config.device",
        what: str = "nvme",
        instead: str = "device: cpu",
    ):
        require_streamable(optimizer, key, what, instead)
        self.optimizer = optimizer
        self._instead = instead
        self._options = self._read_options()
        states = self._probe()
        # Names of the state that the options of each group have needed so far.
        self._needed = [set(state) for state in states]
        state = {key: value for of_group in reversed(states) for key, value in of_group.items()}
        self.keys = tuple(key for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0)
        self.scalars: dict[str, Any] = {
            key: torch.zeros_like(value) if isinstance(value, Tensor) else type(value)(0)
            for key, value in state.items()
            if key not in self.keys
        }
        # The trial step has left state of the proxies.
        set_own(optimizer, "state", defaultdict(dict))

    @property
    def begins_with_zeros(self) -> bool:
        """Return whether the first step is right with state of zeros; otherwise the optimizer creates the state."""
        is_dampened = any(group.get("dampening") for group in self.optimizer.param_groups)
        return type(self.optimizer) in _BEGIN_WITH_ZEROS and not is_dampened

    def require_known_state(self) -> None:
        """Check that the options of the groups, which a loop may change, need no state beyond ``keys``.

        Raises:
            VisslZeroError: they do, such as a momentum that was 0 before.
        """
        if (options := self._read_options()) == self._options:
            return
        for index, group in enumerate(self.optimizer.param_groups):
            like = nn.Parameter(torch.zeros(1))
            made = trial_state(self.optimizer, index, like) if group["params"] else {}
            needed = {key for key, value in made.items() if value is not None}
            # Zeros, where another group's key has made a place, are only right where a first step is like the others.
            places = {*self.keys, *self.scalars} if self.begins_with_zeros else self._needed[index]
            if new := needed - places:
                raise VisslZeroError(
                    f"The options of group {index} need further state ({', '.join(sorted(new))}), which has no place "
                    "where parameters or state are offloaded: places are made for the options that initialize() was "
                    f"given. Set these options before it, or write {self._instead}."
                )
            self._needed[index] |= needed
        self._options = options

    def _read_options(self) -> list[str]:
        # Learning rates change in every step, and no optimizer keeps other state for them.
        return [repr({k: v for k, v in g.items() if k not in ("params", "lr")}) for g in self.optimizer.param_groups]

    def format_of(self, key: str, param: torch.dtype) -> torch.dtype:
        """Return the dtype of the state ``key`` of a parameter with dtype ``param``."""
        return param

    def keys_by_group(self) -> list[frozenset[str]]:
        """Return the names of ``keys`` that the options of each group need."""
        of_optimizer = set().union(*self._needed)
        return [
            frozenset(key for key in self.keys if key in needed or key not in of_optimizer) for needed in self._needed
        ]

    def _probe(self) -> list[Mapping[str, Any]]:
        """Return the state that one step creates for one element of each group."""
        proxies = [param for group in self.optimizer.param_groups for param in group["params"]]
        for proxy in proxies:
            proxy.grad = torch.zeros_like(proxy)
        self.optimizer.step()
        states = (self.optimizer.state.get(proxy, {}) for proxy in proxies)
        return [{key: value for key, value in state.items() if value is not None} for state in states]

    @torch.no_grad()
    def update(self, pieces: Sequence[UpdatePiece]) -> None:
        """Run one step on ``pieces``; parameters and per-element state change in place, scalars in ``piece.state``.

        The optimizer creates the state of a piece that ``is_first``; it is copied into ``piece.state``.
        """
        chosen: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        made: list[tuple[UpdatePiece, dict[str, Any]]] = []
        for piece in pieces:
            # A parameter over the same memory: the step writes directly into the buffer.
            param = nn.Parameter(piece.values)
            param.grad = piece.grad
            state[param] = {} if piece.is_first else piece.state
            made.append((piece, state[param]))
            chosen[piece.group].append(param)
        self.optimizer.state = state
        try:
            with with_params(self.optimizer, chosen):
                self.optimizer.step()
        finally:
            # State is keyed by the parameters above: kept, it would hold their buffers, and grow in every step.
            self.optimizer.state = defaultdict(dict)
        for piece, place in made:
            if piece.is_first:
                for key in place.keys() & set(self.keys):
                    piece.state[key].copy_(place[key])
                piece.state.update({key: place[key] for key in place.keys() & self.scalars.keys()})


@dataclass(eq=False)
class UpdatePiece:
    """Elements to update: views, all of one length.

    Attributes:
        group: position of the parameter group.
        values, grad: (n,) elements and their gradient.
        state: optimizer state: (n,) views by key, and a copy of the tensor's scalars.
        is_first: there is no state yet; the optimizer creates it.
        tensor: position of the parameter in the list of all.
        start: place of the first element in the parameter's shard, flattened.
    """

    group: int
    values: Tensor
    grad: Tensor
    state: dict[str, Any]
    is_first: bool
    tensor: int
    start: int


def require_streamable(
    optimizer: torch.optim.Optimizer,
    key: str,
    what: str = "nvme",
    instead: str = "device: cpu",
    *,
    is_whole: bool = False,
) -> None:
    """Refuse an optimizer that cannot update a part of its elements at a time.

    Args:
        optimizer: over any parameters; left as it is.
        key, what, instead: see ``UpdateKernel``.
        is_whole: parts are full tensors, not runs of elements.
    Raises:
        ConfigError: the reason, and what to use instead.
    """
    if is_whole:
        if any(optimizer.state.values()):
            must = f"cannot go with {what}: it makes state of full tensors when it is built"
            raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, f"Write {instead}.")])
        return
    if type(optimizer) not in _BEGIN_WITH_ZEROS and (reason := _why_not(optimizer)):
        must = f"can be {what} only with an optimizer that is updated piece by piece, and this one {reason}"
        fix = f"Use SGD, LARC, LARS, Adam, AdamW or Lion, or write {instead}."
        raise ConfigError([Problem(key, type(optimizer).__name__, must, fix)])


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Explain why an element-wise optimizer cannot run on pieces, after a trial step; "" if it can."""
    if hasattr(optimizer, "eval"):
        return "has other weights to evaluate, which it computes from all of its state"
    if any(optimizer.state.values()):
        return "makes state when it is built"
    like = nn.Parameter(torch.zeros(3))
    state = trial_state(optimizer, 0, like)
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    if any(value.shape != like.shape or value.dtype != like.dtype for value in tensors):
        return "keeps state of another shape or number format than a parameter's"
    if any(isinstance(value, str | list | dict | tuple) for value in state.values()):
        return "keeps state that is not numeric"
    if counter_keys(optimizer):
        return "counts its steps in its groups"
    return ""


UNSOUND = "Streaming optimizer state failed earlier, or was ended. Resume from the last checkpoint."
_FILE = "optimizer.state"


class StatePlace(ABC):
    """State by parameter; a parameter is identified by its position in the list of all.

    Args:
        params: all parameters.
        kernel: the base optimizer.
    Attributes:
        mapping: mapping that serves as ``optimizer.state``.
        file: file with a record per chunk; None if the state is in memory.
        record_bytes: size of the largest record.
    """

    mapping: MutableMapping[Any, dict[str, Any]]
    file: BlockFile | None = None
    record_bytes: int = 0

    def __init__(self, params: Sequence[nn.Parameter], kernel: UpdateKernel):
        self._params = params
        self._kernel = kernel
        self._positions = {param: position for position, param in enumerate(params)}

    def position_of(self, param: nn.Parameter) -> int:
        """Return the position of a parameter in the list of all."""
        return self._positions[param]

    def params_with_state(self) -> list[nn.Parameter]:
        """List all parameters updated so far."""
        return sorted(self.mapping, key=self.position_of)

    def has_state(self, tensor: int) -> bool:
        """Check whether a parameter has been updated."""
        return self._params[tensor] in self.mapping

    @abstractmethod
    def views(self, chunk: int, segment: ChunkSegment, tray: Tray) -> dict[str, Tensor]:
        """Return views (n,) of a segment's state by key; the chunk's record is in the first column of ``tray``."""

    @abstractmethod
    def scalars(self, tensor: int) -> dict[str, Any]:
        """Return a copy of the scalars of a parameter's state."""

    @abstractmethod
    def set_scalars(self, tensor: int, values: dict[str, Any]) -> None:
        """Replace the scalars of a parameter's state."""


class StateInMemory(StatePlace):
    """State in memory, as the base optimizer itself would keep it. See ``StatePlace``."""

    def __init__(self, params: Sequence[nn.Parameter], kernel: UpdateKernel):
        super().__init__(params, kernel)
        self.mapping = defaultdict(dict)

    def views(self, chunk: int, segment: ChunkSegment, tray: Tray) -> dict[str, Tensor]:
        """View the state; see ``StatePlace``."""
        state = self._state(segment.tensor)
        return {key: state[key].view(-1)[segment.start : segment.stop] for key in self._kernel.keys}

    def scalars(self, tensor: int) -> dict[str, Any]:
        """Return the scalars; see ``StatePlace``."""
        state = self._state(tensor)
        return {key: copied(state.get(key, first)) for key, first in self._kernel.scalars.items()}

    def set_scalars(self, tensor: int, values: dict[str, Any]) -> None:
        """Set the scalars; see ``StatePlace``."""
        self._state(tensor).update(values)

    def _state(self, tensor: int) -> dict[str, Any]:
        param = self._params[tensor]
        state = self.mapping[param]
        # Some may be there: a saved state has what the options of its group needed.
        if missing := [key for key in self._kernel.keys if key not in state]:
            # A meta tensor stands for a shard on a disk: its state is in host memory.
            device = "cpu" if param.is_meta else param.device
            formats = {key: self._kernel.format_of(key, param.dtype) for key in missing}
            state |= {key: torch.zeros(param.shape, dtype=dtype, device=device) for key, dtype in formats.items()}
            state |= {key: copied(value) for key, value in self._kernel.scalars.items() if key not in state}
        return state


class StateOnDisk(StatePlace):
    """State in a file with one record per chunk, in which one key follows another. See ``StatePlace``.

    Args:
        params: all parameters.
        kernel: the base optimizer.
        chunks: chunks of the parameters.
        folder: where the file goes.
        is_fast_init: leave the file's blocks untouched until they are first written.
    Raises:
        OffloadError: the disk has no room.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        kernel: UpdateKernel,
        chunks: Sequence[Chunk],
        folder: OffloadFolder,
        is_fast_init: bool,
    ):
        super().__init__(params, kernel)
        self._chunks = chunks
        sizes = [len(kernel.keys) * chunk.num_elements * chunk.itemsize for chunk in chunks]
        self.record_bytes = max(sizes, default=0)
        self.records = self.file = folder.file(_FILE, sizes, is_touched=not is_fast_init)
        # Set by the optimizer, which needs this file's record size for the buffers.
        self.pipeline: RecordPipeline | None = None
        self.is_sound = True
        self._scalars: dict[int, dict[str, Any]] = {}
        self.mapping = _FileMapping(self)

    def views(self, chunk: int, segment: ChunkSegment, tray: Tray) -> dict[str, Tensor]:
        """View the state; see ``StatePlace``."""
        data = tray[0].bytes
        num_elements, itemsize = self._chunks[chunk].num_elements, self._chunks[chunk].itemsize
        whole = data[: len(self._kernel.keys) * num_elements * itemsize].view(self._params[segment.tensor].dtype)
        # Each key has the dtype of its parameter (``require_streamable``), so all have one length in a record.
        firsts = (position * num_elements + segment.offset for position in range(len(self._kernel.keys)))
        length = segment.stop - segment.start
        return {key: whole[first : first + length] for key, first in zip(self._kernel.keys, firsts, strict=True)}

    def scalars(self, tensor: int) -> dict[str, Any]:
        """Return the scalars; see ``StatePlace``."""
        # A parameter that was never updated has the counters of a first step.
        values = self._scalars.get(tensor) or self._kernel.scalars
        return {key: copied(value) for key, value in values.items()}

    def set_scalars(self, tensor: int, values: dict[str, Any]) -> None:
        """Set the scalars; see ``StatePlace``."""
        self._scalars[tensor] = values

    def params_with_state(self) -> list[nn.Parameter]:
        """List parameters with state; see ``StatePlace``."""
        return [self._params[tensor] for tensor in sorted(self._scalars)]

    def has(self, param: nn.Parameter) -> bool:
        """Check whether the file has state of ``param``. Reads nothing."""
        return self._positions.get(param) in self._scalars

    def read(self, param: nn.Parameter) -> dict[str, Any]:
        """Read the state of one parameter, as the base optimizer would keep it, from all its records."""
        tensor, records = self._records_of(param)
        state: dict[str, Any] = {key: torch.empty(param.shape, dtype=param.dtype) for key in self._kernel.keys}

        def copy(position: int, tray: Tray) -> tuple[int, ...]:
            for segment, views in self._views_of(tensor, records[position], tray):
                for key, view in views.items():
                    state[key].view(-1)[segment.start : segment.stop] = view
            return ()

        self._run(records, copy)
        return state | self.scalars(tensor)

    def write(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """Store the state of one parameter, in the form that ``read`` returns; zeros for what it lacks."""
        tensor, records = self._records_of(param)

        def copy(position: int, tray: Tray) -> tuple[int, ...]:
            for segment, views in self._views_of(tensor, records[position], tray):
                for key, view in views.items():
                    if key in state:
                        view.copy_(state[key].reshape(-1)[segment.start : segment.stop])
                    else:
                        view.zero_()
            return (0,)

        self._run(records, copy)
        self._scalars[tensor] = {key: copied(state.get(key, first)) for key, first in self._kernel.scalars.items()}

    def forget(self) -> None:
        """Reset to the state before the first step."""
        self.records.forget()
        self._scalars.clear()

    def _run(self, records: Sequence[int], copy: Any) -> None:
        if not self.is_sound:
            raise OffloadError(UNSOUND)
        assert self.pipeline is not None
        # State is the first column of the optimizer's trays.
        rest = [None] * (self.pipeline.num_columns - 1)
        self.pipeline.run([[Cell(self.records, record), *rest] for record in records], copy)

    def _records_of(self, param: nn.Parameter) -> tuple[int, list[int]]:
        tensor = self.position_of(param)
        return tensor, [index for index, chunk in enumerate(self._chunks) if any(_of(chunk, tensor))]

    def _views_of(self, tensor: int, record: int, tray: Tray) -> Iterator[tuple[ChunkSegment, dict[str, Tensor]]]:
        for segment in _of(self._chunks[record], tensor):
            yield segment, self.views(record, segment, tray)


class _FileMapping(MutableMapping[Any, dict[str, Any]]):
    """``optimizer.state`` of state on a disk: each access to an entry reads or writes the file."""

    def __init__(self, place: StateOnDisk):
        self._place = place

    def __getitem__(self, param: Any) -> dict[str, Any]:
        if not self._place.has(param):
            raise KeyError(param)
        return self._place.read(param)

    def __setitem__(self, param: Any, state: dict[str, Any]) -> None:
        self._place.write(param, state)

    def __delitem__(self, param: Any) -> None:
        raise OffloadError("State of single parameters cannot be removed from NVMe.")

    def __contains__(self, param: object) -> bool:
        # The default would read the state.
        return isinstance(param, nn.Parameter) and self._place.has(param)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._place.params_with_state())

    def __len__(self) -> int:
        return len(self._place.params_with_state())

    def clear(self) -> None:
        """Forget the state of all parameters."""
        self._place.forget()


def copied(value: Any) -> Any:
    """Copy a step counter, whether it is a tensor or a number."""
    return value.clone() if isinstance(value, Tensor) else value


def _of(chunk: Chunk, tensor: int) -> Iterator[ChunkSegment]:
    return (segment for segment in chunk.segments if segment.tensor == tensor)
