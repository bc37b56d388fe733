"""Number formats that go together."""

from __future__ import annotations

from vissl_zero.config.derive.precision import HALF, amp_type
from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import one_of
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem

_FSDP = "MODEL.FSDP_CONFIG"


def names(cfg: RunConfig, host: Host) -> list[Problem]:
    """Every format is one of the known."""
    found = one_of("TRAINER.DTYPE", cfg.TRAINER.DTYPE, ("float32", "float64"))
    found += one_of("MODEL.AMP_PARAMS.DTYPE", cfg.MODEL.AMP_PARAMS.DTYPE, ("bfloat16", "float16"))
    found += one_of(f"{_FSDP}.compute_dtype", cfg.MODEL.FSDP_CONFIG.compute_dtype, ("float32", *HALF))
    if amp_type(cfg) is None:
        found += one_of(f"{_FSDP}.AMP_TYPE", cfg.MODEL.FSDP_CONFIG.AMP_TYPE, ("O1", "O2"))
    return found


def opt_level(cfg: RunConfig, host: Host) -> Problem | None:
    """apex's other levels are not there."""
    given = cfg.MODEL.AMP_PARAMS.AMP_ARGS.opt_level
    if not cfg.MODEL.AMP_PARAMS.USE_AMP or given in ("O1", "01"):
        return None
    key = "config.MODEL.AMP_PARAMS.AMP_ARGS.opt_level"
    fix = f"For half-precision parameters use level 3 with config.{_FSDP}.AMP_TYPE=O2."
    return Problem(key, repr(given), "must be O1: autocast stands for apex here", fix)


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


RULES = (names, opt_level, float64)
