"""What every loss is to the training loop.

A loss of your own subclasses ``Criterion`` and defines ``forward(outputs, batch)``; everything else has a default. It
is registered with ``@LOSSES.register("my_loss", config=MyLossConfig)`` and built with the fields of its config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vissl_zero.registry import LOSSES


class Batch(Protocol):
    """What a loss may know about a micro-batch of this rank; the data room's ``Batch`` is one.

    Rows of outputs are crop-major over the resolutions in order: row j belongs to sample ``j % num_local``, crop
    ``j // num_local``.
    """

    @property
    def num_crops(self) -> Sequence[int]:
        """Crops per sample in each resolution."""

    @property
    def targets(self) -> Tensor | None:
        """(B,) int64 class of each sample; None without labels."""

    @property
    def sample_ids(self) -> Tensor:
        """(B,) int64 index of each sample in the source."""

    @property
    def num_local(self) -> int:
        """Samples of this rank, B; may differ between ranks and may be 0."""

    @property
    def num_global(self) -> int:
        """Samples of this micro-batch over all ranks."""


class Criterion(nn.Module):
    """Base of all losses.

    For each optimizer step the loop calls, on every rank: ``on_step`` once; then per micro-batch ``probe``, the model,
    ``forward``, the backward pass and ``after_micro_batch``. State that a resumed run needs belongs in buffers or in
    ``get_extra_state``.
    """

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The loss, a 0-d tensor: the mean over this rank's own samples (the loop weighs ranks by their samples).

        Args:
            outputs: one entry per head of the model.
            batch: the micro-batch they were computed from.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(outputs, batch)")

    def probe(self) -> Tensor | None:
        """Rows (q, D) to be scored by the head in the coming forward pass, without gradient; None: nothing."""
        return None

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Update state from what the model just gave. May be a collective."""

    def on_step(self, step: int, epoch: int) -> None:
        """A new optimizer step begins; both count from 0."""

    def health_sums(self) -> Tensor:
        """What ``health`` needs of this rank's last micro-batch, 1-d; the loop sums it over ranks, with the loss."""
        return torch.empty(0)

    def health(self, sums: Tensor) -> dict[str, float]:
        """Figures on the last micro-batch of all ranks, for logs.

        Args:
            sums: ``health_sums`` of all ranks together, float64.
        """
        return {}

    def normalized_rows(self) -> list[str]:
        """Full names of 2-d parameters whose rows are set to unit length after each optimizer step."""
        return []


def build_criterion(loss_config: Mapping[str, Any]) -> Criterion:
    """The loss that ``LOSS.name`` names, built with the keys under its own name.

    Args:
        loss_config: ``config.LOSS`` after resolution: ``{name: <loss>, <loss>: {key: value}}``.

    Raises:
        ConfigError: the name or a key is wrong.
    """
    name = loss_config["name"]
    criterion: Criterion = LOSSES.get(name).build(**(loss_config.get(name) or {}))
    return criterion
