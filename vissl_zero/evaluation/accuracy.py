"""Accuracy on images on which the model was not trained, during training and at the end.

It is the accuracy of supervised training, of linear evaluation, or of the online probe of a self-supervised method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vissl_zero.collectives import all_reduce_sum
from vissl_zero.config.blocks.output import METERS, Meters
from vissl_zero.config.components.heads import distinct_names, layer_names
from vissl_zero.config.programs import PREDICTIONS, TRAIN
from vissl_zero.data.loader import EvalImages, build_eval_images, require_evaluation
from vissl_zero.engine.hook import Run, Step
from vissl_zero.evaluation.curve import CurveHook
from vissl_zero.evaluation.features import evaluated, own_batches, rows_to_write
from vissl_zero.resolve.optimizer_plan import peak

TOP_K = 5


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of one head, as shares of images from 0 to 1.

    Attributes:
        top1: share of images whose largest logit is that of their label.
        top5: share of images whose label is among the ``TOP_K`` largest logits; None if the head has too few outputs.
        by_k: k -> share of images whose label is among the k largest logits, for further k.
    """

    top1: float
    top5: float | None
    by_k: Mapping[int, float] = field(default_factory=dict)


class AccuracyHook(CurveHook):
    """Measures top-1 and top-5 on TEST's images if a run predicts classes, every TEST_EVERY_NUM_EPOCH epochs and last.

    Adds to the results: ``top1_latest``, ``top5_latest`` and ``top1_by_step`` ([step, top-1] each) while it trains;
    ``top1`` and ``top5`` at the end (0 to 1; None where TEST has no images or no labels). The best of several
    heads counts; a sweep of learning rates adds ``top1_by_lr`` and ``best_lr``, an evaluation of several layers
    ``top1_by_layer``, ``top5_by_layer`` and ``best_layer``; METERS adds ``top<k>``, ``precision_at_<k>`` and
    ``recall_at_<k>`` of that head. Nothing is added for other methods, without TEST_MODEL, or if the heads are neither
    trained nor loaded.
    """

    figure = "top1"

    def on_start(self, run: Run) -> None:
        if _ignored_label(run) is not None:
            require_evaluation(run.plan.config.DATA, run.plan.seed)

    def on_epoch_end(self, run: Run) -> None:
        if run.is_due(run.plan.config.TEST_EVERY_NUM_EPOCH) and (accuracy := self._measure(run)) is not None:
            run.results |= {"top1_latest": accuracy.top1, "top5_latest": accuracy.top5}

    def on_end(self, run: Run) -> None:
        if _ignored_label(run) is None:
            return
        accuracy = self._measure(run)
        for name in ("top1_latest", "top5_latest"):
            run.results.pop(name, None)
        run.results["top1"] = None if accuracy is None else accuracy.top1
        if accuracy is not None and accuracy.top5 is not None:
            run.results["top5"] = accuracy.top5
        if accuracy is not None:
            run.results |= _further_figures(run.plan.config.METERS, accuracy)

    def _measure(self, run: Run) -> Accuracy | None:
        """Measure the accuracy of the current best head, and add it to the curve. Collective."""
        if (ignored_label := _ignored_label(run)) is None:
            return None
        # Opened for each evaluation, so that loader workers end with it.
        _, images = build_eval_images(run.plan.config.DATA, run.plan.seed)
        if images is None or not (heads := accuracies(run, images, ignored_label)):
            return None
        best = max(range(len(heads)), key=lambda index: heads[index].top1)
        if factors := run.plan.optimizer.head_lr_factors:
            rates = [peak(run.plan.optimizer.lr_head or run.plan.optimizer.lr) * factor for factor in factors]
            names = distinct_names([f"{lr:g}" for lr in rates])
            run.results["top1_by_lr"] = {name: head.top1 for name, head in zip(names, heads, strict=True)}
            run.results["best_lr"], run.results["best_head"] = rates[best], best
        if entries := run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP:
            named = list(zip(layer_names(entries), heads, strict=True))
            run.results["top1_by_layer"] = {name: head.top1 for name, head in named}
            run.results["top5_by_layer"] = {name: head.top5 for name, head in named if head.top5 is not None}
            run.results["best_layer"] = named[best][0]
        self._add(run, heads[best].top1)
        return heads[best]


