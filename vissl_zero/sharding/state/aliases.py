"""Tensors that share a parameter's memory (``param.data``, ``param.detach()``), as long as the loop holds them.

In plain torch ``param.data = new`` gives the parameter another memory, and these tensors keep the old one with its
values: ``backup = param.data; param.data = average; ...; param.data = backup``. A sharded parameter stays where it is
and copies ``new``. So these tensors must leave with a copy of the old values first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

OTHER_DATA = (
    "parameter.data = ... was given {}; it takes over a tensor of the parameter's shape {} and type {}, sharded like "
    "it or full. Convert a model before initialize(); share one parameter between two places there, too."
)


def add_alias(param: Any, alias: Any) -> None:
    """Note that ``alias`` shares the memory of ``param``, its ``owner`` from now on."""
    if param.aliases is None:
        param.aliases = WeakTensorKeyDictionary()
    param.aliases[alias] = None
    alias.owner = param


def take_aliases(param: Any) -> list[Tensor]:
    """Return the tensors that share the memory of ``param``, and forget them: the caller gives them their own."""
    aliases = list(param.aliases or ())
    param.aliases = None
    for alias in aliases:
        alias.owner = None
    return aliases
