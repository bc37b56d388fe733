"""What a run leaves and shows: ``CHECKPOINT``, ``HOOKS``, ``NEAREST_NEIGHBOR``."""

from __future__ import annotations

from dataclasses import dataclass, field

from vissl_zero.config.vissl_block import with_vissl_keys


@dataclass
class Checkpoint:
    """``CHECKPOINT``; keys other than DIR wait for checkpointing and must stay as they are."""

    DIR: str | None = None
    """The run folder; null: Hydra's output or sweep folder (runs/<date>_<time>_<recipe>)."""
    APPEND_DISTR_RUN_ID: bool = False
    """Put the run's id behind DIR."""
    BACKEND: str = "disk"
    """Where checkpoints go."""
    AUTO_RESUME: bool = True
    """Continue from the newest checkpoint in DIR."""
    CHECKPOINT_FREQUENCY: int = 1
    """Epochs between checkpoints."""
    CHECKPOINT_ITER_FREQUENCY: int = -1
    """Optimizer steps between checkpoints; -1: only by epochs."""
    OVERWRITE_EXISTING: bool = False
    """Replace checkpoints of the same name."""
    LATEST_CHECKPOINT_RESUME_FILE_NUM: int = 1
    """Resume from the n-th newest."""
    USE_SYMLINK_CHECKPOINT_FOR_RESUME: bool = False
    """Find the newest through a link."""


@with_vissl_keys("HOOKS.TENSORBOARD_SETUP")
@dataclass
class TensorboardSetup:
    """``HOOKS.TENSORBOARD_SETUP``."""

    USE_TENSORBOARD: bool = True
    """Write event files into <run folder>/tensorboard."""


@with_vissl_keys("HOOKS")
@dataclass
class Hooks:
    """``HOOKS``."""

    EXTRA: list[str] = field(default_factory=list)
    """Names of hooks of your own, called after the built-in ones that measure and before those that report."""
    TENSORBOARD_SETUP: TensorboardSetup = field(default_factory=TensorboardSetup)
    """Event files for TensorBoard."""


@with_vissl_keys("NEAREST_NEIGHBOR")
@dataclass
class NearestNeighbor:
    """``NEAREST_NEIGHBOR``: the trunk's features judged by a vote of their neighbours, where images have classes."""

    USE_KNN: bool = True
    """Measure before and after training."""
    EVERY_NUM_EPOCHS: int = 0
    """Measure after every k-th epoch too; 0: only before and after."""
    TOPK: int = 20
    """Neighbours that vote."""
    SIGMA: float = 0.07
    """Temperature of the vote: a neighbour at cosine c weighs exp(c / SIGMA)."""
    L2_NORM_FEATS: bool = True
    """Divide features by their L2 norm (else the vote goes by dot products)."""
    MAX_TRAIN_IMAGES: int = 10000
    """Most images to index; more are thinned out evenly."""
    MAX_TEST_IMAGES: int = 2000
    """Most images to ask about; more are thinned out evenly."""
