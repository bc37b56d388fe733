"""A stand-in for CUDA streams, so that fairscale's FSDP runs on the CPU in tests: every stream is the only one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import Tensor

from vissl_zero.sharding.engines.fairscale import strategy as fairscale_strategy


class _Stream:
    """Whatever is put on it has happened already."""

    def wait_stream(self, other: _Stream) -> None: ...

    def synchronize(self) -> None: ...


_THE_STREAM = _Stream()
_set_up_streams = FullyShardedDataParallel._setup_streams


def _set_up_the_stream(unit: FullyShardedDataParallel) -> None:
    _set_up_streams(unit)
    if unit._is_root:
        unit._streams.update(dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), _THE_STREAM))


_reduce_scatter = dist._reduce_scatter_base


def _reduce_scatter_flat(output: Tensor, input: Tensor, **options: Any) -> Any:
    """fairscale's buckets are matrices, which nccl takes and gloo does not."""
    return _reduce_scatter(output, input.flatten(), **options)


@contextmanager
def streams_on_cpu() -> Iterator[None]:
    """Inside, fairscale's level 3 can be built and trained on the CPU."""
    stand_ins: list[Any] = [
        patch.object(fairscale_strategy, "has_streams", lambda device: True),
        patch.object(FullyShardedDataParallel, "_setup_streams", _set_up_the_stream),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
        patch.object(torch.cuda, "current_stream", lambda: _THE_STREAM),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(Tensor, "record_stream", lambda tensor, stream: None),
        patch.object(dist, "_reduce_scatter_base", _reduce_scatter_flat),
    ]
    with ExitStack() as stack:
        for stand_in in stand_ins:
            stack.enter_context(stand_in)
        yield
