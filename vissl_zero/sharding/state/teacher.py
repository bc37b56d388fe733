"""A teacher: a frozen copy of the model that follows it slowly and has a forward pass of its own.

A running average of the weights (``HOOKS.EMA_MODEL``) is the same without a forward pass, kept shard by shard.

The teacher is sharded with the student's plan into the same units, so a rank holds the same rows of both: following is
local arithmetic, at every level, engine and offload tier. At level 3 a rank holds 1/N of the teacher, whose forward
pass gathers each unit once. A method may provide a trained model instead: it is sharded alike, and never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vissl_zero.errors import CheckpointError, ConfigError, Problem, VisslZeroError
from vissl_zero.resolve.resolved import Precision
from vissl_zero.sharding.state.shard import Shard

if TYPE_CHECKING:
    from vissl_zero.sharding.sharded_model import ShardedModel


class WeightAverage:
    """Running averages of this rank's shards and of the model's buffers.

    The average of an element depends on that element alone, so the average of a shard is the shard of the average: it
    is exact at every level, and costs one more copy of what the rank holds (in memory, also where the shards themselves
    are on disk). Integer buffers (counters) are copied.

    Args:
        shards: this rank's part of every parameter.
        buffers: buffers that checkpoints contain, by full name.
    """

    def __init__(self, shards: Iterable[Shard], buffers: Mapping[str, Tensor]):
        self._shards = list(shards)
        self._live_buffers = dict(buffers)
        self.params = {shard.name: shard.values().clone() for shard in self._shards}
        self.buffers = {name: tensor.clone() for name, tensor in self._live_buffers.items()}

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set ``average = decay * average + (1 - decay) * weight``; a decay of 0 copies. Not a collective."""
        for shard in self._shards:
            follow_(self.params[shard.name], shard.values(), decay)
        for name, buffer in self._live_buffers.items():
            follow_(self.buffers[name], buffer, decay if buffer.is_floating_point() else 0.0)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the averages with the model's weights and buffers, in place. Not a collective."""
        for shard in self._shards:
            weight = shard.values().clone()
            shard.assign(self.params[shard.name])
            self.params[shard.name].copy_(weight)
        for name, buffer in self._live_buffers.items():
            value = buffer.clone()
            buffer.copy_(self.buffers[name])
            self.buffers[name].copy_(value)

    @torch.no_grad()
    def load(self, params: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
        """Copy saved averages, in the form of ``sharding/state/rank_state.py``.

        Raises:
            CheckpointError: the averages are of another model.
        """
        if params.keys() != self.params.keys() or buffers.keys() != self.buffers.keys():
            raise CheckpointError("The saved running average is of another model.")
        for name, average in self.params.items():
            average.copy_(params[name]["local"])
        for name, average in self.buffers.items():
            average.copy_(buffers[name])


def require_wide(precision: Precision, what: str) -> None:
    """Refuse ``what``, an average, if parameters are in bfloat16: its steps would be below the last digit, and lost.

    Raises:
        ConfigError: parameters are in bfloat16.
    """
    if precision.rounding:
        must = f"cannot go with {what}, which follows in steps that bfloat16 would lose"
        fix = "Write config.TRAINER.DTYPE=float32 (no zero.rounding)."
        raise ConfigError([Problem("config.TRAINER.DTYPE, zero.rounding", "'bfloat16'", must, fix)])


def follow_(average: Tensor, value: Tensor, decay: float) -> None:
    """Set ``average = decay * average + (1 - decay) * value``, in place; a decay of 0 copies."""
    if decay == 0:
        average.copy_(value)
    else:
        # Not lerp_: its vector and scalar code round differently, and levels cut shards at different elements.
        average.mul_(decay).add_(value * (1 - decay))


def set_modes(teacher: nn.Module, has_own_statistics: bool) -> None:
    """Set evaluation mode, which turns dropout off; batch norm may use the statistics of the teacher's batches."""
    teacher.eval()
    for module in teacher.modules():
        if isinstance(module, _BatchNorm):
            module.train(has_own_statistics)


ANCHOR, TRUNK = "anchor.", "trunk."


@torch.no_grad()
def follow(
    teacher: ShardedModel, student: ShardedModel, momentum: float, unit_rows: Collection[str], moves_anchor: bool
) -> None:
    """Set ``teacher = momentum * teacher + (1 - momentum) * student``, element by element. Not a collective.

    Buffers are left alone: batch norm in a teacher has seen the teacher's activations.

    Args:
        momentum: 0 copies.
        unit_rows: full names of 2-d parameters whose rows are first divided by their L2 norms.
        moves_anchor: copy the teacher's trunk into its anchor (a second trunk, for DINOv3's Gram loss); False: do not.
    """
    # Units that are still gathered would keep the weights of the last step.
    teacher._before_shards_change()
    anchor = [name for name in teacher._shards if name.startswith(ANCHOR)]
    # Normalized before it follows, as in VISSL: rows are a little shorter than 1 while the teacher runs.
    for name in unit_rows:
        teacher._shards[name].normalize_rows()
    for name in teacher._shards.keys() - set(anchor):
        _follow_shard(teacher._shards[name], student._shards[name], momentum)
    # After the trunk has moved, which the anchor copies.
    for name in anchor if moves_anchor else ():
        _follow_shard(teacher._shards[name], teacher._shards[_mate(name)], 0.0)


def _mate(name: str) -> str:
    """Return the name of the student's parameter for the teacher's ``name``: an anchor's is in the trunk."""
    return TRUNK + name.removeprefix(ANCHOR) if name.startswith(ANCHOR) else name


def _follow_shard(shard: Shard, other: Shard, momentum: float) -> None:
    value = other.held()
    if shard.is_on_disk:
        moved = shard.values()
        follow_(moved, value.to(moved.device), momentum)
        shard.assign(moved)
    else:
        follow_(shard.local.detach(), value, momentum)
        shard.publish()


def require_same_layout(teacher: ShardedModel, student: ShardedModel) -> None:
    """Check that this rank holds the same elements of each of the teacher's parameters as of the student's.

    Raises:
        VisslZeroError: the student lacks a parameter of the teacher, or it is cut differently.
    """
    for name, shard in teacher._shards.items():
        mate = student._shards.get(_mate(name))
        if mate is None or mate.held_shape() != shard.local.shape:
            raise VisslZeroError(
                f"The teacher's {name} is not cut as the student's: this engine joins parameters that the teacher does "
                "not have with it. Write config.ZERO.ENGINE=torch."
            )
