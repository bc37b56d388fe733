"""A stand-in for a gradient that exists and cannot be read: it has a shape and a dtype, and raises when it is used.

None would be wrong: a loop that edits, clips or logs gradients would silently skip the parameter.
"""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.state.aliases import OTHER_DATA, add_alias, take_aliases
from vissl_zero.sharding.torch_private import (
    is_made_parameter,
    num_holders,
    object_address,
    real_grad,
    set_real_grad,
    tensors_over,
    without_functions,
    without_memory,
)

_NONE_IS_FINE = "Setting it to None is possible."
ELSEWHERE = (
    "A gradient was read or changed by the loop, and at ZeRO levels 1 and 2 each rank holds only its rows of "
    "it. Write zero=dict(keep_gradients=True, ...) to keep full gradients, or clip by zero=dict(clip_grad=...)"
    f", or scale the loss. {_NONE_IS_FINE}"
)
OF_THIS_RANK = (
    "The gradient of a scalar, or of batch norm in half precision, was read or changed by the loop, and where "
    "parameters are sharded it is this rank's own until step() averages it. Clip by zero=dict(clip_grad=...), or scale "
    f"the loss, or make a scalar a parameter of shape (1,). {_NONE_IS_FINE}"
)
_CLIP = f"Clip by zero=dict(clip_grad=...), or scale the loss. {_NONE_IS_FINE}"
ON_DISK = f"A gradient was read or changed by the loop, and with parameters on NVMe gradients are on NVMe too. {_CLIP}"
ON_HOST = (
    "A gradient was read or changed by the loop, and with the optimizer's state on the CPU or on NVMe, gradients of a "
    f"GPU's parameters are moved to the CPU. {_CLIP}"
)
PLAIN_BACKWARD = (
    "Call optimizer.backward(loss) instead of loss.backward(): with gradient accumulation or loss scaling the loss is "
    "scaled there. If this backward pass is of another model's optimizer and only passes through this model, freeze "
    "this one meanwhile: model.requires_grad_(False)."
)
SPENT = (
    "A gradient was used after optimizer.step(), which frees gradients at ZeRO levels 1 to 3. Call "
    "optimizer.zero_grad() after each step, read or change gradients before it, add up several backward passes by "
    "zero=dict(gradient_accumulation_steps=...), or use level 0, where gradients stay until zero_grad()."
)


class _Memory:
    """Stands for a parameter's storage and lives as long as the parameter, which never changes its storage.

    It takes weak references in the parameter's place: torch.utils.swap_tensors refuses tensors that have any.
    """


# The key is the storage's address.
_MEMORIES: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
# What holds a parameter's storage anyway: the parameter, the optimizer's rows of it, and the object that asks.
_NUM_HOLDERS = 3


class MissingGradient(Tensor):
    """A tensor with shape, dtype and device of a gradient that cannot be read, and without memory.

    Args:
        param: parameter of the gradient.
        why: text of the error that every operation raises.
    """

    why: str

    @staticmethod
    def __new__(cls, param: Tensor, why: str) -> MissingGradient:
        """Make a tensor without memory."""
        made: MissingGradient = without_memory(cls, param)
        made.why = why
        return made

    __torch_function__ = without_functions  # attributes are torch's own; operations come to the method below

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        raise VisslZeroError(next(leaf.why for leaf in leaves if isinstance(leaf, MissingGradient)))

    def _refuse(self, *_: Any) -> NoReturn:
        raise VisslZeroError(self.why)

    numpy = tolist = data_ptr = untyped_storage = __array__ = __deepcopy__ = __reduce_ex__ = _refuse  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MissingGradient(shape={tuple(self.shape)}, dtype={self.dtype}): {self.why}"


def watch(param: nn.Parameter, kind: type[WatchedParameter]) -> None:
    """Make a parameter one of ``kind``: the same object, so that the model and the loop keep what they refer to."""
    param.__class__ = kind
    memory = _Memory()
    param.memory = _MEMORIES[object_address(param.untyped_storage())] = memory  # type: ignore[attr-defined]


