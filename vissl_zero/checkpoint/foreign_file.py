"""Files of ``torch.save``, read without running anything in them.

They are pickles, and a pickle can call any function. ``torch.load(weights_only=True)`` builds tensors, containers and
numbers and refuses every other name; NumPy's scalars and arrays, which VISSL's meters and older weights hold, are added
to what it builds. There is no way round it here: a file that asks for more is refused, whoever made it.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vissl_zero.errors import CheckpointError

_NUMPY_KINDS = "?bhilqBHILQefdUSV"
_DAMAGED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, AssertionError, MemoryError)
_UNSAFE_NAME = re.compile(r"(?:GLOBAL|[Uu]nsupported (?:global|class|function)[: ]+) ?([\w.]+)")


def read_torch_file(path: Path) -> Any:
    """What a file of ``torch.save`` holds, on the CPU; tensors stay on the disk until they are used.

    Raises:
        CheckpointError: it cannot be read, is damaged, or asks for something to be run.
    """
    try:
        with torch.serialization.safe_globals(_numpy_names()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; what is not understood is refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    except pickle.UnpicklingError as error:
        if found := _UNSAFE_NAME.search(str(error)):
            raise CheckpointError(
                f"{path} is refused: it holds more than data ({found[1]}), which loading it would run. "
                "Nothing was run. Ask whoever made it for a plain state dict, or for safetensors."
            ) from error
        raise CheckpointError(f"{path} is refused: it is no plain file of torch.save. Nothing was run.") from error
    except (
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        EOFError,
        AssertionError,
    ) as error:
        # Whatever a damaged or hostile file makes torch stumble over: nothing was run, the remedy is the same.
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path} is damaged or no file of torch.save ({reason}). Copy it again.") from error


def _numpy_names() -> list[Any]:
    """Constructors of NumPy scalars and arrays, under their names before and after NumPy 2.0.

    They make numbers from bytes; an array of objects holds only what was itself built under these rules.
    """
    core = np._core.multiarray  # type: ignore[attr-defined]
    names: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in _NUMPY_KINDS}]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names += [(core.scalar, f"{module}.scalar"), (core._reconstruct, f"{module}._reconstruct")]
    return names
