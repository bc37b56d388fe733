"""Read the weights of a model by full name, one tensor at a time, from a checkpoint, a run folder or a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vissl_zero.atomic import open_regular
from vissl_zero.checkpoint.folder import (
    MANIFEST_NAME,
    Checkpoint,
    TensorInfo,
    newest_checkpoint,
    numbered_checkpoints,
)
from vissl_zero.checkpoint.shard_file import ShardFile
from vissl_zero.engine.stopping import read_jobs
from vissl_zero.errors import CheckpointError
from vissl_zero.resolve.data_plan import names_like
from vissl_zero.resolve.image_files import EXTENSIONS, image_files
from vissl_zero.resolve.saved import RESOLVED_FILE, read_saved

WEIGHTS_FILE, AVERAGED_WEIGHTS_FILE = "weights.safetensors", "weights_ema.safetensors"
TEACHER_WEIGHTS_FILE, BEST_WEIGHTS_FILE = "weights_teacher.safetensors", "weights_best.safetensors"
FILES_OF_A_RUN = (WEIGHTS_FILE, AVERAGED_WEIGHTS_FILE, TEACHER_WEIGHTS_FILE, BEST_WEIGHTS_FILE)
PARAMETERS, BUFFERS = "model/", "buffer/"
_TEACHER_BUFFERS, _AVERAGED_BUFFERS = "buffer/teacher:", "buffer/average:"
# Model in a store -> prefixes of the names of its parameters and buffers.
_PREFIXES = {
    "student": (PARAMETERS, BUFFERS),
    "average": ("average/", _AVERAGED_BUFFERS),
    "teacher": ("teacher/", _TEACHER_BUFFERS),
}
_IMAGES_ARE_NAMED = "Images are named after the weights (evaluate, embed), or by config.DATA.TRAIN.DATA_PATHS."
_MISSING = {
    "average": "no running average. config.HOOKS.EMA_MODEL.SAVE_EMA_MODEL=true keeps one in training",
    "teacher": "no teacher. docs/methods.md says which methods have one",
}


class WeightsFile:
    """A safetensors file with the interface of ``Checkpoint``.

    Args:
        path: path of the file; a link to a file is followed.
    Attributes:
        path: the path argument.
        tensors: name -> TensorInfo.
        metadata: strings in the file's header.
    Raises:
        CheckpointError: the file is missing, damaged or not a safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        # The user names this file, so a link is trusted. Links that a manifest names are never followed.
        self._file = ShardFile(path.resolve())
        self.metadata: Mapping[str, str] = self._file.metadata
        self.tensors = {
            key: TensorInfo(key, self._file.dtypes[key], shape) for key, shape in sorted(self._file.shapes.items())
        }

    def read_into(self, name: str, first_element: int, out: Tensor) -> None:
        """Fill ``out`` (1-d, contiguous, of the stored dtype) with the elements from ``first_element`` on."""
        self._file.read_into(name, first_element, out)

    def verify(self, names: Iterable[str] | None = None) -> Iterator[str]:
        """Verify data against the checksums in the file; yield a sentence for each damaged tensor.

        Args:
            names: tensors to read; None: all.
        """
        return self._file.damaged(names)

    @property
    def has_checksums(self) -> bool:
        """Check whether the file has checksums: files of vissl_zero have them, files of other programs do not."""
        return bool(self._file.digests) or not self.tensors

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Weights:
    """Full parameters and buffers of a model by plain name. A context manager.

    Args:
        store: open checkpoint or file; ``close`` closes it.
        stored: plain name -> name in the store.
    Attributes:
        path: path of the store.
        tensors: plain name -> TensorInfo, parameters first.
    """

    def __init__(self, store: Checkpoint | WeightsFile, stored: Mapping[str, str]):
        self.store = store
        self.path = store.path
        self._stored = stored
        self.tensors = {
            name: TensorInfo(name, store.tensors[key].dtype, store.tensors[key].shape) for name, key in stored.items()
        }

    def read(self, name: str) -> Tensor:
        """Read one full tensor, on the CPU, in the stored dtype."""
        info = self.tensors[name]
        flat = torch.empty(info.num_elements, dtype=info.dtype)
        self.store.read_into(self._stored[name], 0, flat)
        return flat.view(info.shape)

    def read_range(self, name: str, first_element: int, num_elements: int) -> Tensor:
        """Read elements of one tensor, flattened: (num_elements,)."""
        flat = torch.empty(num_elements, dtype=self.tensors[name].dtype)
        self.store.read_into(self._stored[name], first_element, flat)
        return flat

    def require_undamaged(self, names: Iterable[str] | None = None) -> None:
        """Verify the data against their checksums, if the store has checksums (``WeightsFile.has_checksums``).

        Args:
            names: plain names; None: all.
        Raises:
            CheckpointError: data are damaged; the message has a sentence for each damaged tensor.
        """
        wanted = self._stored if names is None else names
        if problems := list(self.store.verify(names={self._stored[name] for name in wanted})):
            raise CheckpointError("\n".join(problems))

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(
    path: str | Path, passed_over: list[str] | None = None, with_data: bool = False
) -> Checkpoint | WeightsFile:
    """Open a checkpoint, a run folder or a safetensors file.

    For a run folder, open its newest checkpoint that can be opened. If there is none, or if the weights written at the
    end of the run are of a later step, open these weights.

    Args:
        path: path of a checkpoint, a run folder or a file.
        passed_over: receives a sentence for each newer checkpoint of the run folder that cannot be opened.
        with_data: also verify the data against their checksums, if there are any.
    Raises:
        CheckpointError: the path is none of these, or damaged.
    """
    path = Path(path).expanduser()
    if not path.exists() and not path.is_symlink():
        hint = names_like(path.parent, path.name)
        raise CheckpointError(
            f"There is no {path}.{hint} Give a run folder, a checkpoint folder or a safetensors file."
        )
    if not path.is_dir():
        if is_torch_file(path):
            raise CheckpointError(
                f"{path} was written by torch.save. Convert it first: "
                f"vissl-zero checkpoint import {path} --to weights.safetensors"
            )
        if path.suffix.lower() in EXTENSIONS:
            raise CheckpointError(f"{path} is an image, not weights. {_IMAGES_ARE_NAMED} Give a file of weights.")
        return _weights_file(path, with_data)
    final = path / WEIGHTS_FILE
    if (path / MANIFEST_NAME).exists():
        return newest_checkpoint(path, with_data=with_data)
    if checkpoints := numbered_checkpoints(path):
        # At equal steps the checkpoint: it has the teacher and the average too.
        if (step := final_step(path)) is not None and step > checkpoints[0][0]:
            return _weights_file(final, with_data)
        return newest_checkpoint(path, passed_over, with_data)
    if os.path.lexists(final):
        return _weights_file(final, with_data)
    raise CheckpointError(f"{path} {_what_else(path)}")


