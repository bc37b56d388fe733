"""Files of ``torch.save``: state dicts written tensor by tensor, and files read without running code in them.

*Writing.* ``torch.save`` wants all tensors at once. Its file is an ordinary zip archive, nothing in it compressed:
``data.pkl``, in which every tensor is a call of ``torch._utils._rebuild_tensor_v2`` on a storage named by number, and
the bytes of storage k as ``data/<k>``, each at a multiple of 64 bytes so that it can be mapped into memory
(https://docs.pytorch.org/docs/stable/notes/serialization.html). ``torch.load(weights_only=True)`` takes it.

*Reading.* These files are pickles, and a pickle can call any function. Two guards stand here, one before the other.
``_inspect`` reads the pickle as a list of opcodes, builds nothing, and refuses every name outside a short list: plain
tensors, containers and numbers. ``torch.load(weights_only=True)`` then builds these, and would itself refuse anything
else. NumPy scalars and arrays, which VISSL's meters and older weights hold, are built by the classes below in place of
NumPy's own: ``numpy.dtype.__setstate__`` takes fields and flags from the file as they are, and a file of a few hundred
bytes makes it follow pointers of the file's choosing.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import re
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vissl_zero.atomic import open_regular
from vissl_zero.checkpoint.shard_file import SLICE_BYTES, Entry, bytes_of
from vissl_zero.errors import CheckpointError

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
    """Check whether a tensor of this type can be written (8-bit floats and wide unsigned integers cannot)."""
    return dtype in _STORAGES


def write_torch_file(path: Path, entries: Sequence[Entry]) -> None:
    """Write a new file, synced to the disk. One tensor at a time is in memory.

    Args:
        path: path of the file; it must not exist.
        entries: entries in the order of the state dict, of types for which ``can_hold``.
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
    # 4: the extra field's own id and length come before its content.
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


