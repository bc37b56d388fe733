"""VISSL's programs that are not here, and what does the same. Imports nothing: the CLI reads it."""

from __future__ import annotations

SEGMENTATION = (
    "VISSL's segmentation by kNN labels each patch of an image by its nearest neighbors. For a head, write "
    "config=finetune/segmentation. For kNN, export the trunk (vissl-zero checkpoint export <run> --names timm), and "
    "measure it with https://github.com/vpariza/open-hummingbird-eval."
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
