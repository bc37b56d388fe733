"""A tensor of which each rank holds some rows, and the table of operations that a loop may run on it between steps.

Parameters of ZeRO level 3, their gradients and all tensors computed from them have one class, to which torch sends
every operation. The table has three ways to run one. An operation that is not in the table raises an error with its
name, so that none can be silently wrong. ``docs/sharded_parameters.md`` is this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from vissl_zero import collectives
from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.checks.waiting import waiting
from vissl_zero.sharding.state.aliases import OTHER_DATA, add_alias, take_aliases
from vissl_zero.sharding.state.checksum import checksum
from vissl_zero.sharding.state.missing_gradient import SPENT, MissingGradient
from vissl_zero.sharding.state.sharded_view import ShardedView, is_view, run_on_views
from vissl_zero.sharding.torch_private import (
    FACTS,
    as_plain_tensors,
    is_in_backward,
    local_tensor,
    operation_name,
    real_grad,
    same_layout,
    set_local_tensor,
    set_real_grad,
    with_own_dispatch,
    written_arguments,
)

# An element of the result depends on the same element of the arguments alone. Names of torch, with and without _.
ELEMENT_WISE = {
    "arithmetic": "abs add addcdiv addcmul div fmod lerp mul neg pow reciprocal remainder rsqrt rsub sqrt square sub",
    "functions": "acos acosh asin asinh atan atan2 atanh cos cosh erf erfc erfinv exp exp2 expm1 gelu hardtanh "
    "leaky_relu log log10 log1p log2 relu sigmoid sin sinh softplus tan tanh threshold xlogy",
    "rounding and limits": "ceil clamp clamp_max clamp_min copysign floor maximum minimum nan_to_num round sgn sign "
    "trunc",
    "comparisons": "bitwise_and bitwise_not bitwise_or eq ge gt isfinite isinf isnan isneginf isposinf le logical_and "
    "logical_not logical_or logical_xor lt ne where",
    "copies and fills": "_to_copy clone copy empty_like fill full_like masked_fill ones_like zero zeros_like",
}
# Computed from full tensors on every rank. In place, each rank stores its own rows of the result.
ON_FULL_TENSOR = {
    "sums, norms, extremes": "all amax amin any argmax argmin count_nonzero dist dot histc kthvalue linalg_vector_norm "
    "logsumexp max mean median min nonzero norm prod quantile std std_mean sum topk var var_mean",
    "comparison of tensors, numbers": "_local_scalar_dense allclose equal isclose",
    "random numbers and initialization": "bernoulli cauchy exponential eye fill_diagonal geometric log_normal normal "
    "rand_like randn_like random uniform",
    "products and rows": "_cdist _cdist_forward _embedding_bag _euclidean_dist addmm addmv baddbmm bmm embedding "
    "index_select mm mv repeat stack",
    "layers": "_prelu_kernel convolution native_group_norm native_layer_norm",
    "losses": "binary_cross_entropy huber_loss kl_div mse_loss smooth_l1_loss",
    "linear algebra": "_linalg_check_errors _linalg_det _linalg_eigh _linalg_svd linalg_cond linalg_cross linalg_det "
    "linalg_eigh linalg_eigvalsh linalg_inv_ex linalg_qr linalg_svd linalg_svdvals mode tril triu",
    "along a dimension": "_log_softmax _softmax _unique2 argsort bincount cumprod cumsum flip index_add index_copy "
    "index_fill index_put log_softmax masked_scatter renorm roll scatter scatter_add softmax sort unique_dim",
}
# Functions that take views of their arguments inside, and return none; on full tensors too.
COMPOSED = {"composed of other operations": "cdist einsum inner linalg_matrix_norm linear outer prelu tensordot"}
# A new full tensor of a given size, with dtype and device of the sharded one.
NEW_TENSOR = {"new tensors of a given size": "new_empty new_full new_ones new_zeros"}
_NEW_TENSOR = frozenset(" ".join(NEW_TENSOR.values()).split())
_ELEMENT_WISE = frozenset(" ".join(ELEMENT_WISE.values()).split())
_ON_FULL_TENSOR = frozenset(" ".join(ON_FULL_TENSOR.values()).split())
_COMPOSED = frozenset(" ".join(COMPOSED.values()).split())
# The tensor itself under another name: memory is shared.
_SAME_TENSOR = frozenset({"alias", "detach"})

# Advice for some operations that are not in the table.
_ADVICE = {
    "_amp_foreach_non_finite_check_and_unscale_": "torch.amp.GradScaler looks at this rank's gradients alone. Leave it "
    "out: zero=dict(fp16=True) scales the loss and skips a step on all ranks."
}

# Where parameters stay whole; half precision shards them at levels 1 and 2 too.
WHOLE_LEVELS = "ZeRO level 0, or level 1 or 2 on the CPU in full precision"

_READ_WHOLE = {Tensor.numpy, Tensor.tolist, Tensor.__array__}

_NOT_IN_TABLE = (
    "{} is not in the table of what can be done with a parameter or gradient of which each rank holds some rows (ZeRO "
    "level 3). Write whole = tensor.full_tensor() on every rank, compute with that, and bring it back by "
    "tensor.copy_(whole). docs/sharded_parameters.md is the table."
)
_GRADIENT_OF_A_WEIGHT = (
    "{} with respect to a sharded parameter finds nothing: the loss was computed with full parameters that were "
    "gathered for it. Differentiate with respect to an output of the model, or take parameter.grad after "
    "optimizer.backward(loss), after requires_grad_(False) of what is not to be trained, "
    f"or use {WHOLE_LEVELS}."
)
_SAVED_IN_PARTS = (
    "A sharded tensor cannot be pickled (by torch.save(model.state_dict()) or the like): the file would have this "
    "rank's rows alone. On every rank, write state = optimizer.full_state(); then on rank 0, torch.save(state, file). "
    "optimizer.save(folder) writes all ranks' state."
)


_READ_IN_FORWARD = (
    "{}() in the forward pass reads a parameter of another sharded unit, whose copy in half precision is not gathered "
    "there. Call the layer that owns it, or the unit: block(x), not F.linear(x, block.weight). Or train without fp16 "
    "and bf16."
)


class Store(Protocol):
    """A ``Shard`` whose values are not in ``_local_tensor`` (on a disk), or have a second copy (on the host)."""

    def held(self) -> Tensor:
        """Return this rank's rows, where the model computes with them."""

    def take_over(self, rows: Tensor) -> None:
        """Store the rows that the loop has written."""

    def missing_gradient(self) -> str | None:
        """Explain why the loop cannot read an existing gradient; None if it can, or there is none."""

    def discard_grad(self) -> None:
        """Discard the gradient that is kept outside of the parameter."""


