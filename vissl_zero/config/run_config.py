"""The root of the typed tree: what a recipe may say."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.blocks.data import Data
from vissl_zero.config.blocks.machine import Distributed, Machine, Slurm
from vissl_zero.config.blocks.model_and_loss import Distillation, ModelConfig, default_loss
from vissl_zero.config.blocks.optimizer import Optimizer
from vissl_zero.config.blocks.output import (
    CheckpointConfig,
    ClusterFit,
    Hooks,
    ImageRetrieval,
    LowShotBenchmark,
    Meters,
    NearestNeighbor,
    OnlineProbeConfig,
    Svm,
)
from vissl_zero.config.blocks.sharding import Zero
from vissl_zero.config.blocks.trainer import Trainer
from vissl_zero.config.constraints import choice, number
from vissl_zero.config.copies import Copies
from vissl_zero.vissl.keys import with_vissl_keys


@with_vissl_keys("")
@dataclass
class RunConfig:
    """Everything under ``config:``: exactly what the user wrote, plus defaults. Never written back to."""

    SEED_VALUE: int = number(0, least=0)
    """Seed of weights, order of images, augmentation, and dropout."""
    SEEDS: list[int] = field(default_factory=list)
    """Train once with each of these as SEED_VALUE, in folders 0, 1, ... of the run folder, and print each figure's mean
    with a 95 % bootstrap interval; empty: once, with SEED_VALUE. One after the other; hydra/launcher=local: side by
    side."""
    OBJECTIVE: str = ""
    """The number of a run's summary by which a searching sweeper (Optuna) chooses, such as loss_last or
    knn_top1_after; in other sweeps and in single runs it changes nothing."""
    LOG_FREQUENCY: int = number(10, least=1)
    """Optimizer steps between lines of the plain display, and between measurements of memory and of health."""
    IMPORTS: list[str] = field(default_factory=list)
    """Python modules of your own to import, so that they register their components."""
    PROGRAM: str = "train"
    """What to do, as engine_name beside config says: train, or a program of VISSL. These train nothing:
    extract_features, train_svm, train_svm_low_shot, nearest_neighbor_test, cluster_features_and_label,
    instance_retrieval_test, low_shot_test, extract_cluster, extract_label_predictions."""
    DRY_RUN: bool = False
    """Check everything and print the plan of the run; train nothing. Also written --dry-run."""
    TEST_ONLY: bool = False
    """Only measure; train nothing."""
    TEST_EVERY_NUM_EPOCH: int = number(1, least=0)
    """Epochs between measurements on TEST while a run trains, of top-1 where it is supervised, of mIoU where it
    segments; 0: only at the end."""
    TEST_MODEL: bool = True
    """Measure top-1 or mIoU on TEST of a run that predicts classes, and extract TEST's features; false: use TRAIN
    alone for both. kNN follows NEAREST_NEIGHBOR."""
    EVALUATED_MODEL: str = choice("student", "teacher", default="student")
    """Whose features kNN, RankMe, LiDAR, the online probe and the report's pictures are about: the model that is
    trained, or the momentum copy of a method that has one, as the papers of DINO, BYOL and I-JEPA have it."""
    DATA: Data = field(default_factory=Data)
    """Images, batches, transforms."""
    MODEL: ModelConfig = field(default_factory=ModelConfig)
    """Trunk, heads, precision."""
    LOSS: dict[str, Any] = field(default_factory=default_loss)
    """name: the loss; its keys are under that name."""
    DISTILLATION: Distillation = field(default_factory=Distillation)
    """The teacher of distillation."""
    OPTIMIZER: Optimizer = field(default_factory=Optimizer)
    """The update rule and its schedules."""
    ZERO: Zero = field(default_factory=Zero)
    """How training state is spread over processes."""
    TRAINER: Trainer = field(default_factory=Trainer)
    """The training loop."""
    HOOKS: Hooks = field(default_factory=Hooks)
    """What is done beside training."""
    METERS: Meters = field(default_factory=Meters)
    """What is measured on TEST beside top-1 and top-5."""
    NEAREST_NEIGHBOR: NearestNeighbor = field(default_factory=NearestNeighbor)
    """kNN evaluation."""
    SVM: Svm = field(default_factory=Svm)
    """Support vector machines on features."""
    CLUSTERFIT: ClusterFit = field(default_factory=ClusterFit)
    """Clusters of features as labels."""
    IMG_RETRIEVAL: ImageRetrieval = field(default_factory=ImageRetrieval)
    """Images found by their features."""
    LOW_SHOT_BENCHMARK: LowShotBenchmark = field(default_factory=LowShotBenchmark)
    """Classifiers on few images."""
    ONLINE_PROBE: OnlineProbeConfig = field(default_factory=OnlineProbeConfig)
    """A linear probe that is trained beside the model."""
    CHECKPOINT: CheckpointConfig = field(default_factory=CheckpointConfig)
    """The run folder."""
    DISTRIBUTED: Distributed = field(default_factory=Distributed)
    """Processes."""
    MACHINE: Machine = field(default_factory=Machine)
    """Device."""
    SLURM: Slurm = field(default_factory=Slurm)
    """Submission to a cluster."""


@dataclass
class Root:
    """A composed recipe."""

    VERSION: int = 1
    """Version of VISSL's configuration; only 1."""
    node_id: int = 0
    """Number of this machine, from 0, where machines are started by hand (DISTRIBUTED.RUN_ID)."""
    engine_name: str = "train"
    """What to do: train, or one of VISSL's programs (config.PROGRAM)."""
    config: RunConfig = field(default_factory=RunConfig)
    """The run."""


@cache  # a third of a second
def schema() -> DictConfig:
    """Return ``Root`` as OmegaConf's typed tree, for reading only; use ``new_schema`` for a tree to change."""
    tree: DictConfig = OmegaConf.structured(Root)
    return tree


@cache
def _copies() -> Copies[DictConfig]:
    return Copies(schema())


def new_schema() -> DictConfig:
    """Return a copy of ``schema()``, in a few milliseconds."""
    return _copies().new()
