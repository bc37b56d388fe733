"""What a run leaves and shows: ``CHECKPOINT``, ``HOOKS``, ``NEAREST_NEIGHBOR``."""

from __future__ import annotations

from dataclasses import dataclass, field

from vissl_zero.config.blocks.data import TEXTS, Texts
from vissl_zero.config.constraints import number
from vissl_zero.config.vissl import with_vissl_keys


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
    """Keep the weights with the highest top-1 on TEST of a supervised run as weights_best.safetensors."""
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
    """Write event files into <run folder>/tensorboard."""


@with_vissl_keys("HOOKS.EMA_MODEL")
@dataclass
class EmaModel:
    """``HOOKS.EMA_MODEL``: a second model that follows the weights slowly, a running average of them."""

    SAVE_EMA_MODEL: bool = False
    """Keep the average during training, shard by shard, and write it as weights_ema.safetensors."""
    UPDATE_ITER: int = number(1, least=1)
    """Optimizer steps between updates of the average."""
    WARMUP: float = number(0.05, least=0, most=1)
    """Share of training, 0 to 1, in which the average is a copy of the weights."""
    DECAY: float = number(0.9999, least=0, most=1)
    """Weight of the past in the average, 0 to 1, per update."""


@with_vissl_keys("HOOKS")
@dataclass
class Hooks:
    """``HOOKS``."""

    EXTRA: list[str] = field(default_factory=list)
    """Names of hooks of your own, called after the built-in ones that measure and before those that report."""
    TENSORBOARD_SETUP: TensorboardSetup = field(default_factory=TensorboardSetup)
    """Event files for TensorBoard."""
    EMA_MODEL: EmaModel = field(default_factory=EmaModel)
    """A running average of the weights."""


@dataclass
class OnlineProbeConfig:
    """``ONLINE_PROBE``: a linear classifier on the trunk's features that is trained beside the model."""

    USE_PROBE: bool = False
    """Train and measure it. Nothing of it reaches the model; images need classes."""
    EVERY_NUM_EPOCHS: int = number(1, least=0)
    """Measure on TEST's images after every k-th epoch; 0: only at the end."""
    LR: float = number(0.001, least=1e-9)
    """Its learning rate (Adam on standardised features)."""


@with_vissl_keys("NEAREST_NEIGHBOR")
@dataclass
class NearestNeighbor:
    """``NEAREST_NEIGHBOR``: the trunk's features judged by a vote of their neighbours, where images have classes."""

    USE_KNN: bool = True
    """Measure before and after training."""
    EVERY_NUM_EPOCHS: int = number(0, least=0)
    """Measure after every k-th epoch too; 0: only before and after."""
    TOPK: int = number(20, least=1)
    """Neighbours that vote."""
    SIGMA: float = number(0.07, least=1e-6)
    """Temperature of the vote: a neighbour at cosine c weighs exp(c / SIGMA)."""
    ALSO_TOPK: list[int] = number([], least=1)
    """Other numbers of neighbours to report, with SIGMA and each of ALSO_SIGMA."""
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
