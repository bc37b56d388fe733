"""ZERO, and VISSL's two switches beside it."""

from __future__ import annotations

from pathlib import Path

from vissl_zero.config.derive.level import TYPES, chosen_level, level, typed_level
from vissl_zero.config.derive.offload import offload_problems
from vissl_zero.config.derive.placement import placement, ranks
from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import above_zero, at_least
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.registry import STRATEGIES

_ENGINE = "config.ZERO.ENGINE"
_NVME_FIX = "Give a folder of yours on a local disk."


def level_value(cfg: RunConfig, host: Host) -> Problem | None:
    """The level is auto or a number from 0 to 3, and ``type`` says nothing else."""
    zero, chosen = cfg.ZERO, chosen_level(cfg)
    if zero.LEVEL != "auto" and chosen is None:
        fix = "Write 0 (nothing sharded), 1 (optimizer state), 2 (+ gradients), 3 (+ parameters) or auto."
        return Problem("config.ZERO.LEVEL", repr(zero.LEVEL), "must be auto, 0, 1, 2 or 3", fix)
    if zero.type is None:
        return None
    typed = typed_level(zero.type)
    if typed is None:
        return Problem("config.ZERO.type", repr(zero.type), TYPES, "Write config.ZERO.LEVEL=1, 2 or 3 instead.")
    if typed != chosen:
        fix = "Leave one of them out."
        return Problem("config.ZERO.LEVEL", str(zero.LEVEL), f"contradicts config.ZERO.type={zero.type}", fix)
    return None


def one_switch(cfg: RunConfig, host: Host) -> Problem | None:
    """VISSL's switches for levels 2 and 3 are not both on, unless a number decides."""
    both = cfg.MODEL.SHARDED_DDP_SETUP.USE_SDP and cfg.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP
    if not both or chosen_level(cfg) is not None:
        return None
    must = "cannot go with config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP: one means level 2, the other level 3"
    fix = "Set one of them to False, or let config.ZERO.LEVEL=2 or =3 decide."
    return Problem("config.MODEL.SHARDED_DDP_SETUP.USE_SDP", "True", must, fix)


def engine(cfg: RunConfig, host: Host) -> Problem | None:
    """The engine is there, and runs on this device."""
    name = cfg.ZERO.ENGINE
    if name == "fairscale" and level(cfg)[0] == 3 and placement(cfg, host).device == "cpu":
        must = "fairscale shards parameters (level 3) on CUDA only, and this run is on the CPU"
        return Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, which runs level 3 on any device.")
    if name == "fairscale" and level(cfg)[0] == 0:
        must = "fairscale has no level 0, where nothing is sharded"
        return Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, or config.ZERO.LEVEL=1.")
    if name == "fairscale" and level(cfg)[0] == 3 and cfg.TRAINER.DTYPE == "float64":
        must = "fairscale shards parameters (level 3) in float32 only, and config.TRAINER.DTYPE is float64"
        return Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, or config.ZERO.LEVEL=2.")
    return None if name == "auto" or name in STRATEGIES else STRATEGIES.unknown(name)


def numbers(cfg: RunConfig, host: Host) -> list[Problem]:
    """Counts and thresholds are in range."""
    return [
        *at_least("ZERO.gradient_accumulation_steps", cfg.ZERO.gradient_accumulation_steps, 1),
        *above_zero("ZERO.clip_grad", cfg.ZERO.clip_grad),
        *at_least("MODEL.SHARDED_DDP_SETUP.reduce_buffer_size", cfg.MODEL.SHARDED_DDP_SETUP.reduce_buffer_size, -1),
        *at_least("MODEL.FSDP_CONFIG.bucket_cap_mb", cfg.MODEL.FSDP_CONFIG.bucket_cap_mb, 0),
        *at_least("MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD", cfg.MODEL.FSDP_CONFIG.AUTO_WRAP_THRESHOLD, 0),
        *at_least(
            "MODEL.ACTIVATION_CHECKPOINTING.EVERY_N_BLOCKS", cfg.MODEL.ACTIVATION_CHECKPOINTING.EVERY_N_BLOCKS, 1
        ),
    ]


