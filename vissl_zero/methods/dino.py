"""Self-distillation of crops and of masked patches (DINO, iBOT, DINOv2): losses, heads and methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.dino_keys import (
    DINOHeadConfig,
    DINOLossConfig,
    DINOv2LossConfig,
    IBOTDINOHeadConfig,
    IBOTHeadConfig,
    IBOTLossConfig,
)
from vissl_zero.methods.gather import at_least_float32, count_samples, gather_samples, sinkhorn
from vissl_zero.methods.method import Batch, EmbeddingMethod, output_of
from vissl_zero.methods.swav import NormalizedPrototypes, SwAVHead, SwAVOutput
from vissl_zero.models.patches import PatchView, Tokens, block_order, grid_of, masked_counts
from vissl_zero.registry import HEADS, LOSSES


def dino_loss(student: Tensor, targets: Tensor, student_temperature: float) -> Tensor:
    """Compute the cross-entropy of each student view against the targets of other teacher views, averaged over pairs.

    Args:
        student: (V, n, K) scores; the teacher's views come first, in the same order.
        targets: (T, n, K) probabilities of the teacher's views, without gradient; T at most V.
        student_temperature: divides the student's scores.
    Returns:
        0-d, the mean over this rank's samples and the T * (V - 1) pairs of different views. No communication.
    """
    num_teacher_views, num_views = len(targets), len(student)
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    # Cross-entropy is linear in targets and log-probabilities: one product has all pairs of views. The pairs of a view
    # with itself are subtracted below.
    total = -(targets.sum(dim=0) * log_probabilities.sum(dim=0)).sum()
    same_view = -(targets * log_probabilities[:num_teacher_views]).sum()
    num_pairs = num_teacher_views * (num_views - 1)
    return (total - same_view) / max(num_pairs * student.shape[1], 1)


@torch.no_grad()
def sinkhorn_targets(teacher: Tensor, temperature: float, counts: Tensor | None = None) -> Tensor:
    """Compute targets that use all prototypes equally over the rows of all ranks (arXiv 2304.07193). Collective.

    Args:
        teacher: (..., K) scores; any number of rows, zero included.
        temperature: divides the scores.
        counts: (...) bool, rows over which the use of prototypes is balanced; None: all.
    Returns:
        Shape of ``teacher``, rows sum to 1.
    Cost: see ``sinkhorn``.
    """
    rows = at_least_float32(teacher).flatten(0, -2)
    counted = None if counts is None else counts.reshape(1, -1)
    # Three rounds, as in DINOv2's code.
    return sinkhorn(rows[None], temperature, 3, counted)[0].view(teacher.shape)


class Center(nn.Module):
    """Running mean of the teacher's scores over the rows of all ranks; centering keeps one prototype from dominating.

    Args:
        num_prototypes: K.
        momentum: weight of the past (arXiv 2104.14294, equation 4).

    Attributes:
        mean: buffer (K,), identical on every rank.
    """

    mean: Tensor

    def __init__(self, num_prototypes: int, momentum: float):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(num_prototypes))

    @torch.no_grad()
    def targets(self, teacher: Tensor, temperature: float) -> Tensor:
        """Compute the softmax of the centered scores (..., K); shape of ``teacher``. No communication."""
        return F.softmax((at_least_float32(teacher) - self.mean) / temperature, dim=-1)

    @torch.no_grad()
    def sums(self, teacher: Tensor, counts: Tensor | None = None) -> Tensor:
        """Sum this rank's scores for ``update``. No communication.

        Args:
            teacher: (..., K) scores.
            counts: (...) bool, rows to sum; None: all.
        Returns:
            (K + 1,): the sum of the rows, then their number.
        """
        rows = teacher.flatten(0, -2).to(self.mean.dtype)
        weights = rows.new_ones(len(rows)) if counts is None else counts.flatten().to(rows.dtype)
        return torch.cat((weights @ rows, weights.sum()[None]))

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """Move the mean towards the mean score of a step over the rows of all ranks. Collective.

        Args:
            sums: (K + 1,), results of ``sums``, summed over the micro-batches of this rank.

        Cost: one all-reduce of K + 1 numbers.
        """
        # Sums, not means: ranks and micro-batches may have different numbers of rows.
        sums = collectives.all_reduce_sum(sums)
        newest = self.mean.lerp(sums[:-1] / sums[-1].clamp(min=1), 1 - self.momentum)
        # Scores of a step that the loss scaler skips may be infinite, and would stay in the mean forever.
        self.mean.copy_(torch.where((sums[-1] > 0) & newest.isfinite().all(), newest, self.mean))


_INIT_STD = 0.02  # as DINOHead in facebookresearch/dino vision_transformer.py


@HEADS.register("dino_head", config=DINOHeadConfig)
class DINOHead(nn.Module):
    """DINO's head: an MLP with GELU, embeddings of unit length, weight-normalized prototypes.

    Args: the fields of ``DINOHeadConfig``.
    """

    def __init__(
        self,
        in_dim: int,
        num_clusters: Sequence[int],
        use_bn: bool = False,
        normalize_last_layer: bool = True,
        num_layers: int = 3,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
    ):
        super().__init__()
        if len(num_clusters) != 1 or num_clusters[0] < 1:
            must = "num_clusters of dino_head must have one number, at least 1"
            raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", str(list(num_clusters)), must, "Write [65536].")])
        layers: list[nn.Module] = []
        for width_in in [in_dim, *[hidden_dim] * (num_layers - 1)][: num_layers - 1]:
            layers += [nn.Linear(width_in, hidden_dim), *([nn.BatchNorm1d(hidden_dim)] if use_bn else []), nn.GELU()]
        # No norm or activation after the last layer: the embedding is normalized.
        last = nn.Linear(in_dim if num_layers == 1 else hidden_dim, bottleneck_dim)
        self.mlp: nn.Module = nn.Sequential(*layers, last) if layers else last
        self.prototypes0 = NormalizedPrototypes(bottleneck_dim, num_clusters[0], normalize_last_layer)

    def forward(self, features: Tensor) -> SwAVOutput:
        """Compute embeddings and scores of the features (n, in_dim) of all crops."""
        embeddings = self.embed(features)
        return SwAVOutput(embeddings, [self.prototypes0(embeddings)], None)

    def embed(self, rows: Tensor) -> Tensor:
        """Embed rows (..., in_dim) at unit length, in float32 at least; with batch norm, rows must be (n, in_dim)."""
        x = self.mlp(rows)
        # Scores are divided by temperatures near 0.04, which would enlarge the rounding of half precision.
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw the MLP's weights from a truncated normal of deviation 0.02; set biases to 0."""
        for name, module in self.mlp.named_modules(prefix="mlp"):
            if isinstance(module, nn.Linear):
                drawn = torch.empty(module.weight.shape)
                nn.init.trunc_normal_(drawn, std=_INIT_STD, generator=generator_for(f"{name}.weight"))
                module.weight.data.copy_(drawn)
                nn.init.zeros_(module.bias)


