"""Models whose weights are on the meta device first: larger than a rank's memory, and filled unit by unit.

Convolutions, linear layers and norms, for which ``initialize_`` has a rule, get parameters on the meta device.
Everything else is built normally: buffers, learned vectors and other values that a constructor computes. Random numbers
for a parameter on the meta device are drawn and dropped, so that constructors draw the same numbers next as in a model
with memory.

Weights are drawn a unit at a time, so that no rank ever has all of them. A module with its own parameters or buffers
must have ``reset_parameters()`` (torch's layers do), which must fill all of them. It runs on full tensors, in float32,
under a generator keyed by (seed, full name): the weights depend on neither the world size nor the level nor the order
of construction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.models.init import has_rule, outermost_units, replace_data_, rule_of
from vissl_zero.models.keyed_random import stable_hash
from vissl_zero.models.model import Model

_log = logging.getLogger(__name__)


def build_bare(build: Callable[[], Model]) -> Model:
    """Build a model with the parameters of known layers on the meta device; ``FirstWeights`` fills them.

    A model that cannot be filled unit by unit is built with memory: an initialization that spans several units (timm's
    weights), tied parameters, or a constructor that computes with its weights.

    Args:
        build: builds the model; seeds the global generator itself, because it may be called twice.
    """
    try:
        with _bare_parameters() as requested:
            model = build()
        reason = "a constructor asks whether its weights are there" if requested else _why_whole(model)
    except Exception as error:  # noqa: BLE001 - a defect of the model itself is raised again below
        reason = f"its constructor failed without weights ({' '.join(str(error).split())[:200]})"
    if not reason:
        return model
    _log.info("The model is built whole on every rank: %s.", reason)
    return build()


@contextmanager
def lost_operations() -> Iterator[list[str]]:
    """Record the names of operations on tensors without memory, which have no effect."""
    with _Watch() as watch:
        yield watch.seen


def why_whole(model: nn.Module) -> str:
    """Return why the units of ``model`` cannot be filled one by one; empty if they can.

    A constructor may be another reason, which only ``build_bare`` can detect.
    """
    params = list(model.named_parameters(remove_duplicate=False))
    # A tied parameter has a name in two units. The unit that is filled second would overwrite the first.
    if len({param for _, param in params}) < len(params):
        return "parameters are tied"
    filler = next(_fillers_of_others(model), None)
    return f"{type(filler).__name__} gives several units their first weights at once" if filler is not None else ""


def whole_start_bytes(model: nn.Module) -> int:
    """Count the bytes that ``model`` takes, in float32, if it is built and initialized in memory."""
    # A trunk that draws all weights at once (TimmTrunk) builds a second model for them.
    drawn = next(_fillers_of_others(model), None)
    counted = [*model.parameters(), *(drawn.parameters() if drawn is not None else ())]
    return 4 * sum(param.numel() for param in counted)


def _why_whole(model: Model) -> str:
    """Return why ``model`` must be built with memory: see ``why_whole``, or a tensor computed from weights."""
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            # Its values followed from weights that were not there: they exist nowhere.
            if tensor is not None and tensor.is_meta and not has_rule(module, key):
                return f"{name}.{key} is computed from weights"
    return why_whole(model)


def _fillers_of_others(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that contain units, and initialize the weights in them."""
    parts = outermost_units(model)
    for name, module in model.named_modules():
        if any(part.startswith(f"{name}." if name else "") for part in parts) and _fills_others(module):
            yield module


def _fills_others(module: nn.Module) -> bool:
    if hasattr(module, "init_parameters"):
        return True
    owns = next(module.parameters(recurse=False), None) is not None
    return owns and rule_of(module) is None and hasattr(module, "reset_parameters")


@contextmanager
def _bare_parameters() -> Iterator[list[bool]]:
    # A hook of registration, not a device context: buffers and other tensors of a constructor are allocated as usual.
    handle = register_module_parameter_registration_hook(_without_memory)
    try:
        with _DrawAndDrop(), _MetaQueries() as queries:
            yield queries.answers
    finally:
        handle.remove()


