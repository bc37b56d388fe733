"""The comparison of two checkpoints, files of weights or configurations; and the changes that a resume refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vissl_zero.checkpoint.folder import Checkpoint
from vissl_zero.checkpoint.weights import Weights, WeightsFile, weights_of
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.resolve.components import method_of
from vissl_zero.resolve.saved import find

_CHUNK_ELEMENTS = 2**20
_OF_ONE_RANK = "of_rank/"
_FACTS = ("step", "epoch", "epoch_samples", "position", "world_size", "level", "engine", "global_batch", "recipe")


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor.

    Attributes:
        name: name as stored; in a file of weights, without a prefix.
        what: "only in A", "only in B", "shape", "type" or "values".
        text: shapes or types, or the number of elements that differ.
        largest: largest absolute difference of two elements; NaN if one is NaN; None if values were not compared.
    """

    name: str
    what: str
    text: str
    largest: float | None = None


def compare(a: Checkpoint | WeightsFile, b: Checkpoint | WeightsFile) -> Iterator[TensorDifference]:
    """Yield the difference of every tensor that differs, by name. Cost: reads all data, with a few MiB of memory.

    Two checkpoints are compared as a whole, except for tensors of a single rank that only one checkpoint has. In other
    cases, only the weights are compared.
    """
    if isinstance(a, Checkpoint) and isinstance(b, Checkpoint):
        # Under their stored names, so that optimizer state and buffers are compared too.
        left, right = (Weights(store, {name: name for name in store.tensors}) for store in (a, b))
    else:
        left, right = weights_of(a), weights_of(b)
    for name in sorted({*left.tensors, *right.tensors}):
        one, other = left.tensors.get(name), right.tensors.get(name)
        if one is None or other is None:
            # These tensors depend on the number of ranks.
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
    """Return the differences of two checkpoints in step, level, ranks and similar values."""
    return differing(*({name: getattr(side.manifest, name) for name in _FACTS} for side in (a, b)))


def settings_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences of two configurations: key path -> both values; "-" for a missing key."""
    return dict(sorted(differing(settings(a), settings(b), absent="-").items()))


def _values(name: str, a: Weights, b: Weights) -> Iterator[TensorDifference]:
    size, largest, num_different = a.tensors[name].num_elements, 0.0, 0
    for first in range(0, size, _CHUNK_ELEMENTS):
        count = min(_CHUNK_ELEMENTS, size - first)
        x, y = (side.read_range(name, first, count) for side in (a, b))
        # Bits are compared first, so that NaN equals itself; then most chunks need no arithmetic.
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        # Differences of half precision would round, and those of unsigned integers wrap around.
        x, y = x.double(), y.double()
        gap = (x - y).abs()
        gap[x == y] = 0.0  # infinities of one sign
        gap[x.isnan() & y.isnan()] = 0.0
        num_different += int((gap != 0).sum())
        here = float(gap.max())
        # NaN is unequal to itself, and must not be hidden by a number.
        largest = here if here != here or here > largest else largest
    if num_different:
        yield TensorDifference(name, "values", f"{num_different} of {size} elements", largest)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Keys under ``config`` that determine shapes of tensors, and keys that determine images, their order and transforms.
_SHAPES = ("MODEL.TRUNK", "MODEL.HEAD", "MODEL.NON_TRAINABLE_PARAMS", "LOSS.name")
_ADAPTERS = tuple(f"MODEL.LORA.{key}" for key in ("USE_LORA", "R", "LORA_ALPHA", "TARGET_MODULES"))
_ORDER = ("SEED_VALUE", "DATA.ON_BROKEN_IMAGE", "DATA.TRAIN")
_IMG_SIZE, _TRANSFORMS = "DATA.IMG_SIZE", "DATA.TRAIN.TRANSFORMS"
_OTHER_IMAGES = "other images come, in another order or otherwise transformed"
_NOT_ORDER = ("DATA.TRAIN.BATCHSIZE_PER_REPLICA",)  # the batch over all ranks counts
OPTIMIZER = "OPTIMIZER.name"
BATCH = "DATA.TRAIN.BATCHSIZE_PER_REPLICA"
_ROOT = "config."


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key path under ``config`` -> (value in the checkpoint, value here), for every leaf that differs.

    Args:
        saved, now: resolved runs as data (``config.saved.as_data``).
    """
    before, after = (
        {key: value for key, value in settings(tree.get("config", {})).items() if value != {}} for tree in (saved, now)
    )
    return differing(before, after)


