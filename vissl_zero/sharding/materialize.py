"""Weights for a model that was built on the meta device, drawn a unit at a time so that no rank ever holds them all.

A module that owns parameters or buffers must have ``reset_parameters()`` (torch's layers do), and that must fill all of
them. It runs on full tensors, in float32, under a generator keyed by (seed, full name): the weights depend on neither
the world size nor the level nor the order of construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.init import replace_data_
from vissl_zero.models.keyed_random import stable_hash

# Given a module that is about to be sharded and its full name, gives values to whatever in it has none.
Fill = Callable[[nn.Module, str], None]


@torch.no_grad()
def materialize_(module: nn.Module, full_name: str, seed: int) -> None:
    """Give values on the CPU to whatever in ``module`` is on the meta device, in place, children first.

    Parameters stay the same objects, so that ties and an optimizer's references hold. A tied parameter keeps what it
    was given under the first of its names.

    Args:
        module: a unit about to be sharded, or a whole model; parts that have values are left alone.
        full_name: of ``module`` in the model; empty for the model itself.
        seed: of the run.
    Raises:
        ConfigError: a module cannot initialise what it owns.
    """
    for name, owner in _children_first(module, full_name):
        if _own_meta(owner):
            _fill(owner, name, seed)


def _fill(owner: nn.Module, name: str, seed: int) -> None:
    reset = _reset_of(owner, name)
    kept = [(param, param.detach().clone()) for param in owner.parameters(recurse=False) if not param.is_meta]
    dtypes = {key: tensor.dtype for key, tensor in _own_meta(owner).items()}
    for key, param in owner._parameters.items():
        if key in dtypes and param is not None:
            replace_data_(param, _unset(param))
    for key, buffer in owner._buffers.items():
        if key in dtypes and buffer is not None:
            owner._buffers[key] = _unset(buffer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash(seed, name) >> 1)
        reset()
    for param, value in kept:
        param.copy_(value)
    for key, dtype in dtypes.items():
        tensor = getattr(owner, key)
        if tensor.isnan().any():
            must = f"reset_parameters() of {type(owner).__name__} leaves {key} without values"
            raise ConfigError([Problem(f"model.{name}".rstrip("."), "", must, "Fill it there.")])
        tensor.data = tensor.data.to(dtype)


def _reset_of(owner: nn.Module, name: str) -> Callable[[], None]:
    # torch's attention has the method under a private name only
    reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
    if not callable(reset):
        must = f"is on the meta device, and {type(owner).__name__} has no reset_parameters() to give it values"
        fix = f"Write that method, or build this part on the CPU. It owns: {', '.join(_own_meta(owner))}."
        raise ConfigError([Problem(f"model.{name}".rstrip("."), "", must, fix)])
    return reset


def _unset(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU, float32. Filled with NaN, so that anything left uninitialised is found."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.full(tensor.shape, torch.nan)


def _own_meta(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in own.items() if tensor is not None and tensor.is_meta}


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}".lstrip("."))
    yield name, module
