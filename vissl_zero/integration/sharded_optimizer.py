"""The optimizer of a custom loop: a torch optimizer that handles loss scaling, accumulation and sharding.

It saves and loads training state in checkpoint folders of the same format as recipes, one tensor at a time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from vissl_zero.sharding.checks.replica_check import class_name
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
    """The state that wrappers store for one parameter."""

    def __missing__(self, key: str) -> NoReturn:
        # A KeyError would read as if the optimizer had made no step yet.
        raise VisslZeroError(f"optimizer.state[...][{key!r}]: is not there. {_STATE}")


class _StateOfWrappers(defaultdict[Any, Any]):
    """``optimizer.state``: wrappers read and write it by parameter; access to the base optimizer's state raises."""

    def __init__(self) -> None:
        super().__init__(_OfParameter)

    def _refuse(self, *_: Any) -> NoReturn:
        raise VisslZeroError(_STATE)

    # Code that walks over the state expects moments. It would find none, and treat the optimizer as new.
    clear = values = items = keys = __iter__ = _refuse


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer over this rank's shards, for use with schedulers and loggers.

    ``param_groups`` are those of the base optimizer, which updates this rank's rows. Between steps they list the
    model's parameters, as for a plain optimizer. ``state`` is for wrappers that store values by parameter; the base
    optimizer's state is in ``state_dict()``. Every method except ``zero_grad`` and ``ledger`` is a collective: all
    ranks must call it, in the same order.

    Args:
        sharded: model and base optimizer.
        model: the user's model, which the loop calls.
        accumulation_steps: calls of ``step`` per update; each ``backward`` is weighted by its inverse.
        is_plain_refused: raise for gradients of ``loss.backward()``: ``backward`` of this class must scale them.
        follower: momentum teacher of the model, or None.

    Attributes:
        last_step: gradient norm and loss scale of the last update, and whether it was skipped; None before the first.
        num_updates: number of updates, including skipped ones.
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
        # torch's constructor calls ``add_param_group``, which raises for groups that are added later.
        self._is_built = False
        # Called although its lists are replaced below: torch's schedulers and hooks need a constructed Optimizer.
        super().__init__(base.param_groups, base.defaults)
        # The same list objects, so that a learning rate set here reaches the base optimizer.
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
        self._marks: list[tuple[int, ...] | None] | None = None  # versions of gradients between micro-batches
        self._is_in_backward = False
        self._is_backward_done = self._is_run_again = False  # in the open micro-batch
        self._model = model
        # Alias of a tied parameter -> its first name.
        first = {param: name for name, param in model.named_parameters()}
        names = model.named_parameters(remove_duplicate=False)
        self._tied = {name: first[param] for name, param in names if first[param] != name}
        # No call of the loop marks the start of its forward pass: a micro-batch is open from one step to the next.
        self._micro_batch = ExitStack()
        self._open_micro_batch()
        if is_plain_refused:
            sharded.scales_loss = True
            # The hooks report a plain backward() earlier than step() can, if the loop calls the model itself.
            model.register_forward_hook(self._watch)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raises for ``state``, which the base optimizer would not see."""
        if name == "state" and getattr(self, "_is_built", False):
            raise VisslZeroError(_STATE)
        super().__setattr__(name, value)

    def backward(self, loss: Tensor, retain_graph: bool | None = None, **others: Any) -> None:
        """Accumulate the gradients of ``loss``, averaged over ranks and over the calls that make one update.

        Args:
            loss: 0-d tensor, this rank's mean over its own samples.
            retain_graph: keep the graph for another backward pass, as in torch.
            others: further arguments of torch's ``backward``, at their defaults.
        Raises:
            VisslZeroError: ``loss`` is not a scalar with a gradient, ``others`` ask for something, or, under
                accumulation, a second micro-batch ran before ``step``.
        """
        _require_loss(loss)
        _require_defaults(others)
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
                self._sharded.backward(loss, 1.0 / self._accumulation_steps, bool(retain_graph))
        finally:
            self._is_in_backward = False
        is_last = self._num_micro_batches == self._accumulation_steps - 1
        self._marks = None if is_last or collectives.world_size() == 1 else self._sharded.gradient_marks()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights, and free the gradients (except at level 0).

        Under accumulation, call it after every micro-batch: every k-th call updates the weights, the others only count.
        An update unscales, checks for inf on all ranks, clips, adapts rates, and updates, with norms over full
        parameters. Under loss scaling, a step with an inf in its gradients changes only the scale.

        Args:
            closure: function that computes the loss and its gradients first, as in torch.
        Returns:
            The result of ``closure``, or None.
        Raises:
            VisslZeroError: gradients overflow at a loss scale of 1; raised on every rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                # As in torch's optimizers: the caller may be in no_grad().
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
        """Set all gradients to None; does nothing between the micro-batches of one update.

        Args:
            set_to_none: must be True: the step would update a parameter that has a gradient, even a zero gradient.
        """
        if not set_to_none:
            raise VisslZeroError("zero_grad(set_to_none=False) is not supported; leave the argument out.")
        if self._num_micro_batches == 0:
            self._sharded.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error, because groups are fixed by ``initialize``.

        Raises:
            VisslZeroError: always, after construction.
        """
        if self._is_built:
            raise VisslZeroError("Parameter groups cannot be added to a sharded optimizer; give all to initialize().")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resume needs: this rank's shards of parameters and state, buffers and loss scale.

        Tensors are shared with the training state, not copied. All state on NVMe is read into memory (``save`` avoids
        this). Each rank's dict is different; ``torch.save`` can write it.

        Raises:
            VisslZeroError: called between the micro-batches of one update.
        """
        self._require_boundary("state_dict()")
        self._require_storable("state_dict()")
        with self._on_rows():
            return self._sharded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of ``state_dict`` of the same rank, level and world size, including parameters.

        A ``state_dict`` of the plain torch optimizer is accepted at any level, if it is the same on every rank. It
        restores optimizer state and options of groups; parameters are not changed.

        Raises:
            CheckpointError: the state has another layout or is of another model; nothing is changed.
            VisslZeroError: called between the micro-batches of one update.
        """
        self._require_boundary("load_state_dict()")
        with self._on_rows():
            self._sharded.load_state_dict(state_dict)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of all ranks to ``<folder>/checkpoints/step_<number of updates>``.

        Tensors pass through memory one at a time. ``load`` works at any level, tier and number of ranks; ``vissl-zero
        checkpoint`` reads the folder. Earlier checkpoints are kept.

        Args:
            folder: folder on a file system that all ranks share.
            extra: values that ``load`` returns, such as ``{"scheduler": scheduler.state_dict(), "epoch": epoch}``.
                Only rank 0's are written. Allowed are the types of ``torch.load(weights_only=True)``: numbers, strings,
                bytes, None, tensors that are not sharded, and lists, tuples, sets and dicts of these.
        Raises:
            CheckpointError: a rank could not write its part, or ``extra`` has a type that cannot be read back.
            VisslZeroError: called between the micro-batches of one update.
        """
        self._require_boundary("save()")
        self._require_storable("save()")
        with self._on_rows(), waiting("optimizer.save()"):
            save_state(self._sharded, Path(folder), self.num_updates, extra_parts(extra))

    def load(self, folder: str | Path) -> dict[str, Any] | None:
        """Restore parameters, optimizer state, buffers, loss scale and groups from a complete checkpoint.

        Build a scheduler before this call: building it sets learning rates, which this call restores.

        Args:
            folder: the folder passed to ``save``, for its newest complete checkpoint; or one of its
                ``checkpoints/step_<number of updates>``. Checksums of all data are verified first.
        Returns:
            ``extra`` of ``save`` on every rank, with tensors on the CPU; None if none was saved.
        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or of another model.
            VisslZeroError: called between the micro-batches of one update.
        """
        self._require_boundary("load()")
        self._require_storable("load()")
        with self._on_rows(), waiting("optimizer.load()"):
            self.num_updates, extra = load_state(self._sharded, Path(folder))
        return extra

    @contextmanager
    def full_parameters(self) -> Iterator[dict[str, Tensor]]:
        """Gather full parameters by full name on every rank, for reading, in the memory of a whole model."""
        with ExitStack() as stack:
            with waiting("optimizer.full_parameters()"):
                stack.enter_context(self._sharded.full_parameters())
            stack.enter_context(torch.no_grad())
            yield self._with_tied(dict(self._sharded.named_parameters()))

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Use the weights for evaluation in the context: the average of a schedule-free optimizer.

        Every rank must enter and leave it. Does nothing for other optimizers.
        """
        with self._on_rows(), self._sharded.evaluated():
            yield

    def full_state(self) -> dict[str, Any]:
        """Gather the ``state_dict()`` of the plain model to rank 0's CPU; empty on other ranks.

        Every rank must call it. Tensors are gathered one at a time.
        """
        with waiting("optimizer.full_state()"):
            return self._with_tied(self._sharded.plain_state(of_teacher=False))

    def full_ema_state(self) -> dict[str, Any]:
        """Gather the ``state_dict()`` of the teacher of ``vissl_zero.ema``, as ``full_state`` does for the model.

        Raises:
            VisslZeroError: there is no teacher.
        """
        if self._follower is None:
            raise VisslZeroError("There is no teacher. Call vissl_zero.ema(model, decay) before initialize().")
        with waiting("optimizer.full_ema_state()"):
            return self._with_tied(self._sharded.plain_state(of_teacher=True))

    def ledger(self) -> Any:
        """Return this rank's bytes by kind (``vissl_zero.sharding.strategy.Bytes``)."""
        return self._sharded.ledger()

    def close(self) -> None:
        """Remove the files of offloaded state now instead of at exit. No step may follow."""
        self._sharded.close()

    def describe(self) -> str:
        """Return a description of level, units and number formats, to print."""
        return self._sharded.describe()

    def _update(self) -> None:
        with self._on_rows():
            self.last_step = self._sharded.step()
        self.num_updates += 1
        self._sharded.retire_gradients()
        # A skipped update counts in num_updates, but has left no new weights for the teacher to follow.
        if self._follower is not None and not self.last_step.skipped:
            self._sharded.follow(self._follower.decay_at(self.num_updates))

    def _show(self, params: Sequence[list[nn.Parameter]]) -> None:
        for group, group_params in zip(self.param_groups, params, strict=True):
            group["params"] = group_params

    @contextmanager
    def _on_rows(self) -> Iterator[None]:
        """List this rank's rows in the groups in the context, as the base optimizer needs."""
        self._show(self._rows)
        try:
            yield
        finally:
            self._show(self._params)

    def _require_storable(self, method: str) -> None:
        """Raise VisslZeroError if the training has state that a checkpoint cannot store."""
        optimizer = inner_optimizer(self._sharded.optimizer)  # without the package's own wrapper
        # If optimizers wrap each other, as in Lookahead, only the outer state would be saved.
        if any(layer.state is not optimizer.state for layer in with_wrapped(optimizer)):
            name = type(optimizer).__name__
            raise VisslZeroError(
                f"{method} cannot store the state of the optimizer inside {name}. Use it without {name}, or save the "
                "weights alone with optimizer.full_state()."
            )
        for name, module in self._model.named_modules():
            # Extra state may be any object, and checkpoints have only tensors and numbers.
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise VisslZeroError(
                    f"{method} cannot store the extra state of {name or 'the model'} ({class_name(module)}."
                    "get_extra_state). Keep what changes in buffers, or save optimizer.full_state(), which has it."
                )

    def _with_tied(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {name: state[first] for name, first in self._tied.items() if first in state}

    def _open_micro_batch(self) -> None:
        self._is_backward_done = self._is_run_again = False
        is_last = self._num_micro_batches == self._accumulation_steps - 1
        self._micro_batch.enter_context(self._sharded.micro_batch(is_last))

    def _require_same_gradients(self) -> None:
        """Raise VisslZeroError if the loop has changed gradients before they are averaged (the last micro-batch)."""
        if self._marks is not None and self._marks != self._sharded.gradient_marks():
            raise VisslZeroError(
                "A gradient was changed before the last micro-batch of an update, when it is not yet averaged over "
                f"ranks. Change gradients between backward() and the last of {self._accumulation_steps} calls of "
                "step(), or clip by zero=dict(clip_grad=...)."
            )

    def _require_same_groups(self) -> None:
        """Raise VisslZeroError if parameters were added to groups or removed: the update would ignore it."""
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
        """Register hooks on the outputs that raise if gradients do not come from ``backward`` of this class."""
        if torch.is_grad_enabled():
            self._is_run_again = self._is_backward_done
            for output in pytree.tree_leaves(outputs):
                # Not on leaves: a parameter that the model returns would collect one more hook in every pass.
                if isinstance(output, Tensor) and output.requires_grad and not output.is_leaf:
                    output.register_hook(self._refuse_plain_backward)

    def _refuse_plain_backward(self, grad: Tensor) -> None:
        # The loss of a GAN's generator passes through a frozen discriminator, whose gradients nobody needs.
        if not self._is_in_backward and any(param.requires_grad for param in self._model.parameters()):
            raise VisslZeroError(PLAIN_BACKWARD)


def _require_loss(loss: Any) -> None:
    """Raise VisslZeroError if ``loss`` is not a scalar with a gradient; torch's error names neither call nor fix."""
    if not isinstance(loss, Tensor):
        shown, fix = type(loss).__name__, "Take the loss out of the model's output, as a tensor"
    elif loss.numel() != 1:
        shown, fix = f"shape {tuple(loss.shape)}", "Reduce it: loss.mean()"
    elif not loss.requires_grad:
        shown, fix = "one without a gradient", "Compute it outside torch.no_grad() from what is trained, undetached"
    else:
        return
    raise VisslZeroError(f"optimizer.backward(loss): loss must be a tensor of one element (got {shown}). {fix}.")


_INSTEAD_OF = {
    "gradient": "Multiply the loss by it",
    "create_graph": "Call torch.autograd.grad(..., create_graph=True), and add to the loss what is made of its result",
    "inputs": "Freeze what it leaves out by requires_grad_(False)",
}


def _require_defaults(others: Mapping[str, Any]) -> None:
    """Raise VisslZeroError if ``others``, arguments of torch's ``backward``, ask for something."""
    wanted = [name for name, value in others.items() if value not in (None, False) or name not in _INSTEAD_OF]
    if wanted:
        fixes = ". ".join(_INSTEAD_OF.get(name, "Leave it out") for name in wanted)
        raise VisslZeroError(f"optimizer.backward(loss): does not take {', '.join(wanted)}. {fixes}.")


def _own_params(sharded: ShardedModel, model: nn.Module) -> list[list[nn.Parameter]] | None:
    """Return the model's parameters by group; None if the engine has replaced them by other parameters."""
    params = dict(model.named_parameters())
    names = [group["params"] for group in sharded.group_facts()]
    if any(name not in params for group_names in names for name in group_names):
        return None
    return [[params[name] for name in group_names] for group_names in names]


def save_state(sharded: ShardedModel, folder: Path, step: int, extra: Sequence[Part] = ()) -> None:
    """Write ``<folder>/checkpoints/step_<step>``; each rank writes its shards, one tensor at a time. Collective.

    Args:
        sharded: model and optimizer, between two steps.
        folder: folder on a file system that all ranks share.
        step: optimizer steps done.
        extra: parts that this rank stores in addition to the training state.
    Raises:
        CheckpointError: a rank could not write its part. The incomplete checkpoint is removed, earlier ones are kept.
    """
    layout = sharded.layout()
    # A loop counts epochs and samples itself, and stores them in ``extra``. Those of a recipe are 0.
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
        # Only after all ranks have written: the manifest names the files of every rank.
        _require_all(lambda: commit(folder, manifest) if is_first else None)
    except CheckpointError:
        if is_first:
            # All ranks have stopped writing by now: ``_require_all`` raises only after each rank has answered.
            discard(folder, step)
        raise


def load_state(sharded: ShardedModel, folder: Path) -> tuple[int, dict[str, Any] | None]:
    """Restore the newest complete checkpoint in ``folder``, of any level, tier and number of ranks.

    Collective; the ranks divide the verification of checksums among themselves.

    Args:
        sharded: model and optimizer, between two steps.
        folder: the folder passed to ``save_state``, or the folder of one checkpoint.
    Returns:
        Optimizer steps done when it was saved, and the user's ``extra``.
    Raises:
        CheckpointError: there is no complete checkpoint, or it is of another model.
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
        # Only after all checks: a checkpoint that does not fit must not overwrite part of the state.
        sharded.restore(StoredState(checkpoint))
        restore_buffers(sharded, checkpoint)
        for group, values in zip(groups, saved, strict=True):
            take_group_options(group, values)
        return checkpoint.manifest.step, extra


def _places(groups: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Map the name of each parameter to (index of its group, index in the group)."""
    return {name: (number, place) for number, group in enumerate(groups) for place, name in enumerate(group["params"])}


def _require_all(work: Callable[[], object]) -> None:
    """Run ``work`` on every rank; raise CheckpointError on all ranks if it fails on any. Collective."""
    if reason := collectives.first_failure(work, OSError, CheckpointError):
        raise CheckpointError(f"The checkpoint could not be written: {reason}.")
