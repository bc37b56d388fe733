"""Random numbers that are a function of (seed, step, sample, layer, crop, element) only.

A sample has the same dropout mask on any rank, in any micro-batch row and in a recomputation, so a run with dropout is
the same at every level and world size. ``key_random_layers`` replaces the usual random layers by such layers;
``refuse_unkeyed_randomness`` detects a layer that still draws from torch's global generator.

The generator is the finalizer of splitmix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195) over a
counter, in int64 tensor arithmetic, which wraps around in the same way on CPU and GPU.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.packing import Shapes, packed, unpacked

# splitmix64's increment, shifts and factors (https://doi.org/10.1145/2660193.2660195). Its output is computed from the
# counter alone, so any element can be drawn without those before it.
_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
NUM_BITS = 53  # float64 represents them exactly, and int64 has ten bits left for an order before them
# Components that sharding adds to the names of modules.
_WRAPPER_NAMES = ("module", "_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module")


class Place(NamedTuple):
    """The position of a forward pass's tensor in its micro-batch.

    Attributes:
        resolution: index of the resolution in the list.
        first_row: first row of the tensor within its resolution.
    """

    resolution: int
    first_row: int


@dataclass(frozen=True)
class _RandomKey:
    """The key of the current micro-batch's rows; ``places``: position of each tensor, if the pass has a part of it."""

    seed: int
    step: int
    sample_ids: Tensor
    places: tuple[Place, ...] = ()


# Not thread-local: on a GPU, a checkpointed unit is recomputed in autograd's own thread and needs the same key.
_current: _RandomKey | None = None
# Thread-local, unlike the key: each recomputed unit enters its own scopes again, and another thread may be inside
# others.
_scope = threading.local()


def set_random_key(seed: int, step: int, sample_ids: Tensor) -> None:
    """Set the key of every keyed layer to this micro-batch, until the next call.

    The loop calls it before each forward pass in training, and not again before the backward pass has ended.

    Args:
        seed: seed of the run.
        step: optimizer step, from 0.
        sample_ids: (B,) int64, the index of each of this rank's samples in the source.
    """
    global _current
    _current = _RandomKey(seed, step, sample_ids)


@contextmanager
def rows_in_place(places: Sequence[Place] = ()) -> Iterator[None]:
    """Key rows as in a pass over the whole micro-batch, while a model runs on a part. A context manager.

    Args:
        places: position of each tensor in the model's list; empty: all tensors are whole.
    """
    global _current
    before = _current
    assert before is not None, "call set_random_key first"
    _current = replace(before, places=tuple(places))
    try:
        yield
    finally:
        _current = before


@contextmanager
def resolution_scope(index: int, num_rows: int | None = None) -> Iterator[None]:
    """Set the resolution of keyed layers, as ``Unit`` does. A context manager.

    Args:
        index: index of the resolution in the list.
        num_rows: rows of its batch (crops times samples). A layer inside may see a multiple of them: the windows of
            each row, consecutively.
    """
    before = current_scope()
    _scope.resolution, _scope.num_rows = index, num_rows
    try:
        yield
    finally:
        _scope.resolution, _scope.num_rows = before


def current_scope() -> tuple[int, int | None]:
    """Return the arguments of the current ``resolution_scope``, to enter it again in a recomputation."""
    return getattr(_scope, "resolution", 0), getattr(_scope, "num_rows", None)


@contextmanager
def packed_scope(shapes: Shapes) -> Iterator[None]:
    """Set the shapes of packed tokens for keyed layers. A context manager.

    Args:
        shapes: (images, tokens per image) of each resolution.
    """
    _scope.shapes = shapes
    try:
        yield
    finally:
        _scope.shapes = ()


