"""Self-distillation of masked patches: iBOT and DINOv2: losses, heads, and what the loop calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.methods.dino import Centre, DINOHead, dino_loss, sinkhorn_targets
from vissl_zero.methods.gather import SampleCounts, at_least_float32, count_samples, gather_samples
from vissl_zero.methods.ibot_keys import DINOv2LossConfig, IBOTDINOHeadConfig, IBOTHeadConfig, IBOTLossConfig
from vissl_zero.methods.method import Batch, EmbeddingMethod, output_of
from vissl_zero.methods.swav import NormalizedPrototypes, SwAVHead
from vissl_zero.models.patches import PatchView, Tokens, block_order, grid_of, masked_counts
from vissl_zero.registry import HEADS, LOSSES


def koleo(embeddings: Tensor, eps: float = 1e-8, counts: SampleCounts | None = None) -> Tensor:
    """Mean over this rank's samples of minus the logarithm of the distance to the nearest other sample of all ranks.

    KoLeo (Sablayrolles et al., arXiv 1806.03198) spreads embeddings by the distance to the nearest other one. As in
    DINOv2 (arXiv 2304.07193, section 4), except that the nearest neighbour is that among the samples of all ranks:
    DINOv2's own code looks at one rank only, so its result depends on the number of GPUs.

    Args:
        embeddings: (n, D) of one view; not normalised.
        eps: added to differences and distances.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d; zero for a batch of one sample, which has no neighbour.
    Cost: an all-gather of the embeddings, n * N * D multiplications; an all-reduce of them in the backward pass.
    """
    counts = counts or count_samples(len(embeddings), embeddings.device)
    rows = F.normalize(at_least_float32(embeddings), dim=1, eps=eps)
    everyone = gather_samples(rows, counts)
    if counts.total < 2:
        return everyone.sum() * 0.0
    own = counts.first + torch.arange(counts.local, device=rows.device)
    with torch.no_grad():
        similarity = rows @ everyone.T
        nearest = similarity.scatter(1, own[:, None], -torch.inf).argmax(dim=1)
    distances = torch.linalg.vector_norm(rows - everyone[nearest] + eps, dim=1)
    return -torch.log(distances + eps).sum() / max(counts.local, 1)


def masked_patch_loss(student: Tensor, targets: Tensor, is_masked: Tensor, student_temperature: float = 0.1) -> Tensor:
    """Cross-entropy of masked patches against the teacher's, which saw them: mean within images, then over images.

    As many patches of every image are given, so that shapes do not depend on masks; those not masked do not count.

    Args:
        student: (I, m, K) scores of some patches of each of this rank's I images (views included).
        targets: (I, m, K) probabilities of the same patches from the teacher, without gradient.
        is_masked: (I, m) bool, which of them count.
        student_temperature: divides the student's scores.
    Returns:
        0-d, the mean over this rank's I images; one without masked patches counts as zero. No communication.
    """
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    weights = is_masked / is_masked.sum(dim=1, keepdim=True).clamp(min=1).to(log_probabilities.dtype)
    return -((targets * log_probabilities).sum(dim=2) * weights).sum() / max(len(student), 1)


class IBOTOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (n, D) of all crops, of unit length.
        features: (n, F) of all crops, as they came from the trunk.
        scores: (n, K) of all crops.
        patch_scores: (b, m, K') of the patches asked for in the crops of the first size.
        is_masked: (b, m) bool, which of these were masked; None if nothing was.
    """

    embeddings: Tensor
    features: Tensor
    scores: Tensor
    patch_scores: Tensor
    is_masked: Tensor | None