def clipping(cfg: RunConfig, host: Host) -> list[Problem]:
    """Both switches for clipping say the same."""
    old, new = cfg.MODEL.GRAD_CLIP, cfg.ZERO.clip_grad
    if not old.USE_GRAD_CLIP:
        return []
    found = above_zero("MODEL.GRAD_CLIP.MAX_NORM", old.MAX_NORM)
    if new is not None and new != old.MAX_NORM:
        must = f"differs from config.ZERO.clip_grad={new}"
        fix = "Write one of the two, or both alike."
        found.append(Problem("config.MODEL.GRAD_CLIP.MAX_NORM", str(old.MAX_NORM), must, fix))
    if old.NORM_TYPE != 2:
        key = "config.MODEL.GRAD_CLIP.NORM_TYPE"
        found.append(Problem(key, str(old.NORM_TYPE), "must be 2", "Only the L2 norm is clipped."))
    return found


def sync_bn_group(cfg: RunConfig, host: Host) -> Problem | None:
    """Groups of synchronised batch norm divide the world."""
    sync, world_size = cfg.MODEL.SYNC_BN_CONFIG, ranks(cfg, host)[0]
    size = min(sync.GROUP_SIZE, world_size)
    if not sync.CONVERT_BN_TO_SYNC_BN or (sync.GROUP_SIZE in (-1, 0)) or (size > 0 and world_size % size == 0):
        return None
    must = f"must divide the {world_size} processes, or be -1 for all of them"
    return Problem("config.MODEL.SYNC_BN_CONFIG.GROUP_SIZE", str(sync.GROUP_SIZE), must, "Write -1.")


def shard_groups(cfg: RunConfig, host: Host) -> Problem | None:
    """Groups that share a copy of the state divide the world, on an engine that has them."""
    size, world_size = cfg.ZERO.SHARD_GROUP_SIZE, ranks(cfg, host)[0]
    if size in (-1, world_size):
        return None
    key = "config.ZERO.SHARD_GROUP_SIZE"
    if size < 2 or world_size % size:
        must = f"must be -1 (all processes), or 2 or more and divide the {world_size} processes"
        fix = f"Write {key}=-1." if size != 1 else f"Write {key}=-1, or config.ZERO.LEVEL=0 to share nothing."
        return Problem(key, str(size), must, fix)
    if cfg.ZERO.ENGINE == "fairscale":
        must = "must be -1 on fairscale, which shares one copy of the state among all processes"
        return Problem(key, str(size), must, f"Write {_ENGINE}=torch.")
    return None


def offload(cfg: RunConfig, host: Host) -> list[Problem]:
    """Each tier can be had at this level, on this engine and device."""
    optimizer, params = cfg.ZERO.offload_optimizer_config, cfg.ZERO.offload_param_config
    found = offload_problems(optimizer, params, level(cfg)[0], "config.ZERO")
    if found or {optimizer.device, params.device} == {"none"}:
        return found
    if cfg.ZERO.ENGINE == "fairscale":
        must = "must be torch or auto where state is offloaded"
        return [Problem(_ENGINE, "'fairscale'", must, f"Write {_ENGINE}=torch, or device: none.")]
    is_here = not cfg.SLURM.USE_SLURM and cfg.DISTRIBUTED.NUM_NODES == 1
    paths = {
        "offload_optimizer_config": optimizer.nvme_path if optimizer.device == "nvme" else None,
        "offload_param_config": params.nvme_path if params.device == "nvme" else None,
    }
    return [
        Problem(f"config.ZERO.{name}.nvme_path", repr(path), "must name a folder that exists", _NVME_FIX)
        for name, path in paths.items()
        if is_here and path is not None and not Path(path).is_dir()
    ]


RULES = (level_value, one_switch, engine, numbers, clipping, sync_bn_group, shard_groups, offload)
