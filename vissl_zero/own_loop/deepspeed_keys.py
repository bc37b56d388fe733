"""DeepSpeed's configuration read as the ``zero`` argument of ``initialize``. No torch.

Names and meanings: https://www.deepspeed.ai/docs/config-json/ (read 2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vissl_zero.errors import ConfigError, Problem

_MARK = "zero_optimization"
# Keys that a custom loop decides itself, and keys that tune messages that this engine sends differently.
_IN_VAIN = {
    "train_batch_size": "your loader decides it",
    "train_micro_batch_size_per_gpu": "your loader decides it",
    "steps_per_print": "your loop prints",
    "wall_clock_breakdown": "your loop prints",
    "zero_allow_untested_optimizer": "every optimizer is tried out",
}
_TUNING = "it tunes DeepSpeed's messages and changes no number"
_TUNES = (
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "reduce_bucket_size",
    "contiguous_gradients",
    "round_robin_gradients",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
)
_OWN_OPTIMIZER = {
    "optimizer": "Give it as initialize(model, optimizer=dict(type='AdamW', lr=...), zero=...).",
    "scheduler": "Build torch's scheduler over the optimizer that initialize() returns.",
}


def from_deepspeed(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``given`` in the names of ``zero``, and sentences on what has no effect; as it is where it is not DeepSpeed's.

    Raises:
        ConfigError: a key that asks for other numbers than the same key here would give.
    """
    if _MARK not in given:
        return dict(given), []
    keys, problems, notes = dict(given), [], []
    zero = keys.pop(_MARK)
    if not isinstance(zero, Mapping):
        problem = Problem(f"zero.{_MARK}", repr(zero), "must be a dict", "Write it as dict(stage=3).")
        raise ConfigError([problem])
    zero = dict(zero)
    keys["level"] = zero.pop("stage", 0)
    for name, ours in (("offload_optimizer", "offload_optimizer_config"), ("offload_param", "offload_param_config")):
        if name in zero:
            keys[ours] = zero.pop(name)
    for name in [name for name in zero if name in _TUNES]:
        notes.append(f"zero.{_MARK}.{name} has no effect: {_TUNING}.")
        zero.pop(name)
    for name in [name for name in keys if name in _IN_VAIN]:
        notes.append(f"zero.{name} has no effect: {_IN_VAIN[name]}.")
        keys.pop(name)
    for name, value in zero.items():
        must, fix = "is a DeepSpeed key without a counterpart", "Leave it out."
        problems.append(Problem(f"zero.{_MARK}.{name}", repr(value), must, fix))
    for name in [name for name in keys if name in _OWN_OPTIMIZER]:
        problems.append(Problem(f"zero.{name}", "", "is not read from zero", _OWN_OPTIMIZER[name]))
        keys.pop(name)
    if "gradient_clipping" in keys:
        # DeepSpeed's 0 means no clipping, where ours is refused.
        keys["clip_grad"] = keys.pop("gradient_clipping") or None
    for name in ("fp16", "bf16"):
        if isinstance(keys.get(name), Mapping):
            block = dict(keys[name])
            keys[name] = bool(block.pop("enabled", False))
            if name == "fp16" and block.pop("loss_scale", 0):
                must = "cannot be a fixed number: the scale follows the gradients"
                fix = "Write 0, or leave it out."
                problems.append(Problem("zero.fp16.loss_scale", str(given[name]["loss_scale"]), must, fix))
            notes += [f"zero.{name}.{key} has no effect: the loss scale follows its own rule." for key in block]
    if problems:
        raise ConfigError(problems)
    return keys, notes
