"""Retrieval of images: a whitened vector for each image, the scores of a ranking, and the data sets.

An image's vector has regional maxima (R-MAC) or generalized means (GeM) of its feature maps. Mean average precision and
precision at k leave out images that do not count. Data sets are in VISSL's folders: revisited Oxford and Paris, Oxford
and Paris, Copydays.

Sources: https://arxiv.org/abs/1511.05879 (R-MAC), https://arxiv.org/abs/1711.02512 (GeM),
https://arxiv.org/abs/1803.11285 (Revisiting Oxford and Paris); constants, protocol and data sets of VISSL's
``vissl/utils/instance_retrieval_utils`` at 09270ed2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vissl_zero.atomic import read_object, read_regular
from vissl_zero.checkpoint.torch_file import NumpyArray, read_pickle
from vissl_zero.collectives import all_reduce_sum
from vissl_zero.errors import CheckpointError, DataError

_OVERLAP = 0.4  # desired overlap of neighboring regions
_MOST_STEPS = 7


def unit_vectors(rows: Tensor, epsilon: float = 0.0) -> Tensor:
    """Divide vectors (..., F) by their L2 norm plus ``epsilon``; vectors of zeros stay zeros."""
    norms = rows.norm(dim=-1, keepdim=True) + epsilon
    return rows / torch.where(norms > 0, norms, torch.ones_like(norms))


def regions(height: int, width: int, levels: int) -> list[tuple[int, int, int]]:
    """List squares on a map, level by level: top, left and side of each.

    Level l has l squares along the shorter side. Along the longer side, each level has additional squares, as many as
    make neighbors overlap by about 40 %. Levels that are finer than the map are left out.
    """
    short, long = min(height, width), max(height, width)
    steps = np.arange(2, _MOST_STEPS + 1, dtype=np.float64)  # as VISSL with NumPy 2; NumPy 1 used float32
    overlaps = (short**2 - short * ((long - short) / (steps - 1))) / short**2
    more = int(np.abs(overlaps - _OVERLAP).argmin()) + 1
    squares = []
    for level in range(1, levels + 1):
        side = 2 * short // (level + 1)
        if side:
            tops = _places(height, side, level + more * (height > width))
            lefts = _places(width, side, level + more * (width > height))
            squares += [(top, left, side) for top in tops for left in lefts]
    return squares


def _places(length: int, side: int, count: int) -> list[int]:
    """Spread ``count`` squares over a length, by their centers, so that rounding agrees with VISSL's."""
    gap = (length - side) / (count - 1) if count > 1 else 0.0
    center = np.floor(side / 2 - 1)
    return [min(int(np.floor(center + gap * index) - center), length - side) for index in range(count)]


def regional_maxima(maps: Tensor, levels: int, normalize: bool = True) -> Tensor:
    """Return the largest value of each channel in each region.

    Args:
        maps: feature maps (B, C, H, W).
        levels: levels of ``regions``.
        normalize: whether to scale to unit length.
    Returns:
        Maxima (B, R, C) of R regions.
    """
    maxima = [
        maps[:, :, top : top + side, left : left + side].amax(dim=(2, 3))
        for top, left, side in regions(maps.shape[2], maps.shape[3], levels)
    ]
    rows = torch.stack(maxima, dim=1)
    return unit_vectors(rows) if normalize else rows


def _generalized_mean(maps: Tensor, power: float) -> Tensor:
    """Compute the roots of means of powers over the maps, and append a constant 1, as in VISSL.

    Args:
        maps: feature maps (B, C, H, W); values below 1e-6 are raised to it.
        power: exponent; 1: the mean, without the lower limit.
    Returns:
        Generalized means (B, C + 1).
    """
    rows = maps.mean(dim=(2, 3)) if power == 1 else maps.clamp(min=1e-6).pow(power).mean(dim=(2, 3)).pow(1 / power)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)


def descriptor(maps: Sequence[Tensor], kind: str, power: float, normalize: bool) -> Tensor:
    """Compute an image's vector (B, D), the mean over scales.

    Args:
        maps: feature maps (B, C, H, W) at each scale; their shapes are equal unless ``kind`` is gem.
        kind: "gem", or "" for the maps themselves, flattened.
        power: exponent of gem.
        normalize: whether to scale to unit length, with 1e-6 added to the norm.
    """
    if kind == "gem":
        rows = torch.stack([_generalized_mean(of_scale, power) for of_scale in maps]).mean(dim=0)
    else:
        rows = torch.stack([of_scale.flatten(1) for of_scale in maps]).mean(dim=0)
    return unit_vectors(rows, 1e-6) if normalize else rows


