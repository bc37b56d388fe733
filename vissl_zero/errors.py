"""The errors a user can cause, each with a sentence that says what to do.

Whatever is raised from here is printed without a traceback and ends the program with exit code 2. Anything else is a
defect of ours (or of a plugin) and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

_secrets: dict[str, str] = {}
_LEAST_SECRET = 4  # characters: to mask a shorter value would make every message unreadable


def keep_secret(value: str, written: str) -> None:
    """Have ``masked`` put ``written``, such as ``${oc.env:TOKEN}``, in the place of a value of the environment."""
    # A number, such as a port or a rank, would be masked wherever the same digits occur as a word, in counts and steps
    # too.
    if len(value) >= _LEAST_SECRET and not value.isdecimal():
        _secrets[value] = written


def masked(text: str) -> str:
    """Mask the values that ``keep_secret`` was called with: whole words, the longest value first."""
    # The longest first: where a value is a part of another, masking it first would leave the rest of the other
    # readable.
    for value in sorted(_secrets, key=len, reverse=True):
        if value in text:
            written = _secrets[value].replace("\\", r"\\")  # not a reference to a group
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", written, text)
    return text


def printable(value: object) -> str:
    """Make a value text that is safe to print.

    Control characters, which could rewrite a terminal, become escapes; values of the environment are masked.
    """
    # Line breaks stay: a message with several problems has one on each line.
    return masked("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(value)))


class VisslZeroError(Exception):
    """Root of every error whose message is written for the user; ends the program with exit code 2.

    Messages quote names and texts from unchecked files, so they are made printable here.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(VisslZeroError):
    """The configuration is wrong. Carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem] | str):
        self.problems: tuple[Problem, ...] = () if isinstance(problems, str) else tuple(problems)
        super().__init__(problems if isinstance(problems, str) else "\n".join(str(p) for p in self.problems))


class RegistryError(ConfigError):
    """A component name is unknown, or registered twice."""


class DataError(VisslZeroError):
    """A data path is missing, empty, unreadable or holds a file that cannot be used."""


class LaunchError(VisslZeroError):
    """The processes of a run could not be started, or one of them died."""


class ProcessLostError(Exception):
    """A process that this one needs was lost.

    The user gets one sentence, but the exit code is 1 and the run may restart. Not a ``VisslZeroError``: nothing is
    wrong with the input.

    Attributes:
        was_killed: by SIGKILL, as the kernel does where memory is short.
    """

    def __init__(self, text: str, was_killed: bool = False):
        super().__init__(text)
        self.was_killed = was_killed


class CheckpointError(VisslZeroError):
    """A checkpoint or weight file is missing, damaged or does not fit."""


class OutOfMemoryError(VisslZeroError):
    """Training ran out of memory; the message has the bytes by kind and the cheapest switch that would help."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: *key - must be - got - do this*.

    Attributes:
        key: full key path as the user writes it, such as ``config.MODEL.SHARDED_DDP_SETUP.USE_SDP``; empty if no key
            is to blame, and ``must`` says what is wrong.
        got: the value found there, as YAML would print it; empty if the key is missing.
        must: what is allowed.
        fix: what to write instead.
    """

    key: str
    got: str
    must: str
    fix: str

    def __str__(self) -> str:
        got = f" (got {self.got})" if self.got else ""
        return f"{self.key}{': ' if self.key else ''}{self.must}{got}. {self.fix}"


def problems_of(error: VisslZeroError) -> tuple[Problem, ...]:
    """Return the problems that an error carries, or its message as one."""
    if isinstance(error, ConfigError) and error.problems:
        return error.problems
    what, _, fix = str(error).partition(". ")
    return (Problem("", "", what.removesuffix("."), fix),)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: ``"1 image"``, ``"2,000 images"``, ``"2 classes"``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Write ``" Did you mean 'a', 'b'?"`` for the closest known names in any case, or an empty string."""
    by_spelling: dict[str, list[str]] = {}
    for one in known:
        by_spelling.setdefault(one.lower(), []).append(one)
    matches = [one for near in get_close_matches(name.lower(), by_spelling, cutoff=0.5) for one in by_spelling[near]]
    return f" Did you mean {', '.join(repr(m) for m in matches)}?" if matches else ""
