"""Features of images in files: safetensors shards and an index, and the hook that writes them.

``<folder>/<SPLIT>.json``, written last, is the index: ``num_images``, ``feature_dim``, ``class_names``, ``skipped``
(names of broken images, which have no row) and ``shards`` (file -> number of rows); of inner layers also ``layers``
(name -> first column, and the one after the last). A shard has ``features`` (n, F), ``image`` (n,), the place of each
row's image in the split, and ``label`` (n,), -1 without labels. ``<SPLIT>_images.txt`` names all ``num_images`` images,
one a line, in their order.

VISSL's engine ``extract_label_predictions``, which writes a classifier's predictions, is here too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vissl_zero.atomic import read_object
from vissl_zero.collectives import all_gather_objects, all_gather_rows
from vissl_zero.config.components.heads import layer_names
from vissl_zero.data.loader import eval_images
from vissl_zero.data.source import Source, build_eval_sources, splits_to_read
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import ConfigError, DataError, Problem
from vissl_zero.evaluation.accuracy import TOP_K
from vissl_zero.evaluation.features import (
    broken_ids,
    evaluating,
    layers_of,
    num_not_finite,
    own_batches,
    require_finite,
    rows_to_write,
)
from vissl_zero.evaluation.opening import print_opening
from vissl_zero.registry import HOOKS
from vissl_zero.terminal import print_line

_ROWS_PER_SHARD = 2**16


@HOOKS.register("extract_features")
class ExtractFeatures(Hook):
    """Writes the trunk's features at the end of the run, each image once, whatever the number of ranks.

    Features that are NaN or infinite get no index: DataError.

    A broken image under ON_BROKEN_IMAGE=skip has no row, because another image's features would get its name.
    Images are transformed as for evaluation (TEST.TRANSFORMS). Every rank writes the rows of its share in shards.
    The format is that of ``evaluation/feature_files.py``.
    """

    def on_end(self, run: Run) -> None:
        train, test = build_eval_sources(run.plan.config.DATA, run.plan.seed)
        print_opening(run)
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        (run.folder / _FEATURES_FOLDER).mkdir(exist_ok=True)
        counts = {
            split: self._extract(run, split, s)
            for split, s in (("TRAIN", train), ("TEST", test if run.plan.config.TEST_MODEL else None))
            if s is not None
        }
        run.results["features_extracted"] = counts
        if run.is_main:
            counts_text = ", ".join(f"{count} images of {split}" for split, count in counts.items())
            line = f"Features of {counts_text}: {run.folder / _FEATURES_FOLDER}"
            print_line(line)

    def _extract(self, run: Run, split: str, source: Source) -> int:
        """Write the features of a split to files. Collective."""
        writer = _ShardWriter(run.folder / _FEATURES_FOLDER, split, run.rank, _ROWS_PER_SHARD)
        feature_dim, num_wrong, skipped = 0, 0, list[str]()
        with run.sharded.evaluated(), evaluating(run.sharded.model):
            for batch, num_own in own_batches(run, eval_images(source, run.plan.config.DATA, run.plan.seed)):
                (features,) = run.sharded.model(batch.images, features_only=True)
                feature_dim = features.shape[1]
                labels = torch.full_like(batch.sample_ids, -1) if batch.targets is None else batch.targets
                skipped += [source.name(index) for index in broken_ids(batch, num_own)]
                kept = rows_to_write(batch, num_own)
                # float32 holds half precision exactly, and numpy has no bfloat16.
                rows = features[kept].to(torch.promote_types(features.dtype, torch.float32))
                num_wrong += num_not_finite(rows)
                writer.add(rows, batch.sample_ids[kept], labels[kept])
        writer.flush()
        # After this gather the shards of all ranks are on the disk, so the index tells the truth.
        of_ranks = all_gather_objects((writer.shards, skipped, num_wrong))
        shards = {name: rows for rows_by_name, _, _ in of_ranks for name, rows in rows_by_name.items()}
        require_finite(run, sum(count for *_, count in of_ranks), sum(shards.values()))
        if run.is_main:
            skipped = sorted(name for _, names, _ in of_ranks for name in names)
            images = [source.name(index) for index in range(len(source))]
            names = list(source.class_names)
            folder = run.folder / _FEATURES_FOLDER
            write_index(folder, split, shards, feature_dim, images, names, layers_of(run), skipped)
        return len(source)


_FEATURES_FOLDER = "features"


@dataclass(frozen=True)
class ExtractedFeatures:
    """The features of a split, in the order of its images.

    Attributes:
        rows: features (N, F).
        labels: labels (N,) int64, -1 without labels.
        images: names of the N images.
        skipped: names of broken images, which have no row.
        class_names: class names by label.
        layers: columns of each inner layer; empty if the features are those of the whole trunk.
    """

    rows: Tensor
    labels: Tensor
    images: list[str]
    class_names: list[str]
    skipped: list[str] = field(default_factory=list)
    layers: dict[str, slice] = field(default_factory=dict)


class _ShardWriter:
    """Writes one rank's rows into shards of ``rows_per_shard`` rows.

    Args:
        folder: an existing folder.
        split: "TRAIN" or "TEST".
        rank: rank of the writer.
        rows_per_shard: rows of a shard; they are kept in memory until then.
    Attributes:
        shards: name of each written file -> number of its rows.
    """

    def __init__(self, folder: Path, split: str, rank: int, rows_per_shard: int):
        self._folder, self._stem, self._rows_per_shard = folder, f"{split}_rank{rank:05d}", rows_per_shard
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.shards: dict[str, int] = {}

    def add(self, features: Tensor, images: Tensor, labels: Tensor) -> None:
        """Add features (n, F), the positions (n,) of their images in the split, and labels (n,); n may be 0."""
        # A rank whose share of a batch is a copy has no rows.
        if len(features):
            # To host memory at once: rows of 65,536 images can fill what the model leaves of a GPU.
            self._waiting.append((features.cpu(), images.cpu(), labels.cpu()))
        if sum(len(part[0]) for part in self._waiting) >= self._rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write the remaining rows as a shard."""
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
    skipped: list[str],
) -> None:
    """Write the index. One rank calls this, after all ranks have written their shards."""
    lines = "".join(name.replace("\n", " ") + "\n" for name in images)
    # Names of files need not be UTF-8. Only a line feed ends a line: str.splitlines would also cut at U+2028.
    (folder / f"{split}_images.txt").write_bytes(os.fsencode(lines))
    index = {"split": split, "num_images": len(images), "feature_dim": feature_dim, "class_names": class_names}
    if skipped:
        index["skipped"] = skipped
    if layers:
        index["layers"] = {name: [columns.start, columns.stop] for name, columns in layers.items()}
    (folder / f"{split}.json").write_text(json.dumps({**index, "shards": shards}, indent=2) + "\n", encoding="utf-8")


