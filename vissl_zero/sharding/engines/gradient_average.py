"""Average the gradients of parameters that every rank holds whole, whatever the loss is made of.

``DistributedDataParallel`` derives from the outputs of ``forward`` which gradients to expect. It silently misses the
gradients of losses that are made in another way (outputs in dataclasses, methods other than ``forward``, hooked
features, gradient penalties, two backward passes). The mean here starts from the gradients themselves.

Means whose sum always runs in the order of ranks make levels agree bit for bit. A library's all-reduce and
reduce-scatter add in an order that depends on sizes, positions and algorithms, and float addition is not associative.
Here every rank receives all parts of the elements that it reduces and adds them, rank 0's first; so an element's mean
does not depend on the rest of its message. Gradients in half precision are summed in float32, and their mean is
rounded once. It moves as many bytes as a reduce-scatter. Sharded gradients on the CPU go through
``sharding/engines/cpu_communicator.py``, which adds in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.sharding.checks.replica_check import text_digest
from vissl_zero.sharding.engines.cpu_communicator import add_in_order
from vissl_zero.sharding.torch_private import (
    call_after_backward,
    call_on_gradient,
    foreach_norm,
    marks,
    real_grad,
    set_real_grad,
)

# Names, in errors, a fact that must be equal on all ranks (``StepCheck``).
OWN_GRADIENTS = (
    "the gradients that the loop has set or changed. Let them come from optimizer.backward(loss), or compute them from "
    "what is the same on every rank"
)
# As DistributedDataParallel has it.
BUCKET_BYTES = 25 * 2**20


class GradientAverage:
    """The mean over all ranks of each gradient, taken by the end of every backward pass.

    Parameters are packed into buckets in the order in which gradients are expected, the last parameters first. A bucket
    is sent as soon as all its gradients exist, while the backward pass continues; the remaining buckets follow at its
    end. A gradient that only some ranks have counts as zero on the others; a gradient that no rank has stays None.
    Ranks may run different numbers of backward passes: a rank without a further pass sends zeros.

    Args:
        params: the same on every rank, in the order of the model; those without ``requires_grad`` are left out.
        timeout_s: timeout of a collective, in seconds.
        bucket_bytes: gradients sent at once.

    Attributes:
        sent_bytes: bytes of gradients that this rank has sent, by the formula of a ring all-reduce.

    Cost per backward pass: one all-reduce of the gradients, and two of at most two bytes per parameter.
    """

    def __init__(self, params: Sequence[nn.Parameter], timeout_s: float, bucket_bytes: int = BUCKET_BYTES):
        self._params = [param for param in params if param.requires_grad and param.numel()]
        self._is_needed = collectives.world_size() > 1 and bool(self._params)
        self._buckets = _buckets(self._params, bucket_bytes)
        self.sent_bytes = 0
        self._is_active = True
        self._is_driven = False  # whether ``backward_pass`` runs this pass, and ends the round itself
        self._is_open = False  # whether a round of messages has begun
        self._is_callback_queued = False
        self._ready: set[nn.Parameter] = set()
        self._sent: list[tuple[Tensor, dist.Work]] = []
        self._present: list[bool] = []  # of the parameters in the buckets that were sent
        self._opening: tuple[Tensor, dist.Work] | None = None
        self._has_own = False  # whether gradients of earlier micro-batches have not been averaged
        self._means: list[tuple[int, ...] | None] = []
        if not self._is_needed:
            return
        self._group = dist.group.WORLD
        if self._params[0].device.type == "cpu":
            # A group of its own: the order of these all-reduces relative to batch norm's collectives depends on timing,
            # and a group pairs collectives by their order.
            self._group = collectives.new_group(timeout_s)
        call_on_gradient(self._params, self._on_gradient)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Add gradients up on this rank until the last micro-batch. A context of one forward and backward pass."""
        self._is_active = is_last
        yield
        if not (self._is_needed and is_last):
            return
        if self._is_open:
            self._end_round()
        # Leave together: a rank that left earlier would be missing from a round that another rank opens. A rank also
        # opens a round for gradients of earlier micro-batches, if this micro-batch had no backward pass.
        while self._agree_to_open(self._has_own):  # another rank may have run one more backward pass
            self._is_open = True
            self._end_round()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Run the caller's backward pass, whose end autograd hides under reentrant checkpointing. A context."""
        self._is_driven = True
        try:
            yield
        finally:
            self._is_driven = False
        if self._is_open:
            self._end_round()

    def changed(self) -> int:
        """Digest the gradients if the loop has changed any since they were averaged; 0 if not. Not a collective.

        Such a gradient may be this rank's alone, so ranks compare their digests.
        """
        if not self._is_needed or marks(self._params) == self._means:
            return 0
        grads = [grad.detach() for param in self._params if (grad := real_grad(param)) is not None]
        return text_digest([float(norm) for norm in foreach_norm(grads, 2)] if grads else [])  # none after zero_grad

    def _on_gradient(self, param: nn.Parameter) -> None:
        if not self._is_active:
            self._has_own = True
            return
        if not self._is_open:
            self._is_open = True
            # Asynchronous: _end_round waits for it, and the backward pass continues meanwhile.
            self._opening = self._announce(True)
        if not (self._is_driven or self._is_callback_queued):
            self._is_callback_queued = True
            call_after_backward(self._after_backward)
        self._ready.add(param)
        # Buckets are sent in one fixed order, or ranks would pair different ones.
        while len(self._sent) < len(self._buckets) and self._ready.issuperset(self._buckets[len(self._sent)]):
            self._send_next()

    def _after_backward(self) -> None:
        self._is_callback_queued = False
        if self._is_open:
            self._end_round()

    def _announce(self, is_opening: bool) -> tuple[Tensor, dist.Work]:
        """Start an all-reduce of whether this rank opens a round; False: its micro-batch has ended."""
        flag = torch.tensor([is_opening], dtype=torch.uint8, device=self._device_of_flags())
        return flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _device_of_flags(self) -> torch.device:
        return collectives.device_of_numbers(self._params[0].device, self._group)

    def _agree_to_open(self, is_opening: bool) -> bool:
        flag, work = self._announce(is_opening)
        work.wait()
        return bool(flag)

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sent)]
        grads = [real_grad(param) for param in bucket]
        flat = torch.cat([_packed(param, grad) for param, grad in zip(bucket, grads, strict=True)]).to(_wide(bucket))
        self._present += [grad is not None for grad in grads]
        for param in bucket:
            set_real_grad(param, None)  # it is in the bucket; reentrant checkpointing may accumulate a further one
        self._sent.append((flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        self.sent_bytes += flat.nbytes * 2 * (collectives.world_size() - 1) // collectives.world_size()

    @torch.no_grad()
    def _end_round(self) -> None:
        """End a round: send the remaining buckets, and replace the gradients by their means. Collective."""
        while len(self._sent) < len(self._buckets):
            self._send_next()
        # Reentrant checkpointing may accumulate a gradient after its bucket was sent: average such remainders singly.
        late = [real_grad(param) for bucket in self._buckets for param in bucket]
        flags = [*self._present, *(grad is not None for grad in late)]
        table = torch.tensor(flags, dtype=torch.uint8, device=self._device_of_flags())
        work = dist.all_reduce(table, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if self._opening is not None:
            self._opening[1].wait()
        for _, sent in self._sent:
            sent.wait()
        work.wait()
        # A gradient that no rank has must stay None: zero would still move parameters by decay and momentum.
        flags_of_params = iter(zip(*table.view(2, -1).tolist(), late, strict=True))
        for bucket, (flat, _) in zip(self._buckets, self._sent, strict=True):
            # Divided here, since gloo has a sum and no mean.
            flat /= collectives.world_size()
            flat = flat.to(bucket[0].dtype)
            for param, values in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
                is_present, is_late, extra = next(flags_of_params)
                mean = _unpacked(param, values) if is_present else None
                # The table is the same on every rank, so all take part in the same further all-reduces.
                if is_late:
                    total = (torch.zeros_like(param) if extra is None else extra).to(_wide([param]))
                    dist.all_reduce(total, group=self._group)
                    total = total.div_(collectives.world_size()).to(param.dtype)
                    mean = total if mean is None else mean.add_(total)
                set_real_grad(param, mean)
        self._sent = []
        self._ready.clear()
        self._present = []
        self._opening = None
        self._is_open = self._has_own = False
        self._means = marks(self._params)


def _buckets(params: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group parameters of one dtype after another, the last ones first, in lists of about ``bucket_bytes``."""
    buckets: list[list[nn.Parameter]] = []
    num_bytes = 0
    for param in reversed(params):
        if not buckets or num_bytes + param.nbytes > bucket_bytes or buckets[-1][0].dtype != param.dtype:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(param)
        num_bytes += param.nbytes
    return buckets


def _wide(params: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype in which gradients are summed."""
    return reduce(torch.promote_types, (param.dtype for param in params), torch.float32)


def _packed(param: nn.Parameter, grad: Tensor | None) -> Tensor:
    """Flatten ``grad``, or zeros if it is None, in the memory format of its parameter."""
    if grad is None:
        return torch.zeros(param.numel(), dtype=param.dtype, device=param.device)
    if param.is_contiguous():
        return grad.reshape(-1)
    laid_out = torch.empty_like(param)  # keeps channels_last and other dense formats
    laid_out.copy_(grad)
    return laid_out.as_strided((param.numel(),), (1,))


def _unpacked(param: nn.Parameter, values: Tensor) -> Tensor:
    """Reverse ``_packed``: fused optimizers expect a gradient in the memory format of its parameter.

    The result shares memory, and is no view to autograd: loops call ``grad.detach_()``, which torch refuses on views.
    """
    if param.is_contiguous():
        return values.view(param.shape).data
    return values.as_strided(param.shape, torch.empty_like(param).stride(), values.storage_offset()).data


class OrderedReduceScatter:
    """Reduce-scatter that sums in the order of ranks, for ``FSDPModule.set_custom_reduce_scatter``."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Average or sum ``input_tensor`` over the ranks, in the order of ranks; keep this rank's part. Collective."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        # If torch requests a sum, torch divides the result.
        add_in_order(received.view(group.size(), -1).unbind(), output_tensor, is_mean=op == dist.ReduceOp.AVG)


class OrderedMeans:
    """Averages the gradients of full parameters over all ranks after each micro-batch, and adds them up.

    Sharded gradients are averaged in every micro-batch too, so the sums over micro-batches run in one order.

    Args:
        params: the same on every rank.
    """

    def __init__(self, params: Sequence[nn.Parameter]):
        self._params = [param for param in params if param.requires_grad]

    @contextmanager
    def micro_batch(self, is_last: bool = True) -> Iterator[None]:
        """Run one micro-batch. Collective at its end: an all-to-all and an all-gather. A context."""
        earlier = [real_grad(param) for param in self._params]
        for param in self._params:
            set_real_grad(param, None)
        yield
        self._average()
        for param, grad in zip(self._params, earlier, strict=True):
            if grad is not None:
                added = real_grad(param)
                set_real_grad(param, grad if added is None else grad.add_(added))

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients over ranks; a gradient that only some ranks have counts as zero on the others."""
        if collectives.world_size() == 1 or not self._params:
            return
        present = torch.tensor([real_grad(param) is not None for param in self._params], device=self._params[0].device)
        # Ranks must agree on the list first: the exchange below needs equal sizes everywhere.
        on_any_rank = collectives.all_reduce_max(present.to(torch.uint8)).tolist()
        chosen = [param for param, is_present in zip(self._params, on_any_rank, strict=True) if is_present]
        for dtype in dict.fromkeys(param.dtype for param in chosen):
            self._average_together([param for param in chosen if param.dtype == dtype])

    def _average_together(self, params: Sequence[nn.Parameter]) -> None:
        """Average the gradients of parameters of one dtype; each parameter has a gradient on some rank."""
        world_size = collectives.world_size()
        pairs = [(param, real_grad(param)) for param in params]
        grads = [torch.zeros_like(param) if grad is None else grad for param, grad in pairs]
        sizes = [grad.numel() for grad in grads]
        # Padded so that each rank sums an equal share.
        flat = grads[0].new_zeros(-(-sum(sizes) // world_size) * world_size, dtype=_wide(grads))
        torch.cat([grad.reshape(-1) for grad in grads], out=flat[: sum(sizes)])
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        mine = torch.empty_like(flat[: len(flat) // world_size])
        add_in_order(received.view(world_size, -1).unbind(), mine, is_mean=True)
        dist.all_gather(list(flat.view(world_size, -1).unbind()), mine)
        for param, part in zip(params, flat[: sum(sizes)].split(sizes), strict=True):
            set_real_grad(param, part.view(param.shape).to(param.dtype).data)  # no view: see _unpacked
