"""The loss, and what it needs of heads, transforms and batches."""

from __future__ import annotations

from vissl_zero.config.components.losses import SwAVLossConfig
from vissl_zero.config.derive.components import loss_options, swav_facts
from vissl_zero.config.derive.placement import micro_batch
from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import above_zero, at_least
from vissl_zero.config.rules.model import is_head
from vissl_zero.config.run import RunConfig
from vissl_zero.config.vissl_no_effect import OTHER_LOSSES
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.registry import LOSSES

_SWAV = "LOSS.swav_loss"
_CROSS_ENTROPY = ("CrossEntropyLoss", "cross_entropy_multiple_output_single_target")


def known(cfg: RunConfig, host: Host) -> list[Problem]:
    """The loss is known and has the keys it is given; no other block is mistyped."""
    name = cfg.LOSS.get("name")
    found = [
        Problem(f"config.LOSS.{key}", "", "is not the name of a loss", did_you_mean(key, LOSSES).strip() or _known())
        for key in cfg.LOSS
        if key != "name" and key not in LOSSES and key not in OTHER_LOSSES
    ]
    if not isinstance(name, str) or name not in LOSSES:
        return [LOSSES.unknown(str(name)), *found]
    try:
        loss_options(cfg)
    except ConfigError as error:
        found += error.problems
    return found


def _known() -> str:
    return f"Known: {', '.join(LOSSES)}."


def _swav(cfg: RunConfig) -> SwAVLossConfig | None:
    block = cfg.LOSS.get("swav_loss")
    return block if cfg.LOSS.get("name") == "swav_loss" and isinstance(block, SwAVLossConfig) else None


def swav_head(cfg: RunConfig, host: Host) -> Problem | None:
    """SwAV scores embeddings against one head's prototypes."""
    names = [head[0] for head in cfg.MODEL.HEAD.PARAMS if is_head(head)]
    if _swav(cfg) is None or not names or names == ["swav_head"]:
        return None
    fix = 'Write [["swav_head", {dims: [...], num_clusters: [...]}]].'
    return Problem("config.MODEL.HEAD.PARAMS", str(names), "must be one swav_head for swav_loss", fix)


def swav_crops(cfg: RunConfig, host: Host) -> Problem | None:
    """SwAV predicts between crops, so there are two or more, and those assigned are among them."""
    swav, count = _swav(cfg), swav_facts(cfg)["num_crops"]
    if swav is None:
        return None
    count = count or swav.num_crops
    if not count or count < 2:
        crops = "total_num_crops: 2, num_crops: [2], size_crops: [224], crop_scales: [[0.14, 1]]"
        fix = f"Add {{name: ImgPilToMultiCrop, {crops}}}."
        must = "must make two or more crops of an image for swav_loss"
        return Problem("config.DATA.TRAIN.TRANSFORMS", f"{count or 'no multi-crop'}", must, fix)
    wrong = [crop for crop in swav.crops_for_assign if not 0 <= crop < count]
    if wrong or not swav.crops_for_assign:
        must = f"must list crops from 0 to {count - 1}"
        got = str(swav.crops_for_assign)
        return Problem(f"config.{_SWAV}.crops_for_assign", got, must, "Write [0, 1], the two large crops.")
    return None


def swav_prototypes(cfg: RunConfig, host: Host) -> Problem | None:
    """SwAV has prototypes."""
    swav = _swav(cfg)
    if swav is None or swav.num_prototypes is None:
        return None
    if swav.num_prototypes and min(swav.num_prototypes) >= 1:
        return None
    must, fix = (
        "must have at least 1 prototype in each layer",
        "Leave it out: it is taken from the head's num_clusters.",
    )
    return Problem(f"config.{_SWAV}.num_prototypes", str(swav.num_prototypes), must, fix)


def swav_queue(cfg: RunConfig, host: Host) -> Problem | None:
    """The queue is off or takes a whole micro-batch."""
    swav, batch = _swav(cfg), micro_batch(cfg, host)
    if swav is None or swav.queue.queue_length == 0 or swav.queue.queue_length >= batch:
        return None
    must = f"must be 0 (no queue) or at least the batch over all processes, {batch} images"
    fix = f"Write config.{_SWAV}.queue.queue_length={batch}, or lower config.DATA.TRAIN.BATCHSIZE_PER_REPLICA."
    return Problem(f"config.{_SWAV}.queue.queue_length", str(swav.queue.queue_length), must, fix)


def swav_numbers(cfg: RunConfig, host: Host) -> list[Problem]:
    """Temperatures are positive, counts are not negative."""
    swav = _swav(cfg)
    if swav is None:
        return []
    return [
        *above_zero(f"{_SWAV}.temperature", swav.temperature),
        *above_zero(f"{_SWAV}.epsilon", swav.epsilon),
        *at_least(f"{_SWAV}.num_iters", swav.num_iters, 1),
        *at_least(f"{_SWAV}.temp_hard_assignment_iters", swav.temp_hard_assignment_iters, 0),
        *at_least(f"{_SWAV}.queue.start_iter", swav.queue.start_iter, 0),
        *at_least(f"{_SWAV}.queue.start_epoch", swav.queue.start_epoch, 0),
    ]


def cross_entropy(cfg: RunConfig, host: Host) -> list[Problem]:
    """Cross-entropy has classes to tell apart."""
    name = cfg.LOSS.get("name")
    if name not in _CROSS_ENTROPY:
        return []
    found = above_zero(f"LOSS.{name}.temperature", cfg.LOSS[name].temperature)
    if cfg.DATA.TRAIN.LABEL_TYPE != "standard":
        fix = "Write config.DATA.TRAIN.LABEL_TYPE=standard."
        must = "must be standard for a supervised loss"
        found.append(Problem("config.DATA.TRAIN.LABEL_TYPE", cfg.DATA.TRAIN.LABEL_TYPE, must, fix))
    return found


RULES = (known, swav_head, swav_crops, swav_prototypes, swav_queue, swav_numbers, cross_entropy)
