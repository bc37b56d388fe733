"""Logistic regression on few images: VISSL's ``low_shot_test``.

Source: VISSL's ``vissl/utils/low_shot_utils.py`` at 09270ed2.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import rich

from vissl_zero.data.loader import eval_images, require_evaluation
from vissl_zero.data.source import Source, build_source
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import DataError
from vissl_zero.evaluation.features import Features, extract_features, layers_of
from vissl_zero.evaluation.svm import shared
from vissl_zero.registry import HOOKS


def logistic_top1(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray, penalty: float
) -> tuple[float, float]:
    """Top-1 (0 to 1) on the training images and on the others of a multinomial logistic regression.

    Features are standardised by the training images'. The solver is scikit-learn's, of 100 iterations at most.

    Args:
        train: features (N, F).
        labels: (N,).
        test: (M, F).
        test_labels: (M,).
        penalty: the L2 penalty, divided by N.
    """
    from sklearn.exceptions import ConvergenceWarning  # here: takes a second
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
    """Logistic regressions on TRAIN's images, drawn anew for each seed; top-1 on TEST at the best penalty.

    ``LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION`` has the keys; a seed stands for ``DATA_LIMIT_SAMPLING.SEED``. Adds
    ``low_shot_by_layer`` to the results: layer -> mean and std over the seeds, and for each seed ``top1`` (0 to 1), the
    best of ``top1_by_lambda`` (penalty -> TRAIN's and TEST's).
    """

    def __init__(self) -> None:
        self._train: list[Source] = []
        self._test: Source | None = None

    def on_start(self, run: Run) -> None:
        data, seed = run.plan.config["DATA"], run.plan.seed
        require_evaluation(data, seed)
        if not data["TEST"]["DATA_SOURCES"]:
            raise DataError("Low-shot classifiers are tested on TEST's images. Name some: config.DATA.TEST.DATA_PATHS.")
        for sampling_seed in run.plan.config["LOW_SHOT_BENCHMARK"]["LOGISTIC_REGRESSION"]["SEEDS"]:
            drawn = copy.deepcopy(dict(data))
            drawn["TRAIN"]["DATA_LIMIT_SAMPLING"]["SEED"] = sampling_seed
            self._train.append(build_source(drawn, "TRAIN", seed))
        self._test = build_source(data, "TEST", seed, self._train[0].class_names)
        if len(self._train[0].class_names) < 2:
            raise DataError("Low-shot classifiers need images of two classes at least. Name labels of TRAIN's images.")

    def on_end(self, run: Run) -> None:
        assert self._test is not None
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        options, data = run.plan.config["LOW_SHOT_BENCHMARK"]["LOGISTIC_REGRESSION"], run.plan.config["DATA"]
        found = [extract_features(run, eval_images(source, data, run.plan.seed)) for source in self._train]
        test = extract_features(run, eval_images(self._test, data, run.plan.seed))
        is_head = run.plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]["FREEZE_TRUNK_AND_HEAD"]
        penalties = penalties_of(options["LAMBDA"])
        for name, columns in (layers_of(run) or {"heads" if is_head else "trunk": slice(None)}).items():
            jobs = [(train, penalty) for train in found for penalty in penalties]
            reached = shared(jobs, partial(_measured, test, columns))
            seeds: dict[str, Any] = {}
            for index, seed in enumerate(options["SEEDS"]):
                own = reached[index * len(penalties) :][: len(penalties)]
                by_penalty = {str(penalty): list(pair) for penalty, pair in zip(penalties, own, strict=True)}
                seeds[str(seed)] = {"top1": max(pair[1] for pair in own), "top1_by_lambda": by_penalty}
            best = [of["top1"] for of in seeds.values()]
            rows: dict[str, Any] = {"mean": float(np.mean(best)), "std": float(np.std(best)), "seeds": seeds}
            run.results.setdefault("low_shot_by_layer", {})[name] = rows
            if run.is_main:
                line = f"Low shot on {name}: top-1 {rows['mean']:.1%}, std {rows['std']:.1%} over {len(best)} draws of "
                line += f"{len(found[0].rows):,} images"
                rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)


def penalties_of(value: Any) -> Sequence[float]:
    """``LAMBDA`` as a list: one number or several."""
    return [float(one) for one in (value if isinstance(value, list) else [value])]


def _measured(test: Features, columns: slice, job: tuple[Features, float]) -> tuple[float, float]:
    train, penalty = job
    assert train.labels is not None and test.labels is not None
    rows = [found.rows[:, columns].cpu().numpy() for found in (train, test)]
    return logistic_top1(rows[0], train.labels.cpu().numpy(), rows[1], test.labels.cpu().numpy(), penalty)
