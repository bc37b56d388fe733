"""What heads are given of inner layers: the outputs of named layers of a frozen trunk, pooled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.config.components.heads import KEY, POOLINGS
from vissl_zero.errors import ConfigError, Problem, did_you_mean

# Outputs of each tapped layer, and the trunk's features, as a tensor per resolution -> the same of the tap.
Combine = Callable[[list[list[Tensor]], list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class LayerTap:
    """How a trunk gives what one name stands for.

    Attributes:
        layers: paths of modules in the trunk whose outputs are wanted.
        combine: what to make of them; None: the output of the one layer.
    """

    layers: tuple[str, ...]
    combine: Combine | None = None


class Taps:
    """Catches the outputs of layers in the trunk's forward pass, and pools them.

    Args:
        trunk: whole, not wrapped. It may have ``tap(name) -> LayerTap | None`` for names of its own; every other name
            is the path of a module, whose output must be maps, vectors or a list of them.
        entries: of LINEAR_EVAL_FEAT_POOL_OPS_MAP, one per head.
        should_flatten: make vectors of what is pooled.
    Raises:
        ConfigError: a name is neither.
    """

    def __init__(self, trunk: nn.Module, entries: Sequence[Any], should_flatten: bool):
        self._caught: dict[str, list[Tensor]] = {}
        self._should_flatten = should_flatten
        self._taps = [_tap(trunk, name) for name, _ in entries]
        self._pools = [_pooling(name, args) for _, (name, args) in entries]
        self.names = [name for name, _ in entries]
        self.widths = [0] * len(entries)  # of the newest vectors
        for path in dict.fromkeys(path for tap in self._taps for path in tap.layers):
            trunk.get_submodule(path).register_forward_hook(self._catch(path))

    def _catch(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A unit gives all resolutions at once, a layer inside it one after another.
            self._caught.setdefault(path, []).extend(output if isinstance(output, (list, tuple)) else [output])

        return hook

    def clear(self) -> None:
        """Forget what was caught: before a forward pass, and after it, so that it holds no memory."""
        self._caught.clear()

    def __call__(self, features: list[Tensor]) -> list[Tensor]:
        """The input of each head, rows of all resolutions; after the trunk's forward pass.

        Args:
            features: what the trunk gave, a tensor (b_r, F) per resolution.
        """
        inputs = []
        for tap, pool in zip(self._taps, self._pools, strict=True):
            caught = [self._caught[path] for path in tap.layers]
            rows = [pool(x) for x in (tap.combine(caught, features) if tap.combine else caught[0])]
            inputs.append(torch.cat([x.flatten(1) for x in rows] if self._should_flatten else rows))
        self.widths = [rows.shape[1] for rows in inputs]
        self.clear()
        return inputs


def _tap(trunk: nn.Module, name: str) -> LayerTap:
    find: Any = getattr(trunk, "tap", None)
    own = find(name) if callable(find) else None
    if isinstance(own, LayerTap):
        return own
    paths = [path for path, _ in trunk.named_modules() if path]
    if name not in paths:
        names = [*getattr(trunk, "tap_names", ()), *paths]
        fix = f"Name a layer of the trunk: {', '.join(names[:20])}, ...{did_you_mean(name, names)}"
        raise ConfigError([Problem(KEY, repr(name), "must name layers of the trunk", fix)])
    return LayerTap((name,))


def _pooling(name: str, args: Sequence[Any]) -> nn.Module:
    pooling: nn.Module = getattr(nn, name)(*[tuple(arg) if isinstance(arg, list) else arg for arg in args])
    assert name in POOLINGS
    return pooling


def build_taps(trunk: nn.Module, settings: Mapping[str, Any]) -> Taps | None:
    """The taps that FEATURE_EVAL_SETTINGS asks for, or None."""
    entries = settings.get("LINEAR_EVAL_FEAT_POOL_OPS_MAP") or []
    return Taps(trunk, entries, bool(settings.get("SHOULD_FLATTEN_FEATS", True))) if entries else None


def require_width(head: nn.Module, index: int, rows: Tensor) -> None:
    """Refuse features that the first layer of a head does not take.

    Raises:
        ConfigError: with the widths to write.
    """
    first = next((layer for layer in head.modules() if isinstance(layer, nn.Linear)), None)
    norm = getattr(head, "channel_bn", None)
    width, key = rows[0].numel(), f"config.MODEL.HEAD.PARAMS[{index}]"
    problems = []
    if first is not None and first.in_features != width:
        must = f"must begin with the {width} features that the layer has after pooling"
        problems.append(Problem(f"{key}.dims", str(first.in_features), must, f"Write dims: [{width}, ...]."))
    if norm is not None and norm.num_features != rows.shape[1]:
        must = f"must be the channels of the layer, {rows.shape[1]}"
        fix = f"Write in_channels: {rows.shape[1]}."
        problems.append(Problem(f"{key}.in_channels", str(norm.num_features), must, fix))
    if problems:
        raise ConfigError(problems)
