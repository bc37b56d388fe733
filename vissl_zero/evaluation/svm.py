"""Linear support vector machines on features, one per class against all others, by scikit-learn's LinearSVC.

Source: VISSL's ``vissl/utils/svm_utils`` (svm_trainer.py, svm_low_shot_trainer.py, evaluate.py) at 09270ed2, after
https://arxiv.org/abs/1905.01235: weights of 2 for images of the class and 1 for others, costs chosen by cross
validation, average precision. Ranks share the classifiers among themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from vissl_zero.collectives import all_gather_objects, rank, world_size
from vissl_zero.errors import DataError

Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class ClassSvm:
    """The classifier of one class.

    Attributes:
        average_precisions: of cross validation, for each cost.
        cost: the one with the highest; of equals, the first.
        weight: (F,).
        bias: of the class's score.
        is_converged: the solver ended before max_iter.
    """

    average_precisions: list[float]
    cost: float
    weight: np.ndarray
    bias: float
    is_converged: bool


def shared(jobs: Sequence[Job], work: Callable[[Job], Done]) -> list[Done]:
    """``work`` of each job, in their order, equal on every rank. Collective: each rank does every n-th job."""
    own = [work(job) for job in jobs[rank() :: world_size()]]
    of_ranks = all_gather_objects(own)
    return [of_ranks[index % world_size()][index // world_size()] for index in range(len(jobs))]


def costs_of(options: Mapping[str, Any]) -> list[float]:
    """Costs that the keys of ``SVM`` ask for."""
    costs, powers = options["costs"], range(*options["costs"]["power_range"])
    return [*costs["costs_list"], *(costs["base"] ** power for power in powers if costs["base"] > 0)]


def normalized(rows: np.ndarray) -> np.ndarray:
    """Rows divided by their L2 norm, to which VISSL adds 1e-5."""
    return np.asarray(rows / (np.linalg.norm(rows, axis=1) + 1e-5)[:, None])


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the envelope of precision over recall, VOC's rule since 2010.

    Args:
        labels: (N,) 1 for images of the class; -1, which counts as none, must have been left out.
        scores: (N,).
    Returns:
        0 to 1; NaN where no image is of the class.
    """
    hits = np.cumsum(labels[np.argsort(scores)[::-1]] > 0)
    if not len(hits) or not hits[-1]:
        return float("nan")
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / hits[-1]
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * envelope))


def solver(options: Mapping[str, Any], cost: float, seed: int) -> Any:
    """VISSL's LinearSVC, not yet fitted; liblinear's draws are those of ``seed``."""
    from sklearn.svm import LinearSVC  # here: takes a second

    return LinearSVC(
        C=cost,
        class_weight={1: 2, -1: 1},
        intercept_scaling=1.0,
        penalty=options["penalty"],
        loss=options["loss"],
        tol=0.0001,
        dual=options["dual"],
        max_iter=options["max_iter"],
        random_state=seed,
    )


def train_class(rows: np.ndarray, labels: np.ndarray, options: Mapping[str, Any], seed: int) -> ClassSvm:
    """Choose the cost by cross validation and train with it. Not a collective.

    Args:
        rows: (N, F) features of the training images, normalised.
        labels: (N,) 1 for images of the class. 0 and -1 are both taken as others: in training VISSL leaves none out.
        options: the keys of ``SVM``.
        seed: of the solver.
    """
    from sklearn.model_selection import cross_val_score

    signs, costs = np.where(labels == 1, 1, -1), costs_of(options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Liblinear failed to converge")  # reported once, at the end
        found = [
            float(
                cross_val_score(
                    solver(options, cost, seed), rows, signs, cv=options["cross_val_folds"], scoring="average_precision"
                ).mean()
            )
            for cost in costs
        ]
        cost = costs[int(np.argmax(found))]
        return _fitted(rows, signs, options, cost, seed, found)


def _fitted(
    rows: np.ndarray, signs: np.ndarray, options: Mapping[str, Any], cost: float, seed: int, found: list[float]
) -> ClassSvm:
    fitted = solver(options, cost, seed).fit(rows, signs)
    is_converged = int(np.max(fitted.n_iter_)) < options["max_iter"]
    return ClassSvm(found, cost, fitted.coef_[0], float(fitted.intercept_[0]), is_converged)


def average_precision_of(svm: ClassSvm, rows: np.ndarray, labels: np.ndarray) -> float:
    """Average precision on the images (N, F) whose label (N,) is not -1."""
    counts = labels != -1
    return average_precision(labels[counts], rows[counts] @ svm.weight + svm.bias)


def draw(matrix: np.ndarray, k: int, dataset_name: str, generator: np.random.Generator) -> np.ndarray:
    """Labels of a few images, the others -1: VISSL's ``extra_scripts/create_low_shot_samples.py``.

    Args:
        matrix: (N, C) labels, 1, 0 or -1.
        k: images with each class.
        dataset_name: "voc": for each class k images with it and (C - 1) * k without it; else k images of each class,
            each of which counts for all classes.
        generator: of the draw.
    Raises:
        DataError: there are not as many.
    """
    few = np.full_like(matrix, -1)
    num_classes = matrix.shape[1]
    for column in range(num_classes):
        wanted = {1: k, 0: (num_classes - 1) * k} if dataset_name == "voc" else {1: k}
        for label, count in wanted.items():
            places = np.flatnonzero(matrix[:, column] == label)
            if len(places) < count:
                kind = "of" if label else "without"
                raise DataError(
                    f"SVM.low_shot.k_values: {k} needs {count} images {kind} class {column}, and TRAIN has "
                    f"{len(places)}. Leave out the larger values."
                )
            chosen = generator.choice(places, count, replace=False)
            if dataset_name == "voc":
                few[chosen, column] = label
            else:
                few[chosen] = matrix[chosen]
    return few


def low_shot(
    train: np.ndarray, few: np.ndarray, test: np.ndarray, labels: np.ndarray, options: Mapping[str, Any], seed: int
) -> list[float]:
    """Mean average precision on TEST for each cost, after training on the images that were drawn. Not a collective.

    Args:
        train: (N, F) features, normalised.
        few: (N, C) labels as ``draw`` gives them.
        test: (M, F).
        labels: (M, C).
        options: the keys of ``SVM``.
        seed: of the solver.
    """
    means = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Liblinear failed to converge")
        for cost in costs_of(options):
            found = []
            for column in range(few.shape[1]):
                counts = few[:, column] != -1
                signs = np.where(few[counts, column] == 1, 1, -1)
                svm = _fitted(train[counts], signs, options, cost, seed, [])
                found.append(average_precision_of(svm, test, labels[:, column]))
            means.append(float(np.nanmean(found)))
    return means
