"""One loss over all micro-batches of a step, equal to that of as many processes with one micro-batch each.

Accumulating gradients of a loss that couples samples is not the same as a larger batch: each micro-batch has its own
negatives, center or correlation. Here a first pass without graph collects the outputs of all micro-batches; the loss of
all of them gives a gradient for each output; a second pass runs each micro-batch again, with graph, and propagates
those (GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983).

Exact for models without batch norm. With it, each micro-batch has statistics of its own, as one process of several has
without synchronized batch norm, and running statistics see the micro-batches one after the other.

Cost: the student's forward pass twice (a third more computation), one loss instead of many, and the memory of all
outputs of the step; activations are those of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vissl_zero.data.dataset import ImageBatch
from vissl_zero.engine.hook import Run
from vissl_zero.methods.method import join_rows
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.sharding.model.batch_norm import frozen_statistics


def accumulate_exactly(
    run: Run, micro_batches: Sequence[ImageBatch], dtype: torch.dtype, watch: AbstractContextManager[None]
) -> Tensor:
    """Accumulate gradients of the loss over all micro-batches of all ranks.

    Args:
        run: run in progress; ``method.on_step`` has been called.
        micro_batches: micro batches of this rank, on the CPU.
        dtype: data type of images.
        watch: entered around the first forward pass with graph.
    Returns:
        0-d float64: this rank's share of the step's loss.
    """
    sharded, method = run.sharded, run.method
    num_samples = sum(batch.num_global for batch in micro_batches)
    if method.loss_sees_images:  # once: the loss sees the whole step's
        joined = _join([batch.to(run.device, dtype) for batch in micro_batches], with_images=True)
    else:
        joined = _join(micro_batches, with_images=False).to(run.device, dtype)
    parts, teacher_parts = [], []
    with torch.no_grad():
        for batch in _loaded(run, micro_batches, dtype):
            if method.has_teacher:
                teacher_parts.append(run.run_teacher(batch))
            # The second pass shows the same images, and running statistics must count each batch once.
            with frozen_statistics(sharded.model):
                parts.append(_wide(method.run_student(sharded.model, batch)))
            run.show_probe(batch)  # here, where the teacher's features are this batch's too
    set_random_key(run.plan.seed, run.step, joined.sample_ids)  # the loss may draw, too
    sizes = [batch.num_local for batch in micro_batches]
    outputs, structure = pytree.tree_flatten(method.join(parts, sizes))
    leaves = [_leaf(value) for value in outputs]
    whole = pytree.tree_unflatten(leaves, structure)
    teacher_outputs = method.join(teacher_parts, sizes) if method.has_teacher else None
    loss = method.loss(whole, joined, teacher_outputs)
    # Weighed before it is differentiated: what couples ranks sums their gradients on the way.
    weighed = loss * (joined.num_local * run.world_size / num_samples)
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    feature_grads = iter(torch.autograd.grad(weighed, wanted, allow_unused=True))
    gradients = [next(feature_grads) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]
    for index, batch in enumerate(_loaded(run, micro_batches, dtype)):
        with sharded.micro_batch(is_last=index == len(micro_batches) - 1):
            with watch if index == 0 else nullcontext():
                again = pytree.tree_leaves(_wide(method.run_student(sharded.model, batch)))
            sharded.backward(_surrogate(again, gradients, sizes, index))
    method.update_state([method.observe(whole, joined, teacher_outputs)])
    return loss.detach().double() * (joined.num_local / num_samples)


def _loaded(run: Run, micro_batches: Sequence[ImageBatch], dtype: torch.dtype) -> Any:
    """Yield each micro-batch on the device, random layers keyed by it."""
    for batch in micro_batches:
        set_random_key(run.plan.seed, run.step, batch.sample_ids)
        yield run.method.prepare(batch.to(run.device, dtype))


def _join(micro_batches: Sequence[ImageBatch], with_images: bool) -> ImageBatch:
    """Join all micro-batches of this rank as one; without images unless the loss looks at them."""
    first, sizes = micro_batches[0], [batch.num_local for batch in micro_batches]
    targets = [batch.targets for batch in micro_batches]
    columns = zip(*(batch.images for batch in micro_batches), strict=True)
    return replace(
        first,
        images=[join_rows(images, sizes) for images in columns] if with_images else [],
        changes=(),
        targets=None if first.targets is None else torch.cat([t for t in targets if t is not None]),
        masks=None if first.masks is None else torch.cat([b.masks for b in micro_batches if b.masks is not None]),
        boxes=join_rows(boxes, sizes) if (boxes := [b.boxes for b in micro_batches if b.boxes is not None]) else None,
        sample_ids=torch.cat([batch.sample_ids for batch in micro_batches]),
        num_global=sum(batch.num_global for batch in micro_batches),
    )


def _wide(outputs: list[Any]) -> list[Any]:
    """Widen half precision to float32, as losses compute: gradients of outputs would lose digits in between."""
    return pytree.tree_map(
        lambda value: value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value, outputs
    )


_HALF = (torch.float16, torch.bfloat16)


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def _surrogate(outputs: Sequence[Any], gradients: Sequence[Tensor | None], sizes: Sequence[int], index: int) -> Tensor:
    """Return a scalar whose gradient with respect to the outputs is that of the loss of all micro-batches."""
    terms = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if isinstance(output, Tensor) and output.requires_grad:
            if gradient is None:  # unused, but still part of the graph in every step
                terms.append((output * 0).sum())
            else:
                views = len(gradient) // sum(sizes)
                crop_gradient = (
                    gradient.unflatten(0, (views, sum(sizes))).split(list(sizes), dim=1)[index].flatten(0, 1)
                )
                terms.append((output * crop_gradient).sum())
    return torch.stack(terms).sum()
