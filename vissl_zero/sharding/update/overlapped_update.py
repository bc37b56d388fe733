"""The update on the host of a model on a GPU, overlapped with the copies of updated rows to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from vissl_zero.optim.update_rule import ELEMENT_WISE, has_hooks, with_params
from vissl_zero.sharding.offload.parameter_store import HostShard
from vissl_zero.sharding.state.shard import Shard

PIECE_BYTES = 2**25  # of rows; PCIe 4 copies them in about a millisecond


class OverlappedUpdate:
    """The optimizer's step on shards in host memory, and the copies to the model (``Shard.publish``).

    Rows travel to the GPU on a stream of their own, while the host updates the next parameters. The GPU waits once, for
    the last piece of ``PIECE_BYTES``. The host updates more slowly than the bus copies, so earlier pieces have arrived
    by then, and a wait for each unit would save no more than a millisecond.

    Only torch's element-wise optimizers run in pieces, with the same bits; others update all parameters at once.

    Args:
        optimizer: over the shards' ``local`` tensors.
        shards: the trained parameters.
        copies: stream for the copies.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[Shard], copies: CopyStream):
        self._optimizer, self._copies = optimizer, copies
        # Step hooks of the loop would run once per piece.
        is_cut = type(optimizer) in ELEMENT_WISE and not has_hooks(optimizer)
        self._pieces = [_Piece(optimizer, piece) for piece in _cut(shards)] if is_cut else []
        self._shards = shards

    def run(self) -> None:
        """Update all shards that have a gradient, and publish all."""
        with self._copies.open():
            if not self._pieces:
                self._optimizer.step()
                _publish(self._shards)
            for piece in self._pieces:
                with with_params(self._optimizer, piece.params):
                    self._optimizer.step()
                _publish(piece.shards)


class CopyStream:
    """A stream of a GPU for copies from host memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Issue copies inside on this stream; later work of the device waits for them. A context.

        Waits for the device first.
        """
        main = torch.cuda.current_stream(self._device)
        # The backward pass reads the rows on the device, and the last copies read the host's; both are overwritten
        # inside. Gradients have arrived on the host, so the wait is short.
        main.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            main.wait_stream(self._stream)


def overlapped_update(optimizer: torch.optim.Optimizer, shards: Sequence[Shard]) -> OverlappedUpdate | None:
    """Prepare the overlapped update of shards with a copy on a GPU; None without such shards."""
    device = next((shard.on_device.device for shard in shards if isinstance(shard, HostShard)), None)
    copies = None if device is None else copy_stream(device)
    return None if copies is None else OverlappedUpdate(optimizer, shards, copies)


def copy_stream(device: torch.device) -> CopyStream | None:
    """Open a stream for copies to ``device``; None if it has no streams."""
    return CopyStream(device) if device.type == "cuda" else None


class _Piece:
    """Parameters that are updated together, by group of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[Shard]):
        self.shards = shards
        chosen = {id(shard.local) for shard in shards}
        # One list per group of the optimizer, also if it is empty, as ``with_params`` expects.
        self.params: list[list[nn.Parameter]] = [
            [param for param in group["params"] if id(param) in chosen] for group in optimizer.param_groups
        ]


def _publish(shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.publish()


def _cut(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Split shards into pieces of at least ``PIECE_BYTES``; the last one may have less."""
    pieces: list[list[Shard]] = [[]]
    room = PIECE_BYTES
    for shard in shards:
        if room <= 0:
            pieces.append([])
            room = PIECE_BYTES
        pieces[-1].append(shard)
        room -= shard.local.nbytes
    return pieces
