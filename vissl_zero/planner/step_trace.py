"""The recording of one micro-batch on one rank: allocations, frees, arithmetic and memory traffic of each operation.

It is made once, with fake tensors, and does not depend on the ZeRO level. It has the moments when activations are
allocated and freed, when a unit is entered and left in either direction, and when a parameter's gradient is finished;
``memory_model.py`` adds what a level gathers, frees and sends at these moments. Recomputation and autocast change the
operations, so each has a recording of its own.

Arithmetic and memory traffic are summed so that the rates of any machine can be applied later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from vissl_zero.planner.kernel_memory import SCRATCH, compiled_kernel, lstm_workspace
from vissl_zero.sharding.memory import Storages, tensors_of
from vissl_zero.sharding.model.wrap_plan import ROOT, WrapPlan
from vissl_zero.sharding.torch_private import (
    ATTENTION_ON_CPU,
    object_address,
    operation_name,
    overloads_of,
    writes_in_place,
)

_BINS = 14  # bins of arithmetic per byte, by powers of two; the last bin is open


class Kernel(IntEnum):
    """A kind of operation with its own rate on a machine."""

    PLAIN = 0  # little arithmetic: memory traffic takes the time
    MATMUL = 1
    CONVOLUTION = 2


@dataclass
class Work:
    """Sums over operations, by kind and by arithmetic per byte.

    Each operation is limited by its arithmetic or by its memory traffic, which a sum over all operations cannot show.
    So only operations with similar arithmetic per byte are summed.

    Attributes:
        flops, moved_bytes: floating-point operations, and bytes read and written: one entry for each kind and bin.
        num_operations: number of operations that were run.
        num_messages: number of collectives among them.
    """

    flops: list[int] = field(default_factory=lambda: [0] * (_BINS * len(Kernel)))
    moved_bytes: list[int] = field(default_factory=lambda: [0] * (_BINS * len(Kernel)))
    num_operations: int = 0
    num_messages: int = 0

    def count(self, kernel: Kernel, flops: int, num_bytes: int, *, is_message: bool = False) -> None:
        """Add one operation in place, because a step has hundreds of thousands; ``is_message``: it is a collective."""
        per_byte = flops // max(num_bytes, 1)
        entry = kernel * _BINS + min(per_byte.bit_length(), _BINS - 1)
        self.flops[entry] += flops
        self.moved_bytes[entry] += num_bytes
        self.num_operations += 1
        self.num_messages += is_message

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return the sum of this and ``times`` the other; -1 subtracts the other."""
        return Work(
            [a + times * b for a, b in zip(self.flops, other.flops, strict=True)],
            [a + times * b for a, b in zip(self.moved_bytes, other.moved_bytes, strict=True)],
            self.num_operations + times * other.num_operations,
            self.num_messages + times * other.num_messages,
        )

    def seconds(self, rate: Callable[[Kernel], float], memory: float) -> float:
        """Estimate seconds on a machine: every operation takes the longer of its arithmetic and its memory traffic.

        Args:
            rate: floating-point operations per second, by kind.
            memory: bytes per second of memory traffic.
        """
        rates = [rate(kernel) for kernel in Kernel for _ in range(_BINS)]
        sums = zip(self.flops, self.moved_bytes, rates, strict=True)
        return sum(max(flops / each, num_bytes / memory) for flops, num_bytes, each in sums)


def kernel_of(operation: str, flops: int) -> Kernel:
    """Classify an operation by torch's name for it, such as ``aten::mm``, and its FLOPs."""
    if not flops:
        return Kernel.PLAIN
    return Kernel.CONVOLUTION if "convolution" in operation else Kernel.MATMUL


def _backward_flops(outputs: Tensor, images: Tensor, weight: Tensor, *rest: Any, out_val: Any) -> int:
    """Count operations of a convolution's backward pass: those of the forward pass for each requested gradient."""
    # torch counts the weight's gradient as if there were one group.
    *_, is_transposed, _, _, mask = rest
    few = images if is_transposed else outputs
    return 2 * len(few) * few.shape[2:].numel() * weight.numel() * sum(mask[:2])


# torch counts attention only for its GPU kernels.
_COUNTED: dict[Any, Callable[..., Any]] = {cpu: flop_registry[gpu] for cpu, gpu in ATTENTION_ON_CPU.items()}
_COUNTED[torch.ops.aten.convolution_backward] = _backward_flops


