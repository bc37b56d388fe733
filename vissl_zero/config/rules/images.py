"""Is there anything to train on: folders are listed as far as needed, no image is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vissl_zero.config.blocks.data import Split
from vissl_zero.config.derive.placement import micro_batch, ranks
from vissl_zero.config.host import Host
from vissl_zero.config.rules.data import splits
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem, did_you_mean

# As the data room reads them; a test holds the two together.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
NUM_DIGITS = {"TRAIN": 1_437, "TEST": 360}
_MAX_DEPTH = 32


def paths(cfg: RunConfig, host: Host) -> list[Problem]:
    """A disk_folder has folders that exist and hold images."""
    found: list[Problem] = []
    for name, split in splits(cfg).items():
        key = f"config.DATA.{name}.DATA_PATHS"
        if split.DATA_SOURCES != ["disk_folder"]:
            continue
        if not split.DATA_PATHS:
            fix = f"Write {key}=[/path/to/images]."
            found.append(Problem(key, "[]", "must name a folder with images", fix))
        found += [problem for path in split.DATA_PATHS if (problem := _path_problem(key, Path(path)))]
    return found


def _path_problem(key: str, path: Path) -> Problem | None:
    if not path.exists():
        return Problem(key, repr(str(path)), "must name a folder that exists", _nearest(path))
    if not path.is_dir():
        fix = f"Name the folder that holds it: {path.parent}."
        return Problem(key, repr(str(path)), "must name a folder, not a file", fix)
    try:
        is_empty = next(image_files(path), None) is None
    except OSError as error:
        fix = f"Make it readable ({error.strerror}: {error.filename})."
        return Problem(key, repr(str(path)), "must name a folder that can be listed", fix)
    if is_empty:
        fix = f"Put images there ({', '.join(EXTENSIONS)}), or name another folder."
        return Problem(key, repr(str(path)), "must name a folder that holds images", fix)
    return None


def _nearest(path: Path) -> str:
    existing = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    missing = path.absolute().relative_to(existing).parts[0]
    try:
        hint = did_you_mean(missing, sorted(entry.name for entry in existing.iterdir()))
    except OSError:
        hint = ""
    return f"{existing} exists, {missing!r} in it does not.{hint}"


def image_files(folder: str | os.PathLike[str], depth: int = 0) -> Iterator[str]:
    """Paths of the images in a folder and below it, hidden ones left out, in no order; lists as it goes."""
    if depth > _MAX_DEPTH:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.lower().endswith(EXTENSIONS) and entry.is_file():
                yield entry.path
            elif entry.is_dir():
                yield from image_files(entry.path, depth + 1)


def num_images(name: str, split: Split, most: int) -> int | None:
    """Images of a split, counted up to ``most``; None if that cannot be told without opening the source."""
    source = split.DATA_SOURCES[0] if len(split.DATA_SOURCES) == 1 else ""
    if source == "digits":
        count = NUM_DIGITS[name]
    elif source == "disk_folder":
        try:
            count = sum(1 for path in split.DATA_PATHS for _ in islice(image_files(path), most))
        except OSError:
            return None
    else:
        count = split.DATA_LIMIT if source == "synthetic" and split.DATA_LIMIT > 0 else most
    return min(count, split.DATA_LIMIT) if split.DATA_LIMIT > 0 else count


def enough(cfg: RunConfig, host: Host) -> Problem | None:
    """Every process has an image, and an epoch a step."""
    train, world_size = cfg.DATA.TRAIN, ranks(cfg, host)[0]
    step = micro_batch(cfg, host) * max(1, cfg.ZERO.gradient_accumulation_steps)
    count = num_images("TRAIN", train, max(world_size, step))
    if not count:
        return None  # no path, an unknown source: other rules speak
    if count < world_size:
        must = f"must be at most the number of images, {count}"
        key = "config.DISTRIBUTED.NUM_PROC_PER_NODE"
        return Problem(key, f"{world_size} processes", must, f"Lower it to {count} or less, or add images.")
    if train.DROP_LAST and count < step:
        must = f"drops every image: the {count} there are make less than one step of {step}"
        fix = "Set it to False, or lower config.DATA.TRAIN.BATCHSIZE_PER_REPLICA."
        return Problem("config.DATA.TRAIN.DROP_LAST", "True", must, fix)
    return None


RULES = (paths, enough)