@dataclass(frozen=True)
class Whitening:
    """A projection on principal components of unit variance.

    Attributes:
        mean: mean (F,) of the features.
        components: scaled components (F, D).
    """

    mean: Tensor
    components: Tensor

    @classmethod
    def of(cls, rows: Tensor, num_components: int) -> Whitening:
        """Fit to rows in float64; as in VISSL by the sum of squares, not their mean.

        Args:
            rows: features (N, F).
            num_components: most components, those of largest variance; -1: F.
        """
        mean = rows.double().mean(dim=0)
        centered = rows.double() - mean
        return cls._of_squares(mean, centered.T @ centered, num_components)

    @classmethod
    def of_all_ranks(cls, own_rows: Tensor, num_components: int) -> Whitening:
        """Fit to the rows of all ranks, whose numbers may differ. Collective.

        Cost: two all-reduces, of F and of F * F numbers.
        """
        count = all_reduce_sum(torch.tensor([len(own_rows)], dtype=torch.float64, device=own_rows.device))
        mean = all_reduce_sum(own_rows.double().sum(dim=0)) / count
        centered = own_rows.double() - mean
        return cls._of_squares(mean, all_reduce_sum(centered.T @ centered), num_components)

    @classmethod
    def _of_squares(cls, mean: Tensor, squares: Tensor, num_components: int) -> Whitening:
        variances, vectors = torch.linalg.eigh(squares)
        # Directions without variance would be divided by almost 0, and noise would decide rankings.
        variances = variances.clamp(min=float(variances.max()) * 1e-5)
        largest = variances.argsort(descending=True)[: num_components if num_components > 0 else None]
        return cls(mean, vectors[:, largest] / variances[largest].sqrt())

    def __call__(self, rows: Tensor) -> Tensor:
        return ((rows.double() - self.mean) @ self.components).to(rows.dtype)


AT = (1, 5, 10)  # the k of precision at k


@dataclass(frozen=True)
class Wanted:
    """The images that a query should find.

    Attributes:
        query: index of the query.
        good: indices of the images in the database that show the same object.
        ignored: indices of images that are not counted.
        num_good: number of good images, including any outside the database; None: ``len(good)``.
    """

    query: int
    good: np.ndarray
    ignored: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_good: int | None = None


def average_precision(places: np.ndarray, num_good: int) -> float:
    """Compute the area under precision over recall, by trapezoids.

    Args:
        places: ranks of the good images in the ranking without ignored images, from 0, ascending.
        num_good: number of good images.
    """
    counts = np.arange(len(places))
    # Before the first image precision is 1 by definition, as in the data sets' own ``compute_ap``.
    before = np.where(places == 0, 1.0, counts / np.maximum(places, 1))
    after = (counts + 1) / (places + 1)
    return float((before + after).sum() / 2 / num_good)


def scores(similarity: np.ndarray, wanted: Sequence[Wanted]) -> tuple[float, list[float]]:
    """Compute mean average precision, and mean precision at each k of ``AT``; NaN if no query has a good image.

    Queries without a good image are left out. If a query's last good image ranks before k, its rank replaces k.

    Args:
        similarity: similarities (queries, images); higher is more similar. Ties keep the order of the images.
        wanted: images that some or all queries should find. Indices beyond the images are left out.
    """
    precisions, at = [], []
    for query in wanted:
        # Stable, so that ties have the same order everywhere.
        ranking = np.argsort(-similarity[query.query], kind="stable")
        good = query.good[query.good < len(ranking)]
        if not len(good):
            continue
        # Taken out before ranks are counted: they must not push good images down.
        counted = ranking[~np.isin(ranking, query.ignored)]
        places = np.flatnonzero(np.isin(counted, good))
        precisions.append(average_precision(places, query.num_good or len(good)))
        last = [min(int(places[-1]) + 1, k) if len(places) else k for k in AT]
        at.append([float((places < k).sum() / k) for k in last])
    if not precisions:
        return float("nan"), [float("nan")] * len(AT)
    return float(np.mean(precisions)), np.mean(at, axis=0).tolist()


Box = tuple[float, float, float, float]
REVISITED, COPYDAYS, OXFORD, WHITENING = ("roxford5k", "rparis6k"), "copydays", ("Oxford", "Paris"), "whitening"
# Images of Paris that cannot be read: https://www.robots.ox.ac.uk/~vgg/data/parisbuildings/corrupt.txt
_CORRUPT = {
    *(f"paris_pompidou_000{number}" for number in (195, 196, 201, 467, 640)),
    *(f"paris_pantheon_000{number}" for number in (284, 960, 974)),
    *(f"paris_triomphe_000{number}" for number in (662, 833, 863, 867)),
    *(f"paris_sacrecoeur_000{number}" for number in (299, 330, 353)),
    *("paris_louvre_000136", "paris_louvre_000146", "paris_moulinrouge_000422"),
    *("paris_museedorsay_001059", "paris_notredame_000188"),
}
# Changes of Copydays' images: JPEG by quality, crops by percent.
_CHANGES = (
    "original",
    "strong",
    *(f"jpegqual_{quality}" for quality in (3, 5, 8, 10, 15, 20, 30, 50, 75)),
    *(f"crops_{percent}" for percent in (10, 15, 20, 30, 40, 50, 60, 70, 80)),
)
_MOST_BYTES = 2**26  # most bytes of a list; the lists of Oxford and Paris are below 2**21


