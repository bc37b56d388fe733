"""DINOv3: DINOv2 with Gram anchoring: similarities of patches stay close to those of an earlier teacher."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.methods.dino import DINOv2, IBOTHead
from vissl_zero.methods.dinov3_keys import DINOv3HeadConfig, DINOv3LossConfig
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import Batch
from vissl_zero.models.model import Model
from vissl_zero.models.patches import Tokens
from vissl_zero.registry import HEADS, LOSSES


def gram_loss(student: Tensor, anchor: Tensor) -> Tensor:
    """Compute the squared distance between cosine similarities of an image's patches, student against anchor.

    https://arxiv.org/abs/2508.10104, section 4.2; facebookresearch/dinov3 loss/gram_loss.py with ``img_level`` and
    without ``remove_neg``, the settings of its vit7b16_gram_anchor.yaml.

    Args:
        student: (I, P, D) patches of each of this rank's I images (views included) after the last norm.
        anchor: (I, P, D) patches of the anchor; no gradient goes into them.
    Returns:
        0-d, the mean over this rank's images and pairs of patches. No communication.
    Cost: 4 * I * P * P * D multiplications and 2 * I * P * P numbers.
    """
    patches = F.normalize(at_least_float32(student), dim=2)
    targets = F.normalize(at_least_float32(anchor.detach()), dim=2)
    # One matrix per image (img_level), not one over the patches of all images: samples stay independent.
    squares = (patches @ patches.transpose(1, 2) - targets @ targets.transpose(1, 2)).square()
    return squares.sum() / max(squares.numel(), 1)


class GramOutput(NamedTuple):
    """Outputs of the head: ``IBOTOutput``, and the patches.

    Attributes:
        embeddings, features, scores, patch_scores, is_masked: see ``IBOTOutput``.
        patches: (b, P, D) all patches of the crops of the first size, after the trunk's last norm.
    """

    embeddings: Tensor
    features: Tensor
    scores: Tensor
    patch_scores: Tensor
    is_masked: Tensor | None
    patches: Tensor


@HEADS.register("dinov3_head", config=DINOv3HeadConfig)
class DINOv3Head(IBOTHead):
    """``ibot_head`` that also returns the patches.

    Args: the fields of ``DINOv3HeadConfig``.
    """

    def forward(self, features: Tensor, tokens: list[Tokens]) -> GramOutput:  # type: ignore[override]
        """Score all crops, and the selected patches of crops of the first size; return all of their patches too."""
        return GramOutput(*super().forward(features, tokens), tokens[0].rows[:, tokens[0].num_prefix :])


@LOSSES.register("dinov3_loss", config=DINOv3LossConfig)
class DINOv3(DINOv2):
    """DINOv3: DINOv2 with Gram anchoring: similarities of patches stay close to those of an earlier teacher.

    The anchor is a second trunk of the teacher, sharded and saved with it. It sees the same crops as the teacher. The
    paper's anchor sees them at twice the size and without distortions.

    Args: the fields of ``DINOv3LossConfig``, with num_global_crops known.
    """

    def __init__(
        self,
        gram_weight: float = 2.0,
        gram_start: float = 0.9,
        gram_interval: int = 10_000,
        gram_updates: int = 3,
        **keys: Any,
    ):
        super().__init__(**keys)
        self.gram_weight = gram_weight
        self.gram_start = gram_start
        self.gram_interval = gram_interval
        self.gram_updates = gram_updates

    def make_teacher(self, model: Model) -> Model:
        """Add an anchor to the copy, and return it as the teacher."""
        # The trunk alone, since Gram matrices are of patches before the head.
        model.anchor = copy.deepcopy(model.trunk)
        return model.as_teacher()

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on unmasked crops of the first size, and the anchor too once anchoring has started."""
        choose = partial(self._choose_patches, masks=False)
        outputs: list[Any] = model(batch.images[:1], choose_patches=choose, anchored=self._is_anchored())
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Return the mean over this rank's samples; see ``dinov2_loss`` and ``gram_loss``. Collective."""
        loss = super().forward(outputs, batch, teacher_outputs)
        if not self._is_anchored():
            return loss
        return loss + self.gram_weight * gram_loss(outputs[0].patches, teacher_outputs[1])

    def moves_anchor(self, step: int) -> bool:
        """Check whether the anchor moves after this step; see ``Method``."""
        # The copy after step s is first used in step s + 1.
        since = step + 1 - self._first_step()
        return 0 <= since < self.gram_updates * self.gram_interval and since % self.gram_interval == 0

    def heaviest_step(self) -> int:
        """Return the first step with the anchor."""
        return self._first_step()

    def _first_step(self) -> int:
        return math.ceil(self.gram_start * self._num_steps)

    def _is_anchored(self) -> bool:
        return self.gram_weight > 0 and self._step >= self._first_step()
