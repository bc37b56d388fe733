"""VISSL's dataset catalog: the paths on this machine of data sets that recipes name (``DATASET_NAMES``).

A catalog is a JSON file in VISSL's format::

    {"imagenet1k_folder": {"train": ["/imagenet/train", "<lbl_path>"], "val": ["/imagenet/val", "<lbl_path>"]}}

The first path of a split is DATA_PATHS, the second LABEL_PATHS. A value in angle brackets counts as missing.

This module also replaces paths of Facebook's internal stores and clusters by public files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vissl_zero.atomic import read_regular
from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import DATA_SOURCES
from vissl_zero.vissl.keys import PUBLIC_FILES

_VARIABLE = "VISSL_ZERO_CATALOG"
FILE = "dataset_catalog.json"
SPLITS = {"TRAIN": "train", "TEST": "val"}
# Sources that need no files: they generate their images, or a library brings them.
BUILT_IN = ("digits", "digit_scenes", "synthetic")
# Facebook's internal store of images. Elsewhere the same data sets are folders or lists of files.
EVERSTORE = "everstore"
# Sources of which a catalog may name the paths. Those of a plugin are not among them: it resolves its own names.
_OF_PATHS = {*DATA_SOURCES.builtin(), EVERSTORE} - {*BUILT_IN}
_LISTS = (".npy", ".txt")
_MAX_BYTES = 2**26
# In the header of a .npy file: bytes, or other numbers in 3 dimensions or more. Fewer are labels.
_PIXELS = re.compile(rb"'descr': '(?:\|u1'|[<>|][fiu]\d+'.*'shape': \(\d+, \d+, \d)")
# Extension of a file -> the source that reads it.
_FILES = {
    ".csv": "manifest",
    ".jsonl": "manifest",
    ".ndjson": "manifest",
    ".txt": "disk_filelist",
    ".parquet": "parquet",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}
READ_FILES = (*_FILES, ".npy", ".tar", ".arrow")  # extensions of files that DATA_PATHS may name


def use_own_images(data: Data, chosen: Collection[str]) -> list[str]:
    """Set the source of splits with DATA_PATHS, in place. Return notes to print once.

    If TRAIN has the user's images, a TEST split of digits is removed: part of TRAIN's images is used for evaluation.

    Args:
        data: the composed block.
        chosen: keys under ``config:`` that the command line sets. A source that is set there is kept.
    """
    for name in ("TRAIN", "TEST"):
        split = getattr(data, name)
        # A recipe's digits stand in for images, and disk_folder is only the usual format. Other sources are meant.
        is_free = split.DATA_SOURCES in ([], ["digits"], ["disk_folder"]) and f"DATA.{name}.DATA_SOURCES" not in chosen
        if split.DATA_PATHS and is_free:
            split.DATA_SOURCES = [source_of(split.DATA_PATHS)]
    is_own = data.TRAIN.DATA_SOURCES and data.TRAIN.DATA_SOURCES[0] not in BUILT_IN
    if is_own and data.TEST.DATA_SOURCES == ["digits"] and "DATA.TEST.DATA_SOURCES" not in chosen:
        data.TEST.DATA_SOURCES = []
        fix = "config.DATA.TEST.DATA_PATHS=<folder> names others."
        return [f"config.DATA.TEST: part of the training images is evaluated on, not the recipe's digits. {fix}"]
    return []


def source_of(paths: Sequence[str]) -> str:
    """Return the source for ``paths``: disk_folder, unless all of them have the same packed format."""
    formats = {_format_of(Path(path).expanduser()) for path in paths}
    return formats.pop() if len(formats) == 1 else "disk_folder"


def _format_of(path: Path) -> str:
    try:
        if path.is_file() and (form := _FILES.get(path.suffix.lower())):
            return form
        if path.suffix == ".npy" and path.is_file():
            with path.open("rb") as file:  # the header has the dtype and the shape
                return "npy" if _PIXELS.search(file.read(256)) else "disk_filelist"
        names = {path.name} if path.is_file() else {entry.name for entry in path.iterdir()}
    except (OSError, ValueError):
        return "disk_folder"
    if "data.mdb" in names:
        return "lmdb"
    if "dataset_dict.json" in names or any(name.endswith(".arrow") for name in names):
        return "arrow"
    if any(name.endswith(".parquet") for name in names) or ("data" in names and any(path.glob("data/*.parquet"))):
        return "parquet"
    return "webdataset" if any(name.endswith(".tar") for name in names) else "disk_folder"


def find_catalog(recipe_folders: Iterable[Path], environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the catalog to use: VISSL_ZERO_CATALOG, else one next to the recipes, else the one in ``~/.vissl_zero``.

    Args:
        recipe_folders: folders with ``config/``, in the order in which recipes are searched.
        environment: environment of the process.
    Raises:
        ConfigError: VISSL_ZERO_CATALOG does not name a file.
    """
    if named := environment.get(_VARIABLE):
        path = Path(named).expanduser()
        if not path.is_file():
            raise ConfigError([Problem(_VARIABLE, repr(named), "must name a dataset catalog", "Correct the path.")])
        return path
    places = [folder / part / FILE for folder in recipe_folders for part in ("config", "")]
    return next((path for path in (*places, _home_catalog()) if path.is_file()), None)


