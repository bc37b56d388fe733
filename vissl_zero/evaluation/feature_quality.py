"""The quality of features, measured without training the trunk: kNN, a linear probe and RankMe.

The linear probe is scikit-learn's multinomial logistic regression on standardized features: images are shown once, so
it takes seconds where a probe by SGD takes epochs. Its penalty is chosen on a tenth of TRAIN's images, and it is then
fitted to all of them; TEST's are looked at once. DINOv2's evaluation has such a probe, also by L-BFGS
(facebookresearch/dinov2 b8931f7, ``dinov2/eval/log_regression.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from vissl_zero.data.loader import eval_images
from vissl_zero.data.source import build_eval_sources
from vissl_zero.data.split_pipeline import eval_transforms
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import DataError
from vissl_zero.evaluation.features import Features, extract_features, num_not_finite, rankme, require_finite
from vissl_zero.evaluation.knn import knn_top1s
from vissl_zero.evaluation.linear_classifiers import shared
from vissl_zero.evaluation.opening import print_opening, recognized
from vissl_zero.registry import HOOKS
from vissl_zero.resolve.data_plan import crop_sides
from vissl_zero.terminal import print_line

_PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)  # scikit-learn's C
_PROTOCOL = (
    "logistic regression (L-BFGS, at most 1,000 iterations) on standardized features of the frozen trunk, one view an "
    f"image; C of {', '.join(f'{c:g}' for c in _PENALTIES)} chosen on a tenth of train"
)


@HOOKS.register("feature_quality")
class FeatureQuality(Hook):
    """Measures the trunk's features at the end of the run, each image once, on any number of ranks.

    Adds ``knn_top1`` with ``knn_k`` and ``knn_temperature``, ``linear_top1`` with ``linear_penalty``,
    ``linear_protocol`` and ``linear_by_class``, ``rankme``, ``num_features``, ``image_size``, ``num_train``,
    ``num_val``, ``skipped`` (names of broken images, which do not count) and ``recognized`` to the results.
    """

    def on_end(self, run: Run) -> None:
        data, options = run.plan.config.DATA, run.plan.config.NEAREST_NEIGHBOR
        train, test = build_eval_sources(data, run.plan.seed)
        if test is None:
            raise DataError("feature_quality needs images of TEST. Write config.DATA.TEST.DATA_PATHS=[<folder>].")
        for source, paths in ((train, data.TRAIN.DATA_PATHS), (test, data.TEST.DATA_PATHS)):
            if source.label(0) is None:
                where = ", ".join(paths) or "The data"
                raise DataError(
                    f"{where}: has images without a class. Put those of each class into a folder of its own."
                )
        print_opening(run)
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        extracted = [extract_features(run, eval_images(split, data, run.plan.seed)) for split in (train, test)]
        sources_of_features = zip((train, test), extracted, strict=True)
        skipped = [source.name(index) for source, features in sources_of_features for index in features.broken]
        index, queries = (features.without_broken() for features in extracted)
        for features in (index, queries):
            require_finite(run, num_not_finite(features.rows), len(features.rows))
        assert index.labels is not None and queries.labels is not None
        k, temperature = min(options.TOPK, len(index.rows)), options.SIGMA
        (knn,) = knn_top1s(queries, index, [(k, temperature)]) or [float("nan")]
        penalty, predicted = _linear_predictions(index, queries)
        labels = queries.labels.cpu().numpy()
        linear = float((predicted == labels).mean())
        figures: dict[str, Any] = {"knn_top1": knn, "knn_k": k, "knn_temperature": temperature}
        figures |= {"linear_top1": linear, "linear_penalty": penalty, "linear_protocol": _PROTOCOL}
        figures["linear_by_class"] = by_class(labels, predicted, test.class_names)
        figures |= {"rankme": rankme(index.rows), "num_features": index.rows.shape[1]}
        figures |= {"image_size": max(crop_sides(eval_transforms(data)), default=None)}
        figures |= {"num_train": len(index.rows), "num_val": len(queries.rows), "skipped": skipped}
        figures["recognized"] = recognized(run)
        run.results.update(figures)
        if run.is_main:
            text = f"kNN {knn:.1%} (k={k}, T={temperature}), linear {linear:.1%}, {figures['num_features']} features"
            print_line(text)


def _linear_predictions(train: Features, test: Features) -> tuple[float, np.ndarray]:
    """Choose a penalty, fit the probe, and classify TEST's images. Collective: ranks share the penalties.

    Args:
        train, test: features with labels, equal on every rank.
    Returns:
        The chosen penalty, and the predicted class (N,) int64 of each test image.
    Cost: an L-BFGS fit for each penalty over N * F * classes products an iteration.
    """
    assert train.labels is not None
    rows, labels = train.rows.double().cpu().numpy(), train.labels.cpu().numpy()
    if len(np.unique(labels)) < 2:
        raise DataError("A linear probe needs images of two classes at least in TRAIN.")
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    # A constant feature would become NaN.
    scale[scale == 0] = 1.0
    rows = (rows - mean) / scale
    penalty = _PENALTIES[int(np.argmax(shared(_PENALTIES, partial(_held_out, rows, labels))))]
    queries = (test.rows.double().cpu().numpy() - mean) / scale
    # One job, so that one rank fits and all take its predictions: the last bits of a fit may depend on the machine.
    (predicted,) = shared([penalty], lambda chosen: _fitted(rows, labels, chosen).predict(queries))
    return penalty, predicted


def by_class(labels: np.ndarray, predicted: np.ndarray, class_names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measure the accuracy of each class, and find the class with which it is most often confused.

    Args:
        labels, predicted: class numbers (N,).
        class_names: names of classes by number.
    Returns:
        For the name of each class with an image: ``top1`` (0 to 1), ``num_images``, ``taken_for`` (the name of the
        other class, or None if every prediction is right) and ``num_taken`` (number of images predicted as that class).
    """
    classes = {}
    for label in np.unique(labels):
        of_class = predicted[labels == label]
        others, counts = np.unique(of_class[of_class != label], return_counts=True)
        most = int(counts.argmax()) if len(counts) else None
        classes[class_names[label]] = {
            "top1": float((of_class == label).mean()),
            "num_images": len(of_class),
            "taken_for": None if most is None else class_names[others[most]],
            "num_taken": 0 if most is None else int(counts[most]),
        }
    return classes


def _held_out(rows: np.ndarray, labels: np.ndarray, penalty: float) -> float:
    """Fit without every tenth image of each class, and return top-1 on these; 0 if there are too few images."""
    place = np.zeros(len(labels), dtype=int)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        place[members] = np.arange(len(members))
    # By class and by place, not at random: every class is held out in proportion, and the choice is the same
    # everywhere.
    held = place % 10 == 1
    if not held.any() or len(np.unique(labels[~held])) < 2:
        return 0.0
    return float((_fitted(rows[~held], labels[~held], penalty).predict(rows[held]) == labels[held]).mean())


def _fitted(rows: np.ndarray, labels: np.ndarray, penalty: float) -> Any:
    from sklearn.linear_model import LogisticRegression  # here: takes a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged after 1,000 iterations: the protocol says so
        return LogisticRegression(C=penalty, max_iter=1000).fit(rows, labels)
