"""Guards ``fully_shard`` units: ranks that use them differently are refused before data are mixed.

torch reduces only the gradients that a rank has, and gathers whatever unit a rank happens to run. If ranks differ,
parts of different parameters of equal size would be combined silently. So before each message of a unit, ranks tell
each other which unit it is for, and an absent gradient counts as zero.

``fully_shard`` has no hooks at these moments, so methods of a unit's parameter group are extended on the object.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import GeneratorType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.checks.replica_check import class_name, text_digest
from vissl_zero.sharding.checks.waiting import waiting
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator
from vissl_zero.sharding.offload.block_file import checksum as bytes_checksum
from vissl_zero.sharding.state.checksum import checksum
from vissl_zero.sharding.state.sharded_tensor import (
    WHOLE_LEVELS,
    ShardedTensor,
    forward_in_half_precision,
    real_gradients,
    whole,
)
from vissl_zero.sharding.torch_private import (
    FOLLOWS_DATACLASSES,
    call_on_gradient,
    finish_unit_after_backward,
    forward_hooks,
    gather_hook,
    group_of,
    has_saved_tensor_hooks,
    is_being_gathered,
    is_in_functional_transform,
    is_in_reentrant_checkpoint,
    local_tensor,
    modules_of,
    name_of,
    num_writes,
    own_buffers,
    own_parameters,
    owner_of,
    places_of,
    put_before_moves,
    rename_place,
    run_after_forward,
    run_before_forward,
    shard_data,
    unit_state,
    viewed,
)

# A tag names a message of a unit: 2 * number of the unit + kind; or the end of a micro-batch.
_GATHER, _REDUCE = range(2)
_WHAT = ("gathers", "reduces gradients of")
_END = -1

_PIECE = 2**18  # elements
_FIRST_RUNS, _SAMPLED_RUNS = 3, 100  # forward passes of a unit in which all saved tensors are checked

FREED = (
    "The backward pass needs parameters of a unit that are no longer gathered: the loss used features from inside the "
    f"unit instead of its output. Return them from forward(), or use {WHOLE_LEVELS}. No update was made."
)

_CHANGED_INPUT = (
    "{} changes one of its inputs in place, which autograd does not allow in a sharded unit with several inputs. Write "
    f"it out of place (nn.ReLU(inplace=False), x = x + 1), or use {WHOLE_LEVELS}."
)


_NOT_MULTIPLIED = (
    "{} is read by another module than its layer, which did not run. Ranks send it in float8, and that layer alone "
    "rounds it so: ZeRO level 3 would train otherwise than levels 0 to 2. Leave the layer out of "
    "config.MODEL.FLOAT8.LAYERS (zero.float8), or do without GATHER (float8_gather). No update was made."
)


OF_PARAMETERS = (
    "The loss (a penalty on weights?) or another block reads sharded parameters directly, whose gradients are on the "
    "host or on a disk. Use the optimizer's weight_decay, or compute it in the forward pass of the block that owns "
    "them and return it, or keep parameters and optimizer state on the device. No update was made."
)


class UnitGuard:
    """Checks that all ranks use the units of one model in the same order. It lives as long as the model.

    Args:
        names: full names of the modules of each unit, the same on every rank.
        units: one of the modules of each unit, in the same order.
        comm: communicator that carries all messages of the units; None: torch's collectives do.
        is_recording: record the order of units, to compare it before the update: ``comm`` does not reach all ranks.
        sent: parameters that are sent in float8.
    """

    def __init__(
        self,
        names: Sequence[str],
        units: Sequence[FSDPModule],
        comm: CpuCommunicator | None,
        *,
        is_recording: bool,
        sent: Collection[nn.Parameter],
    ):
        self._names = list(names)
        self._sent = sent
        self._comm = comm
        self._is_recording = is_recording
        self._present: set[int] = set()  # ids of the sharded parameters that had a gradient
        self._ran: list[int] = []  # tags of the messages since ``forget``
        # torch warns about each output that is a view: a write in place drops its hook. ``_hook_bases`` sets another.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        for number, (name, unit) in enumerate(zip(names, units, strict=True)):
            state: Any = unit_state(unit)
            # torch makes no group for a unit whose parameters are all scalars, or in units inside it.
            if group_of(state) is not None:
                _GuardedUnit(name, number, state, self)

    def has_gradient(self, param: nn.Parameter) -> bool:
        """Check whether this rank had a gradient of the sharded ``param`` since ``forget``."""
        return id(param) in self._present

    def forget(self) -> None:
        """Begin a new step: forget gradients and order."""
        self._present.clear()
        self._ran.clear()

    def order(self) -> int:
        """Return a digest of the units that were gathered and reduced since ``forget``, in their order."""
        return text_digest(self._ran)

    def announce(self, number: int, *, is_reduce: bool) -> None:
        """Check that the next message of every rank is this one of unit ``number``. Collective.

        Raises:
            VisslZeroError: on every rank, before any data is sent.
        """
        self._announce(2 * number + (_REDUCE if is_reduce else _GATHER))

    def announce_penalty(self, index: int, param: nn.Parameter) -> None:
        """Announce the gradient of a loss that reads ``param`` directly, the sharded parameter ``index``.

        Raises:
            VisslZeroError: on every rank, if it is not the next message of every rank.
        """
        self._present.add(id(param))
        tag = 2 * len(self._names) + index
        self._record(tag)
        self._announce(tag)

    def end_micro_batch(self) -> None:
        """Require that no rank runs a further unit in this micro-batch; raises like ``announce``. Collective."""
        self._announce(_END)
        # Announcements are read up to a few messages later; none may be open when the optimizer steps.
        if self._comm is not None:
            self._comm.finish()

    def record(self, number: int, *, is_reduce: bool) -> None:
        """Record a message that is not announced to the other ranks, to compare it before the update."""
        self._record(2 * number + (_REDUCE if is_reduce else _GATHER))

    def _record(self, tag: int) -> None:
        if self._is_recording:
            self._ran.append(tag)

    def _announce(self, tag: int) -> None:
        if self._comm is not None:
            self._comm.announce(tag, self._require_equal)

    def _require_equal(self, tags: Sequence[int]) -> None:
        other = next((rank for rank, tag in enumerate(tags) if tag != tags[0]), None)
        if other is not None:
            raise VisslZeroError(
                f"Ranks run different units: rank 0 of the shard group {self._title(tags[0])} and rank {other} "
                f"{self._title(tags[other])}. Where parameters are sharded, all ranks must run the same units in the "
                "same order, in forward and backward passes; no update was made. Put layers that only some ranks use "
                f"into one unit (zero_units() of the model), let every rank run them, or use {WHOLE_LEVELS}."
            )

    def _title(self, tag: int) -> str:
        if tag == _END:
            return "has ended its step"
        if tag >= 2 * len(self._names):
            return "has a loss that reads a parameter directly"
        return f"{_WHAT[tag % 2]} {self._names[tag // 2]}"


class _GuardedUnit:
    def __init__(self, name: str, number: int, state: Any, guard: UnitGuard):
        self._name, self._number, self._state, self._guard = name, number, state, guard
        self._group = group = group_of(state)
        self._is_watching_gradients = False
        self._inner = [
            module for outer in modules_of(state) for module in outer.modules() if not isinstance(module, FSDPModule)
        ]
        self._versions: dict[int, int] = {}
        # Checksums of full parameters before the forward pass, if their shards are on another device or on a disk.
        self._checksums: dict[int, list[float]] = {}
        self._followed: dict[nn.Module, RemovableHandle] = {}
        self._is_running = False  # whether the unit is in its forward pass
        self._entered: nn.Module | None = None  # the layer called from outside, for which the unit is gathered
        self._watch: AbstractContextManager[Any] = nullcontext()  # checks the tensors that this layer saves
        places = (place for param in group.fsdp_params for place in places_of(param))
        owners = {module for module, _ in places} - set(modules_of(state))
        # Layers that round their float8 weight. If one has not run and its weight got a gradient, another module
        # multiplied by the unrounded weight.
        sent = (param for param in group.fsdp_params if param.sharded_param in guard._sent)
        self._to_run = {owner_of(param).module: param for param in sent if owner_of(param).module in owners}
        # Not on the unit's own modules: calling them is what gathers the unit.
        inside = [module for module in self._inner if not owners.isdisjoint(module.modules())]
        self._entry_hooks = {
            module: (
                # As torch hooks units: before the loop's own pre-hooks.
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                # Also if forward raises, or its saved-tensor hooks would stay active.
                module.register_forward_hook(self._leave, always_call=True),
            )
            for module in inside
        }
        self._called: set[nn.Module] = set()  # layers that are called from outside of the unit
        self._num_runs = 0
        self._pre_forward, self._post_forward = group.pre_forward, group.post_forward
        self._pre_backward, self._post_backward = group.pre_backward, group.post_backward
        # For a unit on disk these are methods of ``UnitOnDisk``, which has wrapped torch's before.
        self._unshard, self._wait = group.unshard, group.wait_for_unshard
        # fully_shard has no public hooks at these moments, so its methods are wrapped on the instance.
        group.pre_forward, group.post_forward = self.pre_forward, self.post_forward
        group.pre_backward, group.post_backward = self.pre_backward, self.post_backward
        group.unshard, group.wait_for_unshard = self.unshard, self.wait

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the unit; refuse contexts in which its gradients would be wrong or its parameters absent."""
        if is_in_functional_transform():
            raise VisslZeroError(
                f"{self._title} runs inside torch.func (jacrev, grad, vmap or the like), which sharded parameters do "
                f"not follow. Use {WHOLE_LEVELS}."
            )
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            raise VisslZeroError(
                f"{self._title} is traced (by torch.jit.trace, torch.export or torch.onnx), and its parameters are "
                "whole only while it runs. Load optimizer.full_state() into a plain model, and trace that one."
            )
        if is_in_reentrant_checkpoint():
            raise VisslZeroError(
                f"{self._title} runs inside torch.utils.checkpoint with use_reentrant=True, whose backward passes "
                "fully_shard does not follow: gradients would be wrong. Write use_reentrant=False, or "
                f"use {WHOLE_LEVELS}."
            )
        self._require_own_parameters()
        self._follow_hooked()
        # A layer that is called from outside comes here too (``_enter``), and is no run of the unit.
        self._num_runs += self._entered is None
        if self._num_runs > _FIRST_RUNS:
            # A hook on every layer costs time. A loop that calls layers from outside does so from the start.
            for module in self._entry_hooks.keys() - self._called:
                for hook in self._entry_hooks.pop(module):
                    hook.remove()
            self._to_run.clear()
        self._is_running = True
        inputs = self._pre_forward(module, args, kwargs)
        self._checksums = {
            index: _checksums(param.unsharded_param)
            for index, param in enumerate(self._group.fsdp_params)
            if not _has_rows_at_hand(param) and self._is_compared(index, param)
        }
        return inputs

    def post_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Check the forward pass, free the unit, and hook tensors of the output that torch does not find."""
        if isinstance(output, GeneratorType):
            raise VisslZeroError(
                f"{self._title} returns a generator, which computes when its parameters are no longer gathered. "
                f"Return a list or a tuple, or use {WHOLE_LEVELS}."
            )
        self._require_unwritten()  # torch frees the unit below, and a write with it
        for param in self._to_run.values():
            if not param.sharded_param.requires_grad:  # trained ones are checked when a gradient arrives
                raise VisslZeroError(_NOT_MULTIPLIED.format(name_of(param) or self._name))
        self._is_running = False
        if any(_is_of_parameter(tensor) for tensor in pytree.tree_leaves(output)):
            # Its memory is freed below, so the caller gets a copy, which is differentiable.
            output = pytree.tree_map(lambda leaf: leaf.clone() if _is_of_parameter(leaf) else leaf, output)
        output = self._post_forward(module, inputs, output)
        if torch.is_grad_enabled():
            # As torch does with the tensors that it finds in an output.
            hidden = [] if isinstance(output, Tensor) else list(_hidden_tensors(output, set()))
            for tensor in hidden:
                if tensor.requires_grad:
                    tensor.register_hook(gather_hook(self._state))
            self._hook_bases(inputs, [*_tensors(output), *hidden])
        return output

    def _hook_bases(self, inputs: Any, outputs: Sequence[Tensor]) -> None:
        """Register the unit's gather on the bases of outputs that are views.

        An in-place write gives a view a new node in the graph, without the old one's hooks. Its base keeps its node.
        """
        viewed_by_outputs = (viewed(output) for output in outputs)
        bases = {id(base): base for base in viewed_by_outputs if base is not None and base.grad_fn is not None}
        # An input's gradient arrives after the unit's backward pass: its hook would gather the unit for nothing.
        for tensor in _tensors(inputs) if bases else ():
            bases.pop(id(tensor), None)
            bases.pop(id(viewed(tensor)), None)
        for base in bases.values():
            base.register_hook(gather_hook(self._state))

    def unshard(self, async_op: bool = False) -> None:
        """Record that the unit is gathered, and start the gather."""
        if not is_being_gathered(self._group) and not self._group.is_unsharded:
            self._guard.record(self._number, is_reduce=False)
        # torch makes full parameters in the first gather and keeps them: in inference mode they could never be trained.
        # no_grad, because inference_mode(False) turns gradients on.
        with torch.inference_mode(False), torch.no_grad(), waiting(f"the forward pass (it gathers {self._title})"):
            self._unshard(async_op)

    def wait(self) -> None:
        """Wait for the gather; after the first one, hook the gradients of the full parameters."""
        with torch.inference_mode(False), torch.no_grad():
            self._wait()
        if not self._is_watching_gradients and self._group.is_unsharded:
            self._is_watching_gradients = True
            # torch keeps these parameter objects and only frees their memory, so one hook lasts.
            trained = [param for param in self._group.fsdp_params if param.sharded_param.requires_grad]
            call_on_gradient([param.unsharded_param for param in trained], self.on_gradient)

    def on_gradient(self, param: Tensor) -> None:
        """Schedule the unit's reduction at the end of the backward pass, also if no hooked output led to it."""
        # The unit was freed before the gradient arrived, so it would never be reduced.
        if not self._group.is_unsharded:
            raise VisslZeroError(FREED)
        for unused in self._to_run.values():
            if unused.unsharded_param is param:
                raise VisslZeroError(_NOT_MULTIPLIED.format(name_of(unused) or self._name))
        finish_unit_after_backward(self._state)

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        """Gather the unit for its backward pass; refuse gradients of gradients, for which it would be freed."""
        # Gradient mode is on in a backward pass only with create_graph=True.
        if torch.is_grad_enabled():
            raise VisslZeroError(
                f"A backward pass with create_graph=True runs through {self._title}. Gradients of gradients need "
                f"parameters that ZeRO level 3 has freed by then. Use {WHOLE_LEVELS}."
            )
        self._pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        """Reduce the gradients of a gathered unit on every rank; an absent gradient counts as zero."""
        group, reduces = self._group, self._group.reduce_grads
        if group.is_unsharded and reduces:
            has_any = False
            for param in group.fsdp_params:
                # Both: a loop that freezes a model between micro-batches reaches the full parameters of gathered units.
                if not (param.sharded_param.requires_grad and param.unsharded_param.requires_grad):
                    continue
                has_any = True
                if param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None:
                    self._guard._present.add(id(param.sharded_param))
                else:
                    # torch reduces only existing gradients. Ranks with different ones would reduce messages of
                    # different sizes.
                    param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)
            if has_any:
                self._guard.record(self._number, is_reduce=True)
            # If all are frozen in this pass (another model's loss), gradients of earlier micro-batches wait for the
            # next.
            group.reduce_grads = has_any
        try:
            # torch reads and writes ``.grad`` of shards here; ``ShardedTensor.grad`` may show users a stand-in.
            with real_gradients():
                self._post_backward(*unused)
        finally:
            group.reduce_grads = reduces

    @property
    def _title(self) -> str:
        return f"unit {self._name}"

    def _require_own_parameters(self) -> None:
        require_units(modules_of(self._state))
        is_whole = self._group.is_unsharded
        for param in self._group.fsdp_params:
            if _is_exchanged(param):
                raise VisslZeroError(
                    f"{name_of(param) or self._name} has been exchanged for another parameter (by "
                    "torch.utils.swap_tensors?), which its unit does not follow. Exchange their values: a.data, b.data "
                    "= b.data.clone(), a.data.clone()."
                )
            expected = param.unsharded_param if is_whole else param.sharded_param
            for index, (module, name) in enumerate(places_of(param)):
                if own_parameters(module).get(name) is expected or _follow_renamed(param, index, module, expected):
                    continue
                raise VisslZeroError(
                    f"{self._name}: {name} of {class_name(module)} is another tensor than the one "
                    "that was sharded (by torch.func.functional_call, or by assigning a parameter). Sharded units "
                    "compute with their own parameters. Write into them in place, or use ZeRO level 0, or level 1 or 2 "
                    "on the CPU."
                )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the unit for a layer that is called from outside, as torch gathers it for the unit's own call."""
        self._to_run.pop(module, None)
        if not self._group.is_sharded:
            return None
        self._entered = module
        self._called.add(module)
        inputs = run_before_forward(self._state, module, args, kwargs)
        if torch.is_grad_enabled() and not has_saved_tensor_hooks():
            # Only the innermost saved-tensor hooks run: ours would switch off those of the loop (offloading,
            # checkpointing).
            self._watch = torch.autograd.graph.saved_tensors_hooks(_keep, _require_memory)
        self._watch.__enter__()
        return inputs

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._entered is not module:
            return None
        self._watch.__exit__(None, None, None)
        self._watch, self._entered = nullcontext(), None
        return run_after_forward(self._state, module, inputs, output)

    def _require_unwritten(self) -> None:
        """Refuse writes into full parameters by the forward pass: they are lost when the unit is freed.

        A write that torch counts is seen in every pass; one through ``.data`` by comparison: of all parameters in the
        first passes, then of one in turn; on a GPU, where to compare is to wait, of all in samples.
        """
        if not self._group.is_unsharded:
            return
        for index, param in enumerate(self._group.fsdp_params):
            gathered_as = param.param_dtype or param.orig_dtype
            if param.unsharded_param.dtype != gathered_as:
                raise VisslZeroError(
                    f"{name_of(param) or self._name} is converted from {gathered_as} to "
                    f"{param.unsharded_param.dtype} in the forward pass of {self._title}, which its shards do not "
                    "follow. Convert it before initialize(), or compute with a converted copy."
                )
            # torch's gathers preserve the version counter, so a changed one is a write of the forward pass.
            version = num_writes(param.unsharded_param)
            is_written = self._versions.setdefault(index, version) != version
            if not is_written and index in self._checksums:
                is_written = _checksums(param.unsharded_param) != self._checksums[index]
            elif not is_written and self._is_compared(index, param):
                is_written = not _has_rows_of_shard(param)
            if is_written:
                raise VisslZeroError(
                    f"{name_of(param) or self._name} is written in the forward pass of {self._title}, which sharding "
                    "would lose. Write into parameters after optimizer.step(), or compute with a changed copy."
                )

    def _is_compared(self, index: int, param: Any) -> bool:
        if self._num_runs <= _FIRST_RUNS:
            return True
        if param.unsharded_param.device.type == "cpu":
            return self._num_runs % len(self._group.fsdp_params) == index
        return self._num_runs % _SAMPLED_RUNS == 0

    def _follow_hooked(self) -> None:
        """Follow modules with forward hooks of the loop, which may keep an output and run backward from it.

        Modules whose hooks are gone are unhooked: many loops hook a model for its first forward pass alone.
        """
        ours = (_GuardedUnit._gather_before_backward, _GuardedUnit._leave)
        for module in self._inner:
            called = [getattr(hook, "__func__", None) for hook in forward_hooks(module).values()]
            is_hooked = any(function not in ours for function in called)
            if is_hooked and module not in self._followed:
                handle = module.register_forward_hook(self._gather_before_backward, prepend=True)
                self._followed[module] = handle
            elif not is_hooked and module in self._followed:
                self._followed.pop(module).remove()

    def _gather_before_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Register the unit's gather on the outputs of a module that the unit runs.

        Two units may share a module (RegNet has one ReLU). If it runs for the other unit, this one may have finished
        its backward pass: a hook would gather it again, and keep it whole to the end of the pass.
        """
        if self._is_running and torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(gather_hook(self._state))


def _is_exchanged(param: Any) -> bool:
    """Check whether a sharded parameter has the rows of another one: gathers would send its own."""
    sharded = param.sharded_param
    if sharded.store is not None:
        return sharded.store.source is not sharded
    own = shard_data(param).untyped_storage().data_ptr()
    return local_tensor(sharded).untyped_storage().data_ptr() != own


def require_units(modules: Iterable[nn.Module]) -> None:
    """Require that the modules of units have the class that ``fully_shard`` gave them; units run its ``forward``."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise VisslZeroError(
                f"The class of a sharded module was changed to {type(module).__name__} (module.__class__ = ...). Do "
                f"that before initialize(), or use {WHOLE_LEVELS}."
            )