def _home_catalog() -> Path:
    """Return the path of the catalog in the user's home folder."""
    return Path.home() / ".vissl_zero" / FILE


def use_catalog(data: Data, catalog: Path | None) -> list[str]:
    """Fill in DATA_PATHS and LABEL_PATHS of splits that name data sets but no paths. Return notes to print once.

    Names that are not in the catalog stay without paths; ``missing`` reports them.

    Raises:
        ConfigError: the catalog cannot be read.
    """
    wanting = {name: split for name in SPLITS if _wants_paths(split := getattr(data, name))}
    entries, notes = _read_catalog(catalog) if catalog and wanting else {}, list[str]()
    for name, split in wanting.items():
        paths = [_paths(entries, dataset, SPLITS[name]) for dataset in split.DATASET_NAMES]
        # All or none: with paths for some, the other data sets would be left out silently.
        if not all(images for images, _ in paths):
            continue
        split.DATA_PATHS = [images for images, _ in paths]
        if "disk_filelist" in split.LABEL_SOURCES and not split.LABEL_PATHS:
            split.LABEL_PATHS = [labels for _, labels in paths if labels]
        names = ", ".join(split.DATASET_NAMES)
        notes.append(f"config.DATA.{name}: {names} is read from {', '.join(split.DATA_PATHS)} ({catalog}).")
    return notes + [note for name in SPLITS for note in _outside_facebook(name, getattr(data, name))]


def _outside_facebook(name: str, split: Split) -> list[str]:
    """Replace everstore by the source of the catalog's paths, in place. Return notes to print."""
    if split.DATA_SOURCES != [EVERSTORE] or not split.DATA_PATHS:
        return []
    source = "disk_filelist" if split.DATA_PATHS[0].endswith(_LISTS) else "disk_folder"
    split.DATA_SOURCES = [source]
    split.LABEL_SOURCES = [source if label == EVERSTORE else label for label in split.LABEL_SOURCES]
    return [f"config.DATA.{name}.DATA_SOURCES: everstore is Facebook's; {source} reads {', '.join(split.DATA_PATHS)}."]


