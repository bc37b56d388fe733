"""A teacher: a frozen copy of the model that follows it slowly and has a forward pass of its own.

It is a companion of the student, sharded with the same plan into the same units, so the rows of the teacher that a
rank holds belong to the rows of the student that it holds: following is local arithmetic, at every level, engine and
offload tier. At level 3 a rank holds 1/N of it, and its forward pass gathers each unit once. A method may bring a
trained model instead: it is sharded in the same way, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.average import follow_

if TYPE_CHECKING:
    from vissl_zero.sharding.sharded_model import ShardedModel


def set_modes(teacher: nn.Module, has_own_statistics: bool) -> None:
    """Evaluation, so that nothing is dropped at random; batch norm may take the statistics of its own batches."""
    teacher.eval()
    for module in teacher.modules():
        if isinstance(module, _BatchNorm):
            module.train(has_own_statistics)


@torch.no_grad()
def follow(teacher: ShardedModel, student: ShardedModel, momentum: float, unit_rows: Collection[str]) -> None:
    """``teacher = momentum * teacher + (1 - momentum) * student``, element by element. Not a collective.

    Buffers are left alone: batch norm in a teacher has seen the teacher's activations.

    Args:
        momentum: 0 copies.
        unit_rows: full names of 2-d parameters whose rows are brought back to unit length.
    """
    # Units that are still gathered would keep the teacher of the last step.
    teacher._before_shards_change()
    for name, shard in teacher._shards.items():
        value = student._shards[name].held()
        if shard.is_on_disk:
            moved = shard.values()
            follow_(moved, value.to(moved.device), momentum)
            shard.assign(moved)
        else:
            follow_(shard.local.detach(), value, momentum)
            shard.publish()
    for name in unit_rows:
        teacher._shards[name].normalize_rows()


def require_same_layout(teacher: ShardedModel, student: ShardedModel) -> None:
    """Every shard of the teacher has the elements that the student holds of that parameter.

    Raises:
        VisslZeroError: a parameter of the teacher is none of the student's, or is cut otherwise.
    """
    for name, shard in teacher._shards.items():
        mate = student._shards.get(name)
        if mate is None or mate.held_shape() != shard.local.shape:
            raise VisslZeroError(
                f"The teacher's {name} is not cut as the student's: this engine joins parameters that the teacher does "
                "not have with it. Write config.ZERO.ENGINE=torch."
            )
