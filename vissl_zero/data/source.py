"""Sources of images and labels: the ``Source`` of every kind of data set, and the source of a split.

Labels may come from a separate ``.npy`` file of integers (VISSL's ``LABEL_SOURCES: [disk_filelist]``): one class per
image, or a row of several labels per image, as VISSL's files of VOC07.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from vissl_zero.config.blocks.data import Data, DataLimitSampling, Split, split_of
from vissl_zero.config.components import typed_options
from vissl_zero.config.run_config import RunConfig
from vissl_zero.data.decode import Decoder, read_array
from vissl_zero.errors import ConfigError, DataError, Problem, counted
from vissl_zero.registry import DATA_SOURCES, require_interface

UNLABELLED = -1  # in arrays of labels
_MOST_NAMED = 10


class Source(Protocol):
    """Images by index, in an order that is the same on every machine. Picklable: loader workers get a copy."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, by label; empty without labels. May be a plain attribute."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image(self, index: int) -> Image.Image:
        """Read an RGB image. Raises BrokenImageError when it cannot be decoded."""

    def label(self, index: int) -> int | None:
        """Return the class of an image, or None without labels."""

    def name(self, index: int) -> str:
        """Return an image's name for messages: its path, if it has one."""


class EncodedSource:
    """A source of image files. A subclass defines ``encoded``, which reads a file, and the rest of ``Source``.

    The fast backend decodes the file itself, at no larger size than needed.
    """

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def encoded(self, index: int) -> bytes | Image.Image:
        """Read the file of an image without decoding it; an RGB image if there is no file. Raises BrokenImageError."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        """Read and decode the file. Raises BrokenImageError."""
        encoded = self.encoded(index)
        return self.decoder.image(encoded, self.name(index)) if isinstance(encoded, bytes) else encoded


def encoded_image(source: Source, index: int) -> bytes | Image.Image:
    """Return the content of an image's file if ``source`` has files, else the image. Raises BrokenImageError."""
    read = getattr(source, "encoded", None)
    return source.image(index) if read is None else read(index)


def masks_of(source: Source) -> Callable[[int], Image.Image] | None:
    """Return the function that reads the mask of an image: mode "L", the class of each pixel, 255 where ignored.

    None if the source has no method ``mask(index)``.
    """
    return _of_index(source, "mask")


def array_of(source: Source) -> Callable[[int], np.ndarray] | None:
    """Return the function that copies the array of an image; None if the source has no method ``array(index)``."""
    return _of_index(source, "array")


def checks_of(source: Source) -> Callable[[int], None] | None:
    """Return the function that checks an image and may raise BrokenImageError; None without ``check(index)``."""
    return _of_index(source, "check")


def _of_index(source: Source, name: str) -> Callable[[int], Any] | None:
    if not isinstance(source, _Derived):
        return getattr(source, name, None)
    of_whole = _of_index(source.source, name)
    return None if of_whole is None else lambda index: of_whole(source._at(index))


@dataclass(frozen=True)
class SourceRequest:
    """A request for a source: the first argument of every component in ``DATA_SOURCES``.

    Attributes:
        split: "TRAIN" or "TEST".
        paths: DATA_PATHS, possibly none.
        limit: DATA_LIMIT, -1 for all. Sources that generate images generate this many; others may ignore it, because
            ``build_source`` draws the subset.
        image_size: DEFAULT_GRAY_IMG_SIZE, the side in pixels of generated images.
        seed: SEED_VALUE.
        class_names: classes that number the labels (for TEST, those of TRAIN); empty: the source's own.
        dataset_names: DATASET_NAMES, for a source of named data sets.
        path_prefix: REMOVE_IMG_PATH_PREFIX and NEW_IMG_PATH_PREFIX, for a source that reads paths from a list.
        decoder: decoder of the DATA block.
        named: what names the paths, for messages; empty: the key of the configuration.
    """

    split: str
    paths: tuple[str, ...] = ()
    limit: int = -1
    image_size: int = 224
    seed: int = 0
    class_names: tuple[str, ...] = ()
    dataset_names: tuple[str, ...] = ()
    path_prefix: tuple[str, str] = ("", "")
    decoder: Decoder = field(default_factory=Decoder)
    named: str = ""

    @property
    def key(self) -> str:
        """Return what names the paths, for messages."""
        return self.named or f"config.DATA.{self.split}.DATA_PATHS"


