"""The ``optimizer`` argument of ``initialize``: a dict, a class or a torch optimizer instance, to run on shards."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from vissl_zero.config.components import typed_options
from vissl_zero.config.components.optimizers import LARSConfig, SGDConfig
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.optim.adaptation import Adaptation, Larc, OptimizerFactory
from vissl_zero.optim.elementwise import Groups, lars, sgd
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.update_rule import has_hooks, set_own, with_wrapped
from vissl_zero.optim.whole_tensor import AdamW8bit, MuonAdamW, NorMuonAdamW, Shampoo

Built = tuple[torch.optim.Optimizer, Adaptation | None]


@dataclass
class _SGDOptions(SGDConfig):
    """Keys of the package's own SGD, with torch's names and defaults."""

    momentum: float = 0.0
    lr: float = 1e-3
    weight_decay: float = 0.0


@dataclass
class _LARCOptions(_SGDOptions):
    trust_coefficient: float = Larc.trust_coefficient
    clip: bool = Larc.clip
    eps: float = Larc.eps


@dataclass
class _LARSOptions(LARSConfig):
    momentum: float = 0.0
    lr: float = 1e-3
    weight_decay: float = 0.0


_OWN = {"SGD": _SGDOptions, "LARC": _LARCOptions, "LARS": _LARSOptions}
_TORCH = ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
_FUSED = ("Adam", "AdamW")
_ELSEWHERE = ("Lion", "ScheduleFreeAdamW", "Muon", "NorMuon", "LAMB", "Adafactor", "Shampoo", "AdamW8bit")
_LARC_KEYS = ("trust_coefficient", "clip", "eps")
# Keys that the strategy adds to groups; they are removed, so that the optimizer's defaults apply.
_STRATEGY_KEYS = ("lr", "weight_decay")


def read_optimizer(optimizer: Any, model: nn.Module) -> tuple[list[ParamGroup], OptimizerFactory]:
    """Return parameter groups by name, and a factory of the optimizer over this rank's shards.

    Args:
        optimizer: ``dict(type=..., lr=..., ...)``; a class or function that takes parameter groups; or a torch
            optimizer over parameters of ``model`` before its first step. The instance itself then runs on the shards,
            with its groups and hyperparameters.
        model: whole model, without a wrapper.
    Raises:
        ConfigError: the type or a key is unknown, or parameters are not the model's.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _require_step_alone(optimizer)
        if callable(train := getattr(optimizer, "train", None)):
            train()  # schedule-free optimizers step in no other mode, and loops may call this after ``initialize``
        return _from_instance(optimizer, model)
    groups = [_all_trainable(model)]
    if isinstance(optimizer, Mapping | DictConfig):
        return groups, _from_dict(optimizer)
    if callable(optimizer):
        return groups, _from_class(optimizer)
    fix = "Write optimizer=dict(type='Adam', lr=1e-3), or give a torch optimizer or its class."
    raise ConfigError([Problem("optimizer", type(optimizer).__name__, "must be a dict, a class or an optimizer", fix)])


def _require_step_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the optimizer needs several backward passes per step (LBFGS, SAM)."""
    # Gradients are averaged over ranks once per step.
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "first_step", None)):
        fix = "Give its base optimizer, and make the step to the neighbor in your loop: docs/initialize.md, SAM."
        must = "must make an update in one step(): it wants gradients at two points"
        raise ConfigError([Problem("optimizer", name, must, fix)])
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        fix = "Use a first-order optimizer such as AdamW, or plain torch in one process."
        must = "must step without a closure: it would run the model several times in one step"
        raise ConfigError([Problem("optimizer", name, must, fix)])


def require_plain_step(optimizer: Any) -> None:
    """Check that an optimizer instance has the ``step`` of its class: other code would see only this rank's rows.

    Raises:
        ConfigError: the instance has step hooks, or its ``step`` was replaced.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    # A scheduler's wrapper of step is allowed: it only counts steps.
    is_replaced = not getattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched", "step" not in vars(optimizer))
    if is_replaced or has_hooks(optimizer):
        what = "a step() that was replaced" if is_replaced else "step hooks"
        must = f"has {what}, which would see the rows of one rank above level 0"
        fix = "Do it to the optimizer that initialize() returns: its groups show the model's parameters."
        raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, fix)])


def _all_trainable(model: nn.Module) -> ParamGroup:
    names = tuple(name for name, param in model.named_parameters() if param.requires_grad)
    if not names:
        fix = "Set requires_grad on what is to be trained."
        raise ConfigError([Problem("model", "", "has no parameter to train", fix)])
    return ParamGroup("all", names, is_head=False, is_decayed=True, weight_decay=0.0)


def _from_class(build: Callable[..., Any]) -> OptimizerFactory:
    name = getattr(build, "__name__", repr(build))

    def factory(groups: Groups) -> Built:
        try:
            built = build([_without_strategy_keys(group) for group in groups])
        except TypeError as error:
            fix = "Write optimizer=dict(type=..., lr=...), functools.partial(the class, lr=...), or build it yourself."
            raise ConfigError([Problem("optimizer", name, f"cannot be built: {error}", fix)]) from error
        if not isinstance(built, torch.optim.Optimizer):
            fix = "Give a subclass of torch.optim.Optimizer."
            raise ConfigError([Problem("optimizer", name, "must build a torch optimizer", fix)])
        _require_step_alone(built)
        return built, None

    return factory