def _ignored_label(run: Run) -> int | None:
    """Return ``Method.ignored_label``; None if the run predicts no classes or does not ask for accuracy."""
    config = run.plan.config
    settings = config.MODEL.FEATURE_EVAL_SETTINGS
    has_new_heads = settings.EVAL_MODE_ON and not settings.EVAL_TRUNK_AND_HEAD
    predicts = config.PROGRAM in (TRAIN, PREDICTIONS)  # the other programs use features only
    is_measured = predicts and config.TEST_MODEL and (run.num_steps > 0 or not has_new_heads)
    return run.method.ignored_label if is_measured else None


def _numbers(meters: Meters, meter: str) -> list[int]:
    """Return ``topk_values`` of a meter in METERS."""
    return list(getattr(meters, meter).topk_values) if meter in (meters.name, *meters.names) else []


def _further_figures(meters: Meters, accuracy: Accuracy) -> dict[str, float]:
    """Compute the further metrics in METERS, by their names in the results.

    Args:
        meters: the resolved block METERS.
        accuracy: accuracy of one head, for every k in the block.
    """
    shares = {1: accuracy.top1, TOP_K: accuracy.top5, **accuracy.by_k}
    figures = {}
    for meter, prefix in METERS.items():
        for k in _numbers(meters, meter):
            share = shares.get(k)
            if share is not None and f"{prefix}{k}" not in ("top1", "top5"):
                # Each image has one class, so at most one of k guesses is right.
                figures[f"{prefix}{k}"] = share / k if prefix == "precision_at_" else share
    return figures