@dataclass(frozen=True)
class _Derived:
    """A source derived from another; image i is image ``_at(i)`` of the other."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def _at(self, index: int) -> int:
        return index

    def image(self, index: int) -> Image.Image:
        return self.source.image(self._at(index))

    def encoded(self, index: int) -> bytes | Image.Image:
        return encoded_image(self.source, self._at(index))

    def name(self, index: int) -> str:
        return self.source.name(self._at(index))


@dataclass(frozen=True)
class Subset(_Derived):
    """Some images of a source, by index."""

    indices: tuple[int, ...]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names of the whole source."""
        return self.source.class_names

    def __len__(self) -> int:
        return len(self.indices)

    def _at(self, index: int) -> int:
        return self.indices[index]

    def label(self, index: int) -> int | None:
        return self.source.label(self.indices[index])


def build_source(data_cfg: Data, split: str, seed: int, class_names: Sequence[str] = ()) -> Source:
    """Build the source of one split, with DATA_LIMIT and label files applied.

    Args:
        data_cfg: the resolved DATA block.
        split: "TRAIN" or "TEST".
        seed: SEED_VALUE; only sources that generate images use it.
        class_names: the classes of TRAIN when building TEST, so that a class has the same number in both.
    Raises:
        ConfigError: no source or several different sources are named, or a source's keys are wrong.
        DataError: paths are missing, empty or unreadable.
    Cost: lists the folders; no image is read.
    """
    cfg = split_of(data_cfg, split)
    component = DATA_SOURCES.get(_source_name(cfg, split))
    request = SourceRequest(
        split=split,
        paths=tuple(cfg.DATA_PATHS),
        limit=cfg.DATA_LIMIT,
        image_size=cfg.DEFAULT_GRAY_IMG_SIZE,
        seed=seed,
        class_names=tuple(class_names),
        dataset_names=tuple(cfg.DATASET_NAMES),
        path_prefix=(cfg.REMOVE_IMG_PATH_PREFIX, cfg.NEW_IMG_PATH_PREFIX),
        decoder=Decoder.of(data_cfg),
    )
    options = typed_options(component, cfg.SOURCE_PARAMS, f"config.DATA.{split}.SOURCE_PARAMS")
    source: Source = component.build(request, **options)
    meanings = {
        "class_names": "names of the classes, empty without labels",
        "__len__": "number of images",
        "image": "image(index), an RGB PIL image",
        "label": "label(index), an int or None",
        "name": "name(index), what messages call the image",
    }
    # A source of the user's may lack a member, which would show in a worker only, after some batches.
    require_interface(DATA_SOURCES, _source_name(cfg, split), source, members=meanings)
    return _limit(_with_labels(source, cfg, request), request.limit, cfg.DATA_LIMIT_SAMPLING, f"config.DATA.{split}")


def build_eval_sources(data_cfg: Data, seed: int) -> tuple[Source, Source | None]:
    """Build TRAIN's and TEST's sources with the same classes; None for TEST if it names no source."""
    train = build_source(data_cfg, "TRAIN", seed)
    if not data_cfg.TEST.DATA_SOURCES:
        return train, None
    return train, build_source(data_cfg, "TEST", seed, train.class_names)


def splits_to_read(data_cfg: Data, seed: int) -> dict[str, Source]:
    """Return the splits that together have each image once: TRAIN, and TEST if it has images.

    If both have the same configuration, and so the same images: TEST alone.
    """
    train, test = build_eval_sources(data_cfg, seed)
    if test is None:
        return {"TRAIN": train}
    # TEST alone where it stands for TRAIN: a run that only measures has no images of training.
    return {"TEST": test} if data_cfg.TRAIN == data_cfg.TEST else {"TRAIN": train, "TEST": test}


def left_out(source: Source) -> Sequence[str]:
    """Return sentences about files in a source's folders that are not read; empty if the source has none to report."""
    sentences: Sequence[str] = getattr(_whole(source), "left_out", ())
    return sentences


def left_out_of_run(data_cfg: Data, train: Source, seed: int) -> list[str]:
    """Return sentences about files of TRAIN and TEST that are not read, and about TRAIN's classes that TEST lacks.

    Cost: lists TEST's folders.
    """
    notes = [*left_out(train)]
    if data_cfg.TEST.DATA_SOURCES == ["disk_folder"] and data_cfg.TEST.DATA_PATHS != data_cfg.TRAIN.DATA_PATHS:
        test = build_source(data_cfg, "TEST", seed, train.class_names)
        notes += [*left_out(test), *(_lacking(test) if train.class_names else [])]
    return notes


def _lacking(test: Source) -> list[str]:
    """Return a sentence about the classes of TRAIN without images in TEST, or about a TEST without classes."""
    # Asked of the whole: a small DATA_LIMIT may miss classes by chance.
    whole = _whole(test)
    if not whole.class_names:
        return ["config.DATA.TEST.DATA_PATHS has images outside of class folders, so no accuracy on TEST is measured."]
    labels = {whole.label(index) for index in range(len(whole))}
    lost = [name for label, name in enumerate(whole.class_names) if label not in labels]
    if not lost:
        return []
    some = ", ".join(lost[:_MOST_NAMED]) + ", ..." * (len(lost) > _MOST_NAMED)
    what = f"{len(lost)} of TRAIN's {counted(len(whole.class_names), 'class')}"
    return [f"config.DATA.TEST.DATA_PATHS has no images of {what}: {some}. Figures on TEST are of the others."]


