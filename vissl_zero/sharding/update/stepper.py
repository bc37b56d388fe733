"""The optimizer step that all levels share: unscale, agree on inf, clip, adapt, update.

Norms of full parameters and gradients are sums over the ranks' shards, in one collective for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vissl_zero.optim.adaptation import Adaptation, TensorNorms, decay_absorbed
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.precision import LossScale
from vissl_zero.sharding.state.shard import Shard, squared_norms, wide_dtype, with_zeros_for_empty
from vissl_zero.sharding.torch_private import foreach_addcmul_, foreach_mul_
from vissl_zero.sharding.update.histograms import Histograms, histograms_of
from vissl_zero.sharding.update.overlapped_update import overlapped_update


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step; equal on every rank.

    Attributes:
        grad_norm: global L2 norm of the unscaled gradients before clipping, a 0-d tensor on the device (reading it
            synchronizes).
        skipped: the gradients held an inf or NaN under dynamic loss scaling, so nothing was updated.
        loss_scale: the scale that was used, 1.0 without loss scaling.
        names: full names of the parameters that took part, in the order of the optimizer's groups.
        grad_sq: (len(names),) squared norms of their gradients, on the device.
        histograms: histograms of their weights and gradients, if requested and not skipped.
    """

    grad_norm: Tensor
    skipped: bool
    loss_scale: float
    names: Sequence[str]
    grad_sq: Tensor
    histograms: Histograms | None = None

    def nonfinite_gradients(self) -> list[str]:
        """Name the parameters whose gradient held an inf or NaN on any rank. Waits for the device."""
        finite = self.grad_sq.isfinite().tolist()
        return [name for name, is_finite in zip(self.names, finite, strict=True) if not is_finite]

    @property
    def is_stuck(self) -> bool:
        """Skipped at a loss scale of at most 1: unscaled gradients overflow, so the next steps will be skipped too."""
        return self.skipped and self.loss_scale <= 1.0


