"""Safetensors files, written as a stream and read by ranges.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a JSON header, the
header, the data. Its own library needs a second copy of all tensors to write, and full tensors in memory to read; a
rank that stores or takes a range of a few hundred gigabytes can afford neither.

The format has no checksums. The checksums of a checkpoint's shards are in ``rank<k>.json``. A file of weights has its
own (``with_checksums``) in the header's metadata, which other readers ignore.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from vissl_zero.atomic import open_regular
from vissl_zero.errors import CheckpointError
from vissl_zero.version import __version__

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SLICE_BYTES = 8 * 2**20  # hashed and written in turn, while they are in the processor's cache
_MAX_HEADER_BYTES = 100_000_000  # as in safetensors
_MAX_DIMS = 64  # as in torch
# Texts of the header. A file with one of them and not the other was ours, and has been damaged.
WRITER, CHECKSUMS = "vissl_zero", "vissl_zero_xxh3"


class Sized:
    """The type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the elements."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Entry(Sized):
    """A tensor to write.

    Attributes:
        key: name in the file.
        dtype, shape: type and shape of the tensor.
        read: function that returns the elements, on any device and in any layout; called when they are written.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> Entry:
        """Return the entry of an existing tensor."""
        return cls(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @classmethod
    def joined(cls, key: str, parts: Sequence[Entry]) -> Entry:
        """Join tensors along their first dimension; they are read when it is."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return cls(key, parts[0].dtype, shape, lambda: torch.cat([part.read() for part in parts]))

    def cut(self, keys: Sequence[str]) -> list[Entry]:
        """Cut the tensor along its first dimension into an equal part for each key; every part reads all of it."""
        rows = self.shape[0] // len(keys)
        reads = [partial(self._rows, at * rows, (at + 1) * rows) for at in range(len(keys))]
        return [Entry(key, self.dtype, (rows, *self.shape[1:]), read) for key, read in zip(keys, reads, strict=True)]

    def _rows(self, first: int, end: int) -> Tensor:
        return self.read()[first:end]


@dataclass(frozen=True)
class Written:
    """The size of a written file, and checksums of its header and of each tensor's bytes (XXH3, 64 bits, as hex)."""

    num_bytes: int
    header_digest: str
    digests: dict[str, str]


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries as ``write_shard_file`` reads them: wide elements first, which keeps every tensor aligned."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def write_shard_file(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, with_checksums: bool = False
) -> Written:
    """Write a new file, synced to the disk. One tensor at a time is in memory besides what ``read`` shares.

    Args:
        path: path of the file.
        entries: tensors to write.
        metadata: strings for the header.
        with_checksums: whether to add checksums of the header and of every tensor to the header, and our mark.

    Raises:
        OSError: no room, or the disk failed; or the file exists.
    """
    ordered = in_file_order(entries)
    texts = dict(metadata or {})
    if with_checksums:
        texts[WRITER] = __version__
        # As long as the checksums will be, which are known once the data are written.
        texts[CHECKSUMS] = _checksums("0" * 16, {entry.key: "0" * 16 for entry in ordered})
    header = _header(ordered, texts)
    digests: dict[str, str] = {}
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for entry in ordered:
            digest = xxhash.xxh3_64()
            data = bytes_of(_on_host(entry))
            for start in range(0, len(data), SLICE_BYTES):
                part = data[start : start + SLICE_BYTES]
                digest.update(part)
                _write_all(file.fileno(), part)
            part = data = memoryview(b"")  # gone before the next one is gathered
            digests[entry.key] = digest.hexdigest()
        if with_checksums:
            texts[CHECKSUMS] = _checksums(_header_digest(json.loads(header[8:])), digests)
            size, header = len(header), _header(ordered, texts)
            assert len(header) == size
            # The same file is written to again, so data pass through memory once.
            os.pwrite(file.fileno(), header, 0)
        os.fsync(file.fileno())
    size = len(header) + sum(entry.num_bytes for entry in ordered)
    return Written(size, xxhash.xxh3_64_hexdigest(header), digests)


