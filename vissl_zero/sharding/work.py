"""What operations compute and move, summed in such a way that any machine's rates can be applied to it later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

_BINS = 14  # of arithmetic per byte, by powers of two; the last has all above


class Kernel(IntEnum):
    """Kinds of operations that a machine runs at rates of their own."""

    PLAIN = 0  # no arithmetic to speak of: memory decides
    PRODUCT = 1  # of matrices
    CONVOLUTION = 2


@dataclass(frozen=True)
class Work:
    """Sums over operations, by kind and by arithmetic per byte.

    Whether arithmetic or memory decides is a question to each operation: a sum over all answers it for none. Operations
    with nearly as much arithmetic per byte may be summed.

    Attributes:
        flops, moved_bytes: floating-point operations, and bytes read and written: one entry for each kind and bin.
        num_operations: that were run.
    """

    flops: tuple[int, ...] = (0,) * (_BINS * len(Kernel))
    moved_bytes: tuple[int, ...] = (0,) * (_BINS * len(Kernel))
    num_operations: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """This and ``times`` the other; -1 takes it away."""
        return Work(
            tuple(a + times * b for a, b in zip(self.flops, other.flops, strict=True)),
            tuple(a + times * b for a, b in zip(self.moved_bytes, other.moved_bytes, strict=True)),
            self.num_operations + times * other.num_operations,
        )

    def seconds(self, rate: Callable[[Kernel], float], memory: float) -> float:
        """On a machine: every operation takes the longer of its arithmetic and its memory traffic.

        Args:
            rate: floating-point operations a second, by kind.
            memory: bytes a second.
        """
        rates = [rate(kernel) for kernel in Kernel for _ in range(_BINS)]
        sums = zip(self.flops, self.moved_bytes, rates, strict=True)
        return sum(max(flops / each, num_bytes / memory) for flops, num_bytes, each in sums)


class WorkCounter:
    """Adds up operations as they run."""

    def __init__(self) -> None:
        self._flops = [0] * (_BINS * len(Kernel))
        self._moved_bytes = [0] * (_BINS * len(Kernel))
        self._num_operations = 0

    def add(self, kernel: Kernel, flops: int, num_bytes: int) -> None:
        """One operation."""
        per_byte = flops // max(num_bytes, 1)
        index = kernel * _BINS + min(per_byte.bit_length(), _BINS - 1)
        self._flops[index] += flops
        self._moved_bytes[index] += num_bytes
        self._num_operations += 1

    def so_far(self) -> Work:
        """The sums."""
        return Work(tuple(self._flops), tuple(self._moved_bytes), self._num_operations)


def kernel_of(operation: str, flops: int) -> Kernel:
    """Of an operation by torch's name for it, ``aten::mm``."""
    if not flops:
        return Kernel.PLAIN
    return Kernel.CONVOLUTION if "convolution" in operation else Kernel.PRODUCT
