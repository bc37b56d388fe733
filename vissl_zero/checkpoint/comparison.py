"""Two checkpoints, or files of weights, side by side: what is in one only, and by how much the rest differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vissl_zero.checkpoint.config_difference import differing, settings
from vissl_zero.checkpoint.reader import Checkpoint
from vissl_zero.checkpoint.weights import Weights, WeightsFile, weights_of

_CHUNK_ELEMENTS = 2**20
_OF_ONE_RANK = "of_rank/"
_FACTS = ("step", "epoch", "epoch_samples", "position", "world_size", "level", "engine", "global_batch", "recipe")


@dataclass(frozen=True)
class TensorDifference:
    """What is different about one tensor.

    Attributes:
        name: as stored; plain in a file of weights.
        what: "only in A", "only in B", "shape", "type" or "values".
        text: shapes or types, or how many elements differ.
        largest: largest absolute difference of two elements; NaN where a NaN meets a number; None without values.
    """

    name: str
    what: str
    text: str
    largest: float | None = None


def compare(a: Checkpoint | WeightsFile, b: Checkpoint | WeightsFile) -> Iterator[TensorDifference]:
    """Every tensor that differs, by name, read in chunks: a few MiB of memory whatever the size.

    Two checkpoints are compared as a whole, but for what belongs to single ranks and is in one of them only; anything
    else by its weights.
    """
    is_whole = isinstance(a, Checkpoint) and isinstance(b, Checkpoint)
    left, right = (_everything(store) if is_whole else weights_of(store) for store in (a, b))
    for name in sorted({*left.tensors, *right.tensors}):
        one, other = left.tensors.get(name), right.tensors.get(name)
        if one is None or other is None:
            if not name.startswith(_OF_ONE_RANK):
                held = one or other
                assert held is not None
                yield TensorDifference(name, f"only in {'A' if one else 'B'}", f"{held.shape}")
        elif one.shape != other.shape:
            yield TensorDifference(name, "shape", f"{one.shape} and {other.shape}")
        else:
            yield from _values(name, left, right)
            if one.dtype != other.dtype:
                yield TensorDifference(name, "type", f"{_plain(one.dtype)} and {_plain(other.dtype)}")


def facts_that_differ(a: Checkpoint, b: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Step, level, ranks and the like of two checkpoints, where they differ."""
    pairs = {name: (getattr(a.manifest, name), getattr(b.manifest, name)) for name in _FACTS}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def settings_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key path -> values of two configurations, where they differ; "-" for a key that one of them lacks."""
    return dict(sorted(differing(settings(a), settings(b), absent="-").items()))


def _everything(store: Checkpoint | WeightsFile) -> Weights:
    return Weights(store, {name: name for name in store.tensors})


def _values(name: str, a: Weights, b: Weights) -> Iterator[TensorDifference]:
    size, largest, num_different = a.tensors[name].num_elements, 0.0, 0
    for first in range(0, size, _CHUNK_ELEMENTS):
        count = min(_CHUNK_ELEMENTS, size - first)
        x, y = (side.read_range(name, first, count) for side in (a, b))
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        x, y = x.double(), y.double()
        gap = (x - y).abs()
        gap[x == y] = 0.0  # infinities of one sign
        gap[x.isnan() & y.isnan()] = 0.0
        num_different += int((gap != 0).sum())
        here = float(gap.max())
        largest = here if here != here or here > largest else largest
    if num_different:
        yield TensorDifference(name, "values", f"{num_different} of {size} elements", largest)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