def read_features(folder: str | Path, split: str = "TRAIN") -> ExtractedFeatures:
    """Read all features of a split, in the order of its images.

    Args:
        folder: ``<run folder>/features``, or the run folder.
        split: "TRAIN" or "TEST".
    Raises:
        DataError: the features are missing or damaged.
    """
    folder = Path(folder)
    folder = folder / _FEATURES_FOLDER if (folder / _FEATURES_FOLDER).is_dir() else folder
    try:
        index = read_object(folder / f"{split}.json")
        # Names alone: an index from elsewhere must not lead out of its folder.
        parts = [load_file(folder / Path(name).name) for name in index["shards"]]
        images = os.fsdecode((folder / f"{split}_images.txt").read_bytes()).split("\n")[:-1]
        places = torch.cat([part["image"] for part in parts])
        order = places.argsort()
        skipped = list(index.get("skipped", []))
        # Each image once: shards of an earlier, interrupted call may lie in the folder.
        is_complete = len(set(places.tolist())) == len(places) == index["num_images"] - len(skipped)
        images = [images[place] for place in places[order]]
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{folder} has no readable features of {split} ({error}). Extract them again.") from error
    if not is_complete:
        raise DataError(f"{folder} lacks images of {split}, or has some twice. Extract them again.")
    rows = torch.cat([part["features"] for part in parts])[order]
    labels = torch.cat([part["label"] for part in parts])[order]
    layers = {name: slice(*ends) for name, ends in index.get("layers", {}).items()}
    return ExtractedFeatures(rows, labels, images, list(index["class_names"]), skipped, layers)


