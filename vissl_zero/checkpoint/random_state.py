"""The random number generators of a process, as JSON can hold them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vissl_zero.errors import CheckpointError


def random_state(device: torch.device) -> dict[str, Any]:
    """torch's (CPU, and ``device`` if it is a GPU), numpy's and Python's. Bytes are hexadecimal."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what ``random_state`` gave.

    Raises:
        CheckpointError: it is not such a state.
    """
    try:
        torch.set_rng_state(_bytes(state["torch"]))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_bytes(state["cuda"]), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"The checkpoint's random number generators cannot be restored ({error}).") from error


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