@HEADS.register("ibot_head", config=IBOTHeadConfig)
class IBOTHead(nn.Module):
    """Projection MLP and prototypes of unit length, for class tokens and patches, shared or separate.

    Args: the fields of ``IBOTHeadConfig``.

    Attributes:
        class_head: of all crops.
        patch_head: of patches; None where they share ``class_head``.
    """

    def __init__(self, dims: Sequence[int], num_clusters: Sequence[int], activation_name: str = "GELU"):
        super().__init__()
        heads = [
            SwAVHead(
                dims,
                [count],
                activation_name=activation_name,
                use_weight_norm_prototypes=True,
                normalize_last_layer=True,
            )
            for count in num_clusters
        ]
        self.class_head = heads[0]
        self.patch_head: SwAVHead | None = heads[1] if len(heads) > 1 else None

    def forward(self, features: Tensor, tokens: list[Tokens]) -> IBOTOutput:
        """Score all crops, and patches of those of the first size."""
        crops, patches = self.class_head(features), tokens[0].wanted()
        scores = (self.patch_head or self.class_head)(patches.flatten(0, 1)).scores[0]
        of_patches = scores.unflatten(0, patches.shape[:2])
        return IBOTOutput(crops.embeddings, features, crops.scores[0], of_patches, _are_masked(tokens[0].view))


@HEADS.register("ibot_dino_head", config=IBOTDINOHeadConfig)
class IBOTDINOHead(DINOHead):
    """DINO's head, whose MLP embeds patches too; their prototypes are those of crops or others.

    Args: the fields of ``IBOTDINOHeadConfig``.

    Attributes:
        prototypes1: of patches; None where they share ``prototypes0``.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        patch_out_dim: int = 0,
        shared_head: bool = False,
        normalize_last_layer: bool = True,
        num_layers: int = 3,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
    ):
        super().__init__(in_dim, [out_dim], False, normalize_last_layer, num_layers, hidden_dim, bottleneck_dim)
        of_patches = NormalizedPrototypes(bottleneck_dim, patch_out_dim or out_dim, normalize_last_layer)
        self.prototypes1 = None if shared_head else of_patches

    def forward(self, features: Tensor, tokens: list[Tokens]) -> IBOTOutput:  # type: ignore[override]
        """Score all crops, and patches of those of the first size."""
        crops, patches = self.embed(features), self.embed(tokens[0].wanted())
        of_patches = (self.prototypes1 or self.prototypes0)(patches)
        return IBOTOutput(crops, features, self.prototypes0(crops), of_patches, _are_masked(tokens[0].view))


def _are_masked(view: PatchView) -> Tensor | None:
    """(b, m) bool, which of the patches asked for are masked; None if nothing is."""
    if view.masked is None:
        return None
    return view.masked if view.wanted is None else view.masked.gather(1, view.wanted)


class PatchDistillation(EmbeddingMethod):
    """Base of methods whose student fills in masked patches of the large crops as a teacher sees them.

    Heads score the largest number of patches that a crop may have masked, so shapes are the same in every step.

    Args:
        num_global_crops: of the first size.
        mask_ratio: least and largest share of the patches that are masked.
        mask_probability: of a crop to be masked.
    """

    has_teacher = True

    def __init__(self, num_global_crops: int, mask_ratio: Sequence[float], mask_probability: float):
        super().__init__()
        self.num_global_crops = num_global_crops
        self.mask_ratio = (mask_ratio[0], mask_ratio[1])
        self.mask_probability = mask_probability

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """All crops, those of the first size masked."""
        outputs: list[Any] = model(batch.images, see=partial(self._see, masks=True))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The crops of the first size, whole."""
        outputs: list[Any] = model(batch.images[:1], see=partial(self._see, masks=False))
        return outputs

    def by_view(self, rows: Tensor, batch: Batch, num_views: int | None = None) -> Tensor:
        """Rows (views * n, ...) as (views, n, ...); by default of the crops that the teacher sees."""
        return rows.unflatten(0, (num_views or self.num_global_crops, batch.num_local))

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int], masks: bool) -> list[PatchView]:
        grid = grid_of(images[0], patch_size)
        num_patches = grid[0] * grid[1]
        probability = self.mask_probability if self._is_masking() else 0.0
        counts = masked_counts(images[0], num_patches, self.mask_ratio, probability, self.epoch, "counts")
        most = max(1, int(self.mask_ratio[1] * num_patches))
        wanted = block_order(images[0], grid, counts, self.epoch, "mask")[:, :most]
        if not masks:
            return [PatchView(wanted=wanted)]
        is_masked = torch.arange(most, device=counts.device) < counts[:, None]
        masked = torch.zeros(len(wanted), num_patches, dtype=torch.bool, device=counts.device)
        first = PatchView(masked=masked.scatter(1, wanted, is_masked), wanted=wanted)
        return [first, *(PatchView() for _ in images[1:])]

    def _is_masking(self) -> bool:
        """Whether patches are masked in this epoch."""
        return True


