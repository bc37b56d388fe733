"""The dependencies of an element's update: that element, its full tensor, or more. Determined by test steps.

A rank has rows of tensors. SGD and Adam are exact on rows; LAMB, Muon or Adafactor would train another model without
an error. So an unknown optimizer runs on small tensors with its settings, in three ways: all tensors in one optimizer,
each tensor in a separate optimizer, and each tensor split into rows with an optimizer for every piece, as on ranks.
"""

from __future__ import annotations

import copy
import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vissl_zero.errors import ConfigError, Problem

# Element-wise with any options, as tests/unit/optim/test_update_rule.py checks.
ELEMENT_WISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)

# Ours that are element-wise: classes, and hooks on steps.
_DECLARED: list[Callable[..., Any]] = []
_Declared = TypeVar("_Declared", bound=Callable[..., Any])

_INSTEAD = "Use SGD, Adam, AdamW, LARC or LARS, or level 0."
_NOT_OPTIONS = {"params", "param_names"}
_NOT_SETTINGS = {*_NOT_OPTIONS, "name", "lr", "initial_lr", "lr_scale"}  # groups may differ in these
_TOLERANCE = 1e-6  # relative to a step's largest change: an update in float32 may round by position
_ROUNDING = 1e-13  # relative to the largest value: float64's rounding of a very small change
_MAX_REAL_ELEMENTS = 2**17
_LARGE = (264, 160)
# By number of dimensions.
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(13,)],
    2: [(8, 6), (5, 12)],
    3: [(6, 5, 4)],
    4: [(8, 4, 3, 3)],
    5: [(6, 4, 2, 3, 3)],
}


class UpdateRule(enum.Enum):
    """The elements on which an element's update depends."""

    ELEMENT_WISE = "that element alone"
    PER_TENSOR = "its full tensor"


def element_wise(declared: _Declared) -> _Declared:
    """Declare that an optimizer's class, or a hook on its steps, updates each element alone. A decorator."""
    _DECLARED.append(declared)
    return declared


def update_rule(
    optimizer: torch.optim.Optimizer, shapes: Sequence[Sequence[tuple[int, ...]]], *, is_flattened: bool
) -> UpdateRule:
    """Determine the update rule of ``optimizer`` by test steps.

    Free for torch's element-wise optimizers and declared ones, under a second for most others.

    Args:
        optimizer: not changed; copies run, without its state, with the settings of each group.
        shapes: shapes of the full parameters of each group.
        is_flattened: pieces will be one-dimensional, not rows.
    Raises:
        ConfigError: the optimizer couples tensors (a global norm, one step size for all), is random, or fails.
    """
    # The type itself: a subclass may do anything in its step, and so may a hook.
    if (type(optimizer) in ELEMENT_WISE or type(optimizer) in _DECLARED) and not has_hooks(optimizer):
        return UpdateRule.ELEMENT_WISE
    name = type(optimizer).__name__
    try:
        # Some optimizers compile a kernel for each shape, which would take minutes.
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            return _try_out(optimizer, shapes, is_flattened)
    except ConfigError:
        raise
    except Exception as error:  # third-party code may raise anything
        must = f"must run on single tensors to be sharded, and raised {type(error).__name__}: {error}"
        raise ConfigError([Problem("optimizer", name, must, _INSTEAD)]) from error


