"""Sums of operations answer, for any machine, what each operation alone would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vissl_zero.planner.step_trace import Kernel, Moment, Recorder, Work, kernel_of, record_step
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.memory import Storages
from vissl_zero.sharding.model.batch_norm import batch_norm_group, convert_batch_norms
from vissl_zero.sharding.model.wrap_plan import plan_wrap
from vissl_zero.sharding.torch_private import pretended_ranks


def test_each_operation_takes_the_longer_of_arithmetic_and_memory() -> None:
    work = Work()
    work.count(Kernel.MATMUL, 4_000, 10)  # 400 a byte
    for one in ((Kernel.MATMUL, 10, 1_000), (Kernel.CONVOLUTION, 4_000, 10), (Kernel.PLAIN, 0, 500)):
        work.count(*one)
    rates = {Kernel.MATMUL: 100.0, Kernel.CONVOLUTION: 50.0, Kernel.PLAIN: 100.0}
    # Of the sums of products alone arithmetic would decide: 4,010 / 100 s, and not 40 + 10.
    assert work.seconds(rates.__getitem__, memory=100.0) == pytest.approx(40 + 10 + 80 + 5)


def test_what_was_done_between_two_moments_can_be_repeated() -> None:
    before = Work()
    before.count(Kernel.MATMUL, 100, 10)
    after = before.plus(Work())
    after.count(Kernel.CONVOLUTION, 300, 20)
    after.count(Kernel.PLAIN, 0, 7)
    between = after.plus(before, -1)
    done = before.plus(between, 3)
    assert done.num_operations == 1 + 3 * 2
    assert sum(done.flops) == 100 + 3 * 300 and sum(done.moved_bytes) == 10 + 3 * 27


def test_convolutions_are_told_from_products_and_from_what_computes_nothing() -> None:
    assert kernel_of("aten::convolution_backward", 9) == Kernel.CONVOLUTION
    assert kernel_of("aten::addmm", 9) == Kernel.MATMUL
    assert kernel_of("aten::convolution", 0) == kernel_of("aten::add", 0) == Kernel.PLAIN


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_each_gradient_of_a_convolution_costs_as_much_as_its_forward_pass(kind: type[nn.Module], groups: int) -> None:
    def flops(images: torch.Tensor, is_trained: bool) -> int:
        with Recorder(Storages([images])) as recorder:
            outputs = layer(images)
            if is_trained:
                outputs.backward(torch.zeros_like(outputs))
        recorder.finish()
        return sum(recorder.trace.work.flops)

    with FakeTensorMode():
        layer = kind(32, 48, 3, padding=1, stride=2, groups=groups)
        images, learned = torch.zeros(4, 32, 14, 14), torch.zeros(4, 32, 14, 14, requires_grad=True)
        forward = flops(images, False)
        assert forward > 0
        assert flops(images, True) == 2 * forward  # of the weight alone
        assert flops(learned, True) == 3 * forward


def test_synchronized_batch_norm_makes_no_gradient_that_its_mask_excludes() -> None:
    """torch's kernel for fake tensors gives the input's gradient all the same; nothing may keep it."""
    with FakeTensorMode(), pretended_ranks(2):
        group = batch_norm_group(2, 60.0)
        norm = nn.Sequential(nn.BatchNorm2d(32))
        convert_batch_norms(norm, group, is_recomputed=False, only_marked=False)
        images = torch.zeros(8, 32, 12, 12, dtype=torch.bfloat16, requires_grad=True)
        with Recorder(Storages([images, *norm.parameters(), *norm.buffers()])) as recorder:
            outputs = norm(images)
            gradient = torch.zeros_like(outputs)
            outputs.backward(gradient)
    # Outputs, their gradient, and in twice the format a copy of the images and the gradient that is computed from it.
    assert recorder.peak_bytes() < 6.5 * images.nbytes


class _Pairs(nn.Module):
    """Blocks that each take two images, one large and one small, and write into them first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_OfPairs() for _ in range(3))

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        for block in self.blocks:
            large, small = block(large, small)
        return large.sum() + small.sum()


class _OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(large.relu_()), self.layer(small.relu_())


def test_a_unit_leaves_its_backward_pass_for_all_inputs_before_the_one_before_it_enters() -> None:
    """Left to autograd, the smaller images of several units would come first: two would be gathered at once."""
    with FakeTensorMode():
        model = _Pairs()
        images = [torch.zeros(number, 64, requires_grad=True) for number in (32, 4)]
        units = plan_wrap(model, ShardingPlan(level=3, wrap_threshold=1000), 1)
        trace = record_step(model, units, lambda: (model(*(image * 2 for image in images)), None), images).trace
    entered = [f"blocks.{index}" for index in (2, 1, 0)]
    moments = [(mark.moment, mark.name) for mark in trace.marks if mark.name in entered]
    backward = [mark for mark in moments if mark[0] in (Moment.BACKWARD_IN, Moment.BACKWARD_OUT)]
    assert backward == [(moment, name) for name in entered for moment in (Moment.BACKWARD_IN, Moment.BACKWARD_OUT)]


class _Bare(nn.Module):
    """Blocks that are run by their ``forward``, as timm's HRNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x).relu()
        return x.sum()


def test_a_unit_that_is_run_by_its_forward_is_entered_and_left() -> None:
    """A sharded unit is gathered there too."""
    with FakeTensorMode():
        model = _Bare()
        images = [torch.zeros(8, 64)]
        units = plan_wrap(model, ShardingPlan(level=3, wrap_threshold=1000), 1)
        trace = record_step(model, units, lambda: (model(images[0]), None), images).trace
    forward = [(mark.moment, mark.name) for mark in trace.marks if mark.moment <= Moment.FORWARD_OUT and mark.name]
    both = (Moment.FORWARD_IN, Moment.FORWARD_OUT)
    assert forward == [(moment, f"blocks.{index}") for index in (0, 1) for moment in both]
    assert "forward" not in model.blocks[0].__dict__, "only while it is recorded"
