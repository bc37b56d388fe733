"""A cache of a frozen teacher's outputs on disk: computed once for each view of an image, then read.

A folder has the outputs of one teacher for the views of one data set; its name is a digest of everything that decides
the outputs. Each process appends to its own two files, and reads the files of all processes:

- ``<id>.rows``: the bytes of samples, one after another;
- ``<id>.places``: the place of each row, ``view * num_images + image``, int64.

Places are written after their rows are on disk, so a killed process leaves no partial rows. A later run continues with
any number of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vissl_zero import collectives
from vissl_zero.atomic import replacing
from vissl_zero.data.source import Source
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.resolve.components import method_of
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.terminal import print_line

FOLDER = "teacher_features"
_ROWS, _PLACES, _ABOUT = ".rows", ".places", "about.json"
_MAX_UNWRITTEN = 1024  # samples that a killed process loses at most
# Relative to the largest value. Rounding of half precision on another machine stays below, a different image does not.
_TOLERANCE = 0.05


class _Layout:
    """The layout of the outputs for one sample in a row of bytes.

    Args:
        outputs: outputs of a micro-batch: tensors (V * B, ...), crop-major; other values are equal for all samples.
        num_samples: B, at least 1.
    """

    def __init__(self, outputs: list[Any], num_samples: int):
        self._others, self._structure = pytree.tree_flatten(outputs)
        tensors = [leaf for leaf in self._others if isinstance(leaf, Tensor)]
        self._shapes = [(len(leaf) // num_samples, *leaf.shape[1:]) for leaf in tensors]
        self._dtypes = [leaf.dtype for leaf in tensors]
        sizes = [leaf.numel() // num_samples * leaf.itemsize for leaf in tensors]
        self._ends = list(accumulate(sizes))
        self.row_bytes = sum(sizes)

    def pack(self, outputs: list[Any], num_samples: int) -> np.ndarray:
        """Convert outputs to rows (B, row_bytes), uint8."""
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        by_sample = [
            leaf.detach().cpu().unflatten(0, (shape[0], num_samples)).transpose(0, 1).reshape(num_samples, -1)
            for leaf, shape in zip(tensors, self._shapes, strict=True)
        ]
        return torch.cat([rows.contiguous().view(torch.uint8) for rows in by_sample], dim=1).numpy()

    def unpack(self, rows: np.ndarray, device: torch.device) -> list[Any]:
        """Convert rows (B, row_bytes) to outputs on ``device``."""
        data, begin, tensors = torch.from_numpy(rows), 0, []
        for end, shape, dtype in zip(self._ends, self._shapes, self._dtypes, strict=True):
            values = data[:, begin:end].clone().view(dtype)  # cloned, because ``view`` needs aligned memory
            tensors.append(values.view(len(rows), *shape).transpose(0, 1).flatten(0, 1).to(device))
            begin = end
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self._others]
        outputs: list[Any] = pytree.tree_unflatten(leaves, self._structure)
        return outputs


class TeacherFeatures:
    """The cached outputs of the teacher for the micro-batches of a run. All ranks must call ``outputs`` together.

    Args:
        folder: folder for this teacher, these images and these views; see ``folder_of``.
        num_images: number of images of the source.
        num_views: number of views of each image: AUGMENTATION_PERIOD.
        device: device of the returned outputs.
    """

    def __init__(self, folder: Path, num_images: int, num_views: int, device: torch.device):
        self.folder = folder
        self._num_images, self._num_views, self._device = num_images, num_views, device
        self._epoch = -1
        self._layout: _Layout | None = None
        self._maps: list[np.memmap] = []
        self._starts = np.zeros(1, dtype=np.int64)  # index of each map's first row among the rows of all maps
        self._where = np.full(num_images * num_views, -1, dtype=np.int64)  # place -> row among all maps; -1: not cached
        self._is_complete = False
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._unwritten: list[int] = []  # places of rows that may not be on disk yet
        self._is_writing = True
        self.num_computed = 0  # micro-batches that the teacher was run for

    def outputs(self, epoch: int, sample_ids: Tensor, compute: Callable[[], list[Any]]) -> list[Any]:
        """Return the teacher's outputs for a micro-batch: read, or computed if any rank lacks one. Collective.

        Args:
            epoch: epoch of the run, from 0.
            sample_ids: (B,) index of each image.
            compute: function that runs the teacher; called on all ranks or on none.
        Cost: an all-reduce of one number, until all images are cached.
        """
        places = sample_ids.cpu().numpy() + epoch % self._num_views * self._num_images
        # The first micro-batch is always computed: it shows the layout, and whether the cache has the same outputs.
        if self._layout is None:
            computed = compute()
            self._layout = _Layout(computed, len(places))
            self._open(epoch)
            self._require_same(computed, places)
            self._keep(computed, places)
            return computed
        if epoch != self._epoch:
            self._open(epoch)
        # The teacher may be sharded, so that all ranks must run it if one rank needs to.
        if not self._is_complete and self._any(bool((self._where[places] < 0).any())):
            computed = compute()
            self._keep(computed, places)
            return computed
        return self._layout.unpack(self._read(places), self._device)

    def close(self) -> None:
        """Write all rows to disk and close the files. Not a collective."""
        self._write()
        for file in self._files or ():
            file.close()
        self._files = None

    def _any(self, value: bool) -> bool:
        number = torch.tensor(float(value), device=self._device)
        return bool(collectives.all_reduce_max(number) > 0)

    def _open(self, epoch: int) -> None:
        """Map the current files of all processes. Collective: every rank writes first."""
        assert self._layout is not None
        self._write()
        self._any(False)  # a barrier: all ranks have written
        counts: list[int] = []
        self._epoch, self._maps, size = epoch, [], self._layout.row_bytes
        for path in sorted(self.folder.glob(f"*{_PLACES}")):
            places, rows = np.fromfile(path, dtype=np.int64), path.with_suffix(_ROWS)
            count = min(len(places), rows.stat().st_size // size)  # another process may be writing
            if count:
                self._where[places[:count]] = np.arange(count) + sum(counts)
                self._maps.append(np.memmap(rows, np.uint8, "r", shape=(count, size)))
                counts.append(count)
        self._starts = np.cumsum([0, *counts])
        self._is_complete = not self._any(bool((self._where < 0).any()))

    def _read(self, places: np.ndarray) -> np.ndarray:
        assert self._layout is not None
        where = self._where[places]
        of_map = np.searchsorted(self._starts, where, "right") - 1
        picked = np.empty((len(places), self._layout.row_bytes), dtype=np.uint8)
        for index in np.unique(of_map):
            is_there = of_map == index
            picked[is_there] = self._maps[index][where[is_there] - self._starts[index]]
        return picked

    def _keep(self, outputs: list[Any], places: np.ndarray) -> None:
        """Append the rows of images that are not cached."""
        assert self._layout is not None
        self.num_computed += 1
        is_new = self._where[places] < 0
        if not self._is_writing or not is_new.any():
            return
        try:
            if self._files is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                # A random name: ranks of this run, and of others that share the folder, must never write to one file.
                name = uuid4().hex
                paths = [self.folder / f"{name}{ending}" for ending in (_ROWS, _PLACES)]
                self._files = paths[0].open("xb"), paths[1].open("xb")
            self._files[0].write(self._layout.pack(outputs, len(places))[is_new].tobytes())
        except OSError as error:
            self._stop_writing(error)
            return
        self._unwritten += places[is_new].tolist()
        if len(self._unwritten) >= _MAX_UNWRITTEN:
            self._write()

    def _write(self) -> None:
        if self._files is None or not self._unwritten:
            return
        try:
            self._files[0].flush()
            # Rows reach the disk before their places: after a power cut, places alone would name rows of zeros.
            os.fsync(self._files[0].fileno())
            self._files[1].write(np.array(self._unwritten, dtype=np.int64).tobytes())
            self._files[1].flush()
            os.fsync(self._files[1].fileno())
        except OSError as error:
            self._stop_writing(error)
        self._unwritten = []

    def _stop_writing(self, error: OSError) -> None:
        """Stop caching and print a warning: a full disk must not end the run."""
        self._is_writing, self._unwritten = False, []
        print_line(
            f"warning: {self.folder} cannot be written ({error.strerror}). The teacher computes what is not there."
        )

    def _require_same(self, outputs: list[Any], places: np.ndarray) -> None:
        """Raise VisslZeroError on all ranks if cached outputs differ from the computed ones. Collective."""
        assert self._layout is not None
        known = self._where[places] >= 0
        is_other = False
        if known.all():
            kept = self._layout.unpack(self._read(places), self._device)
            pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(kept), strict=True)
            is_other = any(_differ(*pair) for pair in pairs if isinstance(pair[0], Tensor))
        if self._any(is_other):
            raise VisslZeroError(
                f"{self.folder} holds other features than the teacher gives for the same images: some were changed in "
                "place, or the files are damaged. Delete this folder."
            )


def _differ(value: Tensor, other: Tensor) -> bool:
    value, other = value.detach().double(), other.double()
    return bool((value - other).abs().max() > _TOLERANCE * value.abs().max()) if value.numel() else False


def folder_of(plan: ResolvedRun, source: Source, checksum: int) -> Path:
    """Return the cache folder for a run's teacher and images, the same on every rank. Collective.

    Args:
        plan: plan of the run.
        source: training images.
        checksum: checksum of the teacher's weights.
    Cost: rank 0 calls ``stat`` for each image file; no file is read.
    """
    facts = collectives.broadcast_object(_facts(plan, source, checksum) if collectives.rank() == 0 else "")
    block = plan.config.DISTILLATION
    folder = Path(block.CACHE_FOLDER or Path(plan.run_dir) / FOLDER) / sha256(facts.encode()).hexdigest()[:16]
    if collectives.rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / _ABOUT) as path:
                path.write_text(facts + "\n", encoding="utf-8")
        except OSError as error:
            must, fix = f"must be a folder that can be written ({error.strerror})", "Name another folder."
            raise ConfigError([Problem("config.DISTILLATION.CACHE_FOLDER", str(folder), must, fix)]) from error
    return folder


def _facts(plan: ResolvedRun, source: Source, checksum: int) -> str:
    """Return everything that decides the teacher's outputs for a view of an image, as JSON."""
    config, loss = plan.config, plan.config.LOSS["name"]
    keys, train = method_of(loss).teacher_keys[loss], asdict(config.DATA.TRAIN)
    images = ("DATA_SOURCES", "DATASET_NAMES", "SOURCE_PARAMS", "DATA_LIMIT", "DATA_LIMIT_SAMPLING", "TRANSFORMS")
    teacher = asdict(config.DISTILLATION.TEACHER_MODEL)
    del teacher["WEIGHTS_INIT"]  # the checksum identifies the weights; their path does not matter
    reading = ("BACKEND", "EXIF", "BACKGROUND", "MAX_PIXELS", "ON_BROKEN_IMAGE")
    facts = {
        "teacher": {"checksum": checksum, "model": teacher},
        "loss": {"name": loss, **{key: config.LOSS[loss][key] for key in keys}},
        "images": {"count": len(source), "digest": _digest(source, config.DATA.TRAIN.DATA_PATHS)},
        "data": {key: train[key] for key in (*images, "DEFAULT_GRAY_IMG_SIZE")},
        "reading": {key: getattr(config.DATA, key) for key in reading},
        "views_apart": config.MODEL.VIEWS_APART,
        "seed": plan.seed,
        "numbers": {**asdict(plan.sharding.precision), "float8": asdict(config.MODEL.FLOAT8)},
        # Kernels of another device or version round differently.
        "computed_by": [plan.device, torch.__version__],
    }
    return json.dumps(facts, default=str, sort_keys=True, indent=1)


def _digest(source: Source, paths: Sequence[str]) -> str:
    """Return a digest of the images' names, and of size and time of image files and of entries of DATA_PATHS."""
    digest = sha256()
    names = (source.name(index) for index in range(len(source)))
    for text in chain(names, *(_held(Path(path)) for path in paths)):
        digest.update(os.fsencode(text) + b"\0" + _state(text))
    return digest.hexdigest()


def _held(path: Path) -> Iterable[str]:
    yield str(path)
    if path.is_dir():
        yield from sorted(map(str, path.iterdir()))


def _state(path: str) -> bytes:
    try:
        facts = os.stat(path)  # noqa: PTH116 - a name may be any text
    except (OSError, ValueError):
        return b""
    return f"{facts.st_size} {facts.st_mtime_ns}".encode()
