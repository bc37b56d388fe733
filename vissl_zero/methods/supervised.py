"""Supervised cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.collectives import all_reduce_sum
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import B, Batch, Method
from vissl_zero.methods.supervised_keys import CrossEntropyConfig
from vissl_zero.registry import LOSSES


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy against probabilities.

    Args:
        logits: (n, C).
        targets: (n, C), rows sum to 1.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    return -(targets * F.log_softmax(at_least_float32(logits), dim=1)).sum() / max(len(logits), 1)


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the binary cross-entropy of one sigmoid per class, averaged over classes.

    See https://arxiv.org/abs/2110.00476, section 3.

    Args:
        logits, targets: (n, C), targets between 0 and 1.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    logits = at_least_float32(logits)
    # On logits: a sigmoid and its logarithm would lose digits near 0 and 1.
    total = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum")
    return total / max(logits.numel(), 1)


@LOSSES.register("CrossEntropyLoss", config=CrossEntropyConfig)
@LOSSES.register("cross_entropy_multiple_output_single_target", config=CrossEntropyConfig)
class CrossEntropy(Method):
    """Supervised cross-entropy, summed over heads; every crop of an image has the image's label.

    The loss is the mean over all ranks, weighted by class, without ignored images. Each rank's loss is scaled so that
    the loop's mean over ranks is exactly this mean, however ignored images are spread.

    Args: the fields of ``CrossEntropyConfig``.
    """

    class_weights: Tensor | None
    ignored_label: int

    def __init__(
        self,
        weight: Sequence[float] | None = None,
        ignore_index: int = -1,
        normalize_output: bool = False,
        temperature: float = 1.0,
    ):
        super().__init__()
        if temperature <= 0:
            key = "config.LOSS.cross_entropy_multiple_output_single_target.temperature"
            raise ConfigError([Problem(key, str(temperature), "must be positive", "Write 1.0.")])
        self.register_buffer("class_weights", None if weight is None else torch.tensor(weight))
        self.ignored_label = ignore_index
        # Such a loss is divided by the mean weight of the micro-batch.
        self.couples_samples = weight is not None or ignore_index >= 0
        self.normalize_output = normalize_output
        self.temperature = temperature
        self._last: tuple[list[Tensor], Tensor] | None = None

    def prepare(self, batch: B) -> B:
        """Return the batch unchanged: ``run_student`` mixes the images, with their labels."""
        return batch

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Compute the model's outputs; with mixing, append the mixed labels (rows, num_classes)."""
        if self.mixing is None:
            return super().run_student(model, batch)
        targets_of(batch)  # raises without labels
        assert batch.targets is not None
        images, shares = self.mixing(batch.images, batch.num_local)
        outputs: list[Any] = model(images, self.probe())
        # Labels go with the outputs, so that exact accumulation joins them by the same rule.
        dtype = torch.promote_types(images[0].dtype, torch.float32)
        return [*outputs, self.mixing.labels(batch.targets, shares, dtype)]

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the sum over heads of the mean loss over crops that are not ignored. Collective.

        Args:
            outputs: per head, logits (num_crops * B, number of classes).
            batch: batch with targets.
        Raises:
            ConfigError: the images have no labels, or a head has fewer outputs than there are classes.
        Cost: one all-reduce of one number per head.
        """
        if self.mixing is not None:
            return self._mixed(outputs[:-1], outputs[-1])
        targets = targets_of(batch)
        # On CUDA a label without an output is an assertion in a kernel, which names no key. In the first step only:
        # reading the largest label waits for the GPU.
        if targets.is_cuda and self._last is None:
            _require_outputs(outputs, targets)
        try:
            total = torch.stack([self._one_head(logits, targets, batch) for logits in outputs]).sum()
        except IndexError:  # raised on the CPU for a label without an output
            _require_outputs(outputs, targets)
            raise
        self._last = ([logits.detach() for logits in outputs], targets)
        return total

    def health_sums(self) -> Tensor:
        """Return the number of crops that are not ignored, and for each head the number of correct predictions."""
        if self._last is None:
            return super().health_sums()
        outputs, targets = self._last
        is_counted = targets != self.ignored_label
        right = [((logits.argmax(dim=1) == targets) & is_counted).sum() for logits in outputs]
        return torch.stack([is_counted.sum(), *right])

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute ``top1``: the accuracy of the best head, without ignored crops."""
        if self._last is None:
            return {}
        counted, *right = sums.tolist()
        return {"top1": max(right) / max(counted, 1)}

    def _mixed(self, outputs: list[Any], labels: Tensor) -> Tensor:
        """Compute the sum over heads of the mean loss over this rank's crops, whose labels are mixed."""
        for logits in outputs:
            if logits.shape[1] != labels.shape[1]:
                got, must = f"{labels.shape[1]} classes", f"must be the {logits.shape[1]} outputs of the head"
                raise ConfigError(
                    [
                        Problem(
                            "config.DATA.TRAIN.COLLATE_FUNCTION_PARAMS.num_classes",
                            got,
                            must,
                            "Correct one of the two.",
                        )
                    ]
                )
        # top1 counts the label with the larger share.
        self._last = ([logits.detach() for logits in outputs], labels.argmax(dim=1))
        return torch.stack([soft_cross_entropy(self._scaled(logits), labels) for logits in outputs]).sum()

    def _scaled(self, logits: Tensor) -> Tensor:
        logits = at_least_float32(logits)
        return (F.normalize(logits) if self.normalize_output else logits) / self.temperature

    def _one_head(self, logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        logits = self._scaled(logits)
        weights = self.class_weights if self.class_weights is None else self.class_weights.to(logits.dtype)
        log_probabilities = F.log_softmax(logits, dim=1)
        loss_sum = F.nll_loss(log_probabilities, targets, weights, ignore_index=self.ignored_label, reduction="sum")
        share = all_reduce_sum(self._total_weight(targets, logits.dtype, weights)) / max(batch.num_global, 1)
        # share is the mean weight of a sample over all ranks; without weights and ignored images, the number of crops.
        # clamp: a batch of ignored images has loss zero.
        return loss_sum / share.clamp(min=torch.finfo(share.dtype).tiny) / max(batch.num_local, 1)

    def _total_weight(self, targets: Tensor, dtype: torch.dtype, weights: Tensor | None) -> Tensor:
        is_counted = targets != self.ignored_label
        if weights is None:
            return is_counted.sum().to(dtype)
        # torch.where: an ignored label may be no index of ``weights``.
        return (weights[torch.where(is_counted, targets, 0)] * is_counted).sum()


def targets_of(batch: Batch) -> Tensor:
    """Return one label per row of the outputs, crop-major.

    Raises:
        ConfigError: the images have no labels.
    """
    if batch.targets is None:
        must = "needs one label for each image, and the images have none or several"
        fix = "Use a source with labels (class folders), or a self-supervised loss such as swav_loss."
        raise ConfigError([Problem("config.LOSS.name", "", must, fix)])
    return batch.targets.repeat(sum(batch.num_crops))


def _require_outputs(outputs: list[Any], targets: Tensor) -> None:
    require_classes(outputs, int(targets.max()) + 1)


def require_classes(outputs: list[Any], num_classes: int) -> None:
    """Check that every head has at least ``num_classes`` outputs.

    Raises:
        ConfigError: a head has fewer.
    """
    width = min(logits.shape[1] for logits in outputs)
    if num_classes > width:
        must = f"must end in an output per class: there is an image of class {num_classes - 1}, counted from 0"
        raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", f"{width} outputs", must, "Widen the last of dims.")])
