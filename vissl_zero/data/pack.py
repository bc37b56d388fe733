"""Packing of a source of images into tars, Arrow files or an LMDB database, in the source's order."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from vissl_zero.atomic import read_object, replacing
from vissl_zero.config.catalog import source_of
from vissl_zero.data.decode import FORMATS, Decoder
from vissl_zero.data.source import MultiLabeled, Source, SourceRequest, encoded_image, left_out
from vissl_zero.data.sources.packed import CLASSES_FILE, CLASSES_KEY, LABELS_KEY
from vissl_zero.errors import DataError
from vissl_zero.registry import DATA_SOURCES
from vissl_zero.resolve.image_files import EXTENSIONS

PER_PART = 1000  # images
_PROGRESS_FILE = "packed.json"
_QUALITY = 95


@dataclass(frozen=True)
class Row:
    """An image to pack: index in the source, file content, file extension without the dot, and label."""

    index: int
    data: bytes
    extension: str
    label: int | None


def pack(path: Path, out: Path, form: str, size: int | None, report: Callable[[str], None]) -> int:
    """Pack the images at ``path``; an interrupted call is continued at the first missing part.

    Args:
        path: folder of images, or images in another format that DATA_PATHS accepts.
        out: folder to write: new, or of an interrupted call with the same arguments.
        form: a key of ``WRITERS``.
        size: shorter side in pixels to which larger images are reduced, as JPEG; None: files are packed unchanged.
        report: receives a line of progress for each part.
    Returns:
        Number of packed images, over all calls.
    Raises:
        DataError: there are no images, or they have several labels each; ``out`` has other files; or a library is
            missing.
        BrokenImageError: an image cannot be read, or with ``size`` cannot be decoded.
    """
    source: Source = DATA_SOURCES.get(source_of([str(path)])).build(
        SourceRequest("TRAIN", (str(path),), named="the path")
    )
    if isinstance(source, MultiLabeled):
        raise DataError(
            f"{path} has several labels for an image, which packed formats do not hold. Train on it as it is."
        )
    for line in left_out(source):
        report(line)
    out.mkdir(parents=True, exist_ok=True)
    names = xxhash.xxh3_64_hexdigest(b"\0".join(os.fsencode(source.name(i)) for i in range(len(source))))
    # Arguments and names identify the call, so that parts of different data are never mixed in one folder.
    call = {"folder": ascii(str(path.resolve())), "to": form, "size": size, "images": len(source), "names": names}
    done = _parts_of(out, call)
    write = WRITERS[form]
    parts = -(-len(source) // PER_PART)
    for part in range(parts):
        if str(part) not in done:
            indices = range(part * PER_PART, min(len(source), (part + 1) * PER_PART))
            rows = [_row(source, index, size) for index in indices]
            write(out, part, parts, rows, source.class_names)
            digest = xxhash.xxh3_64()
            for row in rows:
                digest.update(row.data)
            done[str(part)] = digest.hexdigest()
            # After the part itself: a kill between the two packs the part again.
            _write(out / _PROGRESS_FILE, {**call, "parts": done})
        report(f"{min(len(source), (part + 1) * PER_PART):,} of {len(source):,} images")
    _finish(out, form, source, parts)
    return len(source)


def _parts_of(out: Path, call: dict[str, Any]) -> dict[str, str]:
    """Read the parts that an earlier, equal call wrote: number -> checksum of the content of the images."""
    if not (out / _PROGRESS_FILE).exists():
        if any(out.iterdir()):
            raise DataError(f"{out} is not empty. Name a new folder.")
        return {}
    try:
        progress = read_object(out / _PROGRESS_FILE)
    except (OSError, ValueError) as error:
        raise DataError(f"{out / _PROGRESS_FILE} cannot be read ({error}). Name a new folder.") from error
    if {name: progress.get(name) for name in call} != call or not isinstance(progress.get("parts"), dict):
        raise DataError(f"{out} was begun with another folder, other images or other arguments. Name a new folder.")
    return dict(progress["parts"])


def _write(path: Path, content: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1))


def _row(source: Source, index: int, size: int | None) -> Row:
    encoded, name = encoded_image(source, index), source.name(index)
    data = encoded if isinstance(encoded, bytes) else _png(encoded)
    extension = Path(name).suffix.lower()
    # Readers of tars tell images by their ending, and names without one are common.
    extension = (extension if extension in EXTENSIONS else _extension_of(data)).lstrip(".")
    if size is not None:
        image = Decoder().image(data, name)
        # Never enlarged: that would add bytes and no detail.
        if min(image.size) > size:
            factor = size / min(image.size)
            sides = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
            file = io.BytesIO()
            image.resize(sides, Image.Resampling.BICUBIC).save(file, "JPEG", quality=_QUALITY)
            data, extension = file.getvalue(), "jpg"
    return Row(index, data, extension, source.label(index))


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _extension_of(data: bytes) -> str:
    """Return a file's extension by its content; ".jpg" if it cannot be opened."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return f".{str(image.format).lower().replace('jpeg', 'jpg')}"
    except Exception:  # noqa: BLE001 - a broken file, which training reports
        return ".jpg"


