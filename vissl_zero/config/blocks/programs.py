"""What VISSL's programs read beside the features: ``SVM``, ``CLUSTERFIT``."""

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


@dataclass
class ClusterSampling:
    """``CLUSTERFIT.DATA_LIMIT_SAMPLING``."""

    SEED: int = number(0, least=0)
    """Seed of the draw."""


@with_vissl_keys("CLUSTERFIT.FEATURES")
@dataclass
class ClusterFeatures:
    """``CLUSTERFIT.FEATURES``: what is clustered."""

    DATA_PARTITION: str = choice("TRAIN", "TRAIN", "TEST")
    """The split whose images the centroids are computed from."""
    TEST_PARTITION: str = choice("TEST", "TEST", "TRAIN", "")
    """Another split whose images get the nearest centroid; it is left out where it is empty or names no images."""
    DATASET_NAME: str = ""
    """Beginning of the files' names; empty: clusters."""
    LAYER_NAME: str = ""
    """The layer of LINEAR_EVAL_FEAT_POOL_OPS_MAP; it stands in the files' names."""
    DIMENSIONALITY_REDUCTION: int = number(0, least=0)
    """Whitened principal components to cluster; 0: the features themselves."""


@with_vissl_keys("CLUSTERFIT")
@dataclass
class ClusterFit:
    """``CLUSTERFIT``: k-means of features (cluster_features_and_label)."""

    OUTPUT_DIR: str = "."
    """Folder of the lists of images and labels; a relative one is in the run folder."""
    NUM_ITER: int = number(50, least=1)
    """Most iterations of k-means."""
    NUM_CLUSTERS: int = number(16000, least=1)
    """Clusters."""
    DATA_LIMIT: int = number(-1, least=1, also=(-1,), fix="Write -1 for all images.")
    """Images that the centroids are computed from, drawn at random; -1: all."""
    DATA_LIMIT_SAMPLING: ClusterSampling = field(default_factory=ClusterSampling)
    """Which images those are."""
    FEATURES: ClusterFeatures = field(default_factory=ClusterFeatures)
    """What is clustered."""