@dataclass
class TeacherTemperature:
    """The temperature of a teacher's scores, with a linear warm-up.

    Attributes:
        low, high: temperature at the start, and after the warm-up.
        num_steps: optimizer steps of the warm-up; 0: no warm-up.
        interval: how often the temperature changes: every step (VISSL's DINO, facebookresearch/dinov2) or every epoch
            (facebookresearch/dino, bytedance/ibot).
    """

    low: float
    high: float
    num_steps: float
    interval: str = "step"

    def at(self, step: int, steps_per_epoch: int) -> float:
        """Return the temperature of optimizer step ``step``, from 0."""
        is_by_epoch = self.interval == "epoch"
        done = step // steps_per_epoch if is_by_epoch else step
        warmup = round(self.num_steps / steps_per_epoch) if is_by_epoch else self.num_steps
        # warmup - 1: the last step or epoch of the warm-up has the maximum, as linspace in all four repositories.
        share = done / max(warmup - 1, 1) if done < warmup else 1.0
        return self.low + (self.high - self.low) * share


@LOSSES.register("dino_loss", config=DINOLossConfig)
class DINO(EmbeddingMethod):
    """DINO: self-distillation from a teacher that sees the large crops.

    Args: the fields of ``DINOLossConfig``, with output_dim known.
    """

    has_teacher = True
    teacher_crops: Sequence[int]

    def __init__(
        self,
        output_dim: int,
        momentum: float = 0.996,
        student_temp: float = 0.1,
        teacher_temp_min: float = 0.04,
        teacher_temp_max: float = 0.07,
        teacher_temp_warmup_iters: int = 37500,
        teacher_temp_interval: str = "step",
        crops_for_teacher: Sequence[int] = (0, 1),
        ema_center: float = 0.9,
        final_momentum: float = 1.0,
    ):
        super().__init__()
        # The cross-entropy of uniform predictions.
        self.guessing_loss = math.log(output_dim)
        self.center = Center(output_dim, ema_center)
        self.momenta = momentum, final_momentum
        self.student_temp = student_temp
        self.temperature = TeacherTemperature(
            teacher_temp_min, teacher_temp_max, teacher_temp_warmup_iters, teacher_temp_interval
        )
        self.teacher_crops = list(crops_for_teacher)

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``dino_loss``."""
        student = output_of(outputs, "scores").scores[0].unflatten(0, (sum(batch.num_crops), batch.num_local))
        scores = teacher_outputs[0].scores[0].unflatten(0, (len(self.teacher_crops), batch.num_local))
        self._note(outputs[0].embeddings)
        temperature = self.temperature.at(self._step, self._steps_per_epoch)
        return dino_loss(student, self.center.targets(scores, temperature), self.student_temp)

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Sum the teacher's scores."""
        assert teacher_outputs is not None
        return self.center.sums(teacher_outputs[0].scores[0])

    def update_state(self, observed: Sequence[Any]) -> None:
        """Move the center. Collective."""
        self.center.update(torch.stack(tuple(observed)).sum(dim=0))


