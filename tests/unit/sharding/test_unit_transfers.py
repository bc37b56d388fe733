"""Memory of a unit's messages: a gradient never lies in the buffer that the next unit overwrites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.engines.torch.unit_transfers import _Buffer, _ReduceScatter


class _Comm:
    num_ranks = 2

    def reduce_scatter(self, output: Tensor, given: Tensor, *, is_mean: bool) -> None:
        output.copy_(given[: len(output)])


def _reducer(is_kept: bool = True) -> tuple[_ReduceScatter, _Buffer]:
    buffer = _Buffer(is_kept)
    comm: Any = _Comm()
    return _ReduceScatter(comm, buffer, 0, lambda number, *, is_reduce: None), buffer


def _tensor(reducer: _ReduceScatter, size: int) -> Tensor:
    return reducer.allocate((size,), dtype=torch.float32, device=torch.device("cpu"))


def _reduce(reducer: _ReduceScatter, output: Tensor, given: Tensor) -> None:
    group: Any = SimpleNamespace()
    reducer(output, given, group, dist.ReduceOp.AVG)


@pytest.mark.parametrize("is_kept", [True, False])
def test_gradients_have_memory_of_their_own(is_kept: bool) -> None:
    reducer, buffer = _reducer(is_kept)
    gradients = []
    for value in range(3):
        given = _tensor(reducer, 8)
        output = _tensor(reducer, 4)
        given.fill_(value)
        _reduce(reducer, output, given)
        gradients.append(output)
    assert [gradient.tolist() for gradient in gradients] == [[value] * 4 for value in range(3)]
    assert len(buffer.by_dtype) == is_kept


def test_a_pass_that_failed_between_the_two_leaves_no_trace() -> None:
    reducer, buffer = _reducer()
    _tensor(reducer, 8)  # and the copy into it fails
    given, output = _tensor(reducer, 8), _tensor(reducer, 4)
    _reduce(reducer, output, given)
    assert given.data_ptr() == buffer.by_dtype[torch.float32].data_ptr()


def test_the_output_asked_for_first_is_refused() -> None:
    reducer, _ = _reducer()
    _reduce(reducer, *reversed([_tensor(reducer, 8), _tensor(reducer, 4)]))  # the buffer has its full size
    output, given = _tensor(reducer, 4), _tensor(reducer, 8)
    with pytest.raises(VisslZeroError, match=rf"torch {torch.__version__.split('+')[0]}.*allocates a unit's gradient"):
        _reduce(reducer, output, given)
