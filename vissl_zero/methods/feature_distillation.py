"""Feature distillation: losses, heads and method.

The loss with a queue is lightly-train's ``distillation`` 1, and the distance of features without normalization its
``distillationv2`` (https://github.com/lightly-ai/lightly-train, ``src/lightly_train/_methods``). lightly-train has a
queue in each process; here all ranks share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.feature_distillation_keys import (
    FeatureDistillationLossConfig,
    FeatureMapsConfig,
    MapProjectionHeadConfig,
)
from vissl_zero.methods.gather import EmbeddingQueue, at_least_float32
from vissl_zero.methods.method import Batch, EmbeddingMethod
from vissl_zero.models.mlp_heads import MLP
from vissl_zero.models.model import Model
from vissl_zero.registry import HEADS, LOSSES


def queue_distillation_loss(student: Tensor, teacher: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """Compute the KL divergence of the softmax of similarities to ``classes``, student from teacher.

    Args:
        student, teacher: (n, D) unit rows; no gradient goes into the teacher's.
        classes: (M, D) unit rows, the teacher's features of the batch and the queue, without gradient.
        temperature: divides the similarities.
    Returns:
        0-d, the mean over this rank's rows. No communication.
    Cost: 4 * n * M * D multiplications.
    """
    log_probabilities = F.log_softmax(student @ classes.T / temperature, dim=1)
    log_targets = F.log_softmax(teacher.detach() @ classes.T / temperature, dim=1)
    return F.kl_div(log_probabilities, log_targets, reduction="sum", log_target=True) / max(len(student), 1)


def feature_distance(student: Tensor, teacher: Tensor, normalize: bool) -> Tensor:
    """Compute the squared distance of features.

    Args:
        student, teacher: (n, ..., D); no gradient goes into the teacher's.
        normalize: compare unit vectors (2 - 2 cosine); else return the mean over features without normalization.
    Returns:
        0-d, the mean over this rank's rows. No communication.
    """
    if not normalize:
        return (student - teacher.detach()).square().sum() / max(student.numel(), 1)
    squares = (F.normalize(student, dim=-1) - F.normalize(teacher.detach(), dim=-1)).square()
    return squares.sum() * student.shape[-1] / max(student.numel(), 1)


def resized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Interpolate maps (n, D, h, w) bilinearly to ``size``, with a deterministic gradient."""
    # As matrix products: the gradient of torch's own bilinear interpolation is not deterministic on CUDA.
    rows, columns = (
        F.interpolate(torch.eye(old, dtype=maps.dtype, device=maps.device)[None], size=new, mode="linear")[0]
        for old, new in zip(maps.shape[2:], size, strict=True)
    )
    return torch.einsum("ndhw,hi,wj->ndij", maps, rows, columns)


class FeatureMaps(NamedTuple):
    """Features and maps, projected or not.

    Attributes:
        embeddings: (b, D) of all resolutions.
        maps: (b_r, D, h_r, w_r) of each resolution.
    """

    embeddings: Tensor
    maps: list[Tensor]


@HEADS.register("map_projection_head", config=MapProjectionHeadConfig)
class MapProjectionHead(nn.Module):
    """Two projections: of features, and of each place of the last maps.

    Args: the fields of ``MapProjectionHeadConfig``.
    """

    def __init__(self, dims: Sequence[int], use_bn: bool = False, use_relu: bool = False):
        super().__init__()
        self.projection = MLP(dims, use_bn, use_relu)
        self.map_projection = MLP(dims, use_bn, use_relu)
        self._width = dims[0]

    def forward(self, features: Tensor, maps: list[Tensor]) -> FeatureMaps:
        """Project features (b, F), and maps (b_r, F, h_r, w_r) of each resolution."""
        if features.shape[1] != self._width:
            must = f"must be a trunk whose features are as many as the channels of its maps, {self._width}"
            fix = "Take another trunk, or dense_weight 0 and an mlp."
            raise ConfigError([Problem("config.MODEL.TRUNK.NAME", f"{features.shape[1]} features", must, fix)])
        # Places as rows: an MLP takes features in the last dimension.
        places = [self.map_projection(crop_maps.movedim(1, 3).flatten(0, 2)) for crop_maps in maps]
        shapes = [(len(crop_maps), *crop_maps.shape[2:]) for crop_maps in maps]
        shown = [rows.unflatten(0, shape).movedim(3, 1) for rows, shape in zip(places, shapes, strict=True)]
        return FeatureMaps(self.projection(features), shown)


@HEADS.register("feature_maps", config=FeatureMapsConfig)
class FeatureMapsHead(nn.Module):
    """Features and the last maps, without projection."""

    def forward(self, features: Tensor, maps: list[Tensor]) -> FeatureMaps:
        """Return features (b, F) and maps unchanged."""
        return FeatureMaps(features, maps)


