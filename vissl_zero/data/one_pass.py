"""A pass over all images of a source, in order, by several processes if there are many images."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from vissl_zero.data.slow_work import SlowProgress
from vissl_zero.data.source import Source
from vissl_zero.errors import DataError

T = TypeVar("T")
Look = Callable[[Source, range], T]
PER_CHUNK = 256  # images
FEW = 4096  # images: one process reads them before others have imported torch


def looked_at(source: Source, look: Look[T], report: Callable[[str], None]) -> Iterator[T]:
    """Yield ``look(source, indices)`` for every chunk of indices, in order.

    Args:
        source: the images.
        look: function at the top level of a module, which can be pickled.
        report: receives a line of progress every few seconds.
    Raises:
        DataError: a process was killed.
    """
    total, work = len(source), SlowProgress(report)
    chunks = [range(start, min(total, start + PER_CHUNK)) for start in range(0, total, PER_CHUNK)]
    for chunk, results in zip(chunks, _mapped(source, look, chunks), strict=True):
        yield results
        work.update(f"{chunk.stop:,} of {total:,} images")


def _mapped(source: Source, look: Look[T], chunks: list[range]) -> Iterator[T]:
    num_workers = len(os.sched_getaffinity(0))
    if num_workers == 1 or len(source) <= FEW:
        yield from (look(source, chunk) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of torch's threads
    try:
        # ``map`` returns results in order, so sums of floats do not depend on which process was faster.
        with ProcessPoolExecutor(num_workers, context, _start, (source,)) as pool:
            yield from pool.map(_look, [look] * len(chunks), chunks)
    except BrokenProcessPool as error:
        raise DataError("A process that read images was killed, perhaps for want of memory. Run it again.") from error


_source: Source | None = None


def _start(source: Source) -> None:
    """Store the source in this process, so that it is not pickled with every chunk."""
    global _source
    _source = source


def _look(look: Look[T], chunk: range) -> T:
    assert _source is not None
    return look(_source, chunk)
