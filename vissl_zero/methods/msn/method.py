"""MSN: its loss, and the method as the loop runs it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.methods.embedding import EmbeddingMethod, images_of, output_of
from vissl_zero.methods.gather import at_least_float32, sum_over_ranks
from vissl_zero.methods.masks import with_patches_dropped
from vissl_zero.methods.method import Batch
from vissl_zero.methods.msn.keys import MSNHeadConfig, MSNLossConfig
from vissl_zero.methods.sinkhorn import sinkhorn
from vissl_zero.methods.swav.method import SwAVOutput
from vissl_zero.models.patches import PatchView
from vissl_zero.registry import HEADS, LOSSES


def msn_loss(
    anchors: Tensor,
    target: Tensor,
    temperature: float = 0.1,
    sharpening: float = 0.25,
    mean_entropy_weight: float = 1.0,
    entropy_weight: float = 0.0,
    use_sinkhorn: bool = False,
) -> Tensor:
    """Cross-entropy of masked anchors against the sharpened target, minus the entropy of the mean prediction.

    Args:
        anchors: (V, n, K) cosine similarities of the student's masked views to the prototypes.
        target: (n, K) of the teacher's unmasked view to the same prototypes; no gradient goes into it.
        temperature: divides the cosine similarities.
        sharpening: exponent 1 / sharpening of the target's probabilities.
        mean_entropy_weight: weight of ln K minus the entropy of the mean prediction over the anchors of all ranks.
        entropy_weight: weight of the mean entropy of the predictions.
        use_sinkhorn: bring the targets to equal use of the prototypes over the samples of all ranks.
    Returns:
        0-d: the mean over this rank's anchors, plus the mean-entropy term, the same on every rank. Collective.
    Cost: one all-reduce of K + 1 numbers, again in the backward pass; with Sinkhorn, six more of K numbers.
    """
    log_probabilities = F.log_softmax(at_least_float32(anchors) / temperature, dim=2)
    with torch.no_grad():
        log_targets = F.log_softmax(at_least_float32(target) / (temperature * sharpening), dim=1)
        # Rounds of Sinkhorn on probabilities are those on their logarithms with epsilon 1.
        targets = sinkhorn(log_targets[None], 1.0, 3)[0] if use_sinkhorn else log_targets.exp()
    probabilities = log_probabilities.exp()
    num_anchors = anchors.shape[0] * anchors.shape[1]
    loss = -(targets * log_probabilities).sum() / max(num_anchors, 1)
    sums = sum_over_ranks(torch.cat((probabilities.sum(dim=(0, 1)), probabilities.new_tensor([num_anchors]))))
    mean = sums[:-1] / sums[-1].detach().clamp(min=1)
    loss = loss + mean_entropy_weight * (math.log(len(mean)) + torch.special.xlogy(mean, mean).sum())
    if entropy_weight:
        loss = loss - entropy_weight * (probabilities * log_probabilities).sum() / max(num_anchors, 1)
    return loss


@HEADS.register("msn_head", config=MSNHeadConfig)
class MSNHead(nn.Module):
    """Three linear layers with GELU between, embeddings of unit length, prototypes scored at unit length.

    Parameters have VISSL's names (``fc.fc1.weight``, ``fc.bn1.weight``, ``prototypes``).

    Args: the fields of ``MSNHeadConfig``.
    """

    def __init__(
        self, in_dim: int, num_prototypes: int, use_bn: bool = False, hidden_dim: int = 2048, output_dim: int = 256
    ):
        super().__init__()
        layers: dict[str, nn.Module] = {}
        for index, width in enumerate((in_dim, hidden_dim), start=1):
            layers[f"fc{index}"] = nn.Linear(width, hidden_dim)
            if use_bn:
                layers[f"bn{index}"] = nn.BatchNorm1d(hidden_dim)
            layers[f"gelu{index}"] = nn.GELU()
        layers["fc3"] = nn.Linear(hidden_dim, output_dim)
        self.fc = nn.Sequential(OrderedDict(layers))
        self.prototypes = nn.Parameter(torch.zeros(num_prototypes, output_dim))

    def forward(self, features: Tensor, probe: Tensor | None = None) -> SwAVOutput:
        """Embed and score the rows of all crops; score the probe (q, D) too, without gradient."""
        x = self.fc(features)
        embeddings = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)
        scores = [self._score(embeddings)]
        if probe is None:
            return SwAVOutput(embeddings, scores, None)
        with torch.no_grad():
            return SwAVOutput(embeddings, scores, [self._score(probe)])

    def _score(self, embeddings: Tensor) -> Tensor:
        return F.linear(embeddings.to(self.prototypes.dtype), F.normalize(self.prototypes, dim=1))

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Truncated normal of deviation 0.02 for the layers, biases 0; uniform prototypes, as VISSL has them."""
        for name, module in self.fc.named_modules(prefix="fc"):
            if isinstance(module, nn.Linear):
                drawn = torch.empty(module.weight.shape)
                nn.init.trunc_normal_(drawn, std=0.02, generator=generator_for(f"{name}.weight"))
                module.weight.data.copy_(drawn)
                nn.init.zeros_(module.bias)
        bound = self.prototypes.shape[1] ** -0.5
        drawn = torch.empty(self.prototypes.shape).uniform_(-bound, bound, generator=generator_for("prototypes"))
        self.prototypes.data.copy_(drawn)


@LOSSES.register("msn_loss", config=MSNLossConfig)
class MSN(EmbeddingMethod):
    """MSN: masked crops predict the prototypes that a teacher assigns to the full first crop.

    The student's prototypes score the teacher's embeddings too, so those pass through the student's head as a probe.

    Args: the fields of ``MSNLossConfig``, with output_dim known.
    """

    has_teacher = True

    def __init__(
        self,
        output_dim: int,
        momentum: float = 0.996,
        temperature: float = 0.1,
        sharpening: float = 0.25,
        mean_entropy_weight: float = 1.0,
        entropy_weight: float = 0.0,
        use_sinkhorn: bool = True,
        patch_drop: float = 0.15,
    ):
        super().__init__()
        self.guessing_loss = math.log(output_dim)
        self.first_momentum = momentum
        self.temperature = temperature
        self.sharpening = sharpening
        self.mean_entropy_weight = mean_entropy_weight
        self.entropy_weight = entropy_weight
        self.use_sinkhorn = use_sinkhorn
        self.patch_drop = patch_drop
        self._targets: Tensor | None = None

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The first crop, whole. Its embeddings are what the student scores next."""
        outputs: list[Any] = model(images_of(batch, [0]))
        self._targets = output_of(outputs, "embeddings").embeddings.detach()
        return outputs

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """All other crops, patches left out of those of the first size."""
        crops = range(1, sum(batch.num_crops))
        outputs: list[Any] = model(images_of(batch, crops), self.probe(), see=self._see)
        return outputs

    def probe(self) -> Tensor | None:
        """The teacher's embeddings."""
        return self._targets

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``msn_loss``. Collective."""
        student = output_of(outputs, "probe_scores")
        self._note(student.embeddings)
        anchors = student.scores[0].unflatten(0, (sum(batch.num_crops) - 1, batch.num_local))
        return msn_loss(
            anchors,
            student.probe_scores[0],
            self.temperature,
            self.sharpening,
            self.mean_entropy_weight,
            self.entropy_weight,
            self.use_sinkhorn,
        )

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self._linear_momentum(self.first_momentum, step)

    def _see(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        return with_patches_dropped(images, patch_size, self.patch_drop, self.epoch)