class ShardFile:
    """An open safetensors file; reading it runs no code. Close it after use.

    Args:
        path: path of the file; not a link.
    Attributes:
        shapes, dtypes: shapes and types of the tensors by key.
        metadata: strings in the header.
        header_digest: checksum of the header.
        digests: checksums of the tensors by key, as stored in the file; empty if it has none.
        num_bytes: size of the file.
    Raises:
        CheckpointError: the file is missing, no regular file, or no complete safetensors file; or it carries a checksum
            of its header, which does not fit.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
        try:
            self.num_bytes = os.fstat(self._fd).st_size
            self._spans: dict[str, tuple[int, int]] = {}
            self.shapes: dict[str, tuple[int, ...]] = {}
            self.dtypes: dict[str, torch.dtype] = {}
            self.metadata: dict[str, str] = {}
            self.digests: dict[str, str] = {}
            self.header_digest = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def read_into(self, key: str, first_element: int, out: Tensor) -> None:
        """Fill ``out`` (1-d, contiguous, on the CPU, of the tensor's dtype) with elements from ``first_element`` on.

        Raises:
            CheckpointError: the disk failed.
        """
        assert out.dtype == self.dtypes[key] and out.dim() == 1
        begin, end = self._spans[key]
        offset = begin + first_element * out.element_size()
        data = bytes_of(out)
        assert first_element >= 0 and offset + len(data) <= end, (key, first_element, len(out))
        done = 0
        while done < len(data):
            try:
                # Linux reads at most 2 GiB in one call. preadv moves no shared position, so threads may read at once.
                count = os.preadv(self._fd, [data[done : done + 2**30]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read ({error.strerror}).") from error
            if not count:
                raise CheckpointError(f"{self.path} became shorter while it was read.")
            done += count

    def digest(self, key: str) -> str:
        """Compute the checksum of a tensor's bytes, which are read in slices."""
        size = math.prod(self.shapes[key])
        step = SLICE_BYTES // self.dtypes[key].itemsize
        buffer, digest = torch.empty(min(step, size), dtype=self.dtypes[key]), xxhash.xxh3_64()
        for first in range(0, size, step):
            part = buffer[: min(step, size - first)]
            self.read_into(key, first, part)
            digest.update(bytes_of(part))
        return digest.hexdigest()

    def damaged(self, keys: Iterable[str] | None = None) -> Iterator[str]:
        """Compare data with the checksums in the file; yields a sentence for each tensor that differs.

        Args:
            keys: tensors to read; None: all.
        """
        for key in self.shapes if keys is None else keys:
            if self.digests and self.digest(key) != self.digests[key]:
                yield f"{self.path} is damaged: the data of {key} do not fit their checksum."

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _read_header(self) -> str:
        prefix = os.pread(self._fd, 8, 0)
        # A length is checked before memory is allocated for it.
        if len(prefix) < 8 or not 2 <= (length := struct.unpack("<Q", prefix)[0]) <= _MAX_HEADER_BYTES:
            how = "it begins neither with a header nor as torch.save writes. Copy it again, or give another file"
            raise self._damaged(how)
        text = os.pread(self._fd, length, 8)
        if len(text) < length:
            raise self._damaged("it ends within its header")
        try:
            entries = json.loads(text)
            if {WRITER, CHECKSUMS} & entries.get("__metadata__", {}).keys():
                self.digests = _checked(entries)
            self.metadata = {str(key): str(text) for key, text in entries.pop("__metadata__", {}).items()}
            self.metadata.pop(CHECKSUMS, None)
            for key, entry in entries.items():
                self._take(key, entry, 8 + length)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            raise self._damaged("its header is invalid") from error
        end = 8 + length
        for begin, stop in sorted(self._spans.values()):
            # As the format demands: in a hole, a file could hide something else.
            if begin != end:
                raise self._damaged("its tensors overlap or leave gaps")
            end = stop
        if end != self.num_bytes:
            raise self._damaged(f"it has {self.num_bytes} bytes where its header says {end}")
        return xxhash.xxh3_64_hexdigest(prefix + text)

    def _take(self, key: str, entry: dict[str, Any], base: int) -> None:
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        numbers = (*shape, begin, end)
        if len(shape) > _MAX_DIMS or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError
        if math.prod(max(size, 1) for size in shape) >= 2**63:  # torch counts so even where a size is 0
            raise ValueError
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError
        self._spans[key], self.shapes[key], self.dtypes[key] = (base + begin, base + end), shape, dtype

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or no safetensors file: {how}.")


@contextmanager
def opened(path: Path) -> Iterator[ShardFile]:
    """Open a ``ShardFile`` and close it at the end."""
    file = ShardFile(path)
    try:
        yield file
    finally:
        file.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes; shared."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _checksums(header: str, tensors: Mapping[str, str]) -> str:
    return json.dumps({"header": header, "tensors": dict(tensors)}, sort_keys=True, separators=(",", ":"))


def _header_digest(header: Mapping[str, Any]) -> str:
    """Compute the checksum of everything in a header except the checksums."""
    texts = {key: text for key, text in header["__metadata__"].items() if key != CHECKSUMS}
    plain = json.dumps({**header, "__metadata__": texts}, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(plain.encode())


def _checked(header: Mapping[str, Any]) -> dict[str, str]:
    """Verify a header and return the tensors' checksums of a file of ours.

    Raises:
        ValueError, KeyError, TypeError: the header is not what was written.
    """
    checksums = json.loads(header["__metadata__"][CHECKSUMS])
    tensors: dict[str, str] = checksums["tensors"]
    if checksums["header"] != _header_digest(header) or tensors.keys() != header.keys() - {"__metadata__"}:
        raise ValueError
    return tensors


def _on_host(entry: Entry) -> Tensor:
    tensor = entry.read().detach()
    assert tensor.dtype == entry.dtype and tensor.numel() == math.prod(entry.shape), entry
    return tensor.to("cpu").contiguous()


def _header(entries: Sequence[Entry], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise CheckpointError(
                f"{entry.key} is of {entry.dtype}, which a file of safetensors does not hold. Keep it as real numbers "
                "(torch.view_as_real), or register the buffer with persistent=False"
            )
        span = [offset, offset + entry.num_bytes]
        header[entry.key] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces, which JSON ignores, so that the data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_all(fd: int, data: memoryview) -> None:
    # Linux writes at most 2 GiB in one call.
    while data:
        data = data[os.write(fd, data) :]
