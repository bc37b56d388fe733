"""Rules of ``DATA.IN_CHANNELS``: images whose channels are not red, green and blue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

RGB = 3
KEY = "config.DATA.IN_CHANNELS"
# Sources that read files or arrays of any number of channels, and the two that make gray images themselves.
SOURCES = (
    *("disk_folder", "disk_filelist", "manifest", "webdataset", "arrow", "parquet", "lmdb", "npy"),
    *("digits", "synthetic"),
)
# Transforms of pixels that work for any number of channels; those of color assume red, green and blue.
_TRANSFORMS_OF_CHANNELS = (
    *("RandomResizedCrop", "ImgPilToMultiCrop", "ImgReplicatePil", "Resize", "CenterCrop", "RandomCrop"),
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotation", "RandomAffine", "RandomErasing"),
    *("ImgPilGaussianBlur", "RandomApply", "ImgPilMultiCropRandomApply", "ToTensor", "Normalize"),
)
_OF_RGB = ("feature_distillation_loss",)  # its teacher normalizes red, green and blue


def with_channels(cfg: RunConfig) -> RunConfig:
    """Return a copy of ``cfg`` with MODEL.IN_CHANNELS set, so that a saved model records its channels."""
    if cfg.DATA.IN_CHANNELS == RGB or cfg.MODEL.IN_CHANNELS is not None:
        return cfg
    return replace(cfg, MODEL=replace(cfg.MODEL, IN_CHANNELS=cfg.DATA.IN_CHANNELS))


def channels(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that sources, transforms, backend, trunk and loss accept the number of channels."""
    count, model = cfg.DATA.IN_CHANNELS, cfg.MODEL.IN_CHANNELS
    problems: list[Problem] = []
    if model is not None and model != count:
        must = f"must be that of {KEY}, {count}"
        problems.append(Problem("config.MODEL.IN_CHANNELS", str(model), must, "Leave it out."))
    if count == RGB:
        return problems
    must = f"for images of {count} channels ({KEY})"
    write_source = f"Write {', '.join(SOURCES)}."
    if cfg.DATA.BACKEND != "pil":
        problems.append(Problem("config.DATA.BACKEND", cfg.DATA.BACKEND, f"must be pil {must}", "Write pil."))
    if cfg.MODEL.INPUT_TYPE != "rgb":
        fix = "Write rgb: the trunk sees all channels."
        problems.append(Problem("config.MODEL.INPUT_TYPE", cfg.MODEL.INPUT_TYPE, f"must be rgb {must}", fix))
    if (loss := str(cfg.LOSS.get("name"))) in _OF_RGB:
        fix = "Write another loss: this one knows red, green and blue alone."
        problems.append(Problem("config.LOSS.name", loss, f"must be another {must}", fix))
    for name, split in (("TRAIN", cfg.DATA.TRAIN), ("TEST", cfg.DATA.TEST)):
        problems += [
            Problem(f"config.DATA.{name}.DATA_SOURCES", source, f"must be another {must}", write_source)
            for source in split.DATA_SOURCES
            if source not in SOURCES
        ]
        problems += _refused(split.TRANSFORMS, f"config.DATA.{name}.TRANSFORMS", must)
    return problems


def _refused(entries: Sequence[Any], key: str, must: str) -> list[Problem]:
    problems: list[Problem] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or "name" not in entry:
            continue  # the rule ``transforms`` reports malformed entries
        if (name := str(entry["name"])) not in _TRANSFORMS_OF_CHANNELS:
            fix = f"Leave it out. There are: {', '.join(_TRANSFORMS_OF_CHANNELS)}."
            problems.append(Problem(key, repr(name), f"must make sense {must}", fix))
        problems += _refused(entry.get("transforms") or (), key, must)
    return problems
