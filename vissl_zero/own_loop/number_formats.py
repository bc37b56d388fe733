"""Which number formats ``initialize`` trains in, and what is said about it."""

from __future__ import annotations

import torch
from torch import nn

from vissl_zero.config.resolved import Precision
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.own_loop.settings import ZeroSettings

_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def choose_precision(model: nn.Module, settings: ZeroSettings) -> tuple[Precision, tuple[str, ...]]:
    """Number formats from the model's own and from ``fp16``, ``bf16`` and the ``type=`` form; notes to say once.

    float64 is never touched. A model in half precision computes in it, over float32 masters. ``type=`` turns float16 on
    at levels 2 and 3, unless ``fp16=False`` or ``bf16=True``. At level 0 half precision is autocast.

    Raises:
        ConfigError: parameters of several formats, or half precision asked of a float64 model.
    """
    own = _own_format(model)
    half = _half(own, settings)
    if own == "float64" and half and (settings.fp16 or settings.bf16):
        key = "zero.fp16" if settings.fp16 else "zero.bf16"
        fix = "Build the model in float32, or leave the key out."
        raise ConfigError([Problem(key, "True", "cannot go with a float64 model, which is trained as it is", fix)])
    refused = {"float16": settings.fp16, "bfloat16": settings.bf16}.get(own) is False
    if refused and half == own:
        key = "zero.fp16" if own == "float16" else "zero.bf16"
        fix = "Cast it with model.float() for float32, or leave the key out."
        raise ConfigError([Problem(key, "False", f"contradicts the model, which is in {own}", fix)])
    master = "float64" if own == "float64" else "float32"
    half = None if own == "float64" else half
    use_scale = half == "float16" and settings.dynamic_loss_scale is not False
    notes = []
    if half == "float16" and settings.is_typed and settings.fp16 is None and own != half:
        scaling = "scaling the loss" if use_scale else "without scaling the loss"
        notes.append(f"zero.type computes in float16, {scaling}, over float32 parameters; fp16=False keeps to float32.")
    if settings.dynamic_loss_scale is not None and half != "float16":
        notes.append("zero.dynamic_loss_scale has no effect: nothing is computed in float16.")
    if half is None:
        return Precision(master, None, master, master, False), tuple(notes)
    if settings.level == 0:
        return Precision(master, half, master, master, use_scale), tuple(notes)
    return Precision(master, None, half, master, use_scale), tuple(notes)


def _own_format(model: nn.Module) -> str:
    formats = {param.dtype: name for name, param in reversed(list(model.named_parameters()))}
    if len(formats) != 1 or not formats.keys() <= _NAMES.keys():
        examples = (f"{str(dtype).removeprefix('torch.')} of {name}" for dtype, name in formats.items())
        fix = (
            "Cast it, frozen parameters too: model.float(), or model.bfloat16() to compute in that format over float32 "
            "masters."
        )
        found = ", ".join(sorted(examples)) or "none"
        raise ConfigError([Problem("model", found, "must have parameters of one floating-point format", fix)])
    return _NAMES[next(iter(formats))]


def _half(own: str, settings: ZeroSettings) -> str | None:
    if settings.bf16:
        return "bfloat16"
    if settings.fp16:
        return "float16"
    if own in ("float16", "bfloat16"):
        return own
    is_automatic = settings.is_typed and settings.level >= 2 and settings.fp16 is None and settings.bf16 is None
    return "float16" if is_automatic else None
