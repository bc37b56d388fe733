"""``weights.safetensors``: the trained model's whole parameters and buffers under their plain names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

import vissl_zero
from vissl_zero.atomic import replacing
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import CheckpointError

FILE_NAME = "weights.safetensors"


class WeightsFile(Hook):
    """Gathers the whole model at the end of the run and writes it on rank 0.

    Cost: the model is gathered tensor by tensor (rank 0 holds all of it in CPU memory), then written once.
    """

    def on_end(self, run: Run) -> None:
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; the file has their mean
        state = run.sharded.full_state()  # a collective: every rank
        if run.is_main:
            metadata = {"vissl_zero": vissl_zero.__version__, "recipe": run.plan.recipe, "step": str(run.step)}
            try:
                save_weights(state, run.folder / FILE_NAME, metadata)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{run.folder / FILE_NAME} cannot be written ({error}). Make room; the same command writes it from "
                    "the last checkpoint."
                ) from error


def save_weights(state: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors as one safetensors file, whole or not at all.

    Args:
        state: CPU tensors by full name; tied ones (one storage, several names) are written under each name.
        path: where to; an older file is replaced.
        metadata: strings for the file's header.
    """
    from safetensors.torch import save_file

    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in state.items():
        address = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory.
        separate[name] = tensor.clone(memory_format=torch.contiguous_format) if address in seen else tensor.contiguous()
        seen.add(address)
    with replacing(path) as temporary:
        save_file(separate, temporary, metadata=metadata)