class GradientGuard(nn.Parameter):
    """A parameter whose gradient a loop cannot always read.

    Attributes:
        is_spent: the last update has consumed the gradient.
        stand_in: what the loop was shown of the present gradient, if it cannot be read; None: nothing, or no longer.
    """

    is_spent = False
    stand_in: MissingGradient | None = None

    @property
    def grad(self) -> Tensor | None:
        """The gradient; a ``MissingGradient`` if it cannot be read."""
        why = SPENT if self.is_spent else self._missing()
        if why is None:
            return real_grad(self)
        if self.stand_in is None or self.stand_in.why != why:
            self.stand_in = MissingGradient(self, why)
        return self.stand_in

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        why = SPENT if self.is_spent else self._missing()
        if value is None:
            self.is_spent, self.stand_in = False, None
            self._drop_grad()
        elif why is None and (why := self._only_from_backward()) is None:
            set_real_grad(self, value)
        # ``param.grad = param.grad`` changes nothing. The stand-in of another gradient, also of an earlier one of this
        # parameter, would leave the present one where the loop wants that one.
        elif value is not self.stand_in:
            raise VisslZeroError(why)

    def detach(self) -> Tensor:
        """Return the values without history; memory is shared, of a ``WatchedParameter`` until ``data`` is set."""
        if is_made_parameter():  # it would refuse the plain tensor below, in words about ``__torch_dispatch__``
            raise VisslZeroError(
                "nn.Parameter(...) was given a parameter of the model after initialize(), directly or by a "
                "parametrization such as weight_norm. Set parametrizations before initialize(); for a copy, write "
                "nn.Parameter(param.data.clone())."
            )
        alias = super().detach()
        self._note_alias(alias)
        return alias

    def _note_alias(self, alias: Tensor) -> None:
        """Note that ``alias`` shares this memory."""

    def _missing(self) -> str | None:
        """Explain why the loop cannot read an existing gradient; None if it can, or there is none."""
        return None

    def _only_from_backward(self) -> str | None:
        """Explain why the loop cannot set a gradient; None if it can."""
        return None

    def _drop_grad(self) -> None:
        """Drop the gradient, because the loop has set it to None."""
        set_real_grad(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # A copy takes no part in the exchange of gradients, so it is a plain parameter.
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class WatchedParameter(GradientGuard):
    """A parameter that this rank holds in full, and whose memory stays where it is."""

    memory: _Memory
    aliases: WeakTensorKeyDictionary | None = None

    def _note_alias(self, alias: Tensor) -> None:
        add_alias(self, alias)

    @property
    def data(self) -> Tensor:
        """The values without history; memory is shared until it is set."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.is_set_to(self):
            return  # param.data = param.data.to(device), as some losses write in each pass
        # The optimizer updates rows of this memory, and messages carry it: it must stay where it is.
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise VisslZeroError(
                f"A parameter of shape {tuple(self.shape)} in {self.dtype} on {self.device} was given {value.dtype} of "
                f"shape {tuple(value.shape)} on {value.device} (by model.to(...), .half() or .data = ...). Convert a "
                "model before initialize(); afterward shape, type and device stay."
            )
        if _MEMORIES.get(object_address(value.untyped_storage()), self.memory) is not self.memory:
            raise VisslZeroError(OTHER_DATA.format("another parameter's memory", tuple(self.shape), self.dtype))
        with torch.no_grad():
            new = value.clone()  # before anything moves: it may be a view of this memory, as in param.data.t()
            self._leave_memory_to_aliases()
            self.copy_(new)

    def _leave_memory_to_aliases(self) -> None:
        """Give all other tensors over this memory one with the same values, which they go on sharing."""
        storage = self.untyped_storage()
        aliases = take_aliases(self)
        # Nothing lists the views of a tensor, as of ``param.data.view(-1)``: all objects are searched, but only then.
        if num_holders(storage) > _NUM_HOLDERS + len(aliases):
            aliases = tensors_over(storage)
        if aliases:
            values = storage.clone()
            for alias in aliases:
                alone = torch.empty(0, dtype=alias.dtype, device=alias.device)
                alias.data = alone.set_(values, alias.storage_offset(), alias.shape, alias.stride())

    def set_(self, source: Tensor) -> WatchedParameter:  # type: ignore[override]
        """Copy values, which a parametrization sets when it is assigned to or removed; the memory stays."""
        self.data = source
        return self