def _whole(source: Source) -> Source:
    """Return the source without limits and separate labels."""
    while isinstance(source, _Derived):
        source = source.source
    return source


def label_matrix(source: Source, num_classes: int = 0) -> np.ndarray | None:
    """Build a matrix of the labels of all images; None if an image has no label.

    Args:
        source: the images.
        num_classes: smallest number of columns, for images with one class each.
    Returns:
        (N, C) int8: 1 if an image shows the class, 0 if not, -1 if ignored.
    """
    if isinstance(source, Subset):
        whole = label_matrix(source.source, num_classes)
        return None if whole is None else whole[list(source.indices)]
    if isinstance(source, MultiLabeled):
        return source.matrix
    all_labels = [source.label(index) for index in range(len(source))]
    labels = [label for label in all_labels if label is not None]
    if len(labels) < len(all_labels):
        return None
    return np.eye(max(num_classes, len(source.class_names), 1 + max(labels, default=0)), dtype=np.int8)[labels]


def described_splits(config: RunConfig, is_labeled: bool) -> str:
    """Describe the images of training and of evaluation, for people.

    Args:
        config: configuration of the run.
        is_labeled: whether the images of TRAIN have classes, without which there is no kNN.
    """
    train, test = (described(config.DATA, split) for split in ("TRAIN", "TEST"))
    if not test and not (config.NEAREST_NEIGHBOR.USE_KNN and is_labeled):
        return train
    return f"{train}; measured on {test or 'some of them'}"


def described(data_cfg: Data, split: str) -> str:
    """Describe the images of a split for people, such as ``disk_folder /my/photos``; empty without a source."""
    cfg = split_of(data_cfg, split)
    if not cfg.DATA_SOURCES:
        return ""
    limit = f" ({cfg.DATA_LIMIT:,} of the images)" if cfg.DATA_LIMIT > 0 else ""
    return " ".join([str(cfg.DATA_SOURCES[0]), ", ".join(map(str, cfg.DATA_PATHS))]).strip() + limit


def _source_name(cfg: Split, split: str) -> str:
    names = list(dict.fromkeys(cfg.DATA_SOURCES))
    if len(names) != 1:
        fix = "Several DATA_PATHS of one source are joined." if names else f"Known: {', '.join(DATA_SOURCES)}."
        raise ConfigError([Problem(f"config.DATA.{split}.DATA_SOURCES", str(names), "must name one data source", fix)])
    return str(names[0])


def _with_labels(source: Source, cfg: Split, request: SourceRequest) -> Source:
    """Apply LABEL_SOURCES: empty: the source's labels, if any; its own name: require them; disk_filelist: a file."""
    names = list(cfg.LABEL_SOURCES)
    key = f"config.DATA.{request.split}.LABEL_SOURCES"
    if not names:
        return source
    if names == ["disk_filelist"]:
        return relabel(source, tuple(cfg.LABEL_PATHS), request.class_names)
    if set(names) != set(cfg.DATA_SOURCES):
        fix = "Write [disk_filelist] with LABEL_PATHS, the data source's own name, or [] for the labels it has."
        raise ConfigError([Problem(key, str(names), "must say where labels come from", fix)])
    if not source.class_names:
        raise DataError(
            f"{key} asks for labels, but the images have none: {', '.join(request.paths)} has no class folders, or "
            "a single one, which is no class. Put the images of each class in a folder of its own, or set "
            "LABEL_SOURCES to []."
        )
    return source


def _limit(source: Source, limit: int, sampling: DataLimitSampling, key: str) -> Source:
    """Draw ``limit`` images at random, in the source's order; the same in every run."""
    skip = sampling.SKIP_NUM_SAMPLES
    if limit < 0 or (limit >= len(source) and not skip):
        return source
    if limit == 0:
        raise DataError("DATA_LIMIT is 0, which leaves no images. Set it to -1 for all of them.")
    if limit + skip > len(source):
        must = f"must leave DATA_LIMIT ({limit}) of the {len(source)} images"
        fix = "Lower one of them."
        raise ConfigError([Problem(f"{key}.DATA_LIMIT_SAMPLING.SKIP_NUM_SAMPLES", str(skip), must, fix)])
    # At random, because the first ``limit`` images of class folders would be of one or two classes. Seeded by a key of
    # its own, so that another SEED_VALUE trains on the same subset.
    generator = torch.Generator().manual_seed(sampling.SEED)
    if sampling.IS_BALANCED:
        chosen = _balanced(source, limit, skip, generator, key)
    else:
        chosen = torch.randperm(len(source), generator=generator)[skip : skip + limit].tolist()
    return Subset(source, tuple(sorted(chosen)))


