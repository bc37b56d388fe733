"""Features of images in files: safetensors shards and an index, and the hook that writes them.

``<folder>/<SPLIT>.json``, written last, is the index: ``num_images``, ``feature_dim``, ``class_names`` and ``shards``
(file -> number of rows); of inner layers also ``layers`` (name -> first column, and the one after the last). A shard
has ``features`` (n, F), ``image`` (n,), the place of each row's image in the split, and ``label`` (n,), -1 without
labels. ``<SPLIT>_images.txt`` names the images, one a line, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import rich
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vissl_zero.atomic import read_object
from vissl_zero.data.eval_images import eval_images
from vissl_zero.data.source import Source, build_eval_sources
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import DataError
from vissl_zero.evaluation.features import evaluating, layers_of, own_batches
from vissl_zero.registry import HOOKS

_ROWS_PER_SHARD = 2**16


@HOOKS.register("extract_features")
class ExtractFeatures(Hook):
    """Writes the trunk's features at the end of the run, each image once, whatever the number of ranks.

    Images are transformed as for evaluation (TEST.TRANSFORMS). Every rank writes the rows of its share as they come.
    The format is that of ``evaluation/feature_files.py``.
    """

    def on_end(self, run: Run) -> None:
        train, test = build_eval_sources(run.plan.config["DATA"], run.plan.seed)
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        (run.folder / FOLDER).mkdir(exist_ok=True)
        counts = {
            split: self._extract(run, split, s) for split, s in (("TRAIN", train), ("TEST", test)) if s is not None
        }
        run.results["features_extracted"] = counts
        if run.is_main:
            said = ", ".join(f"{count} images of {split}" for split, count in counts.items())
            line = f"Features of {said}: {run.folder / FOLDER}"
            rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)

    def _extract(self, run: Run, split: str, source: Source) -> int:
        """Collective."""
        writer = ShardWriter(run.folder / FOLDER, split, run.rank, _ROWS_PER_SHARD)
        feature_dim = 0
        with run.sharded.evaluated(), evaluating(run.sharded.model):
            for batch, num_own in own_batches(run, eval_images(source, run.plan.config["DATA"], run.plan.seed)):
                (features,) = run.sharded.model(batch.images, features_only=True)
                feature_dim = features.shape[1]
                labels = torch.full_like(batch.sample_ids, -1) if batch.targets is None else batch.targets
                rows = features[:num_own].to(torch.promote_types(features.dtype, torch.float32))
                writer.add(rows, batch.sample_ids[:num_own], labels[:num_own])
        writer.flush()
        of_ranks: list[dict[str, int]] = [writer.shards]
        if run.world_size > 1:
            of_ranks = [{} for _ in range(run.world_size)]
            dist.all_gather_object(of_ranks, writer.shards)
        if run.is_main:
            shards = {name: rows for own in of_ranks for name, rows in own.items()}
            images = [source.name(index) for index in range(len(source))]
            names = list(source.class_names)
            write_index(run.folder / FOLDER, split, shards, feature_dim, images, names, layers_of(run))
        return len(source)


FOLDER = "features"


@dataclass(frozen=True)
class ExtractedFeatures:
    """Features of a split, in the order of its images.

    Attributes:
        rows: (N, F).
        labels: (N,) int64, -1 without labels.
        images: names of the images.
        class_names: by label.
        layers: columns of each inner layer; empty where the features are the trunk's.
    """

    rows: Tensor
    labels: Tensor
    images: list[str]
    class_names: list[str]
    layers: dict[str, slice] = field(default_factory=dict)


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
    folder: Path,
    split: str,
    shards: dict[str, int],
    feature_dim: int,
    images: list[str],
    class_names: list[str],
    layers: Mapping[str, slice],
) -> None:
    """Write the index, when all ranks have written their shards. One rank calls this."""
    lines = "".join(name.replace("\n", " ") + "\n" for name in images)
    (folder / f"{split}_images.txt").write_text(lines, encoding="utf-8")
    index = {"split": split, "num_images": len(images), "feature_dim": feature_dim, "class_names": class_names}
    if layers:
        index["layers"] = {name: [columns.start, columns.stop] for name, columns in layers.items()}
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
        index = read_object(folder / f"{split}.json")
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
    layers = {name: slice(*ends) for name, ends in index.get("layers", {}).items()}
    return ExtractedFeatures(rows, labels, images, list(index["class_names"]), layers)