def settings(tree: Any, path: str = "") -> dict[str, Any]:
    """Collect values by key path. A list is one value, and so is an empty block (``saved.leaves`` splits lists)."""
    if not isinstance(tree, Mapping) or (path and not tree):
        return {path: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= settings(value, f"{path}.{key}" if path else str(key))
    return flat


def differing(before: Mapping[str, Any], after: Mapping[str, Any], absent: Any = None) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value before, value after) for values that differ; ``absent`` for a missing key."""
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: (before.get(key, absent), after.get(key, absent)) for key in keys}


def refused(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> list[Problem]:
    """List differences in shapes, order of the data or optimizer that ALLOW_CHANGED does not name.

    Args:
        saved, now: see ``differences``.
        allowed: keys, or blocks of keys, of ``CHECKPOINT.ALLOW_CHANGED``.
    """
    differing: dict[str, tuple[Any, Any, str]] = {}
    # Without adapters on either side, their keys have no effect and may differ.
    has_adapters = any(_at(tree, "config.MODEL.LORA.USE_LORA") for tree in (saved, now))
    shapes = [*_SHAPES, *(_ADAPTERS if has_adapters else ())]
    loss = _at(now, "config.LOSS.name")
    if method := method_of(loss):
        shapes += [f"LOSS.{loss}.{key}" for key in method.shape_keys]
    changed = differences(saved, now)
    if _IMG_SIZE in changed and changed.pop(_TRANSFORMS, False):  # named in its place: the crops follow from it
        differing[_IMG_SIZE] = (*changed[_IMG_SIZE], _OTHER_IMAGES)
    for key, (before, after) in changed.items():
        if _is_under(key, shapes):
            differing[key] = (before, after, "the model's or the loss's tensors have other shapes or another meaning")
        elif _is_under(key, _ORDER) and not _is_under(key, _NOT_ORDER):
            differing[key] = (before, after, _OTHER_IMAGES)
    before, after = _at(saved, "optimizer.name"), _at(now, "optimizer.name")
    if before != after:
        differing[OPTIMIZER] = (before, after, "its state does not fit")
    plain = [key.removeprefix(_ROOT) for key in allowed]
    # By images per step: ranks, micro-batches and images per rank may change as long as their product does not.
    batch = [] if _is_under(BATCH, plain) else _other_batch(_at(saved, "global_batch"), now)
    problems = batch + [
        Problem(
            _ROOT + key,
            str(after),
            f"was {before} when the checkpoint was made: {reason}",
            f"Put it back, {_OR_ELSE.format('name', key)}",
        )
        for key, (before, after, reason) in differing.items()
        if not _is_under(key, plain)
    ]
    return _of_another_recipe(saved.get("recipe"), now.get("recipe"), problems) or problems


def _of_another_recipe(before: Any, after: Any, problems: Sequence[Problem]) -> list[Problem]:
    """Sum up the differences of another recipe, which nobody would put back one by one; empty if it is the same one."""
    if not before or before == after or len(problems) < 2:
        return []
    keys, others = ", ".join(problem.key for problem in problems[:3]), len(problems) - 3
    which = f"{keys}{f' and {others} more' if others > 0 else ''} differ"
    must = f"must be the recipe that ran in this folder, {before}: its checkpoint does not continue here, as {which}"
    return [Problem("config", str(after), must, "Name another run folder: config.CHECKPOINT.DIR=<folder>.")]


_OR_ELSE = "{} another run folder, or allow it: config.CHECKPOINT.ALLOW_CHANGED=[{}]."


def _other_batch(before: Any, now: Mapping[str, Any]) -> list[Problem]:
    """Return a sentence if a step has another number of images; the cause may be the number of processes."""
    if before == now["global_batch"]:
        return []
    ranks, micro = now["world_size"], now["accumulation_steps"]
    got = f"{now['batch_per_rank']} x {ranks} processes x {micro} micro-batches = {now['global_batch']}"
    fix = _OR_ELSE.format("Name", BATCH)
    if isinstance(before, int) and before > 0 and before % (ranks * micro) == 0:
        fix = f"Write {_ROOT}{BATCH}={before // (ranks * micro)}, {_OR_ELSE.format('name', BATCH)}"
    return [Problem(_ROOT + BATCH, got, f"must make steps of {before} images, as when the checkpoint was made", fix)]


def require_resumable(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse the differences that ``refused`` lists.

    Raises:
        ConfigError: there are such differences; the message names all.
    """
    if problems := refused(saved, now, allowed):
        raise ConfigError(problems)


def describe(differing: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Format a line for each difference."""
    return [
        f"config.{key}: {before} in the checkpoint, {after} now" for key, (before, after) in sorted(differing.items())
    ]


def _is_under(key: str, blocks: Sequence[str]) -> bool:
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def _at(data: Mapping[str, Any], place: str) -> Any:
    value = find(data, place)
    return None if value is None else value[0][value[1]]
