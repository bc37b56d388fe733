"""Programs, by the names of VISSL's engines and of its files in ``tools/``. Imports nothing: the CLI reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig

TRAIN = "train"
# Program -> the hook that runs it at the end of a run without training. None: kNN, which every run can measure.
PROGRAMS: dict[str, str | None] = {
    "extract_features": "extract_features",
    "extract_label_predictions": "extract_label_predictions",
    "train_svm": "train_svm",
    "train_svm_low_shot": "train_svm_low_shot",
    "nearest_neighbor_test": None,
    "cluster_features_and_label": "cluster_features_and_label",
    "extract_cluster": "extract_cluster",
    "low_shot_test": "low_shot_test",
    "instance_retrieval_test": "instance_retrieval_test",
}
SVM_PROGRAMS, CLUSTERING = ("train_svm", "train_svm_low_shot"), "cluster_features_and_label"
NEIGHBORS = "nearest_neighbor_test"
RETRIEVAL = "instance_retrieval_test"  # reads the images of IMG_RETRIEVAL instead of DATA
LOW_SHOT = "low_shot_test"
# These two use the outputs of the heads; other programs use features.
PREDICTIONS, ASSIGNMENTS = "extract_label_predictions", "extract_cluster"


def begin_program(run: RunConfig, name: str) -> None:
    """Change a recipe, in place, into a run of a program: without training, with trunk and heads frozen.

    Args:
        run: composed run, before VISSL's aliases are replaced.
        name: a name of ``PROGRAMS``.
    """
    run.PROGRAM, run.TEST_ONLY = name, True
    # Nothing is trained, so there is nothing to save.
    run.CHECKPOINT.CHECKPOINT_FREQUENCY = run.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY = -1
    run.NEAREST_NEIGHBOR.USE_KNN = name == NEIGHBORS
    settings = run.MODEL.FEATURE_EVAL_SETTINGS
    if name in (PREDICTIONS, ASSIGNMENTS):
        run.LOSS = {**run.LOSS, "name": "CrossEntropyLoss"}  # not used: nothing is trained
        if settings.FREEZE_TRUNK_AND_HEAD:  # equal without training, but allows heads on inner layers
            settings.FREEZE_TRUNK_ONLY, settings.FREEZE_TRUNK_AND_HEAD = True, False
        return
    settings.EVAL_MODE_ON = True
    if not settings.FREEZE_TRUNK_AND_HEAD:
        settings.EXTRACT_TRUNK_FEATURES_ONLY = True
    if name == RETRIEVAL:
        settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP[:1]  # VISSL takes the first
        # Every run builds a loader, so it needs a source; this program never reads it.
        options, side = run.IMG_RETRIEVAL, max(run.IMG_RETRIEVAL.RESIZE_IMG, 32)
        run.DATA.TRAIN.DATA_SOURCES = ["disk_folder"]
        run.DATA.TRAIN.DATA_PATHS = [str(Path(options.DATASET_PATH).expanduser() / options.EVAL_DATASET_NAME)]
        run.DATA.TRAIN.TRANSFORMS = [
            {"name": "Resize", "size": side}, {"name": "CenterCrop", "size": side}, {"name": "ToTensor"}
        ]  # fmt: skip
        run.DATA.TEST.DATA_SOURCES = []