def _follow_renamed(param: Any, index: int, module: nn.Module, expected: Tensor) -> bool:
    """Follow a parameter that pruning renamed in its module (``weight_orig``); return False if the module lost it."""
    name = next((name for name, own in own_parameters(module).items() if own is expected), None)
    if name is None:
        return False
    rename_place(param, index, name)
    buffers = own_buffers(module)
    # Gathered: the mask was computed from the sharded parameter, but forward multiplies it with the full one.
    buffers.update({key: whole(buffer) for key, buffer in buffers.items() if isinstance(buffer, ShardedTensor)})
    return True


def _checksums(param: Tensor) -> list[float]:
    """Return checksums of a full parameter, in next to no memory: there is none for another of its size."""
    values = param.detach().reshape(-1)
    if values.device.type == "cpu":
        return [bytes_checksum(values)]
    return torch.cat([checksum(piece) for piece in values.split(_PIECE)]).tolist()


def _has_rows_at_hand(param: Any) -> bool:
    """Check whether this rank's rows are where the full parameter is: on the host or on a disk they are not."""
    local = local_tensor(param.sharded_param)
    return not local.is_meta and local.device == param.unsharded_param.device


@torch.no_grad()
def _has_rows_of_shard(param: Any) -> bool:
    """Check whether the full parameter has the values of this rank's shard in its rows. Waits for a GPU."""
    local = local_tensor(param.sharded_param)
    if not local.numel():
        return True
    start = param.mesh_info.shard_mesh_rank * param.padded_sharded_param_size[0]
    whole = param.unsharded_param.detach()[start : start + len(local)]
    expected = local.detach().to(whole.dtype)
    # NaN is unequal to itself: a run that has diverged must not be taken for one that writes.
    return torch.equal(whole, expected) or torch.equal(whole.nan_to_num(), expected.nan_to_num())


