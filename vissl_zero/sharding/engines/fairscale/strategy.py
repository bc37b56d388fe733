"""The fairscale engine: OSS and ShardedDataParallel at levels 1 and 2; level 3 is in ``flat_sharded.py``.

Plans that fairscale cannot run are refused here, each with an alternative. At levels 1 and 2 all ranks hold all
parameters. OSS assigns each parameter to one rank, which updates it and broadcasts it to the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import Tensor, nn

from vissl_zero.collectives import world_size
from vissl_zero.errors import Problem
from vissl_zero.optim.adaptation import Adaptation
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.checks.replica_check import text_digest
from vissl_zero.sharding.engines.fairscale.flat_sharded import FlatSharded
from vissl_zero.sharding.engines.gradient_average import OWN_GRADIENTS, GradientAverage
from vissl_zero.sharding.sharded_model import ModelSetup, ShardedModel
from vissl_zero.sharding.state.missing_gradient import GradientGuard
from vissl_zero.sharding.state.shard import Shard, divide_by_norms, whole_shard
from vissl_zero.sharding.strategy import Strategy
from vissl_zero.sharding.torch_private import is_in_backward, real_grad, set_real_grad

_TORCH = "Write config.ZERO.ENGINE=torch"


def has_streams(device: torch.device) -> bool:
    """Check whether ``device`` has streams, which fairscale's FSDP needs."""
    return device.type == "cuda"


def _precision(plan: ShardingPlan) -> list[Problem]:
    precision = plan.precision
    if plan.level == 3 and precision.master != "float32":
        must = "must be float32 at level 3 of the fairscale engine, whose FSDP refuses parameters of any other type"
        fix = f"{_TORCH}, or config.ZERO.LEVEL=2."
        return [Problem("config.TRAINER.DTYPE", precision.master, must, fix)]
    if plan.level in (1, 2) and {precision.compute, precision.reduce} != {precision.master}:
        must = (
            f"must be {precision.master} at levels 1 and 2 of the fairscale engine, which keep one copy of parameters"
        )
        fix = (
            f"{_TORCH}, or config.ZERO.LEVEL=3, or config.MODEL.AMP_PARAMS.USE_AMP=true for half precision by autocast."
        )
        return [Problem("config.MODEL.FSDP_CONFIG.compute_dtype", precision.compute, must, fix)]
    return []


def _placement(plan: ShardingPlan) -> list[Problem]:
    refusals = []
    if plan.shard_group_size > 1 and plan.shard_group_size != world_size():
        must = "must be -1 on the fairscale engine, which shards across all ranks"
        refusals.append(Problem("config.ZERO.SHARD_GROUP_SIZE", str(plan.shard_group_size), must, f"{_TORCH}."))
    for kind, offload in (("optimizer", plan.offload_optimizer), ("param", plan.offload_params)):
        if offload.device != "none":
            key = f"config.ZERO.offload_{kind}_config.device"
            must = "must be none on the fairscale engine"
            refusals.append(Problem(key, offload.device, must, f"{_TORCH}, which offloads."))
    return refusals


@STRATEGIES.register("fairscale")
class FairscaleStrategy(Strategy):
    """fairscale's OSS, ShardedDDP and FSDP, levels 1 to 3 (level 3 on CUDA)."""

    def _problems(self, plan: ShardingPlan, device: torch.device) -> list[Problem]:
        refusals = []
        if plan.level == 0:
            must = "must be 1, 2 or 3 on the fairscale engine: at level 0 there is nothing to shard"
            refusals.append(Problem("config.ZERO.LEVEL", "0", must, f"{_TORCH}, which runs level 0."))
        if plan.level == 3 and not has_streams(device):
            must = "fairscale shards parameters (level 3) on CUDA only: it needs CUDA's streams"
            fix = f"{_TORCH}, which runs level 3 on any device."
            refusals.append(Problem("config.ZERO.ENGINE", "fairscale", must, fix))
        return refusals + _precision(plan) + _placement(plan)

    def _shard(self, setup: ModelSetup) -> ShardedModel:
        if setup.plan.level == 3:
            return FlatSharded(setup)
        setup.fill(setup.module, "")
        setup.module.to(setup.device)
        return _OptimizerSharded(setup) if setup.plan.level == 1 else _GradientSharded(setup)


