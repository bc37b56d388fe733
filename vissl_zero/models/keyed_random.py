"""Random numbers that are a function of (seed, step, sample, layer, crop, element) and of nothing else.

A sample meets the same dropout mask whichever rank, micro-batch row or recomputation it lands in, so a run with dropout
is the same at every level and world size. The generator is the finaliser of splitmix64 (Steele, Lea, Flood 2014,
https://doi.org/10.1145/2714064.2660195) over a counter, in int64 tensor arithmetic, which wraps around alike on CPU and
GPU.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_NUM_BITS = 53


@dataclass(frozen=True)
class _RandomKey:
    """What the rows of the current micro-batch are keyed by."""

    seed: int
    step: int
    sample_ids: Tensor


# Not thread-local: on a GPU, a checkpointed unit is recomputed in autograd's own thread and needs the same key.
_current: _RandomKey | None = None
_scope = threading.local()


def set_random_key(seed: int, step: int, sample_ids: Tensor) -> None:
    """Key every keyed layer by this micro-batch, until the next call.

    The loop calls it before each forward pass in training, and leaves it alone until the backward pass has ended.

    Args:
        seed: of the run.
        step: optimizer step, from 0.
        sample_ids: (B,) int64, the index of each of this rank's samples in the source.
    """
    global _current
    _current = _RandomKey(seed, step, sample_ids)


@contextmanager
def resolution_scope(index: int) -> Iterator[None]:
    """Tell keyed layers which resolution of the list they are applied to; ``Unit`` does."""
    before = getattr(_scope, "resolution", 0)
    _scope.resolution = index
    try:
        yield
    finally:
        _scope.resolution = before


def stable_hash(*parts: object) -> int:
    """64 bits of SHA-256 over the parts' text: equal in every process and Python version, unlike ``hash``."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def keyed_bits(rows: int, row_size: int, layer: str, device: torch.device) -> Tensor:
    """Uniform 53-bit integers for the rows of a crop-major batch.

    Row j belongs to sample ``j % B`` and crop ``j // B`` of the current resolution, B being the number of sample ids.

    Args:
        rows: number of rows, a multiple of B.
        row_size: numbers per row.
        layer: full name of the layer that asks.
    Returns:
        (rows, row_size) int64 in [0, 2**53).
    Raises:
        RuntimeError: no key was set, or it is for another number of samples.
    """
    if _current is None:
        raise RuntimeError(
            "A keyed layer ran in training without a key: call set_random_key(seed, step, sample_ids) first."
        )
    sample_ids = _current.sample_ids.to(device)
    num_samples = len(sample_ids)
    if num_samples == 0 or rows % num_samples:
        if rows == 0:
            return torch.zeros(0, row_size, dtype=torch.int64, device=device)
        raise RuntimeError(f"{rows} rows are no multiple of the {num_samples} samples given to set_random_key.")
    resolution = getattr(_scope, "resolution", 0)
    base = stable_hash(_current.seed, _current.step, layer, resolution)
    row = torch.arange(rows, device=device)
    row_key = _mix(sample_ids[row % num_samples] * _signed(_GAMMA) + _signed(base))
    row_key = _mix(row_key + (row // num_samples) * _signed(_GAMMA))
    element = torch.arange(1, row_size + 1, device=device) * _signed(_GAMMA)
    return _shift_right(_mix(row_key[:, None] + element), 64 - _NUM_BITS)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, sample, layer, crop).

    ``build_model`` puts one in the place of every ``nn.Dropout`` and names it.

    Args:
        p: probability of an element to be zeroed; the others are divided by 1 - p.
        layer: full name of this layer in the model, part of the key.
    """

    def __init__(self, p: float = 0.5, layer: str = ""):
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability must be in [0, 1), got {p}")
        self.p = p
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x (rows, ...) in training; the identity in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        rows = x.shape[0]
        row_size = x[0].numel() if rows else 0
        # Integers are compared, so the mask is the same in every floating-point format.
        keep = keyed_bits(rows, row_size, self.layer, x.device) >= int(self.p * 2**_NUM_BITS)
        return x * keep.view(x.shape).to(x.dtype) / (1.0 - self.p)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"p={self.p}, layer={self.layer!r}"


def key_dropout(model: nn.Module) -> None:
    """Replace every ``nn.Dropout`` in ``model`` by a ``KeyedDropout`` named after its place; in place."""
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                full_name = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, KeyedDropout(child.p, full_name))


def _mix(x: Tensor) -> Tensor:
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; the one of int64 tensors repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value