# Losses whose result keeps the storage of all elements: torch reduces in place, and shrinks only the shape.
_OVER_WHOLE = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}


class Moment(IntEnum):
    """An event at a mark."""

    TEACHER_IN = 0
    TEACHER_OUT = 1
    FORWARD_IN = 2
    FORWARD_OUT = 3
    BACKWARD_IN = 4
    BACKWARD_OUT = 5
    GRADIENT = 6
    LOSS = 7


@dataclass(frozen=True)
class Mark:
    """An event at which a ZeRO level may act.

    Attributes:
        place: number of entries of ``StepTrace.deltas`` before the mark.
        moment: kind of event.
        name: name of the unit (its first module), or of the parameter whose gradient is finished.
        num_bytes: bytes of that gradient's storage.
    """

    place: int
    moment: Moment
    name: str = ""
    num_bytes: int = 0


@dataclass
class StepTrace:
    """One micro-batch: teacher, forward, loss, backward.

    Attributes:
        deltas: bytes of activations and temporaries, positive if allocated and negative if freed, in order. A finished
            gradient is no longer counted here.
        made: place of a negative entry of ``deltas`` -> place of the entry that allocated the same storage.
        marks: marks in order.
        input_bytes: bytes of the images, which are alive throughout.
        work: work of all operations, including recomputation.
        kept_bytes: bytes that are alive when the loss is known.
        forward_work: work of the last forward pass, by unit.
        loss_work: work between the first round of passes and the second; see ``Subject.passes_per_loss``.
        scratch: bytes that CPU kernels take in addition to their outputs; by the number of deltas before.
        compiled: bytes that CPU kernels keep once they are compiled; by the number of deltas before.
    """

    deltas: list[int] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    input_bytes: int = 0
    work: Work = field(default_factory=Work)
    kept_bytes: int = 0
    forward_work: dict[str, Work] = field(default_factory=dict)
    loss_work: Work = field(default_factory=Work)
    scratch: dict[int, int] = field(default_factory=dict)
    compiled: dict[int, int] = field(default_factory=dict)

    def forward_bytes(self) -> dict[str, int]:
        """Return the bytes that each unit's forward pass keeps for the backward pass, including its output."""
        bytes_by_name: dict[str, int] = {}
        for entered, left in self.forward_passes():
            kept = sum(self.deltas[self.marks[entered].place : self.marks[left].place])
            bytes_by_name[self.marks[entered].name] = bytes_by_name.get(self.marks[entered].name, 0) + kept
        return bytes_by_name

    def forward_passes(self) -> Iterator[tuple[int, int]]:
        """Yield the indices of the two marks around each forward pass of a unit."""
        begun: dict[str, int] = {}
        for index, mark in enumerate(self.marks):
            if mark.moment == Moment.FORWARD_IN:
                begun[mark.name] = index
            elif mark.moment == Moment.FORWARD_OUT:
                yield begun[mark.name], index
            elif mark.moment == Moment.LOSS:  # later forward passes are recomputations
                return


