"""Full parameters dealt out to ranks by fairscale's OSS: who updates which, and how the others learn of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fairscale.optim import OSS
from torch import Tensor, nn

from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.sharding.shard import Shard, divide_by_norms, whole_shard


@dataclass(eq=False)
class OwnedShard(Shard):
    """A parameter that every rank holds and one rank updates.

    Attributes:
        source: the full parameter, on every rank.
        local: the same memory on its owner, empty elsewhere.
        owner: rank that updates it.
        has_grad: whether the loss has reached it since the gradient was last forgotten. A gradient that lives in a
            communication buffer is there, and zero, in any case.
    """

    owner: int = 0
    has_grad: bool = True

    @property
    def is_owned(self) -> bool:
        """Whether this rank updates it."""
        return self.owner == dist.get_rank()

    def local_grad(self) -> Tensor | None:
        """See ``Shard``; gradients that other ranks own are ignored."""
        return self.source.grad if self.is_owned and self.has_grad else None

    def held(self) -> Tensor:
        """See ``Shard``: the full parameter."""
        return self.source.detach()

    def held_shape(self) -> torch.Size:
        """See ``Shard``."""
        return self.source.shape

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """See ``Shard``. Every rank does it to its whole copy, with the same result."""
        divide_by_norms(self.source)

    def share(self) -> None:
        """Copy it from its owner to all ranks. Collective; costs one broadcast."""
        dist.broadcast(self.source.detach(), src=self.owner)


def deal(module: nn.Module, groups: Sequence[ParamGroup]) -> OSS:
    """Assign every trained parameter to a rank, and lay out those of a rank in one flat buffer. Not a collective.

    OSS gives each parameter in turn to the rank that has least. Largest first, the fullest rank then has at most 4/3 of
    the best partition's (https://doi.org/10.1137/0117039); in the model's order it can have nearly twice an even share.
    """
    trained = {name for group in groups for name in group.params}
    params = [param for name, param in module.named_parameters() if name in trained]
    # The SGD is a placeholder: OSS asks for an optimizer before the shards that ours is to run on can be known.
    return OSS(sorted(params, key=Tensor.numel, reverse=True), optim=torch.optim.SGD, lr=0.0)


def owned_shards(module: nn.Module, oss: OSS) -> Iterator[Shard]:
    """A shard of every parameter of ``module``: dealt ones by their owner, frozen ones whole on every rank."""
    owners = {
        param: rank
        for rank, groups in enumerate(oss.partition_parameters())
        for group in groups
        for param in group["params"]
    }
    for name, param in module.named_parameters():
        if param not in owners:
            yield whole_shard(name, param)
            continue
        is_owned = owners[param] == dist.get_rank()
        # Empty elsewhere, so that only the owner's optimizer makes state of any size.
        local = param.detach() if is_owned else param.detach().new_empty((0, *param.shape[1:]))
        yield OwnedShard(name, param, nn.Parameter(local), param.shape, owner=owners[param])


def run_inside(oss: OSS, optimizer: torch.optim.Optimizer) -> None:
    """Make ``oss.step`` run ``optimizer``, which is over this rank's shards, and then broadcast what it updated.

    OSS copies parameter groups, and a learning rate set on one copy may not reach the other. Here both have the same
    groups and the same state: there is nothing to copy.
    """
    oss.optim = optimizer
    oss.param_groups = optimizer.param_groups
    oss.state = optimizer.state
