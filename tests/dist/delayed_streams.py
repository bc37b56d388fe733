"""Streams of a GPU on the CPU that really delay: what is put on one runs when somebody waits for it, and not before.

A wait that is missing then gives wrong numbers. Work runs as late as it may, or as early, which finds a missing wait on
the other side: a stream that runs ahead overwrites what another still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from vissl_zero.sharding.update import overlapped_update


class Stream:
    """Work in order.

    Args:
        is_late: work waits until it is waited for; else it runs as soon as it is put here.
    """

    def __init__(self, is_late: bool):
        self._is_late = is_late
        self._work: list[Callable[[], Any]] = []
        self._num_done = 0

    def put(self, work: Callable[[], Any]) -> None:
        self._work.append(work)
        if not self._is_late:
            self.run()

    def run(self, stop: int | None = None) -> None:
        """Run the work that is not done yet, up to a place in the order."""
        while self._num_done < (len(self._work) if stop is None else stop):
            self._num_done += 1
            self._work[self._num_done - 1]()

    def wait_stream(self, other: Stream) -> None:
        stop = len(other._work)
        self.put(lambda: other.run(stop))

    def synchronize(self) -> None:
        self.run()


class Streams:
    """The device's own stream and one beside it.

    Attributes:
        main, side: see ``Stream``.
    """

    def __init__(self, is_main_late: bool, is_side_late: bool):
        self.main, self.side = Stream(is_main_late), Stream(is_side_late)
        self._current = self.main

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside, updates on the host find these streams, and copies that are not waited for are put on one."""
        copy = Tensor.copy_

        def put_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if non_blocking:
                self._current.put(lambda: copy(target.detach(), source.detach()))
                return target
            return copy(target, source)

        with ExitStack() as stack:
            for name, stand_in in (
                ("Stream", lambda device: self.side),
                ("current_stream", lambda device: self._current),
                ("stream", self._on),
            ):
                stack.enter_context(patch.object(torch.cuda, name, stand_in))
            stack.enter_context(patch.object(Tensor, "copy_", put_copy))
            stack.enter_context(patch.object(overlapped_update, "copy_stream", overlapped_update.CopyStream))
            stack.enter_context(patch.object(overlapped_update, "PIECE_BYTES", 1))  # a parameter is a piece
            yield

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