def _what_else(folder: Path) -> str:
    """Return the end of a message: the contents of a folder without weights, and what to name instead."""
    if jobs := read_jobs(folder):
        return f"holds several runs. Name one of them: {', '.join(map(str, jobs))}."
    what = f"holds images, not weights. {_IMAGES_ARE_NAMED}"
    if (folder / RESOLVED_FILE).exists() or next(image_files(folder), None) is None:
        what = f"holds neither checkpoints nor {WEIGHTS_FILE}."
    return f"{what} Give a run folder, one of its checkpoints/step_<steps> folders, or a file of weights."


def final_step(run_folder: Path) -> int | None:
    """Return the step of the weights written at the end of a run; None if there are none, or without a step."""
    try:
        file = WeightsFile(run_folder / WEIGHTS_FILE)
    except CheckpointError:
        return None
    file.close()
    text = file.metadata.get("step", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _weights_file(path: Path, with_data: bool) -> WeightsFile:
    file = WeightsFile(path)
    if problems := list(file.verify()) if with_data else []:
        file.close()
        raise CheckpointError("\n".join(problems))
    return file


def weights_of(store: Checkpoint | WeightsFile, which: str = "student") -> Weights:
    """Return the weights of one model in a store, without optimizer and other state.

    Args:
        store: open checkpoint or file.
        which: "student": the trained model; "average": the running average of its weights (``HOOKS.EMA_MODEL``, or
            ``vissl_zero.ema`` in a custom loop); "teacher": the momentum teacher of some methods.
    Raises:
        CheckpointError: the store does not have this model.
    """
    if isinstance(store, WeightsFile):
        if which == "average":
            raise CheckpointError(
                f"{store.path} holds one set of weights. Where a run has kept an average, it stands beside "
                f"{WEIGHTS_FILE}, in {AVERAGED_WEIGHTS_FILE}, and in the run's checkpoints: give one of these."
            )
        return Weights(store, {name: name for name in store.tensors})
    # The names of their buffers begin with the student's prefix.
    others = (_AVERAGED_BUFFERS, _TEACHER_BUFFERS) if which == "student" else ()
    stored = {
        key.removeprefix(prefix): key
        for prefix in _PREFIXES[which]
        for key in store.tensors
        if key.startswith(prefix) and not key.startswith(others)
    }
    if which == "average" and not stored and not store.manifest.recipe:
        # Without a recipe it is of a custom loop, where the average of ``vissl_zero.ema`` is stored as a teacher.
        if not any(key.startswith("teacher/") for key in store.tensors):
            raise CheckpointError(
                f"{store.path} holds no running average. vissl_zero.ema(model, decay) before initialize() keeps one."
            )
        return weights_of(store, "teacher")
    if which != "student" and not stored:
        raise CheckpointError(f"{store.path} holds {_MISSING[which]}.")
    return Weights(store, stored)


def open_weights(path: str | Path, passed_over: list[str] | None = None, with_data: bool = False) -> Weights:
    """Open the trained model of a checkpoint, a run folder or a file; arguments and errors as for ``open_store``."""
    return weights_of(open_store(path, passed_over, with_data))


def is_torch_file(path: Path) -> bool:
    """Check whether a file begins as those of torch.save do: as a zip archive or a pickle."""
    try:
        with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
            start = file.read(9)
    except OSError:
        return False
    # A safetensors file begins with the header's length in eight bytes, then JSON. The length may look like a pickle.
    return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[8:] != b"{")


def config_of(store: Checkpoint | WeightsFile) -> dict[str, Any]:
    """Return the resolved configuration of the run that wrote a store, as plain data; empty if it is not known."""
    if isinstance(store, Checkpoint):
        return store.manifest.config
    # Only these names belong to the configuration beside them. A user's file may lie in any folder.
    if store.path.name not in FILES_OF_A_RUN:
        return {}
    try:
        return read_saved(store.path.parent / RESOLVED_FILE)
    except (OSError, ValueError):
        return {}
