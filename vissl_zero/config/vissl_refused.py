"""VISSL's keys whose other values would change what is trained, and that are not implemented: refused by name.

Key -> VISSL's default, or ``OneOf`` the values that mean the same here. To support one, move it to a block of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vissl_zero.config.vissl_twins import TASK_LEVELS


@dataclass(frozen=True)
class OneOf:
    """Values that are all fine; the first is the default."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)


_SPLIT: dict[str, Any] = {
    "USE_DEBUGGING_SAMPLER": False,
    "STRATIFIED_SAMPLER": {"ENABLED": False},
    "POWER_LAW_SAMPLER": {"ENABLED": False},
    "REMOVE_IMG_PATH_PREFIX": "",
    "NEW_IMG_PATH_PREFIX": "",
    "BASE_DATASET": "generic_ssl",
    "RANDOM_SYNTHETIC_IMAGES": False,
    "RANDOM_SYNTHETIC_LABELS": 0,
    # Crops are collated by resolution whatever the name says; other collators mix images.
    "COLLATE_FUNCTION": OneOf("default_collate", "multicrop_collator"),
    "DATA_LIMIT_SAMPLING": {"SEED": 0, "IS_BALANCED": False, "SKIP_NUM_SAMPLES": 0},
}

REFUSED: dict[str, Any] = {
    "REPRODUCIBILITY": {"CUDDN_DETERMINISTIC": False},
    "HOOKS": {"EMA_MODEL": {"ENABLE_EMA_METERS": False}},
    "CHECKPOINT": {"BACKEND": "disk", "APPEND_DISTR_RUN_ID": False, "OVERWRITE_EXISTING": False},
    "PROFILING": {"STOP_TRAINING_AFTER_PROFILING": False},
    "DATA": {"TRAIN": _SPLIT, "TEST": _SPLIT},
    "MODEL": {
        "BASE_MODEL_NAME": "multi_input_output_model",
        "INPUT_TYPE": "rgb",
        "MULTI_INPUT_HEAD_MAPPING": [],
        "SINGLE_PASS_EVERY_CROP": False,
        "FEATURE_EVAL_SETTINGS": {
            "FREEZE_TRUNK_AND_HEAD": False,
            "EXTRACT_TRUNK_FEATURES_ONLY": False,
            "LINEAR_EVAL_FEAT_POOL_OPS_MAP": [],
        },
        "HEAD": {"PARAMS_MULTIPLIER": 1.0},
    },
    "LOSS": {"cross_entropy_multiple_output_single_target": {"reduction": "mean"}},
    "OPTIMIZER": {"construct_single_param_group_only": False, "param_group_constructor": "default"},
    "TRAINER": {"TRAIN_STEP_NAME": "standard_train_step", "TASK_NAME": OneOf("self_supervision_task", *TASK_LEVELS)},
}
