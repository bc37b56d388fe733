"""Dtypes of parameters, forward pass and outputs, loss scaling for float16, and rounding for bfloat16.

The training loop is the same for all of them: it passes images in the master dtype, and gets float32 or float64 back.

Parameters in bfloat16 are updated in float32, a few elements at a time, and the results are rounded. Between a bfloat16
and the next lie 1/256 to 1/128 of it, so that rounding to the nearest would drop most updates. Two ways keep them.
Stochastic rounding goes up or down by chance, in proportion to how near each neighbor is: the mean of the results is
the unrounded value. Its bits are a function of the seed, the parameter's name, how often it was updated and the
element's place in the full tensor, so that levels, cuts and numbers of ranks do not change them. Kahan sums round to
the nearest and keep the rest, in bfloat16 too, as optimizer state: value and rest together have 16 bits.
Sources: https://arxiv.org/abs/2010.06192 (both); https://doi.org/10.1145/363707.363723 (Kahan).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from vissl_zero.models.keyed_random import element_bits, stable_hash
from vissl_zero.optim.adaptation import Adaptation
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.model.wrap_plan import PlannedUnit
from vissl_zero.sharding.offload.state_place import UpdateKernel, UpdatePiece
from vissl_zero.sharding.offload.streamed_optimizer import StreamedOptimizer
from vissl_zero.sharding.state.shard import Shard
from vissl_zero.sharding.torch_private import own_parameters

if TYPE_CHECKING:  # it reads this file
    from vissl_zero.optim.adaptation import OptimizerFactory


@dataclass
class LossScale:
    """The factor of the loss. It halves after a step with an inf or NaN, and doubles after many without.

    The rule and its constants are those of https://arxiv.org/abs/1710.03740 and of torch.amp.GradScaler. Every rank
    must update it with the same outcome of each step: then it is equal on all ranks.

    Attributes:
        scale: present factor.
        growth_interval: steps without inf or NaN after which the factor doubles.
        good_steps: steps without inf or NaN since the factor changed.
    """

    # A power of two, so that scaling and unscaling change no digit of a gradient.
    scale: float = 65536.0
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, found_inf: bool) -> None:
        """Adapt the scale after a step: ``found_inf`` if its gradients had an inf or NaN, so that it was skipped."""
        if found_inf:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for checkpoints."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a state that ``state_dict`` returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


_HALF = (torch.float16, torch.bfloat16)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as ``"bfloat16"``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def cast_to_master(model: nn.Module, precision: Precision) -> nn.Module:
    """Cast parameters and buffers to the master dtype, in place; return ``model``.

    Batch norm stays in float32 if parameters are in bfloat16, in which its running statistics would no longer change.
    """
    model.to(dtype=dtype_of(precision.master))
    for module in model.modules():
        if precision.rounding and isinstance(module, _BatchNorm):
            module.float()
    return model


@contextmanager
def computed_in(model: nn.Module, dtype: torch.dtype, units: Sequence[PlannedUnit]) -> Iterator[None]:
    """Cast the parameters and inputs of ``units`` to ``dtype``, as ``fully_shard`` does when it gathers. A context.

    For a forecast. Parameters that ``fully_shard`` does not cast (batch norm, scalars) keep their dtype.
    """
    modules = dict(model.named_modules())
    parts = [(unit, modules[name]) for unit in units for name in unit.modules if name in modules]
    kept = {param for unit, part in parts if unit.is_float32 for param in part.parameters()}
    made: dict[nn.Parameter, nn.Parameter] = {}

    with ExitStack() as stack:
        for part in modules.values():
            table = own_parameters(part)
            stack.callback(table.update, dict(table))
            for name, param in table.items():
                if param is None or not param.dim() or param in kept:
                    continue
                if param not in made:  # tied ones once
                    made[param] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
                table[name] = made[param]
        for unit, part in parts:
            if not unit.is_float32:
                cast = lambda _, *arguments: cast_tensors(arguments, dtype)  # noqa: E731
                stack.enter_context(part.register_forward_pre_hook(cast, with_kwargs=True))
        yield


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of any nesting of tuples, lists and dicts."""
    is_cast = lambda leaf: isinstance(leaf, Tensor) and leaf.is_floating_point()  # noqa: E731
    return pytree.tree_map(lambda leaf: leaf.to(dtype) if is_cast(leaf) else leaf, tree)


