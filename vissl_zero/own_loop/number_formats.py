"""Which number formats ``initialize`` trains in, and the notes about them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from vissl_zero.config.resolved import Precision
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.own_loop.settings import ZeroSettings

_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def choose_precision(model: nn.Module, settings: ZeroSettings) -> tuple[Precision, tuple[str, ...]]:
    """Number formats from the model's own and from ``fp16``, ``bf16`` and the ``type=`` form; notes to say once.

    float64 is never touched. A model in half precision computes in it, over float32 masters. ``type=`` turns float16 on
    at levels 2 and 3, unless ``fp16=False`` or ``bf16=True``. At level 0 half precision is autocast. A model of several
    formats keeps all of them.

    Raises:
        ConfigError: trained parameters of several formats, or half precision asked of a float64 or mixed model.
    """
    formats = {param.dtype: name for name, param in reversed(list(model.named_parameters()))}
    if len(formats) > 1:
        master = _format_of_mixed(model, formats, settings)
        return Precision(master, None, master, master, False), _without_scaling(settings)
    own = _the_only(formats)
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
    if half != "float16":
        notes += _without_scaling(settings)
    if half is None:
        return Precision(master, None, master, master, False), tuple(notes)
    if settings.level == 0:
        return Precision(master, half, master, master, use_scale), tuple(notes)
    return Precision(master, None, half, master, use_scale), tuple(notes)


def _the_only(formats: Mapping[torch.dtype, str]) -> str:
    if len(formats) != 1 or not formats.keys() <= _NAMES.keys():
        fix = "Cast it, frozen parameters too: model.float()."
        raise ConfigError([Problem("model", _examples(formats), "must have floating-point parameters", fix)])
    return _NAMES[next(iter(formats))]


def _format_of_mixed(model: nn.Module, formats: Mapping[torch.dtype, str], settings: ZeroSettings) -> str:
    """Of what is trained, such as adapters over a frozen base in half precision."""
    trained = {param.dtype: name for name, param in model.named_parameters() if param.requires_grad}
    problems = []
    if len(trained) != 1 or not trained.keys() <= {torch.float32, torch.float64} or not formats.keys() <= _NAMES.keys():
        fix = (
            "Cast what is trained to float32 (frozen parameters may be in another floating-point format), or cast all: "
            "model.float(), or model.bfloat16() to compute in that format over float32 masters."
        )
        must = "must have all its trained parameters in float32, or all in float64, where it has several formats"
        problems.append(Problem("model", _examples(formats), must, fix))
    for key in ("fp16", "bf16"):
        if getattr(settings, key):
            must = "cannot go with a model of several formats, which keeps them"
            problems.append(Problem(f"zero.{key}", "True", must, "Leave it out, or cast the model to one format."))
    if settings.engine != "torch":
        fix = "Leave engine out, or cast the model to one format: model.float()."
        problems.append(Problem("zero.engine", settings.engine, "needs a model of one floating-point format", fix))
    if settings.is_fitted:
        fix = "Write level=0, 1, 2 or 3."
        problems.append(Problem("zero.level", "fit", "cannot forecast a model of several formats", fix))
    if problems:
        raise ConfigError(problems)
    return _NAMES[next(iter(trained))]


def _examples(formats: Mapping[torch.dtype, str]) -> str:
    """A parameter of each format."""
    examples = (f"{str(dtype).removeprefix('torch.')} of {name}" for dtype, name in formats.items())
    return ", ".join(sorted(examples)) or "none"


def _without_scaling(settings: ZeroSettings) -> tuple[str, ...]:
    if settings.dynamic_loss_scale is None:
        return ()
    return ("zero.dynamic_loss_scale has no effect: nothing is computed in float16.",)


def _half(own: str, settings: ZeroSettings) -> str | None:
    if settings.bf16:
        return "bfloat16"
    if settings.fp16:
        return "float16"
    if own in ("float16", "bfloat16"):
        return own
    is_automatic = settings.is_typed and settings.level >= 2 and settings.fp16 is None and settings.bf16 is None
    return "float16" if is_automatic else None
