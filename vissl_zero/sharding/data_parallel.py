"""torch's DistributedDataParallel, for the levels that keep gradients whole."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vissl_zero import collectives


class DataParallel:
    """Averages gradients over all ranks, and changes nothing else; on a single rank, nothing at all.

    Attributes:
        model: what to call.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        self.model = module
        self._ddp: DistributedDataParallel | None = None
        self._is_graph_known = False
        if collectives.world_size() > 1:
            self.model = self._ddp = DistributedDataParallel(
                module,
                device_ids=[device] if device.type == "cuda" else None,
                **_without_buffer_sync(),
                gradient_as_bucket_view=True,
                # The first backward pass tells which parameters the loss does not use; without, their whole bucket
                # would never be reduced. find_unused_parameters would ask in every step, and takes whatever an output
                # that the loss ignores could reach for used.
                static_graph=True,
            )

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Gradients are averaged in the backward pass of the last micro-batch, and in the very first one of all.

        DDP learns the static graph in a backward pass that communicates and fails if the first one does not. Averaging
        what is an average already changes nothing, so the sum of micro-batches stays right.
        """
        if self._ddp is None or is_last or not self._is_graph_known:
            yield
        else:
            with self._ddp.no_sync():
                yield
        self._is_graph_known = True


def _without_buffer_sync() -> dict[str, Any]:
    """DDP would overwrite every rank's running statistics by rank 0's before each forward pass; torch 2.13 renamed it.

    Batch norm is synchronised by ``sharding/batch_norm.py``, or differs between ranks on purpose.
    """
    new_name = "forward_sync_buffers"
    is_new = new_name in inspect.signature(DistributedDataParallel.__init__).parameters
    return {new_name if is_new else "broadcast_buffers": False}