def _try_out(
    optimizer: torch.optim.Optimizer, shapes: Sequence[Sequence[tuple[int, ...]]], is_flattened: bool
) -> UpdateRule:
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    groups = _distinct_groups(optimizer, shapes)
    small = [
        (index, case)
        for index, group_shapes in groups
        for shape in _small_shapes(group_shapes)
        for case in (*_cases(shape, device), *_cases_by_angle(shape, device))
    ]
    # Each tensor in its own optimizer first: this is what the other two ways must agree with.
    apart = [_run(optimizer, [pair])[0] for pair in small]
    moved = {index for (index, _), changes in zip(small, apart, strict=True) if any(c.any() for c in changes)}
    if idle := sorted({index for index, _ in small} - moved):
        must = f"must update the parameters of its groups, and left those of group {idle[0]} as they were in a trial"
        raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, _INSTEAD)])
    together = _run(optimizer, small)
    for (_, case), alone, beside in zip(small, apart, together, strict=True):
        if not _agree(alone, beside, case):
            must = "must update each tensor from that tensor alone and without randomness: ranks hold different tensors"
            options = {**optimizer.defaults, **optimizer.param_groups[0]}
            norms = [f"{key}=None" for key, value in options.items() if "grad_norm" in key and value]
            what = f"{norms[0]}, and " if norms else "a gradient norm: "
            fix = f"Switch off what it computes from all tensors ({what}use clip_grad instead). {_INSTEAD}"
            raise ConfigError([Problem("optimizer", type(optimizer).__name__, must, fix)])
    if not all(
        _runs_on_pieces(optimizer, index, case, changes, is_flattened)
        for (index, case), changes in zip(small, apart, strict=True)
    ):
        return UpdateRule.PER_TENSOR
    for index, group_shapes in groups:
        for shape in _large_shapes(group_shapes):
            for case in _cases(shape, device):
                changes = _run(optimizer, [(index, case)])[0]
                if not _runs_on_pieces(optimizer, index, case, changes, is_flattened):
                    return UpdateRule.PER_TENSOR
    return UpdateRule.ELEMENT_WISE


def _runs_on_pieces(
    optimizer: torch.optim.Optimizer, index: int, case: _Case, changes: Sequence[Tensor], is_flattened: bool
) -> bool:
    try:
        alone = [_run(optimizer, [(index, piece)])[0] for piece in case.pieces(is_flattened)]
    except Exception:  # noqa: BLE001 - it ran on the full tensor, but may not accept rows, or no rows
        return False
    joined = [torch.cat(parts).view(case.start.shape) for parts in zip(*alone, strict=True)]
    return _agree(changes, joined, case)


