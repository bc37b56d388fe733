"""What VISSL's programs read: ``SVM``, ``CLUSTERFIT``, ``IMG_RETRIEVAL``, ``LOW_SHOT_BENCHMARK``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
class ClusterFeaturesConfig:
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
    FEATURES: ClusterFeaturesConfig = field(default_factory=ClusterFeaturesConfig)
    """What is clustered."""


@with_vissl_keys("IMG_RETRIEVAL")
@dataclass
class ImageRetrieval:
    """``IMG_RETRIEVAL``: images found by their features (instance_retrieval_test)."""

    DATASET_PATH: str = ""
    """Folder that holds the folders of both data sets."""
    EVAL_DATASET_NAME: str = "Paris"
    """What is searched: roxford5k, rparis6k, copydays, or a folder as Oxford and Paris are."""
    TRAIN_DATASET_NAME: str = "Oxford"
    """Whose images the whitening is of: one of these, whitening, or a folder of .jpg files."""
    WHITEN_IMG_LIST: str = ""
    """Text file of the data set called whitening: a path below its folder in each line."""
    USE_DISTRACTORS: bool = False
    """Of copydays: search database_and_distractors, not database."""
    DEBUG_MODE: bool = False
    """10 images to whiten by, 10 queries, 50 images to search, where the next three keys say -1."""
    NUM_TRAINING_SAMPLES: int = number(-1, least=1, also=(-1,), fix="Write -1 for all images.")
    """Images to whiten by, the first ones; -1: all."""
    NUM_QUERY_SAMPLES: int = number(-1, least=1, also=(-1,), fix="Write -1 for all images.")
    """Queries, the first ones; -1: all."""
    NUM_DATABASE_SAMPLES: int = number(-1, least=1, also=(-1,), fix="Write -1 for all images.")
    """Images to search, the first ones; -1: all."""
    RESIZE_IMG: int = number(1024, least=1, also=(-1,), fix="Write -1 for images as they are.")
    """Longer side of images in pixels; with CENTER_CROP the side of the square; -1: as they are."""
    CENTER_CROP: bool = False
    """See the middle square of an image alone."""
    CROP_QUERY_ROI: bool = False
    """See the object's box alone in each query."""
    IMG_SCALINGS: list[float] = number([1.0], above=0)
    """Factors of the images' size; vectors are means over them."""
    FEATS_PROCESSING_TYPE: str = choice("", "rmac", "gem", "")
    """How maps are pooled: rmac (maxima of regions), gem (generalised mean), or not at all (empty)."""
    SPATIAL_LEVELS: int = number(3, least=1)
    """Levels of rmac's regions."""
    GEM_POOL_POWER: float = number(4.0, above=0)
    """Power of gem; 1: the mean."""
    NORMALIZE_FEATURES: bool = True
    """Vectors of unit length."""
    TRAIN_PCA_WHITENING: bool = True
    """Whiten the vectors; rmac needs it."""
    N_PCA: int = number(512, least=1, also=(-1,), fix="Write -1 for all components.")
    """Whitened principal components; -1: all."""
    SIMILARITY_MEASURE: str = choice("cosine_similarity", "cosine_similarity", "l2")
    """What images are ranked by."""
    SAVE_RETRIEVAL_RANKINGS_SCORES: bool = True
    """Write rankings and similarities."""


@dataclass
class LogisticRegression:
    """``LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION``."""

    LAMBDA: Any = 0.025
    """L2 penalty times the number of images; or a list of them, of which the best counts."""
    SEEDS: list[int] = number([0], least=0)
    """Seeds of DATA.TRAIN.DATA_LIMIT_SAMPLING; each draws images of its own."""


@with_vissl_keys("LOW_SHOT_BENCHMARK")
@dataclass
class LowShotBenchmark:
    """``LOW_SHOT_BENCHMARK``: classifiers on few images (low_shot_test)."""

    METHOD: str = choice("logistic_regression", "logistic_regression", also=("svm",))
    """The classifier."""
    LOGISTIC_REGRESSION: LogisticRegression = field(default_factory=LogisticRegression)
    """Penalties and draws."""
