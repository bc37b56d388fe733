"""One rank's rows of a parameter that every rank holds whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vissl_zero.sharding.shard import Shard, divide_by_norms


@dataclass(eq=False)
class RowShard(Shard):
    """Rows that this rank updates, of a parameter that lives whole on every rank.

    Cut as ``fully_shard`` cuts: in chunks of equal numbers of rows, the last ones shorter or empty. A scalar is a row.

    Attributes:
        source: the whole parameter.
        local: a view of this rank's rows in it.
        reduced: their averaged gradient, once it is known.
        rows_per_rank: of the first ranks.
    """

    reduced: Tensor | None = None
    rows_per_rank: int = 0

    @property
    def row_numel(self) -> int:
        """Elements in a row."""
        return self.full_shape[1:].numel()

    @property
    def padded_numel(self) -> int:
        """Elements of the largest part of any rank."""
        return self.rows_per_rank * self.row_numel

    def span(self, rank: int) -> tuple[int, int]:
        """Where a rank's part begins and ends in the whole parameter, flattened."""
        numel = self.full_shape.numel()
        return min(rank * self.padded_numel, numel), min((rank + 1) * self.padded_numel, numel)

    def local_grad(self) -> Tensor | None:
        """See ``Shard``."""
        return self.reduced

    def forget_grad(self) -> None:
        """See ``Shard``."""
        super().forget_grad()
        self.reduced = None

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """See ``Shard``. Every rank does it to its whole copy, with the same result."""
        divide_by_norms(self.source)


def row_shards(module: nn.Module, trained: set[str], num_ranks: int, rank: int) -> Iterator[Shard]:
    """A shard of every parameter, tied ones once, in the order of ``named_parameters``.

    Args:
        module: whole, where it is to be trained.
        trained: full names; other parameters are not cut.
        num_ranks: that share the state.
        rank: this one.
    """
    for name, source in module.named_parameters():
        if name not in trained:
            yield Shard(name, source, source, source.shape)
            continue
        rows_per_rank = -(-(source.shape[0] if source.dim() else 1) // num_ranks)
        shard = RowShard(name, source, source, source.shape, rows_per_rank=rows_per_rank)
        start, stop = shard.span(rank)
        flat = source.detach().view(-1)[start:stop]
        shard.local = nn.Parameter(flat.view(-1, *source.shape[1:]) if shard.row_numel else flat)
        shard.first_element = start
        yield shard