def _from_instance(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[list[ParamGroup], OptimizerFactory]:
    layers = with_wrapped(optimizer)
    initial = [[_initial_state(layer, group["params"]) for group in layer.param_groups] for layer in layers]
    names = {param: name for name, param in model.named_parameters()}
    foreign = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        fix = "Build it from the parameters of the same model."
        raise ConfigError([Problem("optimizer", str(foreign[0]), "has a parameter that is not the model's", fix)])
    groups = [
        ParamGroup(
            f"group{index}", tuple(names[p] for p in group["params"]), False, True, group.get("weight_decay", 0.0)
        )
        for index, group in enumerate(optimizer.param_groups)
    ]

    def factory(local_groups: Groups) -> Built:
        for group, local in zip(optimizer.param_groups, local_groups, strict=True):
            group["params"] = list(local["params"])
        # Fresh dicts: the old keys would keep the whole parameters alive. A dict that layers share stays shared.
        fresh: dict[int, defaultdict[Tensor, dict[str, Any]]] = {id(layer.state): defaultdict(dict) for layer in layers}
        for layer, states in zip(layers, initial, strict=True):
            set_own(layer, "state", fresh[id(layer.state)])
            for group, state in zip(layer.param_groups, states, strict=True):
                for param in group["params"] if state else ():
                    if param.requires_grad:
                        layer.state[param] = {key: make(param) for key, make in state.items()}
        return optimizer, None

    return groups, factory


def _initial_state(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]
) -> dict[str, Callable[[Tensor], Any]]:
    """Return a maker for each key of the state before the first step: a constant, or a copy of the parameter.

    Raises:
        ConfigError: the optimizer has made steps.
    """
    # Empty parameters have no value that shows the constant, and frozen ones need no state.
    rows = [(param, optimizer.state.get(param, {})) for param in params if param.numel() and param.requires_grad]
    keys = {key for _, state in rows for key in state}
    makers = {key: _maker(key, [(state.get(key, _NOTHING), param) for param, state in rows]) for key in keys}
    if None in makers.values():
        fix = "Give it before its first step, and load its state through load_state_dict afterward."
        raise ConfigError([Problem("optimizer", type(optimizer).__name__, "has made steps already", fix)])
    return cast(dict[str, Callable[[Tensor], Any]], makers)


_NOTHING = object()


def _maker(key: str, values: Sequence[tuple[Any, Tensor]]) -> Callable[[Tensor], Any] | None:
    """Return a function that makes the initial state of a key for a parameter; None if the state is not initial.

    Args:
        key: key of the state.
        values: for each parameter, (the state's value or ``_NOTHING``, the parameter).
    """
    value, _ = values[0]
    if not isinstance(value, Tensor):
        is_equal = all(not isinstance(other, Tensor) and other == value for other, _ in values)
        # A count of steps above 0 is equal for all parameters too, but not initial.
        return (lambda _: value) if is_equal and value is not _NOTHING and not (key == "step" and value) else None
    if all(isinstance(other, Tensor) and other.dtype == p.dtype and torch.equal(other, p) for other, p in values):
        return lambda param: param.detach().clone()  # Lookahead's slow weights
    if not all(isinstance(other, Tensor) and other.numel() for other, _ in values):
        return None
    first_of_all = value.flatten()[0].clone()
    # By the parameter's dtype, because each dtype rounds the constant differently.
    firsts = {param.dtype: other.flatten()[0].clone() for other, param in reversed(values)}
    if not all(other.dtype == (first := firsts[p.dtype]).dtype and bool((other == first).all()) for other, p in values):
        return None

    def make(param: Tensor) -> Tensor:
        first = firsts.get(param.dtype, first_of_all)  # missing if all parameters of this dtype are empty
        if key == "step":  # by name, not by shape: any state of a 0-d parameter is 0-d too
            return torch.tensor(first.item(), dtype=first.dtype)
        return torch.full_like(param, first.item(), dtype=first.dtype, requires_grad=False)

    return None if key == "step" and any(firsts.values()) else make


