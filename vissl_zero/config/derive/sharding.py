"""What ``sharding`` is asked to do."""

from __future__ import annotations

from vissl_zero.config.blocks.model import ActivationCheckpointing, GradClip
from vissl_zero.config.derive.level import level
from vissl_zero.config.derive.offload import offload_notes, offload_plans
from vissl_zero.config.derive.optimizer import base_name, uses_larc
from vissl_zero.config.derive.placement import Placement
from vissl_zero.config.derive.precision import precision
from vissl_zero.config.derive.whole_parameters import NO_UNITS, keeps_parameters_whole
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.config.run import RunConfig

# What only fairscale reads: key -> field of the plan, and the level that reads it.
_FAIRSCALE_KEYS = {
    "SHARDED_DDP_SETUP.reduce_buffer_size": ("reduce_buffer_size", 2),
    "FSDP_CONFIG.flatten_parameters": ("flatten_parameters", 3),
    "FSDP_CONFIG.bucket_cap_mb": ("bucket_cap_mb", 3),
    "FSDP_CONFIG.clear_autocast_cache": ("clear_autocast_cache", 3),
    "FSDP_CONFIG.FORCE_SYNC_CUDA": ("force_sync_cuda", 3),
    "FSDP_CONFIG.reshard_after_forward": ("reshard_after_forward", 3),
}


def sharding_plan(cfg: RunConfig, place: Placement) -> tuple[ShardingPlan, tuple[str, ...]]:
    """The sharding plan of a run, and what to say about it."""
    number, level_notes = level(cfg)
    formats, precision_notes = precision(cfg, number)
    zero, fsdp = cfg.ZERO, cfg.MODEL.FSDP_CONFIG
    stages, every, recompute_notes = _recomputation(cfg)
    optimizer_tier, param_tier = offload_plans(zero.offload_optimizer_config, zero.offload_param_config)
    plan = ShardingPlan(
        level=number,
        engine="torch" if zero.ENGINE == "auto" else zero.ENGINE,
        shard_group_size=place.world_size if zero.SHARD_GROUP_SIZE == -1 else zero.SHARD_GROUP_SIZE,
        wrap_threshold=fsdp.AUTO_WRAP_THRESHOLD,
        clip_grad=clip_grad(cfg),
        sync_bn_group=_sync_bn_group(cfg, place.world_size),
        checkpoint_every=every,
        stage_checkpoints=stages,
        precision=formats,
        timeout_s=cfg.DISTRIBUTED.TIMEOUT_S,
        deterministic=cfg.TRAINER.DETERMINISTIC,
        verbose=fsdp.verbose,
        offload_optimizer=optimizer_tier,
        offload_params=param_tier,
        reduce_buffer_size=cfg.MODEL.SHARDED_DDP_SETUP.reduce_buffer_size,
        flatten_parameters=fsdp.flatten_parameters,
        bucket_cap_mb=fsdp.bucket_cap_mb,
        clear_autocast_cache=fsdp.clear_autocast_cache,
        force_sync_cuda=fsdp.FORCE_SYNC_CUDA,
        reshard_after_forward=fsdp.reshard_after_forward,
    )
    return plan, (*level_notes, *precision_notes, *recompute_notes, *_no_effect(cfg, plan, place))


def clip_grad(cfg: RunConfig) -> float | None:
    """Largest global norm of the gradients, from ZERO.clip_grad or VISSL's MODEL.GRAD_CLIP."""
    if cfg.ZERO.clip_grad is not None:
        return cfg.ZERO.clip_grad
    return cfg.MODEL.GRAD_CLIP.MAX_NORM if cfg.MODEL.GRAD_CLIP.USE_GRAD_CLIP else None


def _sync_bn_group(cfg: RunConfig, world_size: int) -> int:
    sync = cfg.MODEL.SYNC_BN_CONFIG
    if not sync.CONVERT_BN_TO_SYNC_BN:
        return 0
    return world_size if sync.GROUP_SIZE <= 0 else min(sync.GROUP_SIZE, world_size)


def _recomputation(cfg: RunConfig) -> tuple[tuple[tuple[int, ...], ...], int, tuple[str, ...]]:
    """Block ends per stage, every n-th block (0: off), notes."""
    recompute, stages = cfg.MODEL.ACTIVATION_CHECKPOINTING, cfg.MODEL.TRUNK.REGNET.stage_checkpoints
    ends = tuple(tuple(stage) for stage in stages) if cfg.MODEL.TRUNK.NAME == "regnet" else ()
    keys = ["config.MODEL.TRUNK.REGNET.stage_checkpoints"] if any(ends) else []
    if recompute.EVERY_N_BLOCKS != ActivationCheckpointing.EVERY_N_BLOCKS:
        keys.append("config.MODEL.ACTIVATION_CHECKPOINTING.EVERY_N_BLOCKS")
    if not recompute.USE_ACTIVATION_CHECKPOINTING:
        switch = "config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING is off"
        return (), 0, tuple(f"{key} has no effect: {switch}." for key in keys)
    if any(ends):
        return ends, 0, tuple(f"{key} has no effect: stage_checkpoints says which blocks." for key in keys[1:])
    return (), recompute.EVERY_N_BLOCKS, ()


def _no_effect(cfg: RunConfig, plan: ShardingPlan, place: Placement) -> list[str]:
    """Notes on keys that were set away from their defaults and do nothing in this plan."""
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
    if plan.wrap_threshold and plan.level == 0:
        notes.append("config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD has no effect at level 0.")
    elif plan.wrap_threshold and plan.engine == "fairscale" and plan.level < 3:
        notes.append("config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD has no effect below level 3 of fairscale.")
    elif plan.wrap_threshold and keeps_parameters_whole(plan, plan.shard_group_size, place.world_size, place.device):
        notes.append(f"config.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD{NO_UNITS}")
    clip, sync = cfg.MODEL.GRAD_CLIP, cfg.MODEL.SYNC_BN_CONFIG
    if not clip.USE_GRAD_CLIP:
        keys = [key for key in ("MAX_NORM", "NORM_TYPE") if getattr(clip, key) != getattr(GradClip, key)]
        notes += [f"config.MODEL.GRAD_CLIP.{key} has no effect: USE_GRAD_CLIP is off." for key in keys]
    if not sync.CONVERT_BN_TO_SYNC_BN and sync.GROUP_SIZE not in (-1, 0):
        notes.append("config.MODEL.SYNC_BN_CONFIG.GROUP_SIZE has no effect: CONVERT_BN_TO_SYNC_BN is off.")
    if cfg.MODEL.FSDP_CONFIG.fp32_reduce_scatter and plan.precision.compute == plan.precision.master:
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