def guard_modules(modules: Sequence[FSDPModule], casts_parameters: bool) -> None:
    """Make units refuse to be copied, moved or saved, with the reason, and gather also if ``forward`` is called.

    Args:
        modules: a module of each unit.
        casts_parameters: whether units compute with copies of their parameters in half precision.
    """
    for module in modules:
        assert isinstance(module, nn.Module)
        # copy and pickle look for these on the object before its class.
        module.__dict__["__deepcopy__"] = module.__dict__["__reduce_ex__"] = _refuse_copy
        save: Any = getattr(module, "save_pretrained", None)
        if save is not None:
            module.__dict__["save_pretrained"] = partial(_save_or_refuse, save)
        put_before_moves(module, _apply_or_refuse)
        # The class that fully_shard made (``FSDPLinear``); the user's own may still be derived from.
        type(module).__init_subclass__ = classmethod(_refuse_subclass)  # type: ignore[assignment,method-assign]
        group = group_of(unit_state(module))
        run = _Forward(module, group, forward_in_half_precision if casts_parameters else nullcontext)
        # A function: torch.export asks for its code.
        module.__dict__["forward"] = wraps(module.forward)(lambda *args, _run=run, **kwargs: _run(*args, **kwargs))


class _Forward:
    """The ``forward`` of a unit's module: gathers if called directly, and explains torch's errors."""

    def __init__(self, module: nn.Module, group: Any, context: Callable[[], AbstractContextManager[None]]):
        self._module, self._group, self._forward = module, group, module.forward
        self._context = context
        self._num_runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A direct call of ``module.forward`` bypasses the hook that gathers the unit.
        if self._group is not None and self._group.is_sharded:
            return self._module(*args, **kwargs)
        try:
            with self._context():
                if not self._is_sample():
                    return self._forward(*args, **kwargs)
                with torch.autograd.graph.saved_tensors_hooks(_keep, _require_memory):
                    return self._forward(*args, **kwargs)
        except RuntimeError as error:
            # Views that the unit itself makes of its inputs do not raise this.
            if "RegisterPostBackwardFunction" in str(error):
                raise VisslZeroError(_CHANGED_INPUT.format(class_name(self._module))) from error
            raise

    def _is_sample(self) -> bool:
        """Decide whether to check that tensors saved in this run still have memory in the backward pass."""
        if self._group is None or not torch.is_grad_enabled() or has_saved_tensor_hooks():
            return False
        self._num_runs += 1
        return self._num_runs <= _FIRST_RUNS or self._num_runs % _SAMPLED_RUNS == 0


