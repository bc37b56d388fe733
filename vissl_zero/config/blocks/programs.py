"""What VISSL's programs read beside the features: ``SVM``."""

from __future__ import annotations

from dataclasses import dataclass, field

from vissl_zero.config.constraints import choice, number
from vissl_zero.config.vissl import with_vissl_keys


@dataclass
class SvmCosts:
    """``SVM.costs``: the costs (C) that are tried."""

    costs_list: list[float] = number([0.1, 0.01], above=0)
    """Costs."""
    base: float = -1.0
    """Above 0: the powers of this base are tried too."""
    power_range: list[int] = field(default_factory=lambda: [4, 20])
    """First exponent of base, and the one after the last."""


@dataclass
class SvmLowShot:
    """``SVM.low_shot``: what train_svm_low_shot draws of TRAIN's images."""

    dataset_name: str = choice("voc", "voc", "places205", also=("places", "places205_everstore"))
    """voc: for each class k images with it and (classes - 1) * k without it; places205: k images of each class."""
    sample_inds: list[int] = number([1, 2, 3, 4, 5], least=0)
    """Numbers of the draws; each is trained and tested alone."""
    k_values: list[int] = number([1, 2, 4, 8, 16, 32, 64, 96], least=1)
    """Images with a class, k."""


@with_vissl_keys("SVM")
@dataclass
class Svm:
    """``SVM``: linear support vector machines, one per class, on features (train_svm, train_svm_low_shot)."""

    normalize: bool = True
    """Divide each image's features by their L2 norm."""
    cls_list: list[int] = number([], least=0)
    """Numbers of the classes to take; empty: all."""
    loss: str = choice("squared_hinge", "squared_hinge", "hinge")
    """scikit-learn's LinearSVC."""
    penalty: str = choice("l2", "l2", "l1")
    """Of the weights; l1 needs squared_hinge and dual: false."""
    dual: bool = True
    """Solve the dual problem; hinge needs it."""
    max_iter: int = number(2000, least=1)
    """Most iterations of the solver."""
    cross_val_folds: int = number(3, least=2)
    """Folds of TRAIN's images, by which train_svm chooses each class's cost."""
    costs: SvmCosts = field(default_factory=SvmCosts)
    """Costs that are tried."""
    low_shot: SvmLowShot = field(default_factory=SvmLowShot)
    """Draws of few images."""
