"""The layers of a head in words, and which heads a package brings."""

from __future__ import annotations

from torch import nn

from vissl_zero.methods.swav import NormalizedPrototypes
from vissl_zero.registry import HEADS


def layers_of(head: nn.Module) -> str:
    """Name the layers in order: "-" before one without bias or without weights of its own."""
    leaves = [module for module in head.modules() if module is not head and not list(module.children())]
    return ", ".join(map(_layer, leaves))


def heads_in(package: str) -> set[str]:
    """Return the names of the heads whose classes are in this package."""
    return {name for name in HEADS.builtin() if HEADS.get(name).build.__module__.startswith(f"{package}.")}


def _layer(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return f"{'' if module.bias is not None else '-'}{name} {module.in_features} {module.out_features}"
    if isinstance(module, nn.Conv2d):
        side = module.kernel_size[0]
        assert module.kernel_size == (side, side) and module.padding == (side // 2, side // 2)
        return f"{'' if module.bias is not None else '-'}{name} {module.in_channels} {module.out_channels} {side}"
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        return f"{'' if module.affine else '-'}{name} {module.num_features}"
    if isinstance(module, nn.Dropout):
        return f"{name} {module.p}"
    if isinstance(module, NormalizedPrototypes):
        return f"{name} {module.weight_v.shape[0]} {module.weight_v.shape[1]}"
    return name