def _balanced(source: Source, limit: int, skip: int, generator: torch.Generator, key: str) -> list[int]:
    """Draw the indices of ``limit`` images, equally many of each class; the first classes have the remainder."""
    groups: dict[int, list[int]] = {}
    for index in range(len(source)):
        if (label := source.label(index)) is not None:
            groups.setdefault(label, []).append(index)
    key = f"{key}.DATA_LIMIT_SAMPLING.IS_BALANCED"
    if not groups or limit < len(groups):
        must = f"needs labels, and a DATA_LIMIT of at least the {len(groups)} classes"
        raise ConfigError([Problem(key, f"DATA_LIMIT {limit}", must, "Write IS_BALANCED: false, or raise DATA_LIMIT.")])
    chosen: list[int] = []
    for at, label in enumerate(sorted(groups)):
        count = limit // len(groups) + (at < limit % len(groups))
        # Skipped class by class too, so that two runs of one seed have no image in common.
        left_out = skip // len(groups) + (at < skip % len(groups))
        members = groups[label]
        if count + left_out > len(members):
            must = f"needs {count + left_out} images of class {label}, and there are {len(members)}"
            raise ConfigError([Problem(key, f"DATA_LIMIT {limit}", must, "Lower DATA_LIMIT or SKIP_NUM_SAMPLES.")])
        order = torch.randperm(len(members), generator=generator)[left_out : left_out + count]
        chosen += [members[i] for i in order.tolist()]
    return chosen


@dataclass(frozen=True)
class Relabeled(_Derived):
    """A source with labels from a separate file."""

    labels: tuple[int, ...]
    class_names: tuple[str, ...]

    def label(self, index: int) -> int | None:
        return self.labels[index]


# No ``==``: comparing arrays gives an array, which has no truth value of its own.
@dataclass(frozen=True, eq=False)
class MultiLabeled(_Derived):
    """A source whose images have several labels each, and so no single class.

    Attributes:
        matrix: (N, C) int8: 1 if an image shows the class, 0 if not, -1 if ignored.
    """

    matrix: np.ndarray
    class_names: tuple[str, ...] = ()

    def label(self, index: int) -> int | None:
        return None


def relabel(source: Source, paths: tuple[str, ...], class_names: tuple[str, ...]) -> Relabeled | MultiLabeled:
    """Return ``source`` with the labels of ``.npy`` files, in the source's order: an integer or a row per image.

    Args:
        source: the images.
        paths: LABEL_PATHS; several are concatenated, like several DATA_PATHS.
        class_names: the classes of TRAIN if ``source`` is TEST, else empty. Classes are the distinct values in
            ascending order (VISSL's rule), so labels need not be consecutive.
    Raises:
        DataError: a file is missing, is not an array of integers, or the numbers of labels and images differ.
    """
    arrays = [_read(path) for path in paths]
    if len({array.shape[1:] for array in arrays}) > 1:
        raise DataError(f"{', '.join(paths)} must all have as many labels per image. Correct LABEL_PATHS.")
    values = np.concatenate(arrays)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if len(values) != len(source):
        raise DataError(
            f"{', '.join(paths)} has {len(values)} labels for {len(source)} images. "
            "Write one label per image, in the sorted order of the image files."
        )
    if values.ndim == 2:
        if not np.isin(values, (-1, 0, 1)).all():
            raise DataError(f"{', '.join(paths)} has rows of labels: each must be 1, 0 or -1 (does not count).")
        return MultiLabeled(source, values.astype(np.int8))
    names = class_names or tuple(str(value) for value in sorted(set(values.tolist())))
    number = {name: index for index, name in enumerate(names)}
    unknown = sorted({str(value) for value in values.tolist()} - set(names))
    if unknown:
        raise DataError(f"{', '.join(paths)} has labels that DATA.TRAIN does not have: {', '.join(unknown[:10])}.")
    return Relabeled(source, tuple(number[str(value)] for value in values.tolist()), names)


def _read(path: str) -> np.ndarray:
    if not Path(path).is_file():
        raise DataError(f"The label file {path} does not exist. Correct LABEL_PATHS.")
    try:
        values = read_array(path, max_dims=2)
    except ValueError as error:
        raise DataError(f"The label file {path} is not a plain .npy array of integers ({error}).") from error
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"The label file {path} must hold integers, 1-d or a row per image; write it with numpy.save.")
    return values