def dots(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Compute the inner product of each pair of local shards; shapes and dtype as ``squared_norms``.

    One kernel a pair: a foreach product would hold a copy of all gradients.
    """
    dtype = wide_dtype(lefts)
    pairs = zip(lefts, rights, strict=True)
    products = [torch.dot(*(side.detach().flatten().to(dtype) for side in pair)) for pair in pairs if pair[0].numel()]
    return with_zeros_for_empty(lefts, products, dtype)


def sum_over_group(partials: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``partials`` over the ranks that hold shards of the same tensors, in place.

    Args:
        partials: the same shape on every member.
        group: the shard group; None: nothing is sharded, and ``partials`` are the result.
    Cost: one all-reduce, or none.
    """
    if group is not None:
        dist.all_reduce(partials, group=group)
    return partials


_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


@dataclass(frozen=True)
class Clipping:
    """Clipping of gradients by their L2 norm.

    Attributes:
        max_norm: largest norm.
        per: scope of the norm: "model" (all gradients together), "part" (trunk and each head apart) or "tensor".
    """

    max_norm: float
    per: str = "model"

    @classmethod
    def of(cls, plan: ShardingPlan) -> Clipping | None:
        """Build from a plan; None: gradients stay as they are."""
        return None if plan.clip_grad is None else cls(plan.clip_grad, plan.clip_grad_per)

    def factors(self, names: Sequence[str], grad_sq: Tensor) -> Tensor:
        """Return the factors that clip the gradients: one for all, 0-d, or one per tensor, (T,).

        Args:
            names: T full names.
            grad_sq: squared norms of the T full gradients.
        """
        if self.per == "model":
            norms = grad_sq.sum().sqrt()
        elif self.per == "tensor":
            norms = grad_sq.sqrt()
        else:
            numbers: dict[str, int] = {}
            places = [numbers.setdefault(_part(name), len(numbers)) for name in names]
            index = torch.tensor(places, device=grad_sq.device)
            norms = grad_sq.new_zeros(len(numbers)).index_add(0, index, grad_sq).sqrt()[index]
        return (self.max_norm / (norms + _CLIP_EPS)).clamp(max=1.0)


def _part(name: str) -> str:
    """Return the part of a parameter: ``trunk``, or a head such as ``heads.0``; else the first part of its name."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "heads" and rest else first


class Stepper:
    """Runs the base optimizer on local shards as one process would run it on full parameters.

    Args:
        shards: the trained parameters; the same names in the same order on every rank.
        optimizer: over their ``local`` tensors.
        adaptation: layer-wise adaptation of the gradients, or None.
        clipping: clipping of the gradients, or None.
        loss_scale: None without float16.
        group: the ranks among which parameters are sharded; None where every rank has them whole, with equal gradients.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        optimizer: torch.optim.Optimizer,
        adaptation: Adaptation | None,
        clipping: Clipping | None,
        loss_scale: LossScale | None,
        group: dist.ProcessGroup | None,
    ):
        self._shards = list(shards)
        self._optimizer = optimizer
        self._overlapped = overlapped_update(optimizer, self._shards)
        self._adaptation = adaptation
        self._clipping = clipping
        self._loss_scale = loss_scale
        self._group = group
        self._constants: dict[str, tuple[object, Tensor]] = {}
        places = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
        self._group_of = {shard.name: places[id(shard.local)] for shard in self._shards}

    def step(
        self,
        frozen: Collection[str],
        with_histograms: bool = False,
        before_update: Callable[[Tensor], object] | None = None,
    ) -> StepResult:
        """Run one step from the gradients in ``shard.local.grad``, which it may change, and publish the shards.

        Parameters that are frozen or without gradient are left as they are: no decay, no momentum, no part in the norm.

        Args:
            frozen: full names; the same on every rank.
            with_histograms: count weights and gradients too, before clipping; the same on every rank.
            before_update: called with the gradients' norm, before anything changes, the loss scale included.
        Cost: one all-reduce of at most 4 numbers per parameter, none at level 0. Waits for the device only
            under loss scaling, and where this rank lacks a gradient that others may have.
        """
        # A temporarily frozen parameter may still get a gradient. Without one, the optimizer skips it.
        for shard in self._shards:
            if shard.noted:
                shard.noted.clear()  # the last update has applied them
            if shard.name in frozen:
                shard.local.grad = None
        shards = [shard for shard in self._shards if shard.name not in frozen]
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        # Unscale first: norms, clipping and adaptation are defined on true gradients.
        if scale != 1.0:
            _multiply(shards, 1.0 / scale)
        # After this all-reduce every rank holds the same sums, so decisions by them need no further message.
        norms = self._norms(shards)
        names = [shard.name for shard in shards]
        grad_norm = norms.grad_sq.sum().sqrt()
        if before_update is not None:
            before_update(grad_norm)
        if self._loss_scale is not None:
            # One inf or NaN anywhere makes the norm non-finite, so no separate search is needed.
            # Ranks hold the same sums, so all of them skip, or none does.
            found_inf = not bool(torch.isfinite(grad_norm))
            self._loss_scale.update(found_inf)
            if found_inf:
                return StepResult(grad_norm, True, scale, names, norms.grad_sq)
        histograms = histograms_of(shards, self._group) if with_histograms else None
        self._rescale(shards, norms)
        # LARC and LARS have put the decay into the gradient: the optimizer must not apply it again.
        with nullcontext() if self._adaptation is None else decay_absorbed(self._optimizer):
            self._update()
        return StepResult(grad_norm, False, scale, names, norms.grad_sq, histograms)

    def _update(self) -> None:
        """Run the optimizer, and publish the updated shards."""
        if self._overlapped is not None:
            self._overlapped.run()
            return
        self._optimizer.step()
        for shard in self._shards:
            shard.publish()

    def _norms(self, shards: Sequence[Shard]) -> TensorNorms:
        """Compute norms of the full tensors; a gradient that is missing on all ranks counts as zero."""
        table = torch.stack(self._sums([shard for shard in shards if not shard.is_on_disk]), dim=1)
        if any(shard.is_on_disk for shard in shards):
            in_memory = iter(table)
            table = torch.stack(
                [self._sums_on_disk(shard) if shard.is_on_disk else next(in_memory) for shard in shards]
            )
        # One all-reduce for all rows pays its latency once.
        table = sum_over_group(table.T.contiguous(), self._group)
        self._agree_on_missing(shards, table[1])
        # Without adaptation nothing reads these two: zeros complete ``TensorNorms``.
        param_sq, dot = table[2:] if self._adaptation is not None else torch.zeros_like(table)
        return TensorNorms(param_sq=param_sq, grad_sq=table[0], dot=dot)

    def _sums(self, shards: Sequence[Shard]) -> list[Tensor]:
        """Compute rows of one number per shard: squared gradient, its presence, squared parameter, their product."""
        # Stands for a missing gradient, and for a replicated tensor that another rank contributes: its norm is zero. It
        # has the widest dtype, so that ranks with different gradients sum numbers of one dtype.
        device = shards[0].local.device if shards and not shards[0].is_on_disk else torch.device("cpu")
        nothing = torch.empty(0, device=device, dtype=wide_dtype([shard.local for shard in shards]))
        grads = [
            shard.grad() if shard.contributes_to_norm and shard.local.grad is not None else nothing for shard in shards
        ]
        grad_sq = squared_norms(grads)
        present = [float(shard.local.grad is not None) for shard in shards]
        rows = [grad_sq, self._constant("present", present, grad_sq)]
        if self._adaptation is not None:
            params = [shard.values() if shard.contributes_to_norm else nothing for shard in shards]
            rows.append(squared_norms(params))
            if self._adaptation.needs_dot:
                # A dot product needs two of one length: without a gradient, both must be empty.
                partners = [param if grad.numel() else grad for param, grad in zip(params, grads, strict=True)]
                rows.append(dots(partners, grads))
            else:
                rows.append(torch.zeros_like(grad_sq))
        return rows

    def _sums_on_disk(self, shard: Shard) -> Tensor:
        """Return the sums of one shard on disk, which is read only if they are not known yet."""
        square = shard.known_square() if shard.contributes_to_norm and shard.local.grad is not None else None
        if square is None or self._adaptation is not None:
            return torch.stack(self._sums([shard]))[:, 0]
        return torch.stack([square, torch.ones_like(square)])

    def _agree_on_missing(self, shards: Sequence[Shard], num_present: Tensor) -> None:
        """Set a gradient that only some ranks have to zero on the others: all of them must take the same step.

        Reading ``num_present`` waits for the device, so only a rank that lacks a gradient does it.
        """
        if self._group is None or all(shard.local.grad is not None for shard in shards):
            return
        for shard, number in zip(shards, num_present.tolist(), strict=True):
            if number and shard.local.grad is None:
                shard.set_zero_grad()

    def _constant(self, what: str, values: Sequence[float], like: Tensor) -> Tensor:
        """Return ``values`` as a tensor on ``like``'s device; the last step's tensor is reused if they are equal."""
        key = (tuple(values), like.dtype, like.device)
        last_key, tensor = self._constants.get(what, (None, like))
        if last_key != key:
            # From pinned memory, so that the copy does not wait for the device.
            host = torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
            tensor = host.to(like.device, non_blocking=True)
            self._constants[what] = key, tensor
        return tensor

    def _rescale(self, shards: Sequence[Shard], norms: TensorNorms) -> None:
        """Clip, then adapt: ``scale * (clip * grad + decay * param)``, without waiting for the device."""
        clip = None
        if self._clipping is not None:
            clip = self._clipping.factors([shard.name for shard in shards], norms.grad_sq)
        if self._adaptation is None:
            if clip is not None:
                _multiply(shards, clip)
            return
        if clip is not None:
            # Adaptation sees clipped gradients. Their norms follow from the factors, without another all-reduce.
            norms = TensorNorms(param_sq=norms.param_sq, grad_sq=norms.grad_sq * clip**2, dot=norms.dot * clip)
        groups = [self._optimizer.param_groups[self._group_of[shard.name]] for shard in shards]
        scale, decay = self._adaptation.coefficients(
            norms,
            lr=self._constant("lr", [group["lr"] for group in groups], norms.grad_sq),
            weight_decay=self._constant("decay", [group["weight_decay"] for group in groups], norms.grad_sq),
            num_dims=self._constant("num_dims", [len(shard.full_shape) for shard in shards], norms.grad_sq),
        )
        of_grad = scale if clip is None else scale * clip
        of_param = scale * decay
        # 0-d tensors, not numbers: a number would have to be read from the device, which waits for it.
        factors = zip(shards, of_grad.unbind(), of_param.unbind(), strict=True)
        chosen = [(shard, g, p) for shard, g, p in factors if shard.local.grad is not None]
        for shard, g, p in chosen:
            if shard.notes_changes:
                # Noted for the update, which applies it to the gradient that it reads or widens: this saves a pass over
                # the gradients, and a rounding.
                shard.change_grad(g, p)
        chosen = [row for row in chosen if not row[0].notes_changes]
        if chosen:
            chosen_shards, grad_factors, param_factors = (list(column) for column in zip(*chosen, strict=True))
            grads = [shard.local.grad for shard in chosen_shards if shard.local.grad is not None]
            with torch.no_grad():
                foreach_mul_(grads, grad_factors)
                foreach_addcmul_(grads, [shard.local for shard in chosen_shards], param_factors)


def _multiply(shards: Sequence[Shard], factor: Tensor | float) -> None:
    """Multiply all gradients by one factor, or by a tensor (T,) with one factor per shard."""
    is_per_shard = isinstance(factor, Tensor) and factor.ndim > 0
    factors: Sequence[Tensor | float] = (
        factor.unbind() if isinstance(factor, Tensor) and is_per_shard else [factor] * len(shards)
    )
    in_memory: list[tuple[Tensor, Tensor | float]] = []
    for shard, factor_of_shard in zip(shards, factors, strict=True):
        if shard.local.grad is None:
            continue
        if shard.notes_changes:
            shard.change_grad(factor_of_shard)
        else:
            in_memory.append((shard.local.grad, factor_of_shard))
    if in_memory:
        grads = [grad for grad, _ in in_memory]
        # One kernel for all gradients. A 0-d factor stays on the device: reading it as a number would wait.
        each: Any = [factor_of_shard for _, factor_of_shard in in_memory] if is_per_shard else factor
        foreach_mul_(grads, each)