def _without_memory(module: nn.Module, key: str, param: Tensor | None) -> None:
    """Move a parameter with a rule to the meta device when it is registered; it stays the same object."""
    # A subclass, such as a lazy layer's UninitializedParameter, would become a plain parameter in the exchange.
    if type(param) is nn.Parameter and param.device.type != "meta" and has_rule(module, key):
        replace_data_(param, torch.empty_like(param, device="meta", requires_grad=False))


class _DrawAndDrop(TorchDispatchMode):
    """Makes random operations on meta tensors advance the generator as they would with memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch tags every operation that draws from a generator.
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _has_meta((args, kwargs)):
            positional, named = tree_map(_with_memory, (args, kwargs))
            func(*positional, **named)
        return func(*args, **kwargs)


class _MetaQueries(TorchFunctionMode):
    """Records positive answers of ``is_meta``, after which some of ``torch.nn.init`` skips its draws."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if answer is True and func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            self.answers.append(answer)
        return answer


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_meta((args, kwargs or {})):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _has_meta(values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.device.type == "meta" for value in tree_iter(values))


def _with_memory(value: Any) -> Any:
    is_bare = isinstance(value, Tensor) and value.device.type == "meta"
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype) if is_bare else value


# (module, full name) -> None: fills the meta tensors of a module that is about to be sharded.
Fill = Callable[[nn.Module, str], None]


@torch.no_grad()
def materialize_(module: nn.Module, full_name: str, seed: int) -> None:
    """Initialize all meta tensors of ``module`` on the CPU, in place, children first.

    Parameters stay the same objects, so that ties and an optimizer's references remain. A tied parameter keeps the
    values of the first of its names.

    Args:
        module: a unit about to be sharded, or a whole model; tensors with memory are not changed.
        full_name: full name of ``module`` in the model; empty for the model itself.
        seed: seed of the run.
    Raises:
        ConfigError: a module cannot initialize its tensors.
    """
    for name, owner in _children_first(module, full_name):
        if _own_meta(owner):
            _fill(owner, name, seed)


def _fill(owner: nn.Module, name: str, seed: int) -> None:
    reset = _reset_of(owner, name)
    # reset_parameters also overwrites tensors with memory, which must keep their values.
    kept = [(param, param.detach().clone()) for param in owner.parameters(recurse=False) if not param.is_meta]
    dtypes = {key: tensor.dtype for key, tensor in _own_meta(owner).items()}
    for key, param in owner._parameters.items():
        if key in dtypes and param is not None:
            replace_data_(param, _unset(param))
    for key, buffer in owner._buffers.items():
        if key in dtypes and buffer is not None:
            owner._buffers[key] = _unset(buffer)
    with torch.random.fork_rng(devices=[]):
        # reset_parameters() takes no generator, so the global one is seeded for it, and restored.
        torch.manual_seed(stable_hash(seed, name) >> 1)
        reset()
    for param, value in kept:
        param.copy_(value)
    for key, dtype in dtypes.items():
        tensor = getattr(owner, key)
        if tensor.isnan().any():
            must = f"reset_parameters() of {type(owner).__name__} leaves {key} without values"
            raise ConfigError([Problem(f"model.{name}".rstrip("."), "", must, "Fill it there.")])
        # Drawn in float32, then cast: the draws are the same in every format.
        tensor.data = tensor.data.to(dtype)


def _reset_of(owner: nn.Module, name: str) -> Callable[[], None]:
    # torch's attention has the method under a private name only
    reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
    if not callable(reset):
        must = f"is on the meta device, and {type(owner).__name__} has no reset_parameters() to give it values"
        fix = f"Write that method, or build this part on the CPU. It owns: {', '.join(_own_meta(owner))}."
        raise ConfigError([Problem(f"model.{name}".rstrip("."), "", must, fix)])
    return reset


def _unset(tensor: Tensor) -> Tensor:
    """Return a tensor of NaNs with this shape, in float32 on the CPU: values that are never filled are detected."""
    if not tensor.is_floating_point():
        # Integers have no NaN. Usually this is batch norm's ``num_batches_tracked``, which starts at 0 anyway.
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.full(tensor.shape, torch.nan)


def _own_meta(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None and tensor.is_meta}


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    # A parent may reset its children's parameters: torch's attention sets the bias of its out_proj to 0.
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}".lstrip("."))
    yield name, module
