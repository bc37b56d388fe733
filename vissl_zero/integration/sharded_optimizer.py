"""The optimizer of a custom loop: a torch optimizer that handles loss scaling, accumulation and sharding.

It saves and loads training state in a checkpoint folder: the format that recipes write, streamed both ways.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vissl_zero import collectives
from vissl_zero.checkpoint.extra import extra_parts, read_extra
from vissl_zero.checkpoint.folder import Manifest, open_checkpoint
from vissl_zero.checkpoint.resume import StoredState, find_resumable, restore_buffers
from vissl_zero.checkpoint.saver import commit, discard, write_rank
from vissl_zero.checkpoint.snapshot import replicated_parts
from vissl_zero.errors import CheckpointError, VisslZeroError
from vissl_zero.integration.ema import Ema
from vissl_zero.optim.update_rule import with_wrapped
from vissl_zero.sharding.checks.waiting import waiting
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.state.missing_gradient import PLAIN_BACKWARD
from vissl_zero.sharding.state.saved_state import Part, check_same_update, inner_optimizer, take_group_options
from vissl_zero.sharding.update.stepper import StepResult
from vissl_zero.version import __version__

_STATE = (
    "The state of the sharded optimizer (moments, step counts) is not in optimizer.state, which is for what wrappers "
    "keep by parameter. Read or store it by optimizer.state_dict() or save(); to start anew, call initialize() again."
)


class _OfParameter(dict[str, Any]):
    """The state that a wrapper keeps for one parameter."""

    def __missing__(self, key: str) -> NoReturn:
        raise VisslZeroError(f"optimizer.state[...][{key!r}]: is not there. {_STATE}")


class _StateOfWrappers(defaultdict[Any, Any]):
    """``optimizer.state``: wrappers read and write by parameter; what is meant for the base optimizer is refused."""

    def __init__(self) -> None:
        super().__init__(_OfParameter)

    def _refuse(self, *_: Any) -> NoReturn:
        raise VisslZeroError(_STATE)

    clear = values = items = keys = __iter__ = _refuse


class ZeroOptimizer(torch.optim.Optimizer):
    """Optimizer over this rank's shards; schedulers and loggers take it for the torch optimizer it is.

    ``param_groups`` are those of the base optimizer, which updates this rank's rows. Between steps they show the
    model's parameters, so that what a loop does through them is what it would do through the model. ``state`` is for
    wrappers that keep something by parameter; that of the base optimizer is in ``state_dict()``. Every method but
    ``zero_grad`` and ``ledger`` is a collective: all ranks must call it, in the same order.

    Args:
        sharded: model and base optimizer.
        model: what the user calls.
        accumulation_steps: calls of ``step`` per update; each ``backward`` counts for its share.
        is_plain_refused: gradients must come from ``backward`` of this class, because it scales them.
        follower: a teacher that follows the model, or None.

    Attributes:
        last_step: gradient norm, loss scale and whether the last update was skipped; None before the first.
        num_updates: how often the optimizer has stepped, skipped steps included.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        model: nn.Module,
        accumulation_steps: int,
        is_plain_refused: bool,
        follower: Ema | None = None,
    ):
        base = sharded.optimizer
        # torch's constructor gives the groups to ``add_param_group``, which refuses later ones.
        self._is_built = False
        super().__init__(base.param_groups, base.defaults)
        # The very objects, so that a learning rate set here reaches the base optimizer.
        self.param_groups, self.state = base.param_groups, _StateOfWrappers()
        self._is_built = True
        self._rows = [group["params"] for group in base.param_groups]
        self._params = _own_params(sharded, model) or self._rows
        self._show(self._params)
        self._follower = follower
        self.last_step: StepResult | None = None
        self._sharded = sharded
        self._accumulation_steps = accumulation_steps
        self.num_updates = 0
        self._num_micro_batches = 0
        self._marks: list[tuple[int, ...] | None] | None = None  # of gradients that later micro-batches add to
        self._is_in_backward = False
        self._is_backward_done = self._is_run_again = False  # in the open micro-batch
        self._model = model
        # Further names of tied parameters, each with the first one.
        first = {param: name for name, param in model.named_parameters()}
        names = model.named_parameters(remove_duplicate=False)
        self._tied = {name: first[param] for name, param in names if first[param] != name}
        # No call of the loop marks the start of its forward pass: a micro-batch is open from one step to the next.
        self._micro_batch = ExitStack()
        self._open_micro_batch()
        if is_plain_refused:
            sharded.scales_loss = True
            # Earlier than step() does, but only where the loop calls the model itself.
            model.register_forward_hook(self._watch)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but for those that would part the loop from the update."""
        if name == "state" and getattr(self, "_is_built", False):
            raise VisslZeroError(_STATE)
        super().__setattr__(name, value)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss``, averaged over ranks and over the calls that make one update.

        Args:
            loss: 0-d, this rank's mean over its own samples.
        Raises:
            VisslZeroError: ``loss`` is no number that was computed with gradients; under accumulation, for a second
                micro-batch before ``step``.
        """
        _require_loss(loss)
        self._require_same_gradients()
        if self._is_run_again and self._accumulation_steps > 1:
            raise VisslZeroError(
                "The model ran forward and backward twice without optimizer.step() in between, with "
                f"gradient_accumulation_steps={self._accumulation_steps}. Call step() and zero_grad() after every "
                "micro-batch: step() counts them. If both losses are of one micro-batch, add them and call backward() "
                "once."
            )
        self._is_in_backward = self._is_backward_done = True
        try:
            with waiting("optimizer.backward()"):
                self._sharded.backward(loss, 1.0 / self._accumulation_steps)
        finally:
            self._is_in_backward = False
        is_last = self._num_micro_batches == self._accumulation_steps - 1
        self._marks = None if is_last or collectives.world_size() == 1 else self._sharded.gradient_marks()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights; then free the gradients, but for level 0.

        Under accumulation, call it after every micro-batch: every k-th call updates the weights, the others only count.
        Unscale, agree on inf, clip, adapt, update: in this order, with norms over full parameters. A step whose
        gradients hold an inf under loss scaling changes nothing but the scale.

        Args:
            closure: computes the loss and its gradients first, as in torch.
        Returns:
            What ``closure`` returned, or None.
        Raises:
            VisslZeroError: on every rank, where steps are skipped although the loss is not scaled up any more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_same_groups()
        with waiting("optimizer.step()"):
            if self._num_micro_batches < self._accumulation_steps - 1:
                self._require_same_gradients()
            self._micro_batch.close()
            self._num_micro_batches += 1
            try:
                if self._num_micro_batches == self._accumulation_steps:
                    self._num_micro_batches, self._marks = 0, None
                    self._update()
            finally:  # also after a refusal: a loop that catches the error can continue
                self._open_micro_batch()
        # After the next micro-batch is open, so that a loop that catches the error can continue.
        if self._num_micro_batches == 0 and self.last_step is not None and self.last_step.is_stuck:
            names = ", ".join(self.last_step.nonfinite_gradients()[:3])
            raise VisslZeroError(
                f"Gradients hold an inf or NaN even at a loss scale of 1 ({names}): every step would be skipped. "
                "Look at the loss and the data; lower the learning rate, or compute in bf16."
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; between the calls that make one update, keep them.

        Args:
            set_to_none: must stay True, because an existing gradient would make its parameter take part in the step.
        """
        if not set_to_none:
            raise VisslZeroError("zero_grad(set_to_none=False) is not supported; leave the argument out.")
        if self._num_micro_batches == 0:
            self._sharded.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group: groups are given to ``initialize`` and fixed from then on.

        Raises:
            VisslZeroError: always, once built.
        """
        if self._is_built:
            raise VisslZeroError("Parameter groups cannot be added to a sharded optimizer; give all to initialize().")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of parameters and optimizer state, buffers and loss scale: all that a resume needs.

        Tensors are shared with the training state, not copied; what is on NVMe is read into memory, all of it
        (``save`` does without). ``torch.save`` writes it; every rank has its own.

        Raises:
            VisslZeroError: between the calls of ``step`` that make one update.
        """
        self._require_boundary("state_dict()")
        self._require_storable("state_dict()")
        with self._on_rows():
            return self._sharded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` of the same rank gave under the same level and world size, parameters included.

        Also takes what ``state_dict`` of the plain torch optimizer gave, the same on every rank: optimizer state and
        options of groups, at any level. Parameters stay as they are then.

        Raises:
            CheckpointError: it comes from another layout or another model; nothing was changed.
            VisslZeroError: between the calls of ``step`` that make one update.
        """
        self._require_boundary("load_state_dict()")
        with self._on_rows():
            self._sharded.load_state_dict(state_dict)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of all ranks to ``<folder>/checkpoints/step_<number of updates>``.

        Tensors pass through memory one by one. Any level, tier and number of ranks can ``load`` it; ``vissl-zero
        checkpoint`` reads it. Earlier checkpoints stay.

        Args:
            folder: folder on a file system that all ranks share.
            extra: what ``load`` is to return, such as ``{"scheduler": scheduler.state_dict(), "epoch": epoch}``. Rank
                0's is written; gather what differs between ranks. It may hold what ``torch.load(weights_only=True)``
                reads: numbers, texts, bytes, None, tensors that are not sharded, and lists, tuples, sets and dicts of
                these.
        Raises:
            CheckpointError: a rank could not write its part, or ``extra`` could not be read back; earlier checkpoints
                stay.
            VisslZeroError: between the calls of ``step`` that make one update.
        """
        self._require_boundary("save()")
        self._require_storable("save()")
        with self._on_rows(), waiting("optimizer.save()"):
            save_state(self._sharded, Path(folder), self.num_updates, extra_parts(extra))

    def load(self, folder: str | Path) -> dict[str, Any] | None:
        """Restore parameters, optimizer state, buffers, loss scale and groups from a complete checkpoint.

        Build a scheduler before this call: building it sets learning rates, which this call restores.

        Args:
            folder: folder that ``save`` was given, to take the newest complete one; or one of its
                ``checkpoints/step_<number of updates>``. All data are read against their checksums first.
        Returns:
            ``extra`` of ``save`` on every rank, tensors on the CPU; None if none was saved.
        Raises:
            CheckpointError: there is none, it is damaged or of another model.
            VisslZeroError: between the calls of ``step`` that make one update.
        """
        self._require_boundary("load()")
        self._require_storable("load()")
        with self._on_rows(), waiting("optimizer.load()"):
            self.num_updates, extra = load_state(self._sharded, Path(folder))
        return extra

    @contextmanager
    def full_parameters(self) -> Iterator[dict[str, Tensor]]:
        """Gather full parameters by full name, on every rank, to read. Takes the memory of all of them."""
        with ExitStack() as stack:
            with waiting("optimizer.full_parameters()"):
                stack.enter_context(self._sharded.full_parameters())
            stack.enter_context(torch.no_grad())
            yield self._with_tied(dict(self._sharded.named_parameters()))

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Set the weights to use in an evaluation or ``full_state()``: an average for schedule-free ones. A context.

        Every rank must enter and leave it; with another optimizer it does nothing.
        """
        with self._on_rows(), self._sharded.evaluated():
            yield

    def full_state(self) -> dict[str, Any]:
        """Gather what ``state_dict()`` of the plain model would be to rank 0's CPU; empty on other ranks.

        Every rank must call it. Tensors are gathered one by one.
        """
        with waiting("optimizer.full_state()"):
            return self._with_tied(self._sharded.plain_state())

    def full_ema_state(self) -> dict[str, Any]:
        """Gather as ``full_state`` the teacher that ``vissl_zero.ema`` has made.

        Raises:
            VisslZeroError: there is none.
        """
        if self._follower is None:
            raise VisslZeroError("There is no teacher. Call vissl_zero.ema(model, decay) before initialize().")
        with waiting("optimizer.full_ema_state()"):
            return self._with_tied(self._sharded.plain_state(of_teacher=True))

    def ledger(self) -> Any:
        """Return this rank's bytes by kind (``vissl_zero.sharding.strategy.Bytes``)."""
        return self._sharded.ledger()

    def close(self) -> None:
        """Remove files that hold offloaded state now rather than at the end of the process; no step after it."""
        self._sharded.close()

    def describe(self) -> str:
        """Describe level, units and number formats, for people."""
        return self._sharded.describe()

    def _update(self) -> None:
        with self._on_rows():
            self.last_step = self._sharded.step()
        self.num_updates += 1
        self._sharded.retire_gradients()
        if self._follower is not None and not self.last_step.skipped:
            self._sharded.follow(self._follower.decay_at(self.num_updates))

    def _show(self, params: Sequence[list[nn.Parameter]]) -> None:
        for group, group_params in zip(self.param_groups, params, strict=True):
            group["params"] = group_params

    @contextmanager
    def _on_rows(self) -> Iterator[None]:
        """Show groups what the base optimizer updates. A context."""
        self._show(self._rows)
        try:
            yield
        finally:
            self._show(self._params)

    def _require_storable(self, method: str) -> None:
        """Refuse state that a checkpoint has no place for.

        A module's own may be any object, and a checkpoint has tensors and numbers. Where optimizers
        wrap each other, as in Lookahead, only the outer one's state would be saved.
        """
        optimizer = inner_optimizer(self._sharded.optimizer)  # ours around it is no foreign one
        if any(layer.state is not optimizer.state for layer in with_wrapped(optimizer)):
            name = type(optimizer).__name__
            raise VisslZeroError(
                f"{method} cannot store the state of the optimizer inside {name}. Use it without {name}, or save the "
                "weights alone with optimizer.full_state()."
            )
        for name, module in self._model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise VisslZeroError(
                    f"{method} cannot store the extra state of {name or 'the model'} ({type(module).__name__}."
                    "get_extra_state). Keep what changes in buffers, or save optimizer.full_state(), which has it."
                )

    def _with_tied(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {name: state[first] for name, first in self._tied.items() if first in state}

    def _open_micro_batch(self) -> None:
        self._is_backward_done = self._is_run_again = False
        is_last = self._num_micro_batches == self._accumulation_steps - 1
        self._micro_batch.enter_context(self._sharded.micro_batch(is_last))

    def _require_same_gradients(self) -> None:
        """Refuse gradients that the loop has changed before the last micro-batch, when they may not be averaged yet."""
        if self._marks is not None and self._marks != self._sharded.gradient_marks():
            raise VisslZeroError(
                "A gradient was changed before the last micro-batch of an update, when it is not yet averaged over "
                f"ranks. Change gradients between backward() and the last of {self._accumulation_steps} calls of "
                "step(), or clip by zero=dict(clip_grad=...)."
            )

    def _require_same_groups(self) -> None:
        """Refuse parameters that were put into groups or taken out of them: the update would not know."""
        groups = self._sharded.optimizer.param_groups
        is_same = self.param_groups is groups and len(groups) == len(self._params)
        for group, own_params in zip(groups, self._params if is_same else (), strict=False):
            params = group["params"]
            is_same &= len(params) == len(own_params) and all(a is b for a, b in zip(params, own_params, strict=True))
        if not is_same:
            raise VisslZeroError(
                "optimizer.param_groups was replaced, or parameters in it. Groups are fixed once initialize() has "
                "sharded them: change lr and the like in place, and freeze by requires_grad_(False)."
            )

    def _require_boundary(self, method: str) -> None:
        if self._num_micro_batches:
            raise VisslZeroError(
                f"{method} was called after {self._num_micro_batches} of {self._accumulation_steps} calls of step(), "
                "while gradients are pending that it cannot store. Call it after an update."
            )

    def _watch(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Make every output refuse gradients that do not come from ``backward``."""
        if torch.is_grad_enabled():
            self._is_run_again = self._is_backward_done
            for output in pytree.tree_leaves(outputs):
                # A parameter that a model returns, such as a temperature, would keep one more hook from each pass.
                if isinstance(output, Tensor) and output.requires_grad and not output.is_leaf:
                    output.register_hook(self._refuse_plain_backward)

    def _refuse_plain_backward(self, grad: Tensor) -> None:
        if not self._is_in_backward and any(param.requires_grad for param in self._model.parameters()):
            raise VisslZeroError(PLAIN_BACKWARD)


def _require_loss(loss: Any) -> None:
    """Refuse what has no gradient to take, in other words than torch's, which name neither the call nor the fix."""
    if not isinstance(loss, Tensor):
        shown, fix = type(loss).__name__, "Take the loss out of the model's output, as a tensor"
    elif loss.numel() != 1:
        shown, fix = f"shape {tuple(loss.shape)}", "Reduce it: loss.mean()"
    elif not loss.requires_grad:
        shown, fix = "one without a gradient", "Compute it outside torch.no_grad() from what is trained, undetached"
    else:
        return
    raise VisslZeroError(f"optimizer.backward(loss): loss must be a tensor of one element (got {shown}). {fix}.")


def _own_params(sharded: ShardedModel, model: nn.Module) -> list[list[nn.Parameter]] | None:
    """List the model's parameters of each group; None where the engine has put others in their place."""
    params = dict(model.named_parameters())
    names = [group["params"] for group in sharded.group_facts()]
    if any(name not in params for group_names in names for name in group_names):
        return None
    return [[params[name] for name in group_names] for group_names in names]


def save_state(sharded: ShardedModel, folder: Path, step: int, extra: Sequence[Part] = ()) -> None:
    """Write ``<folder>/checkpoints/step_<step>``: each rank what it holds, one tensor in memory at a time. Collective.

    Args:
        sharded: between two steps.
        folder: folder on a file system that all ranks share.
        step: optimizer steps done.
        extra: what this rank stores beside the training state.
    Raises:
        CheckpointError: a rank could not write its part; what was written is removed, earlier checkpoints stay.
    """
    layout = sharded.layout()
    manifest = Manifest(
        step=step,
        epoch=0,
        epoch_samples=0,
        position=0,
        world_size=collectives.world_size(),
        level=layout["level"],
        engine=layout["engine"],
        global_batch=0,
        recipe="",
        vissl_zero=__version__,
        torch=str(torch.__version__),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks={},
        groups=sharded.group_facts(),
        loss_scale=sharded.loss_scale_state(),
    )
    parts = [*sharded.parts(), *replicated_parts("buffer", sharded.buffers()), *extra]
    is_first = collectives.rank() == 0

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_rank(folder, step, collectives.rank(), parts, sharded.scalars(), {})

    try:
        _require_all(write)
        # Not in the same go: the manifest names the files of every rank, so all must have written theirs.
        _require_all(lambda: commit(folder, manifest) if is_first else None)
    except CheckpointError:
        if is_first:
            # All ranks have stopped writing by now: ``_require_all`` raises only after each rank has answered.
            discard(folder, step)
        raise


def load_state(sharded: ShardedModel, folder: Path) -> tuple[int, dict[str, Any] | None]:
    """Restore the newest complete checkpoint in ``folder``, whatever level, tier and number of ranks wrote it.

    Collective; ranks share the reading of checksums.

    Args:
        sharded: between two steps.
        folder: the folder that ``save_state`` got, or that of one checkpoint.
    Returns:
        Optimizer steps that had been done, and the user's ``extra``.
    Raises:
        CheckpointError: there is none that is whole, or it is of another model.
    """
    resumable = find_resumable(folder)
    if resumable.path is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint. Name the folder that save() was given, or one of its checkpoints/step_*."
        )
    for sentence in resumable.skipped if collectives.rank() == 0 else ():
        logging.getLogger(__name__).warning("skipped: %s", sentence)
    with open_checkpoint(resumable.path) as checkpoint:
        saved = checkpoint.manifest.groups
        groups = sharded.optimizer.param_groups
        places, saved_places = (_places(facts) for facts in (sharded.group_facts(), saved))
        if places != saved_places:
            name = next(name for name in {**places, **saved_places} if places.get(name) != saved_places.get(name))
            there, here = (
                f"in group {groups[name][0]}" if name in groups else "in no group" for groups in (saved_places, places)
            )
            raise CheckpointError(
                f"{checkpoint.path} groups parameters differently: {name} is {there} there, and {here} here. Give "
                "initialize() the groups that were saved, in their order; freeze by requires_grad_(False) after it."
            )
        check_same_update(saved, sharded.optimizer)
        extra = read_extra(checkpoint)
        # After the checks above: what does not fit must not overwrite a part of the state.
        sharded.restore(StoredState(checkpoint))
        restore_buffers(sharded, checkpoint)
        for group, values in zip(groups, saved, strict=True):
            take_group_options(group, values)
        return checkpoint.manifest.step, extra


def _places(groups: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Map the name of each parameter to its group and its place there."""
    return {name: (number, place) for number, group in enumerate(groups) for place, name in enumerate(group["params"])}


def _require_all(work: Callable[[], object]) -> None:
    """Do ``work`` on every rank; if it fails on one, raise on all. Collective."""
    if reason := collectives.first_failure(work, OSError, CheckpointError):
        raise CheckpointError(f"The checkpoint could not be written: {reason}.")
