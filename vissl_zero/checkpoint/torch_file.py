"""Write state dicts in the format of ``torch.save`` tensor by tensor, and read such files without running code.

*Writing.* ``torch.save`` needs all tensors in memory. Its file is a zip archive without compression:
``data.pkl``, in which every tensor is a call of ``torch._utils._rebuild_tensor_v2`` on a storage named by number, and
the bytes of storage k as ``data/<k>``, each at a multiple of 64 bytes so that it can be mapped into memory
(https://docs.pytorch.org/docs/stable/notes/serialization.html). ``torch.load(weights_only=True)`` takes it.

*Reading.* These files are pickles, and a pickle can call any function. There are two checks. First, ``_inspect`` reads
the opcodes of the pickle, builds nothing, and accepts only names from a short list: plain tensors, containers and
numbers. Then ``torch.load(weights_only=True)`` builds the objects, with a list of its own. Arguments and paths, which
training programs save with the weights, are left out. NumPy scalars and arrays, which VISSL's meters and older weights
have, are built by the classes below instead of NumPy's. The reason is ``numpy.dtype.__setstate__``: it does not check
fields and flags from the file, and a file of a few hundred bytes can make it follow arbitrary pointers.
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
# As torch.save aligns data, which torch.load may map into memory.
_ALIGNMENT = 64
# Of the ZIP format: the fixed part of a member's header, and the extra field of a member of more than 4 GiB.
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
    """Check whether tensors of this dtype can be written (8-bit floats and wide unsigned integers cannot)."""
    return dtype in _STORAGES


def write_torch_file(path: Path, entries: Sequence[Entry]) -> None:
    """Write a new file and sync it to disk, with one tensor in memory at a time.

    Args:
        path: path of the file; it must not exist.
        entries: entries in the order of the state dict, of dtypes that ``can_hold`` accepts.
    Raises:
        OSError: the disk is full or fails, or the file exists.
    """
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            _add_aligned(archive, "data.pkl", _pickled(entries))
            # Without this entry torch.load takes the data for little-endian.
            _add_aligned(archive, "byteorder", sys.byteorder.encode())
            for index, entry in enumerate(entries):
                data = bytes_of(entry.read().detach().to("cpu").contiguous())
                assert len(data) == entry.num_bytes, entry
                _add_aligned(archive, f"data/{index}", data)
            # The archive's version that torch.save writes; torch.load refuses unknown ones.
            _add_aligned(archive, "version", b"3\n")
        file.flush()
        os.fsync(file.fileno())


def _add_aligned(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    info.file_size = len(data)
    assert archive.fp is not None
    # As zipfile decides: it adds a ZIP64 field if the size plus 5 % exceeds the limit.
    is_large = len(data) * 1.05 > zipfile.ZIP64_LIMIT
    start = archive.fp.tell() + _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_EXTRA_BYTES * is_large
    # The header of an extra field takes 4 bytes: its ID and length.
    padding = -(start + 4) % _ALIGNMENT
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w") as member:
        for first in range(0, len(data), SLICE_BYTES):
            member.write(data[first : first + SLICE_BYTES])


class _Storage:
    """A stand-in for a storage: only its index, dtype and size are pickled."""

    def __init__(self, index: int, entry: Entry):
        self.persistent_id = ("storage", _STORAGES[entry.dtype], str(index), "cpu", entry.num_elements)


class _Tensor:
    """A stand-in for a tensor: only its shape and storage are pickled."""

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
    # torch.save's own protocol. The reader of ``weights_only`` knows its opcodes.
    _Pickler(buffer, protocol=2).dump(state)
    return buffer.getvalue()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        # torch counts a size of 0 as 1 for strides.
        step *= max(size, 1)
    return tuple(reversed(strides))


_NUMBERS = re.compile(r"[<>=|]?(\?|b1|[iu][1248]|f[248])")
_MAX_PICKLE_BYTES = 2**25  # VISSL's own are below 2**22; the tensors' data are not part of it
_MAX_TUPLE = 2**20  # elements of a tuple, including nested tuples: the time to hash it grows with them
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
    """A stand-in for a NumPy array: its bytes and their layout."""

    def __init__(self, *arguments: Any):
        self._read: tuple[bytes, str, tuple[int, ...], bool] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.text is None:
            return  # strings, objects and records are not tensors, and are never used
        shape = tuple(shape)
        if not all(type(size) is int and size >= 0 for size in shape) or type(data) is not bytes:
            raise ValueError("an array has an impossible shape")
        if len(data) != math.prod(shape) * np.dtype(dtype.text).itemsize:
            raise ValueError("an array's data do not fit its shape")
        self._read = data, dtype.text, shape, bool(is_fortran)

    def tensor(self) -> Tensor | None:
        """Return a copy of the array as a tensor; None if its elements are not numbers."""
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
        # Only the byte order is taken from the state. Its other fields are those that crash NumPy.
        if self.text is not None and state[1] in ("<", ">"):
            self.text = state[1] + self.text.lstrip("<>=|")


class _Setting:
    """A stand-in for settings that training programs save with the weights; they are left out."""

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


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
    # DINO, MAE and timm save the arguments of the command with the weights, and these may hold paths.
    *((_Setting, name) for name in ("argparse.Namespace", "pathlib.PosixPath", "pathlib.WindowsPath")),
    *((_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
_KNOWN = _NAMES | {name for _, name in _STAND_INS}


def read_torch_file(path: Path) -> Any:
    """Read a file of ``torch.save`` to the CPU; NumPy arrays become ``NumpyArray``.

    Tensors of a zip file (torch 1.6 and later) stay on disk until they are used.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or would run code.
    """
    try:
        is_zip = _inspect(path)
        with torch.serialization.safe_globals(_STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            # Mapped, because a training checkpoint may be several times as large as the weights that are wanted from
            # it.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is refused: it is not a plain torch.save file. Nothing was run.") from error
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged or hostile file can raise any error in torch. No code of the file was run.
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or not a torch.save file ({reason}). Copy it again.") from error


def is_plain_tensor(value: Any) -> bool:
    """Check whether ``value`` is a CPU tensor with memory for every element, in a format of safetensors."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    if value.is_quantized or value.is_complex() or value.is_nested:
        return False
    # A stride of 0 could turn four bytes into terabytes.
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _inspect(path: Path) -> bool:
    """Check the opcodes of a file without building objects. Returns whether it is a zip file.

    Raises:
        CheckpointError: the file names something other than data.
        OSError, ValueError, zipfile.BadZipFile, ...: the file is damaged.
    """
    with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        if not is_zip:
            for _ in range(5):  # magic number, version, system information, the object, keys of storages
                _inspect_pickle(file, path)
            return False
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            # A compressed member could grow without bound, and overlapping ones could show each reader something else.
            if any(m.compress_type != zipfile.ZIP_STORED for m in members) or sum(m.file_size for m in members) > size:
                raise ValueError("its members are compressed or overlap")
            # All of them: two members may have one name, and readers differ in which they take.
            pickles = [member for member in members if member.filename.endswith("data.pkl")]
            if not pickles:
                raise ValueError("it has no data.pkl")
            for member in pickles:
                with archive.open(member) as stream:
                    _inspect_pickle(stream, path)
    return True


class _Builder(pickle.Unpickler):
    """An unpickler for containers, numbers, strings and stand-ins of NumPy arrays only."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = next((replacement for replacement, of in _STAND_INS if of == f"{module}.{name}"), None)
        if stand_in is None and f"{module}.{name}" == "_codecs.encode":
            return lambda text, _: text.encode("latin1")  # Python 3 pickles bytes so in protocol 2
        if stand_in is None:
            raise CheckpointError(f"it holds more than data ({module}.{name}), which loading it would run")
        return stand_in


def read_pickle(path: Path) -> Any:
    """Read a plain pickle of containers, numbers and strings; NumPy arrays become ``NumpyArray``.

    Raises:
        OSError: the file cannot be opened.
        CheckpointError: the file is damaged, or would run code.
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
    """Check one pickle by simulating its stack, with a number of elements in place of each object."""
    # The number counts nested tuples in full, although a pickle may share one: hashing visits each again.
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
                "Nothing was run. Save model.state_dict() alone where the file was made, or save safetensors."
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
    """Remove an opcode's operands from the stack and return them: back to the last mark if the opcode needs one."""
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
