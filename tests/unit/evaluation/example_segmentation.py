"""A tiny segmentation of scenes of digits, or of a folder, that can be built for real at any level and world size."""

from __future__ import annotations

from typing import Any

from tests.unit.evaluation.example_run import make_config

TO_TENSOR: list[dict[str, Any]] = [{"name": "ToTensor"}, {"name": "Normalize", "mean": [0.3] * 3, "std": [0.4] * 3}]


def make_segmentation_config(num_train: int = 66, num_test: int = 31, **split: Any) -> dict[str, Any]:
    """RegNet with maps as large as images, a linear head, scenes of 16 pixels; ``split``: of TRAIN and TEST."""
    config = make_config(USE_KNN=False)
    source = {"DATA_SOURCES": ["digit_scenes"], "DEFAULT_GRAY_IMG_SIZE": 16, "TRANSFORMS": TO_TENSOR, **split}
    config["DATA"]["TRAIN"] |= {**source, "DATA_LIMIT": num_train}
    config["DATA"]["TEST"] |= {**source, "DATA_LIMIT": num_test}
    stages = {"depths": [1, 1], "widths": [16, 32], "group_widths": [16, 16], "bottleneck_multipliers": [1.0, 1.0]}
    small = {"name": "anynet", **stages, "strides": [1, 1], "stem_width": 8, "stem_type": "RES_STEM_CIFAR"}
    config["MODEL"]["TRUNK"]["REGNET"] = small
    config["MODEL"]["HEAD"]["PARAMS"] = [["fcn_head", {"dims": [-1, -1]}]]
    config["LOSS"] = {"name": "segmentation_loss", "segmentation_loss": {}}
    return config
