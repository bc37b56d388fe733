"""Supervised top-1 on images the model was not trained on."""

from __future__ import annotations

import torch

from vissl_zero.collectives import all_reduce_sum
from vissl_zero.data.eval_images import EvalImages, build_eval_images, require_evaluation
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.evaluation.inference import evaluating, own_batches
from vissl_zero.losses.cross_entropy import CrossEntropy


class AccuracyHook(Hook):
    """Adds ``top1`` (0 to 1) of the first head on TEST's images to the results of a run trained with cross-entropy.

    None where TEST has no images or no labels; nothing is added for other losses, or where nothing was trained and the
    heads are as new.
    """

    def on_start(self, run: Run) -> None:
        if _criterion(run) is not None:
            require_evaluation(run.plan.config["DATA"], run.plan.seed)

    def on_end(self, run: Run) -> None:
        if (criterion := _criterion(run)) is None:
            return
        _, images = build_eval_images(run.plan.config["DATA"], run.plan.seed)
        run.results["top1"] = None if images is None else top1(run, images, criterion.ignore_index)


def _criterion(run: Run) -> CrossEntropy | None:
    """The loss of a run whose top-1 means something."""
    if run.num_steps == 0 and _heads_are_new(run):
        return None
    return run.criterion if isinstance(run.criterion, CrossEntropy) else None


def _heads_are_new(run: Run) -> bool:
    settings = run.plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]
    return bool(settings["EVAL_MODE_ON"] and not settings["EVAL_TRUNK_AND_HEAD"])


def top1(run: Run, images: EvalImages, ignored_label: int) -> float | None:
    """Share of images whose largest logit of the first head is their label's. Collective.

    Args:
        run: with a sharded model in any mode.
        images: of any number; each is counted once.
        ignored_label: images with this label do not count.
    Returns:
        Equal on every rank; None if no image has a label.
    """
    run.sharded.consolidate_buffers()  # running statistics may differ between ranks; the result must not
    counts = torch.zeros(2, dtype=torch.int64, device=run.device)  # right, counted
    with evaluating(run.sharded.model):
        for batch, num_own in own_batches(run, images):
            logits = run.sharded.model(batch.images)[0]
            if batch.targets is not None:
                is_counted = batch.targets[:num_own] != ignored_label
                is_right = logits[:num_own].argmax(dim=1) == batch.targets[:num_own]
                counts += torch.stack([(is_right & is_counted).sum(), is_counted.sum()])
    num_right, num_counted = all_reduce_sum(counts).tolist()
    return num_right / num_counted if num_counted else None
