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
# VISSL's programs that are not here -> what does the same.
SEGMENTATION = (
    "VISSL's segmentation by kNN labels each patch of an image by its nearest neighbours. Export the trunk (vissl-zero "
    "checkpoint export <run> --names timm), and measure it with https://github.com/vpariza/open-hummingbird-eval."
)
DETECTION = (
    "VISSL detects objects with Detectron2. Export the trunk (vissl-zero checkpoint export <run> --names torchvision), "
    "convert it with Detectron2's tools/convert-torchvision-to-d2.py, and train with VISSL's "
    "tools/object_detection_benchmark.py, which needs Detectron2 alone."
)
ELSEWHERE = {
    "knn_segmentation": SEGMENTATION,
    "object_detection_benchmark": DETECTION,
    "geolocalization_test": (
        "Here the cell of each photo alone is found: vissl-zero extract_label_predictions with the same recipe."
    ),
    "extract_feature_and_rank": (
        "Write vissl-zero extract_features with the same recipe, and rank the files of features, which are numpy's."
    ),
}
# Of the heads, where others are of features.
PREDICTIONS, ASSIGNMENTS = "extract_label_predictions", "extract_cluster"
