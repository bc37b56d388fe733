"""What every method is to the training loop, the dry run, checkpoints and reports: the only class they know.

A loss of your own subclasses ``Method`` and defines ``forward(outputs, batch)``; everything else has a default. It
is registered with ``@LOSSES.register("my_loss", config=MyLossConfig)`` and built with the fields of its config.

Rows of every output are *crop-major* over the resolutions in order: row j belongs to sample ``j % num_local``, crop
``j // num_local``, so ``rows.unflatten(0, (num_crops, num_local))`` has a crop per leading index.

**Gradients.** The loop weighs each rank's loss by its share of the samples, ``num_local / num_global``, and gradients
are summed over ranks with these weights. So a loss that is a mean over samples returns the mean over this rank's own.
A loss that couples samples across ranks must give exactly the gradient of the single-process loss on the whole batch.
Both come out right if every rank returns either the mean over its own samples of a term that may look at all samples,
or the same number for the whole batch, and whatever it takes from other ranks comes through ``methods/gather.py``,
whose backward passes sum over ranks. A rank may have no samples; it must make the same collective calls.

What methods that compare embeddings of crops share is here too: crops out of rows, figures, collapse, momentum.
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
    """What a method may know about a micro-batch of this rank; the data room's ``Batch`` is one."""

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
        """(B, H, W) uint8 class of each pixel of the one crop, 255 where it does not count; None without masks."""

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
    """Base of all methods, registered in LOSSES: what student and teacher see, the loss, the figures.

    A subclass defines ``forward(outputs, batch)``, the loss; with a teacher it takes ``teacher_outputs``, too.

    ``set_images`` and ``set_length`` are called once, ``on_epoch`` where an epoch begins (in the middle of one, a
    resumed run does not). For each optimizer step, on every rank, the loop calls ``on_step`` once; then per
    micro-batch ``prepare``, ``run_teacher`` (where ``has_teacher``), ``run_student``, ``loss``, the backward pass and
    ``observe``; then ``update_state`` once. So centers, queues and memories stand still within a step and move once per
    step, however many micro-batches it has. State that a resumed run needs belongs in buffers or in
    ``get_extra_state``.

    Attributes:
        has_teacher: a second model is kept and run, which learns nothing by gradient (see ``run_teacher``).
        teacher_follows: it is a copy of the model that follows it by ``momentum``; else it stays as ``make_teacher``
            gave it.
        teacher_crops: crops that the teacher sees, in ascending order; None: all, as the student.
        needs_initial_embeddings: before the first step, all training images go through the model once without gradient,
            and the outputs to ``observe``.
        couples_samples: a sample's loss depends on others of its micro-batch, or on state that a micro-batch changes.
        remembers_images: it keeps state for each training image, whose number ``set_images`` tells.
        loss_sees_images: ``forward`` looks at ``batch.images``, which exact accumulation otherwise leaves out.
        ignored_label: label of images that do not count, where the first head predicts classes; None elsewhere.
        predicts_pixels: its first head predicts the class of each pixel, which ``batch.masks`` tells.
        mixing: mixes the images of a micro-batch; set after construction, where DATA.TRAIN asks for it.
        views_apart: each crop of an image goes through the model by itself, so that batch norm has its statistics view
            by view; set after construction, by MODEL.VIEWS_APART.
        num_prototypes: number of prototypes in each layer, for a method whose ``health`` counts those in use.
        guessing_loss: loss of a model that tells nothing apart, drawn in the report; None where it is not known.
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
        """Compute the loss, a 0-d tensor; see the module for what its gradient must be. It calls ``forward``.

        Args:
            outputs: one entry per head of the model.
            batch: the micro-batch they were computed from.
            teacher_outputs: the teacher's outputs, without gradient; None without a teacher.
        """
        loss: Tensor = self(outputs, batch) if teacher_outputs is None else self(outputs, batch, teacher_outputs)
        return loss

    def prepare(self, batch: B) -> B:
        """Make the micro-batch what student, teacher and loss see: mixed by ``mixing``, a tensor per crop if apart."""
        if self.mixing is not None:
            images, _ = self.mixing(batch.images, batch.num_local)
            batch = replace(batch, images=images)  # type: ignore[type-var]
        if self.views_apart:
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
            model: a copy of the one that is trained, to be changed in place.
        """
        return model.as_teacher()

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Compute the teacher's outputs; called without gradient. By default it sees ``teacher_crops``."""
        images = batch.images if self.teacher_crops is None else images_of(batch, self.teacher_crops)
        outputs: list[Any] = model(images)
        return outputs

    def momentum(self, step: int) -> float:
        """Return the weight of the teacher's past after optimizer step ``step`` (from 0); the rest is the student's."""
        raise NotImplementedError(f"{type(self).__name__} has a teacher and must define momentum(step)")

    def moves_anchor(self, step: int) -> bool:
        """Say whether the teacher's anchor, if any, becomes a copy of its trunk after optimizer step ``step``."""
        return False

    def heaviest_step(self) -> int:
        """Name an optimizer step that takes as much memory and time as any, for the dry run."""
        return 0

    def join(self, parts: Sequence[list[Any]], num_samples: Sequence[int]) -> list[Any]:
        """Join outputs of several micro-batches as those of one; see ``_join_rows``. What is no tensor is the first's.

        Args:
            parts: outputs of student or teacher, a micro-batch each.
            num_samples: number of samples in each.
        """
        columns = zip(*map(pytree.tree_leaves, parts), strict=True)
        joined = [_join_rows(column, num_samples) if isinstance(column[0], Tensor) else column[0] for column in columns]
        outputs: list[Any] = pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))
        return outputs

    def probe(self) -> Tensor | None:
        """Return rows (q, D) for the head to score in the coming forward pass, without gradient; None: nothing."""
        return None

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return what ``update_state`` needs of a micro-batch, without graph, or None. It must not change the state.

        It is kept until the end of the step, so sums are better than rows where they suffice. No communication.

        Args:
            outputs: the student's.
            batch: the micro-batch, or with exact accumulation all of this rank's samples of the step.
            teacher_outputs: the teacher's outputs; None without a teacher.
        """
        return None

    def update_state(self, observed: Sequence[Any]) -> None:
        """Move the method's own state (center, queue, memory), once per optimizer step. May be a collective.

        Args:
            observed: what ``observe`` gave, a micro-batch each; every rank has as many.
        """

    def set_images(self, num_images: int) -> None:
        """Set how many images there are to train on: the size of a memory. Called before the method gets its dtype."""

    def set_length(self, num_steps: int, steps_per_epoch: int) -> None:
        """Set how long the schedule is, in optimizer steps (``MAX_STEPS`` does not shorten it)."""

    def on_epoch(self, epoch: int) -> None:
        """Prepare for a new epoch, counted from 0. May be a collective."""

    def on_step(self, step: int, epoch: int) -> None:
        """Prepare for a new optimizer step; both count from 0."""

    def health_sums(self) -> Tensor:
        """Return what ``health`` needs of this rank's last micro-batch, 1-d; the loop sums it over ranks."""
        return torch.empty(0)

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute figures on the last micro-batch of all ranks, for logs and the report.

        Args:
            sums: ``health_sums`` of all ranks together, float64.
        """
        return {}

    def collapse_rule(self, num_steps: int) -> CollapseRule | None:
        """Return what tells from ``health``, step by step, that the model collapses; None: nothing does.

        Args:
            num_steps: number of steps of the run.
        """
        return None

    def normalized_rows(self) -> list[str]:
        """Return full names of 2-d parameters whose rows are set to unit length after each optimizer step."""
        return []


def _join_rows(parts: Sequence[Tensor], num_samples: Sequence[int]) -> Tensor:
    """Join crop-major rows of several micro-batches, as those of one micro-batch with all their samples.

    Args:
        parts: (V * n_i, ...) each.
        num_samples: n_i of each, at least 1.
    """
    views = len(parts[0]) // num_samples[0]
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
    method.set_images(num_images)
    return method


class EmbeddingMethod(Method):
    """Base of methods whose first head gives an embedding for each crop; call ``_note`` in ``forward``.

    Attributes:
        epoch: the present one, from 0.
        momenta: the teacher's momentum at the start and at the end of the run, the same one where it stays; None: there
            is no such teacher, or ``momentum`` is overridden.
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
        return last - (last - first) * (math.cos(math.pi * step / self._num_steps) + 1) / 2

    def health_sums(self) -> Tensor:
        """Compute ``embedding_sums`` of the last micro-batch."""
        return embedding_sums(self._last) if self._last is not None else super().health_sums()

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute ``effective_rank``."""
        return {} if self._last is None else embedding_rank(sums)

    def collapse_rule(self, num_steps: int) -> CollapseRule | None:
        """Return the rule for a collapse: all images with nearly the same embedding."""
        return RankCollapse(patience=max(500, num_steps // 4))

    def _note(self, embeddings: Tensor) -> None:
        """Remember the rows (m, D) that the figures of this step are about."""
        self._last = embeddings.detach()

    def _linear_momentum(self, start: float, step: int, end: float) -> float:
        """Interpolate from ``start`` to ``end`` in a straight line over the run."""
        return start + (end - start) * min(step / self._num_steps, 1.0)


class GuessingMethod(Method):
    """Base of methods that guess classes; ``health`` is the share of the last guesses that are right.

    Attributes:
        share_name: name of that share.
    """

    share_name: str
    _counts: Tensor | None = None

    def health_sums(self) -> Tensor:
        """Return how many guesses the last micro-batch had, and how many of them are right."""
        return super().health_sums() if self._counts is None else self._counts

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute the share of guesses that are right."""
        if self._counts is None:
            return {}
        counted, right = sums.tolist()
        return {self.share_name: right / max(counted, 1)}

    def _note_guesses(self, counted: Tensor, right: Tensor) -> None:
        """Remember the numbers, 0-d, that ``health`` is about."""
        self._counts = torch.stack((counted, right))


def crops_of(rows: Tensor, num_crops: int, batch: Batch) -> tuple[Tensor, ...]:
    """Split rows (num_crops * B, D) crop by crop, (B, D) each.

    Raises:
        ConfigError: there are other crops than the method takes.
    """
    if len(rows) != num_crops * batch.num_local:
        must = f"must make {num_crops} crops of an image for this loss"
        raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", str(sum(batch.num_crops)), must, "Correct them.")])
    return rows.unflatten(0, (num_crops, batch.num_local)).unbind(0)


def images_of(batch: Batch, crops: Sequence[int]) -> list[Tensor]:
    """Select the images of some crops, as a model takes them: a tensor per resolution that has any, rows crop-major.

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
