"""ZERO and VISSL's two switches beside it, number formats that go together, TRAINER.DETERMINISTIC."""

from __future__ import annotations

from vissl_zero.atomic import is_folder
from vissl_zero.config.derive.offload import offload_problems
from vissl_zero.config.derive.optimizer_plan import base_name
from vissl_zero.config.derive.placement_plan import placement, ranks
from vissl_zero.config.derive.sharding_plan import HALF, TYPES, amp_type, chosen_level, level, typed_level
from vissl_zero.config.host import Host, read_profile
from vissl_zero.config.rules.limits import one_of
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import STRATEGIES

_ENGINE = "config.ZERO.ENGINE"
_NVME_FIX = "Give a folder of yours on a local disk."


def level_value(cfg: RunConfig, host: Host) -> Problem | None:
    """The level is auto or a number from 0 to 3, and ``type`` says nothing else."""
    zero, chosen = cfg.ZERO, chosen_level(cfg)
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


def machine_profile(cfg: RunConfig, host: Host) -> list[Problem]:
    """The machine described can be read."""
    try:
        if cfg.ZERO.MACHINE_PROFILE:
            read_profile(cfg.ZERO.MACHINE_PROFILE)
    except ConfigError as error:
        return list(error.problems)
    return []


def one_switch(cfg: RunConfig, host: Host) -> Problem | None:
    """VISSL's switches for levels 2 and 3 are not both on, unless a number decides."""
    both = cfg.MODEL.SHARDED_DDP_SETUP.USE_SDP and cfg.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP
    if not both or chosen_level(cfg) is not None:
        return None
    must = "cannot go with config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP: one means level 2, the other level 3"
    fix = "Set one of them to False, or let config.ZERO.LEVEL=2 or =3 decide."
    return Problem("config.MODEL.SHARDED_DDP_SETUP.USE_SDP", "True", must, fix)


def engine(cfg: RunConfig, host: Host) -> Problem | None:
    """The engine is installed, and runs on this device."""
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


def clipping(cfg: RunConfig, host: Host) -> list[Problem]:
    """Both switches for clipping say the same."""
    old, new = cfg.MODEL.GRAD_CLIP, cfg.ZERO.clip_grad
    if not old.USE_GRAD_CLIP:
        return []
    found = []
    if new is not None and new != old.MAX_NORM:
        must = f"differs from config.ZERO.clip_grad={new}"
        fix = "Write one of the two, or the same value in both."
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
        if is_here and path is not None and not is_folder(path)
    ]


_FSDP = "MODEL.FSDP_CONFIG"


def names(cfg: RunConfig, host: Host) -> list[Problem]:
    """AMP_TYPE is one of the known, in one of its spellings."""
    if amp_type(cfg) is not None:
        return []
    return one_of(f"{_FSDP}.AMP_TYPE", cfg.MODEL.FSDP_CONFIG.AMP_TYPE, ("O1", "O2"))


def opt_level(cfg: RunConfig, host: Host) -> Problem | None:
    """apex's other levels are not supported; torch's autocast has none, in VISSL too."""
    given = cfg.MODEL.AMP_PARAMS.AMP_ARGS.opt_level
    is_apex = cfg.MODEL.AMP_PARAMS.AMP_TYPE == "apex"
    if not cfg.MODEL.AMP_PARAMS.USE_AMP or given in ("O1", "01") or not is_apex:
        return None
    key = "config.MODEL.AMP_PARAMS.AMP_ARGS.opt_level"
    fix = f"For half-precision parameters use level 3 with config.{_FSDP}.AMP_TYPE=O2."
    return Problem(key, repr(given), "must be O1: autocast replaces apex here", fix)


def float64(cfg: RunConfig, host: Host) -> list[Problem]:
    """float64 is for everything or nothing."""
    if cfg.TRAINER.DTYPE != "float64":
        return []
    found = []
    if cfg.MODEL.AMP_PARAMS.USE_AMP:
        fix = "Write config.MODEL.AMP_PARAMS.USE_AMP=False."
        found.append(Problem("config.TRAINER.DTYPE", "'float64'", "cannot go with half precision (AMP)", fix))
    if cfg.MODEL.FSDP_CONFIG.compute_dtype in HALF:
        key, got = f"config.{_FSDP}.compute_dtype", repr(cfg.MODEL.FSDP_CONFIG.compute_dtype)
        found.append(Problem(key, got, "cannot go with config.TRAINER.DTYPE=float64", "Leave one of them out."))
    return found


_DETERMINISTIC = "config.TRAINER.DETERMINISTIC"
REPEATABLE = ("sgd", "lars", "adam", "adamw", "muon", "normuon", "shampoo", "adamw_8bit", "lamb", "adafactor")


def reachable(cfg: RunConfig, host: Host) -> list[Problem]:
    """Engine, groups and optimizer are ones whose sums have one order."""
    if not cfg.TRAINER.DETERMINISTIC:
        return []
    found = []
    if cfg.ZERO.ENGINE == "fairscale":
        must = "is not available on fairscale, which sums over ranks in its own order"
        found.append(Problem(_DETERMINISTIC, "True", must, "Write config.ZERO.ENGINE=torch."))
    if cfg.ZERO.SHARD_GROUP_SIZE not in (-1, ranks(cfg, host)[0]):
        must = "is not available with shard groups, which sum inside each group first"
        found.append(Problem(_DETERMINISTIC, "True", must, "Write config.ZERO.SHARD_GROUP_SIZE=-1."))
    if cfg.TRAINER.COMPILE:
        must = "is not available with config.TRAINER.COMPILE: levels begin to compile at different steps"
        found.append(Problem(_DETERMINISTIC, "True", must, "Turn one of the two off."))
    if base_name(cfg.OPTIMIZER) not in REPEATABLE:
        must = f"needs {', '.join(REPEATABLE[:-1])} or {REPEATABLE[-1]}, whose rounding does not depend on the cut"
        found.append(Problem(_DETERMINISTIC, "True", must, "Use one of them."))
    return found


RULES = (
    level_value,
    machine_profile,
    one_switch,
    engine,
    clipping,
    sync_bn_group,
    shard_groups,
    offload,
    names,
    opt_level,
    float64,
    reachable,
)
