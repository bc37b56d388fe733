"""Features of images in files: safetensors shards and an index.

``<folder>/<SPLIT>.json``, written last, is the index: ``num_images``, ``feature_dim``, ``class_names`` and ``shards``
(file -> number of rows). A shard has ``features`` (n, F), ``image`` (n,), the place of each row's image in the split,
and ``label`` (n,), -1 without labels. ``<SPLIT>_images.txt`` names the images, one a line, in their order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vissl_zero.errors import DataError

FOLDER = "features"


@dataclass(frozen=True)
class ExtractedFeatures:
    """Features of a split, in the order of its images.

    Attributes:
        rows: (N, F).
        labels: (N,) int64, -1 without labels.
        images: names of the images.
        class_names: by label.
    """

    rows: Tensor
    labels: Tensor
    images: list[str]
    class_names: list[str]


class ShardWriter:
    """Writes one rank's rows as they come, a shard for every ``rows_per_shard``.

    Args:
        folder: exists.
        split: "TRAIN" or "TEST".
        rank: of the writer.
        rows_per_shard: bounds memory.
    Attributes:
        shards: file name -> number of rows, of what has been written.
    """

    def __init__(self, folder: Path, split: str, rank: int, rows_per_shard: int):
        self._folder, self._stem, self._rows_per_shard = folder, f"{split}_rank{rank:05d}", rows_per_shard
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.shards: dict[str, int] = {}

    def add(self, features: Tensor, images: Tensor, labels: Tensor) -> None:
        """Take rows (n, F), their images' places (n,) and labels (n,); n may be 0."""
        if len(features):
            self._waiting.append((features.cpu(), images.cpu(), labels.cpu()))
        if sum(len(part[0]) for part in self._waiting) >= self._rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        features, images, labels = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        name = f"{self._stem}_{len(self.shards):05d}.safetensors"
        tensors = {"features": features.contiguous(), "image": images.contiguous(), "label": labels.contiguous()}
        save_file(tensors, self._folder / name)
        self.shards[name] = len(features)


def write_index(
    folder: Path, split: str, shards: dict[str, int], feature_dim: int, images: list[str], class_names: list[str]
) -> None:
    """Write the index, when all ranks have written their shards. One rank calls this."""
    lines = "".join(name.replace("\n", " ") + "\n" for name in images)
    (folder / f"{split}_images.txt").write_text(lines, encoding="utf-8")
    index = {"split": split, "num_images": len(images), "feature_dim": feature_dim, "class_names": class_names}
    (folder / f"{split}.json").write_text(json.dumps({**index, "shards": shards}, indent=2) + "\n", encoding="utf-8")


def read_features(folder: str | Path, split: str = "TRAIN") -> ExtractedFeatures:
    """All features of a split, in the order of its images.

    Args:
        folder: ``<run folder>/features``, or the run folder.
        split: "TRAIN" or "TEST".
    Raises:
        DataError: there are none, or they are damaged.
    """
    folder = Path(folder)
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    try:
        index = json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))
        parts = [load_file(folder / Path(name).name) for name in index["shards"]]
        images = (folder / f"{split}_images.txt").read_text(encoding="utf-8").splitlines()
        places = torch.cat([part["image"] for part in parts])
        order = places.argsort()
        is_complete = torch.equal(places[order], torch.arange(index["num_images"]))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{folder} has no readable features of {split} ({error}). Extract them again.") from error
    if not is_complete or len(images) != len(places):
        raise DataError(f"{folder} lacks images of {split}, or has some twice. Extract them again.")
    rows = torch.cat([part["features"] for part in parts])[order]
    labels = torch.cat([part["label"] for part in parts])[order]
    return ExtractedFeatures(rows, labels, images, list(index["class_names"]))
