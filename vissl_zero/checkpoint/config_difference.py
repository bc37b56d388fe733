"""How the configuration of a checkpoint and of the run that wants to go on from it differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vissl_zero.config.plain_tree import find
from vissl_zero.errors import ConfigError, Problem

# Keys under ``config`` that decide shapes of tensors, and keys that decide which images come when and how they look.
SHAPES = (
    "MODEL.TRUNK",
    "MODEL.HEAD",
    "MODEL.NON_TRAINABLE_PARAMS",
    "LOSS.name",
    "LOSS.swav_loss.num_prototypes",
    "LOSS.swav_loss.embedding_dim",
    "LOSS.swav_loss.queue.queue_length",
    "LOSS.swav_loss.crops_for_assign",
)
ORDER = ("SEED_VALUE", "DATA.ON_BROKEN_IMAGE", "DATA.TRAIN")
_NOT_ORDER = ("DATA.TRAIN.BATCHSIZE_PER_REPLICA",)  # the batch over all ranks counts
OPTIMIZER = "OPTIMIZER.name"
BATCH = "DATA.TRAIN.BATCHSIZE_PER_REPLICA"
_ROOT = "config."


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key path under ``config`` -> (value in the checkpoint, value here), for every leaf that differs.

    Args:
        saved, now: resolved runs as data (``config.saved.as_data``).
    """
    before, after = (
        {key: value for key, value in settings(tree.get("config", {})).items() if value != {}} for tree in (saved, now)
    )
    return differing(before, after)


def settings(tree: Any, path: str = "") -> dict[str, Any]:
    """Values by key path. A list is one value, and so is an empty block (``plain_tree.leaves`` takes lists apart)."""
    if not isinstance(tree, Mapping) or (path and not tree):
        return {path: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= settings(value, f"{path}.{key}" if path else str(key))
    return found


def differing(before: Mapping[str, Any], after: Mapping[str, Any], absent: Any = None) -> dict[str, tuple[Any, Any]]:
    """Key -> (value before, value after) where they differ; ``absent`` for one that is not there."""
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: (before.get(key, absent), after.get(key, absent)) for key in keys}


def refused(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> list[Problem]:
    """Differences that would change shapes, the order of the data or the optimizer, and that nobody has allowed.

    Args:
        saved, now: as for ``differences``.
        allowed: ``CHECKPOINT.ALLOW_CHANGED``: keys, or blocks of keys.
    """
    found: dict[str, tuple[Any, Any, str]] = {}
    for key, (before, after) in differences(saved, now).items():
        if _is_under(key, SHAPES):
            found[key] = (before, after, "the model's or the loss's tensors have other shapes or another meaning")
        elif _is_under(key, ORDER) and not _is_under(key, _NOT_ORDER):
            found[key] = (before, after, "other images come, in another order or otherwise transformed")
    pairs = (
        (BATCH, "global_batch", "a step has other images"),
        (OPTIMIZER, "optimizer.name", "its state does not fit"),
    )
    for key, place, reason in pairs:
        before, after = _at(saved, place), _at(now, place)
        if before != after:
            found[key] = (before, after, reason)
    plain = [key.removeprefix(_ROOT) for key in allowed]
    return [
        Problem(
            _ROOT + key,
            str(after),
            f"was {before} when the checkpoint was made: {reason}",
            f"Put it back, name another run folder, or allow it: config.CHECKPOINT.ALLOW_CHANGED=[{key}].",
        )
        for key, (before, after, reason) in found.items()
        if not _is_under(key, plain)
    ]


def require_resumable(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse what ``refused`` finds.

    Raises:
        ConfigError: with all of it.
    """
    if problems := refused(saved, now, allowed):
        raise ConfigError(problems)


def describe(found: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """A line for each difference, for people."""
    return [f"config.{key}: {before} in the checkpoint, {after} now" for key, (before, after) in sorted(found.items())]


def _is_under(key: str, blocks: Sequence[str]) -> bool:
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def _at(data: Mapping[str, Any], place: str) -> Any:
    found = find(data, place)
    return None if found is None else found[0][found[1]]
