"""Facebook's own stores and clusters in VISSL's recipes: told apart, answered with the public file, replaced."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from vissl_zero.config.vissl import PUBLIC_FILES

_PATH = re.compile(
    r"(?:memcache_)?manifold://[^\s\"',\]}]*|(?<![\w./-])/(?:checkpoint|datasets\d\d|private/home)/[^\s\"',\]}]*"
)
_TO_SPECIFY = re.compile(r"(?<=PARAMS_FILE: )[\"'](?:specify|please)[^\"']*[\"']")
_EVERSTORE = re.compile(r"(?P<key>DATA_SOURCES|LABEL_SOURCES): *\[ *[\"']?everstore[\"']? *\]")


def public_equivalent(path: str) -> str:
    """Where a file of an internal store is public; empty if ``path`` is not internal or nothing is known."""
    is_internal = _PATH.match(path) is not None
    return next((url for part, url in PUBLIC_FILES.items() if is_internal and part in path), "")


@dataclass(frozen=True)
class Replacement:
    """One line that was changed: its number from 1, what stood there and what stands there now."""

    line: int
    was: str
    now: str


def with_public_paths(text: str) -> tuple[str, list[Replacement]]:
    """A recipe's text with internal paths and sources replaced, a comment at the end of each such line.

    Args:
        text: YAML, as VISSL writes it: one value a line, or a list within a line.
    """
    lines, found = [], []
    for number, line in enumerate(text.split("\n"), 1):
        code, mark, comment = line.partition(" #")
        fixed, why = _fixed(code)
        if why:
            found.append(Replacement(number, code.strip(), fixed.strip()))
            line = f"{fixed.rstrip()}  # vissl-zero: {'; '.join(why)}{mark}{comment}"
        lines.append(line)
    return "\n".join(lines), found


def _fixed(code: str) -> tuple[str, list[str]]:
    """A line without internal paths, and what to say about each."""
    if code.lstrip().startswith("#"):
        return code, []
    why: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        public = public_equivalent(match[0])
        why.append(f"was {match[0]}" + (f", public: {public}" if public else ", not public: name your own file"))
        return f"/path/to/{PurePosixPath(match[0].split('://')[-1]).name or 'data'}"

    code = _PATH.sub(replaced, code)
    if _TO_SPECIFY.search(code):
        code = _TO_SPECIFY.sub("/path/to/weights.torch", code)
        why.append("name the initial weights")
    if found := _EVERSTORE.search(code):
        code = _EVERSTORE.sub(r"\g<key>: [disk_filelist]", code)
        what = "a list of images" if found["key"] == "DATA_SOURCES" else "a list of labels"
        why.append(f"everstore is Facebook's; name {what} (.npy) or write disk_folder")
    return code, why
