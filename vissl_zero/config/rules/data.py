"""Sources, labels, transforms, batch sizes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from vissl_zero.config.blocks.data import Split
from vissl_zero.config.host import Host
from vissl_zero.config.rules.limits import at_least, one_of
from vissl_zero.config.run import RunConfig
from vissl_zero.errors import Problem, did_you_mean
from vissl_zero.registry import DATA_SOURCES, TRANSFORMS


def splits(cfg: RunConfig) -> dict[str, Split]:
    """TRAIN, and TEST where it has a source."""
    return {"TRAIN": cfg.DATA.TRAIN} | ({"TEST": cfg.DATA.TEST} if cfg.DATA.TEST.DATA_SOURCES else {})


def sources(cfg: RunConfig, host: Host) -> list[Problem]:
    """Each split names one known source."""
    found: list[Problem] = []
    for name, split in splits(cfg).items():
        key, names = f"config.DATA.{name}.DATA_SOURCES", list(dict.fromkeys(split.DATA_SOURCES))
        if len(names) != 1:
            fix = f"Known: {', '.join(DATA_SOURCES)}. Several DATA_PATHS of one source are joined."
            found.append(Problem(key, str(names), "must name one data source", fix))
        elif names[0] not in DATA_SOURCES:
            found.append(replace(DATA_SOURCES.unknown(names[0]), key=key))
    return found


def labels(cfg: RunConfig, host: Host) -> list[Problem]:
    """Labels come from the folders or from files that exist."""
    found: list[Problem] = []
    for name, split in splits(cfg).items():
        key = f"DATA.{name}"
        found += one_of(f"{key}.LABEL_TYPE", split.LABEL_TYPE, ("standard", "sample_index", "zero"))
        for source in split.LABEL_SOURCES:
            found += one_of(f"{key}.LABEL_SOURCES", source, ("disk_folder", "disk_filelist", "synthetic"))
        if "disk_filelist" in split.LABEL_SOURCES and not split.LABEL_PATHS:
            fix = f"Write config.{key}.LABEL_PATHS=[<labels.npy>]."
            found.append(Problem(f"config.{key}.LABEL_PATHS", "[]", "must name the files of labels", fix))
        for path in split.LABEL_PATHS:
            if not Path(path).is_file():
                fix = "Correct the path."
                found.append(Problem(f"config.{key}.LABEL_PATHS", repr(path), "must name files that exist", fix))
    return found


def sizes(cfg: RunConfig, host: Host) -> list[Problem]:
    """Batches hold images, workers are counted from 0."""
    found = at_least("DATA.NUM_DATALOADER_WORKERS", cfg.DATA.NUM_DATALOADER_WORKERS, 0)
    for name, split in splits(cfg).items():
        found += at_least(f"DATA.{name}.BATCHSIZE_PER_REPLICA", split.BATCHSIZE_PER_REPLICA, 1)
        found += at_least(f"DATA.{name}.DEFAULT_GRAY_IMG_SIZE", split.DEFAULT_GRAY_IMG_SIZE, 1)
        if split.DATA_LIMIT == 0 or split.DATA_LIMIT < -1:
            must = "must be -1 (all images) or a number of images"
            found.append(Problem(f"config.DATA.{name}.DATA_LIMIT", str(split.DATA_LIMIT), must, "Write -1 for all."))
    return found


def broken_images(cfg: RunConfig, host: Host) -> list[Problem]:
    """What to do about a broken image is one of two things."""
    return one_of("DATA.ON_BROKEN_IMAGE", cfg.DATA.ON_BROKEN_IMAGE, ("raise", "skip"))


def transforms(cfg: RunConfig, host: Host) -> list[Problem]:
    """Every transform is ours, torchvision's or registered."""
    found: list[Problem] = []
    for name, split in splits(cfg).items():
        found += _unknown_transforms(split.TRANSFORMS, f"config.DATA.{name}.TRANSFORMS")
    return found


def _unknown_transforms(entries: list[object], key: str) -> list[Problem]:
    found: list[Problem] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or "name" not in entry:
            found.append(Problem(key, str(entry), "must be a list of {name: ..., ...}", "Add the transform's name."))
            continue
        name = str(entry["name"])
        if name not in TRANSFORMS and name not in torchvision_names():
            known = [*TRANSFORMS, *torchvision_names()]
            fix = (
                f"Known: {', '.join(TRANSFORMS)} and the classes of torchvision.transforms.{did_you_mean(name, known)}"
            )
            found.append(Problem(key, repr(name), "must name known transforms", fix))
        for value in entry.values():
            if isinstance(value, list) and value and all(isinstance(v, Mapping) and "name" in v for v in value):
                found += _unknown_transforms(list(value), key)
    return found


@cache
def torchvision_names() -> frozenset[str]:
    """Transforms that torchvision exports, read from its source: importing it would import torch."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return frozenset()
    tree = ast.parse((Path(spec.origin).parent / "transforms" / "transforms.py").read_text())
    for statement in tree.body:
        is_all = isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__"
        if is_all:
            return frozenset(ast.literal_eval(statement.value))  # type: ignore[attr-defined]
    return frozenset()


RULES = (sources, labels, sizes, broken_images, transforms)
