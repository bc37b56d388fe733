"""A watch on silent divergence: what all ranks should hold alike, compared by checksum."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.checkpoint.replicated import digest_of
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.errors import VisslZeroError


class RanksDifferError(VisslZeroError):
    """Ranks hold different values of what should be equal; raised on every rank at the same step."""


class RankCheck(Hook):
    """Compares whole parameters, buffers, the loss's state and the learning rate over ranks, bit for bit.

    Args:
        every: optimizer steps between comparisons.

    Cost: one pass over them (12 GB/s on a CPU; from a GPU they are copied first), an all-gather of a number each.
    """

    def __init__(self, every: int):
        self._every = every

    def on_step(self, run: Run, record: StepRecord) -> None:
        if run.step % self._every == 0:
            require_equal_ranks(run)


def require_equal_ranks(run: Run) -> None:
    """Compare now. Collective.

    Raises:
        RanksDifferError: with the names of what differs, and the ranks that differ from rank 0.
    """
    if collectives.world_size() == 1:
        return
    tensors: dict[str, Tensor] = run.sharded.replicated()
    state = run.criterion.state_dict()
    tensors |= {f"loss.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    rates = [float(group["lr"]) for group in run.sharded.optimizer.param_groups]
    tensors["learning rates"] = torch.tensor([*rates, float(run.step)], dtype=torch.float64)
    own = torch.tensor([digest_of({"": tensor}) for tensor in tensors.values()])
    found = [torch.empty_like(own) for _ in range(collectives.world_size())]
    dist.all_gather(found, own)
    differing = [
        (name, [rank for rank, numbers in enumerate(found) if numbers[index] != found[0][index]])
        for index, name in enumerate(tensors)
    ]
    if wrong := [(name, ranks) for name, ranks in differing if ranks]:
        name, ranks = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise RanksDifferError(
            f"Ranks have drifted apart by step {run.step}: {name}{others} of rank {', '.join(map(str, ranks))} is not "
            "rank 0's. A device or its memory may be at fault; go on from a checkpoint before, on other hardware."
        )
