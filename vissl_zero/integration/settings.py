"""The ``zero`` argument of ``initialize``: read from a dict, a DictConfig or a YAML file, and checked. No torch.

DeepSpeed's configuration is accepted too: https://www.deepspeed.ai/docs/config-json/ (read 2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.blocks.sharding import OffloadOptimizer, OffloadParam
from vissl_zero.config.components import typed_options
from vissl_zero.config.compose import EXPLAINABLE, explain
from vissl_zero.config.constraints import choice, pattern_problems
from vissl_zero.config.expansion import require_moderate_texts
from vissl_zero.config.recipes import recipe_text
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.resolve.offload import engine_of, engine_problems, offload_problems
from vissl_zero.resolve.resolved import Float8Plan
from vissl_zero.resolve.sharding_plan import (
    IMPLIED,
    NEEDS_FLOAT8,
    SENDS_NOTHING,
    TYPES,
    implied_level,
    narrow_problems,
    typed_level,
)

# A ZERO block copied from a recipe is accepted: key in recipes -> key here.
_RECIPE_KEYS = {
    "LEVEL": "level",
    "ENGINE": "engine",
    "SHARD_GROUP_SIZE": "shard_group_size",
    "MEMORY_GB": "memory_gb",
    "HOST_MEMORY_GB": "host_memory_gb",
    "DISK_GB": "disk_gb",
}
_BLOCK_LAYERS = "(^|[.])(qkv|proj|fc1|fc2)$"  # timm's names of the linear layers in transformer blocks
_BUDGET = ("memory_gb", "host_memory_gb", "disk_gb")
_FIT = "fit"
_BLOCKS = {"offload_optimizer_config": OffloadOptimizer, "offload_param_config": OffloadParam}


@dataclass
class _Keys:
    """Plain keys of ``zero``; the two offload blocks are checked by their own dataclasses."""

    level: int | None = None
    type: str | None = None
    gradient_accumulation_steps: int = 1
    dynamic_loss_scale: bool | None = None
    clip_grad: float | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    rounding: str = ""
    wrap_threshold: int = 0
    verbose: bool = False
    engine: str = "auto"
    shard_group_size: int = -1
    keep_gradients: bool = False
    compile: bool = False
    float8: bool | str = False
    float8_scales: str = choice("rows", "mx", default="rows")
    float8_gather: bool = False
    memory_gb: float | None = None
    host_memory_gb: float | None = None
    disk_gb: float | None = None


@dataclass(frozen=True)
class ZeroSettings:
    """The checked settings of ``zero``.

    Attributes:
        level: ZeRO level, 0 to 3; 3 if ``is_fitted``.
        is_fitted: ``level="fit"``: ``initialize`` chooses the cheapest plan within the budget.
        memory_gb, host_memory_gb, disk_gb: this budget in GiB per rank. None: the available memory, else no limit.
        is_typed: the level is given by ColossalAI's ``type=``, which turns float16 on at levels 2 and 3.
        gradient_accumulation_steps: calls of ``backward`` and ``step`` per optimizer step.
        dynamic_loss_scale: scale the loss; None: if float16 is used.
        clip_grad: maximum global L2 norm of the gradients; None: no clipping.
        fp16, bf16: compute in this format; None: the key is not set.
        rounding: keep parameters in bfloat16, and round updates so: "stochastic" or "kahan"; empty: no.
        wrap_threshold: also make a unit of every layer with at least this many parameters; 0: repeated blocks only.
        verbose: log the wrap plan.
        shard_group_size: ranks that share one copy of the state; -1: all ranks.
        engine: a name of the STRATEGIES registry.
        keep_gradients: keep whole averaged gradients between backward and step, for loops that edit them.
        compile: compile each unit with torch.compile.
        float8: linear layers that multiply in float8.
        offload_optimizer, offload_params: where optimizer state and parameters are between uses.
        notes: sentences to print once.
    """

    level: int
    is_fitted: bool = False
    memory_gb: float | None = None
    host_memory_gb: float | None = None
    disk_gb: float | None = None
    is_typed: bool = False
    gradient_accumulation_steps: int = 1
    dynamic_loss_scale: bool | None = None
    clip_grad: float | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    rounding: str = ""
    wrap_threshold: int = 0
    verbose: bool = False
    shard_group_size: int = -1
    keep_gradients: bool = False
    compile: bool = False
    float8: Float8Plan = field(default_factory=Float8Plan)
    engine: str = "torch"
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    offload_params: OffloadParam = field(default_factory=OffloadParam)
    notes: tuple[str, ...] = ()


def read_settings(zero: Any) -> ZeroSettings:
    """Read and check the ``zero`` argument of ``initialize``.

    Args:
        zero: mapping, DictConfig, or path of a YAML file with the keys at its root, under ``zero`` or under
            ``config.ZERO``. If it has the key ``zero_optimization``, it is read as DeepSpeed's configuration.
    Raises:
        ConfigError: unknown keys (with the closest known ones), wrong types or contradictions, all in one error.
    """
    mapped, mapped_notes = _from_deepspeed(_mapping(zero))
    settings = {_RECIPE_KEYS.get(str(key), str(key)): value for key, value in mapped.items()}
    blocks = {name: typed_options(schema, _block(settings, name), f"zero.{name}") for name, schema in _BLOCKS.items()}
    known = {f.name for f in fields(_AllKeys)}
    if unknown := [key for key in settings if key not in known]:
        _refuse(unknown)
    is_fitted = settings.get("level") == _FIT
    if is_fitted:
        settings["level"] = None if settings.get("type") else 3  # checked as level 3, which allows all tiers
    keys = _Keys(**typed_options(_Keys, {key: settings[key] for key in settings if key not in _BLOCKS}, "zero"))
    optimizer = OffloadOptimizer(**blocks["offload_optimizer_config"])
    params = OffloadParam(**blocks["offload_param_config"])
    implied = implied_level(params.device) if keys.level is None and keys.type is None else None
    level, problems = _level(keys) if implied is None else (implied, [])
    problems += _range_problems(keys)
    problems += _fit_problems(keys, optimizer, params) if is_fitted else _budget_problems(keys)
    problems += _rounding_problems(keys, is_fitted, optimizer, params)
    if not problems:
        # These checks need a valid level: with a wrong one, they would report what is right once the level is
        # corrected.
        problems += offload_problems(optimizer, params, level, "zero")
        problems += engine_problems(
            keys.engine,
            level,
            is_half=bool(keys.fp16 or keys.bf16 or (keys.type is not None and level == 2 and keys.fp16 is None)),
            is_offloaded={optimizer.device, params.device} != {"none"},
            shard_group_size=keys.shard_group_size,
            is_float8=keys.float8 is not False,
        )
    if problems:
        raise ConfigError(problems)
    return ZeroSettings(
        level=level,
        is_fitted=is_fitted,
        memory_gb=keys.memory_gb,
        host_memory_gb=keys.host_memory_gb,
        disk_gb=keys.disk_gb,
        is_typed=keys.type is not None,
        gradient_accumulation_steps=keys.gradient_accumulation_steps,
        dynamic_loss_scale=keys.dynamic_loss_scale,
        clip_grad=keys.clip_grad,
        fp16=keys.fp16,
        bf16=keys.bf16,
        rounding=keys.rounding,
        wrap_threshold=keys.wrap_threshold,
        verbose=keys.verbose,
        shard_group_size=keys.shard_group_size,
        keep_gradients=keys.keep_gradients,
        compile=keys.compile,
        float8=_float8_plan(keys),
        engine=engine_of(keys.engine),
        offload_optimizer=optimizer,
        offload_params=params,
        notes=(
            *([] if implied is None else [IMPLIED.format(key="zero.level")]),
            *mapped_notes,
            *_no_effect(keys, level),
        ),
    )


@dataclass
class _AllKeys(_Keys):
    """All keys of ``zero``, to suggest the closest one for an unknown key."""

    offload_optimizer_config: Any = None
    offload_param_config: Any = None


def _refuse(unknown: list[str]) -> NoReturn:
    """Report unknown keys of ``zero``. For DeepSpeed's keys, suggest the key here.

    Raises:
        ConfigError: always.
    """
    must = "is DeepSpeed's key"
    problems = [Problem(f"zero.{key}", "", must, _theirs()[key]) for key in unknown if key in _theirs()]
    problems += [Problem(f"zero.{key}", "", "is not a key", _SHORT[key]) for key in unknown if key in _SHORT]
    if others := [key for key in unknown if key not in _theirs() | _SHORT]:
        try:
            typed_options(_AllKeys, dict.fromkeys(others), "zero")
        except ConfigError as error:
            problems += error.problems
    raise ConfigError(problems)


def _mapping(zero: Any) -> Mapping[Any, Any]:
    if isinstance(zero, str | Path):
        zero = _from_file(Path(zero))
    if isinstance(zero, DictConfig):
        try:
            zero = OmegaConf.to_container(zero, resolve=True)
        except EXPLAINABLE as error:
            raise explain(error) from error
    if not isinstance(zero, Mapping):
        fix = "Write zero=dict(level=3), or zero='path/to.yaml'."
        raise ConfigError(
            [Problem("zero", type(zero).__name__, "must be a dict, a DictConfig or the path of a YAML file", fix)]
        )
    return zero


def _from_file(path: Path) -> Any:
    try:
        node = OmegaConf.create(recipe_text(path))
        # Before references are resolved: a few nested ones can double a text until memory is full.
        require_moderate_texts(OmegaConf.to_container(node, resolve=False))  # type: ignore[arg-type]
        tree = OmegaConf.to_container(node, resolve=True)
    except ConfigError as error:
        fix = "Correct the file or its path, or write zero=dict(level=3)."
        raise ConfigError([Problem("zero", str(path), "must name a YAML file that can be read", fix)]) from error
    except EXPLAINABLE as error:
        raise explain(error) from error
    if isinstance(tree, dict) and isinstance(tree.get("config"), dict):
        tree = tree["config"]
    if isinstance(tree, dict):
        tree = tree.get("ZERO", tree.get("zero", tree))
    return tree


def _block(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = settings.get(name)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        fix = "Write it as dict(device='cpu')."
        raise ConfigError([Problem(f"zero.{name}", repr(block), "must be a dict", fix)])
    return block


def _level(keys: _Keys) -> tuple[int, list[Problem]]:
    typed = None
    if keys.type is not None:
        typed = typed_level(keys.type)
        if typed is None:
            return 0, [Problem("zero.type", repr(keys.type), TYPES, "Write level=1, 2 or 3 instead.")]
    if keys.level is None:
        if typed is None:
            fix = "Write zero=dict(level=3)."
            return 0, [Problem("zero.level", "", "must be given: 0, 1, 2, 3 or 'fit'", fix)]
        return typed, []
    if keys.level not in range(4):
        return 0, [Problem("zero.level", str(keys.level), "must be 0, 1, 2 or 3", "Correct the level.")]
    if typed not in (None, keys.level):
        fix = "Leave one of them out."
        return 0, [Problem("zero.level", str(keys.level), f"contradicts zero.type={keys.type}", fix)]
    return keys.level, []


def _range_problems(keys: _Keys) -> list[Problem]:
    problems = []
    if keys.gradient_accumulation_steps < 1:
        key = "zero.gradient_accumulation_steps"
        problems.append(Problem(key, str(keys.gradient_accumulation_steps), "must be at least 1", "Write 1 for none."))
    if keys.clip_grad is not None and not keys.clip_grad > 0:
        problems.append(
            Problem("zero.clip_grad", str(keys.clip_grad), "must be above 0", "Leave it out for no clipping.")
        )
    if keys.fp16 and keys.bf16:
        problems.append(Problem("zero.bf16", "True", "contradicts zero.fp16=True", "Leave one of them out."))
    if keys.shard_group_size != -1 and keys.shard_group_size < 2:
        must = "must be -1 for all ranks, or at least 2"
        problems.append(Problem("zero.shard_group_size", str(keys.shard_group_size), must, "Leave it out."))
    for key in _BUDGET:
        value = getattr(keys, key)
        if value is not None and not value > 0:
            problems.append(
                Problem(f"zero.{key}", str(value), "must be above 0 GiB", "Leave it out to use what is available.")
            )
    if isinstance(keys.float8, str):
        problems += pattern_problems("zero.float8", keys.float8)
    if keys.float8_gather and keys.float8 is False:
        problems.append(Problem("zero.float8_gather", "True", NEEDS_FLOAT8, "Write float8=True, or leave it out."))
    if keys.wrap_threshold < 0:
        problems.append(Problem("zero.wrap_threshold", str(keys.wrap_threshold), "must be at least 0", "Write 0."))
    return problems


def _rounding_problems(
    keys: _Keys, is_fitted: bool, optimizer: OffloadOptimizer, params: OffloadParam
) -> list[Problem]:
    """Return problems of ``rounding``: an unknown value, or keys that do not support parameters in bfloat16."""
    if not keys.rounding:
        return []
    if keys.rounding not in ("stochastic", "kahan"):
        must = "must be stochastic or kahan"
        return [Problem("zero.rounding", repr(keys.rounding), must, "Leave it out for float32 parameters.")]
    others = {
        "zero.fp16=True": keys.fp16,
        "zero.bf16=False": keys.bf16 is False,
        "zero.type, which means float16": keys.type is not None,
        "zero.level='fit', which has no forecast of it": is_fitted,
        "zero.keep_gradients, which is for float32": keys.keep_gradients,
    }
    is_on_disk = "nvme" in (optimizer.device, params.device)
    return narrow_problems("zero.rounding", keys.rounding, keys.engine, is_on_disk, others)


def _fit_problems(keys: _Keys, optimizer: OffloadOptimizer, params: OffloadParam) -> list[Problem]:
    """Return a problem for each key that level='fit' would choose."""
    excluded = {
        "type": keys.type is not None,
        "engine": keys.engine not in ("auto", "torch"),
        "keep_gradients": keys.keep_gradients,
        "offload_optimizer_config.device": optimizer.device != "none",
        "offload_param_config.device": params.device != "none",
    }
    must = "cannot go with level='fit', which chooses it"
    return [
        Problem(f"zero.{key}", "", must, "Leave it out, or write a level.")
        for key, is_given in excluded.items()
        if is_given
    ]


def _budget_problems(keys: _Keys) -> list[Problem]:
    must, fix = "is a budget for level='fit'", "Write level='fit', or leave it out."
    return [
        Problem(f"zero.{key}", str(getattr(keys, key)), must, fix) for key in _BUDGET if getattr(keys, key) is not None
    ]


def _no_effect(keys: _Keys, level: int) -> list[str]:
    """Return notes on keys without effect at this level, or without another key."""
    notes = []
    if keys.float8_scales != "rows" and keys.float8 is False:
        notes.append("zero.float8_scales has no effect without zero.float8.")
    if keys.float8_gather and level < 3:
        notes.append(SENDS_NOTHING.format(key="zero.float8_gather", level=level))
    if level:
        return notes
    inactive = {"wrap_threshold": keys.wrap_threshold > 0, "shard_group_size": keys.shard_group_size != -1}
    notes += [f"zero.{key} has no effect at level 0: nothing is sharded." for key, is_set in inactive.items() if is_set]
    return notes


def _float8_plan(keys: _Keys) -> Float8Plan:
    if keys.float8 is False:
        return Float8Plan()
    layers = _BLOCK_LAYERS if keys.float8 is True else keys.float8
    return Float8Plan(layers, keys.float8_scales, keys.float8_gather)


_MARK = "zero_optimization"
# DeepSpeed's keys without effect, and why: the custom loop decides them.
_UNUSED = {
    "train_batch_size": "your loader decides it",
    "train_micro_batch_size_per_gpu": "your loader decides it",
    "steps_per_print": "your loop prints",
    "wall_clock_breakdown": "your loop prints",
    "zero_allow_untested_optimizer": "every optimizer is tried out",
}
# DeepSpeed's keys that tune its communication.
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
    "optimizer": "Remove this block: initialize() uses the optimizer that you pass to it, dict(type='AdamW', lr=...).",
    "scheduler": "Remove this block: build torch's scheduler over the optimizer that initialize() returns.",
}
_RENAMED = {
    "stage": "level",
    "offload_optimizer": "offload_optimizer_config",
    "offload_param": "offload_param_config",
    "gradient_clipping": "clip_grad",
}
# Short forms of other libraries and of earlier DeepSpeed.
_OFFLOAD = "Write offload_optimizer_config=dict(device='cpu'), and offload_param_config=dict(device='cpu') at level 3."
_SHORT = {"offload": _OFFLOAD, "cpu_offload": _OFFLOAD, "offload_to_cpu": _OFFLOAD}


def _theirs() -> dict[str, str]:
    """Map each of DeepSpeed's keys to a hint, for a ``zero`` that is not in DeepSpeed's format."""
    renamed = {key: f"Write {ours}, or give the keys in DeepSpeed's format." for key, ours in _RENAMED.items()}
    unused = {key: f"Leave it out: {why}." for key, why in (_UNUSED | dict.fromkeys(_TUNES, _TUNING)).items()}
    return renamed | unused | _OWN_OPTIMIZER


def _automatic(tree: Any, path: str) -> list[Problem]:
    """Return a problem for each value ``auto``, which only Hugging Face's Trainer fills in."""
    if isinstance(tree, Mapping):
        return [problem for key, value in tree.items() for problem in _automatic(value, f"{path}.{key}")]
    if tree != "auto":
        return []
    fix = "Write true or false." if path.endswith(".enabled") else "Write the number."
    return [Problem(path, "'auto'", "is filled in by Hugging Face's Trainer, and by nothing here", fix)]


