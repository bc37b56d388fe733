"""One rank's part of one parameter where fairscale's FSDP cuts parameters flat, alone or joined with others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import Tensor, nn

from vissl_zero.sharding.shard import MIN_ROW_NORM, Shard


@dataclass(eq=False)
class Segment(Shard):
    """A run of elements of one parameter, which need not begin or end with a row.

    FSDP flattens a parameter, or all parameters of a unit joined end to end, and gives each rank one equal piece, the
    last ones padded. What a piece holds of one parameter is a segment. So norms, groups, frozen parameters and saved
    state are those of single parameters, joined or not, and padding is never trained.

    Attributes:
        source: fairscale's parameter: this rank's piece, except inside forward and backward.
        local: 1-d view of the segment in that piece.
        start: where in the piece it begins.
        is_joined: whether the piece holds other parameters too.
        has_grad: whether the loss has reached the parameter since its gradient was last forgotten. The gradient of a
            joined one is there, and zero, in any case.
    """

    start: int = 0
    is_joined: bool = False
    has_grad: bool = True

    def local_grad(self) -> Tensor | None:
        """See ``Shard``."""
        grad = self.source.grad
        if grad is None or not self.has_grad:
            return None
        return grad.reshape(-1)[self.start : self.start + self.local.numel()]

    def forget_grad(self) -> None:
        """See ``Shard``."""
        super().forget_grad()
        self.has_grad = not self.is_joined

    @torch.no_grad()
    def whole(self) -> Tensor:
        """See ``Shard``. Costs one all-reduce of the parameter."""
        # Each element is in the piece of one rank, so the sum over ranks is the parameter.
        flat = self.local.new_zeros(self.full_shape.numel())
        flat[self.first_element : self.first_element + self.local.numel()] = self.local
        dist.all_reduce(flat)
        return flat.view(self.full_shape)

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """See ``Shard``. Costs one all-reduce of a number per row."""
        places = torch.arange(self.local.numel(), device=self.local.device) + self.first_element
        # Pieces are cut anywhere, so a row's norm may be a sum over ranks.
        rows = places // self.full_shape[1:].numel()
        squares = self.local.new_zeros(self.full_shape[0]).index_add_(0, rows, self.local.square())
        dist.all_reduce(squares)
        self.local.div_(squares.sqrt().clamp_(min=MIN_ROW_NORM)[rows])


def segments_of(
    root: FullyShardedDataParallel,
) -> Iterator[tuple[FullyShardedDataParallel, list[Segment]]]:
    """The units under ``root``, each with this rank's segment of every parameter it took. Not a collective.

    Segments have full names (a tied parameter the first of its names) and come in the unit's order.
    """
    units = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    for unit, facts in zip(units, root.local_metadata_dict()["param_metadata"], strict=True):
        segments: list[Segment] = []
        for source, pieces in zip(unit.params, facts["params"].values(), strict=True):
            names = [f"{facts['fsdp_path']}.{name}".lstrip(".") for name in pieces["names"]]
            segments += _cut(source, names, pieces["shapes"])
        yield unit, segments


def _cut(source: nn.Parameter, names: list[str], shapes: list[torch.Size]) -> Iterator[Segment]:
    """The segments in this rank's piece of parameters joined in the order given."""
    piece = source.detach().view(-1)
    begin = dist.get_rank() * piece.numel()
    offset = 0
    for name, shape in zip(names, shapes, strict=True):
        first = min(max(begin - offset, 0), shape.numel())
        stop = min(max(begin + piece.numel() - offset, 0), shape.numel())
        # A parameter in another rank's piece has an empty segment here, so that all ranks have the same names.
        start = offset + first - begin if first < stop else 0
        local = nn.Parameter(piece[start : start + stop - first], requires_grad=source.requires_grad)
        yield Segment(
            name, source, local, shape, first, start=start, is_joined=len(names) > 1, has_grad=len(names) == 1
        )
        offset += shape.numel()