@LOSSES.register("ibot_loss", config=IBOTLossConfig)
class IBOT(PatchDistillation):
    """iBOT: DINO, and self-distillation of masked patches.

    The centre of patches is the mean over masked ones; the paper's code takes all, which the teacher's head then scores
    for nothing else.

    Args: the fields of ``IBOTLossConfig``, with out_dim, patch_out_dim and num_global_crops known.
    """

    def __init__(
        self,
        out_dim: int,
        patch_out_dim: int,
        num_global_crops: int = 2,
        teacher_momentum: float = 0.996,
        warmup_teacher_temp: float = 0.04,
        teacher_temp: float = 0.07,
        warmup_teacher_patch_temp: float = 0.04,
        teacher_patch_temp: float = 0.07,
        warmup_teacher_temp_epochs: int = 30,
        student_temp: float = 0.1,
        center_momentum: float = 0.9,
        center_momentum2: float = 0.9,
        lambda1: float = 1.0,
        lambda2: float = 1.0,
        mim_start_epoch: int = 0,
        mask_ratio: Sequence[float] = (0.1, 0.5),
        mask_probability: float = 0.5,
    ):
        super().__init__(num_global_crops, mask_ratio, mask_probability)
        self.guessing_loss = lambda1 * math.log(out_dim) + lambda2 * mask_probability * math.log(patch_out_dim)
        self.centre = Centre(out_dim, center_momentum)
        self.patch_centre = Centre(patch_out_dim, center_momentum2)
        self.first_momentum = teacher_momentum
        self.crop_temps = warmup_teacher_temp, teacher_temp
        self.patch_temps = warmup_teacher_patch_temp, teacher_patch_temp
        self.num_warmup_epochs = warmup_teacher_temp_epochs
        self.student_temp = student_temp
        self.weights = lambda1, lambda2
        self.mim_start_epoch = mim_start_epoch
        self._warmed = 0.0
        self._num_warmup_steps = 0
        self._scores: tuple[Tensor, Tensor, Tensor] | None = None

    def set_length(self, num_steps: int, steps_per_epoch: int) -> None:
        """Remember the length, for schedules."""
        super().set_length(num_steps, steps_per_epoch)
        self._num_warmup_steps = self.num_warmup_epochs * steps_per_epoch

    def on_step(self, step: int, epoch: int) -> None:
        """Remember where the run is: the teacher's temperatures warm up."""
        super().on_step(step, epoch)
        self._warmed = min(step / max(self._num_warmup_steps, 1), 1.0) if self._num_warmup_steps else 1.0

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``dino_loss`` and ``masked_patch_loss``."""
        student, teacher = output_of(outputs, "patch_scores"), taught[0]
        self._note(student.embeddings)
        self._scores = teacher.scores, teacher.patch_scores, student.is_masked
        crop_temp, patch_temp = (low + (high - low) * self._warmed for low, high in (self.crop_temps, self.patch_temps))
        targets = self.by_view(self.centre.targets(teacher.scores, crop_temp), batch)
        crops = dino_loss(self.by_view(student.scores, batch, sum(batch.num_crops)), targets, self.student_temp)
        targets = self.patch_centre.targets(teacher.patch_scores, patch_temp)
        patches = masked_patch_loss(student.patch_scores, targets, student.is_masked, self.student_temp)
        return self.weights[0] * crops + self.weights[1] * patches

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Move the centres. Collective."""
        assert self._scores is not None
        crops, patches, is_masked = self._scores
        self.centre.update(crops)
        self.patch_centre.update(patches, is_masked)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._cosine_momentum(self.first_momentum, step)

    def _is_masking(self) -> bool:
        """See ``PatchDistillation``."""
        return self.epoch >= self.mim_start_epoch


