"""SwAV with a teacher: the method as the loop runs it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vissl_zero.methods.embedding import images_of
from vissl_zero.methods.method import Batch
from vissl_zero.methods.swav.method import SwAVLoss
from vissl_zero.methods.swav_momentum.keys import SwAVMomentumLossConfig
from vissl_zero.registry import LOSSES


@LOSSES.register("swav_momentum_loss", config=SwAVMomentumLossConfig)
class SwAVMomentumLoss(SwAVLoss):
    """SwAV with assignments from a teacher, which sees the assigned crops and has the queue.

    Args: the fields of ``SwAVMomentumLossConfig``, with embedding_dim, num_crops and num_prototypes known.
    """

    has_teacher = True

    def __init__(self, momentum: float = 0.99, **keys: Any):
        super().__init__(**keys)
        self.constant_momentum = momentum
        self.crops_for_assign.sort()

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """All crops."""
        outputs: list[Any] = model(batch.images)
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The assigned crops, and the rows of the queue."""
        outputs: list[Any] = model(images_of(batch, self.crops_for_assign), self.probe())
        return outputs

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self.constant_momentum

    def _assigned(self, rows: Tensor, batch: Batch) -> Tensor:
        """See ``SwAVLoss``: the teacher has seen no others."""
        return rows.detach().unflatten(0, (len(self.crops_for_assign), batch.num_local))
