"""A training step in passes: one loss over several micro-batches or crops, with the activations of one pass at a time.

For a loss that couples samples, gradient accumulation differs from a larger batch: each micro-batch has its own
negatives, center or correlation. A loss that compares crops cannot be computed crop by crop at all. So a first round
of passes, without graph, collects the outputs, and the loss is differentiated with respect to them. A second round runs
each pass again, with graph, and backpropagates these gradients (GradCache, https://arxiv.org/abs/2101.06983).

``TRAINER.EXACT_ACCUMULATION`` computes one loss over all micro-batches. ``TRAINER.CROP_PASSES`` divides the crops of a
micro-batch among several passes.

Exact for models without batch norm. Batch norm has separate statistics per micro-batch, as without synchronization
over processes, and its running statistics are updated by one micro-batch after the other.

Cost: a second forward pass of the student (a third more computation), and memory for all outputs and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vissl_zero.data.dataset import ImageBatch, join_batches
from vissl_zero.engine.hook import Run
from vissl_zero.engine.passes import passes_of
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.keyed_random import rows_in_place, set_random_key
from vissl_zero.sharding.model.batch_norm import frozen_statistics

Gradients = list[Tensor | None]  # of each leaf of a model's outputs; None: the loss does not use this leaf


def accumulate_exactly(
    run: Run, micro_batches: Sequence[ImageBatch], dtype: torch.dtype, watch: AbstractContextManager[None]
) -> Tensor:
    """Accumulate the gradients of a step in two rounds of passes. Collective.

    Args:
        run: run in progress, after ``method.on_step``.
        micro_batches: micro-batches of this rank, on the CPU.
        dtype: data type of images.
        watch: context for the first forward pass with graph.
    Returns:
        0-d float64: this rank's share of the step's loss.
    """
    groups = [micro_batches] if run.plan.exact_accumulation else [[batch] for batch in micro_batches]
    num_samples = sum(batch.num_global for batch in micro_batches)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    observed, watches = [], iter([watch])
    for number, group in enumerate(groups, 1):
        loss, gradients, batches = _differentiate(run, group, dtype, num_samples)
        loss_sum += loss
        observed.append(batches)
        # Loaded a second time instead of kept, so that the device has the images of one micro-batch at a time.
        for index, batch in enumerate(_loaded(run, group, dtype), 1):
            is_last = number == len(groups) and index == len(group)
            model: Any = _SecondRound(run, gradients.pop(0), is_last, watches)
            # The method calls the model once. Its code after the call was differentiated in the first round already.
            with suppress(_PropagatedError):
                run.method.run_student(model, batch)
    run.method.update_state(observed)
    return loss_sum


def _differentiate(
    run: Run, group: Sequence[ImageBatch], dtype: torch.dtype, num_samples: int
) -> tuple[Tensor, list[Gradients], Any]:
    """Compute one loss over micro-batches and its gradients with respect to the student's outputs.

    Returns:
        This rank's share of the step's loss, the gradients per micro-batch, and the result of ``method.observe``.
    """
    method = run.method
    sizes = [batch.num_local for batch in group]
    parts, teacher_parts, rounds = [], [], []
    for batch in _loaded(run, group, dtype):
        if method.has_teacher:
            teacher_parts.append(run.run_teacher(batch))
        rounds.append(_FirstRound(run))
        model: Any = rounds[-1]
        # The second round repeats these images; running statistics must count each batch once.
        with frozen_statistics(run.sharded.model):
            parts.append(method.run_student(model, batch))
        run.show_probe(batch)  # now, while the kept features, the teacher's too, are those of this batch
    joined, whole = batch, parts[0]
    if len(group) > 1:
        # The joined batch has the images of all micro-batches only for losses that read pixels, such as MAE's.
        prepared = [
            batch.to(run.device, dtype) if method.loss_sees_images else replace(batch, images=[]) for batch in group
        ]
        joined = join_batches(prepared, sum(one.num_global for one in prepared)).to(run.device, dtype)
        whole = method.join(parts, sizes)
    teacher_outputs = None
    if method.has_teacher:
        teacher_outputs = method.join(teacher_parts, sizes) if len(group) > 1 else teacher_parts[0]
    set_random_key(run.plan.seed, run.step, joined.sample_ids)  # the loss may draw random numbers too
    loss = method.loss(whole, joined, teacher_outputs)
    # Weighted before differentiation: collectives inside the loss sum the ranks' gradients during backward.
    weighed = loss * (joined.num_local * run.world_size / num_samples)
    wanted = [leaf for one in rounds for leaf in one.leaves if is_float(leaf)]
    # A loss need not use every output of the model.
    each = iter(torch.autograd.grad(weighed, wanted, allow_unused=True))
    gradients = [[next(each) if is_float(leaf) else None for leaf in one.leaves] for one in rounds]
    share = loss.detach().double() * (joined.num_local / num_samples)
    return share, gradients, method.observe(whole, joined, teacher_outputs)


class _FirstRound:
    """A stand-in for the student that returns outputs without graph; the loss is differentiated down to them.

    Attributes:
        leaves: leaves of the model's outputs, detached; those of floating point require gradients.
    """

    def __init__(self, run: Run):
        self._run, self._num_calls = run, 0
        self.leaves: list[Any] = []

    def __call__(self, *args: Any, **options: Any) -> list[Any]:
        self._num_calls += 1
        if self._num_calls > 1:
            _refuse_second_call(self._run)
        with torch.no_grad():
            outputs = self._run.in_passes(self._run.sharded.model)(*args, **options)
        values, structure = pytree.tree_flatten(wide(outputs))
        self.leaves = [value.detach().requires_grad_() if is_float(value) else value for value in values]
        outer: list[Any] = pytree.tree_unflatten(self.leaves, structure)
        return outer


class _SecondRound:
    """A stand-in for the student that runs each pass again, with graph, and backpropagates the given gradients."""

    def __init__(self, run: Run, gradients: Gradients, is_last: bool, watches: Iterator[AbstractContextManager[None]]):
        self._run, self._gradients, self._is_last, self._watches = run, gradients, is_last, watches

    def __call__(self, images: list[Tensor], probe: Tensor | None = None, **options: Any) -> list[Any]:
        sharded, plan = self._run.sharded, self._run.plan
        passes = list(passes_of(images, probe, options, plan.crop_passes, plan.config.MODEL.VIEWS_APART))
        done = [0] * len(self._gradients)
        for number, one in enumerate(passes, 1):
            with sharded.micro_batch(is_last=self._is_last and number == len(passes)):
                with next(self._watches, nullcontext()):
                    outputs = pytree.tree_leaves(wide(one.run(sharded.model)))
                with rows_in_place(one.places):  # recomputed blocks must draw the same random numbers again
                    sharded.backward(surrogate(outputs, self._gradients, done))
        raise _PropagatedError


class _PropagatedError(Exception):
    """Leave ``run_student`` after backward: the rest of it was differentiated in the first round."""


def _refuse_second_call(run: Run) -> None:
    key = "EXACT_ACCUMULATION" if run.plan.crop_passes == 1 else "CROP_PASSES"
    name = run.plan.config.LOSS["name"]
    must = f"needs a method that calls the model once a micro-batch, and {name} calls it again"
    fix = f"Leave it out, or let run_student of {name} call the model once, with all its images."
    raise ConfigError([Problem(f"config.TRAINER.{key}", name, must, fix)])


def _loaded(run: Run, micro_batches: Sequence[ImageBatch], dtype: torch.dtype) -> Iterator[ImageBatch]:
    """Yield each micro-batch on the device, with random layers keyed by its samples."""
    for batch in micro_batches:
        set_random_key(run.plan.seed, run.step, batch.sample_ids)
        yield run.method.prepare(batch.to(run.device, dtype))


def is_float(value: Any) -> bool:
    """Check whether ``value`` is a tensor that may have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


def wide(outputs: list[Any]) -> list[Any]:
    """Cast tensors of half precision to float32, the dtype of losses, so that gradients of outputs are not rounded."""
    return pytree.tree_map(
        lambda value: value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value, outputs
    )


_HALF = (torch.float16, torch.bfloat16)


def surrogate(outputs: Sequence[Any], gradients: Gradients, done: list[int]) -> Tensor:
    """Return the sum of outputs times gradients: its gradient with respect to the outputs is that of the loss.

    Args:
        outputs: leaves of the outputs of one pass.
        gradients: gradient of the loss for each leaf, with the rows of all passes.
        done: number of rows per leaf in earlier passes; updated in place.
    """
    terms = []
    for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if isinstance(output, Tensor) and output.requires_grad:
            first = done[index]
            done[index] += len(output)
            # Unused leaves are kept in the graph with factor 0, so that every step reduces the same parameters.
            terms.append((output * (0 if gradient is None else gradient[first : done[index]])).sum())
    return torch.stack(terms).sum()
