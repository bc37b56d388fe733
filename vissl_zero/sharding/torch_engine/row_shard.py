"""One rank's rows of a parameter that every rank holds whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.shard import Shard, divide_by_norms, whole_shard
from vissl_zero.sharding.torch_private import real_grad, set_real_grad


class _Refusing(Tensor):
    """Stands for a gradient that the loop must not use: it can be set to None, and every other use raises an error."""

    _why: ClassVar[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise VisslZeroError(cls._why)


class _GradientElsewhere(_Refusing):
    """Stands for a gradient of which this rank holds only some rows."""

    _why = (
        "A gradient was read or changed by the loop, and at ZeRO levels 1 and 2 each rank holds only its rows of "
        "it. Write zero=dict(keep_gradients=True, ...) to keep full gradients, or clip by zero=dict(clip_grad=...)"
        ", or scale the loss. Setting it to None is possible."
    )


class _GradientOfThisRank(_Refusing):
    """Stands for the gradient of a scalar, which is averaged during the step."""

    _why = (
        "The gradient of a scalar parameter was read or changed by the loop, and where parameters are sharded it is "
        "this rank's own until step() averages it. Clip by zero=dict(clip_grad=...), or scale the loss, or make it a "
        "parameter of shape (1,). Setting it to None is possible."
    )


class WholeParameter(nn.Parameter):
    """The class that a parameter gets whose gradient is sent to the ranks that need it.

    With a plain parameter, a loop that edits gradients would find None and do nothing.
    """

    _row_shard: RowShard | None = None
    _settle: Callable[[], None] = staticmethod(lambda: None)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, or a tensor that refuses to be used once it has been handed to the ranks."""
        if self._row_shard is None:
            return real_grad(self)
        # Finish the exchange first: until then it is not known whether any rank had a gradient.
        self._settle()
        return real_grad(self) if self._row_shard.reduced is None else _ELSEWHERE

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._row_shard is None:
            set_real_grad(self, value)
            return
        self._settle()
        if value is None:
            self._row_shard.drop_grad()
        elif value is not _ELSEWHERE:
            # Any operation on the placeholder raises the error that explains the fix.
            _ELSEWHERE + value  # refused

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # A copy takes no part in the exchange of gradients, so it is a plain parameter.
        return memo.setdefault(id(self), nn.Parameter(self.data.clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class ScalarParameter(nn.Parameter):
    """The class that a scalar gets where other parameters are sharded."""

    @property
    def grad(self) -> Tensor | None:
        """None, or a tensor that refuses to be used."""
        return None if real_grad(self) is None else _OF_THIS_RANK

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            set_real_grad(self, None)
        elif value is not _OF_THIS_RANK:
            _OF_THIS_RANK + value  # refused


_ELSEWHERE = torch.empty(0).as_subclass(_GradientElsewhere)
_OF_THIS_RANK = torch.empty(0).as_subclass(_GradientOfThisRank)


def hide_gradient(shard: Shard) -> Shard:
    """The same shard, whose gradient the loop cannot read: it would take this rank's own for the mean."""
    local = nn.Parameter(shard.source.detach(), shard.source.requires_grad)
    shard.source.__class__ = ScalarParameter
    return dataclasses.replace(shard, local=local)


@dataclass(eq=False)
class RowShard(Shard):
    """Rows that this rank updates, of a parameter that lives whole on every rank.

    Cut as ``fully_shard`` cuts: in chunks of equal numbers of rows, the last ones shorter or empty. A scalar is a row.

    Attributes:
        source: the full parameter.
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
        """Where a rank's part begins and ends in the full parameter, flattened."""
        numel = self.full_shape.numel()
        return min(rank * self.padded_numel, numel), min((rank + 1) * self.padded_numel, numel)

    def local_grad(self) -> Tensor | None:
        """See ``Shard``."""
        if self.reduced is not None or isinstance(self.source, WholeParameter):
            return self.reduced
        # Gradients are kept whole: these rows of theirs.
        grad, numel = self.source.grad, self.local.numel()
        if grad is None:
            return None
        return grad.contiguous().view(-1)[self.first_element : self.first_element + numel].view(self.local.shape)

    def held(self) -> Tensor:
        """See ``Shard``: the full parameter."""
        return self.source.detach()

    def held_shape(self) -> torch.Size:
        """See ``Shard``."""
        return self.source.shape

    def forget_grad(self) -> None:
        """See ``Shard``."""
        set_real_grad(self.source, None)
        self.local.grad = None
        self.reduced = None

    def drop_grad(self) -> None:
        """Forget the gradient in the middle of a step; a further backward pass starts from zero."""
        if self.reduced is not None:
            # Zero, not only dropped: a further backward pass adds to this buffer.
            self.reduced.zero_()
        self.forget_grad()

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """See ``Shard``. Every rank does it to its whole copy, with the same result."""
        divide_by_norms(self.source)


def row_shards(module: nn.Module, trained: set[str], num_ranks: int, rank: int) -> Iterator[Shard]:
    """A shard of every parameter, tied ones once, in the order of ``named_parameters``.

    Args:
        module: whole, where it is to be trained.
        trained: full names; other parameters, and frozen ones, are not cut.
        num_ranks: that share the state.
        rank: this one.
    """
    for name, source in module.named_parameters():
        if name not in trained or not source.requires_grad:
            yield whole_shard(name, source, contributes_to_norm=rank == 0)
            continue
        rows_per_rank = -(-(source.shape[0] if source.dim() else 1) // num_ranks)
        shard = RowShard(name, source, source, source.shape, rows_per_rank=rows_per_rank)
        start, stop = shard.span(rank)
        flat = source.detach().view(-1)[start:stop]
        # torch cannot infer the number of rows where a row has no elements.
        shard.local = nn.Parameter(flat.view(-1, *source.shape[1:]) if shard.row_numel else flat)
        shard.first_element = start
        yield shard