class _Case:
    """A test case: a tensor, and its gradients in successive steps."""

    def __init__(self, start: Tensor, grads: Sequence[Tensor]):
        self.start, self.grads = start, list(grads)

    def pieces(self, is_flattened: bool) -> list[_Case]:
        """Split into rows as ranks may have them: one, several, several, none."""
        tensors = [self.start, *self.grads]
        if is_flattened or not self.start.dim():
            tensors = [tensor.reshape(-1) for tensor in tensors]
        num_rows = len(tensors[0])
        sizes = [1, num_rows // 2 - 1, num_rows - num_rows // 2, 0] if num_rows > 2 else [1] * num_rows
        columns = zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
        return [_Case(start, grads) for start, *grads in columns]


def _cases(shape: tuple[int, ...], device: torch.device) -> Iterator[_Case]:
    """Yield cases for which clamps, masks and thresholds differ between the full tensor and its rows."""
    random, top = _random(shape, device), slice(0, shape[0] // 2 if shape else None)
    start, first, silent, small = random(), random(), random(), random() * 0.02
    silent[top if shape else ...] = 0.0
    small[top if shape else ...] = 0.0
    # Gradients against the momentum (cautious optimizers); rows without gradient.
    yield _Case(start, [first, random(), -first, silent, random()])
    # From huge to tiny: clipped updates, trust ratios, running maxima. Half of the rows start at zero.
    yield _Case(small, [random() * scale for scale in (1e3, 1.0, 1e-3, 30.0, 1e-6, 1.0)])


def _cases_by_angle(shape: tuple[int, ...], device: torch.device) -> Iterator[_Case]:
    """Yield cases with angles between gradients and weights that projections depend on."""
    random = _random(shape, device)
    start = random()
    # Orthogonal to the weights: as a full tensor, and in some rows only.
    yield _Case(start, [_at_right_angles(random(), start), random(), random()])
    mixed = random() + start
    for row in range(shape[0] // 2 if len(shape) > 1 else 0):
        mixed[row] = _at_right_angles(mixed[row], start[row])
    yield _Case(start, [mixed, mixed.clone(), random()])
    # Parallel to the weights, as the gradient of weight decay in the loss.
    yield _Case(start, [start.clone(), start * 3.0, random() * 0.1 - start])


def _random(shape: tuple[int, ...], device: torch.device) -> Callable[[], Tensor]:
    # Drawn on the CPU by a fixed seed: all ranks must come to the same verdict.
    generator = torch.Generator().manual_seed(len(shape))
    return lambda: torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def _at_right_angles(grad: Tensor, param: Tensor) -> Tensor:
    return grad - param * ((grad * param).sum() / (param * param).sum())


def _small_shapes(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return small shapes with the parameters' numbers of dimensions: some optimizers take matrices only."""
    by_dims = dict.fromkeys(map(len, shapes))
    return [shape for num_dims in by_dims for shape in _SHAPES.get(num_dims, [(4, *[2] * (num_dims - 1))])]


def _large_shapes(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return large shapes, for thresholds on size (factored moments, 8-bit blocks): a matrix, and the largest."""
    chosen: list[tuple[int, ...]] = [_LARGE] if any(len(shape) == 2 for shape in shapes) else []
    for num_dims in dict.fromkeys(map(len, shapes)):
        sized = sorted((torch.Size(shape).numel(), tuple(shape)) for shape in shapes if len(shape) == num_dims)
        # The largest that runs fast: thresholds on size are far below a hundred thousand elements.
        chosen += [shape for numel, shape in sized if 1 < numel <= _MAX_REAL_ELEMENTS][-1:]
    return chosen


def _distinct_groups(
    optimizer: torch.optim.Optimizer, shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[tuple[int, Sequence[tuple[int, ...]]]]:
    """Return one group for each distinct set of settings, with the shapes of all groups with these settings."""
    groups: dict[str, tuple[int, list[tuple[int, ...]]]] = {}
    for index, (group, group_shapes) in enumerate(zip(optimizer.param_groups, shapes, strict=True)):
        groups.setdefault(_settings(group), (index, []))[1].extend(group_shapes)
    return [(index, group_shapes) for index, group_shapes in groups.values() if group_shapes]


def _settings(group: Mapping[str, Any]) -> str:
    """Return a text that is equal for groups whose parameters are updated in the same way."""
    return repr(sorted((key, value) for key, value in group.items() if key not in _NOT_SETTINGS))


def _run(optimizer: torch.optim.Optimizer, cases: Sequence[tuple[int, _Case]]) -> list[list[Tensor]]:
    """Return the change of each tensor in each step, with all tensors in one copy of ``optimizer``, by group."""
    params = [nn.Parameter(case.start.clone()) for _, case in cases]
    of_group: dict[int, list[nn.Parameter]] = {}
    for (index, _), param in zip(cases, params, strict=True):
        of_group.setdefault(index, []).append(param)
    copied = trial(optimizer, of_group)
    changes: list[list[Tensor]] = [[] for _ in cases]
    for grads in zip(*(case.grads for _, case in cases), strict=False):  # as many steps as the shortest case
        before = [param.detach().clone() for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        copied.step()
        for param, old, change in zip(params, before, changes, strict=True):
            change.append(param.detach() - old)
    return changes


def _agree(expected: Sequence[Tensor], got: Sequence[Tensor], case: _Case) -> bool:
    size = case.start.abs().max()
    for a, b in zip(expected, got, strict=False):
        size = torch.maximum(size, a.abs().nan_to_num().max())
        is_same = ((a - b).abs() <= _TOLERANCE * a.abs().max() + _ROUNDING * size) | (a == b) | (a.isnan() & b.isnan())
        if not is_same.all():
            return False
    return True


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether the optimizer has hooks on its steps, declared ones left out."""
    hooks = *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()
    return any(hook not in _DECLARED for hook in hooks)


def trial(optimizer: torch.optim.Optimizer, params: Mapping[int, Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """Copy ``optimizer`` over ``params``, with its groups' options and a fresh state, ready to ``step``.

    Args:
        optimizer: not changed. A wrapped optimizer over the same groups is copied too.
        params: group index -> parameters of the copy's group with these options. Other groups are dropped.
    """
    groups = []
    for index, group_params in params.items():
        options = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[index].items() if k not in _NOT_OPTIONS}
        # A warm-up may begin at 0, and then no test step would move anything.
        if (rate := options.get("lr")) is not None and not float(rate):
            options["lr"] = torch.full_like(rate, 1e-3) if isinstance(rate, Tensor) else 1e-3
        groups.append(options | {"params": list(group_params)})
    return _copied(optimizer, optimizer.param_groups, groups)


def _copied(
    optimizer: torch.optim.Optimizer,
    shared: Sequence[dict[str, Any]],
    groups: list[dict[str, Any]],
) -> torch.optim.Optimizer:
    # Not by the constructor, whose arguments nobody has kept.
    copied = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key == "step":  # a scheduler's wrapper, which counts steps of the original
            continue
        if _is_wrapped(value, shared):
            value = _copied(value, shared, groups)
        elif isinstance(value, Tensor):
            value = value.clone()
        elif isinstance(value, dict | list | set):
            value = copy.copy(value)
        copied.__dict__[key] = value
    set_own(copied, "param_groups", groups)
    set_own(copied, "state", defaultdict(dict))
    filled = [(param, state) for param, state in optimizer.state.items() if state]
    if filled:  # Adagrad and Lookahead make their state when they are built
        # Prefer a parameter with dimensions: a scalar's moments have the shape of a counter.
        like, template = max(filled, key=lambda pair: (pair[0].dim(), pair[0].numel()))
        for param in (param for group in groups for param in group["params"]):
            copied.state[param] = {key: _fresh(key, value, like, param) for key, value in template.items()}
    return copied


@contextmanager
def with_params(optimizer: torch.optim.Optimizer, params: Sequence[Sequence[Tensor]]) -> Iterator[None]:
    """Replace the ``params`` of each group temporarily. A context manager."""
    # Keep the same dicts: schedules set the rates in them.
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    try:
        for group, lent in zip(groups, params, strict=True):
            group["params"] = lent
        yield
    finally:
        for group, original in zip(groups, held, strict=True):
            group["params"] = original


def set_own(optimizer: torch.optim.Optimizer, name: str, value: Any) -> None:
    """Set ``param_groups`` or ``state``, unless it is a property that forwards to a wrapped optimizer (OrthoGrad)."""
    if not isinstance(getattr(type(optimizer), name, None), property):
        setattr(optimizer, name, value)


def _is_wrapped(value: Any, groups: Sequence[dict[str, Any]]) -> TypeGuard[torch.optim.Optimizer]:
    """Check whether ``value`` is an optimizer over the same groups as its owner."""
    others = value.param_groups if isinstance(value, torch.optim.Optimizer) else []
    return len(others) == len(groups) and all(a is b for a, b in zip(groups, others, strict=True))


def with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """List the optimizer and those that it wraps over the same groups (Lookahead). Each may have a state."""
    wrapped = [value for value in vars(optimizer).values() if _is_wrapped(value, optimizer.param_groups)]
    return [optimizer, *(layer for other in wrapped for layer in with_wrapped(other))]


def _fresh(key: str, value: Any, like: Tensor, param: Tensor) -> Any:
    """Return ``value``, an initial state of parameter ``like``, for another parameter."""
    is_alike = isinstance(value, Tensor) and value.dim() and (value.dtype, value.shape) == (like.dtype, like.shape)
    # A copy of its parameter, such as Lookahead's slow weights, must be one of the other parameter too.
    if is_alike and _has_memory(value) and _has_memory(like) and torch.equal(value, like):
        return param.detach().clone()
    if isinstance(value, Tensor) and value.shape == like.shape and (like.dim() or key != "step"):
        # Before the first step, a state has one value throughout (zeros, or Adagrad's initial_accumulator_value).
        return torch.full_like(param, value.flatten()[0].item() if value.numel() and not value.is_meta else 0.0)
    return copy.deepcopy(value)


def _has_memory(tensor: Tensor) -> bool:
    """Check whether values may be read: an offloaded parameter is on the meta device, or has no storage."""
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes


def state_keys(optimizer: torch.optim.Optimizer) -> list[frozenset[str]]:
    """Return the state's keys that parameters of every shape have, by group; empty if no test step succeeds."""
    return _by_settings(optimizer, partial(_keys_of_every_shape, optimizer))


def element_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the state's keys with a tensor per vector (or matrix, if the optimizer takes no vectors) of any group."""
    return frozenset[str]().union(*_by_settings(optimizer, partial(_keys_of_elements, optimizer)))


def _by_settings(optimizer: torch.optim.Optimizer, keys_of: Callable[[int], frozenset[str]]) -> list[frozenset[str]]:
    """Call ``keys_of`` with the index of each group, once for groups of equal settings; return the results by group."""
    known: dict[str, frozenset[str]] = {}
    for index, group in enumerate(optimizer.param_groups):
        if (settings := _settings(group)) not in known:
            known[settings] = keys_of(index)
    return [known[_settings(group)] for group in optimizer.param_groups]


def _keys_of_every_shape(optimizer: torch.optim.Optimizer, index: int) -> frozenset[str]:
    states = (_state_of(optimizer, index, shape) for shape in ((2,), (2, 2)))
    keys = [frozenset(state) for state in states if state]
    return frozenset.intersection(*keys) if keys else frozenset()


def _keys_of_elements(optimizer: torch.optim.Optimizer, index: int) -> frozenset[str]:
    state = _state_of(optimizer, index, (2,)) or _state_of(optimizer, index, (2, 2))
    return frozenset(key for key, value in state.items() if isinstance(value, Tensor) and value.dim())


def trial_state(optimizer: torch.optim.Optimizer, index: int, like: nn.Parameter) -> dict[str, Any]:
    """Return the state after a first step of a parameter of group ``index``; only shapes and dtypes are meaningful.

    Cost: nothing if the optimizer does not read values, else a step of this parameter.
    """

    def tried(param: nn.Parameter) -> dict[str, Any]:
        param.grad = torch.zeros_like(param)
        copied = trial(optimizer, {index: [param]})
        copied.step()
        return dict(copied.state[param])

    with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        return tried(nn.Parameter(torch.empty(like.shape, dtype=like.dtype)))
    return tried(nn.Parameter(torch.ones(like.shape, dtype=like.dtype)))


def _state_of(optimizer: torch.optim.Optimizer, index: int, shape: tuple[int, ...]) -> dict[str, Any]:
    # First without the state of other parameters: its kind may depend on the shape (Muon, Adafactor).
    for is_empty in (True, False):
        param = nn.Parameter(torch.ones(shape))
        param.grad = torch.ones(shape)
        copied = trial(optimizer, {index: [param]})
        if is_empty:
            copied.state.clear()
        with suppress(Exception):  # it needs a closure, matrices, or state from its constructor
            copied.step()
            return {key: value for key, value in copied.state[param].items() if value is not None}
    return {}


def counter_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the options of a group that the optimizer changes in a step, and so are state."""
    if type(optimizer) in ELEMENT_WISE:
        return frozenset()
    for shape in ((2,), (2, 2)):
        param = nn.Parameter(torch.ones(shape))
        copied = trial(optimizer, {0: [param]})
        before = {key: repr(value) for key, value in copied.param_groups[0].items() if key != "params"}
        try:
            for _ in range(2):
                param.grad = torch.ones(shape)
                copied.step()
        except Exception:  # noqa: BLE001, S112 - it needs a closure, or matrices
            continue
        after = {key: repr(value) for key, value in copied.param_groups[0].items() if key != "params"}
        return frozenset(key for key, value in after.items() if before.get(key) != value)
    return frozenset()
