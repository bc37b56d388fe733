"""Weights of a model by full name, read one tensor at a time, from whatever a user can point at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from torch import Tensor

from vissl_zero.checkpoint.folder import find_checkpoints, newest_checkpoint
from vissl_zero.checkpoint.manifest import MANIFEST_NAME, TensorInfo
from vissl_zero.checkpoint.reader import Checkpoint
from vissl_zero.checkpoint.shard_file import ShardFile
from vissl_zero.errors import CheckpointError

WEIGHTS_FILE, AVERAGED_WEIGHTS_FILE = "weights.safetensors", "weights_ema.safetensors"
PARAMETERS, BUFFERS = "model/", "buffer/"
AVERAGED_PARAMETERS, AVERAGED_BUFFERS = "average/", "buffer/average:"  # of the running average of the weights


class WeightsFile:
    """A safetensors file, read as a checkpoint is.

    Args:
        path: of the file; a link to a file is followed.
    Attributes:
        path: as given.
        tensors: name -> TensorInfo.
        metadata: texts in the file's header.
    Raises:
        CheckpointError: missing, damaged or no safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        # The user names this file himself, so a link is his own; what a manifest names is never followed.
        self._file = ShardFile(path.resolve())
        self.metadata: Mapping[str, str] = self._file.metadata
        self.tensors = {
            key: TensorInfo(key, self._file.dtypes[key], shape) for key, shape in sorted(self._file.shapes.items())
        }

    def read_into(self, name: str, first_element: int, out: Tensor) -> None:
        """Fill ``out`` (1-d, contiguous, of the stored dtype) with the elements from ``first_element`` on."""
        self._file.read_into(name, first_element, out)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Weights:
    """Whole parameters and buffers of a model, under their plain names. A context manager.

    Args:
        store: an open checkpoint or file; closed with this.
        stored: plain name -> name in the store.
    Attributes:
        path: of the store.
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
        """One whole tensor, on the CPU, in the stored dtype."""
        info = self.tensors[name]
        flat = torch.empty(info.num_elements, dtype=info.dtype)
        self.store.read_into(self._stored[name], 0, flat)
        return flat.view(info.shape)

    def read_range(self, name: str, first_element: int, num_elements: int) -> Tensor:
        """Elements of one tensor, flattened: (num_elements,)."""
        flat = torch.empty(num_elements, dtype=self.tensors[name].dtype)
        self.store.read_into(self._stored[name], first_element, flat)
        return flat

    def require_whole(self, names: Iterable[str] | None = None) -> None:
        """Read the data of a checkpoint against their checksums; other files have none.

        Args:
            names: plain names; None: all.
        Raises:
            CheckpointError: with a sentence for each damaged tensor.
        """
        if isinstance(self.store, Checkpoint):
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


def open_store(path: str | Path, passed_over: list[str] | None = None) -> Checkpoint | WeightsFile:
    """What a user points at: a checkpoint, a run folder (its newest checkpoint that opens, else the weights written at
    its end), or a safetensors file.

    Args:
        path: of any of these.
        passed_over: gets a sentence for each newer checkpoint of the run folder that does not open.
    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    path = Path(path).expanduser()
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(f"There is no {path}. Give a run folder, a checkpoint folder or a safetensors file.")
    if path.is_dir():
        if (path / MANIFEST_NAME).exists() or find_checkpoints(path):
            return newest_checkpoint(path, passed_over)
        if (path / WEIGHTS_FILE).is_file():
            return WeightsFile(path / WEIGHTS_FILE)
        raise CheckpointError(
            f"{path} holds neither checkpoints nor {WEIGHTS_FILE}. Give a run folder, one of its "
            "checkpoints/step_<steps> folders, or a safetensors file."
        )
    if is_torch_file(path):
        raise CheckpointError(
            f"{path} is a file of torch.save. Convert it first: "
            f"vissl-zero checkpoint import {path} --to weights.safetensors"
        )
    return WeightsFile(path)


def weights_of(store: Checkpoint | WeightsFile, is_averaged: bool = False) -> Weights:
    """The model in a store, without optimizer and other state.

    Args:
        store: open.
        is_averaged: the running average of the weights in place of the weights (``HOOKS.EMA_MODEL``).
    Raises:
        CheckpointError: it holds no average.
    """
    if isinstance(store, WeightsFile):
        if is_averaged:
            raise CheckpointError(
                f"{store.path} holds one set of weights. Where a run has kept an average, it stands beside "
                f"{WEIGHTS_FILE}, in {AVERAGED_WEIGHTS_FILE}, and in the run's checkpoints: give one of these."
            )
        return Weights(store, {name: name for name in store.tensors})
    prefixes = (AVERAGED_PARAMETERS, AVERAGED_BUFFERS) if is_averaged else (PARAMETERS, BUFFERS)
    others = () if is_averaged else (AVERAGED_BUFFERS,)
    stored = {
        key.removeprefix(prefix): key
        for prefix in prefixes
        for key in store.tensors
        if key.startswith(prefix) and not key.startswith(others)
    }
    if is_averaged and not stored:
        raise CheckpointError(
            f"{store.path} holds no running average. config.HOOKS.EMA_MODEL.SAVE_EMA_MODEL=true keeps one in training."
        )
    return Weights(store, stored)


def open_weights(path: str | Path, passed_over: list[str] | None = None) -> Weights:
    """The model in whatever ``path`` is; see ``open_store``."""
    return weights_of(open_store(path, passed_over))


def is_torch_file(path: Path) -> bool:
    """Whether a file begins as torch.save's do: a zip file, or a pickle."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError:
        return False
    # In a safetensors file the header, which is JSON, begins after eight bytes with its length.
    return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[8:] != b"{")


def config_of(store: Checkpoint | WeightsFile) -> dict[str, Any]:
    """The resolved run that wrote a store, as data; empty if it is not known. Nothing in it is run."""
    if isinstance(store, Checkpoint):
        return store.manifest.config
    beside = store.path.parent / "config.resolved.yaml"
    if store.path.name != WEIGHTS_FILE or not beside.is_file():
        return {}
    try:
        config = yaml.safe_load(beside.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}
