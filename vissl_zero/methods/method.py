"""The interface of a method, which the training loop, the dry run, checkpoints and reports call.

A custom loss subclasses ``Method`` and defines ``forward(outputs, batch)``; everything else has a default. The class
is registered with ``@LOSSES.register("my_loss", config=MyLossConfig)`` and built with the fields of its config.

Rows of every output are *crop-major* over the resolutions in order: row j belongs to sample ``j % num_local``, crop
``j // num_local``, so ``rows.unflatten(0, (num_crops, num_local))`` has a crop per leading index.

**Gradients.** The loop weighs each rank's loss by its share of the samples, ``num_local / num_global``, and gradients
are summed over ranks with these weights. So a loss that is a mean over samples returns the mean over this rank's own.
A loss that couples samples across ranks must have exactly the gradient of one process with the whole batch. It has if
every rank returns one of two values: the mean over this rank's samples, in which a term may depend on all samples, or
the same number on every rank. Tensors of other ranks must come through ``methods/gather.py``, whose backward passes sum
over ranks. A rank may have no samples; it must make the same collective calls.

``EmbeddingMethod`` has what methods that compare embeddings of crops share: metrics, the collapse rule, momentum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.health import CollapseRule, RankCollapse, embedding_rank, embedding_sums
from vissl_zero.methods.mixing import Mixing
from vissl_zero.models.model import Model
from vissl_zero.registry import LOSSES, require_interface


class Batch(Protocol):
    """The fields of this rank's micro-batch that a method may read; ``data.dataset.ImageBatch`` has them."""

    @property
    def images(self) -> list[Tensor]:
        """One tensor per resolution, (crops of that resolution * B, 3, H_r, W_r), crop-major."""

    @property
    def num_crops(self) -> Sequence[int]:
        """Crops per sample in each resolution."""

    @property
    def targets(self) -> Tensor | None:
        """(B,) int64 class of each sample; None without labels."""

    @property
    def masks(self) -> Tensor | None:
        """(B, H, W) uint8 class of each pixel of the one crop, 255 where a pixel is ignored; None without masks."""

    @property
    def boxes(self) -> Tensor | None:
        """(V * B, 4) box of each crop in its image, crop-major; None: the transforms do not keep them."""

    @property
    def sample_ids(self) -> Tensor:
        """(B,) int64 index of each sample in the source."""

    @property
    def num_local(self) -> int:
        """Samples of this rank, B; may differ between ranks and may be 0."""

    @property
    def num_global(self) -> int:
        """Samples of this micro-batch over all ranks."""


B = TypeVar("B", bound=Batch)


