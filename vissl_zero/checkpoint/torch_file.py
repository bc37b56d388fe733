"""A plain torch state dict written tensor by tensor: what ``torch.load`` reads, without the whole model in memory.

``torch.save`` wants all tensors at once. Its file is an ordinary zip archive, nothing in it compressed: ``data.pkl``,
in which every tensor is a call of ``torch._utils._rebuild_tensor_v2`` on a storage named by number, and the bytes of
storage k as ``data/<k>``, each at a multiple of 64 bytes so that it can be mapped into memory
(https://docs.pytorch.org/docs/stable/notes/serialization.html). ``torch.load(weights_only=True)`` takes it.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vissl_zero.checkpoint.shard_file import SLICE_BYTES, Entry, bytes_of

_ROOT = "archive"
_ALIGNMENT = 64
_LOCAL_HEADER_BYTES, _ZIP64_EXTRA_BYTES = 30, 20
_PADDING_ID = b"FB"  # as torch calls the extra field that holds padding
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


def can_hold(dtype: torch.dtype) -> bool:
    """Whether a tensor of this type can be written (8-bit floats and wide unsigned integers cannot)."""
    return dtype in _STORAGES


def write_torch_file(path: Path, entries: Sequence[Entry]) -> None:
    """Write a new file, synced to the disk. One tensor at a time is in memory.

    Args:
        path: of the file; it must not exist.
        entries: in the order of the state dict, of types for which ``can_hold``.
    Raises:
        OSError: no room, or the disk failed; or the file exists.
    """
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            _add(archive, "data.pkl", _pickled(entries))
            _add(archive, "byteorder", sys.byteorder.encode())
            for index, entry in enumerate(entries):
                data = bytes_of(entry.read().detach().to("cpu").contiguous())
                assert len(data) == entry.num_bytes, entry
                _add(archive, f"data/{index}", data)
            _add(archive, "version", b"3\n")
        file.flush()
        os.fsync(file.fileno())


def _add(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    info.file_size = len(data)
    assert archive.fp is not None
    # zipfile adds its own field for sizes over 4 GiB; it decides by the size with 5 % in reserve.
    is_large = len(data) * 1.05 > zipfile.ZIP64_LIMIT
    start = archive.fp.tell() + _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_EXTRA_BYTES * is_large
    padding = -(start + 4) % _ALIGNMENT
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w") as member:
        for first in range(0, len(data), SLICE_BYTES):
            member.write(data[first : first + SLICE_BYTES])


class _Storage:
    """A storage that is only a number."""

    def __init__(self, index: int, entry: Entry):
        self.persistent_id = ("storage", _STORAGES[entry.dtype], str(index), "cpu", entry.num_elements)


class _Tensor:
    """A tensor that is only a shape and a storage."""

    def __init__(self, index: int, entry: Entry):
        storage = _Storage(index, entry)
        self._arguments: tuple[Any, ...] = (storage, 0, tuple(entry.shape), _strides(entry.shape), False, OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self._arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _Storage) else None


def _pickled(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    state = OrderedDict((entry.key, _Tensor(index, entry)) for index, entry in enumerate(entries))
    _Pickler(buffer, protocol=2).dump(state)
    return buffer.getvalue()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