def dinov2_loss(
    class_scores: tuple[Tensor, Tensor],
    patch_scores: tuple[Tensor, Tensor],
    is_masked: Tensor,
    class_tokens: Tensor,
    teacher_temperature: float,
    student_temperature: float = 0.1,
    weights: tuple[float, float, float] = (1.0, 1.0, 0.1),
    counts: SampleCounts | None = None,
) -> Tensor:
    """The three terms, weighted. Targets are centred by Sinkhorn over the rows of all ranks. Collective.

    Args:
        class_scores: the student's (V, n, K) and the teacher's (T, n, K).
        patch_scores: the student's and the teacher's (T * n, m, K) of some patches of the student's first T views,
            view-major.
        is_masked: (T * n, m) bool, which of them were masked; the others do not count.
        class_tokens: (T, n, D) the student's class tokens of these views before the head, for KoLeo.
        teacher_temperature: divides the teacher's scores.
        student_temperature: divides the student's.
        weights: of DINO, iBOT and KoLeo; KoLeo is added up over views, as in the paper's code.
        counts: samples of each rank; None: asked for.
    Returns:
        0-d, the mean over this rank's samples.
    """
    dino = dino_loss(class_scores[0], sinkhorn_targets(class_scores[1], teacher_temperature), student_temperature)
    patch_targets = sinkhorn_targets(patch_scores[1], teacher_temperature, counts=is_masked)
    ibot = masked_patch_loss(patch_scores[0], patch_targets, is_masked, student_temperature)
    spread = torch.stack([koleo(view, counts=counts) for view in class_tokens]).sum()
    return weights[0] * dino + weights[1] * ibot + weights[2] * spread


@LOSSES.register("dinov2_loss", config=DINOv2LossConfig)
class DINOv2(PatchDistillation):
    """DINOv2: DINO, iBOT and KoLeo, with Sinkhorn's centring.

    Which crops are masked, and how much, is drawn for each by itself; the paper's code masks exactly half of a batch.

    Args: the fields of ``DINOv2LossConfig``, with num_global_crops known.
    """

    def __init__(
        self,
        num_global_crops: int = 2,
        momentum: float = 0.992,
        student_temp: float = 0.1,
        teacher_temp_min: float = 0.04,
        teacher_temp_max: float = 0.07,
        teacher_temp_warmup_iters: int = 37500,
        dino_weight: float = 1.0,
        ibot_weight: float = 1.0,
        koleo_weight: float = 0.1,
        mask_ratio: Sequence[float] = (0.1, 0.5),
        mask_probability: float = 0.5,
    ):
        super().__init__(num_global_crops, mask_ratio, mask_probability)
        self.first_momentum = momentum
        self.student_temp = student_temp
        self.teacher_temps = teacher_temp_min, teacher_temp_max
        self.num_warmup_steps = teacher_temp_warmup_iters
        self.weights = dino_weight, ibot_weight, koleo_weight
        self._step = 0

    def on_step(self, step: int, epoch: int) -> None:
        """Remember where the run is: the teacher's temperature warms up."""
        super().on_step(step, epoch)
        self._step = step

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``dinov2_loss``. Collective."""
        student, teacher = output_of(outputs, "patch_scores"), taught[0]
        self._note(student.embeddings)
        low, high = self.teacher_temps
        num_views = sum(batch.num_crops)
        return dinov2_loss(
            (self.by_view(student.scores, batch, num_views), self.by_view(teacher.scores, batch)),
            (student.patch_scores, teacher.patch_scores),
            student.is_masked,
            self.by_view(student.features, batch, num_views)[: self.num_global_crops],
            low + (high - low) * min(self._step / max(self.num_warmup_steps, 1), 1.0),
            self.student_temp,
            self.weights,
        )

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._cosine_momentum(self.first_momentum, step)
