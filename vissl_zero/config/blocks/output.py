"""What a run leaves and shows (``CHECKPOINT``, ``HOOKS``, ``NEAREST_NEIGHBOR``), and what VISSL's programs read.

The programs: ``SVM``, ``CLUSTERFIT``, ``IMG_RETRIEVAL``, ``LOW_SHOT_BENCHMARK``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vissl_zero.config.blocks.data import TEXTS, Texts
from vissl_zero.config.constraints import choice, number
from vissl_zero.vissl.keys import with_vissl_keys


@with_vissl_keys("CHECKPOINT")
@dataclass
class CheckpointConfig:
    """``CHECKPOINT``: when a run saves its state, and how it resumes."""

    DIR: str | None = None
    """The run folder; null: Hydra's output or sweep folder (runs/<date>_<time>_<recipe>)."""
    AUTO_RESUME: bool = True
    """Resume from the newest complete checkpoint in DIR, if there is one."""
    CHECKPOINT_FREQUENCY: int = number(1, least=1, also=(-1,))
    """Epochs between checkpoints; -1: none by epochs. The end of the run is saved unless both frequencies are -1."""
    CHECKPOINT_ITER_FREQUENCY: int = number(-1, least=1, also=(-1,))
    """Optimizer steps between checkpoints; -1: only by epochs."""
    SAVE_BEST: bool = False
    """Keep the weights with the best BEST_METRIC as weights_best.safetensors."""
    BEST_METRIC: str = choice("top1", "miou", "knn_top1", "probe_top1", "loss", default="top1")
    """The figure that SAVE_BEST follows: top-1 on TEST of a run that predicts classes, mIoU on TEST of one that
    segments, top-1 of kNN or of the online probe (highest), or the loss (mean of an epoch; lowest)."""
    KEEP_LAST: int = number(2, least=1, also=(-1,))
    """How many of the newest checkpoints are kept; -1: all."""
    KEEP_EVERY: int = number(-1, least=1, also=(-1,))
    """Keep checkpoints at multiples of this many optimizer steps for good; -1: none."""
    ASYNC: bool = True
    """Write while training continues, from a copy in host memory; off, training waits for the disk."""
    TIME_LIMIT_MIN: float | None = number(None, above=0, fix="Write null for none.")
    """Minutes after which the run saves and stops with exit code 75; null: none."""
    ALLOW_CHANGED: list[str] = field(default_factory=list)
    """Keys (or blocks) that may differ from the checkpoint's though they change shapes or the order of the data."""
    LATEST_CHECKPOINT_RESUME_FILE_NUM: int = number(1, least=1, fix="Write 1 for the newest.")
    """Resume from the n-th newest."""
    CHECK_RANKS_EVERY: int = number(-1, least=1, also=(-1,))
    """Optimizer steps between replica checks (checksums of everything that is replicated); -1: never."""


@with_vissl_keys("HOOKS.TENSORBOARD_SETUP")
@dataclass
class TensorboardSetup:
    """``HOOKS.TENSORBOARD_SETUP``."""

    USE_TENSORBOARD: bool = True
    """False takes tensorboard out of HOOKS.LOGGERS."""


@with_vissl_keys("HOOKS.EMA_MODEL")
@dataclass
class EmaModel:
    """``HOOKS.EMA_MODEL``: a second model that follows the weights slowly, a running average of them."""

    SAVE_EMA_MODEL: bool = False
    """Keep the average during training, shard by shard, and write it as weights_ema.safetensors."""
    UPDATE_ITER: int = number(1, least=1)
    """Optimizer steps between updates of the average; it is updated in the first step, too."""
    WARMUP: float = number(0.05, least=0, most=1)
    """Share of training, 0 to 1, in which the average is a copy of the weights."""
    DECAY: float = number(0.9999, least=0, most=1)
    """Weight of the past in the average, 0 to 1, per update."""