def run_in_precision(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Replace ``model.forward``: run it under autocast if the plan says so, and upcast outputs to at least float32.

    The model is not wrapped, so that names of parameters have no prefix, and hooks run outside of autocast. Without
    half precision the model is unchanged.
    """
    if precision.autocast is None and dtype_of(precision.compute) not in _HALF:
        return
    # A forward set on the instance, such as a compiled one, is called by ours.
    own_forward = model.__dict__.get("forward")

    def in_precision(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(self).forward, self) if own_forward is None else own_forward
        if precision.autocast is None:
            try:
                return widened(forward(*args, **kwargs))
            except RuntimeError as error:
                if re.search("dtype|scalar type", str(error)):
                    error.add_note(_mixed_formats(self, precision))
                raise
        with torch.autocast(device.type, dtype_of(precision.autocast)):
            outputs = forward(*args, **kwargs)
        return widened(outputs)

    # A bound method, not a closure over ``model``: a deep copy of the model gets a method bound to the copy.
    model.forward = MethodType(in_precision, model)


def _mixed_formats(model: nn.Module, precision: Precision) -> str:
    wide = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
        and buffer.dtype not in _HALF
        and not isinstance(model.get_submodule(name.rpartition(".")[0]), _BatchNorm)
    ]
    return (
        f"Parameters, and inputs of their units, are in {precision.compute} here. What the model keeps in another "
        f"format (buffers: {', '.join(wide) or 'none'}) or makes in it must be cast where it is used, as by "
        "self.buffer.to(x.dtype). At level 0 autocast does so."
    )


def widened(outputs: Any) -> Any:
    """Convert half-precision tensors to float32, in any nesting of tuples, lists, dicts and dataclasses."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in _HALF else outputs
    if isinstance(outputs, MutableMapping):
        changed = copy.copy(outputs)  # subclasses (ModelOutput) have constructors of their own
        for key, value in outputs.items():
            changed[key] = widened(value)
        return changed
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(widened, outputs))
    if isinstance(outputs, tuple | list):
        return type(outputs)(map(widened, outputs))
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return replace(outputs, **{f.name: widened(getattr(outputs, f.name)) for f in fields(outputs) if f.init})
    return outputs


_NARROW = torch.bfloat16
_DROPPED_BITS = 16  # of a float32, whose first 16 bits are the bfloat16
_REST, _COUNT = "rounding_rest", "num_roundings"


def stochastically_rounded(wide: Tensor, bits: Tensor) -> Tensor:
    """Round ``wide`` to bfloat16, each element to one of its two neighbors; the mean over ``bits`` is ``wide``.

    Args:
        wide: (n,) float32; inf, NaN and values that bfloat16 can represent do not change.
        bits: (n,) random integers, of which the lowest 16 bits count.
    """
    mask = (1 << _DROPPED_BITS) - 1
    # Floats are sign and magnitude: a random number added to the dropped bits carries into the kept bits with a
    # probability in proportion to the dropped bits.
    moved = wide.view(torch.int32) + (bits & mask).to(torch.int32)
    rounded = moved.bitwise_and_(~mask).view(torch.float32)
    return torch.where(wide.isfinite(), rounded, wide).to(_NARROW)