@dataclass(frozen=True)
class RetrievalSet:
    """A data set of queries, images, and the images that each query should find.

    Attributes:
        name: name of the data set.
        images: files of the database.
        queries: files of the queries.
        boxes: box of the object in each query, in pixels (left, top, right, bottom); None: queries have no boxes.
        wanted: name of a score -> images that its queries should find. Names are e, m and h (easy, medium, hard), the
            changes of Copydays, or all.
    """

    name: str
    images: list[Path]
    queries: list[Path]
    boxes: list[Box] | None
    wanted: dict[str, list[Wanted]]


def retrieval_set(root: Path, name: str, with_distractors: bool = False) -> RetrievalSet:
    """Load the data set ``root/name``.

    Args:
        root: ``IMG_RETRIEVAL.DATASET_PATH``.
        name: roxford5k, rparis6k, copydays, or another name for the format of Oxford and Paris.
        with_distractors: for Copydays, use ``database_and_distractors`` in place of ``database``.
    Raises:
        DataError: the folder does not have that format.
    """
    folder = root / name
    if not folder.is_dir():
        raise DataError(f"IMG_RETRIEVAL: there is no folder {folder}. Correct config.IMG_RETRIEVAL.DATASET_PATH.")
    if name in REVISITED:
        return _revisited(folder, name)
    return _copydays(folder, with_distractors) if name == COPYDAYS else _oxford(folder, name)


def whitening_images(root: Path, name: str, image_list: str, with_distractors: bool = False) -> list[Path]:
    """List the image files whose features determine the principal components.

    Args:
        root, name: see ``retrieval_set``; any other name is a folder of .jpg files.
        image_list: text file with a path below the folder in each line; read for the data set called whitening.
        with_distractors: see ``retrieval_set``.
    """
    folder = root / name
    if name in (*REVISITED, COPYDAYS, *OXFORD):
        return retrieval_set(root, name, with_distractors).images
    if name == WHITENING:
        lines = _lines(Path(image_list))
        return [folder / line for line in lines]
    return _jpegs(folder)


