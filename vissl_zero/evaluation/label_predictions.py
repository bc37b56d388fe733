"""What a classifier says of each image, in files: VISSL's engine ``extract_label_predictions``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import rich
import torch
from torch import Tensor

from vissl_zero.collectives import all_gather_rows
from vissl_zero.config.taps import layer_names
from vissl_zero.data.eval_images import eval_images
from vissl_zero.data.source import Source, build_eval_sources
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.evaluation.accuracy import TOP_K
from vissl_zero.evaluation.features import evaluating, own_batches
from vissl_zero.registry import HOOKS

FOLDER = "label_predictions"


@HOOKS.register("extract_label_predictions")
class ExtractLabelPredictions(Hook):
    """Writes the predictions of each head for every image of TRAIN and TEST at the end of a run.

    ``label_predictions/rank0_<split>_<layer>_<kind>.npy`` in the run folder, under VISSL's names and in the order of
    the images; layer is "heads" where the heads see no inner layers. Kinds: ``predictions`` (N, k) int64, the ``TOP_K``
    most likely classes at most, best first; ``conf_scores`` (N, C), softmax; ``targets`` (N, 1), -1 without labels;
    ``inds`` (N,); ``images`` (N,), which ``disk_filelist`` reads with ``labels`` (N,), the best class.
    """

    def on_end(self, run: Run) -> None:
        data = run.plan.config["DATA"]
        train, test = build_eval_sources(data, run.plan.seed)
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; predictions must not
        splits = {"TRAIN": train, "TEST": test}
        if data["TRAIN"] == data["TEST"]:  # TEST's images stood for TRAIN's
            del splits["TRAIN"]
        for split, source in splits.items():
            if source is not None:
                self._predict(run, split, source)
        if run.is_main:
            line = f"Label predictions: {run.folder / FOLDER}"
            rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)

    def _predict(self, run: Run, split: str, source: Source) -> None:
        """Collective."""
        ids, targets = [], []
        scores: list[list[Tensor]] = []
        images = eval_images(source, run.plan.config["DATA"], run.plan.seed)
        with run.sharded.evaluated(), evaluating(run.sharded.model):
            for batch, num_own in own_batches(run, images):
                outputs = run.sharded.model(batch.images)
                if not all(isinstance(output, Tensor) and output.ndim == 2 for output in outputs):
                    must = "must be classifiers, such as mlp or eval_mlp: predictions are of classes"
                    raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", "another head", must, "Name such a head.")])
                scores.append([output[:num_own].float().softmax(dim=1) for output in outputs])
                ids.append(batch.sample_ids[:num_own])
                found = torch.full_like(batch.sample_ids, -1) if batch.targets is None else batch.targets
                targets.append(found[:num_own])
        order = all_gather_rows(torch.cat(ids)).argsort()
        labels = all_gather_rows(torch.cat(targets))[order].cpu()
        entries = run.plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]["LINEAR_EVAL_FEAT_POOL_OPS_MAP"]
        heads = [all_gather_rows(torch.cat(parts))[order].cpu() for parts in zip(*scores, strict=True)]
        plain = ["heads"] if len(heads) == 1 else [f"heads{index}" for index in range(len(heads))]
        for name, rows in zip(layer_names(entries) or plain, heads, strict=True):
            if run.is_main:
                _save(run.folder / FOLDER, f"rank0_{split.lower()}_{name}", rows, labels, source)


def _save(folder: Path, stem: str, scores: Tensor, labels: Tensor, source: Source) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    best = scores.topk(min(TOP_K, scores.shape[1]), dim=1).indices
    arrays = {
        "predictions": best.numpy(),
        "conf_scores": scores.numpy(),
        "targets": labels.numpy()[:, None],
        "inds": np.arange(len(scores)),
        "images": np.array([source.name(index) for index in range(len(source))]),
        "labels": best[:, 0].numpy(),
    }
    for kind, array in arrays.items():
        np.save(folder / f"{stem}_{kind}.npy", array)