_KOLEO_EPS = 1e-8  # of differences and distances, as in facebookresearch/dinov2 koleo_loss.py


def koleo(embeddings: Tensor) -> Tensor:
    """Compute the mean of minus the log distance to the nearest other sample of all ranks, over this rank's samples.

    KoLeo (Sablayrolles et al., arXiv 1806.03198) spreads embeddings. DINOv2's own code (arXiv 2304.07193, section 4)
    searches the nearest neighbor on one rank only, so its result depends on the number of GPUs.

    Args:
        embeddings: (n, D) of one view; not normalized.
    Returns:
        0-d; zero for a batch of one sample, which has no neighbor.
    Cost: an all-gather of the embeddings, n * N * D multiplications; an all-reduce of them in the backward pass.
    """
    counts = count_samples(len(embeddings), embeddings.device)
    rows = F.normalize(at_least_float32(embeddings), dim=1, eps=_KOLEO_EPS)
    everyone = gather_samples(rows, counts)
    if counts.total < 2:
        return everyone.sum() * 0.0  # zero with a graph, so that the loss has a backward pass
    row_ids = counts.first + torch.arange(counts.local, device=rows.device)
    # The choice of the neighbor has no gradient; the distance to it has one, on both sides.
    with torch.no_grad():
        similarity = rows @ everyone.T
        nearest = similarity.scatter(1, row_ids[:, None], -torch.inf).argmax(dim=1)
    distances = torch.linalg.vector_norm(rows - everyone[nearest] + _KOLEO_EPS, dim=1)
    return -torch.log(distances + _KOLEO_EPS).sum() / max(counts.local, 1)


