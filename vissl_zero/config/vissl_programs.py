"""VISSL's programs, by the names of its engines and of its files in ``tools/``. Imports nothing: the CLI reads it."""

from __future__ import annotations

TRAIN = "train"
# Program -> the hook that does its work at the end of a run that trains nothing; none: kNN is measured anyway.
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
RETRIEVAL = "instance_retrieval_test"  # of images that IMG_RETRIEVAL names, where others are of DATA's
LOW_SHOT = "low_shot_test"
# Of the heads, where others are of features.
PREDICTIONS, ASSIGNMENTS = "extract_label_predictions", "extract_cluster"