class Recorder(TorchDispatchMode):
    """Records when each storage is allocated and freed while the mode is active.

    Args:
        constants: storages that are counted elsewhere.
        has_values: whether a fake tensor returns 1 as its value. Only for optimizers, whose update has the same shapes
            at any value; a model may take another branch.
        answer: result of a test of a fake tensor's values, such as ``bool(tensor)``.

    Attributes:
        trace: the recording.
        works: work before each of its marks.
        is_asked: whether ``answer`` was used, for example to test if a mask is causal; the other answer may record
            another step.
    """

    def __init__(self, constants: Storages, *, has_values: bool = False, answer: bool = True):
        super().__init__()
        self._has_values, self._answer = has_values, answer
        self.is_asked = False
        self.trace = StepTrace()
        self.works: list[Work] = []
        self._work = Work()
        self._constants = constants
        self._compiled = set[Hashable]()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # a query, not an operation
            return func(*args, **kwargs)
        name = operation_name(func)
        if self._has_values and name == "aten::_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else True if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.equal.default or (
            name == "aten::_local_scalar_dense" and args[0].dtype == torch.bool
        ):
            return self._answered(func, args)
        if name.startswith("aten::_fused_"):
            return None  # an optimizer's in-place kernel allocates nothing; torch would try it on real tensors
        if func is torch.ops.aten.batch_norm_update_stats.default:  # torch has no fake kernel for it, and would run it
            result: Any = tuple(args[0].new_empty(2, args[0].shape[1]).unbind())
        else:
            result = func(*args, **kwargs)
        if func in _OVER_WHOLE and not result.dim():
            result = args[0].new_empty(args[0].numel(), dtype=result.dtype)[0]
        if func is torch.ops.aten.mkldnn_rnn_layer.default and args[-1]:
            result = *result[:3], args[0].new_empty(lstm_workspace(args[0], args[10]), dtype=torch.uint8)
        made = 0
        for tensor in tensors_of(result):
            made += self._note(tensor)
        self._note_kernel(func, args, result)
        # A view causes no memory traffic.
        is_moving = made or writes_in_place(func)
        overloads = overloads_of(func)
        counted = _COUNTED.get(overloads) or flop_registry.get(overloads)
        flops = 0 if counted is None else int(counted(*args, **kwargs, out_val=result))
        moved = made + sum(t.nbytes for t in tensors_of(args)) if is_moving else 0
        self._work.count(kernel_of(name, flops), flops, moved, is_message=name.startswith("c10d::"))
        return result

    def _note_kernel(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Count what an operation's CPU kernel takes while it runs, and keeps once it is compiled."""
        place = len(self.trace.deltas)
        if func in SCRATCH and (scratch := SCRATCH[func](args, result)):
            self.trace.scratch[place] = max(scratch, self.trace.scratch.get(place, 0))
        if (compiled := compiled_kernel(func, args)) and compiled[0] not in self._compiled:
            self._compiled.add(compiled[0])
            self.trace.compiled[place] = self.trace.compiled.get(place, 0) + compiled[1]

    def _answered(self, question: Any, args: Sequence[Any]) -> bool:
        """Return the result of a test of values; ``answer`` if the values are fake."""
        try:
            return bool(question(*args))
        except DataDependentOutputException:
            self.is_asked = True
            return self._answer

    def mark(self, moment: Moment, name: str = "", num_bytes: int = 0) -> None:
        """Add a mark at this place."""
        self.trace.marks.append(Mark(len(self.trace.deltas), moment, name, num_bytes))
        self.works.append(self._work.plus(Work()))

    def finish(self) -> None:
        """Sum the work; call it once, after the last operation."""
        self.trace.work = self._work
        work, passes = self.trace.forward_work, list(self.trace.forward_passes())
        roots = [one for one in passes if self.trace.marks[one[0]].name == ROOT]
        if len(roots) > 1:
            self.trace.loss_work = self.works[roots[-1][0]].plus(self.works[roots[-2][1]], -1)
        for entered, left in passes:
            own_work = self.works[left].plus(self.works[entered], -1)
            name = self.trace.marks[entered].name
            if not roots or entered >= roots[-1][0]:
                work[name] = work[name].plus(own_work) if name in work else own_work

    def release(self, tensor: Tensor) -> int:
        """Stop counting a tensor's storage and return its bytes, or the tensor's bytes if it was not counted."""
        key = object_address(tensor.untyped_storage())
        # If the storage is not counted, it is shared with another tensor.
        return self._free(key) if key in self._alive else tensor.nbytes

    def _free(self, key: int) -> int:
        _, num_bytes, place = self._alive.pop(key)
        self.trace.made[len(self.trace.deltas)] = place
        self.trace.deltas.append(-num_bytes)
        return num_bytes

    def peak_bytes(self) -> int:
        """Return the peak of counted bytes so far."""
        return max(accumulate(self.trace.deltas), default=0)

    def _note(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = object_address(storage)
        if key in self._alive or storage in self._constants:
            return 0
        num_bytes = storage.nbytes()
        if not num_bytes:
            return 0

        def gone(_: Any) -> None:
            if key in self._alive:
                self._free(key)

        self._alive[key] = weakref.ref(storage, gone), num_bytes, len(self.trace.deltas)
        self.trace.deltas.append(num_bytes)
        return num_bytes


def record_step(
    model: nn.Module,
    wrap_plan: WrapPlan,
    run_forward: Callable[[], tuple[Tensor, Any]],
    inputs: Sequence[Tensor],
    teacher: nn.Module | None = None,
    others: Sequence[Tensor] = (),
    *,
    answer: bool = True,
) -> Recorder:
    """Record one micro-batch, forward and backward. Gradients of ``model`` are set to None.

    Args:
        model: model with fake tensors, prepared for training (number formats, batch norm, recomputation).
        wrap_plan: units of the model at level 3, which the marks name.
        run_forward: runs teacher, model and loss; returns the loss, and objects that the loop keeps until the update.
        inputs: tensors of a micro-batch that exist before its first operation.
        teacher: teacher whose units are marked too.
        others: tensors that are counted elsewhere (buffers of the loss).
        answer: see ``Recorder``.
    """
    constants = Storages([*model.parameters(), *model.buffers(), *inputs, *others])
    if teacher is not None:
        constants.add([*teacher.parameters(), *teacher.buffers()])
    recorder = Recorder(constants, answer=answer)
    recorder.trace.input_bytes = Storages(inputs).num_bytes
    with ExitStack() as stack:
        for name, param in model.named_parameters():
            if param.requires_grad:
                stack.enter_context(param.register_post_accumulate_grad_hook(_gradient_hook(recorder, name)))
        for root, is_teacher in ((model, False), (teacher, True)):
            modules = {} if root is None else dict(root.named_modules())
            for unit in (unit for unit in wrap_plan.units if not unit.is_replicated):
                for module in (modules[name] for name in unit.modules if name in modules):  # a teacher may lack modules
                    own = {"forward": module.forward} if "forward" in module.__dict__ else {}
                    stack.callback(module.__dict__.update, own)
                    stack.callback(module.__dict__.pop, "forward")
                    for handle in _marked(module, unit.modules[0], recorder, is_teacher):
                        stack.enter_context(handle)
        with recorder:
            loss, held = run_forward()
            recorder.mark(Moment.LOSS)
            recorder.trace.kept_bytes = sum(recorder.trace.deltas)
            loss.backward()
            del loss, held
    recorder.finish()
    for param in model.parameters():
        param.grad = None
    return recorder


def _gradient_hook(recorder: Recorder, name: str) -> Callable[[Tensor], None]:
    def note(param: Tensor) -> None:
        assert param.grad is not None
        recorder.mark(Moment.GRADIENT, name, recorder.release(param.grad))

    return note


def _marked(module: nn.Module, name: str, recorder: Recorder, is_teacher: bool) -> tuple[RemovableHandle, ...]:
    """Mark where a unit's module is entered and left, in both directions, until the handles are removed.

    ``module.forward`` is replaced, because a direct call of it runs no hooks, but a sharded unit is gathered there too.
    """
    forward, running = module.forward, list[str]()
    # The signature is kept: it tells which inputs of a batch the model takes.
    as_unit = wraps(forward)(lambda *args, **kwargs: (forward if running else module)(*args, **kwargs))
    module.__dict__["forward"] = as_unit

    def entered(_: nn.Module, args: Any, kwargs: Any) -> Any:
        running.append(name)
        recorder.mark(Moment.TEACHER_IN if is_teacher else Moment.FORWARD_IN, name)
        sources = [] if is_teacher or name == ROOT else _differentiable((args, kwargs))
        if not sources:
            return None
        joined = iter(_Join.apply(lambda: recorder.mark(Moment.BACKWARD_OUT, name), *sources))
        return pytree.tree_map_only(Tensor, lambda t: next(joined) if t.requires_grad else t, (args, kwargs))

    def left(_: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        recorder.mark(Moment.TEACHER_OUT if is_teacher else Moment.FORWARD_OUT, name)
        waiting = [Moment.BACKWARD_IN]  # for the first gradient of the outputs

        def on_gradient(_: Tensor) -> None:
            if waiting:
                recorder.mark(waiting.pop(), name)

        for result in [] if is_teacher else _differentiable(output):
            result.register_hook(on_gradient)

    # These hooks are outermost: a unit is gathered before anything in it runs, and freed after everything has run.
    return (
        module.register_forward_pre_hook(entered, prepend=True, with_kwargs=True),
        module.register_forward_hook(left),
    )


class _Join(torch.autograd.Function):
    """Ends a unit's backward pass for all inputs before the preceding unit's begins, as in a gathered unit.

    Autograd alone would run the backward pass of later inputs (small crops) through several units first.
    """

    @staticmethod
    def forward(ctx: Any, note: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs; ``note`` is called when the gradients of all inputs are known."""
        ctx.note = note
        return tuple(tensor.detach() for tensor in inputs)  # an input returned unchanged cannot be written in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients."""
        ctx.note()
        return None, *gradients


def _differentiable(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
