"""Running a sharded model over images without training it: every rank its share, every rank equally often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import rich
import torch
from torch import nn

from vissl_zero.data.batch import Batch
from vissl_zero.data.eval_images import EvalImages
from vissl_zero.data.order import rank_slice
from vissl_zero.engine.hook import Run


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode and no gradients are recorded; then every module is as it was before.

    Module by module, so that batch norm which a recipe keeps in evaluation mode stays there.
    """
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: sharded parameters are gathered into views
            yield
    finally:
        for module, training in was_training:
            module.training = training


_SECONDS_BETWEEN_LINES = 5.0


def own_batches(run: Run, images: EvalImages) -> Iterator[tuple[Batch, int]]:
    """This rank's batches on its device, each with the number of samples in it that are this rank's own.

    Rank 0 says every few seconds how far it is: nothing else is seen meanwhile.

    The number is 0 for the copy that a rank without a sample gets, so that all ranks call the model equally often:
    call it on every batch, whatever the number is.
    """
    dtype = getattr(torch, run.plan.sharding.precision.master)
    began, said, num_done = time.monotonic(), time.monotonic(), 0
    for batch in images.batches(run.plan.batch_per_rank * run.world_size, run.rank, run.world_size):
        own = rank_slice(batch.num_global, run.rank, run.world_size)
        yield batch.to(run.device, dtype), own.stop - own.start
        num_done, now = num_done + batch.num_global, time.monotonic()
        if run.is_main and now - said >= _SECONDS_BETWEEN_LINES and num_done < len(images):
            said = now
            text = f"evaluating: {num_done:,} of {len(images):,} images, {num_done / (now - began):.0f} images/s"
            rich.get_console().print(text, markup=False, highlight=False, soft_wrap=True)
