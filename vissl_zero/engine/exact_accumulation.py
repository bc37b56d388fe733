"""A step in passes: the loss of several micro-batches, or of the crops of one, without the activations of all of them.

Accumulating gradients of a loss that couples samples is not the same as a larger batch: each micro-batch has its own
negatives, center or correlation. Nor can a loss that compares crops be computed crop by crop. Here a first round of
passes without graph collects all outputs that the loss needs; the loss gives a gradient for each; a second round runs
each pass again, with graph, and propagates those (GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983).

``TRAINER.EXACT_ACCUMULATION`` makes one loss of all micro-batches, ``TRAINER.CROP_PASSES`` several passes of one.

Exact for models without batch norm. With it, each micro-batch has statistics of its own, as one process of several has
without synchronized batch norm, and running statistics see the micro-batches one after the other.

Cost: the student's forward pass twice (a third more computation), one loss instead of many, and the memory of the
outputs that a loss sees and of their gradients; activations are those of one pass.
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

Gradients = list[Tensor | None]  # of each leaf of what a model gave; None where the loss does not use it


def accumulate_exactly(
    run: Run, micro_batches: Sequence[ImageBatch], dtype: torch.dtype, watch: AbstractContextManager[None]
) -> Tensor:
    """Accumulate gradients in two rounds of passes.

    Args:
        run: run in progress; ``method.on_step`` has been called.
        micro_batches: micro batches of this rank, on the CPU.
        dtype: data type of images.
        watch: entered around the first forward pass with graph.
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
        for index, batch in enumerate(_loaded(run, group, dtype), 1):
            is_last = number == len(groups) and index == len(group)
            model: Any = _SecondRound(run, gradients.pop(0), is_last, watches)
            with suppress(_PropagatedError):
                run.method.run_student(model, batch)
    run.method.update_state(observed)
    return loss_sum


def _differentiate(
    run: Run, group: Sequence[ImageBatch], dtype: torch.dtype, num_samples: int
) -> tuple[Tensor, list[Gradients], Any]:
    """Compute one loss of some micro-batches, and its gradients; no activations and no outputs are kept.

    Returns:
        This rank's share of the step's loss, gradients of the student's outputs for each micro-batch, and what the
        method observed.
    """
    method = run.method
    sizes = [batch.num_local for batch in group]
    parts, teacher_parts, rounds = [], [], []
    for batch in _loaded(run, group, dtype):
        if method.has_teacher:
            teacher_parts.append(run.run_teacher(batch))
        rounds.append(_FirstRound(run))
        model: Any = rounds[-1]
        # The second round shows the same images, and running statistics must count each batch once.
        with frozen_statistics(run.sharded.model):
            parts.append(method.run_student(model, batch))
        run.show_probe(batch)  # here, where the teacher's features are this batch's too
    joined, whole = batch, parts[0]
    if len(group) > 1:
        prepared = [
            batch.to(run.device, dtype) if method.loss_sees_images else replace(batch, images=[]) for batch in group
        ]
        joined = join_batches(prepared, sum(one.num_global for one in prepared)).to(run.device, dtype)
        whole = method.join(parts, sizes)
    teacher_outputs = None
    if method.has_teacher:
        teacher_outputs = method.join(teacher_parts, sizes) if len(group) > 1 else teacher_parts[0]
    set_random_key(run.plan.seed, run.step, joined.sample_ids)  # the loss may draw, too
    loss = method.loss(whole, joined, teacher_outputs)
    # Weighed before it is differentiated: what couples ranks sums their gradients on the way.
    weighed = loss * (joined.num_local * run.world_size / num_samples)
    wanted = [leaf for one in rounds for leaf in one.leaves if is_float(leaf)]
    each = iter(torch.autograd.grad(weighed, wanted, allow_unused=True))
    gradients = [[next(each) if is_float(leaf) else None for leaf in one.leaves] for one in rounds]
    share = loss.detach().double() * (joined.num_local / num_samples)
    return share, gradients, method.observe(whole, joined, teacher_outputs)


class _FirstRound:
    """Stands in for the student: gives outputs without activations, which begin the graph of the loss.

    Attributes:
        leaves: leaves of what the model gave.
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
    """Stands in for the student: runs each pass again, with graph, and propagates the gradients of its outputs."""

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
                with rows_in_place(one.places):  # what is recomputed draws the same numbers
                    sharded.backward(surrogate(outputs, self._gradients, done))
        raise _PropagatedError


class _PropagatedError(Exception):
    """All is propagated: what a method does with outputs was differentiated in the first round."""


def _refuse_second_call(run: Run) -> None:
    key = "EXACT_ACCUMULATION" if run.plan.crop_passes == 1 else "CROP_PASSES"
    name = run.plan.config.LOSS["name"]
    must = f"needs a method that calls the model once a micro-batch, and {name} calls it again"
    fix = f"Leave it out, or let run_student of {name} call the model once, with all its images."
    raise ConfigError([Problem(f"config.TRAINER.{key}", name, must, fix)])


def _loaded(run: Run, micro_batches: Sequence[ImageBatch], dtype: torch.dtype) -> Iterator[ImageBatch]:
    """Yield each micro-batch on the device, random layers keyed by it."""
    for batch in micro_batches:
        set_random_key(run.plan.seed, run.step, batch.sample_ids)
        yield run.method.prepare(batch.to(run.device, dtype))


def is_float(value: Any) -> bool:
    """Check for a tensor that may have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


def wide(outputs: list[Any]) -> list[Any]:
    """Widen half precision to float32, as losses compute: gradients of outputs would lose digits in between."""
    return pytree.tree_map(
        lambda value: value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value, outputs
    )


_HALF = (torch.float16, torch.bfloat16)


def surrogate(outputs: Sequence[Any], gradients: Gradients, done: list[int]) -> Tensor:
    """Return a scalar whose gradient with respect to the outputs of a pass is that of the loss.

    Args:
        outputs: leaves.
        gradients: of the outputs of all passes.
        done: rows of each that earlier passes had; those of this pass are added.
    """
    terms = []
    for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if isinstance(output, Tensor) and output.requires_grad:
            first = done[index]
            done[index] += len(output)
            # Unused ones are part of the graph in every step all the same.
            terms.append((output * (0 if gradient is None else gradient[first : done[index]])).sum())
    return torch.stack(terms).sum()
