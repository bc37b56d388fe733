"""Projector and predictor, as BYOL, SimSiam and MoCo v3 have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from vissl_zero.config.components.heads import SiameseHeadConfig
from vissl_zero.registry import HEADS


class SiameseOutput(NamedTuple):
    """What the head gives; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        projections: (n, D).
        predictions: (n, D), of the other view's projections; None from a teacher, which has no predictor.
    """

    projections: Tensor
    predictions: Tensor | None


@HEADS.register("siamese_head", config=SiameseHeadConfig)
class SiameseHead(nn.Module):
    """Projector and predictor: linear layers with batch norm and ReLU between them.

    Args: the fields of ``SiameseHeadConfig``.

    Attributes:
        student_only: what a teacher's copy lacks.
    """

    student_only = ("predictor",)

    def __init__(
        self,
        dims: Sequence[int],
        predictor_dims: Sequence[int],
        use_bn: bool = True,
        projector_last_bn: bool = False,
        predictor_last_bn: bool = False,
    ):
        super().__init__()
        self.projector = _mlp(dims, use_bn, projector_last_bn)
        self.predictor: nn.Sequential | None = _mlp((dims[-1], *predictor_dims, dims[-1]), use_bn, predictor_last_bn)

    def forward(self, features: Tensor) -> SiameseOutput:
        """Features (n, F) of all crops, crop-major."""
        projections = self.projector(features)
        return SiameseOutput(projections, None if self.predictor is None else self.predictor(projections))


def _mlp(dims: Sequence[int], use_bn: bool, last_bn: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (width_in, width_out) in enumerate(pairwise(dims)):
        is_last = index == len(dims) - 2
        has_bn = last_bn if is_last else use_bn
        layers.append(nn.Linear(width_in, width_out, bias=not has_bn))  # batch norm would take a bias off again
        if has_bn:
            layers.append(nn.BatchNorm1d(width_out, affine=not is_last))
        if not is_last:
            layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)
