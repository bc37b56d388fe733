"""The check of a source: formats, sizes, classes, and files that training cannot use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from PIL import ExifTags, Image

from vissl_zero.data.decode import BrokenImageError, Decoder
from vissl_zero.data.one_pass import looked_at
from vissl_zero.data.source import Source, encoded_image, label_matrix
from vissl_zero.errors import DataError, counted

_MOST_NAMED = 10
_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
_SPLITS = {"train", "val", "valid", "validation", "test"}
FLAGS = ("broken", "exif_rotated", "gray", "cmyk", "transparent")
_ROW = np.dtype(
    [
        ("width", np.int32),
        ("height", np.int32),
        ("bytes", np.int64),
        ("digest", "S16"),
        *((flag, "?") for flag in FLAGS),
    ]
)


@dataclass(frozen=True)
class Part:
    """Counts over a chunk of images.

    Attributes:
        rows: (N,) of ``_ROW``: size in pixels (0 if broken), bytes of the file, hash of the content, flags.
        formats: (format, mode) -> images; a source without files has the format "pixels".
        broken: index -> name and reason.
    """

    rows: np.ndarray
    formats: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: dict[int, tuple[str, str]] = field(default_factory=dict)


def look(source: Source, indices: range) -> Part:
    """Read, hash and decode these images."""
    part = Part(np.zeros(len(indices), _ROW))
    for row, index in zip(part.rows, indices, strict=True):
        try:
            _look_at(source, index, row, part.formats)
        except BrokenImageError as error:
            row["broken"] = True
            part.broken[index] = error.name, error.reason
    return part


def _look_at(source: Source, index: int, row: Any, formats: Counter[tuple[str, str]]) -> None:
    image = encoded_image(source, index)
    if isinstance(image, bytes):
        data, headers = image, list[tuple[str, str]]()

        def look_at_file(file: Image.Image) -> None:
            headers.append((file.format or "unknown", file.mode))
            row["cmyk"] = file.mode in ("CMYK", "YCCK")
            row["transparent"] = _is_transparent(file)
            row["exif_rotated"] = _orientation(file, data) not in (0, 1)

        # 128 bits: among a billion different files, two share a digest with a probability of about 1e-21.
        row["bytes"], row["digest"] = len(data), xxhash.xxh3_128_digest(data)
        # Decoded as a whole: a truncated file shows only at its end.
        image = Decoder().image(data, source.name(index), look_at_file)
        formats.update(headers)
    else:
        formats["pixels", image.mode] += 1
        row["digest"] = xxhash.xxh3_128_digest(image.tobytes())
    row["width"], row["height"] = image.size
    red, green, blue = (channel.tobytes() for channel in image.split())
    # By pixels: many gray photos are stored as RGB.
    row["gray"] = red == green == blue


def _is_transparent(file: Image.Image) -> bool:
    """Check whether any pixel is transparent; an alpha channel may be opaque everywhere."""
    if file.mode.startswith("I") or not ("transparency" in file.info or file.mode in _ALPHA):
        return False
    return any(file.convert("RGBA").getchannel("A").histogram()[:255])


def _orientation(file: Image.Image, data: bytes) -> int:
    if file.format == "PNG" and b"eXIf" not in data and b"exif" not in data:
        return 1  # getexif would read the rest of the file, to find none
    try:
        return int(file.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - damaged EXIF data, which training ignores
        return 1


@dataclass(frozen=True)
class Findings:
    """The contents of a source.

    Attributes:
        source: name of the source under DATA_SOURCES, and its path.
        num_images: number of images, broken ones included.
        num_bytes: bytes of all files; 0 for a source without files.
        classes: class name -> number of images; empty without labels.
        sizes: "width", "height" and "shorter side" -> minimum, median and maximum in pixels.
        formats: format and mode, such as "JPEG RGB" -> number of images, most frequent first.
        flagged: flag of ``FLAGS`` -> number of images.
        broken: (name, reason) of the first broken images.
        num_duplicates: number of images with the content of an earlier image.
        num_relabeled: number of duplicates whose class differs from that of the earlier image.
        duplicates: (name, name of the earlier image) of the first duplicates.
        samples: indices of readable images, spread over the source.
    """

    source: str
    num_images: int
    num_bytes: int
    classes: dict[str, int]
    sizes: dict[str, tuple[int, float, int]]
    formats: dict[str, int]
    flagged: dict[str, int]
    broken: list[tuple[str, str]]
    num_duplicates: int
    num_relabeled: int
    duplicates: list[tuple[str, str]]
    samples: list[int]

    def warnings(self) -> list[str]:
        """Return a sentence for each finding that may harm training, with a remedy."""
        sentences = []
        if self.flagged["broken"]:
            fix = "Repair or delete what is broken, or set config.DATA.ON_BROKEN_IMAGE=skip."
            sentences.append(f"{counted(self.flagged['broken'], 'image')} cannot be used. {fix}")
        if self.num_relabeled:
            again = "occurs" if self.num_relabeled == 1 else "occur"
            sentences.append(f"{counted(self.num_relabeled, 'image')} {again} again under another class.")
        if same := self.num_duplicates - self.num_relabeled:
            sentences.append("1 image is a copy of another." if same == 1 else f"{same:,} images are copies of others.")
        if self.flagged["exif_rotated"]:
            fix = "config.DATA.EXIF=apply rotates them; by default they are read as stored."
            sentences.append(f"EXIF asks to rotate {counted(self.flagged['exif_rotated'], 'image')}. {fix}")
        if self.flagged["transparent"]:
            fix = "config.DATA.BACKGROUND=white shows white behind them; by default the stored color shows."
            sentences.append(f"There are transparent pixels in {counted(self.flagged['transparent'], 'image')}. {fix}")
        if empty := [name for name, count in self.classes.items() if not count]:
            names = ", ".join(empty[:_MOST_NAMED])
            sentences.append(f"There are no images of {counted(len(empty), 'class')}: {names}.")
        if self.classes and self.classes.keys() <= _SPLITS:
            names = ", ".join(self.classes)
            sentences.append(f"The classes are {names}: these look like splits. Name one of the folders.")
        return sentences


def check(source: Source, title: str, num_samples: int, report: Callable[[str], None]) -> Findings:
    """Decode every image of a source once, and summarize what is found.

    Args:
        source: the images.
        title: value of ``Findings.source``.
        num_samples: largest number of ``Findings.samples``.
        report: receives a line of progress every few seconds.
    Raises:
        DataError: none of the images can be read.
    """
    parts = list(looked_at(source, look, report))
    rows = np.concatenate([part.rows for part in parts])
    broken = {index: why for part in parts for index, why in part.broken.items()}
    formats = sum((part.formats for part in parts), Counter[tuple[str, str]]())
    readable = np.flatnonzero(~rows["broken"])
    if not len(readable):
        name, reason = next(iter(broken.values()))
        raise DataError(f"None of {counted(len(rows), 'image')} of {title} can be read. The first is {name}: {reason}.")
    used = rows[readable]
    sides = {"width": used["width"], "height": used["height"]}
    sides["shorter side"] = np.minimum(used["width"], used["height"])
    copies = _copies(rows, readable)
    every = np.linspace(0, len(readable) - 1, min(num_samples, len(readable))).astype(int)
    return Findings(
        source=title,
        num_images=len(rows),
        num_bytes=int(rows["bytes"].sum()),
        classes=_classes(source),
        sizes={name: (int(side.min()), float(np.median(side)), int(side.max())) for name, side in sides.items()},
        formats={f"{form} {mode}": count for (form, mode), count in formats.most_common()},
        flagged={flag: int(rows[flag].sum()) for flag in FLAGS},
        broken=list(broken.values())[:_MOST_NAMED],
        num_duplicates=len(copies),
        num_relabeled=sum(source.label(index) != source.label(first) for index, first in copies),
        duplicates=[(source.name(index), source.name(first)) for index, first in copies[:_MOST_NAMED]],
        samples=readable[every].tolist(),
    )


def _copies(rows: np.ndarray, readable: np.ndarray) -> list[tuple[int, int]]:
    """Return (index, index of the first) of images with the content of an earlier image, in order."""
    digests = rows["digest"][readable]
    # Sorted, because a dict of all digests would take several times their memory. Stable: the first copy counts as the
    # original.
    order = np.argsort(digests, kind="stable")
    is_new = np.ones(len(order), bool)
    is_new[1:] = digests[order][1:] != digests[order][:-1]
    first = order[np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))]
    pairs = zip(readable[order[~is_new]].tolist(), readable[first[~is_new]].tolist(), strict=True)
    return sorted(pairs)


def _classes(source: Source) -> dict[str, int]:
    """Count the images of each class; an image of several classes counts in each."""
    names: Sequence[str] = source.class_names
    if not names:
        return {}
    labels = [source.label(index) for index in range(len(source))]
    if None in labels:
        matrix = label_matrix(source)
        counts = np.zeros(len(names), int) if matrix is None else (matrix == 1).sum(0)
    else:
        counts = np.bincount(np.array(labels, int), minlength=len(names))
    return dict(zip(names, counts.tolist(), strict=True))