def _tar(out: Path, part: int, parts: int, rows: Sequence[Row], names: Sequence[str]) -> None:
    with replacing(out / f"part-{part:06d}.tar") as path, tarfile.open(path, "w") as tar:
        for row in rows:
            members = [(row.extension, row.data)]
            if row.label is not None:
                members.append(("cls", str(row.label).encode()))
            for extension, content in members:
                member = tarfile.TarInfo(f"{row.index:09d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _arrow(out: Path, part: int, parts: int, rows: Sequence[Row], names: Sequence[str]) -> None:
    pa = _library("pyarrow", "arrow")
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    columns, fields = [pa.array([{"bytes": row.data, "path": None} for row in rows], image)], [("image", image)]
    if names:
        features["label"] = {"names": list(names), "_type": "ClassLabel"}
        columns.append(pa.array([row.label for row in rows], pa.int64()))
        fields.append(("label", pa.int64()))
    about = json.dumps({"info": {"features": features}})
    # ``datasets`` reads the types of columns from this entry, else images are plain bytes.
    schema = pa.schema(fields, metadata={"huggingface": about})
    with replacing(out / _arrow_name(part, parts)) as path, pa.ipc.new_stream(str(path), schema) as stream:
        stream.write_table(pa.Table.from_arrays(columns, schema=schema))


def _arrow_name(part: int, parts: int) -> str:
    return f"data-{part:05d}-of-{parts:05d}.arrow"


def _lmdb(out: Path, part: int, parts: int, rows: Sequence[Row], names: Sequence[str]) -> None:
    lmdb = _library("lmdb", "lmdb")
    with lmdb.open(str(out), map_size=2**40) as environment, environment.begin(write=True) as transaction:
        # One transaction for a part: after a kill, LMDB has all of it or nothing. The map's size is address space, not
        # disk.
        for row in rows:
            # Nine digits, because LMDB sorts keys as bytes, and the labels are stored in the order of the images.
            transaction.put(f"{row.index:09d}.{row.extension}".encode(), row.data)


WRITERS = {"webdataset": _tar, "arrow": _arrow, "lmdb": _lmdb}


def _finish(out: Path, form: str, source: Source, parts: int) -> None:
    """Write the files that describe all parts."""
    names = list(source.class_names)
    if form == "webdataset" and names:
        _write(out / CLASSES_FILE, names)
    if form == "arrow":
        features: dict[str, Any] = {"image": {"_type": "Image"}}
        if names:
            features["label"] = {"names": names, "_type": "ClassLabel"}
        # What ``datasets.load_from_disk`` reads.
        files = [{"filename": _arrow_name(part, parts)} for part in range(parts)]
        _write(out / "dataset_info.json", {"features": features, "citation": "", "description": ""})
        state: dict[str, Any] = {
            "_data_files": files,
            "_fingerprint": "0" * 16,
            "_format_columns": None,
            "_format_kwargs": {},
        }
        _write(out / "state.json", {**state, "_format_type": None, "_output_all_columns": False, "_split": None})
    if form == "lmdb" and names:
        lmdb = _library("lmdb", "lmdb")
        labels = io.BytesIO()
        np.save(labels, np.array(list(_labels(source)), np.int64))
        with lmdb.open(str(out), map_size=2**40) as environment, environment.begin(write=True) as transaction:
            transaction.put(LABELS_KEY, labels.getvalue())
            transaction.put(CLASSES_KEY, json.dumps(names).encode())


def _labels(source: Source) -> Iterator[int]:
    for index in range(len(source)):
        label = source.label(index)
        assert label is not None  # there are classes
        yield label


def _library(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ModuleNotFoundError as error:
        raise DataError(f"--to {extra} needs {name}. Run pip install vissl-zero[{extra}].") from error