def _revisited(folder: Path, name: str) -> RetrievalSet:
    """Read ``gnd_<name>.pkl`` or ``.json``: imlist, qimlist, and per query bbx, easy, hard, junk; images in jpg/."""
    gnd = folder / f"gnd_{name}.json"
    try:
        if gnd.is_file():
            content: Any = read_object(gnd, _MOST_BYTES)
        else:
            gnd = folder / f"gnd_{name}.pkl"
            # Read as data: Python's pickle would run what the file says, and the file is a download.
            content = read_pickle(gnd)
        images, queries = ([folder / "jpg" / f"{stem}.jpg" for stem in content[key]] for key in ("imlist", "qimlist"))
        truth = [{key: _numbers(query[key]) for key in ("easy", "hard", "junk")} for query in content["gnd"]]
        boxes = [tuple(_numbers(query["bbx"], float).tolist()) for query in content["gnd"]]
        if len(queries) != len(truth) or any(len(box) != 4 for box in boxes):
            raise ValueError("queries and their boxes do not fit")
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(
            f"{gnd} cannot be read ({error.strerror}). It is at http://cmp.felk.cvut.cz/revisitop/data/datasets/{name}/."
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{gnd} is no list of {name} ({type(error).__name__}: {error}). Copy it again.") from error
    # The protocols of https://arxiv.org/abs/1803.11285: what a protocol does not look for is ignored, not counted as
    # wrong.
    wanted = {"e": ("easy",), "m": ("easy", "hard"), "h": ("hard",)}
    figures = {}
    for figure, kinds in wanted.items():
        ignored = [kind for kind in ("junk", "easy", "hard") if kind not in kinds]
        figures[figure] = [
            Wanted(number, np.concatenate([of[k] for k in kinds]), np.concatenate([of[k] for k in ignored]))
            for number, of in enumerate(truth)
        ]
    return RetrievalSet(name, images, queries, boxes, figures)


def _numbers(values: Any, kind: type = int) -> np.ndarray:
    if isinstance(values, NumpyArray):
        numbers = values.tensor()
        values = [] if numbers is None else numbers.tolist()
    return np.array([kind(value) for value in values], dtype=np.int64 if kind is int else np.float64)


def _oxford(folder: Path, name: str) -> RetrievalSet:
    """Read ``lab/<query>_query.txt`` and its ``_ok``, ``_good`` and ``_junk``; images in jpg/."""
    labels, jpg = folder / "lab", folder / "jpg"
    if not labels.is_dir() or not jpg.is_dir():
        raise DataError(f"{folder} is no data set as Oxford and Paris are: it must hold the folders lab and jpg.")
    stems = sorted(file.stem for file in jpg.iterdir() if file.stem not in _CORRUPT)
    number = {stem: index for index, stem in enumerate(stems)}
    queries: list[Path] = []
    boxes: list[Box] = []
    wanted: list[Wanted] = []
    for file in sorted(labels.glob("*_query.txt")):
        stem, *box = (_lines(file) or [""])[0].split()
        # Oxford's lists name queries with this prefix, and its files lack it.
        stem = stem.removeprefix("oxc1_")
        if stem not in number or len(box) != 4:
            raise DataError(f"{file} must name an image of {jpg} and four numbers, the box in it.")
        query = file.name.removesuffix("_query.txt")
        good, ignored = (
            {line for kind in kinds for line in _lines(labels / f"{query}_{kind}.txt")}
            for kinds in (("ok", "good"), ("junk",))
        )
        here = [
            np.array(sorted(number[name] for name in names if name in number), dtype=np.int64)
            for names in (good, ignored)
        ]
        wanted.append(Wanted(len(queries), here[0], here[1], len(good)))
        queries.append(jpg / f"{stem}.jpg")
        boxes.append((float(box[0]), float(box[1]), float(box[2]), float(box[3])))
    if not queries:
        raise DataError(f"{labels} holds no <query>_query.txt.")
    return RetrievalSet(name, [jpg / f"{stem}.jpg" for stem in stems], queries, boxes, {"all": wanted})


def _copydays(folder: Path, with_distractors: bool) -> RetrievalSet:
    """Read ``queries`` and ``database``: names end in a number, and images of the same hundred show the same object."""
    queries = _jpegs(folder / "queries")
    images = _jpegs(folder / ("database_and_distractors" if with_distractors else "database"))
    groups = np.array([-1 if "distractor" in file.name else _image_number(file) // 100 for file in images])
    wanted: dict[str, list[Wanted]] = {}
    for change in _CHANGES:
        named = re.compile(rf"{change}(?!\d)")  # VISSL also counts jpegqual_30 as jpegqual_3
        of_change = [index for index, file in enumerate(queries) if named.search(file.name)]
        if of_change:
            wanted[change] = [
                Wanted(index, np.flatnonzero(groups == _image_number(queries[index]) // 100)) for index in of_change
            ]
    if not wanted:
        raise DataError(f"{folder / 'queries'}: no file's name begins with a change, such as strong_200001.jpg.")
    return RetrievalSet(COPYDAYS, images, queries, None, wanted)


def _image_number(file: Path) -> int:
    text = file.name.split(".")[0].split("_")[-1]
    if not text.isdecimal():
        raise DataError(f"{file}: the name must end in the image number, as in strong_200001.jpg.")
    return int(text)


def _jpegs(folder: Path) -> list[Path]:
    if not folder.is_dir() or not (files := sorted(file for file in folder.iterdir() if file.suffix == ".jpg")):
        raise DataError(f"IMG_RETRIEVAL: {folder} must be a folder that holds .jpg files.")
    return files


def _lines(file: Path) -> list[str]:
    try:
        text = read_regular(file, _MOST_BYTES, follow_links=True).decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}).") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def first(dataset: RetrievalSet, num_images: int, num_queries: int) -> RetrievalSet:
    """Return the data set's first images and queries (-1: all); as in VISSL, at most as many queries as images."""
    images = dataset.images if num_images < 0 else dataset.images[:num_images]
    most = num_queries if num_queries >= 0 else num_images if num_images >= 0 else len(dataset.queries)
    wanted = {name: [each for each in of if each.query < most] for name, of in dataset.wanted.items()}
    return RetrievalSet(
        dataset.name, images, dataset.queries[:most], dataset.boxes, {n: w for n, w in wanted.items() if w}
    )


def require_files(files: Sequence[Path]) -> None:
    """Raise DataError if any of the files is missing."""
    if lacking := [file for file in files if not file.is_file()]:
        raise DataError(f"IMG_RETRIEVAL: {len(lacking):,} of {len(files):,} images are missing, such as {lacking[0]}.")