class Method(nn.Module):
    """Base of all methods, registered in LOSSES: runs student and teacher, computes the loss and its metrics.

    A subclass defines ``forward(outputs, batch)``, the loss; with a teacher, also the argument ``teacher_outputs``.

    ``set_images`` and ``set_length`` are called once, ``on_epoch`` where an epoch begins (in the middle of one, a
    resumed run does not). For each optimizer step, on every rank, the loop calls ``on_step`` once; then per
    micro-batch ``prepare``, ``run_teacher`` (where ``has_teacher``), ``run_student``, ``loss``, the backward pass and
    ``observe``; then ``update_state`` once. So centers, queues and memories are constant within a step and change once
    per step, however many micro-batches the step has. State that a resumed run needs belongs in buffers or in
    ``get_extra_state``.

    Attributes:
        has_teacher: the method has a second model, which is not trained by gradient (see ``run_teacher``).
        teacher_follows: the teacher is a moving average of the model (``momentum``); else the model that
            ``make_teacher`` returns, unchanged.
        teacher_crops: crops that the teacher sees, in ascending order; None: all, as the student.
        needs_initial_embeddings: before the first step, the model runs on all training images without gradient, and
            ``observe`` receives the outputs.
        couples_samples: a sample's loss depends on others of its micro-batch, or on state that a micro-batch changes.
        remembers_images: the method keeps state for each training image (see ``set_images``).
        loss_sees_images: ``forward`` reads ``batch.images``, which exact accumulation otherwise leaves out.
        ignored_label: label of images that the loss ignores, where the first head predicts classes; None elsewhere.
        predicts_pixels: the first head predicts the class of each pixel, which ``batch.masks`` has.
        mixing: mixes the images of a micro-batch; set after construction, if DATA.TRAIN has a mixing collator.
        views_apart: the model runs on each crop of an image separately, so that batch norm has the statistics of one
            view; set after construction, by MODEL.VIEWS_APART.
        num_prototypes: number of prototypes in each layer, for a method whose ``health`` counts the prototypes in use.
        guessing_loss: loss at chance level, drawn in the report; None if not known.
    """

    has_teacher: bool = False
    couples_samples: bool = True
    teacher_follows: bool = True
    teacher_crops: Sequence[int] | None = None
    needs_initial_embeddings: bool = False
    remembers_images: bool = False
    loss_sees_images: bool = False
    ignored_label: int | None = None
    predicts_pixels: bool = False
    num_prototypes: Sequence[int] = ()
    guessing_loss: float | None = None
    mixing: Mixing | None = None
    views_apart: bool = False

    def forward(self, *args: Any) -> Tensor:
        """Compute the loss; see the class."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(outputs, batch)")

    def loss(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Tensor:
        """Compute the loss, a 0-d tensor, by ``forward``. The module's docstring says which gradient it must have.

        Args:
            outputs: one entry per head of the model.
            batch: micro-batch from which ``outputs`` were computed.
            teacher_outputs: the teacher's outputs, without gradient; None without a teacher.
        """
        loss: Tensor = self(outputs, batch) if teacher_outputs is None else self(outputs, batch, teacher_outputs)
        return loss

    def prepare(self, batch: B) -> B:
        """Return the micro-batch that student, teacher and loss see: mixed, and with one tensor per crop if apart."""
        if self.mixing is not None:
            images, _ = self.mixing(batch.images, batch.num_local)
            batch = replace(batch, images=images)  # type: ignore[type-var]
        if self.views_apart:
            # A tensor for each crop, which the model then runs apart from the others.
            columns = zip(batch.images, batch.num_crops, strict=True)
            apart = [view for images, count in columns for view in images.chunk(count)]
            batch = replace(batch, images=apart, num_crops=[1] * len(apart))  # type: ignore[type-var]
        return batch

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Compute the model's outputs for a micro-batch: an entry per head."""
        outputs: list[Any] = model(batch.images, self.probe())
        return outputs

    def make_teacher(self, model: Model) -> Model:
        """Make the teacher at the start of a run, without gradients.

        Args:
            model: copy of the trained model; may be changed in place.
        """
        return model.as_teacher()

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Compute the teacher's outputs; called without gradient. By default it sees ``teacher_crops``."""
        images = batch.images if self.teacher_crops is None else images_of(batch, self.teacher_crops)
        outputs: list[Any] = model(images)
        return outputs

    def momentum(self, step: int) -> float:
        """Return the teacher's momentum at optimizer step ``step``, from 0: teacher = m * teacher + (1 - m) * model."""
        raise NotImplementedError(f"{type(self).__name__} has a teacher and must define momentum(step)")

    def moves_anchor(self, step: int) -> bool:
        """Check whether the teacher's anchor, if any, becomes a copy of its trunk after optimizer step ``step``."""
        return False

    def heaviest_step(self) -> int:
        """Return an optimizer step, from 0, that takes as much memory and time as any other, for the dry run."""
        return 0

    def join(self, parts: Sequence[list[Any]], num_samples: Sequence[int]) -> list[Any]:
        """Join the outputs of several micro-batches to those of one; see ``_join_rows``.

        Args:
            parts: outputs of student or teacher for each micro-batch. Leaves other than tensors are taken from the
                first.
            num_samples: number of samples in each micro-batch.
        """
        columns = zip(*map(pytree.tree_leaves, parts), strict=True)
        joined = [_join_rows(column, num_samples) if isinstance(column[0], Tensor) else column[0] for column in columns]
        outputs: list[Any] = pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))
        return outputs

    def probe(self) -> Tensor | None:
        """Return rows (q, D) that the head scores in the next forward pass, without gradient; None: no rows."""
        # In the forward pass, because a sharded head has its full weights only there.
        return None

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the tensors of a micro-batch for ``update_state``, detached, or None. Must not change the state.

        They are kept until the end of the step: return sums rather than rows where sums suffice. No communication.

        Args:
            outputs: the student's outputs.
            batch: the micro-batch, or with exact accumulation all of this rank's samples of the step.
            teacher_outputs: the teacher's outputs; None without a teacher.
        """
        return None

    def update_state(self, observed: Sequence[Any]) -> None:
        """Move the method's own state (center, queue, memory), once per optimizer step. May be a collective.

        Args:
            observed: results of ``observe``, one per micro-batch; equally many on every rank.
        """

    def set_images(self, num_images: int) -> None:
        """Set the number of training images, the size of a memory. Called before the method is cast to its dtype."""

    def set_length(self, num_steps: int, steps_per_epoch: int) -> None:
        """Set the length of schedules, in optimizer steps (``MAX_STEPS`` does not shorten it)."""

    def on_epoch(self, epoch: int) -> None:
        """Prepare for a new epoch, counted from 0. May be a collective."""

    def on_step(self, step: int, epoch: int) -> None:
        """Prepare for a new optimizer step; both count from 0."""

    def health_sums(self) -> Tensor:
        """Return this rank's terms of ``health`` for the last micro-batch, 1-d; the loop sums them over ranks."""
        return torch.empty(0)

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute metrics of the last micro-batch of all ranks, for logs and the report: name -> value.

        Args:
            sums: ``health_sums``, summed over all ranks, float64.
        """
        return {}

    def collapse_rule(self, num_steps: int) -> CollapseRule | None:
        """Return the rule that detects from ``health``, step by step, that the model collapses; None: no rule.

        Args:
            num_steps: number of steps of the run.
        """
        return None

    def normalized_rows(self) -> list[str]:
        """Return full names of 2-d parameters whose rows are set to unit length after each optimizer step."""
        return []


def _join_rows(parts: Sequence[Tensor], num_samples: Sequence[int]) -> Tensor:
    """Join crop-major rows of several micro-batches to the rows of one micro-batch with all their samples.

    Args:
        parts: (V * n_i, ...) each.
        num_samples: n_i of each, at least 1.
    """
    views = len(parts[0]) // num_samples[0]
    # View by view: rows are crop-major, so that rows of whole micro-batches in turn would mix the crops.
    by_view = [part.unflatten(0, (views, count)) for part, count in zip(parts, num_samples, strict=True)]
    return torch.cat(by_view, dim=1).flatten(0, 1)


def build_method(loss_config: Mapping[str, Any], num_images: int = 0) -> Method:
    """Build the method whose loss ``LOSS.name`` names, with the keys under that name.

    Args:
        loss_config: ``config.LOSS`` after resolution: ``{name: <loss>, <loss>: {key: value}}``.
        num_images: number of images of the training data.

    Raises:
        ConfigError: the name or a key is wrong.
    """
    name = loss_config["name"]
    method: Method = LOSSES.get(name).build(**(loss_config.get(name) or {}))
    require_interface(LOSSES, name, method, base=Method)
    # Here rather than in the constructor: a recipe does not know the number of images.
    method.set_images(num_images)
    return method


class EmbeddingMethod(Method):
    """Base of methods whose first head gives an embedding for each crop; call ``_note`` in ``forward``.

    Attributes:
        epoch: current epoch, from 0.
        momenta: the teacher's momentum at the start and at the end of the run, equal if constant; None: the method has
            no such teacher, or overrides ``momentum``.
    """

    momenta: tuple[float, float] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._last: Tensor | None = None
        self._num_steps = 1
        self._steps_per_epoch = 1
        self._step = self.epoch = 0

    def on_step(self, step: int, epoch: int) -> None:
        """Remember the step, which schedules follow, and the epoch, which masks are keyed by."""
        self._step, self.epoch = step, epoch

    def set_length(self, num_steps: int, steps_per_epoch: int) -> None:
        """Remember the length, for schedules."""
        self._num_steps, self._steps_per_epoch = max(num_steps, 1), max(steps_per_epoch, 1)

    def momentum(self, step: int) -> float:
        """Interpolate ``momenta`` along half a cosine (https://arxiv.org/abs/2006.07733, 3.2); see ``Method``."""
        if self.momenta is None:
            return super().momentum(step)
        first, last = self.momenta
        # The default of BYOL, DINO, iBOT, DINOv2 and MoCo v3; equal ends make it constant.
        return last - (last - first) * (math.cos(math.pi * step / self._num_steps) + 1) / 2

    def health_sums(self) -> Tensor:
        """Compute ``embedding_sums`` of the last micro-batch."""
        return embedding_sums(self._last) if self._last is not None else super().health_sums()

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute ``effective_rank``."""
        return {} if self._last is None else embedding_rank(sums)

    def collapse_rule(self, num_steps: int) -> CollapseRule | None:
        """Return the rule that detects nearly equal embeddings of all images."""
        # A good part of the run, because a model that has not learned yet looks like one that is stuck.
        return RankCollapse(patience=max(500, num_steps // 4))

    def _note(self, embeddings: Tensor) -> None:
        """Keep the rows (m, D) whose metrics this step logs."""
        # Detached: a kept graph would hold the activations of the step until the next one.
        self._last = embeddings.detach()

    def _linear_momentum(self, start: float, step: int, end: float) -> float:
        """Interpolate from ``start`` to ``end`` in a straight line over the run."""
        return start + (end - start) * min(step / self._num_steps, 1.0)


class GuessingMethod(Method):
    """Base of methods that predict classes; ``health`` is the accuracy of the last micro-batch.

    Attributes:
        share_name: name of that metric.
    """

    share_name: str
    _counts: Tensor | None = None

    def health_sums(self) -> Tensor:
        """Return the number of predictions in the last micro-batch, and of correct ones."""
        return super().health_sums() if self._counts is None else self._counts

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute the share of correct predictions."""
        if self._counts is None:
            return {}
        counted, right = sums.tolist()
        return {self.share_name: right / max(counted, 1)}

    def _note_guesses(self, counted: Tensor, right: Tensor) -> None:
        """Keep the number of predictions and of correct ones, 0-d, for ``health``."""
        self._counts = torch.stack((counted, right))


def crops_of(rows: Tensor, num_crops: int, batch: Batch) -> tuple[Tensor, ...]:
    """Split rows (num_crops * B, D) crop by crop, (B, D) each.

    Raises:
        ConfigError: the transforms do not make ``num_crops`` crops of an image.
    """
    if len(rows) != num_crops * batch.num_local:
        must = f"must make {num_crops} crops of an image for this loss"
        raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", str(sum(batch.num_crops)), must, "Correct them.")])
    return rows.unflatten(0, (num_crops, batch.num_local)).unbind(0)


def images_of(batch: Batch, crops: Sequence[int]) -> list[Tensor]:
    """Select the images of some crops: a tensor for each resolution among these crops, rows crop-major.

    Args:
        crops: crops in ascending order.
    """
    chosen, first = [], 0
    for images, count in zip(batch.images, batch.num_crops, strict=True):
        inside = [crop - first for crop in crops if first <= crop < first + count]
        if inside:
            chosen.append(images.unflatten(0, (count, batch.num_local))[inside].flatten(0, 1))
        first += count
    return chosen


def output_of(outputs: list[Any], name: str) -> Any:
    """Return the first head's output, which must have a field ``name``.

    Raises:
        ConfigError: it has none.
    """
    if not hasattr(outputs[0], name):
        must = f"needs a first head that gives {name}"
        fix = "vissl-zero list heads has them; docs/methods.md says which method takes which."
        raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", type(outputs[0]).__name__, must, fix)])
    return outputs[0]
