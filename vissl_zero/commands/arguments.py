"""The argument parser of all commands that take flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from vissl_zero.errors import ConfigError, DataError, did_you_mean


def output(text: str) -> Path:
    """Parse the path of a command's output, for ``add_argument(type=output)``.

    Raises:
        ConfigError: the path cannot be written. This is raised before the command computes anything.
    """
    path = Path(text).expanduser()
    # An empty path is the current folder to ``Path``.
    if not text:
        raise ConfigError("What is written must have a path, and it is empty. A variable of your shell may be unset.")
    if file := next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None):
        raise ConfigError(f"{text}: must be in a folder, and {file} is a file. Name another place.")
    return path


def output_file(text: str) -> Path:
    """Parse the path of a command's output file; see ``output``. Folders are refused too."""
    if (path := output(text)).is_dir():
        raise ConfigError(f"{text}: must be a file, and is a folder. Name a file in it.")
    return path


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Refuse an output that cannot be written, for lack of room or of a right. A context."""
    try:
        yield
    except OSError as error:
        fix = "Name another place, or make room."
        raise DataError(f"--out {out}: cannot be written ({error.strerror or error}). {fix}") from error


def config_dirs(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off --config-dir; return the other words, and the folders it names.

    Raises:
        ConfigError: one of them does not exist.
    """
    rest, folders = list[str](), list[str]()
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config-dir=") else [word])]
    while words:
        word = words.pop(0)
        if word in ("--config-dir", "-cd"):
            if not words or not Path(words[0]).is_dir():
                got = f" (got {words[0]!r})" if words else ""
                raise ConfigError(f"--config-dir: must name a folder that exists{got}. Correct the path.")
            folders.append(words.pop(0))
        else:
            rest.append(word)
    return rest, folders


class CommandParser(argparse.ArgumentParser):
    """A parser of a command's arguments, whose errors are one sentence with the closest flag."""

    def __init__(self, **options: Any):
        # No abbreviations: the next flag with the same beginning would break a script that uses one.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse an unknown flag by its name, before argparse reports what else is missing; argparse calls this."""
        flags = set(self._option_string_actions)
        unknown = [word for word in args or () if word.startswith("--") and word.partition("=")[0] not in flags]
        # A parser with subcommands does not know the flags of these.
        if unknown and self._subparsers is None:
            flag = unknown[0].partition("=")[0]
            self.error(f"{flag} is not a flag.{did_you_mean(flag, flags)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ``ConfigError``; argparse calls this."""
        end = "" if message.endswith((".", "?")) else "."
        raise ConfigError(f"{self.prog}: {message}{end} See {self.prog} --help.")