def missing(data: Data) -> list[Problem]:
    """Return a problem for each split whose data sets are not in a catalog, with the line to add."""
    problems = []
    for name in SPLITS:
        split = getattr(data, name)
        if not _wants_paths(split):
            continue
        line = json.dumps({split.DATASET_NAMES[0]: {part: ["/path/to/images", "<labels>"] for part in SPLITS.values()}})
        fix = f"Add to {_home_catalog()} (or to the file that {_VARIABLE} names): {line}"
        paths = f"or write config.DATA.{name}.DATA_PATHS=[/path/to/images]."
        must = "must be in a dataset catalog, because no DATA_PATHS are given"
        problems.append(Problem(f"config.DATA.{name}.DATASET_NAMES", str(split.DATASET_NAMES), must, f"{fix}, {paths}"))
    return problems


def _wants_paths(split: Split) -> bool:
    reads_files = any(source in _OF_PATHS for source in split.DATA_SOURCES)
    return bool(split.DATASET_NAMES) and reads_files and not split.DATA_PATHS


def _read_catalog(path: Path) -> dict[str, Any]:
    """Return the entries of a catalog. Raises ConfigError if it is not a JSON object of objects."""
    must = 'must be JSON: {"<name>": {"train": [<images>, <labels>], "val": [...]}}'
    try:
        entries = json.loads(read_regular(path, _MAX_BYTES, follow_links=True))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Problem(str(path), str(error), must, "Correct the file.")]) from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError([Problem(str(path), type(entries).__name__, must, "Correct the file.")])
    return entries


def _paths(entries: Mapping[str, Any], dataset: str, part: str) -> tuple[str, str]:
    """Return (images, labels) of one split; empty strings if the catalog does not have them."""
    values: Sequence[Any] = entries.get(dataset, {}).get(part) or ()
    # ``missing`` prints a line with ``<labels>`` in it, which may be pasted as it is.
    filled = [v if isinstance(v, str) and not (v.startswith("<") and v.endswith(">")) else "" for v in values]
    images, labels, *_ = [*filled, "", ""]
    return images, labels


_PATH = re.compile(
    r"(?:memcache_)?manifold://[^\s\"',\]}]*|(?<![\w./-])/(?:checkpoint|datasets\d\d|private/home)/[^\s\"',\]}]*"
)
_TO_SPECIFY = re.compile(r"(?<=PARAMS_FILE: )[\"'](?:specify|please)[^\"']*[\"']")
_EVERSTORE = re.compile(r"(?P<key>DATA_SOURCES|LABEL_SOURCES): *\[ *[\"']?everstore[\"']? *\]")


def public_equivalent(path: str) -> str:
    """Return the public URL of a file in an internal store; empty if it is not internal, or no URL is known."""
    is_internal = _PATH.match(path) is not None
    return next((url for part, url in PUBLIC_FILES.items() if is_internal and part in path), "")


@dataclass(frozen=True)
class Replacement:
    """One changed line: its number from 1, the old and the new text."""

    line: int
    was: str
    now: str


def with_public_paths(text: str) -> tuple[str, list[Replacement]]:
    """Return a recipe's text with internal paths and sources replaced, a comment on each such line, and the changes.

    Args:
        text: YAML in VISSL's style: one value per line, or a list within a line.
    """
    lines, replacements = [], []
    for number, line in enumerate(text.split("\n"), 1):
        # Comments stay as they are, whatever they name.
        code, mark, comment = line.partition(" #")
        fixed, why = _fixed(code)
        if why:
            replacements.append(Replacement(number, code.strip(), fixed.strip()))
            line = f"{fixed.rstrip()}  # vissl-zero: {'; '.join(why)}{mark}{comment}"
        lines.append(line)
    return "\n".join(lines), replacements


def _fixed(code: str) -> tuple[str, list[str]]:
    """Return a line with internal paths and sources replaced, and a reason for each replacement."""
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
    if setting := _EVERSTORE.search(code):
        code = _EVERSTORE.sub(r"\g<key>: [disk_filelist]", code)
        what = "a list of images" if setting["key"] == "DATA_SOURCES" else "a list of labels"
        why.append(f"everstore is Facebook's; name {what} (.npy) or write disk_folder")
    return code, why