@contextmanager
def unchanged_on_error(optimizer: Any) -> Iterator[None]:
    """Restore the parameters and state of an optimizer instance if the body of the context raises."""
    layers = with_wrapped(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
    # Optimizers that wrap each other share the groups of the outermost.
    before = [(group, group["params"]) for layer in layers[:1] for group in layer.param_groups]
    states = [layer.state for layer in layers]
    try:
        yield
    except BaseException:
        for group, params in before:
            group["params"] = params
        for layer, state in zip(layers, states, strict=True):
            set_own(layer, "state", state)
        raise


def _from_dict(config: Mapping[str, Any] | DictConfig) -> OptimizerFactory:
    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    assert isinstance(plain, dict)
    options = {str(key): value for key, value in plain.items()}
    name = options.pop("type", None)
    known = (*_TORCH, "LARC", "LARS", *_ELSEWHERE)
    if name not in known:
        must = "must be given" if name is None else "is not an optimizer that can run on shards"
        fix = did_you_mean(str(name), known).strip() or f"Known: {', '.join(known)}."
        raise ConfigError([Problem("optimizer.type", "" if name is None else repr(name), must, fix)])
    keys = _option_names(name)
    if unknown := [key for key in options if key not in keys]:
        all_keys = f"Known: {', '.join(keys)}."
        raise ConfigError(
            [
                Problem(f"optimizer.{key}", "", f"is not a key of {name}", did_you_mean(key, keys).strip() or all_keys)
                for key in unknown
            ]
        )

    def factory(groups: Groups) -> Built:
        try:
            return _build(name, [_without_strategy_keys(group) for group in groups], options)
        except (TypeError, ValueError) as error:
            problem = Problem("optimizer", str(options), f"{name} refuses its keys: {error}", "Correct the value.")
            raise ConfigError([problem]) from error

    return factory


def _build(name: str, groups: Groups, options: Mapping[str, Any]) -> Built:
    # If lr is a tensor, torch's plain kernels use its rounded value, and the fused kernels use another value.
    has_tensor = any(isinstance(value, Tensor) for value in options.values())
    if name in _OWN and set(options) <= set(_names(_OWN[name])) and not (name == "SGD" and has_tensor):
        rest = typed_options(_OWN[name], options, "optimizer")
        # Only for its checks: torch validates defaults, not the values of groups.
        torch.optim.SGD([torch.empty(0)], **{key: rest[key] for key in _names(_SGDOptions)})
        rates = {key: rest.pop(key) for key in _STRATEGY_KEYS}
        for group in groups:
            group |= rates
        if name == "LARS":
            return lars(groups, **rest)
        larc = Larc(**{key: rest.pop(key) for key in _LARC_KEYS}) if name == "LARC" else None
        return sgd(groups, **rest), larc
    is_fused = (
        name in _FUSED and not has_tensor and not {"foreach", "fused", "capturable", "differentiable"} & set(options)
    )
    if name in _ELSEWHERE:
        optimizer = _class_from_elsewhere(name)(groups, **options)
        if name == "ScheduleFreeAdamW":
            # ``step`` of a schedule-free optimizer raises until train() was called.
            optimizer.train()  # type: ignore[attr-defined]
        return optimizer, None
    built = getattr(torch.optim, name)(groups, **({"fused": True} if is_fused else {}), **options)
    assert isinstance(built, torch.optim.Optimizer)
    return built, None


def _option_names(name: str) -> tuple[str, ...]:
    if name != "SGD" and name in _OWN:
        return _names(_OWN[name])
    cls = _class_from_elsewhere(name) if name in _ELSEWHERE else getattr(torch.optim, name)
    hidden = ("params", "max_grad_norm", "options")
    keys = tuple(key for key in inspect.signature(cls).parameters if key not in hidden)
    # NorMuon's constructor passes all other keys on to Muon's.
    return tuple(dict.fromkeys([*keys, *_option_names("Muon")])) if name == "NorMuon" else keys


def _class_from_elsewhere(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of an optimizer that is not in torch.optim, or not under this name."""
    if name in ("LAMB", "Lion"):
        from timm.optim import Lamb, Lion

        # timm's clipping would use the norm of this rank's rows; ``clip_grad`` uses the norm of all gradients.
        return Lion if name == "Lion" else functools.partial(Lamb, max_grad_norm=None)
    if name == "ScheduleFreeAdamW":
        from schedulefree import AdamWScheduleFree

        return cast(Callable[..., torch.optim.Optimizer], AdamWScheduleFree)
    replacements = {"Muon": MuonAdamW, "NorMuon": NorMuonAdamW, "Shampoo": Shampoo, "AdamW8bit": AdamW8bit}
    return replacements.get(name, torch.optim.Adafactor)


def _names(schema: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(schema))


def _without_strategy_keys(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _STRATEGY_KEYS}


def optimizer_facts(optimizer: Any) -> list[str]:
    """Return facts about the ``optimizer`` argument of ``initialize`` that must be equal on every rank."""
    if isinstance(optimizer, torch.optim.Optimizer):
        options = [
            {key: value for key, value in group.items() if key != "params"} | {"params": len(group["params"])}
            for group in optimizer.param_groups
        ]
        return [type(optimizer).__name__, *(_option_facts(group, f" of group {i}") for i, group in enumerate(options))]
    if isinstance(optimizer, functools.partial):
        return [*optimizer_facts(optimizer.func), _option_facts(optimizer.keywords, "")]
    if isinstance(optimizer, Mapping):
        return [_option_facts(optimizer, "")]
    return [str(getattr(optimizer, "__qualname__", type(optimizer).__name__))]


def _option_facts(options: Mapping[str, Any], where: str) -> str:
    # Other values, such as functions, print their address, which differs on every rank.
    plain = {k: v for k, v in options.items() if isinstance(v, str | int | float | tuple | list | torch.Tensor | None)}
    return ", ".join(f"{key}={plain[key]}" for key in sorted(plain)) + where
