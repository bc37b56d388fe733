"""What a job of a cluster may be called and ask for; nothing given here can add a line to the sbatch script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vissl_zero.config.host import Host
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
# sbatch options that other keys decide, and those that keys decide.
_DECIDED = {
    "job-name": "config.SLURM.NAME",
    "comment": "config.SLURM.COMMENT",
    "partition": "config.SLURM.PARTITION",
    "account": "config.SLURM.ACCOUNT",
    "qos": "config.SLURM.QOS",
    "time": "config.SLURM.TIME_HOURS and TIME_MINUTES",
    "constraint": "config.SLURM.CONSTRAINT",
    "mem": "config.SLURM.MEM_GB",
    "cpus-per-task": "config.SLURM.NUM_CPU_PER_PROC",
    "nodes": "config.DISTRIBUTED.NUM_NODES",
    "ntasks": "config.DISTRIBUTED.NUM_PROC_PER_NODE and NUM_NODES",
    "ntasks-per-node": "config.DISTRIBUTED.NUM_PROC_PER_NODE",
    "gpus-per-node": "config.DISTRIBUTED.NUM_PROC_PER_NODE and config.MACHINE.DEVICE",
    "signal": "config.SLURM.SIGNAL_DELAY_S",
    "output": "config.SLURM.LOG_FOLDER",
    "error": "config.SLURM.LOG_FOLDER",
    "open-mode": "the run, which appends to its logs",
    "requeue": "config.SLURM.MAX_REQUEUES",
    "no-requeue": "config.SLURM.MAX_REQUEUES",
    "array": "Hydra's multirun (-m)",
    "wrap": "the run",
}


def texts(cfg: RunConfig, host: Host) -> list[Problem]:
    """Names and comments are one line each: a second one would be read as an option or a command."""
    slurm, found = cfg.SLURM, []
    for key in ("NAME", "COMMENT", "PARTITION", "ACCOUNT", "QOS", "CONSTRAINT", "LOG_FOLDER"):
        value = getattr(slurm, key)
        if is_unsafe(value):
            found.append(_one_line(f"config.SLURM.{key}", value))
    folder = cfg.CHECKPOINT.DIR or ""
    if is_unsafe(folder):
        found.append(_one_line("config.CHECKPOINT.DIR", folder))
    if "%" in folder:
        must = "must not contain %, which SLURM replaces"
        found.append(Problem("config.CHECKPOINT.DIR", repr(folder), must, "Name another folder."))
    if not slurm.NAME.strip():
        found.append(Problem("config.SLURM.NAME", repr(slurm.NAME), "must have a letter", "Name the job."))
    if "%" in slurm.LOG_FOLDER:
        must = "must not contain %, which SLURM replaces"
        found.append(Problem("config.SLURM.LOG_FOLDER", repr(slurm.LOG_FOLDER), must, "Name another folder."))
    return found


def setup(cfg: RunConfig, host: Host) -> list[Problem]:
    """SETUP is shell, and nothing but shell."""
    must = "must be shell commands, not options of sbatch"
    fix = "Put options into config.SLURM.ADDITIONAL_PARAMETERS."
    return [
        Problem("config.SLURM.SETUP", repr(command), must, fix)
        for command in cfg.SLURM.SETUP
        if re.search(r"^\s*#\s*SBATCH", command, re.MULTILINE)
    ]


def additional(cfg: RunConfig, host: Host) -> Iterator[Problem]:
    """Further options are well formed and are not those that other keys decide."""
    for name, value in cfg.SLURM.ADDITIONAL_PARAMETERS.items():
        option, key = str(name).replace("_", "-"), f"config.SLURM.ADDITIONAL_PARAMETERS.{name}"
        if not _OPTION.fullmatch(option):
            fix = "Write it without leading dashes, such as exclude."
            yield Problem("config.SLURM.ADDITIONAL_PARAMETERS", repr(name), "must be a long option of sbatch", fix)
        elif option in _DECIDED:
            yield Problem(key, repr(value), "is decided by another key", f"Use {_DECIDED[option]}.")
        elif not isinstance(value, (str, int, float, bool)):
            yield Problem(key, repr(value), "must be a string, a number or true", "Write one value.")
        elif value is False:
            yield Problem(key, "False", "must be true for an option without a value", "Leave it out to turn it off.")
        elif is_unsafe(str(value)):
            yield _one_line(key, str(value))


def numbers(cfg: RunConfig, host: Host) -> list[Problem]:
    """There is time to run, and to save before it ends."""
    slurm = cfg.SLURM
    found = []
    minutes = 60 * slurm.TIME_HOURS + slurm.TIME_MINUTES
    if minutes < 1:
        fix = "Set config.SLURM.TIME_HOURS or config.SLURM.TIME_MINUTES."
        found.append(Problem("config.SLURM.TIME_HOURS", "0", "must leave time to run", fix))
    elif 60 * minutes <= slurm.SIGNAL_DELAY_S:
        must = f"must be less than the time limit, {60 * minutes} s"
        fix = "Lower it, or raise config.SLURM.TIME_HOURS or TIME_MINUTES."
        found.append(Problem("config.SLURM.SIGNAL_DELAY_S", str(slurm.SIGNAL_DELAY_S), must, fix))
    return found


def all_of_it(cfg: RunConfig, host: Host) -> list[Problem]:
    """All rules of this file, where a job is submitted."""
    if not cfg.SLURM.USE_SLURM:
        return []
    return [*texts(cfg, host), *setup(cfg, host), *additional(cfg, host), *numbers(cfg, host)]


def is_unsafe(value: object) -> bool:
    """Whether a text has line breaks or other control characters, which could end a line of an sbatch script."""
    return isinstance(value, str) and any(
        ord(letter) < 32 or ord(letter) == 127 or letter in "\u0085\u2028\u2029" for letter in value
    )


def _one_line(key: str, value: str) -> Problem:
    must = "must be one line of printable text: the next line would be read as an option or a command"
    return Problem(key, repr(value), must, "Remove the line breaks.")


RULES = (all_of_it,)