@LOSSES.register("feature_distillation_loss", config=FeatureDistillationLossConfig)
class FeatureDistillation(EmbeddingMethod):
    """Feature distillation: the student learns the features of a teacher, whose weights may have any origin.

    Args: the fields of ``FeatureDistillationLossConfig``, with the width and both normalizations known.

    Attributes:
        queue: the teacher's features of the last steps; None if ``queue_weight`` is 0.
    """

    has_teacher = True
    teacher_follows = False

    def __init__(
        self,
        embedding_dim: int,
        teacher: str = "",
        queue_weight: float = 1.0,
        global_weight: float = 0.0,
        dense_weight: float = 0.0,
        normalize: bool = True,
        temperature: float = 0.07,
        queue_size: int = 8192,
        teacher_mean: Sequence[float] = (0.0,),
        teacher_std: Sequence[float] = (1.0,),
        student_mean: Sequence[float] = (0.0,),
        student_std: Sequence[float] = (1.0,),
    ):
        super().__init__()
        self.teacher = teacher
        self.queue_weight, self.global_weight, self.dense_weight = queue_weight, global_weight, dense_weight
        self.normalize, self.temperature = normalize, temperature
        self.queue = EmbeddingQueue(1, queue_size, embedding_dim) if queue_weight else None
        self.couples_samples = self.queue is not None
        # From images normalized for the student to those normalized for the teacher: (x * std + mean - mean') / std'.
        colors = list(zip(student_mean, student_std, teacher_mean, teacher_std, strict=True))
        self._scales = [std / other_std for _, std, _, other_std in colors]
        self._shifts = [(mean - other_mean) / other_std for mean, _, other_mean, other_std in colors]
        # Where both normalizations are equal, images need not be copied.
        self._is_recolored = any(scale != 1 for scale in self._scales) or any(self._shifts)

    def make_teacher(self, model: Model) -> Model:
        """Return the model under DISTILLATION, with its weights, frozen."""
        return model.requires_grad_(False)

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on all crops, normalized as its weights expect."""
        outputs: list[Any] = model([self._recolored(images) for images in batch.images])
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's crops; see ``queue_distillation_loss``. Collective with a queue."""
        student, teacher = (at_least_float32(_features(output[0])) for output in (outputs, teacher_outputs))
        self._note(student)
        terms = []
        if self.queue is not None:
            unit = F.normalize(teacher)
            classes = self._classes(self.queue, _by_sample(unit, batch))
            divergence = queue_distillation_loss(F.normalize(student), unit, classes, self.temperature)
            terms.append(self.queue_weight * divergence)
        if self.global_weight:
            terms.append(self.global_weight * feature_distance(student, teacher, self.normalize))
        if self.dense_weight:
            terms.append(self.dense_weight * self._dense(outputs[0].maps, teacher_outputs[0].maps))
        return torch.stack(terms).sum()

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the teacher's features (1, n, D) for the queue; None without a queue."""
        assert teacher_outputs is not None
        if self.queue is None:
            return None
        return _by_sample(F.normalize(at_least_float32(_features(teacher_outputs[0]))), batch)[None]

    def update_state(self, observed: Sequence[Any]) -> None:
        """Queue the teacher's features. Collective."""
        # The queue puts the newest in front: pushed in reverse, micro-batches lie in it as one large batch would.
        for features in reversed(observed):
            if self.queue is not None:
                self.queue.push(features)

    def _classes(self, queue: EmbeddingQueue, newest: Tensor) -> Tensor:
        """Gather the teacher's features of all ranks' batch and of the queue, newest first, at most its length."""
        past = queue.embeddings[0, : queue.num_filled].to(newest.dtype)
        return torch.cat((collectives.all_gather_rows(newest), past))[: queue.embeddings.shape[1]]

    def _dense(self, student: list[Tensor], teacher: list[Tensor]) -> Tensor:
        """Compute the mean distance of places over all crops, which may have several resolutions."""
        total, num_crops = student[0].new_zeros(()), sum(map(len, student))
        for maps, targets in zip(student, teacher, strict=True):
            if maps.shape[1] != targets.shape[1]:
                must = f"must end in the {targets.shape[1]} channels of the teacher's maps"
                fix = "Take another teacher, or dense_weight 0 and an mlp."
                raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", f"{maps.shape[1]}", must, fix)])
            # The student's maps are resized and not the teacher's, so that targets are features of the teacher.
            places = resized(at_least_float32(maps), (targets.shape[2], targets.shape[3])).movedim(1, 3)
            distance = feature_distance(places, at_least_float32(targets).movedim(1, 3), self.normalize)
            total = total + distance * (len(maps) / max(num_crops, 1))
        return total

    def _recolored(self, images: Tensor) -> Tensor:
        """Convert images (b, 3, H, W) from the student's normalization to the teacher's."""
        if not self._is_recolored:
            return images
        scales, shifts = (images.new_tensor(values)[:, None, None] for values in (self._scales, self._shifts))
        return images * scales + shifts


def _features(output: Any) -> Tensor:
    """Return the features of a head's output, with or without maps."""
    features: Tensor = getattr(output, "embeddings", output)
    return features


def _by_sample(rows: Tensor, batch: Batch) -> Tensor:
    """Reorder crop-major rows (V * n, D) by sample."""
    # Gathered rows are then in the order of the batch's samples, whatever the number of ranks.
    return rows.unflatten(0, (sum(batch.num_crops), batch.num_local)).transpose(0, 1).flatten(0, 1)
