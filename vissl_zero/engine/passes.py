"""Forward passes over parts of a micro-batch, so that memory has the activations of one part at a time.

The rows of all crops are cut, in order, into consecutive parts with about the same number of pixels. Each part is one
pass of the model. Without batch norm the rows are independent, so the joined outputs equal those of one pass. Every
pass has a tensor per resolution, empty if it has no rows of this resolution, so that heads find each one by its index.

With ``MODEL.VIEWS_APART`` every crop goes through the model separately, and passes consist of whole crops. Then batch
norm has the same statistics as in one pass, and no pass has empty tensors, for which there are no statistics.
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
        tensor: index in the model's list of image tensors.
        first, stop: the rows ``first:stop``.
    """

    tensor: int
    first: int
    stop: int


def cut(images: Sequence[Tensor], number: int, by_crop: bool) -> list[list[Part]]:
    """Cut the rows of images into consecutive passes with about the same number of pixels.

    Args:
        images: R tensors (b_r, 3, H_r, W_r).
        number: number of passes, on every rank; a pass may have no rows.
        by_crop: keep each tensor, which is one crop, whole; then there are at most R passes, equally many on all ranks.
    """
    # Every rank must run the same number of passes, because each pass of a sharded model has collectives.
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
    """Return the number of rows of each tensor in the first ``target / number`` pixels, rounded to whole rows."""
    rows, done = [], 0
    for count, size in zip(counts, pixels, strict=True):
        nearest = (target - done * number + size * number // 2) // (size * number)
        rows.append(min(max(nearest, 0), count))
        done += count * size
    return rows


class Pass(NamedTuple):
    """The inputs of one pass through the model.

    Attributes:
        places: position of each tensor's rows in the micro-batch; empty: all tensors are whole.
        images, probe, options: arguments of ``Model``.
    """

    places: tuple[Place, ...]
    images: list[Tensor]
    probe: Tensor | None
    options: dict[str, Any]

    def run(self, model: nn.Module) -> list[Any]:
        """Run the model; random layers draw the same numbers for each row as in one pass over all rows."""
        with rows_in_place(self.places):
            outputs: list[Any] = model(self.images, self.probe, **self.options)
        return outputs


def passes_of(
    images: Sequence[Tensor], probe: Tensor | None, options: dict[str, Any], number: int, by_crop: bool
) -> Iterator[Pass]:
    """Yield the passes of one call of a model. The first pass scores all rows of the probe.

    Args:
        images, probe, options: arguments of ``Model``.
        number, by_crop: see ``cut``.
    """
    if number == 1:
        yield Pass((), list(images), probe, options)
        return
    for index, parts in enumerate(cut(images, number, by_crop)):
        # A head sees the rows of all resolutions as one tensor, so the first place counts rows over all resolutions.
        places = [Place(0, sum(part.first for part in parts)), *(Place(part.tensor, part.first) for part in parts[1:])]
        if by_crop:
            places = [Place(part.tensor, 0) for part in parts]
        chosen = dict(options)
        if options.get("choose_patches") is not None:
            chosen["choose_patches"] = _of_rows(options["choose_patches"], images, parts)
        rows = [images[part.tensor][part.first : part.stop] for part in parts]
        # An empty probe in later passes: their outputs must have the same structure to be joined.
        yield Pass(tuple(places), rows, probe if probe is None or index == 0 else probe[:0], chosen)


def _of_rows(choose_patches: ChoosePatches, images: Sequence[Tensor], parts: Sequence[Part]) -> ChoosePatches:
    """Return a function that chooses the patches of all images, and returns those of the rows in ``parts``."""
    # Over all images, because the random choice may depend on the whole micro-batch.

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
    """A stand-in for a model that runs it pass by pass, without graph, and joins the outputs.

    Args:
        model: model to run.
        number, by_crop: see ``cut``.
        evaluated_model: model whose kept features a probe reads; the features of all passes are joined.
    """

    def __init__(self, model: nn.Module, number: int, by_crop: bool, evaluated_model: Model | None):
        self._model, self._number, self._by_crop, self._evaluated_model = model, number, by_crop, evaluated_model

    @torch.no_grad()
    def __call__(self, images: list[Tensor], probe: Tensor | None = None, **options: Any) -> list[Any]:
        """Run all passes; arguments as for ``Model``."""
        outputs, features = [], []
        newest = [] if self._evaluated_model is None else self._evaluated_model.kept_features
        for one in passes_of(images, probe, options, self._number, self._by_crop):
            outputs.append(one.run(self._model))
            if self._evaluated_model is not None and self._evaluated_model.kept_features is not newest:
                newest = self._evaluated_model.kept_features
                # The probe reads the first resolution only.
                features += newest[:1] if not one.places or one.places[0].resolution == 0 else []
        if features and self._evaluated_model is not None:
            self._evaluated_model.kept_features = [torch.cat(features)]
        return _joined(outputs)


def _joined(parts: Sequence[list[Any]]) -> list[Any]:
    """Concatenate the outputs of passes; outputs that are not tensors are taken from the first pass."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*map(pytree.tree_leaves, parts), strict=True)
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    outputs: list[Any] = pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))
    return outputs


def require_separate_rows(model: Model, plan: ResolvedRun) -> None:
    """Check that the rows of a model are independent if CROP_PASSES is above 1.

    Raises:
        ConfigError: the model has batch norm, or random layers that would draw different numbers.
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
