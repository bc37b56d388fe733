"""A checkpoint in memory, from which state is restored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class MemoryStore:
    """Full tensors, and what is one number per parameter. What nobody has stored is NaN."""

    loss_scale: Any = None

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, Any] = {}

    def store(self, name: str, shape: tuple[int, ...], first_element: int, values: Tensor) -> None:
        """Store a run of elements of a tensor of this shape."""
        whole = self.tensors.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
        whole.view(-1)[first_element : first_element + values.numel()] = values.reshape(-1)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def dtype(self, name: str) -> torch.dtype | None:
        return self.tensors[name].dtype if name in self.tensors else None

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.tensors if name.startswith(prefix)]

    def read_into(self, name: str, first_element: int, out: Tensor) -> None:
        assert out.is_contiguous()
        out.copy_(self.tensors[name].view(-1)[first_element : first_element + out.numel()])

    def scalars(self, parameter: str) -> dict[str, Any]:
        return self.numbers.get(parameter, {})
