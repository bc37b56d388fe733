"""A model that runs a part of a micro-batch's rows at a time, so that activations are those of one part.

The rows of all crops, in their order, are cut into consecutive parts of about as many pixels. Each part is one pass of
the model. Rows do not see each other in a model without batch norm, so all passes together give what one would. Heads
find each resolution at its place: a pass that has no rows of it holds an empty tensor.

Where each crop of an image goes through the model by itself (``MODEL.VIEWS_APART``), whole crops are grouped instead:
then batch norm has the same statistics, and a pass has no empty tensors, which have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.keyed_random import KeyedDropout, Place, rows_in_place
from vissl_zero.models.model import Model
from vissl_zero.models.patches import ChoosePatches, PatchView
from vissl_zero.resolve.resolved import ResolvedRun

KEY = "config.TRAINER.CROP_PASSES"


class Part(NamedTuple):
    """Rows of one tensor of images.

    Attributes:
        tensor: index in the list that the model is given.
        first, stop: first row, and the one after the last.
    """

    tensor: int
    first: int
    stop: int


def cut(images: Sequence[Tensor], number: int, by_crop: bool) -> list[list[Part]]:
    """Cut the rows of images into consecutive passes of about as many pixels.

    Args:
        images: R tensors (b_r, 3, H_r, W_r).
        number: number of passes. Ranks with other numbers of rows make as many, some of them empty.
        by_crop: a tensor is one crop and stays whole; there are at most R passes then, the same on every rank.
    """
    counts = [1 if by_crop else len(rows) for rows in images]
    pixels = [rows.shape[2] * rows.shape[3] for rows in images]
    total = sum(count * size for count, size in zip(counts, pixels, strict=True))
    bounds = [_before(index * total, number, counts, pixels) for index in range(number + 1)]
    passes = []
    for begin, end in pairwise(bounds):
        rows = [Part(tensor, first, stop) for tensor, (first, stop) in enumerate(zip(begin, end, strict=True))]
        if by_crop:
            rows = [Part(tensor, 0, len(images[tensor])) for tensor, first, stop in rows if first < stop]
        if rows:
            passes.append(rows)
    return passes


def _before(target: int, number: int, counts: Sequence[int], pixels: Sequence[int]) -> list[int]:
    """Return how many rows of each tensor the first ``target / number`` pixels are, rounded to whole rows."""
    rows, done = [], 0
    for count, size in zip(counts, pixels, strict=True):
        nearest = (target - done * number + size * number // 2) // (size * number)
        rows.append(min(max(nearest, 0), count))
        done += count * size
    return rows


class Pass(NamedTuple):
    """The inputs of one pass through the model.

    Attributes:
        places: place of each tensor in the micro-batch; empty: all are whole.
        images, probe, options: arguments of ``Model``.
    """

    places: tuple[Place, ...]
    images: list[Tensor]
    probe: Tensor | None
    options: dict[str, Any]

    def run(self, model: nn.Module) -> list[Any]:
        """Run the model, random layers keyed as in one pass over all rows."""
        with rows_in_place(self.places):
            outputs: list[Any] = model(self.images, self.probe, **self.options)
        return outputs


def passes_of(
    images: Sequence[Tensor], probe: Tensor | None, options: dict[str, Any], number: int, by_crop: bool
) -> Iterator[Pass]:
    """Yield the passes of one call of a model. The probe's rows are scored in the first.

    Args:
        images, probe, options: arguments of ``Model``.
        number, by_crop: see ``cut``.
    """
    if number == 1:
        yield Pass((), list(images), probe, options)
        return
    for index, parts in enumerate(cut(images, number, by_crop)):
        # A head takes the rows of all resolutions: its first row is the first of the pass among all of them.
        places = [Place(0, sum(part.first for part in parts)), *(Place(part.tensor, part.first) for part in parts[1:])]
        if by_crop:
            places = [Place(part.tensor, 0) for part in parts]
        chosen = dict(options)
        if options.get("choose_patches") is not None:
            chosen["choose_patches"] = _of_rows(options["choose_patches"], images, parts)
        rows = [images[part.tensor][part.first : part.stop] for part in parts]
        yield Pass(tuple(places), rows, probe if probe is None or index == 0 else probe[:0], chosen)


def _of_rows(choose_patches: ChoosePatches, images: Sequence[Tensor], parts: Sequence[Part]) -> ChoosePatches:
    """Choose the patches of all images, then take those of some rows."""

    def choose(_: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        with rows_in_place():
            views = choose_patches(images, patch_size)
        return [_rows_of(views[part.tensor], part) for part in parts]

    return choose


def _rows_of(view: PatchView, part: Part) -> PatchView:
    taken: dict[str, Any] = {
        name: value[part.first : part.stop] for name, value in view._asdict().items() if isinstance(value, Tensor)
    }
    return view._replace(**taken)


class InPasses:
    """Stands in for a model that a method calls: runs it pass by pass, and joins what the passes give, without graph.

    Args:
        model: what is run.
        number, by_crop: see ``cut``.
        evaluated_model: model whose features of the newest pass a probe looks at; those of all passes are joined.
    """

    def __init__(self, model: nn.Module, number: int, by_crop: bool, evaluated_model: Model | None):
        self._model, self._number, self._by_crop, self._evaluated_model = model, number, by_crop, evaluated_model

    @torch.no_grad()
    def __call__(self, images: list[Tensor], probe: Tensor | None = None, **options: Any) -> list[Any]:
        """Run all passes; arguments as of ``Model``."""
        outputs, features = [], []
        newest = [] if self._evaluated_model is None else self._evaluated_model.kept_features
        for one in passes_of(images, probe, options, self._number, self._by_crop):
            outputs.append(one.run(self._model))
            if self._evaluated_model is not None and self._evaluated_model.kept_features is not newest:
                newest = self._evaluated_model.kept_features
                # The probe looks at the first resolution alone.
                features += newest[:1] if not one.places or one.places[0].resolution == 0 else []
        if features and self._evaluated_model is not None:
            self._evaluated_model.kept_features = [torch.cat(features)]
        return _joined(outputs)


def _joined(parts: Sequence[list[Any]]) -> list[Any]:
    """Join the rows of passes; what is no tensor is the first's."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*map(pytree.tree_leaves, parts), strict=True)
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    outputs: list[Any] = pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))
    return outputs


def require_separate_rows(model: Model, plan: ResolvedRun) -> None:
    """Refuse several passes of a model whose rows see each other.

    Raises:
        ConfigError: it has batch norm, or random layers that would draw other numbers.
    """
    if plan.crop_passes == 1 or plan.config.TEST_ONLY:
        return
    trained = model.heads if model.trunk_is_frozen else model
    norm = next((name for name, layer in trained.named_modules() if isinstance(layer, _BatchNorm)), None)
    problems, got = [], str(plan.crop_passes)
    if norm is not None and not model.views_apart:
        must = f"must be 1: the crops of one size share the statistics of batch norm ({norm})"
        fix = (
            "Write config.MODEL.VIEWS_APART=true, which gives each crop its own, take a model without batch norm, "
            f"or leave {KEY} out."
        )
        problems.append(Problem(KEY, got, must, fix))
    is_random = any(isinstance(layer, KeyedDropout) and layer.p > 0 for layer in model.heads.modules())
    if is_random and model.views_apart:
        must = "must be 1 where views go apart and a head has dropout: all views share its random numbers"
        problems.append(Problem(KEY, got, must, f"Leave out the head's dropout, or {KEY}."))
    if problems:
        raise ConfigError(problems)