@dataclass(eq=False, kw_only=True)
class _OwnedShard(Shard):
    """A parameter that every rank holds and one rank updates.

    Attributes:
        source: the full parameter, on every rank.
        local: the same memory on its owner, empty elsewhere.
        owner: rank that updates it.
        has_grad: whether the loss has reached it since the gradient was last forgotten. A parameter with its gradient
            in a communication buffer always has one, which may be zero.
        is_reduced: whether the gradient has been sent to its owner.
        is_hidden: whether ranks other than the owner keep their own gradients, which the loop must not use.
    """

    owner: int
    has_grad: bool = True
    is_reduced: bool = False
    is_hidden: bool = False

    @property
    def is_owned(self) -> bool:
        """Return whether this rank updates the parameter."""
        return self.owner == dist.get_rank()

    def local_grad(self) -> Tensor | None:
        """Return the gradient; see ``Shard``. Gradients that other ranks own are ignored."""
        return real_grad(self.source) if self.is_owned and self.has_grad else None

    def missing_gradient(self) -> str | None:
        """Explain why the loop cannot read the gradient; see ``Shard``."""
        return _OF_OWNER if self.is_hidden and self.has_grad else None

    def held(self) -> Tensor:
        """Return the full parameter; see ``Shard``."""
        return self.source.detach()

    def held_shape(self) -> torch.Size:
        """Return the full shape; see ``Shard``."""
        return self.source.shape

    @property
    def is_held_whole(self) -> bool:
        """Return True; see ``Shard``."""
        return True

    @torch.no_grad()
    def normalize_rows(self) -> None:
        """Set rows to unit length; see ``Shard``. Every rank does it to its whole copy, with the same result."""
        divide_by_norms(self.source)

    def share(self) -> None:
        """Broadcast the parameter from its owner. Collective."""
        dist.broadcast(self.source.detach(), src=self.owner)


_OF_OWNER = (
    "A gradient was read or changed by the loop, and at level 2 of the fairscale engine only the rank that updates a "
    "parameter has its averaged gradient. Clip by zero=dict(clip_grad=...), or scale the loss, or write level=1 or "
    'engine="torch". Setting it to None is possible.'
)


class _OwnedParameter(GradientGuard):
    """A parameter that every rank holds in full, and one rank updates.

    Attributes:
        shard: its shard.
    """

    shard: _OwnedShard

    @property
    def grad(self) -> Tensor | None:
        """The gradient; a ``MissingGradient`` if it cannot be read."""
        if is_in_backward():  # fairscale's hooks read it
            return real_grad(self)
        # A buffer has zeros where no loss has reached the parameter.
        return None if self.shard.is_hidden and not (self.shard.has_grad or self.is_spent) else super().grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if is_in_backward():
            set_real_grad(self, value)
        else:
            GradientGuard.grad.__set__(self, value)  # type: ignore[attr-defined]

    def _missing(self) -> str | None:
        return self.shard.missing_gradient()

    def _only_from_backward(self) -> str | None:
        return _OF_OWNER if self.shard.is_hidden else None

    def _drop_grad(self) -> None:
        if not self.shard.is_hidden:
            set_real_grad(self, None)
            return
        # None would leave fairscale's buffers (fairscale #354), and be reduced no more.
        if (grad := real_grad(self)) is not None:
            grad.zero_()
        self.shard.has_grad = self.shard.is_reduced = False


def _build_oss(module: nn.Module, groups: Sequence[ParamGroup]) -> OSS:
    """Assign every trained parameter to a rank, and lay out those of a rank in one flat buffer. Not a collective.

    OSS assigns each parameter in turn to the rank with the fewest elements. With the largest first, the fullest rank
    has at most 4/3 of the best partition's (https://doi.org/10.1137/0117039); in the model's order it can have nearly
    twice an even share.
    """
    trained = {name for group in groups for name in group.params}
    params = [param for name, param in module.named_parameters() if name in trained]
    # SGD is a placeholder: OSS needs an optimizer before it assigns parameters, and ours needs the assigned shards.
    return OSS(sorted(params, key=Tensor.numel, reverse=True), optim=torch.optim.SGD)