def masked_patch_loss(student: Tensor, targets: Tensor, is_masked: Tensor, student_temperature: float) -> Tensor:
    """Compute the cross-entropy of masked patches against the unmasked teacher's, averaged by image, then over images.

    Args:
        student: (I, m, K) scores of m patches of each of this rank's I images (views included).
        targets: (I, m, K) probabilities of the same patches from the teacher, without gradient.
        is_masked: (I, m) bool, the masked patches, which alone count: m is constant, so that no shape depends on masks.
        student_temperature: divides the student's scores.
    Returns:
        0-d, the mean over this rank's I images; an image without masked patches has a loss of zero. No communication.
    """
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    # Images, not patches, have equal weights, as in ibot's main_ibot.py and dinov2's ibot_patch_loss.py.
    weights = is_masked / is_masked.sum(dim=1, keepdim=True).clamp(min=1).to(log_probabilities.dtype)
    return -((targets * log_probabilities).sum(dim=2) * weights).sum() / max(len(student), 1)


class IBOTOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (n, D) of all crops, of unit length.
        features: (n, F) of all crops, from the trunk.
        scores: (n, K) of all crops.
        patch_scores: (b, m, K') of the selected patches of the crops of the first size.
        is_masked: (b, m) bool, whether each selected patch is masked; None without masks.
    """

    embeddings: Tensor
    features: Tensor
    scores: Tensor
    patch_scores: Tensor
    is_masked: Tensor | None


@HEADS.register("ibot_head", config=IBOTHeadConfig)
class IBOTHead(nn.Module):
    """A projection MLP with weight-normalized prototypes, shared by class tokens and patches or one for each.

    Args: the fields of ``IBOTHeadConfig``.

    Attributes:
        class_head: class head of all crops.
        patch_head: head of patches; None if they share ``class_head``.
    """

    def __init__(
        self,
        dims: Sequence[int],
        num_clusters: Sequence[int],
        activation_name: str = "GELU",
        normalize_last_layer: bool = True,
    ):
        super().__init__()
        heads = [
            SwAVHead(
                dims,
                [count],
                activation_name=activation_name,
                use_weight_norm_prototypes=True,
                normalize_last_layer=normalize_last_layer,
            )
            for count in num_clusters
        ]
        self.class_head = heads[0]
        self.patch_head: SwAVHead | None = heads[1] if len(heads) > 1 else None

    def forward(self, features: Tensor, tokens: list[Tokens]) -> IBOTOutput:
        """Score all crops, and the selected patches of crops of the first size."""
        crops, patches = self.class_head(features), tokens[0].wanted()
        scores = (self.patch_head or self.class_head)(patches.flatten(0, 1)).scores[0]
        of_patches = scores.unflatten(0, patches.shape[:2])
        return IBOTOutput(crops.embeddings, features, crops.scores[0], of_patches, _are_masked(tokens[0].view))


@HEADS.register("ibot_dino_head", config=IBOTDINOHeadConfig)
class IBOTDINOHead(DINOHead):
    """DINO's head, whose MLP also embeds patches; prototypes are shared by crops and patches or separate.

    Args: the fields of ``IBOTDINOHeadConfig``.

    Attributes:
        prototypes1: prototypes of patches; None if they share ``prototypes0``.
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
        """Score all crops, and the selected patches of crops of the first size."""
        crops, patches = self.embed(features), self.embed(tokens[0].wanted())
        of_patches = (self.prototypes1 or self.prototypes0)(patches)
        return IBOTOutput(crops, features, self.prototypes0(crops), of_patches, _are_masked(tokens[0].view))


def _are_masked(view: PatchView) -> Tensor | None:
    """Return whether each selected patch is masked, (b, m) bool; None without masks."""
    if view.masked is None:
        return None
    return view.masked if view.wanted is None else view.masked.gather(1, view.wanted)


class PatchDistillation(EmbeddingMethod):
    """Base of methods whose student predicts the teacher's scores of masked patches of the large crops.

    Args:
        num_global_crops: number of global crops, those of the first size.
        mask_ratio: smallest and largest share of patches to mask.
        mask_probability: probability that a crop is masked.
    """

    has_teacher = True

    def __init__(self, num_global_crops: int, mask_ratio: Sequence[float], mask_probability: float):
        super().__init__()
        self.num_global_crops = num_global_crops
        self.mask_ratio = (mask_ratio[0], mask_ratio[1])
        self.mask_probability = mask_probability

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on all crops, with patches of crops of the first size masked."""
        outputs: list[Any] = model(batch.images, choose_patches=partial(self._choose_patches, masks=True))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on the unmasked crops of the first size."""
        # Small crops have no masks, and the teacher gives targets for large crops only.
        outputs: list[Any] = model(batch.images[:1], choose_patches=partial(self._choose_patches, masks=False))
        return outputs

    def by_view(self, rows: Tensor, batch: Batch, num_views: int | None = None) -> Tensor:
        """Reshape rows (views * n, ...) to (views, n, ...); ``num_views`` None: the number of the teacher's crops."""
        return rows.unflatten(0, (num_views or self.num_global_crops, batch.num_local))

    def _choose_patches(self, images: Sequence[Tensor], patch_size: tuple[int, int], masks: bool) -> list[PatchView]:
        grid = grid_of(images[0], patch_size)
        num_patches = grid[0] * grid[1]
        probability = self.mask_probability if self._is_masking() else 0.0
        counts = masked_counts(images[0], num_patches, self.mask_ratio, probability, self.epoch, "counts")
        # Padded to the largest number that may be masked: shapes, and with them memory, are the same in every step.
        most = max(1, int(self.mask_ratio[1] * num_patches))
        # Draws are keyed by (seed, step, sample, name), so student and teacher select the same patches.
        wanted = block_order(images[0], grid, counts, self.epoch, "mask")[:, :most]
        if not masks:
            return [PatchView(wanted=wanted)]
        is_masked = torch.arange(most, device=counts.device) < counts[:, None]
        masked = torch.zeros(len(wanted), num_patches, dtype=torch.bool, device=counts.device)
        first = PatchView(masked=masked.scatter(1, wanted, is_masked), wanted=wanted)
        return [first, *(PatchView() for _ in images[1:])]

    def _is_masking(self) -> bool:
        """Check whether patches are masked in this epoch."""
        return True


@LOSSES.register("ibot_loss", config=IBOTLossConfig)
class IBOT(PatchDistillation):
    """iBOT: DINO, and self-distillation of masked patches.

    The center of patches is the mean over masked patches. The authors' code takes the mean over all patches, and so its
    teacher's head must score all of them.

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
        teacher_temp_interval: str = "epoch",
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
        # Crops that are not masked have no loss of patches.
        self.guessing_loss = lambda1 * math.log(out_dim) + lambda2 * mask_probability * math.log(patch_out_dim)
        self.center = Center(out_dim, center_momentum)
        self.patch_center = Center(patch_out_dim, center_momentum2)
        self.momenta = teacher_momentum, 1.0
        self.num_warmup_epochs = warmup_teacher_temp_epochs
        # 0 for now: the steps of an epoch are known once ``set_length`` is called.
        self.crop_temperature = TeacherTemperature(warmup_teacher_temp, teacher_temp, 0, teacher_temp_interval)
        self.patch_temperature = TeacherTemperature(
            warmup_teacher_patch_temp, teacher_patch_temp, 0, teacher_temp_interval
        )
        self.student_temp = student_temp
        self.weights = lambda1, lambda2
        self.mim_start_epoch = mim_start_epoch

    def set_length(self, num_steps: int, steps_per_epoch: int) -> None:
        """Set the length of schedules."""
        super().set_length(num_steps, steps_per_epoch)
        # The warm-up is configured in epochs, as in main_ibot.py.
        for temperature in (self.crop_temperature, self.patch_temperature):
            temperature.num_steps = self.num_warmup_epochs * steps_per_epoch

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``dino_loss`` and ``masked_patch_loss``."""
        student, teacher = output_of(outputs, "patch_scores"), teacher_outputs[0]
        self._note(student.embeddings)
        temperature = self.crop_temperature.at(self._step, self._steps_per_epoch)
        targets = self.by_view(self.center.targets(teacher.scores, temperature), batch)
        crops = dino_loss(self.by_view(student.scores, batch, sum(batch.num_crops)), targets, self.student_temp)
        temperature = self.patch_temperature.at(self._step, self._steps_per_epoch)
        targets = self.patch_center.targets(teacher.patch_scores, temperature)
        patches = masked_patch_loss(student.patch_scores, targets, student.is_masked, self.student_temp)
        return self.weights[0] * crops + self.weights[1] * patches

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the sums of the teacher's scores of crops, and of masked patches."""
        assert teacher_outputs is not None
        is_masked = outputs[0].is_masked
        return self.center.sums(teacher_outputs[0].scores), self.patch_center.sums(
            teacher_outputs[0].patch_scores, is_masked
        )

    def update_state(self, observed: Sequence[Any]) -> None:
        """Move the centers. Collective."""
        for center, sums in zip((self.center, self.patch_center), zip(*observed, strict=True), strict=True):
            center.update(torch.stack(sums).sum(dim=0))

    def _is_masking(self) -> bool:
        """Check whether patches are masked in this epoch."""
        return self.epoch >= self.mim_start_epoch


def dinov2_loss(
    class_scores: tuple[Tensor, Tensor],
    patch_scores: tuple[Tensor, Tensor],
    is_masked: Tensor,
    class_tokens: Tensor,
    teacher_temperature: float,
    student_temperature: float,
    weights: tuple[float, float, float],
) -> Tensor:
    """Sum the three weighted terms, with targets centered by Sinkhorn over the rows of all ranks. Collective.

    Args:
        class_scores: the student's (V, n, K) and the teacher's (T, n, K).
        patch_scores: the student's and the teacher's (T * n, m, K) of the selected patches of the student's first T
            views, view-major.
        is_masked: (T * n, m) bool, the masked ones among the selected patches; the loss ignores the others.
        class_tokens: (T, n, D) the student's class tokens of the first T views before the head, for KoLeo.
        teacher_temperature: divides the teacher's scores.
        student_temperature: divides the student's scores.
        weights: weights of DINO, iBOT and KoLeo.
    Returns:
        0-d, the mean over this rank's samples.
    """
    # Sinkhorn in place of DINO's center (section 4 of the paper): it needs no state between steps.
    dino = dino_loss(class_scores[0], sinkhorn_targets(class_scores[1], teacher_temperature), student_temperature)
    patch_targets = sinkhorn_targets(patch_scores[1], teacher_temperature, counts=is_masked)
    ibot = masked_patch_loss(patch_scores[0], patch_targets, is_masked, student_temperature)
    # A sum over views, each with neighbors of its own view only, as in dinov2/train/ssl_meta_arch.py.
    spread = torch.stack([koleo(view) for view in class_tokens]).sum()
    return weights[0] * dino + weights[1] * ibot + weights[2] * spread


@LOSSES.register("dinov2_loss", config=DINOv2LossConfig)
class DINOv2(PatchDistillation):
    """DINOv2: DINO, iBOT and KoLeo, with Sinkhorn's centering.

    Each crop draws independently whether, and how much of it, is masked. The authors' code masks exactly half of the
    crops of a batch.

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
        self.momenta = momentum, 1.0
        self.student_temp = student_temp
        self.temperature = TeacherTemperature(teacher_temp_min, teacher_temp_max, teacher_temp_warmup_iters)
        self.weights = dino_weight, ibot_weight, koleo_weight

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``dinov2_loss``. Collective."""
        student, teacher = output_of(outputs, "patch_scores"), teacher_outputs[0]
        self._note(student.embeddings)
        num_views = sum(batch.num_crops)
        return dinov2_loss(
            (self.by_view(student.scores, batch, num_views), self.by_view(teacher.scores, batch)),
            (student.patch_scores, teacher.patch_scores),
            student.is_masked,
            self.by_view(student.features, batch, num_views)[: self.num_global_crops],
            self.temperature.at(self._step, self._steps_per_epoch),
            self.student_temp,
            self.weights,
        )
