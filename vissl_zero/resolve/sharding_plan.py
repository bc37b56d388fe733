"""The sharding plan (ZeRO level, number formats, settings of the engine), and its rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vissl_zero.atomic import is_folder
from vissl_zero.config.blocks.model_and_loss import ActivationCheckpointing, AmpParams, Float8, GradClip
from vissl_zero.config.constraints import one_of, pattern_problems
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.offload import DEVICES, offload_notes, offload_plans, offload_problems
from vissl_zero.resolve.optimizer_plan import base_name, uses_larc
from vissl_zero.resolve.placement_plan import Placement, is_submitted
from vissl_zero.resolve.resolved import NO_UNITS, Float8Plan, Precision, ShardingPlan, keeps_parameters_whole
from vissl_zero.vissl.keys import TASK_LEVELS

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

_ENGINE = "config.ZERO.ENGINE"
_NVME_FIX = "Give a folder of yours on a local disk."


def _level_value(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that the level is auto or 0 to 3, and that ``type`` names the same level."""
    zero, chosen = cfg.ZERO, _chosen_level(cfg)
    if str(zero.LEVEL) == "fit":
        must = "must be decided from a forecast first, which this command does not make"
        return Problem("config.ZERO.LEVEL", "'fit'", must, "Write what vissl-zero plan config=<recipe> prints.")
    if zero.LEVEL != "auto" and chosen is None:
        fix = "Write 0 (nothing sharded), 1 (optimizer state), 2 (+ gradients), 3 (+ parameters), auto or fit."
        return Problem("config.ZERO.LEVEL", repr(zero.LEVEL), "must be auto, fit, 0, 1, 2 or 3", fix)
    if zero.type is None:
        return None
    typed = typed_level(zero.type)
    if typed is None:
        return Problem("config.ZERO.type", repr(zero.type), TYPES, "Write config.ZERO.LEVEL=1, 2 or 3 instead.")
    if typed != chosen:
        fix = "Leave one of them out."
        return Problem("config.ZERO.LEVEL", str(zero.LEVEL), f"contradicts config.ZERO.type={zero.type}", fix)
    return None


