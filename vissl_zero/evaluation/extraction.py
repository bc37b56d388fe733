"""Features of every image of TRAIN and TEST, written to ``<run folder>/features``: hook ``extract_features``."""

from __future__ import annotations

import rich
import torch
import torch.distributed as dist

from vissl_zero.data.eval_images import eval_images
from vissl_zero.data.source import Source, build_eval_sources
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.evaluation.feature_files import FOLDER, ShardWriter, write_index
from vissl_zero.evaluation.inference import evaluating, own_batches
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
        with evaluating(run.sharded.model):
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
            write_index(run.folder / FOLDER, split, shards, feature_dim, images, list(source.class_names))
        return len(source)
