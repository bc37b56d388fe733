"""torch's DataLoader as it is used here: a micro-batch per item, clear errors, workers from a clean process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader

from vissl_zero.data.batch import Batch
from vissl_zero.data.dataset import Loaded, MicroBatchDataset
from vissl_zero.data.order import MicroBatchPlan
from vissl_zero.errors import DataError

logger = logging.getLogger(__name__)

# VISSL's own default. A plain fork would copy a process in which gloo, OpenMP and CUDA threads hold locks; spawn would
# import torch anew in every worker. The fork server imports once and has a single thread.
START_METHOD = "forkserver"
_PRELOAD = ["vissl_zero.data.workers", "vissl_zero.data.transforms.pipeline"]


class Plans:
    """The micro-batches to load next; a DataLoader's sampler that can be pointed at another epoch."""

    def __init__(self) -> None:
        self.plans: Iterable[MicroBatchPlan] = ()

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return iter(self.plans)


class BatchStream:
    """Loads planned micro-batches, in the process itself or in workers that stay alive between epochs.

    Args:
        dataset: turns a plan into a batch.
        data_cfg: the resolved DATA block (NUM_DATALOADER_WORKERS, PIN_MEMORY).
    """

    def __init__(self, dataset: MicroBatchDataset, data_cfg: Mapping[str, Any]):
        num_workers = data_cfg["NUM_DATALOADER_WORKERS"]
        self._plans = Plans()
        self._said: set[str] = set()
        if num_workers:
            multiprocessing.get_context(START_METHOD).set_forkserver_preload(_PRELOAD)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            sampler=self._plans,
            batch_size=None,  # an index is a whole micro-batch already
            collate_fn=_as_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context=START_METHOD if num_workers else None,
            pin_memory=data_cfg["PIN_MEMORY"] and torch.cuda.is_available(),
            generator=torch.Generator(),  # otherwise every epoch takes a number from the global generator
        )

    def load(self, plans: Iterable[MicroBatchPlan]) -> Iterator[Batch]:
        """The micro-batches of ``plans``, in order; one such iteration at a time.

        Raises:
            DataError: an image cannot be used, or a worker died.
        """
        self._plans.plans = plans
        try:
            for loaded in self._loader:
                yield self._open(loaded)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(_lost_worker(error, self._loader.num_workers)) from error

    def _open(self, loaded: Loaded) -> Batch:
        for name, reason in loaded.skipped.items():
            if name not in self._said:
                self._said.add(name)
                logger.warning("Skipping %s: %s. The next readable image takes its place.", name, reason)
        if loaded.batch is None:
            raise DataError(loaded.error)
        return loaded.batch


def _as_is(loaded: Any) -> Any:
    return loaded


def _lost_worker(error: RuntimeError, num_workers: int) -> str:
    return (
        f"A data loading worker died ({str(error).split(chr(10), 1)[0].rstrip('.')}). Usually the machine ran out of "
        f"memory, or /dev/shm did: lower config.DATA.NUM_DATALOADER_WORKERS ({num_workers} per process; 0 loads in "
        "the training process itself)."
    )
