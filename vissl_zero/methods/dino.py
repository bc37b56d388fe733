"""DINO: its loss, its head, and the method as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.dino_keys import DINOHeadConfig, DINOLossConfig
from vissl_zero.methods.gather import at_least_float32, sinkhorn
from vissl_zero.methods.method import Batch, EmbeddingMethod, images_of, output_of
from vissl_zero.methods.swav import NormalizedPrototypes, SwAVOutput
from vissl_zero.registry import HEADS, LOSSES


def dino_loss(student: Tensor, targets: Tensor, student_temperature: float = 0.1) -> Tensor:
    """Cross-entropy of every student view against the target of every other teacher view, averaged over pairs.

    Args:
        student: (V, n, K) scores; the teacher's views come first, in the same order.
        targets: (T, n, K) probabilities of the teacher's views, without gradient; T at most V.
        student_temperature: divides the student's scores.
    Returns:
        0-d, the mean over this rank's samples and the T * (V - 1) pairs of different views. No communication.
    """
    num_teacher_views, num_views = len(targets), len(student)
    log_probabilities = F.log_softmax(at_least_float32(student) / student_temperature, dim=2)
    # All pairs of views at once, since cross-entropy is linear in both; those of a view with itself are taken out
    # below.
    total = -(targets.sum(dim=0) * log_probabilities.sum(dim=0)).sum()
    same_view = -(targets * log_probabilities[:num_teacher_views]).sum()
    num_pairs = num_teacher_views * (num_views - 1)
    return (total - same_view) / max(num_pairs * student.shape[1], 1)


@torch.no_grad()
def sinkhorn_targets(teacher: Tensor, temperature: float, num_iters: int = 3, counts: Tensor | None = None) -> Tensor:
    """Targets that use all prototypes equally over the rows of all ranks (arXiv 2304.07193). Collective.

    Args:
        teacher: (..., K) scores; any number of rows, also none.
        temperature: divides the scores.
        counts: (...) bool, rows that are used equally; None: all.
    Returns:
        Shape of ``teacher``, rows sum to 1.
    Cost: see ``sinkhorn``.
    """
    rows = at_least_float32(teacher).flatten(0, -2)
    counted = None if counts is None else counts.reshape(1, -1)
    return sinkhorn(rows[None], temperature, num_iters, counted)[0].view(teacher.shape)


class Centre(nn.Module):
    """Running mean of the teacher's scores over the rows of all ranks, which keeps one prototype from winning them all.

    Args:
        num_prototypes: K.
        momentum: weight of the past.

    Attributes:
        mean: buffer (K,), identical on every rank.
    """

    mean: Tensor

    def __init__(self, num_prototypes: int, momentum: float = 0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(num_prototypes))

    @torch.no_grad()
    def targets(self, teacher: Tensor, temperature: float) -> Tensor:
        """Softmax of the centred scores (..., K); shape of ``teacher``. No communication."""
        return F.softmax((at_least_float32(teacher) - self.mean) / temperature, dim=-1)

    @torch.no_grad()
    def update(self, teacher: Tensor, counts: Tensor | None = None) -> None:
        """Move the mean towards that of the scores (..., K), over the rows of all ranks. Collective.

        Args:
            teacher: scores.
            counts: (...) bool, rows that count; None: all.

        Rows that are not finite leave the mean as it is: the step is one that the loss scaler skips.

        Cost: one all-reduce of K + 1 numbers.
        """
        rows = teacher.flatten(0, -2).to(self.mean.dtype)
        weights = rows.new_ones(len(rows)) if counts is None else counts.flatten().to(rows.dtype)
        sums = collectives.all_reduce_sum(torch.cat((weights @ rows, weights.sum()[None])))
        newest = self.mean.lerp(sums[:-1] / sums[-1].clamp(min=1), 1 - self.momentum)
        self.mean.copy_(torch.where((sums[-1] > 0) & newest.isfinite().all(), newest, self.mean))


_INIT_STD = 0.02


@HEADS.register("dino_head", config=DINOHeadConfig)
class DINOHead(nn.Module):
    """An MLP with GELU, embeddings of unit length, weight-normalised prototypes.

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
        last = nn.Linear(in_dim if num_layers == 1 else hidden_dim, bottleneck_dim)
        self.mlp: nn.Module = nn.Sequential(*layers, last) if layers else last
        self.prototypes0 = NormalizedPrototypes(bottleneck_dim, num_clusters[0], normalize_last_layer)

    def forward(self, features: Tensor) -> SwAVOutput:
        """Features (n, in_dim) of all crops -> embeddings and scores."""
        embeddings = self.embed(features)
        return SwAVOutput(embeddings, [self.prototypes0(embeddings)], None)

    def embed(self, rows: Tensor) -> Tensor:
        """(..., in_dim) -> embeddings of unit length, float32 or finer; with batch norm of rows (n, in_dim) alone."""
        x = self.mlp(rows)
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Truncated normal of deviation 0.02 for the MLP, biases 0."""
        for name, module in self.mlp.named_modules(prefix="mlp"):
            if isinstance(module, nn.Linear):
                drawn = torch.empty(module.weight.shape)
                nn.init.trunc_normal_(drawn, std=_INIT_STD, generator=generator_for(f"{name}.weight"))
                module.weight.data.copy_(drawn)
                nn.init.zeros_(module.bias)


@LOSSES.register("dino_loss", config=DINOLossConfig)
class DINO(EmbeddingMethod):
    """DINO: self-distillation from a teacher that sees the large crops.

    Args: the fields of ``DINOLossConfig``, with output_dim known.
    """

    has_teacher = True

    def __init__(
        self,
        output_dim: int,
        momentum: float = 0.996,
        student_temp: float = 0.1,
        teacher_temp_min: float = 0.04,
        teacher_temp_max: float = 0.07,
        teacher_temp_warmup_iters: int = 37500,
        crops_for_teacher: Sequence[int] = (0, 1),
        ema_center: float = 0.9,
    ):
        super().__init__()
        self.guessing_loss = math.log(output_dim)
        self.centre = Centre(output_dim, ema_center)
        self.first_momentum = momentum
        self.student_temp = student_temp
        self.teacher_temps = teacher_temp_min, teacher_temp_max
        self.num_warmup_steps = teacher_temp_warmup_iters
        self.crops_for_teacher = list(crops_for_teacher)
        self._step = 0
        self._scores: Tensor | None = None

    def on_step(self, step: int, epoch: int) -> None:
        """Remember where the run is: the teacher's temperature warms up."""
        super().on_step(step, epoch)
        self._step = step

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The teacher's crops only."""
        outputs: list[Any] = model(images_of(batch, self.crops_for_teacher))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``dino_loss``."""
        student = output_of(outputs, "scores").scores[0].unflatten(0, (sum(batch.num_crops), batch.num_local))
        scores = taught[0].scores[0].unflatten(0, (len(self.crops_for_teacher), batch.num_local))
        self._note(outputs[0].embeddings)
        self._scores = scores
        return dino_loss(student, self.centre.targets(scores, self._temperature()), self.student_temp)

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Move the centre. Collective."""
        assert self._scores is not None
        self.centre.update(self._scores)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._cosine_momentum(self.first_momentum, step)

    def _temperature(self) -> float:
        low, high = self.teacher_temps
        return low + (high - low) * min(self._step / max(self.num_warmup_steps, 1), 1.0)