class _RoundedKernel(UpdateKernel):
    """Converts pieces in bfloat16 to float32, lets the optimizer update them, and rounds. See ``UpdateKernel``.

    Pieces in other formats are updated as they are.

    Args:
        optimizer: built over float32 proxies.
        shards: shards by position of the parameter.
        rounding: "stochastic" or "kahan".
        seed: seed of the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[Shard], rounding: str, seed: int):
        key, instead = "config.TRAINER.DTYPE, zero.rounding", "config.TRAINER.DTYPE=float32 (no zero.rounding)"
        super().__init__(optimizer, key, "bfloat16", instead)
        self._shards, self._is_stochastic, self._seed = shards, rounding == "stochastic", seed
        if self._is_stochastic:
            self.scalars[_COUNT] = 0
        else:
            self.keys = (*self.keys, _REST)

    def format_of(self, key: str, param: torch.dtype) -> torch.dtype:
        """Return the format of a state; see ``UpdateKernel``."""
        return _NARROW if key == _REST else torch.promote_types(param, torch.float32)

    @torch.no_grad()
    def update(self, pieces: Sequence[UpdatePiece]) -> None:
        """Update the pieces; see ``UpdateKernel``."""
        wide = [self._widened(piece) for piece in pieces]
        super().update(wide)
        for narrow, wide_piece in zip(pieces, wide, strict=True):
            if narrow.values.dtype == _NARROW:
                self._round(narrow, wide_piece.values)

    def _widened(self, piece: UpdatePiece) -> UpdatePiece:
        values, grad = piece.values, piece.grad
        if values.dtype == _NARROW:
            values, grad = values.float(), grad.float()
            if not self._is_stochastic:
                values += piece.state[_REST]
        # Out of place: a piece in another dtype is a view of the loop's gradient.
        for factor, param_factor in self._shards[piece.tensor].noted or ():
            grad = grad * factor
            if param_factor is not None:
                grad.addcmul_(values, param_factor)
        return replace(piece, values=values, grad=grad)

    def _round(self, piece: UpdatePiece, wide: Tensor) -> None:
        if not self._is_stochastic:
            piece.values.copy_(wide)
            # The difference is exact in float32; only the copy rounds it to bfloat16.
            piece.state[_REST].copy_(wide.sub_(piece.values))
            return
        shard, count = self._shards[piece.tensor], piece.state[_COUNT]
        key = stable_hash(self._seed, "rounding", count, shard.name)
        bits = element_bits(key, shard.first_element + piece.start, len(wide), wide.device)
        piece.values.copy_(stochastically_rounded(wide, bits))
        piece.state[_COUNT] = count + 1


def rounded(build_optimizer: OptimizerFactory, plan: ShardingPlan, shards: Sequence[Shard]) -> OptimizerFactory:
    """Wrap ``build_optimizer`` to round updates of parameters in bfloat16, if the plan has them. Not a collective.

    Args:
        build_optimizer: builds the base optimizer.
        plan: dtypes, seed.
        shards: shards of the trained parameters, all in memory.
    Raises:
        ConfigError: when the returned factory is called, if the optimizer cannot be run on pieces.
    """
    precision = plan.precision
    if not precision.rounding:
        return build_optimizer
    by_local = {id(shard.local): shard for shard in shards}

    def factory(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, Adaptation | None]:
        params = [list(group["params"]) for group in groups]
        group_params = [by_local[id(param)] for together in params for param in together]
        for shard in group_params:
            # Keep factors of unscaling and clipping, to apply them to the widened gradient: one rounding less.
            shard.noted = []
            if not shard.local.is_contiguous():
                shard.local.data = shard.local.data.contiguous()  # pieces are runs of the flattened shard
        device = group_params[0].local.device if group_params else torch.device("cpu")
        # In float32: the optimizer sees only widened pieces.
        proxies = [{**group, "params": [nn.Parameter(torch.zeros(1, device=device))]} for group in groups]
        optimizer, adaptation = build_optimizer(proxies)
        kernel = _RoundedKernel(optimizer, group_params, precision.rounding, plan.seed)
        return StreamedOptimizer(kernel, params, None, is_fast_init=False), adaptation

    return factory