def accuracies(run: Run, images: EvalImages, ignored_label: int) -> list[Accuracy]:
    """Measure the accuracy of each head. Collective.

    Args:
        run: run with a sharded model in any mode.
        images: images in any number; each is counted once.
        ignored_label: label of images that do not count.
    Returns:
        Equal on every rank; empty if no image has a label.
    """
    num_heads, meters = len(run.plan.config.MODEL.HEAD.PARAMS), run.plan.config.METERS
    numbers = sorted({k for meter in METERS for k in _numbers(meters, meter)})
    labels = {images.source.label(index) for index in range(len(images.source))} if meters.model_output_mask else None

    def score(model: nn.Module, crops: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = model(crops)
        return outputs if labels is None else [_masked(logits, labels) for logits in outputs]

    return _accuracies_of(run, images, score, num_heads, lambda targets: targets != ignored_label, numbers)


def _masked(logits: Tensor, labels: Set[int | None]) -> Tensor:
    """Lower the logits (n, C) of classes without a label, as VISSL's ModelOutputMaskHook does."""
    # Minus infinity, not a low number: no logit may lose to one of a class that cannot be right.
    is_out = torch.tensor([label not in labels for label in range(logits.shape[1])], device=logits.device)
    return logits.masked_fill(is_out, float("-inf"))


def _accuracies_of(
    run: Run,
    images: EvalImages,
    score: Callable[[nn.Module, list[Tensor]], list[Tensor]],
    num_classifiers: int,
    counts_label: Callable[[Tensor], Tensor],
    numbers: Sequence[int] = (),
) -> list[Accuracy]:
    """Measure classifiers on the model (``EVALUATED_MODEL``), in evaluation mode. Collective.

    Args:
        run: run with a sharded model in any mode.
        images: images in any number; each is counted once.
        score: function from model and images of one resolution to logits (n, C) of each classifier.
        num_classifiers: number of classifiers that ``score`` returns.
        counts_label: function from labels (n,) to a mask of the images that count.
        numbers: further k for ``Accuracy.by_k``, in addition to 1 and ``TOP_K``.
    Returns:
        Equal on every rank; empty if no image counts.
    """
    run.sharded.consolidate_buffers()  # running statistics may differ between ranks; the result must not
    ks = (1, TOP_K, *(k for k in numbers if k not in (1, TOP_K)))
    # Counts, not shares: ranks have different numbers of images, and sums of whole numbers are exact.
    right = torch.zeros(num_classifiers, len(ks), dtype=torch.int64, device=run.device)
    num_counted = torch.zeros(1, dtype=torch.int64, device=run.device)
    widths = [0] * num_classifiers
    with evaluated(run) as model:
        for batch, num_own in own_batches(run, images):
            outputs = score(model, batch.images)
            widths = [logits.shape[1] for logits in outputs]
            if batch.targets is not None:
                kept = rows_to_write(batch, num_own)
                labels = batch.targets[kept]
                is_counted = counts_label(labels)
                num_counted += is_counted.sum()
                for index, logits in enumerate(outputs):
                    rows = logits[kept]
                    # argmax, not topk: of equal logits it is documented to take the first.
                    is_best = (rows.argmax(dim=1) == labels) & is_counted
                    nearest = rows.topk(min(max(ks), rows.shape[1]), dim=1).indices == labels[:, None]
                    further = [(nearest[:, :k].any(dim=1) & is_counted).sum() for k in ks[1:]]
                    right[index] += torch.stack([is_best.sum(), *further])
    *counts, num_images = all_reduce_sum(torch.cat([right.flatten(), num_counted])).tolist()
    if not num_images:
        return []
    accuracies = []
    for index, width in enumerate(widths):
        shares = [count / num_images for count in counts[index * len(ks) : (index + 1) * len(ks)]]
        by_k = {k: share for k, share in zip(ks[2:], shares[2:], strict=True) if k < width}
        # With no more outputs than k, the share would be 1 for any classifier.
        accuracies.append(Accuracy(shares[0], shares[1] if width > TOP_K else None, by_k))
    return accuracies


class OnlineProbeHook(CurveHook):
    """Steps the probe with the model, and measures it on TEST's images every EVERY_NUM_EPOCHS epochs and at the end.

    Adds to the results: ``probe_top1_latest`` while it trains, ``probe_top1`` at the end, ``probe_top1_by_step``
    ([step, top-1] each), and ``probe_top1_train``, top-1 on the newest epoch's training views (0 to 1).
    """

    figure = "probe_top1"

    def __init__(self) -> None:
        super().__init__()
        self._seen = torch.zeros(2)

    def on_start(self, run: Run) -> None:
        require_evaluation(run.plan.config.DATA, run.plan.seed)

    def on_epoch_start(self, run: Run) -> None:
        # float32 counts exactly up to 2**24 images only. On the device, because reading the sums would wait for it.
        self._seen = torch.zeros(2, dtype=torch.float64, device=run.device)

    def on_step(self, run: Run, step: Step) -> None:
        if run.probe is not None:
            self._seen += torch.stack(run.probe.step())

    def on_epoch_end(self, run: Run) -> None:
        count, right = self._seen.tolist()
        run.results["probe_top1_train"] = right / count if count else None
        if run.is_due(run.plan.config.ONLINE_PROBE.EVERY_NUM_EPOCHS):
            run.results["probe_top1_latest"] = self._measure(run)

    def on_end(self, run: Run) -> None:
        run.results.pop("probe_top1_latest", None)
        if run.num_steps:
            run.results["probe_top1"] = self._measure(run)

    def _measure(self, run: Run) -> float | None:
        """Measure top-1 of the current probe on TEST's images, and add it to the curve. Collective."""
        _, images = build_eval_images(run.plan.config.DATA, run.plan.seed)
        probe = run.probe
        if images is None or probe is None:
            return None
        accuracies = _accuracies_of(
            run,
            images,
            lambda model, batch: [probe.scores(*model(batch, features_only=True))],
            num_classifiers=1,
            counts_label=lambda labels: labels >= 0,
        )
        if not accuracies:
            return None
        self._add(run, accuracies[0].top1)
        return accuracies[0].top1