def _is_of_parameter(leaf: Any) -> bool:
    """Check whether an output is a parameter or a view of a parameter, whose memory the unit frees."""
    return isinstance(leaf, nn.Parameter) or (isinstance(leaf, Tensor) and isinstance(viewed(leaf), nn.Parameter))


def _keep(tensor: Tensor) -> Tensor:
    """Save a tensor unchanged. Detached: an output that refers to its own node is a cycle, which only ``gc`` frees."""
    return tensor.detach()


def _require_memory(tensor: Tensor) -> Tensor:
    """Refuse a saved parameter that has been freed: torch would read freed memory without a check."""
    if tensor.numel() and not tensor.untyped_storage().size():
        raise VisslZeroError(FREED)
    return tensor


def _apply_or_refuse(
    module: nn.Module, apply: Callable[..., nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Refuse ``module.to(...)`` and the like, unless nothing changes: then skip it, as torch would re-pad shards."""
    tensors = [(tensor, local_tensor(tensor).detach()) for tensor in (*module.parameters(), *module.buffers())]
    # In the place of a parameter on a disk, untouched memory on the model's device.
    held = (torch.empty_like(local, device=tensor.device) if local.is_meta else local for tensor, local in tensors)
    if all(fn(tensor) is tensor for tensor in held):
        return module
    raise VisslZeroError(
        "The memory of sharded parameters cannot be replaced (by model.to(...), .half() or the like). Do that before "
        "initialize()."
    )


def _refuse_subclass(cls: type, **_: Any) -> NoReturn:
    raise VisslZeroError(
        f"A class was derived from that of a sharded module, as {cls.__name__} (by higher, parametrize or the like), "
        f"to run it with other parameters. Do that before initialize(), or use {WHOLE_LEVELS}."
    )


def _save_or_refuse(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse ``save_pretrained`` of Hugging Face and others, which would save this rank's shards."""
    if not any(isinstance(value, Mapping) for value in (*args, kwargs.get("state_dict"))):
        raise VisslZeroError(
            "save_pretrained() would write this rank's parts of the parameters. On every rank, write state = "
            "optimizer.full_state(); then on rank 0, model.save_pretrained(folder, state_dict=state)."
        )
    return save(*args, **kwargs)


def _refuse_copy(memo: Any) -> NoReturn:
    raise VisslZeroError(
        "A model whose parameters are sharded cannot be copied or pickled: each rank has a part of them. For an "
        "average of the weights (AveragedModel), call vissl_zero.ema(model, decay) before initialize(). Take full "
        f"weights with full_state() or full_parameters(), or use {WHOLE_LEVELS}, where a copy "
        "is a plain model."
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _hidden_tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield tensors in attributes of objects that torch does not search: it searches containers and dataclasses."""
    if value is None or isinstance(value, Tensor | nn.Module | str | bytes | int | float | Callable):
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    items: Sequence[Any] = ()
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, tuple | list | set):
        items = list(value)
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
        if not FOLLOWS_DATACLASSES:
            yield from (tensor for item in items for tensor in _tensors(item))
    elif hasattr(value, "__dict__"):
        items = list(vars(value).values())
        yield from (tensor for item in items for tensor in _tensors(item))
    for item in items:
        yield from _hidden_tensors(item, visited)