_NUMBERS = re.compile(r"[<>=|]?(\?|b1|[iu][1248]|f[248])")
_MAX_PICKLE_BYTES = 2**25  # VISSL's own are below 2**22; the tensors' data are not part of it
_MAX_TUPLE = 2**20  # elements of a tuple, those of the tuples in it included: hashing one takes that long
_REFUSED_BY_ALL = ("INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID")
_REFUSED_OPCODES = (*_REFUSED_BY_ALL, "STACK_GLOBAL", "FRAME")  # torch.save never writes these
_TORCH_FUNCTIONS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_sparse_tensor")
_NAMES = {
    *(f"torch._utils.{name}" for name in (*_TORCH_FUNCTIONS, "_rebuild_parameter")),
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.set", "builtins.complex"),
    *("__builtin__.set", "__builtin__.complex", "torch.Size", "torch.device", "torch.serialization._get_layout"),
    *("torch.nn.parameter.Parameter", "torch.storage.UntypedStorage"),
    *(f"torch.{value}Storage" for value in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char")),
    *(f"torch.{value}Storage" for value in ("Byte", "Bool", "ComplexFloat", "ComplexDouble")),
    *(f"torch.{name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
}


class NumpyArray:
    """A stand-in for a NumPy array: bytes, and their layout."""

    def __init__(self, *arguments: Any):
        self._read: tuple[bytes, str, tuple[int, ...], bool] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.text is None:
            return  # texts, objects, records: not tensors, and never used
        shape = tuple(shape)
        if not all(type(size) is int and size >= 0 for size in shape) or type(data) is not bytes:
            raise ValueError("an array has an impossible shape")
        if len(data) != math.prod(shape) * np.dtype(dtype.text).itemsize:
            raise ValueError("an array's data do not fit its shape")
        self._read = data, dtype.text, shape, bool(is_fortran)

    def tensor(self) -> Tensor | None:
        """Copy the array into a tensor; return None if it does not hold numbers."""
        if self._read is None:
            return None
        data, text, shape, is_fortran = self._read
        array = np.frombuffer(data, dtype=text).reshape(shape, order="F" if is_fortran else "C")
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


class _Dtype:
    """A stand-in for ``numpy.dtype``: a number format, or None."""

    def __init__(self, text: Any = None, *flags: Any):
        self.text = text if isinstance(text, str) and _NUMBERS.fullmatch(text) else None

    def __setstate__(self, state: Any) -> None:
        if self.text is not None and state[1] in ("<", ">"):
            self.text = state[1] + self.text.lstrip("<>=|")


def _array(*arguments: Any) -> NumpyArray:
    return NumpyArray()


def _scalar(dtype: Any, data: Any = None) -> Any:
    if not isinstance(dtype, _Dtype) or dtype.text is None or type(data) is not bytes:
        return None
    if len(data) != np.dtype(dtype.text).itemsize:
        raise ValueError("a number's bytes do not fit its type")
    return np.frombuffer(data, dtype=dtype.text)[0].item()


_STAND_INS: list[Any] = [
    (_Dtype, "numpy.dtype"),
    (NumpyArray, "numpy.ndarray"),
    *((_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
_KNOWN = _NAMES | {name for _, name in _STAND_INS}


def read_torch_file(path: Path) -> Any:
    """Read a file of ``torch.save`` to the CPU; arrays of NumPy become ``NumpyArray``.

    Tensors of a zip file (torch 1.6 and later) stay on the disk until they are used.

    Raises:
        CheckpointError: it cannot be read, is damaged, or asks for something to be run.
    """
    try:
        is_zip = _inspect(path)
        with torch.serialization.safe_globals(_STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; what is not understood is refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is refused: it is not a plain torch.save file. Nothing was run.") from error
    except CheckpointError:
        raise
    except Exception as error:
        # Whatever a damaged or hostile file makes torch stumble over: nothing was run, the remedy is the same.
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or not a torch.save file ({reason}). Copy it again.") from error


def is_plain_tensor(value: Any) -> bool:
    """Check for a tensor with memory of its own for every element, in a format that safetensors has."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    if value.is_quantized or value.is_complex() or value.is_nested:
        return False
    # A stride of 0 makes terabytes of four bytes.
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _inspect(path: Path) -> bool:
    """Read the opcodes, building nothing. Returns whether it is a zip file.

    Raises:
        CheckpointError: it names what is not data.
        OSError, ValueError, zipfile.BadZipFile, ...: it is damaged.
    """
    with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        if not is_zip:
            for _ in range(5):  # magic number, version, the machine's facts, the object, keys of storages
                _inspect_pickle(file, path)
            return False
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED for m in members) or sum(m.file_size for m in members) > size:
                raise ValueError("its members are compressed or overlap")
            pickles = [member for member in members if member.filename.endswith("data.pkl")]
            if not pickles:
                raise ValueError("it has no data.pkl")
            for member in pickles:
                with archive.open(member) as stream:
                    _inspect_pickle(stream, path)
    return True


class _Builder(pickle.Unpickler):
    """Builds nothing but containers, numbers, texts and what stands for NumPy's arrays."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = next((replacement for replacement, of in _STAND_INS if of == f"{module}.{name}"), None)
        if stand_in is None and f"{module}.{name}" == "_codecs.encode":
            return lambda text, _: text.encode("latin1")  # how Python 3 writes bytes for Python 2
        if stand_in is None:
            raise CheckpointError(f"it holds more than data ({module}.{name}), which loading it would run")
        return stand_in


def read_pickle(path: Path) -> Any:
    """Read a plain pickle: containers, numbers, texts; arrays of NumPy become ``NumpyArray``.

    Raises:
        OSError: it is not there.
        CheckpointError: it is damaged, or asks for something to be run.
    """
    with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
        try:
            _inspect_pickle(file, path, refused=_REFUSED_BY_ALL)
            file.seek(0)
            return _Builder(file, encoding="latin1").load()
        except Exception as error:
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            raise CheckpointError(f"{path} is refused: it is no plain pickle ({reason}). Nothing was run.") from error


def _inspect_pickle(file: IO[bytes], path: Path, refused: Sequence[str] = _REFUSED_OPCODES) -> None:
    """Check one pickle. ``stack`` and ``memo`` hold each object's number of elements, nested tuples counted out."""
    stack: list[int | None] = []  # None: a mark
    memo: dict[Any, int | None] = {}
    start = file.tell()
    for opcode, argument, position in pickletools.genops(file):
        if (position or 0) - start > _MAX_PICKLE_BYTES:
            raise ValueError(f"its pickle has more than {_MAX_PICKLE_BYTES} bytes")
        name = opcode.name
        if name in refused:
            raise pickle.UnpicklingError(name)
        if name == "GLOBAL" and (global_name := str(argument).replace(" ", ".", 1)) not in _KNOWN:
            raise CheckpointError(
                f"{path} is refused: it holds more than data ({global_name[:80]}), which loading it would run. "
                "Nothing was run. Ask whoever made it for a plain state dict, or for safetensors."
            )
        if name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        else:
            taken = _pop(stack, opcode.stack_before)
            of_tuple = 1 + sum(count or 0 for count in taken) if name.startswith("TUPLE") else 1
            if of_tuple > _MAX_TUPLE:
                raise ValueError("its tuples are nested without end")
            is_mark = name == "MARK"
            stack += [None if is_mark else of_tuple for _ in opcode.stack_after]


def _pop(stack: list[int | None], before: Sequence[Any]) -> list[int | None]:
    """Take what an opcode takes off the stack; back to the last mark where it asks for one."""
    if pickletools.markobject in before:
        place = len(stack) - 1
        while place >= 0 and stack[place] is not None:
            place -= 1
        if place < 0:
            raise ValueError("its pickle pops an empty stack")
        fixed = before.index(pickletools.markobject)
        taken = stack[place + 1 :]
        del stack[place - fixed :]
        return taken
    taken = stack[len(stack) - len(before) :] if before else []
    if len(taken) < len(before):
        raise ValueError("its pickle pops an empty stack")
    del stack[len(stack) - len(before) :]
    return taken
