"""Linear classifiers on features, by scikit-learn: support vector machines, and logistic regression on few images.

LinearSVC trains a support vector machine for each class against all others. Source: VISSL's ``vissl/utils/svm_utils``
(svm_trainer.py, svm_low_shot_trainer.py, evaluate.py) at 09270ed2, after https://arxiv.org/abs/1905.01235: weights of 2
for images of the class and 1 for others, costs chosen by cross validation, average precision. Ranks share the
classifiers. Logistic regression: VISSL's ``vissl/utils/low_shot_utils.py`` at 09270ed2.

The programs are ``train_svm``, ``train_svm_low_shot`` and ``low_shot_test``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from vissl_zero.collectives import all_gather_objects, rank, world_size
from vissl_zero.config.blocks.output import Svm
from vissl_zero.data.loader import eval_images, require_evaluation
from vissl_zero.data.source import Source, build_eval_sources, build_source, label_matrix
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import DataError, counted
from vissl_zero.evaluation.features import Features, extract_features, layers_of
from vissl_zero.registry import HOOKS
from vissl_zero.resolve.measuring import penalties
from vissl_zero.terminal import print_line

Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class ClassSvm:
    """The classifier of one class.

    Attributes:
        average_precisions: average precision in cross validation for each cost.
        cost: cost with the highest average precision; of equal ones, the first.
        weight: weight (F,) of the class's score.
        bias: bias of the class's score.
        is_converged: whether the solver ended before max_iter.
    """

    average_precisions: list[float]
    cost: float
    weight: np.ndarray
    bias: float
    is_converged: bool


def shared(jobs: Sequence[Job], work: Callable[[Job], Done]) -> list[Done]:
    """Return the results of ``work`` on each job in order, on every rank. Collective: ranks share the jobs."""
    # Interleaved, since jobs next to each other (costs of one class) take similar time.
    results = [work(job) for job in jobs[rank() :: world_size()]]
    of_ranks = all_gather_objects(results)
    return [of_ranks[index % world_size()][index // world_size()] for index in range(len(jobs))]


def _costs_of(options: Svm) -> list[float]:
    """List the costs of the block ``SVM``."""
    costs, powers = options.costs, range(*options.costs.power_range)
    return [*costs.costs_list, *(costs.base**power for power in powers if costs.base > 0)]


def normalized(rows: np.ndarray) -> np.ndarray:
    """Divide rows by their L2 norm plus 1e-5, as VISSL does."""
    return np.asarray(rows / (np.linalg.norm(rows, axis=1) + 1e-5)[:, None])


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """Compute the area under the envelope of precision over recall, VOC's rule since 2010.

    Args:
        labels: labels (N,), 1 for images of the class and 0 for others. Leave out images with -1, which do not count.
        scores: scores (N,).
    Returns:
        A number from 0 to 1; NaN if no image is of the class.
    """
    hits = np.cumsum(labels[np.argsort(scores)[::-1]] > 0)
    if not len(hits) or not hits[-1]:
        return float("nan")
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / hits[-1]
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * envelope))


def solver(options: Svm, cost: float, seed: int) -> Any:
    """Return VISSL's LinearSVC, not yet fitted; ``seed`` determines liblinear's draws."""
    from sklearn.svm import LinearSVC  # imported here, since it takes a second

    return LinearSVC(
        C=cost,
        # Positives are few in one against all others. VISSL's weights.
        class_weight={1: 2, -1: 1},
        intercept_scaling=1.0,
        penalty=options.penalty,
        loss=options.loss,
        tol=0.0001,
        dual=options.dual,
        max_iter=options.max_iter,
        random_state=seed,
    )


def train_class(rows: np.ndarray, labels: np.ndarray, options: Svm, seed: int) -> ClassSvm:
    """Choose the cost by cross validation, and train with it. Not collective.

    Args:
        rows: normalized features (N, F) of the training images.
        labels: labels (N,), 1 for images of the class. 0 and -1 both mean other images, as in VISSL's training.
        options: the block ``SVM``.
        seed: seed of the solver.
    """
    from sklearn.model_selection import cross_val_score

    signs, costs = np.where(labels == 1, 1, -1), _costs_of(options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Liblinear failed to converge")  # reported once, at the end
        scores = [
            float(
                cross_val_score(
                    solver(options, cost, seed), rows, signs, cv=options.cross_val_folds, scoring="average_precision"
                ).mean()
            )
            for cost in costs
        ]
        cost = costs[int(np.argmax(scores))]
        return _fitted(rows, signs, options, cost, seed, scores)


def _fitted(rows: np.ndarray, signs: np.ndarray, options: Svm, cost: float, seed: int, scores: list[float]) -> ClassSvm:
    fitted = solver(options, cost, seed).fit(rows, signs)
    # scikit-learn warns, and keeps no other trace of it.
    is_converged = int(np.max(fitted.n_iter_)) < options.max_iter
    return ClassSvm(scores, cost, fitted.coef_[0], float(fitted.intercept_[0]), is_converged)


def average_precision_of(svm: ClassSvm, rows: np.ndarray, labels: np.ndarray) -> float:
    """Return the average precision on the rows (N, F) whose label (N,) is not -1."""
    counts = labels != -1
    return average_precision(labels[counts], rows[counts] @ svm.weight + svm.bias)


def draw(matrix: np.ndarray, k: int, dataset_name: str, generator: np.random.Generator) -> np.ndarray:
    """Keep the labels of a few drawn images, and set the others to -1.

    Source: VISSL's ``extra_scripts/create_low_shot_samples.py``.

    Args:
        matrix: labels (N, C): 1, 0 or -1.
        k: number of images of each class.
        dataset_name: "voc" draws k images with each class and (C - 1) * k images without it. Other names draw k images
            of each class, which count for all classes.
        generator: generator of the draw.
    Raises:
        DataError: a class has too few images.
    """
    drawn = np.full_like(matrix, -1)
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
                drawn[chosen, column] = label
            else:
                drawn[chosen] = matrix[chosen]
    return drawn


def low_shot(
    train: np.ndarray, drawn: np.ndarray, test: np.ndarray, labels: np.ndarray, options: Svm, seed: int
) -> list[float]:
    """Train on the drawn images and return the mean average precision on TEST for each cost. Not collective.

    Args:
        train: normalized features (N, F) of TRAIN.
        drawn: labels (N, C), as ``draw`` returns them.
        test: normalized features (M, F) of TEST.
        labels: labels (M, C) of TEST.
        options: the block ``SVM``.
        seed: seed of the solver.
    """
    means = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Liblinear failed to converge")
        for cost in _costs_of(options):
            accuracies = []
            for column in range(drawn.shape[1]):
                counts = drawn[:, column] != -1
                signs = np.where(drawn[counts, column] == 1, 1, -1)
                svm = _fitted(train[counts], signs, options, cost, seed, [])
                accuracies.append(average_precision_of(svm, test, labels[:, column]))
            means.append(float(np.nanmean(accuracies)))
    return means


FOLDER = "svm"


@dataclass(frozen=True)
class _Labeled:
    """The images of a split, and their labels (N, C): 1, 0 or -1."""

    source: Source
    matrix: np.ndarray


class _SvmHook(Hook):
    """Base of hooks that train SVMs on features of TRAIN and TEST at the end of a run, layer by layer."""

    def __init__(self) -> None:
        self._train: _Labeled | None = None
        self._test: _Labeled | None = None

    def on_start(self, run: Run) -> None:
        require_evaluation(run.plan.config.DATA, run.plan.seed)
        train, test = build_eval_sources(run.plan.config.DATA, run.plan.seed)
        if test is None:
            raise DataError("SVMs are tested on TEST's images. Name some: config.DATA.TEST.DATA_PATHS=<folder>.")
        self._train = _labeled(train, "TRAIN", 0, run)
        self._test = _labeled(test, "TEST", self._train.matrix.shape[1], run)
        if self._test.matrix.shape[1] != self._train.matrix.shape[1]:
            raise DataError(
                f"TRAIN has labels of {self._train.matrix.shape[1]} classes, TEST of {self._test.matrix.shape[1]}. "
                "Correct config.DATA.TEST.LABEL_PATHS."
            )
        self.check(run, self._train.matrix)

    def on_end(self, run: Run) -> None:
        assert self._train is not None and self._test is not None
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        data, seed = run.plan.config.DATA, run.plan.seed
        train = extract_features(run, eval_images(self._train.source, data, seed))
        test = extract_features(run, eval_images(self._test.source, data, seed))
        prepare = normalized if run.plan.config.SVM.normalize else np.asarray
        is_head = run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_AND_HEAD
        for name, columns in (layers_of(run) or {"heads" if is_head else "trunk": slice(None)}).items():
            rows = [prepare(features.rows[:, columns].cpu().numpy()) for features in (train, test)]
            line = self.measure(run, name, rows[0], self._train.matrix, rows[1], self._test.matrix)
            if run.is_main:
                print_line(line)

    def check(self, run: Run, matrix: np.ndarray) -> None:
        """Refuse labels (N, C) of TRAIN on which nothing can be trained. Raises DataError."""

    def measure(
        self, run: Run, name: str, train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray
    ) -> str:
        """Train and test on features of a layer (N, F), (M, F) with labels (N, C), (M, C). Return a line to print.

        Collective. Adds to the run's results.
        """
        raise NotImplementedError


@HOOKS.register("train_svm")
class TrainSvm(_SvmHook):
    """Trains an SVM for each class, whose cost is chosen by cross validation; measures mean average precision on TEST.

    Adds ``svm_map_by_layer`` to the results, and ``svm_top1_by_layer`` if each image has one class (0 to 1). The mean
    leaves out classes without an image in TEST. ``svm/<layer>`` in the run folder has VISSL's
    ``test_ap.npy`` (C, 1), ``crossval_ap.npy`` (C, costs) and ``chosen_cost.npy`` (C,), and
    ``classifiers.safetensors`` with ``weight`` (C, F) and ``bias`` (C,).
    """

    def check(self, run: Run, matrix: np.ndarray) -> None:
        folds = run.plan.config.SVM.cross_val_folds
        for column in range(matrix.shape[1]):
            with_it = int((matrix[:, column] == 1).sum())
            if min(with_it, len(matrix) - with_it) < folds:
                raise DataError(
                    f"SVM: TRAIN has {with_it} images of class {column} and {len(matrix) - with_it} others; "
                    f"cross validation needs {folds} of each. Lower config.SVM.cross_val_folds (2 at least), or leave "
                    "the class out by config.SVM.cls_list."
                )

    def measure(
        self, run: Run, name: str, train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray
    ) -> str:
        options, seed = run.plan.config.SVM, run.plan.seed
        columns = range(labels.shape[1])
        svms = shared(columns, lambda column: train_class(train, labels[:, column], options, seed))
        aps = [
            average_precision_of(svm, test, test_labels[:, column]) for svm, column in zip(svms, columns, strict=True)
        ]
        mean = float(np.nanmean(aps))
        run.results.setdefault("svm_map_by_layer", {})[name] = mean
        summary = f"SVM on {name}: mean average precision {mean:.1%}"
        if (test_labels.sum(axis=1) == 1).all() and (test_labels >= 0).all() and len(svms) > 1:
            scores = np.stack([test @ svm.weight + svm.bias for svm in svms], axis=1)
            top1 = float((scores.argmax(axis=1) == test_labels.argmax(axis=1)).mean())
            run.results.setdefault("svm_top1_by_layer", {})[name] = top1
            summary += f", top-1 {top1:.1%}"
        if num_open := sum(not svm.is_converged for svm in svms):
            summary += f"; {num_open} of {len(svms)} solvers stopped at SVM.max_iter"
        if run.is_main:
            _save(run.folder / FOLDER / name, svms, aps)
        return summary


@HOOKS.register("train_svm_low_shot")
class TrainSvmLowShot(_SvmHook):
    """Trains SVMs on k images of each class, drawn several times; measures mean average precision on all of TEST.

    Adds ``svm_low_shot_by_layer`` to the results: for each layer and ``k=<k>`` the mean, min, max and std (0 to 1) over
    the draws, at the cost with the highest mean. ``svm/<layer>`` in the run folder has VISSL's
    ``test_ap_<mean|min|max|std>.npy`` (k values, costs).
    """

    def check(self, run: Run, matrix: np.ndarray) -> None:
        for k in run.plan.config.SVM.low_shot.k_values:
            # A draw refuses classes with too few images, here before any feature is extracted.
            self._draw_images(run, matrix, 0, k)

    def _draw_images(self, run: Run, matrix: np.ndarray, sample: int, k: int) -> np.ndarray:
        name = run.plan.config.SVM.low_shot.dataset_name
        if name != "voc" and not ((matrix >= 0).all() and (matrix.sum(axis=1) <= 1).all()):
            must = "SVM.low_shot.dataset_name: places205 needs images of one class, and TRAIN has images of several."
            raise DataError(f"{must} Write voc.")
        # k is part of the seed, so that a draw depends neither on the other values of k nor on the rank.
        return draw(matrix, k, name, np.random.default_rng([run.plan.seed, sample, k]))

    def measure(
        self, run: Run, name: str, train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray
    ) -> str:
        options, seed = run.plan.config.SVM, run.plan.seed
        k_values, samples = options.low_shot.k_values, options.low_shot.sample_inds
        jobs = [(k, sample) for k in k_values for sample in samples]

        def work(job: tuple[int, int]) -> list[float]:
            drawn = self._draw_images(run, labels, job[1], job[0])
            return low_shot(train, drawn, test, test_labels, options, seed)

        precisions = np.array(shared(jobs, work)).reshape(len(k_values), len(samples), -1)
        stats: dict[str, np.ndarray] = {
            "mean": precisions.mean(axis=1),
            "min": precisions.min(axis=1),
            "max": precisions.max(axis=1),
            "std": precisions.std(axis=1),
        }
        best = stats["mean"].argmax(axis=1)
        rows: dict[str, Any] = {
            f"k={k}": {stat: float(values[index, best[index]]) for stat, values in stats.items()}
            for index, k in enumerate(k_values)
        }
        run.results.setdefault("svm_low_shot_by_layer", {})[name] = rows
        if run.is_main:
            folder = run.folder / FOLDER / name
            folder.mkdir(parents=True, exist_ok=True)
            for stat, values in stats.items():
                np.save(folder / f"test_ap_{stat}.npy", values)
        summary = ", ".join(f"{k} {row['mean']:.1%} ({row['min']:.1%} to {row['max']:.1%})" for k, row in rows.items())
        return f"SVM on {name}, mean average precision: {summary}"


def _labeled(source: Source, split: str, num_classes: int, run: Run) -> _Labeled:
    matrix = label_matrix(source, num_classes)
    if matrix is None or not matrix.shape[1]:
        raise DataError(
            f"SVMs need labels, and {split}'s images have none. Put each class in a folder of its own, or write "
            f"config.DATA.{split}.LABEL_SOURCES=[disk_filelist] and LABEL_PATHS."
        )
    chosen = run.plan.config.SVM.cls_list
    if wrong := [number for number in chosen if number >= matrix.shape[1]]:
        raise DataError(f"SVM.cls_list: must name classes below {matrix.shape[1]}, not {wrong[0]}. Correct the list.")
    return _Labeled(source, matrix[:, chosen] if chosen else matrix)


def _save(folder: Path, svms: list[ClassSvm], aps: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "test_ap.npy", np.array(aps)[:, None])
    np.save(folder / "crossval_ap.npy", np.array([svm.average_precisions for svm in svms]))
    np.save(folder / "chosen_cost.npy", np.array([svm.cost for svm in svms]))
    tensors = {
        "weight": torch.from_numpy(np.stack([svm.weight for svm in svms])),
        "bias": torch.tensor([svm.bias for svm in svms], dtype=torch.float64),
    }
    save_file(tensors, folder / "classifiers.safetensors")


def logistic_top1(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray, penalty: float
) -> tuple[float, float]:
    """Fit a multinomial logistic regression and return top-1 (0 to 1) on the training and on the test images.

    Features are standardized with the training images' statistics. scikit-learn's solver runs at most 100 iterations.

    Args:
        train: features (N, F) of the training images.
        labels: labels (N,) of the training images.
        test: features (M, F) of the test images.
        test_labels: labels (M,) of the test images.
        penalty: strength of the L2 penalty; scikit-learn's ``C`` is N / ``penalty``.
    """
    from sklearn.exceptions import ConvergenceWarning  # imported here, since it takes a second
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    rows = scaler.transform(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        classifier = LogisticRegression(C=len(labels) / penalty).fit(rows, labels)
    return float(classifier.score(rows, labels)), float(classifier.score(scaler.transform(test), test_labels))


@HOOKS.register("low_shot_test")
class LowShot(Hook):
    """Fits logistic regressions to images of TRAIN, drawn with each seed; measures top-1 on TEST at the best penalty.

    ``LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION`` has the keys; each seed replaces ``DATA_LIMIT_SAMPLING.SEED``. Adds
    ``low_shot_by_layer`` to the results: layer -> mean and std over the seeds, and for each seed ``top1`` (0 to 1), the
    best of ``top1_by_lambda`` (penalty -> top-1 on TRAIN and on TEST).
    """

    def __init__(self) -> None:
        self._train: list[Source] = []
        self._test: Source | None = None

    def on_start(self, run: Run) -> None:
        data, seed = run.plan.config.DATA, run.plan.seed
        require_evaluation(data, seed)
        if not data.TEST.DATA_SOURCES:
            raise DataError("Low-shot classifiers are tested on TEST's images. Name some: config.DATA.TEST.DATA_PATHS.")
        for sampling_seed in run.plan.config.LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION.SEEDS:
            # The plan is shared with other hooks and saved with the run.
            drawn = copy.deepcopy(data)
            drawn.TRAIN.DATA_LIMIT_SAMPLING.SEED = sampling_seed
            self._train.append(build_source(drawn, "TRAIN", seed))
        # TEST may lack classes; their numbers must be those of TRAIN all the same.
        self._test = build_source(data, "TEST", seed, self._train[0].class_names)
        if len(self._train[0].class_names) < 2:
            raise DataError("Low-shot classifiers need images of two classes at least. Name labels of TRAIN's images.")

    def on_end(self, run: Run) -> None:
        assert self._test is not None
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        options, data = run.plan.config.LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION, run.plan.config.DATA
        drawn = [extract_features(run, eval_images(source, data, run.plan.seed)) for source in self._train]
        test = extract_features(run, eval_images(self._test, data, run.plan.seed))
        is_head = run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_AND_HEAD
        lambdas = [float(one) for one in penalties(options.LAMBDA)]
        for name, columns in (layers_of(run) or {"heads" if is_head else "trunk": slice(None)}).items():
            jobs = [(train, penalty) for train in drawn for penalty in lambdas]
            reached = shared(jobs, partial(_measured, test, columns))
            seeds: dict[str, Any] = {}
            for index, seed in enumerate(options.SEEDS):
                of_layer = reached[index * len(lambdas) :][: len(lambdas)]
                by_penalty = {str(penalty): list(pair) for penalty, pair in zip(lambdas, of_layer, strict=True)}
                seeds[str(seed)] = {"top1": max(pair[1] for pair in of_layer), "top1_by_lambda": by_penalty}
            best = [of["top1"] for of in seeds.values()]
            rows: dict[str, Any] = {"mean": float(np.mean(best)), "std": float(np.std(best)), "seeds": seeds}
            run.results.setdefault("low_shot_by_layer", {})[name] = rows
            if run.is_main:
                draws = f"{counted(len(best), 'draw')} of {counted(len(drawn[0].rows), 'image')}"
                print_line(f"Low shot on {name}: top-1 {rows['mean']:.1%}, std {rows['std']:.1%} over {draws}")


def _measured(test: Features, columns: slice, job: tuple[Features, float]) -> tuple[float, float]:
    train, penalty = job
    assert train.labels is not None and test.labels is not None
    rows = [features.rows[:, columns].cpu().numpy() for features in (train, test)]
    return logistic_top1(rows[0], train.labels.cpu().numpy(), rows[1], test.labels.cpu().numpy(), penalty)