def _one_switch(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that VISSL's switches for levels 2 and 3 are not both on, unless ZERO.LEVEL is a number."""
    both = cfg.MODEL.SHARDED_DDP_SETUP.USE_SDP and cfg.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP
    if not both or _chosen_level(cfg) is not None:
        return None
    must = "cannot go with config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP: one means level 2, the other level 3"
    fix = "Set one of them to False, or let config.ZERO.LEVEL=2 or =3 decide."
    return Problem("config.MODEL.SHARDED_DDP_SETUP.USE_SDP", "True", must, fix)


def engine(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that the engine is installed, and supports this level, device and dtype."""
    name = cfg.ZERO.ENGINE
    if name == "fairscale" and decided.level == 3 and decided.placement.device == "cpu":
        must = "fairscale shards parameters (level 3) on CUDA only, and this run is on the CPU"
        return Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, which runs level 3 on any device.")
    if name == "fairscale" and decided.level == 0:
        must = "fairscale has no level 0, where nothing is sharded"
        return Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, or config.ZERO.LEVEL=1.")
    if name == "fairscale" and decided.level == 3 and cfg.TRAINER.DTYPE == "float64":
        must = "fairscale shards parameters (level 3) in float32 only, and config.TRAINER.DTYPE is float64"
        return Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, or config.ZERO.LEVEL=2.")
    return None if name == "auto" or name in STRATEGIES else STRATEGIES.unknown(name)


def clipping(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that both keys for clipping have the same value, and that the norm is L2."""
    old, new = cfg.MODEL.GRAD_CLIP, cfg.ZERO.clip_grad
    if not old.USE_GRAD_CLIP:
        return []
    problems = []
    if new is not None and new != old.MAX_NORM:
        must = f"differs from config.ZERO.clip_grad={new}"
        fix = "Write one of the two, or the same value in both."
        problems.append(Problem("config.MODEL.GRAD_CLIP.MAX_NORM", str(old.MAX_NORM), must, fix))
    if old.NORM_TYPE != 2:
        key = "config.MODEL.GRAD_CLIP.NORM_TYPE"
        problems.append(Problem(key, str(old.NORM_TYPE), "must be 2", "Only the L2 norm is clipped."))
    return problems


def sync_bn_group(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that the group size of synchronized batch norm divides the world size."""
    sync, world_size = cfg.MODEL.SYNC_BN_CONFIG, decided.world_size
    # A larger group is all processes, so that recipes for larger machines run on smaller ones.
    size = min(sync.GROUP_SIZE, world_size)
    if not sync.CONVERT_BN_TO_SYNC_BN or (sync.GROUP_SIZE in (-1, 0)) or (size > 0 and world_size % size == 0):
        return None
    must = f"must divide the {world_size} processes, or be -1 for all of them"
    return Problem("config.MODEL.SYNC_BN_CONFIG.GROUP_SIZE", str(sync.GROUP_SIZE), must, "Write -1.")


def shard_groups(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that the size of shard groups divides the world size, and that the engine supports shard groups."""
    size, world_size = cfg.ZERO.SHARD_GROUP_SIZE, decided.world_size
    if size in (-1, world_size):
        return None
    key = "config.ZERO.SHARD_GROUP_SIZE"
    if size < 2 or world_size % size:
        must = f"must be -1 (all processes), or 2 or more and divide the {world_size} processes"
        fix = f"Write {key}=-1." if size != 1 else f"Write {key}=-1, or config.ZERO.LEVEL=0 to shard nothing."
        return Problem(key, str(size), must, fix)
    if cfg.ZERO.ENGINE == "fairscale":
        must = "must be -1 on fairscale, which shards across all processes"
        return Problem(key, str(size), must, f"Write {_ENGINE}=torch.")
    return None


def offload(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that this level and this engine support each offload tier, and that folders for NVMe exist."""
    optimizer, params = cfg.ZERO.offload_optimizer_config, cfg.ZERO.offload_param_config
    problems = offload_problems(optimizer, params, decided.level, "config.ZERO")
    if problems or {optimizer.device, params.device} == {"none"}:
        return problems
    if cfg.ZERO.ENGINE == "fairscale":
        must = "must be torch or auto where state is offloaded"
        return [Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, or device: none.")]
    # The disks of other machines cannot be checked from here.
    is_here = not is_submitted(cfg) and cfg.DISTRIBUTED.NUM_NODES == 1
    names = ("offload_optimizer_config", "offload_param_config")
    return [
        Problem(f"config.ZERO.{name}.nvme_path", repr(tier.nvme_path), "must name a folder that exists", _NVME_FIX)
        for name, tier in zip(names, offload_plans(optimizer, params), strict=True)
        if is_here and tier.is_on_disk and not is_folder(str(tier.nvme_path))
    ]


_FSDP = "MODEL.FSDP_CONFIG"
_RECOMPUTE = "config.MODEL.ACTIVATION_CHECKPOINTING"


def names(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that AMP_TYPE is O1 or O2, in one of VISSL's spellings."""
    if _amp_type(cfg) is not None:
        return []
    return one_of(f"{_FSDP}.AMP_TYPE", cfg.MODEL.FSDP_CONFIG.AMP_TYPE, ("O1", "O2"))


def opt_level(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that apex's opt_level is O1; torch's autocast has no levels."""
    level_text = cfg.MODEL.AMP_PARAMS.AMP_ARGS.opt_level
    is_apex = cfg.MODEL.AMP_PARAMS.AMP_TYPE == "apex"
    if not cfg.MODEL.AMP_PARAMS.USE_AMP or level_text in ("O1", "01") or not is_apex:
        return None
    key = "config.MODEL.AMP_PARAMS.AMP_ARGS.opt_level"
    fix = f"For half-precision parameters use level 3 with config.{_FSDP}.AMP_TYPE=O2."
    return Problem(key, repr(level_text), "must be O1: autocast replaces apex here", fix)


def float64(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that no key requests half precision if TRAINER.DTYPE is float64."""
    if cfg.TRAINER.DTYPE != "float64":
        return []
    problems = []
    if cfg.MODEL.AMP_PARAMS.USE_AMP:
        fix = "Write config.MODEL.AMP_PARAMS.USE_AMP=False."
        problems.append(Problem("config.TRAINER.DTYPE", "'float64'", "cannot go with half precision (AMP)", fix))
    if cfg.MODEL.FSDP_CONFIG.compute_dtype in HALF:
        key, got = f"config.{_FSDP}.compute_dtype", repr(cfg.MODEL.FSDP_CONFIG.compute_dtype)
        problems.append(Problem(key, got, "cannot go with config.TRAINER.DTYPE=float64", "Leave one of them out."))
    return problems


def bfloat16(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that engine and tiers support parameters in bfloat16, and that no key requests another format."""
    if cfg.TRAINER.DTYPE != "bfloat16":
        return []
    switches_on = {"config.MODEL.AMP_PARAMS.USE_AMP=True": cfg.MODEL.AMP_PARAMS.USE_AMP}
    key = f"config.{_FSDP}.compute_dtype"
    switches_on[f"{key}={cfg.MODEL.FSDP_CONFIG.compute_dtype}"] = cfg.MODEL.FSDP_CONFIG.compute_dtype in HALF
    tiers = offload_plans(cfg.ZERO.offload_optimizer_config, cfg.ZERO.offload_param_config)
    is_on_disk = any(tier.is_on_disk for tier in tiers)
    return narrow_problems("config.TRAINER.DTYPE", "bfloat16", cfg.ZERO.ENGINE, is_on_disk, switches_on)


def narrow_problems(
    key: str, value: str, engine: str, is_on_disk: bool, others: Mapping[str, bool | None]
) -> list[Problem]:
    """Return a problem for each setting that does not support parameters in bfloat16.

    Args:
        key, value: the key that requests bfloat16, and its value.
        engine: engine of the run.
        is_on_disk: optimizer state or parameters are on NVMe.
        others: further conflicting settings -> whether they are set.
    """
    switches_on = {"the fairscale engine": engine == "fairscale", "state on NVMe (device: cpu)": is_on_disk, **others}
    fix = f"Leave one of them out: {key} keeps parameters, and computes, in bfloat16."
    return [
        Problem(key, repr(value), f"cannot go with {other}", fix) for other, is_there in switches_on.items() if is_there
    ]


NEEDS_FLOAT8 = "needs layers that multiply in float8: their weights alone are sent so"
SENDS_NOTHING = (
    "{key}: weights are rounded as level 3 sends them, so that all levels train the same; "
    "level {level} sends none in float8."
)


def float8(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the engine supports float8. Whether LAYERS match is checked when the model is built."""
    if not cfg.MODEL.FLOAT8.USE_FLOAT8:
        key, fix = "config.MODEL.FLOAT8.GATHER", "Write config.MODEL.FLOAT8.USE_FLOAT8=true, or leave it out."
        return [Problem(key, "True", NEEDS_FLOAT8, fix)] if cfg.MODEL.FLOAT8.GATHER else []
    problems = pattern_problems("config.MODEL.FLOAT8.LAYERS", cfg.MODEL.FLOAT8.LAYERS)
    if cfg.ZERO.ENGINE == "fairscale":
        must = "is not available on fairscale, where its parity has not been shown"
        problems.append(Problem("config.MODEL.FLOAT8.USE_FLOAT8", "True", must, f"Write {_ENGINE}=torch."))
    return problems


_DETERMINISTIC = "config.TRAINER.DETERMINISTIC"
# Optimizers whose update of an element has the same bits however the tensors are sharded.
_REPEATABLE = ("sgd", "lars", "adam", "adamw", "muon", "normuon", "shampoo", "adamw_8bit", "lamb", "adafactor")


def reachable(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that engine, shard groups and optimizer give the same bits at every level, if DETERMINISTIC is set."""
    if not cfg.TRAINER.DETERMINISTIC:
        return []
    problems = []
    if cfg.ZERO.ENGINE == "fairscale":
        must = "is not available on fairscale, which sums over ranks in its own order"
        problems.append(Problem(_DETERMINISTIC, "True", must, "Write config.ZERO.ENGINE=torch."))
    if cfg.ZERO.SHARD_GROUP_SIZE not in (-1, decided.world_size):
        must = "is not available with shard groups, which sum inside each group first"
        problems.append(Problem(_DETERMINISTIC, "True", must, "Write config.ZERO.SHARD_GROUP_SIZE=-1."))
    if cfg.TRAINER.COMPILE:
        must = "is not available with config.TRAINER.COMPILE: levels begin to compile at different steps"
        problems.append(Problem(_DETERMINISTIC, "True", must, "Turn one of the two off."))
    if base_name(cfg.OPTIMIZER) not in _REPEATABLE:
        must = f"needs {', '.join(_REPEATABLE[:-1])} or {_REPEATABLE[-1]}, whose rounding does not depend on the cut"
        problems.append(Problem(_DETERMINISTIC, "True", must, "Use one of them."))
    return problems


SHARDING_RULES = (
    _level_value,
    _one_switch,
    engine,
    clipping,
    sync_bn_group,
    shard_groups,
    offload,
    names,
    opt_level,
    float64,
    bfloat16,
    float8,
    reachable,
)


# Keys of fairscale alone: key -> field of the plan, and the level that reads it.
_FAIRSCALE_KEYS = {
    "SHARDED_DDP_SETUP.reduce_buffer_size": ("reduce_buffer_size", 2),
    "FSDP_CONFIG.flatten_parameters": ("flatten_parameters", 3),
    "FSDP_CONFIG.bucket_cap_mb": ("bucket_cap_mb", 3),
    "FSDP_CONFIG.clear_autocast_cache": ("clear_autocast_cache", 3),
    "FSDP_CONFIG.FORCE_SYNC_CUDA": ("force_sync_cuda", 3),
    "FSDP_CONFIG.reshard_after_forward": ("reshard_after_forward", 3),
}


def sharding_plan(decided: Decisions) -> tuple[ShardingPlan, tuple[str, ...]]:
    """Return the sharding plan of a run, and the notes to print about it."""
    cfg, place = decided.cfg, decided.placement
    number, level_notes = decided.level_and_notes
    formats, precision_notes = precision(cfg, number)
    zero, fsdp = cfg.ZERO, cfg.MODEL.FSDP_CONFIG
    recomputation, recompute_notes = _recomputation(cfg)
    optimizer_tier, param_tier = offload_plans(zero.offload_optimizer_config, zero.offload_param_config)
    plan = ShardingPlan(
        level=number,
        engine="torch" if zero.ENGINE == "auto" else zero.ENGINE,
        shard_group_size=place.world_size if zero.SHARD_GROUP_SIZE == -1 else zero.SHARD_GROUP_SIZE,
        wrap_threshold=fsdp.AUTO_WRAP_THRESHOLD,
        clip_grad=clip_grad(cfg),
        clip_grad_per=cfg.ZERO.clip_grad_per if clip_grad(cfg) is not None else "model",
        sync_bn_group=_sync_bn_group(cfg, place.world_size),
        **recomputation,
        precision=formats,
        timeout_s=cfg.DISTRIBUTED.TIMEOUT_S,
        deterministic=cfg.TRAINER.DETERMINISTIC,
        verbose=fsdp.verbose,
        seed=cfg.SEED_VALUE,
        offload_optimizer=optimizer_tier,
        offload_params=param_tier,
        reduce_buffer_size=cfg.MODEL.SHARDED_DDP_SETUP.reduce_buffer_size,
        flatten_parameters=fsdp.flatten_parameters,
        bucket_cap_mb=fsdp.bucket_cap_mb,
        clear_autocast_cache=fsdp.clear_autocast_cache,
        force_sync_cuda=fsdp.FORCE_SYNC_CUDA,
        reshard_after_forward=fsdp.reshard_after_forward,
        compile="inductor" if cfg.TRAINER.COMPILE else "",
        float8=_float8_plan(cfg.MODEL.FLOAT8),
    )
    notes = (*_no_effect_on_engine(cfg, plan, place), *_no_effect_of_switches(cfg, plan, place))
    return plan, (*level_notes, *precision_notes, *recompute_notes, *notes)


def _float8_plan(block: Float8) -> Float8Plan:
    return Float8Plan(block.LAYERS, block.SCALES, block.GATHER) if block.USE_FLOAT8 else Float8Plan()


def clip_grad(cfg: RunConfig) -> float | None:
    """Return the maximum norm of the gradients, from ZERO.clip_grad or VISSL's MODEL.GRAD_CLIP; None: no clipping."""
    if cfg.ZERO.clip_grad is not None:
        return cfg.ZERO.clip_grad
    return cfg.MODEL.GRAD_CLIP.MAX_NORM if cfg.MODEL.GRAD_CLIP.USE_GRAD_CLIP else None


def _sync_bn_group(cfg: RunConfig, world_size: int) -> int:
    sync = cfg.MODEL.SYNC_BN_CONFIG
    if not sync.CONVERT_BN_TO_SYNC_BN:
        return 0
    return world_size if sync.GROUP_SIZE <= 0 else min(sync.GROUP_SIZE, world_size)


def _recomputation(cfg: RunConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the field of ``ShardingPlan`` that selects the blocks to recompute (or none), and notes."""
    recompute, stages = cfg.MODEL.ACTIVATION_CHECKPOINTING, cfg.MODEL.TRUNK.REGNET.stage_checkpoints
    flags = cfg.MODEL.TRUNK.REGNET.stage_checkpointing
    is_regnet = cfg.MODEL.TRUNK.NAME == "regnet"
    ends = tuple(tuple(stage) for stage in stages) if is_regnet else ()
    if is_regnet and any(flags):  # as in VISSL, a stage with flags follows them whatever the switch says
        is_on = recompute.USE_ACTIVATION_CHECKPOINTING
        stage_flags = [*flags, *([] for _ in ends[len(flags) :])]
        # A stage's true flags come first (the rule ``regnet``), so their number tells how far it is recomputed.
        counts = [sum(flag) if flag else len(stage) * is_on for flag, stage in zip(stage_flags, ends, strict=True)]
        kept = tuple(stage[:count] for stage, count in zip(ends, counts, strict=True))
        return {"stage_checkpoints": kept}, ()
    # The keys that are set, in order of priority: the first wins.
    keys = [f"{_RECOMPUTE}.BLOCKS"] if recompute.BLOCKS else []
    if any(ends):
        keys.append("config.MODEL.TRUNK.REGNET.stage_checkpoints")
    if recompute.EVERY_N_BLOCKS != ActivationCheckpointing.EVERY_N_BLOCKS:
        keys.append(f"{_RECOMPUTE}.EVERY_N_BLOCKS")
    if not recompute.USE_ACTIVATION_CHECKPOINTING:
        return {}, tuple(f"{key} has no effect: {_RECOMPUTE}.USE_ACTIVATION_CHECKPOINTING is off." for key in keys)
    notes = tuple(f"{key} has no effect: {keys[0].rpartition('.')[2]} says which blocks." for key in keys[1:])
    if recompute.BLOCKS:
        return {"checkpoint_blocks": tuple(recompute.BLOCKS)}, notes
    if any(ends):
        return {"stage_checkpoints": ends}, notes
    return {"checkpoint_every": recompute.EVERY_N_BLOCKS}, notes


def _no_effect_on_engine(cfg: RunConfig, plan: ShardingPlan, place: Placement) -> list[str]:
    """Return notes on keys without effect on this engine or at this level."""
    notes = []
    zero, optimizer = cfg.ZERO, base_name(cfg.OPTIMIZER)
    for key, (field, its_level) in _FAIRSCALE_KEYS.items():
        is_set = getattr(plan, field) != ShardingPlan.__dataclass_fields__[field].default
        if is_set and plan.engine == "torch":
            notes.append(f"config.MODEL.{key} has no effect on the torch engine.")
        elif is_set and plan.level != its_level:
            notes.append(f"config.MODEL.{key} has no effect at level {plan.level}: fairscale reads it at {its_level}.")
    if plan.shard_group_size > 1 and zero.SHARD_GROUP_SIZE != -1 and plan.level == 0:
        notes.append("config.ZERO.SHARD_GROUP_SIZE has no effect at level 0: nothing is sharded.")
    if plan.deterministic and (plan.clip_grad is not None or uses_larc(cfg.OPTIMIZER) or optimizer == "lars"):
        notes.append(
            "config.TRAINER.DETERMINISTIC: every run gives the same bits; levels may differ in the last ones, because "
            "norms (clip_grad, LARC, LARS) are summed shard by shard."
        )
    if plan.float8.gather and plan.level < 3:
        notes.append(SENDS_NOTHING.format(key="config.MODEL.FLOAT8.GATHER", level=plan.level))
    if plan.wrap_threshold and plan.level == 0:
        notes.append("config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD has no effect at level 0.")
    elif plan.wrap_threshold and plan.engine == "fairscale" and plan.level < 3:
        notes.append("config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD has no effect below level 3 of fairscale.")
    elif plan.wrap_threshold and keeps_parameters_whole(plan, plan.shard_group_size, place.world_size, place.device):
        notes.append(f"config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD{NO_UNITS}")
    return notes


def _no_effect_of_switches(cfg: RunConfig, plan: ShardingPlan, place: Placement) -> list[str]:
    """Return notes on keys without effect because their switch is off."""
    budgets = [key for key in ("HOST_MEMORY_GB", "DISK_GB", "MACHINE_PROFILE") if getattr(cfg.ZERO, key) is not None]
    notes = [f"config.ZERO.{key} has no effect: config.ZERO.LEVEL is not fit." for key in budgets]
    if cfg.ZERO.MEMORY_GB is not None and not cfg.DRY_RUN:
        notes.append("config.ZERO.MEMORY_GB has an effect on dry runs only: config.ZERO.LEVEL is not fit.")
    clip, sync = cfg.MODEL.GRAD_CLIP, cfg.MODEL.SYNC_BN_CONFIG
    if not clip.USE_GRAD_CLIP:
        keys = [key for key in ("MAX_NORM", "NORM_TYPE") if getattr(clip, key) != getattr(GradClip, key)]
        notes += [f"config.MODEL.GRAD_CLIP.{key} has no effect: USE_GRAD_CLIP is off." for key in keys]
    if plan.clip_grad is None and cfg.ZERO.clip_grad_per != "model":
        notes.append("config.ZERO.clip_grad_per has no effect: config.ZERO.clip_grad is not given.")
    if not sync.CONVERT_BN_TO_SYNC_BN and sync.GROUP_SIZE not in (-1, 0):
        notes.append("config.MODEL.SYNC_BN_CONFIG.GROUP_SIZE has no effect: CONVERT_BN_TO_SYNC_BN is off.")
    if cfg.MODEL.FSDP_CONFIG.fp32_reduce_scatter and not plan.precision.casts_parameters:
        notes.append(
            "config.MODEL.FSDP_CONFIG.fp32_reduce_scatter has no effect: parameters are computed in "
            f"{plan.precision.master}, and gradients reduced in it."
        )
    has_gpu = place.device == "cuda"
    tiers = cfg.ZERO.offload_optimizer_config, cfg.ZERO.offload_param_config
    notes += offload_notes(*tiers, has_gpu=has_gpu, root="config.ZERO")
    if not cfg.ZERO.dynamic_loss_scale and "float16" not in (plan.precision.autocast, plan.precision.compute):
        notes.append("config.ZERO.dynamic_loss_scale has no effect: nothing is computed in float16.")
    return notes


_USE_SDP = "config.MODEL.SHARDED_DDP_SETUP.USE_SDP"
_AUTO_FSDP = "config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP"
_TYPE = re.compile(r"ZeroRedundancyOptimizer_Level_([123])")
IMPLIED = "{key} is not given: 3, the one level whose parameters can be offloaded."
TYPES = "must be ZeroRedundancyOptimizer_Level_1, _2 or _3"


def typed_level(name: str) -> int | None:
    """Return the level that ColossalAI's name stands for; None for any other name."""
    match = _TYPE.fullmatch(name)
    return int(match[1]) if match else None


def implied_level(params_device: str) -> int | None:
    """Return 3 if parameters are offloaded, as ColossalAI does without a level; else None."""
    return 3 if params_device in DEVICES[1:] else None


def switches(cfg: RunConfig) -> dict[str, int]:
    """Map each of VISSL's switches that is on to its level."""
    levels = {}
    if cfg.OPTIMIZER.name == "zero":
        levels["config.OPTIMIZER.name=zero"] = 1
    elif cfg.OPTIMIZER.use_zero:
        levels["config.OPTIMIZER.use_zero"] = 1
    if cfg.MODEL.SHARDED_DDP_SETUP.USE_SDP:
        levels[_USE_SDP] = 2
    if cfg.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP:
        levels[_AUTO_FSDP] = 3
    task = cfg.TRAINER.TASK_NAME  # type: ignore[attr-defined] # from the tables of VISSL's keys
    if task in TASK_LEVELS:
        levels[f"config.TRAINER.TASK_NAME={task}"] = TASK_LEVELS[task]
    return levels


def _chosen_level(cfg: RunConfig) -> int | None:
    """Return the level in ``ZERO.LEVEL`` or ``type``; None for auto, and for values that a rule refuses."""
    text = str(cfg.ZERO.LEVEL)
    if text in {"0", "1", "2", "3"}:
        return int(text)
    return typed_level(cfg.ZERO.type) if text == "auto" and cfg.ZERO.type is not None else None


def level(cfg: RunConfig) -> tuple[int, tuple[str, ...]]:
    """Return the level, and a note for each switch that ZERO.LEVEL or ZERO.type overrides."""
    chosen, levels = _chosen_level(cfg), switches(cfg)
    if chosen is None and not levels and (implied := implied_level(cfg.ZERO.offload_param_config.device)):
        return implied, (IMPLIED.format(key="config.ZERO.LEVEL"),)
    if chosen is None:
        # The highest: VISSL's USE_SDP switches use_zero on by itself (its utils/hydra_config.py), so several may be on.
        return max(levels.values(), default=0), ()
    key = "config.ZERO.type" if str(cfg.ZERO.LEVEL) == "auto" else f"config.ZERO.LEVEL={chosen}"
    if chosen == 0 and not levels:
        return 0, (f"{key} shards nothing, as auto would here.",)
    notes = [
        f"{key} wins over {switch}, which stands for level {meant}."
        for switch, meant in levels.items()
        if meant != chosen
    ]
    return chosen, tuple(notes)


HALF = ("float16", "bfloat16")
_AMP_TYPES = {"O1": "O1", "01": "O1", "1": "O1", "O2": "O2", "02": "O2", "2": "O2"}


def _amp_type(cfg: RunConfig) -> str | None:
    """Return ``FSDP_CONFIG.AMP_TYPE`` as O1 or O2 (VISSL's documentation prints "01"); None for other values."""
    return _AMP_TYPES.get(cfg.MODEL.FSDP_CONFIG.AMP_TYPE.upper())


def precision(cfg: RunConfig, level: int) -> tuple[Precision, tuple[str, ...]]:
    """Return the number formats of a run, and a note for each key of FSDP_CONFIG that they override."""
    fsdp, amp = cfg.MODEL.FSDP_CONFIG, cfg.MODEL.AMP_PARAMS
    if cfg.TRAINER.DTYPE == "float64":
        notes = _no_effect(cfg, level, "TRAINER.DTYPE is float64")
        return Precision("float64", None, "float64", "float64", False), notes
    if cfg.TRAINER.DTYPE == "bfloat16":
        notes = _no_effect(cfg, level, "TRAINER.DTYPE is bfloat16")
        # Gradients are reduced in float32, so their mean is rounded once. In bfloat16 each rank's summand would round.
        return Precision("bfloat16", None, "bfloat16", "float32", False, cfg.TRAINER.ROUNDING), notes
    # AUTO_SETUP_FSDP derives compute_dtype from AMP, so only without it does a written compute_dtype count.
    by_hand = fsdp.compute_dtype in HALF and fsdp.mixed_precision and not fsdp.AUTO_SETUP_FSDP
    half = None  # level 3 casts the parameters themselves to this format
    if level == 3 and by_hand:
        half = fsdp.compute_dtype
    elif level == 3 and amp.USE_AMP and _amp_type(cfg) == "O2":
        half = amp.DTYPE
    notes = (*_overridden(cfg, level, half), *_no_effect(cfg, level, _why_not_read(cfg, level, by_hand)))
    if half:
        reduce = "float32" if fsdp.fp32_reduce_scatter else half
        # bfloat16 has float32's range of exponents: only float16 needs a loss scale.
        scale = half == "float16" and cfg.ZERO.dynamic_loss_scale
        return Precision("float32", None, half, reduce, scale), notes
    # Below level 3, or with O1, parameters stay in float32, and autocast casts at each operation.
    autocast = amp.DTYPE if amp.USE_AMP else None
    scale = autocast == "float16" and cfg.ZERO.dynamic_loss_scale
    return Precision("float32", autocast, "float32", "float32", scale), notes


def _overridden(cfg: RunConfig, level: int, half: str | None) -> tuple[str, ...]:
    """Return a note if FSDP_CONFIG.compute_dtype differs from the precision in use."""
    fsdp = cfg.MODEL.FSDP_CONFIG
    if fsdp.compute_dtype == (half or "float32"):
        return ()
    key = f"config.MODEL.FSDP_CONFIG.compute_dtype={fsdp.compute_dtype}"
    if level < 3:
        return (f"{key} has no effect below level 3.",)
    if half:
        # O2 with the default "float32", as VISSL's users write it, is no contradiction.
        return () if fsdp.compute_dtype == "float32" else (f"{key} gives way to AMP_PARAMS.DTYPE={half}.",)
    reason = "AUTO_SETUP_FSDP derives it from AMP" if fsdp.AUTO_SETUP_FSDP else "mixed_precision is off"
    return (f"{key} has no effect: {reason}; parameters are computed in float32.",)


def _why_not_read(cfg: RunConfig, level: int, by_hand: bool) -> str:
    """Return the reason why AMP_TYPE has no effect; empty if it has."""
    if level < 3:
        return "parameters are computed in half precision at level 3 only"
    if by_hand:
        return "compute_dtype is written by hand"
    return "" if cfg.MODEL.AMP_PARAMS.USE_AMP else "AMP_PARAMS.USE_AMP is off"


def _no_effect(cfg: RunConfig, level: int, why_no_type: str) -> tuple[str, ...]:
    """Return notes on keys of precision that are set and have no effect."""
    fsdp, amp = cfg.MODEL.FSDP_CONFIG, cfg.MODEL.AMP_PARAMS
    key, notes = "config.MODEL.FSDP_CONFIG", []
    if why_no_type and _amp_type(cfg) == "O2":
        notes.append(f"{key}.AMP_TYPE={fsdp.AMP_TYPE} has no effect: {why_no_type}.")
    if not fsdp.mixed_precision and fsdp.AUTO_SETUP_FSDP:
        notes.append(f"{key}.mixed_precision=False has no effect: AUTO_SETUP_FSDP derives it from AMP.")
    elif not fsdp.mixed_precision and level < 3:
        notes.append(f"{key}.mixed_precision=False has no effect below level 3.")
    elif not fsdp.mixed_precision and fsdp.compute_dtype not in HALF:
        notes.append(f"{key}.mixed_precision=False has no effect: compute_dtype is not in half precision.")
    if amp.DTYPE != AmpParams().DTYPE and not amp.USE_AMP:
        notes.append("config.MODEL.AMP_PARAMS.DTYPE has no effect: USE_AMP is off.")
    return tuple(notes)