class ShardedTensor(DTensor):
    """A ``DTensor`` with the operations of the table: a parameter (``sharded``), or the result of an operation.

    Attributes:
        store: where a parameter's values are kept; None: in ``_local_tensor``.
        owner: the parameter whose memory this shares; None for a computed tensor.
        aliases: the tensors that share this one's memory.
        is_spent: whether the last update has consumed a parameter's gradient.
        taken: sum of the checksums (2,) of the numbers and full tensors that were combined into a parameter since the
            last update: each rank combines them into its own rows, so ranks with different ones would not notice.
    """

    store: Store | None = None
    owner: Tensor | None = None
    aliases: WeakTensorKeyDictionary | None = None
    is_spent = False
    taken: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) in FACTS:  # the fast path: accessed many times in each step
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if ShardedView in types:
            return NotImplemented  # ShardedView's handler gathers its base, and calls the operation again
        if is_view(func) and isinstance(args[0], ShardedTensor):
            with _named(func):
                return run_on_views(func, args, kwargs or {})
        if func is torch.autograd.grad:
            raise VisslZeroError(_GRADIENT_OF_A_WEIGHT.format("torch.autograd.grad()"))
        if func is torch.autograd.backward and any(
            isinstance(item, cls) for item in (kwargs or {}).get("inputs") or ()
        ):
            raise VisslZeroError(_GRADIENT_OF_A_WEIGHT.format("backward(inputs=...)"))
        if func in _READ_WHOLE:
            args = (whole(args[0]), *args[1:])
        with as_plain_tensors(), with_own_dispatch(), _named(func):
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func).removeprefix("aten::")
        if name.startswith("_foreach_"):
            return _one_by_one(func, args, kwargs)
        # A derivative belongs to its function's row: _softmax_backward_data, tanh_backward.
        base = name.removesuffix("_").removesuffix("_data").removesuffix("_backward")
        if base in _SAME_TENSOR or (base == "view" and args[1] == list(args[0].shape)):
            return args[0].as_computed()
        if base in _ELEMENT_WISE:
            return _element_wise(func, args, kwargs)
        # Elsewhere a view of a full copy would lose what the loop writes into it.
        if base in _ON_FULL_TENSOR or (func.is_view and (_called in _COMPOSED or is_in_backward())):
            return _on_full(func, args, kwargs)
        if base in _NEW_TENSOR:
            # An empty plain tensor, so that the result is a plain one.
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        raise VisslZeroError(_refusal(name))

    @property
    def data(self) -> Tensor:
        """This tensor without autograd history; memory is shared."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self or (isinstance(value, ShardedTensor) and value.owner is self):
            return
        held: Any = value.whole if isinstance(value, ShardedView) else value
        owner = held if getattr(held, "owner", None) is None else held.owner
        is_other_parameter = owner is not self and isinstance(owner, ShardedTensor) and isinstance(owner, nn.Parameter)
        if is_other_parameter or value.shape != self.shape or value.dtype != self.dtype:
            description = "another parameter's memory" if is_other_parameter else f"{tuple(value.shape)}, {value.dtype}"
            raise VisslZeroError(OTHER_DATA.format(description, tuple(self.shape), self.dtype))
        with torch.no_grad():
            for alias in take_aliases(self):
                assert isinstance(alias, ShardedTensor)
                set_local_tensor(alias, alias.rows().clone())
                alias.store = None
            # Copied, not exchanged: fully_shard and the optimizer refer to the memory of the shard.
            self.copy_(value)

    @property
    def __tensor_flatten__(self) -> NoReturn:
        """Hide that it has tensors inside: torch.nn.utils.parametrize would exchange the object for another."""
        raise AttributeError

    def set_(self, source: Tensor) -> ShardedTensor:  # type: ignore[override]
        """Copy values, which a parametrization sets when it is assigned to or removed."""
        self.data = source
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient, sharded like the parameter; a ``MissingGradient`` if it cannot be read."""
        if not _is_inside and (why := self._missing()) is not None:
            return MissingGradient(self, why)
        gradient = real_grad(self)
        # fully_shard makes gradients of class DTensor.
        return sharded(gradient) if type(gradient) is DTensor else gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None and not _is_inside:
            self.is_spent = False
            if self.store is not None:
                self.store.discard_grad()
        elif value is not None and not _is_inside and (why := self._missing()) is not None:
            raise VisslZeroError(why)
        set_real_grad(self, value)

    def _missing(self) -> str | None:
        if self.is_spent:
            return SPENT
        return None if self.store is None else self.store.missing_gradient()

    def as_computed(self) -> ShardedTensor:
        """Return a tensor that shares memory with this one, without autograd history."""
        local = local_tensor(self)
        # A parameter on a disk has no memory here; the device is the model's.
        computed = _like(self, torch.empty_like(local, device=self.device) if local.is_meta else local)
        set_local_tensor(computed, local)
        computed.store = self.store
        add_alias(self if self.owner is None else self.owner, computed)
        return computed

    def rows(self) -> Tensor:
        """Return this rank's rows, to read or to write; call ``written`` after a write.

        Raises:
            VisslZeroError: the rows are a parameter's, and a forward pass in half precision reads them.
        """
        if _is_in_half_precision and (isinstance(self, nn.Parameter) or self.owner is not None):
            raise VisslZeroError(_READ_IN_FORWARD.format(_called or "full_tensor"))
        return self._local_tensor if self.store is None else self.store.held()

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Gather the full tensor on every rank, also from rows on a disk. Collective; autograd follows it.

        Raises:
            VisslZeroError: ``grad_placements`` is given: every rank's gradient is a full tensor.
        """
        if grad_placements is not None:
            raise VisslZeroError("full_tensor(grad_placements=...) is not supported; leave the argument out.")
        return _Gathered.apply(self) if torch.is_grad_enabled() and self.requires_grad else whole(self)

    def written(self, rows: Tensor) -> None:
        """Store changed ``rows``, if the parameter's values are kept elsewhere too."""
        if self.store is not None:
            self.store.take_over(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch.no_grad():
            return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise VisslZeroError(_SAVED_IN_PARTS)

    def __repr__(self) -> str:  # type: ignore[override]
        shape, rows = tuple(self.shape), tuple(self._local_tensor.shape)
        return f"ShardedTensor(shape={shape}, rows of this rank={rows}, dtype={self.dtype}); full_tensor() has all"


# Attributes and methods that a replaced parameter still answers.
_FACTS = (
    "shape dtype device requires_grad is_leaf layout ndim grad_fn is_cuda is_cpu is_meta is_sparse nbytes size dim",
    "numel stride element_size is_contiguous is_floating_point is_complex __hash__ __len__",
)
_KNOWN = frozenset(" ".join(_FACTS).split())


class ReplacedParameter(nn.Parameter):
    """The class of a full parameter after a sharded one has replaced it in the model.

    A reference that was kept before (in a list, a closure, a helper) would give values that training never updates.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name not in _KNOWN:
            raise VisslZeroError(
                f"{name}() was called with a parameter as it was before initialize(): a sharded one has taken its "
                "place in the model. Read parameters from the model when they are used (self.linear.weight, "
                "model.parameters()), and build helpers that keep them after initialize()."
            )
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))


def sharded(tensor: DTensor) -> ShardedTensor:
    """Turn ``tensor`` into a ``ShardedTensor``, in place: models and optimizers refer to the object."""
    tensor.__class__ = ShardedTensor
    assert isinstance(tensor, ShardedTensor)
    return tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank. Collective for a sharded one; any other tensor is returned unchanged."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    with waiting(f"{_called or 'full_tensor'}() of a sharded tensor"):
        return _dtensor_like(tensor, tensor.rows().detach()).full_tensor()


class _Gathered(torch.autograd.Function):
    """A differentiable ``whole``. Its gradient is a full tensor of this rank, which ``mean_rows`` averages."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return whole(tensor)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def mean_rows(param: ShardedTensor, grad: Tensor) -> ShardedTensor:
    """Average the gradients of losses that read ``param`` directly; return this rank's rows. Collective.

    Args:
        param: the parameter.
        grad: full gradient of this rank's loss: operations on gradients run on full tensors (``_element_wise``).
    Cost: one all-reduce of the full gradient.
    """
    assert not isinstance(grad, DTensor)
    with waiting("backward() of a loss that reads parameters directly"):
        mean = collectives.all_reduce_sum(grad).div_(collectives.world_size())
    earlier = real_grad(param)
    if type(earlier) is DTensor:  # fully_shard's; autograd adds tensors of one class only
        sharded(earlier)
    return _like(param, _cut(mean, param).clone())  # a copy, to free the other rows


_is_inside = False


@contextmanager
def real_gradients() -> Iterator[None]:
    """Make ``grad`` of parameters return the stored gradients, for torch's code that runs inside. A context."""
    global _is_inside
    outer, _is_inside = _is_inside, True
    try:
        yield
    finally:
        _is_inside = outer


_is_in_half_precision = False


@contextmanager
def forward_in_half_precision() -> Iterator[None]:
    """Refuse to read parameters as they are stored: a unit computes with copies in half precision. A context."""
    global _is_in_half_precision
    outer, _is_in_half_precision = _is_in_half_precision, True
    try:
        yield
    finally:
        _is_in_half_precision = outer


_called = ""


@contextmanager
def _named(func: Any) -> Iterator[None]:
    """Remember the function that the loop called, for error messages: it may run several operations. A context."""
    global _called
    outer, _called = _called, _called or getattr(func, "__name__", "")
    try:
        yield
    finally:
        _called = outer


def _refusal(name: str) -> str:
    advice = _ADVICE.get(name, "")
    return _NOT_IN_TABLE.format(f"{_called or name}()") if not advice else f"{_called or name}(): {advice}"


def _element_wise(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on this rank's rows if its sharded arguments have one layout; else on full tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    written = written_arguments(func, args, kwargs)
    like = sharded[0]
    is_in_place = bool(written) and all(isinstance(tensor, ShardedTensor) for tensor in written)
    is_alike = all(same_layout(tensor, like) for tensor in sharded)
    # Out of place, a full tensor makes the result full. In place, the result stays sharded and needs only this rank's
    # rows of the full tensor. In a backward pass a number is the gradient of this rank's loss: the other ranks' rows
    # have another factor.
    least_dim = 0 if is_in_backward() else 1
    has_full = any(tensor.dim() >= least_dim and not isinstance(tensor, ShardedTensor) for tensor in tensors)
    is_moved = "device" in kwargs and kwargs["device"] not in (None, like.device)
    if not is_alike or is_moved or (written and not is_in_place) or (has_full and not is_in_place):
        return _on_full(func, args, kwargs)
    # Call ``rows`` once per tensor: it may read the disk, and ``written`` must store the rows that the operation
    # changes.
    rows = {id(tensor): tensor.rows() for tensor in sharded}

    def local(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return rows[id(leaf)]
        return _rows_of(leaf, like) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    result = func(*pytree.tree_map(local, args), **pytree.tree_map(local, kwargs))
    if not written:
        return pytree.tree_map(lambda leaf: _like(like, leaf) if isinstance(leaf, Tensor) else leaf, result)
    for tensor in written:
        if isinstance(tensor, ShardedTensor):
            tensor.written(rows[id(tensor)])
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, int | float) or (isinstance(leaf, Tensor) and not leaf.dim()):
                    _note(tensor, torch.as_tensor(leaf))
    return written[0]


def _on_full(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on gathered full tensors, and store this rank's rows of those it writes. Collective."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensor)]
    full = {id(tensor): whole(tensor) for tensor in tensors}

    def gathered(leaf: Any) -> Any:
        return full[id(leaf)] if isinstance(leaf, ShardedTensor) else leaf

    result = func(*pytree.tree_map(gathered, args), **pytree.tree_map(gathered, kwargs))
    written = written_arguments(func, args, kwargs)
    for tensor in written:
        if isinstance(tensor, ShardedTensor):
            rows = tensor.rows()
            rows.copy_(_rows_of(full[id(tensor)], tensor))
            tensor.written(rows)
    return written[0] if written else result


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on lists (``_foreach_add`` ...) tensor by tensor: each may be sharded or not."""
    num = max(len(arg) for arg in args if isinstance(arg, list | tuple))
    results: list[Any] = []
    for index in range(num):
        one_each = [[arg[index]] if isinstance(arg, list | tuple) and len(arg) == num else arg for arg in args]
        leaves = pytree.tree_leaves((one_each, kwargs))
        if not any(isinstance(leaf, ShardedTensor) for leaf in leaves):
            result = func(*one_each, **kwargs)
        elif (name := operation_name(func).removeprefix("aten::_foreach_").removesuffix("_")) in _ELEMENT_WISE:
            result = _element_wise(func, one_each, kwargs)
        elif name in _ON_FULL_TENSOR:
            result = _on_full(func, one_each, kwargs)
        else:
            raise VisslZeroError(_refusal(name))
        results += result if isinstance(result, list | tuple) else []
    return results or None


def _note(tensor: ShardedTensor, operand: Tensor) -> None:
    """Add an operand's checksum to the parameter's ``taken``, because each rank sees its own rows alone."""
    owner = tensor if tensor.owner is None else tensor.owner
    # Of a parameter or a tensor that shares its memory; computed tensors may differ between ranks.
    if isinstance(owner, ShardedTensor) and isinstance(owner, nn.Parameter):
        # With parameters on the CPU, one operand may come from the GPU and the next one from the CPU.
        added = checksum(operand).to(tensor.device if owner.taken is None else owner.taken.device)
        owner.taken = added if owner.taken is None else owner.taken + added


def _rows_of(full: Tensor, like: ShardedTensor) -> Tensor:
    """Select this rank's rows of a full tensor that can be broadcast to the shape of ``like``."""
    try:
        full = full.expand(like.shape)
    except RuntimeError as error:
        name = f"{_called}() with a tensor of shape {tuple(full.shape)} and one of shape {tuple(like.shape)}"
        raise VisslZeroError(_NOT_IN_TABLE.format(name)) from error
    _note(like, full)
    return _cut(full, like)


def _cut(full: Tensor, like: ShardedTensor) -> Tensor:
    """Cut this rank's rows out of a full tensor, as a view where it is on the device of ``like``."""
    start = first_row(like)
    return full[start : start + len(like._local_tensor)].to(like.device)


def first_row(tensor: DTensor) -> int:
    """Return the index of this rank's first row. Rows are cut as by ``torch.chunk``: the last ranks may have none."""
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    shard_index, num_shards = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    return min(shard_index * -(-num_rows // num_shards), num_rows)


def _like(like: DTensor, rows: Tensor) -> ShardedTensor:
    return sharded(_dtensor_like(like, rows))


def _dtensor_like(like: DTensor, rows: Tensor) -> DTensor:
    placed = like.device_mesh, like.placements
    shape = like.shape
    # from_local() would infer shape and stride from this rank's rows, as if all ranks had as many.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, *placed, shape=shape, stride=stride)
