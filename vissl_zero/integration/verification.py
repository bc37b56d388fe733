"""``vissl_zero.verify``: does sharding change what your own loop trains?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem, VisslZeroError
from vissl_zero.integration.ema import ema_of, take_ema
from vissl_zero.integration.initialize import initialize, join_ranks, training_device
from vissl_zero.integration.settings import ZeroSettings, read_settings

Build = Callable[[], tuple[nn.Module, Any]]
Step = Callable[[nn.Module, Any, Any], Any]
# Sums in another order differ in the last digits. Wrong gradients differ in the first.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass(frozen=True)
class Verdict:
    """The result of ``verify``; equal on every rank. ``print`` it.

    Attributes:
        is_equal: losses, parameters and buffers agreed after every step.
        num_steps: number of steps that were compared.
        step: the first step that differs, from 1; 0: the models differed before training. None: all steps agree.
        name: full name of the parameter or buffer that differs most in this step, or "loss".
        difference: largest absolute difference of an element of it; over all steps if all agree.
        dtype: data type in which both runs computed.
        notes: possible reasons for a difference, and what was not tested.
    """

    is_equal: bool
    num_steps: int
    step: int | None
    name: str | None
    difference: float
    dtype: torch.dtype
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.is_equal:
            first = f"equal: {self.num_steps} steps in {dtype}, largest difference {self.difference:.1e}"
        else:
            first = f"DIFFERENT: {self.name} at step {self.step} by {self.difference:.1e}, in {dtype}"
        return "\n".join([first, *(f"note: {note}" for note in self.notes)])


def verify(
    build: Build,
    step: Step,
    batches: Iterable[Any],
    zero: Any,
    *,
    tolerance: float | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> Verdict:
    """Train a few steps of your loop with plain torch and sharded over the ranks, and compare.

    Collective: start it with torchrun on the number of ranks to verify. Every rank has a whole plain model in addition
    to its shards, so use a small version of a large model.

    Args:
        build: returns a new model and its optimizer (a torch optimizer, a class, or ``dict(type=..., lr=...)`` of a
            torch optimizer). It is called several times, each time after ``torch.manual_seed(seed)``.
        step: your loop's body, ``step(model, optimizer, batch) -> loss``: forward, ``optimizer.backward(loss)`` or
            ``loss.backward()``, ``optimizer.step()`` and ``optimizer.zero_grad()``. The loss is the mean over the
            samples of ``batch``; with several micro-batches, the mean of their losses. It is called at least twice for
            each batch, after ``torch.manual_seed`` with the same number.
        batches: a few complete batches, equal on every rank: tensors, or any nesting of tensors. Tensors with as many
            rows (dim 0) as the first tensor are divided among the ranks; this number must be a multiple of the ranks.
        zero: see ``initialize``. Half precision, float8, ``rounding`` and ``compile`` are turned off, because their
            rounding would hide a difference; a note says so.
        tolerance: maximum difference, relative for values above 1; default 1e-10 in float64. If the model cannot run in
            float64, both runs use the model's dtype, and the default is 1e-4.
        seed: seed of the weights.
        timeout_s: timeout of every collective in seconds, if the process group is started here.
    Raises:
        ConfigError: an argument cannot be used.
    """
    batches = list(batches)
    if not batches:
        raise ConfigError([Problem("batches", "[]", "must hold at least one batch", "Give 3 to 5 of them.")])
    settings = read_settings(zero)
    join_ranks(training_device(_built(build, seed, None)[0]), timeout_s)
    _require_same(batches)
    notes = []
    if collectives.world_size() == 1:
        notes.append("one process; start it with torchrun --nproc-per-node 2 to compare ranks too.")
    coarse = {
        "half precision": settings.fp16 or settings.bf16,
        "float8": settings.float8.layers,
        f"rounding={settings.rounding}": settings.rounding,
        "compile": settings.compile,
    }
    notes += [f"{name} was left out." for name, is_on in coarse.items() if is_on]
    dtype: torch.dtype | None = torch.float64
    try:
        # A single batch: it shows whether every layer of the model has kernels for float64.
        _run_plainly(build, step, batches[:1], settings, seed, dtype)
    except RuntimeError as error:
        notes.append(f"not in float64: {str(error).splitlines()[0]}")
        dtype = None
    plain = _run_plainly(build, step, batches, settings, seed, dtype)
    return _compare(plain, build, step, batches, settings, seed, dtype, tolerance, notes)


def _require_same(batches: list[Any]) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves(batches) if isinstance(leaf, Tensor)]
    # Sums instead of batches, which would all be gathered on every rank.
    facts = [(tuple(tensor.shape), float(tensor.double().sum())) for tensor in tensors]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, facts)
    if any(other != facts for other in of_ranks):
        fix = "Draw them under one seed, or load one file."
        raise ConfigError([Problem("batches", "others", "must be the same complete batches on every rank", fix)])


@dataclass
class _Trace:
    """Record of the plain run: the loss of each step, and the state before training and after each step."""

    losses: list[float]
    states: list[dict[str, Tensor]]
    is_random: bool


def _compare(  # noqa: PLR0913
    plain: _Trace,
    build: Build,
    step: Step,
    batches: list[Any],
    settings: ZeroSettings,
    seed: int,
    dtype: torch.dtype | None,
    tolerance: float | None,
    notes: list[str],
) -> Verdict:
    model, optimizer = _built(build, seed, dtype)
    formats = {param.dtype for param in model.parameters() if param.requires_grad} or {torch.float32}
    used = max(formats, key=_tolerance)
    tolerance = _tolerance(used) if tolerance is None else tolerance
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and not _is_synchronized(m) for m in model.modules()):
        notes.append("batch norm is not synchronized: each rank normalizes its own rows. Use nn.SyncBatchNorm.")
    if plain.is_random and collectives.world_size() > 1:
        notes.append("the step draws random numbers (dropout?), which fall on other samples when ranks share a batch.")
    model, sharded = initialize(model, optimizer, _options(settings))
    largest = 0.0
    try:
        for number in range(len(batches) + 1):
            loss = None
            if number:
                # The same seed as in the plain run, so that both draw the same random numbers.
                torch.manual_seed(seed + number)
                share = _share(_converted(batches[number - 1], dtype))
                loss = (
                    float(collectives.all_reduce_sum(_number(step(model, sharded, share)))) / collectives.world_size()
                )
            name, difference, is_equal = _distance(plain, number, loss, sharded.full_state(), tolerance)
            largest = max(largest, difference)
            if not is_equal:
                return Verdict(False, number, number, name, difference, used, tuple(notes))
    finally:
        sharded.close()
    return Verdict(True, len(batches), None, None, largest, used, tuple(notes))


def _tolerance(dtype: torch.dtype) -> float:
    # Half precision has two to three digits.
    return _TOLERANCES.get(dtype, 1e-2)


def _distance(
    plain: _Trace, number: int, loss: float | None, state: Mapping[str, Tensor], tolerance: float
) -> tuple[str, float, bool]:
    """Return (name, difference, is within tolerance) of the tensor that differs most. Collective."""
    worst: list[Any] = ["", 0.0, True, -1.0]
    # ``full_state`` is on rank 0 only.
    if collectives.rank() == 0:
        pairs = [(name, plain.states[number][name], value) for name, value in state.items()]
        if loss is not None:
            pairs.append(("loss", torch.tensor(plain.losses[number - 1]), torch.tensor(loss)))
        for name, expected, got in pairs:
            expected, got = expected.double(), got.double()
            # Equal infinities agree, although their difference is NaN.
            if not expected.numel() or torch.equal(expected, got):
                continue
            difference = (expected - got).abs().nan_to_num(nan=torch.inf).max().item()
            relative = difference / max(1.0, expected.abs().nan_to_num().max().item())
            if relative > worst[3]:
                worst = [name, difference, relative <= tolerance, relative]
    if dist.is_initialized():
        dist.broadcast_object_list(worst, src=0)
    return worst[0], worst[1], worst[2]


def _run_plainly(
    build: Build, step: Step, batches: list[Any], settings: ZeroSettings, seed: int, dtype: torch.dtype | None
) -> _Trace:
    model, optimizer = _built(build, seed, dtype)
    for module in model.modules():
        # In one process it equals plain batch norm, and torch's SyncBatchNorm does not run on a CPU.
        if _is_synchronized(module):
            module.__class__ = _BatchNorm
    plain = _PlainOptimizer(_torch_optimizer(optimizer, model), settings, model)
    trace = _Trace([], [_state(model)], False)
    for number, batch in enumerate(batches, 1):
        torch.manual_seed(seed + number)
        before = torch.get_rng_state()
        trace.losses.append(float(_number(step(model, plain, _converted(batch, dtype)))))
        trace.is_random |= not torch.equal(before, torch.get_rng_state())
        trace.states.append(_state(model))
    return trace


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of inputs with any number of dimensions, as SyncBatchNorm accepts."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class _PlainOptimizer(torch.optim.Optimizer):
    """A torch optimizer with the methods of ``ZeroOptimizer`` that a loop calls: the reference."""

    def __init__(self, base: torch.optim.Optimizer, settings: ZeroSettings, model: nn.Module):
        super().__init__(base.param_groups, base.defaults)
        self.param_groups, self.state = base.param_groups, base.state
        self._base, self._settings, self._num_calls = base, settings, 0
        self._model, self._follower = model, take_ema(model)

    def backward(self, loss: Tensor, retain_graph: bool | None = None) -> None:
        (loss / self._settings.gradient_accumulation_steps).backward(retain_graph=retain_graph)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._num_calls += 1
        if self._num_calls % self._settings.gradient_accumulation_steps:
            return loss
        if self._settings.clip_grad is not None:
            params = [param for group in self.param_groups for param in group["params"]]
            nn.utils.clip_grad_norm_(params, self._settings.clip_grad)
        self._base.step()
        if self._follower is not None:
            self._follower.follow(self._model, self._num_calls // self._settings.gradient_accumulation_steps)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._num_calls % self._settings.gradient_accumulation_steps == 0:
            self._base.zero_grad(set_to_none)


def _built(build: Build, seed: int, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    built = build()
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        fix = "Write def build(): ...; return model, optimizer."
        raise ConfigError([Problem("build", type(built).__name__, "must return a model and its optimizer", fix)])
    model, optimizer = built
    if dtype is not None:
        model.to(dtype)
        if (follower := ema_of(model)) is not None:
            follower.teacher.to(dtype)
        # Adagrad makes its sums in the constructor, in the dtype that the model had then. Counts of steps (0-d) keep
        # theirs.
        for state in optimizer.state.values() if isinstance(optimizer, torch.optim.Optimizer) else ():
            state.update({k: v.to(dtype) for k, v in state.items() if isinstance(v, Tensor) and v.dim()})
    return model, optimizer


def _torch_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return the plain torch optimizer for the ``optimizer`` argument of ``initialize``."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    params = [param for param in model.parameters() if param.requires_grad]
    if callable(optimizer):
        return optimizer(params)
    options = dict(optimizer)
    name = str(options.pop("type", None))
    if not hasattr(torch.optim, name):
        must = "must name an optimizer of torch.optim, for the run to compare with"
        fix = "Give a torch optimizer, or a class, that runs without vissl_zero too."
        raise ConfigError([Problem("optimizer.type", name, must, fix)])
    return getattr(torch.optim, name)(params, **options)


def _options(settings: ZeroSettings) -> dict[str, Any]:
    """Return the settings without those that change the numbers: half precision, float8, rounding, and compilation."""
    names = (
        "level",
        "gradient_accumulation_steps",
        "clip_grad",
        "keep_gradients",
        "wrap_threshold",
        "shard_group_size",
        "engine",
    )
    return {name: getattr(settings, name) for name in names} | {
        "offload_optimizer_config": asdict(settings.offload_optimizer),
        "offload_param_config": asdict(settings.offload_params),
    }


def _share(batch: Any) -> Any:
    """Return a batch with this rank's rows."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    num_ranks = collectives.world_size()
    if num_ranks == 1 or not leaves:
        return batch
    num_rows = len(leaves[0])
    if num_rows % num_ranks:
        fix = "Give batches whose size is a multiple of the number of ranks."
        raise ConfigError([Problem("batches", f"{num_rows} rows", f"cannot be shared by {num_ranks} ranks", fix)])

    def of_rank(leaf: Any) -> Any:
        is_rows = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == num_rows
        return leaf.chunk(num_ranks)[collectives.rank()] if is_rows else leaf

    return pytree.tree_map(of_rank, batch)


def _converted(batch: Any, dtype: torch.dtype | None) -> Any:
    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # Copied, because a step may change its batch in place, and both runs use the same batches.
        return leaf.to(dtype, copy=True) if dtype is not None and leaf.is_floating_point() else leaf.clone()

    return pytree.tree_map(convert, batch)


def _number(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().double().reshape(())
    if isinstance(loss, int | float):
        return torch.tensor(float(loss), dtype=torch.float64)
    raise VisslZeroError(f"verify: step() must return the loss, a number, and returned {type(loss).__name__}.")


def _state(model: nn.Module) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}


def _is_synchronized(module: nn.Module) -> bool:
    return isinstance(module, nn.SyncBatchNorm)