_PREDICTIONS_FOLDER = "label_predictions"


@HOOKS.register("extract_label_predictions")
class ExtractLabelPredictions(Hook):
    """Writes the predictions of each head for every image of TRAIN and TEST at the end of a run.

    ``label_predictions/rank0_<split>_<layer>_<kind>.npy`` in the run folder, under VISSL's names and in the order of
    the images; layer is "heads" where the heads see no inner layers. Kinds: ``predictions`` (N, k) int64, the ``TOP_K``
    most likely classes at most, best first; ``conf_scores`` (N, C), softmax; ``targets`` (N, 1), -1 without labels;
    ``inds`` (N,), places in the split; ``images`` (N,), which ``disk_filelist`` reads with ``labels`` (N,), the best
    class. Scores that are NaN get no files: DataError.
    """

    def on_end(self, run: Run) -> None:
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; predictions must not
        for split, source in splits_to_read(run.plan.config.DATA, run.plan.seed).items():
            self._predict(run, split, source)
        if run.is_main:
            line = f"Label predictions: {run.folder / _PREDICTIONS_FOLDER}"
            print_line(line)

    def _predict(self, run: Run, split: str, source: Source) -> None:
        """Write the predictions of a split to files. Collective."""
        ids, targets = [], []
        scores: list[list[Tensor]] = []
        images = eval_images(source, run.plan.config.DATA, run.plan.seed)
        with run.sharded.evaluated(), evaluating(run.sharded.model):
            for batch, num_own in own_batches(run, images):
                outputs = run.sharded.model(batch.images)
                if not all(isinstance(output, Tensor) and output.ndim == 2 for output in outputs):
                    must = "must be classifiers, such as mlp or eval_mlp: predictions are of classes"
                    raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", "another head", must, "Name such a head.")])
                kept = rows_to_write(batch, num_own)
                # In float32, because numpy has no bfloat16.
                scores.append([output[kept].float().softmax(dim=1) for output in outputs])
                ids.append(batch.sample_ids[kept])
                predicted = torch.full_like(batch.sample_ids, -1) if batch.targets is None else batch.targets
                targets.append(predicted[kept])
        places = all_gather_rows(torch.cat(ids))
        order = places.argsort()
        inds = places[order].cpu()
        labels = all_gather_rows(torch.cat(targets))[order].cpu()
        entries = run.plan.config.MODEL.FEATURE_EVAL_SETTINGS.LINEAR_EVAL_FEAT_POOL_OPS_MAP
        heads = [all_gather_rows(torch.cat(parts))[order].cpu() for parts in zip(*scores, strict=True)]
        require_finite(run, num_not_finite(torch.cat(heads, dim=1)), len(inds), "scores")
        plain = ["heads"] if len(heads) == 1 else [f"heads{index}" for index in range(len(heads))]
        for name, rows in zip(layer_names(entries) or plain, heads, strict=True):
            if run.is_main:
                _save(run.folder / _PREDICTIONS_FOLDER, f"rank0_{split.lower()}_{name}", rows, labels, inds, source)


def _save(folder: Path, stem: str, scores: Tensor, labels: Tensor, inds: Tensor, source: Source) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    best = scores.topk(min(TOP_K, scores.shape[1]), dim=1).indices
    arrays = {
        "predictions": best.numpy(),
        "conf_scores": scores.numpy(),
        "targets": labels.numpy()[:, None],
        "inds": inds.numpy(),
        "images": np.array([source.name(index) for index in inds.tolist()]),
        "labels": best[:, 0].numpy(),
    }
    for kind, array in arrays.items():
        np.save(folder / f"{stem}_{kind}.npy", array)
