"""The user's dictionary in a checkpoint: the output of ``torch.save``, stored as a tensor of bytes.

The tensor is in rank 0's file, so that checksums, completeness and commands treat it as all others. torch's restricted
reader (``weights_only``) reads it, which runs no code.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from vissl_zero import collectives
from vissl_zero.checkpoint.folder import Checkpoint
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state.saved_state import Part

NAME = "extra/torch_save"


def extra_parts(extra: dict[str, Any] | None) -> list[Part]:
    """Return the tensor of rank 0's ``extra``; other ranks store nothing. Collective.

    Raises:
        CheckpointError: on every rank, if rank 0's is no dict or has values that ``read_extra`` could not read.
    Cost: two broadcasts of a sentence.
    """
    data, problem = None, ""
    if collectives.rank() == 0 and extra is not None:
        try:
            data = _packed(extra)
        except CheckpointError as error:
            problem = str(error)
    if problem := collectives.broadcast_object(problem):
        raise CheckpointError(problem)
    return [] if data is None else [Part.of(NAME, data)]


def read_extra(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Read the dictionary, with tensors on the CPU; None if none was saved. Not collective.

    Raises:
        CheckpointError: the dictionary is damaged, or has more than data.
    """
    if NAME not in checkpoint.tensors:
        return None
    try:
        extra = _unpacked(checkpoint.read(NAME))
    except Exception as error:  # a damaged or hostile file may raise any error in torch; no code was run
        raise CheckpointError(
            f"extra in {checkpoint.path} holds more than data, or is damaged. Nothing was run."
        ) from error
    if not isinstance(extra, dict):
        raise CheckpointError(f"extra in {checkpoint.path} is damaged: it is no dict.")
    return extra


def _packed(extra: Any) -> Tensor:
    """Return the dictionary as bytes, (num_bytes,) uint8; they are read back once."""
    if not isinstance(extra, dict):
        raise CheckpointError(f"extra must be a dict (got {type(extra).__name__}). Write save(folder, extra={{...}}).")
    for key, value in extra.items():
        # torch.save would write it, but as rank 0's rows alone.
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
            raise CheckpointError(
                f"extra[{key!r}] holds a sharded tensor, of which rank 0 has a part. Leave it out: save() writes the "
                "model and the optimizer."
            )
    if (data := _written(extra)) is not None:
        return data
    # Tried one by one only after a failure: torch.save of a large dict takes time.
    key = next((key for key, value in extra.items() if _written({key: value}) is None), next(iter(extra)))
    raise CheckpointError(
        f"extra[{key!r}] ({type(extra[key]).__name__}) cannot be read back without running code. Write its "
        "state_dict(), or numbers, strings, tensors, lists, tuples and dicts (of a NumPy array, .tolist())."
    )


def _written(extra: dict[str, Any]) -> Tensor | None:
    """Return the bytes, or None if they could not be read back."""
    file = io.BytesIO()
    try:
        torch.save(extra, file)
        # A copy that can be written to: torch warns of tensors over read-only memory.
        data = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        _unpacked(data)
    except Exception:  # noqa: BLE001 - of pickle, or of any object in it
        return None
    return data


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