def _repeated(settings: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key here that is given in addition to DeepSpeed's name of it."""
    both = [(f"{_MARK}.{theirs}", ours) for theirs, ours in _RENAMED.items() if theirs != "gradient_clipping"]
    both += [("gradient_clipping", "clip_grad")] if "gradient_clipping" in settings else []
    must, fix = "says the same as DeepSpeed's {}", "Leave one of them out."
    return [
        Problem(f"zero.{ours}", repr(settings[ours]), must.format(f"zero.{name}"), fix)
        for name, ours in both
        if ours in settings
    ]


_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _batch_problems(settings: Mapping[str, Any]) -> list[Problem]:
    """Return a problem if DeepSpeed would compute the accumulation steps from batch sizes, which is not done here."""
    if _STEPS in settings or not {_BATCH, _MICRO} <= settings.keys():
        return []
    must = f"must be given beside {_BATCH} and {_MICRO}, from which it is not worked out"
    fix = f"Write {_STEPS}={settings[_BATCH]} / ({settings[_MICRO]} x ranks)."
    return [Problem(f"zero.{_STEPS}", "", must, fix)]


def _fixed_scale(block: dict[str, Any]) -> list[Problem]:
    """Remove ``loss_scale`` from DeepSpeed's ``fp16`` block, and return a problem if it is a fixed number."""
    scale = block.pop("loss_scale", 0)
    must = "cannot be a fixed number: the scale follows the gradients"
    return [Problem("zero.fp16.loss_scale", str(scale), must, "Write 0, or leave it out.")] if scale else []


def _from_deepspeed(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:  # noqa: C901
    """Return ``settings`` with DeepSpeed's keys renamed, and notes; unchanged if it is not DeepSpeed's format.

    Raises:
        ConfigError: a key has no counterpart here, or would change the training.
    """
    if _MARK not in settings:
        return dict(settings), []
    keys, notes = dict(settings), []
    problems = [*_repeated(settings), *_batch_problems(settings)]
    zero = keys.pop(_MARK)
    if not isinstance(zero, Mapping):
        problem = Problem(f"zero.{_MARK}", repr(zero), "must be a dict", "Write it as dict(stage=3).")
        raise ConfigError([problem])
    zero = dict(zero)
    for name in [name for name in zero if name in _TUNES]:
        notes.append(f"zero.{_MARK}.{name} has no effect: {_TUNING}.")
        zero.pop(name)
    for name in [name for name in keys if name in _UNUSED]:
        notes.append(f"zero.{name} has no effect: {_UNUSED[name]}.")
        keys.pop(name)
    # Before keys are renamed, so that errors name keys as the user wrote them. Blocks refused as a whole are skipped.
    typed = {name: value for name, value in keys.items() if name not in _OWN_OPTIMIZER}
    if automatic := _automatic(typed | {_MARK: zero}, "zero"):
        raise ConfigError(automatic)
    # DeepSpeed's default is stage 0.
    keys["level"] = zero.pop("stage", 0)
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            keys[_RENAMED[name]] = zero.pop(name)
    for name, value in zero.items():
        must, fix = "is a DeepSpeed key without a counterpart", "Leave it out."
        problems.append(Problem(f"zero.{_MARK}.{name}", repr(value), must, fix))
    for name in [name for name in keys if name in _OWN_OPTIMIZER]:
        problems.append(Problem(f"zero.{name}", "", "is not read from zero", _OWN_OPTIMIZER[name]))
        keys.pop(name)
    if "gradient_clipping" in keys:
        # 0 means no clipping in DeepSpeed; here it is an error.
        keys["clip_grad"] = keys.pop("gradient_clipping") or None
    for name in ("fp16", "bf16"):
        if isinstance(keys.get(name), Mapping):
            block = dict(keys[name])
            keys[name] = bool(block.pop("enabled", False))
            problems += _fixed_scale(block) if name == "fp16" else []
            notes += [f"zero.{name}.{key} has no effect: the loss scale follows its own rule." for key in block]
    if problems:
        raise ConfigError(problems)
    return keys, notes