def _owned_shards(module: nn.Module, oss: OSS) -> Iterator[Shard]:
    """Yield a shard of every parameter of ``module``: trained ones with an owner, frozen ones whole on every rank."""
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
        shard = _OwnedShard(name, param, nn.Parameter(local), param.shape, owner=owners[param])
        if type(param) is nn.Parameter:
            param.__class__ = _OwnedParameter
            param.shard = shard  # type: ignore[attr-defined]
        yield shard


_DEFAULT_BUFFER_SIZE: int = signature(ShardedDataParallel).parameters["reduce_buffer_size"].default


class _OwnedByRank(ShardedModel):
    """Base of levels 1 and 2. See ``ShardedModel``.

    Args:
        setup: see ``ShardedModel``.
        oss: OSS that has assigned the parameters to ranks.
        model: wrapper to call; None: the model itself.
    """

    def __init__(self, setup: ModelSetup, oss: OSS, model: nn.Module | None = None):
        build_optimizer = setup.build_optimizer
        assert build_optimizer is not None  # a teacher of these levels is a whole copy
        shards = list(_owned_shards(setup.module, oss))
        self._owned = [shard for shard in shards if isinstance(shard, _OwnedShard)]

        def build_inside(local_groups: list[dict[str, Any]]) -> tuple[OSS, Adaptation | None]:
            optimizer, adaptation = build_optimizer(local_groups)
            # OSS copies parameter groups, and a learning rate set on one copy may not reach the other. Here OSS and the
            # optimizer share groups and state, so there is nothing to copy.
            oss.optim, oss.param_groups, oss.state = optimizer, optimizer.param_groups, optimizer.state
            oss.defaults = optimizer.defaults  # schedulers look here for the momentum that they cycle
            return oss, adaptation

        # In addition to the parameters that it owns, a rank holds all others in full.
        elsewhere = sum(shard.source.nbytes for shard in self._owned if not shard.is_owned)
        wrap_plan = dataclasses.replace(setup.wrap_plan, whole_bytes=elsewhere)
        group = dist.group.WORLD
        super().__init__(
            dataclasses.replace(setup, build_optimizer=build_inside, wrap_plan=wrap_plan), group, shards, model
        )

    def _after_shards_change(self) -> None:
        """Broadcast each parameter, which was just set, from its owner. Collective."""
        for shard in self._owned:
            shard.share()

    def describe(self) -> str:
        """Describe the plan; see ``ShardedModel``."""
        shares = [0] * dist.get_world_size()
        for shard in self._owned:
            shares[shard.owner] += shard.source.numel()
        even = -(-sum(shares) // len(shares))
        lines = [
            f"ZeRO level {self._plan.level} by fairscale over {len(shares)} ranks, {sum(shares):,} trained parameters, "
            f"{self._moment()}",
            f"  dealt out as full tensors: the fullest rank updates {max(shares):,}, an even share is {even:,}",
        ]
        if self._wrap_plan.checkpointed:
            lines.append(f"  recomputed in backward: {', '.join(self._wrap_plan.checkpointed)}")
        return "\n".join(lines)

    def _moment(self) -> str:
        """Return the clause of ``describe`` on which state is sharded and which is whole."""
        raise NotImplementedError


class _OptimizerSharded(_OwnedByRank):
    """Level 1: OSS over averaged gradients. Parameters and gradients are whole on every rank."""

    def __init__(self, setup: ModelSetup):
        self._means = GradientAverage(list(setup.module.parameters()), setup.plan.timeout_s)
        super().__init__(setup, _build_oss(setup.module, setup.groups))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Average gradients in the last micro-batch."""
        return self._means.micro_batch(is_last)

    def _backward_pass(self) -> AbstractContextManager[None]:
        return self._means.backward_pass()

    def _facts(self) -> dict[str, int]:
        """Collect the facts; see ``ShardedModel``."""
        return super()._facts() | {OWN_GRADIENTS: self._means.changed()}

    def _moment(self) -> str:
        return "optimizer state sharded; parameters and gradients whole"


class _GradientSharded(_OwnedByRank):
    """Level 2: OSS and fairscale's ShardedDataParallel, which reduces each gradient to the rank that owns it.

    Gradients of small parameters live in one buffer per rank they go to, as long as they fit; they stay whole on every
    rank. Those that do not fit are freed where they are not owned. Between micro-batches all are whole.
    """

    def __init__(self, setup: ModelSetup):
        module, plan = setup.module, setup.plan
        oss = _build_oss(module, setup.groups)
        self._buffer_size = _DEFAULT_BUFFER_SIZE if plan.reduce_buffer_size < 0 else plan.reduce_buffer_size
        self._parallel = ShardedDataParallel(
            module,
            oss,
            broadcast_buffers=False,  # batch norm is synchronized, or differs between ranks on purpose
            sync_models_at_startup=False,  # all ranks were found to hold the same
            reduce_buffer_size=self._buffer_size,
            # True would lay out all parameters again at every change between training and evaluation.
            auto_refresh_trainable=False,
        )
        self._parallel.refresh_trainable()  # fixes the layout of parameters: shards may refer to their memory now
        # The loop may train these by another optimizer. fairscale reduces only those that have an owner.
        owned = {name for group in setup.groups for name in group.params}
        others = [param for name, param in module.named_parameters() if name not in owned]
        self._means = GradientAverage(others, plan.timeout_s)
        super().__init__(setup, oss, self._parallel)
        self._is_last = True
        self._again = ""
        for shard in self._owned:
            shard.is_hidden = True
            if shard.source.requires_grad:  # a group of the user's may have frozen parameters
                shard.source.register_post_accumulate_grad_hook(partial(self._record_gradient, shard))
        # The guard has counted hooks in super().__init__, before those above were set.
        self._parameter_guard.accept_hooks()
        self.zero_grad()

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Reduce gradients in the backward pass of the last micro-batch; before it they add up on each rank."""
        self._is_last = is_last
        # Without no_sync, fairscale reduces in each pass: gradients that add up over passes are silently wrong.
        with self._means.micro_batch(is_last), nullcontext() if is_last else self._parallel.no_sync():
            yield

    def _backward_pass(self) -> AbstractContextManager[None]:
        return self._means.backward_pass()

    def _facts(self) -> dict[str, int]:
        """Collect the facts; see ``ShardedModel``."""
        # The owner would not update what its own loss has not reached, and fairscale pairs messages by their order.
        reached = [shard.name for shard in self._owned if shard.has_grad]
        what = 'which parameters their losses use, which fairscale cannot reduce. Write level=1, or engine="torch"'
        return super()._facts() | {what: text_digest(reached)}

    def zero_grad(self) -> None:
        """Zero gradients in place: one set to None would be detached from fairscale's buffers (fairscale #354)."""
        parallel = self._parallel
        params = parallel._trainable_params
        for param, is_in_buffer in zip(params, parallel._should_bucket_grad or [False] * len(params), strict=True):
            if not is_in_buffer:
                set_real_grad(param, None)
        for bucket in parallel._bucket_list:
            bucket.zero()
        # Its forward pass does this too, but a loop may call parts of the model alone: nothing would be reduced.
        parallel._clear_counters()
        for shard in self._owned:
            shard.local.grad = None
            shard.has_grad = shard.is_reduced = False
            if isinstance(shard.source, GradientGuard):
                shard.source.is_spent, shard.source.stand_in = False, None
        self._again = ""

    def _problem(self) -> str | None:
        """Explain why an update would be wrong; see ``ShardedModel``."""
        if self._again:
            return (
                f"Two backward passes reached {self._again} before optimizer.step(), and fairscale reduces a gradient "
                'once. Add the losses and call backward() once, or write engine="torch".'
            )
        if missed := [shard.name for shard in self._owned if shard.has_grad and not shard.is_reduced]:
            return (
                f"The last micro-batch of the step did not use {missed[0]}, which an earlier one did. fairscale "
                "reduces gradients in the last one only; write config.ZERO.ENGINE=torch."
            )
        return super()._problem()

    def _record_gradient(self, shard: _OwnedShard, param: nn.Parameter) -> None:
        """Record that the backward pass has just added to the gradient of ``shard``."""
        shard.has_grad = True
        if self._is_last:
            if shard.is_reduced:
                self._again = shard.name
            shard.is_reduced = True

    def _moment(self) -> str:
        size = f"{self._buffer_size:,} elements a rank" if self._buffer_size else "one tensor each"
        return f"optimizer state and gradients sharded, gradients reduced in buffers of {size}; parameters whole"