def _by_resolution(drop: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``drop`` to each resolution of packed tokens separately, or else to ``x``."""
    shapes: Shapes = getattr(_scope, "shapes", ())
    if not shapes:
        return drop(x)
    outputs = []
    for index, part in enumerate(unpacked(x, shapes)):
        with resolution_scope(index, len(part)):
            outputs.append(drop(part))
    return packed(outputs)


def stable_hash(*parts: object) -> int:
    """Hash the strings of the parts to 64 bits of SHA-256, unlike ``hash`` the same in every process and version."""
    # A separator that no name contains: ("a", "bc") and ("ab", "c") must not have the same hash.
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def keyed_bits(
    rows: int, row_size: int, layer: str, device: torch.device, epoch: int | None = None, by_sample: bool = True
) -> Tensor:
    """Draw uniform 53-bit integers for the rows of a crop-major batch.

    Row j belongs to sample ``j % B`` and crop ``j // B`` of the current resolution, B being the number of sample ids.
    Inside a unit, attention in windows has w times the rows of the batch: row j is then window ``j % w`` of row
    ``j // w``.

    Args:
        rows: number of rows, a multiple of B and, inside a unit, of the rows of its batch.
        row_size: numbers per row.
        layer: full name of the calling layer, part of the key.
        epoch: replaces the optimizer step in the key, as for augmentations; None: the step.
        by_sample: False: one row for each crop, shared by all samples.
    Returns:
        (rows, row_size) int64 in [0, 2**53).
    Raises:
        RuntimeError: no key is set, or it has another number of samples.
    """
    return _bits(rows, row_size, layer, device, epoch, by_sample)


def element_bits(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Draw uniform 53-bit integers for consecutive elements of a tensor, the same for any split of the tensor.

    Args:
        key: key of the tensor and the step, from ``stable_hash``.
        first: index of the first element in the flattened full tensor.
        count: number of elements.
    Returns:
        (count,) int64 in [0, 2**53).
    """
    # From 1: splitmix64 adds its increment before each output.
    counter = torch.arange(first + 1, first + count + 1, device=device).mul_(_signed(_GAMMA)).add_(_signed(key))
    return _shift_right(_mix(counter), 64 - NUM_BITS)


def change_drawing(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Wrap the function that draws; only the first call in a process has an effect."""
    # For compilation: a traced draw would treat the step's number as a constant.
    global _bits
    if _bits is _draw:
        _bits = wrap(_draw)


def _draw(
    rows: int, row_size: int, layer: str, device: torch.device, epoch: int | None, by_sample: bool = True
) -> Tensor:
    if _current is None:
        raise RuntimeError(
            "A keyed layer ran in training without a key: call set_random_key(seed, step, sample_ids) first."
        )
    sample_ids = _current.sample_ids.to(device) if by_sample else torch.zeros(1, dtype=torch.int64, device=device)
    num_samples = len(sample_ids)
    # Before the checks: a pass over a part of a micro-batch may have no rows of a resolution.
    if rows == 0:
        return torch.zeros(0, row_size, dtype=torch.int64, device=device)
    if num_samples == 0 or (rows % num_samples and not _current.places):
        raise RuntimeError(f"{rows} rows are no multiple of the {num_samples} samples given to set_random_key.")
    num_windows, rest = divmod(rows, getattr(_scope, "num_rows", None) or rows)
    if rest or num_windows == 0:
        raise RuntimeError(f"{rows} rows in {layer!r} are no multiple of the {_scope.num_rows} rows of the batch.")
    resolution, first_row = getattr(_scope, "resolution", 0), 0
    if _current.places:
        resolution, first_row = _current.places[resolution]
    moment = _current.step if epoch is None else f"epoch {epoch}"
    # One hash on the host for what all rows share. The device mixes in sample, crop and window in separate rounds: a
    # sum of two of them would be the same for other pairs.
    base = stable_hash(_current.seed, moment, layer, resolution)
    row = first_row + torch.arange(rows, device=device) // num_windows
    row_key = _mix(sample_ids[row % num_samples] * _signed(_GAMMA) + _signed(base))
    row_key = _mix(row_key + (row // num_samples) * _signed(_GAMMA))
    if num_windows > 1:
        row_key = _mix(row_key + (torch.arange(rows, device=device) % num_windows) * _signed(_GAMMA))
    element = torch.arange(1, row_size + 1, device=device) * _signed(_GAMMA)
    return _shift_right(_mix(row_key[:, None] + element), 64 - NUM_BITS)


_bits: Callable[..., Tensor] = _draw


class _Keyed(nn.Module):
    """Base of keyed layers, with their ``extra_repr``."""

    p: float
    layer: str

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"p={self.p}, layer={self.layer!r}"


class KeyedDropout(_Keyed):
    """Dropout whose mask is a function of (seed, step, sample, layer, crop).

    ``key_random_layers`` replaces every ``nn.Dropout`` by one, and sets its name.

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
        return x if not self.training or self.p == 0.0 else _by_resolution(self._drop, x)

    def _drop(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        row_size = x[0].numel() if rows else 0
        # Integers are compared, so the mask is the same in every floating-point format.
        keep = keyed_bits(rows, row_size, self.layer, x.device) >= int(self.p * 2**NUM_BITS)
        return x * keep.view(x.shape).to(x.dtype) / (1.0 - self.p)


class KeyedDropPath(_Keyed):
    """Stochastic depth (https://arxiv.org/abs/1603.09382) keyed by (seed, step, sample, layer, crop).

    Args:
        p: probability of a row to be zeroed.
        layer: full name of this layer in the model, part of the key.
        scale_by_keep: divide the other rows by 1 - p.
    """

    def __init__(self, p: float = 0.0, layer: str = "", scale_by_keep: bool = True):
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"the probability of dropping a path must be in [0, 1), got {p}")
        self.p = p
        self.layer = layer
        self.scale_by_keep = scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        """Drop rows of x (rows, ...) in training; the identity in evaluation."""
        return x if not self.training or self.p == 0.0 else _by_resolution(self._drop, x)

    def _drop(self, x: Tensor) -> Tensor:
        keep = keyed_bits(x.shape[0], 1, self.layer, x.device) >= int(self.p * 2**NUM_BITS)
        kept = x * keep.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
        return kept / (1.0 - self.p) if self.scale_by_keep else kept


def key_random_layers(model: nn.Module) -> None:
    """Replace the random layers of ``model`` by keyed layers with their full names; in place.

    Random layers are ``nn.Dropout``, timm's ``DropPath``, torchvision's ``StochasticDepth`` by row, and timm's
    attention dropout, for which fused attention is switched off.
    """
    for name, module in list(model.named_modules()):
        # Lists, because children are replaced during the loop.
        for child_name, child in list(module.named_children()):
            keyed = _keyed(child, f"{name}.{child_name}" if name else child_name)
            if keyed is not None:
                setattr(module, child_name, keyed)
        # Fused attention reads only the layer's probability, and draws from the global generator.
        if getattr(module, "fused_attn", False) and getattr(getattr(module, "attn_drop", None), "p", 0.0):
            module.fused_attn = False


def _keyed(layer: nn.Module, name: str) -> nn.Module | None:
    """Build the keyed layer that replaces ``layer``; None if ``layer`` stays."""
    if type(layer) is nn.Dropout:
        return KeyedDropout(layer.p, name)
    kind = type(layer).__name__
    # By name: many repositories have a copy of timm's class.
    if kind == "DropPath" and isinstance(p := getattr(layer, "drop_prob", None), int | float):
        return KeyedDropPath(float(p), name, bool(getattr(layer, "scale_by_keep", True)))
    # In the mode "batch", all rows share a draw, which no key of a sample could give.
    if kind == "StochasticDepth" and getattr(layer, "mode", None) == "row":
        return KeyedDropPath(float(layer.p), name)  # type: ignore[arg-type]
    return None


@contextmanager
def refuse_unkeyed_randomness(model: nn.Module) -> Iterator[None]:
    """Refuse a layer of ``model`` that draws from torch's global generator in training. A context manager.

    Such a layer would make the run depend on the number of ranks, the level, recomputation and resuming. Cost: compares
    the generators before and after each module.

    Args:
        model: wrapped or not.
    Raises:
        ConfigError: on leaving the forward pass of the innermost module that drew.
    """
    before: dict[nn.Module, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(_remember, before)))
        handles.append(module.register_forward_hook(partial(_compare, before, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _remember(before: dict[nn.Module, list[Tensor]], module: nn.Module, _inputs: object) -> None:
    if module.training:
        before[module] = _generator_states()


def _compare(
    before: dict[nn.Module, list[Tensor]], name: str, module: nn.Module, _inputs: object, _output: object
) -> None:
    states = before.pop(module, None)
    if states is None or all(torch.equal(one, other) for one, other in zip(states, _generator_states(), strict=True)):
        return
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)
    must = "must draw no number from torch's global generator: results would depend on the number of ranks"
    fix = (
        "Use nn.Dropout, timm's DropPath, KeyedDropout or KeyedDropPath, or draw with keyed_bits of "
        "vissl_zero.models.keyed_random; or set its probability to 0."
    )
    raise ConfigError([Problem(f"layer {plain or 'model'!r}", type(module).__name__, must, fix)])


def _generator_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    # Asking for the state would start CUDA on a rank that computes on the CPU.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _mix(x: Tensor) -> Tensor:
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically; torch's shift of int64 is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Reinterpret the 64 bits as int64."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value
