"""Number formats, from TRAINER.DTYPE, AMP and FSDP_CONFIG."""

from __future__ import annotations

from vissl_zero.config.blocks.precision import AmpParams
from vissl_zero.config.resolved import Precision
from vissl_zero.config.run import RunConfig

HALF = ("float16", "bfloat16")
_AMP_TYPES = {"O1": "O1", "01": "O1", "1": "O1", "O2": "O2", "02": "O2", "2": "O2"}


def amp_type(cfg: RunConfig) -> str | None:
    """``FSDP_CONFIG.AMP_TYPE`` as O1 or O2 (VISSL's documentation prints "01", with a zero); None: something else."""
    return _AMP_TYPES.get(cfg.MODEL.FSDP_CONFIG.AMP_TYPE.upper())


def precision(cfg: RunConfig, level: int) -> tuple[Precision, tuple[str, ...]]:
    """Number formats of a run, and a note for each key of FSDP_CONFIG that they override.

    AMP off: one format throughout. AMP on: autocast over float32 parameters, gradients reduced in float32. At level 3,
    O2 (or a compute_dtype of half precision written by hand, without AUTO_SETUP_FSDP) casts the parameters themselves
    and reduces gradients in half precision too, unless fp32_reduce_scatter.
    """
    fsdp, amp = cfg.MODEL.FSDP_CONFIG, cfg.MODEL.AMP_PARAMS
    if cfg.TRAINER.DTYPE == "float64":
        return Precision("float64", None, "float64", "float64", False), _in_vain(cfg, level, "TRAINER.DTYPE is float64")
    by_hand = fsdp.compute_dtype in HALF and fsdp.mixed_precision and not fsdp.AUTO_SETUP_FSDP
    half = None
    if level == 3 and by_hand:
        half = fsdp.compute_dtype
    elif level == 3 and amp.USE_AMP and amp_type(cfg) == "O2":
        half = amp.DTYPE
    notes = (*_overridden(cfg, level, half), *_in_vain(cfg, level, _why_not_read(cfg, level, by_hand)))
    if half:
        reduce = "float32" if fsdp.fp32_reduce_scatter else half
        scale = half == "float16" and cfg.ZERO.dynamic_loss_scale
        return Precision("float32", None, half, reduce, scale), notes
    autocast = amp.DTYPE if amp.USE_AMP else None
    scale = autocast == "float16" and cfg.ZERO.dynamic_loss_scale
    return Precision("float32", autocast, "float32", "float32", scale), notes


def _overridden(cfg: RunConfig, level: int, half: str | None) -> tuple[str, ...]:
    """Notes on precision keys of FSDP_CONFIG that say something else than what is done."""
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
    """Why AMP_TYPE decides nothing; empty if it does."""
    if level < 3:
        return "parameters are computed in half precision at level 3 only"
    if by_hand:
        return "compute_dtype is written by hand"
    return "" if cfg.MODEL.AMP_PARAMS.USE_AMP else "AMP_PARAMS.USE_AMP is off"


def _in_vain(cfg: RunConfig, level: int, why_no_type: str) -> tuple[str, ...]:
    """Notes on switches that were set and decide nothing."""
    fsdp, amp = cfg.MODEL.FSDP_CONFIG, cfg.MODEL.AMP_PARAMS
    key, notes = "config.MODEL.FSDP_CONFIG", []
    if why_no_type and amp_type(cfg) == "O2":
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