@dataclass
class EarlyStopping:
    """``HOOKS.EARLY_STOPPING``: end a run whose figure no longer gets better, as its last step would end it."""

    METRIC: str = ""
    """The figure: loss (mean of an epoch), top1, miou, knn_top1 or probe_top1, if the run measures it; empty: never
    stop."""
    PATIENCE: int = number(5, least=1)
    """Measurements in a row without a better one after which the run ends."""
    MODE: str = choice("auto", "max", "min", default="auto")
    """Whether higher (max) or lower (min) is better; auto: lower for loss, higher for the others."""
    MIN_DELTA: float = number(0.0, least=0)
    """By how much, in the metric's unit, a figure must exceed the best to be better."""


@dataclass
class CaptureBadStep:
    """``HOOKS.CAPTURE_BAD_STEP``: keep what replays a step whose loss or gradient is not finite, or a spike."""

    USE_CAPTURE: bool = False
    """Judge each step before its update, and write bad ones into the run folder's bad_steps/, for vissl-zero replay."""
    SPIKE_FACTOR: float | None = number(10.0, above=1, fix="Write null to capture what is not finite alone.")
    """How many times the median of the last 100 steps a loss or a gradient's norm must reach to be a spike; null: only
    what is not finite is bad."""
    MOST: int = number(3, least=1)
    """Most steps that a run captures; each takes the room of a checkpoint and a batch."""


@with_vissl_keys("HOOKS")
@dataclass
class Hooks:
    """``HOOKS``."""

    EXTRA: list[str] = field(default_factory=list)
    """Names of hooks of your own, called after the built-in ones that measure and before those that report."""
    LOGGERS: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where figures go besides metrics.jsonl: tensorboard, csv, wandb, mlflow, trackio, or a logger of your own."""
    HISTOGRAMS_EVERY: int = number(0, least=0)
    """Optimizer steps between histograms of each trained weight and its gradient, written to histograms.jsonl and shown
    by the loggers tensorboard and wandb; 0: none."""
    TENSORBOARD_SETUP: TensorboardSetup = field(default_factory=TensorboardSetup)
    """VISSL's switch of TensorBoard."""
    EMA_MODEL: EmaModel = field(default_factory=EmaModel)
    """A running average of the weights."""
    EARLY_STOPPING: EarlyStopping = field(default_factory=EarlyStopping)
    """End the run when a figure no longer gets better."""
    CAPTURE_BAD_STEP: CaptureBadStep = field(default_factory=CaptureBadStep)
    """Keep what replays a step that went wrong."""


@dataclass
class OnlineProbeConfig:
    """``ONLINE_PROBE``: a linear classifier on the trunk's features that is trained beside the model."""

    USE_PROBE: bool = False
    """Train and measure it. Nothing of it reaches the model; images need classes."""
    EVERY_NUM_EPOCHS: int = number(1, least=0)
    """Measure on TEST's images after every k-th epoch; 0: only at the end."""
    LR: float = number(0.001, least=1e-9)
    """Its learning rate (Adam on standardized features)."""


@with_vissl_keys("NEAREST_NEIGHBOR")
@dataclass
class NearestNeighbor:
    """``NEAREST_NEIGHBOR``: the trunk's features judged by a vote of their neighbors, where images have classes."""

    USE_KNN: bool = True
    """Measure before and after training."""
    EVERY_NUM_EPOCHS: int = number(0, least=0)
    """Measure after every k-th epoch too; 0: only before and after."""
    # Both numbers are those of DINO (https://arxiv.org/abs/2104.14294), by which kNN is usually reported.
    TOPK: int = number(20, least=1)
    """Neighbors that vote."""
    SIGMA: float = number(0.07, least=1e-6)
    """Temperature of the vote: a neighbor at cosine c weighs exp(c / SIGMA)."""
    ALSO_TOPK: list[int] = number([], least=1)
    """Other numbers of neighbors to report, with SIGMA and each of ALSO_SIGMA."""
    ALSO_SIGMA: list[float] = number([], least=1e-6)
    """Other temperatures to report, with TOPK and each of ALSO_TOPK."""
    L2_NORM_FEATS: bool = True
    """Divide features by their L2 norm (else the vote goes by dot products)."""
    MAX_TRAIN_IMAGES: int = number(10000, least=1)
    """Most training images to index; a larger set is subsampled evenly."""
    MAX_TEST_IMAGES: int = number(2000, least=1)
    """Most test images to use; a larger set is subsampled evenly."""
    LIDAR_IMAGES: int = number(0, least=2, also=(0,))
    """Training images whose augmented views give LiDAR at the end; the paper takes 1,000; 0: not measured."""
    LIDAR_VIEWS: int = number(10, least=2, most=10**6)
    """Views of each of them; the paper takes 50."""


