"""Sums of operations answer, for any machine, what each operation alone would."""

from __future__ import annotations

import pytest

from vissl_zero.sharding.step_trace import Kernel, WorkCounter, kernel_of


def test_each_operation_takes_the_longer_of_arithmetic_and_memory() -> None:
    counter = WorkCounter()
    counter.add(Kernel.PRODUCT, 4_000, 10)  # 400 a byte
    counter.add(Kernel.PRODUCT, 10, 1_000)
    counter.add(Kernel.CONVOLUTION, 4_000, 10)
    counter.add(Kernel.PLAIN, 0, 500)
    rates = {Kernel.PRODUCT: 100.0, Kernel.CONVOLUTION: 50.0, Kernel.PLAIN: 100.0}
    # Of the sums of products alone arithmetic would decide: 4,010 / 100 s, and not 40 + 10.
    assert counter.so_far().seconds(rates.__getitem__, memory=100.0) == pytest.approx(40 + 10 + 80 + 5)


def test_what_was_done_between_two_moments_can_be_repeated() -> None:
    counter = WorkCounter()
    counter.add(Kernel.PRODUCT, 100, 10)
    before = counter.so_far()
    counter.add(Kernel.CONVOLUTION, 300, 20)
    counter.add(Kernel.PLAIN, 0, 7)
    between = counter.so_far().plus(before, -1)
    done = before.plus(between, 3)
    assert done.num_operations == 1 + 3 * 2
    assert sum(done.flops) == 100 + 3 * 300 and sum(done.moved_bytes) == 10 + 3 * 27


def test_convolutions_are_told_from_products_and_from_what_computes_nothing() -> None:
    assert kernel_of("aten::convolution_backward", 9) == Kernel.CONVOLUTION
    assert kernel_of("aten::addmm", 9) == Kernel.PRODUCT
    assert kernel_of("aten::convolution", 0) == kernel_of("aten::add", 0) == Kernel.PLAIN
