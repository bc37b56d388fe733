"""Rules of ``CHECKPOINT`` and of restarting."""

from __future__ import annotations

from dataclasses import fields

from vissl_zero.config.host import Host
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem, did_you_mean


def folder(cfg: RunConfig, host: Host) -> list[Problem]:
    """The run folder has a name."""
    if cfg.CHECKPOINT.DIR != "":
        return []
    fix = "Write config.CHECKPOINT.DIR=runs/mine, or leave it out for a new folder under runs/."
    return [Problem("config.CHECKPOINT.DIR", "''", "must name a folder", fix)]


def frequencies(cfg: RunConfig, host: Host) -> list[Problem]:
    """Counts are positive, or -1 for never."""
    found = []
    for key in ("CHECKPOINT_FREQUENCY", "CHECKPOINT_ITER_FREQUENCY", "KEEP_LAST", "KEEP_EVERY", "CHECK_RANKS_EVERY"):
        value = getattr(cfg.CHECKPOINT, key)
        if value != -1 and value < 1:
            found.append(Problem(f"config.CHECKPOINT.{key}", str(value), "must be -1 or at least 1", "Write -1."))
    number = cfg.CHECKPOINT.LATEST_CHECKPOINT_RESUME_FILE_NUM
    if number < 1:
        key = "config.CHECKPOINT.LATEST_CHECKPOINT_RESUME_FILE_NUM"
        found.append(Problem(key, str(number), "must be at least 1", "Write 1 for the newest."))
    limit = cfg.CHECKPOINT.TIME_LIMIT_MIN
    if limit is not None and not limit > 0:
        found.append(Problem("config.CHECKPOINT.TIME_LIMIT_MIN", str(limit), "must be positive", "Write null."))
    return found


def allowed(cfg: RunConfig, host: Host) -> list[Problem]:
    """What may change is a key or a block that there is."""
    found, known = [], [field.name for field in fields(cfg)]
    for key in cfg.CHECKPOINT.ALLOW_CHANGED:
        if key.removeprefix("config.").split(".")[0] not in known:
            fix = did_you_mean(key, known).strip() or "Write it as the refusal of a resume does, such as LOSS.name."
            found.append(Problem("config.CHECKPOINT.ALLOW_CHANGED", repr(key), "must name keys or blocks", fix))
    return found


def restarts(cfg: RunConfig, host: Host) -> list[Problem]:
    """Restarts are counted, and need something to go on from."""
    found = []
    distributed = cfg.DISTRIBUTED
    if distributed.MAX_RESTARTS < 0:
        must = "must be 0 or more"
        found.append(Problem("config.DISTRIBUTED.MAX_RESTARTS", str(distributed.MAX_RESTARTS), must, "Write 0."))
    if distributed.MAX_RESTARTS > 0 and not cfg.CHECKPOINT.AUTO_RESUME:
        must = "needs AUTO_RESUME: a restarted run goes on from its newest checkpoint"
        fix = "Write config.CHECKPOINT.AUTO_RESUME=true, or MAX_RESTARTS=0."
        found.append(Problem("config.DISTRIBUTED.MAX_RESTARTS", str(distributed.MAX_RESTARTS), must, fix))
    least = distributed.MIN_PROC_PER_NODE
    if least != -1 and not 1 <= least <= distributed.NUM_PROC_PER_NODE:
        must = f"must be -1, or from 1 to NUM_PROC_PER_NODE ({distributed.NUM_PROC_PER_NODE})"
        found.append(Problem("config.DISTRIBUTED.MIN_PROC_PER_NODE", str(least), must, "Write -1."))
    if least != -1 and distributed.NUM_NODES > 1:
        must = "must be -1 with more than one machine: they start again with all of their processes"
        found.append(Problem("config.DISTRIBUTED.MIN_PROC_PER_NODE", str(least), must, "Write -1."))
    return found


RULES = (folder, frequencies, allowed, restarts)