# Meter -> what its figures' names begin with.
METERS = {
    "accuracy_list_meter": "top",
    "precision_at_k_list_meter": "precision_at_",
    "recall_at_k_list_meter": "recall_at_",
}


@with_vissl_keys("METERS.accuracy_list_meter")
@dataclass
class AccuracyMeter:
    """``accuracy_list_meter``."""

    topk_values: list[int] = number([1], least=1, most=10**6)
    """Numbers of best classes; 1 and 5 are measured anyway."""


@with_vissl_keys("METERS.precision_at_k_list_meter")
@dataclass
class PrecisionMeter:
    """``precision_at_k_list_meter``."""

    topk_values: list[int] = number([1], least=1, most=10**6)
    """Numbers of best classes."""


@with_vissl_keys("METERS.recall_at_k_list_meter")
@dataclass
class RecallMeter:
    """``recall_at_k_list_meter``."""

    topk_values: list[int] = number([1], least=1, most=10**6)
    """Numbers of best classes."""


@with_vissl_keys("METERS")
@dataclass
class Meters:
    """``METERS``: further figures on TEST of a run that predicts classes; top-1 and top-5 are always measured."""

    name: str | None = ""
    """One more of ``names``, as earlier recipes of VISSL write it."""
    names: Texts = field(default_factory=list, metadata=TEXTS)
    """accuracy_list_meter (top<k>), precision_at_k_list_meter (precision_at_<k>), recall_at_k_list_meter
    (recall_at_<k>); with one label per image, recall is the share of top-k, precision that share over k."""
    model_output_mask: bool = False
    """Only classes that have an image in TEST can be predicted."""
    accuracy_list_meter: AccuracyMeter = field(default_factory=AccuracyMeter)
    """Shares of images whose label is among the k best classes."""
    precision_at_k_list_meter: PrecisionMeter = field(default_factory=PrecisionMeter)
    """Share of the k best classes that are the label's."""
    recall_at_k_list_meter: RecallMeter = field(default_factory=RecallMeter)
    """Share of labels among the k best classes."""


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

    dataset_name: str = choice("voc", "places205", default="voc", also=("places", "places205_everstore"))
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
    loss: str = choice("squared_hinge", "hinge", default="squared_hinge")
    """scikit-learn's LinearSVC."""
    penalty: str = choice("l2", "l1", default="l2")
    """Penalty on the weights; ``l1`` requires ``squared_hinge`` and ``dual: false``."""
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

    DATA_PARTITION: str = choice("TRAIN", "TEST", default="TRAIN")
    """The split whose images the centroids are computed from."""
    TEST_PARTITION: str = choice("TEST", "TRAIN", "", default="TEST")
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
    """Search copydays' database_and_distractors, not its database."""
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
    FEATS_PROCESSING_TYPE: str = choice("rmac", "gem", "", default="")
    """How maps are pooled: rmac (maxima of regions), gem (generalized mean), or not at all (empty)."""
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
    SIMILARITY_MEASURE: str = choice("cosine_similarity", "l2", default="cosine_similarity")
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

    METHOD: str = choice("logistic_regression", default="logistic_regression", also=("svm",))
    """The classifier."""
    LOGISTIC_REGRESSION: LogisticRegression = field(default_factory=LogisticRegression)
    """Penalties and draws."""
