"""Every private attribute and function of torch that sharding uses, each with its purpose.

``tests/unit/sharding/test_torch_private.py`` tests each; ``tests/unit/test_arrows.py`` lists what else of torch is
private and in use: modules that torch documents under a private path, and base classes that have no public name.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd import graph as _graph
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from vissl_zero.errors import VisslZeroError

# torch's own property: parameter classes of this package override ``grad`` for users.
_GRAD: Any = torch._C.TensorBase.grad
# A context without ``__torch_function__`` of tensor subclasses. With it, each attribute read of each parameter is a
# call of Python, and a GPU would wait for them in every step.
as_plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
# torch has no flag for reentrant checkpointing, so the stack is searched for these two functions.
_REENTRANT = {CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__}


# One kernel, or one call, for many tensors. torch's optimizers use them; there are no public ones.
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def real_grad(param: Tensor) -> Tensor | None:
    """Return this rank's gradient as autograd stores it; subclasses may show users a stand-in. None without one."""
    with as_plain_tensors():
        grad: Tensor | None = _GRAD.__get__(param)
    return grad


def marks(params: Iterable[Tensor]) -> list[tuple[int, ...] | None]:
    """Return address and version counters of each parameter's gradient; any write to the gradient changes them.

    None for a parameter without a gradient in memory.
    """
    all_marks: list[tuple[int, ...] | None] = []
    for param in params:
        grad = real_grad(param)
        local = grad._local_tensor if isinstance(grad, DTensor) else grad
        if grad is None or local is None or local.is_meta:
            all_marks.append(None)
        else:
            # Both counters: writes through the DTensor count there, writes through its local tensor here.
            all_marks.append((local.data_ptr(), local._version, grad._version))
    return all_marks


def set_real_grad(param: Tensor, grad: Tensor | None) -> None:
    """Set the gradient that ``real_grad`` returns."""
    with as_plain_tensors():
        _GRAD.__set__(param, grad)


@contextmanager
def pretended_ranks(world_size: int) -> Iterator[None]:
    """Simulate a process group of ``world_size`` ranks for collectives on fake tensors; nothing is sent. A context.

    A process group that exists already is used: fake tensors send nothing through it either.
    """
    if world_size == 1 or dist.is_initialized():
        yield
        return
    # torch has this backend for its own tests.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def forget_meshes() -> None:
    """Empty the caches of DTensor operations on this thread, which hold the mesh of the first call.

    Meshes are equal by their ranks and names, not by their process groups. Where a process has ended its groups and
    made new ones, a cached operation would return a tensor of groups that no longer exist, or of namesakes.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # here: takes a second

    _clear_sharding_prop_cache()


def runs_in_data_parallel() -> bool:
    """Check for a running forward pass of ``DistributedDataParallel`` on this rank. torch.compile relies on it too."""
    return DistributedDataParallel._active_ddp_module is not None


def is_building_data_parallel() -> bool:
    """Check whether a ``DistributedDataParallel`` is being built around the caller. Costs a walk over the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is DistributedDataParallel.__init__.__code__:
            return True
        frame = frame.f_back
    return False


def is_made_parameter() -> bool:
    """Check whether ``nn.Parameter(...)`` has called the method that calls this."""
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward pass that is running on this thread.

    Inside a segment of reentrant checkpointing, that is the segment's own backward pass: see ``is_nested_backward``.
    """
    Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Check whether a backward pass is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_nested_backward() -> bool:
    """Check whether this thread's backward pass runs inside another, as in reentrant checkpointing. CPU only."""
    # The CPU's backward pass runs on its caller's thread, so nested ones stand on one Python stack.
    entry = _graph._engine_run_backward.__code__
    frame, depth = sys._getframe(), 0
    while frame is not None:
        depth += frame.f_code is entry
        frame = frame.f_back  # type: ignore[assignment]
    return depth > 1


def is_in_reentrant_checkpoint() -> bool:
    """Check whether ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs, first or again, around the caller.

    Costs a walk over the stack where gradients are off or a backward pass is running; elsewhere nothing.
    """
    # Reentrant checkpointing runs a segment without gradients first, and again inside the backward pass.
    if torch.is_grad_enabled() and not is_in_backward():
        return False
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return True
        frame = frame.f_back
    return False


def is_in_functional_transform() -> bool:
    """Check whether a transform of ``torch.func`` runs around the caller (its stack of interpreters)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_saved_tensor_hooks() -> bool:
    """Check for active saved-tensor hooks in the running forward pass: only the innermost ones would run."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def finish_unit_after_backward(state: Any) -> None:
    """Queue torch's callback that reduces and frees all units of the model at the end of this backward pass."""
    state._register_root_post_backward_final_callback()


def lazy_init(root: Any) -> None:
    """Make ``root`` the root of the units inside it, as ``fully_shard`` does with the first unit that runs."""
    unit_state(root)._lazy_init()


# State of a unit in fully_shard. The public FSDPModule has setters only.


# torch 2.11 hooks the output's tensors in tuples, lists and dicts; from 2.12 on, in dataclasses too.
FOLLOWS_DATACLASSES = hasattr(_fsdp_state, "collect_grad_tensors")


def unit_state(unit: Any) -> Any:
    """Return the FSDPState of a unit (``_get_fsdp_state``); all modules of the unit share it."""
    # Not ``unit._get_fsdp_state()``: a loop may have set ``__class__``.
    return FSDPModule._get_fsdp_state(unit)


def modules_of(state: Any) -> tuple[nn.Module, ...]:
    """Return the modules of a unit (``_modules`` of its state)."""
    modules: tuple[nn.Module, ...] = state._modules
    return modules


def group_of(state: Any) -> Any:
    """Return the FSDPParamGroup that gathers and reduces a unit (``_fsdp_param_group``); None without parameters."""
    return state._fsdp_param_group


def gather_hook(state: Any) -> Callable[[Tensor], Tensor]:
    """Return a gradient hook that gathers the unit before its backward pass (``_pre_backward``)."""
    hook: Callable[[Tensor], Tensor] = state._pre_backward
    return hook


def run_before_forward(state: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gather a unit for ``module`` inside it, and return the arguments to run it with (``_pre_forward``)."""
    return state._pre_forward(module, args, kwargs)


def run_after_forward(state: Any, module: nn.Module, inputs: Any, output: Any) -> Any:
    """Free a unit after ``module`` inside it has run, and return the module's output (``_post_forward``)."""
    return state._post_forward(module, inputs, output)


def reduce_by_dtype(group: Any) -> None:
    """Make a unit reduce its gradients in one message per dtype of its parameters, in float32 at least.

    ``fully_shard`` has one message for all, and refuses trained parameters of several dtypes (``_init_mp_dtypes``).
    ``post_backward`` reads ``fsdp_params``, ``_orig_dtype`` and ``_reduce_dtype``, and calls ``reshard``.
    """
    post_backward = group.post_backward

    def init_dtypes() -> None:
        for param in group.fsdp_params:
            param.init_dtype_attrs(group.mp_policy)

    def post_backward_by_dtype(*unused: Any) -> None:
        params, is_freed = group.fsdp_params, group.reshard_after_backward
        group.reshard_after_backward = False  # post_backward would free the parameters of the first message alone
        for dtype in dict.fromkeys(param.orig_dtype for param in params):
            group.fsdp_params = [param for param in params if param.orig_dtype == dtype]
            group._orig_dtype, group._reduce_dtype = dtype, torch.promote_types(dtype, torch.float32)
            post_backward(*unused)
        group.fsdp_params, group.reshard_after_backward = params, is_freed
        if is_freed:
            group.reshard()

    group._init_mp_dtypes, group.post_backward = init_dtypes, post_backward_by_dtype


def gather_of(group: Any) -> Any:
    """Return the all-gather of a unit's group (``_all_gather_comm``): ours, or torch's default."""
    return group._all_gather_comm


def is_being_gathered(group: Any) -> bool:
    """Check whether a gather was started and not yet waited for (``_all_gather_result``)."""
    return group._all_gather_result is not None


def owner_of(param: Any) -> Any:
    """Return the place of a unit's parameter (``_module_info``): ``module``, ``param_name``, ``shared_modules``."""
    return param._module_info


def places_of(param: Any) -> list[tuple[nn.Module, str]]:
    """List the modules that a unit's parameter is in, each with its name there; several where it is tied."""
    info = owner_of(param)
    names = (info.param_name, *info.shared_param_names)
    return list(zip((info.module, *info.shared_modules), names, strict=True))


def rename_place(param: Any, index: int, name: str) -> None:
    """Change the name of a unit's parameter in the module at ``index`` of ``places_of``."""
    info = owner_of(param)
    if index:
        info.shared_param_names[index - 1] = name
    else:
        info.param_name = name


def name_of(param: Any) -> str | None:
    """Return the full name of a unit's parameter (``_param_fqn``); None before the first forward pass."""
    name: str | None = param._param_fqn
    return name


def shard_data(param: Any) -> Tensor:
    """Return this rank's rows, flat and padded, which the next gather sends (``_sharded_param_data``)."""
    data: Tensor = param._sharded_param_data
    return data


def set_shard_data(param: Any, data: Tensor) -> None:
    """Set the tensor that ``shard_data`` returns."""
    param._sharded_param_data = data


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a ``DTensor`` (``_local_tensor``); a plain tensor unchanged.

    ``to_local()`` gives a new view each time, and records it for autograd.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def set_local_tensor(tensor: Any, local: Tensor) -> None:
    """Replace the local tensor of a ``DTensor`` by one of the same shape; no public method does."""
    tensor._local_tensor = local


# Schemas of operations, for modes and classes that dispatch them. torch's own profilers read the same.


def operation_name(operation: Any) -> str:
    """Return the name of an operation, such as ``aten::mm`` (``_schema``)."""
    name: str = operation._schema.name
    return name


def writes_in_place(operation: Any) -> bool:
    """Check whether the operation changes one of its arguments (``_schema``)."""
    is_mutable: bool = operation._schema.is_mutable
    return is_mutable


def written_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the tensors that the operation changes (``_schema``)."""
    written: list[Tensor] = []
    for index, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            written += [tensor for tensor in values if isinstance(tensor, Tensor)]
    return written


def overloads_of(operation: Any) -> Any:
    """Return the packet of an operation's overloads, the key in torch's table of flops (``_overloadpacket``)."""
    return operation._overloadpacket


# Attention on the CPU -> on the GPU, forward and backward: torch's table of flops lacks the CPU's.
ATTENTION_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


# State of modules and tensors that has no public getter, or one for single entries only.


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's direct parameters (``_parameters``), None entries included; writes take effect."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's direct buffers (``_buffers``); see ``own_parameters``."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's direct submodules (``_modules``)."""
    return module._modules


def without_memory(cls: type, like: Tensor) -> Any:
    """Make a tensor of ``cls`` with shape, dtype and device of ``like``, and no memory (``_make_wrapper_subclass``)."""
    return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)


def copy_versions(state: Any, source: Any) -> None:
    """Copy the module versions of one state dict to another (``_metadata``); ``load_state_dict`` reads them."""
    state._metadata = source._metadata


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of buffers that ``state_dict`` leaves out (``_non_persistent_buffers_set``)."""
    return module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the module's forward hooks (``_forward_hooks``): torch has no public list of them."""
    return module._forward_hooks


def has_forward_hooks(module: nn.Module) -> bool:
    """Check whether the module has forward hooks or forward pre-hooks."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def put_before_moves(module: nn.Module, before: Callable[..., Any]) -> None:
    """Replace the module's ``_apply``, which ``to()`` and casts call, by ``before(module, apply, ...)``.

    Only the instance is changed, not its class.
    """
    module.__dict__["_apply"] = partial(before, module, module._apply)


def num_gradient_hooks(tensor: Tensor) -> int:
    """Count a parameter's gradient hooks: tensor hooks and post-accumulate-grad hooks."""
    with as_plain_tensors():
        return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def viewed(tensor: Tensor) -> Tensor | None:
    """Return the base of a view (``_base``); None if ``tensor`` is no view to autograd."""
    return tensor._base


def num_writes(tensor: Tensor) -> int:
    """Count how often the tensor was written in place, as autograd does (``_version``)."""
    return tensor._version


def object_address(storage: torch.UntypedStorage) -> int:
    """Return the address of the storage's C++ object (``_cdata``): fake and meta storages have no memory."""
    return storage._cdata


def num_holders(storage: torch.UntypedStorage) -> int:
    """Count the tensors over a storage; ``storage`` itself is counted as one more."""
    return torch._C._storage_Use_Count(storage._cdata)


def tensors_over(storage: torch.UntypedStorage) -> list[Tensor]:
    """Find the plain tensors over a storage, parameters left out. Searches all objects, which takes some 10 ms."""
    return [
        tensor
        for tensor in gc.get_objects()
        if type(tensor) is Tensor
        and torch._C._has_storage(tensor)
        and tensor.untyped_storage()._cdata == storage._cdata
    ]


def same_layout(left: Any, right: Any) -> bool:
    """Check whether two ``DTensor`` have the same shape, mesh and placements."""
    is_placed_alike: bool = left.placements == right.placements and left.device_mesh == right.device_mesh
    return left.shape == right.shape and is_placed_alike


# The ``__torch_function__`` of a class that handles operations in ``__torch_dispatch__`` alone.
without_functions: Any = torch._C._disabled_torch_function_impl


class _DispatchToSubclass(TorchDispatchMode):
    """Sends an operation to the class of a ``DTensor``'s subclass; see ``with_own_dispatch``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if issubclass(kind, DTensor) and kind is not DTensor:
                return kind.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# torch 2.11 runs an operation on a subclass of DTensor as DTensor does, and never calls the subclass's
# ``__torch_dispatch__`` (pytorch#177878).
_SKIPS_SUBCLASSES = "should not actually get called" in inspect.getsource(DTensor.__torch_dispatch__)


def with_own_dispatch() -> AbstractContextManager[Any]:
    """Let a subclass of ``DTensor`` run its operations itself, as other tensor classes do. A context."""
    return _DispatchToSubclass() if _SKIPS_SUBCLASSES else nullcontext()


# Attributes that torch reads without an operation.
_FACTS = """requires_grad grad grad_fn is_leaf shape ndim dtype device layout
    _version _backward_hooks _post_accumulate_grad_hooks"""
FACTS = frozenset(getattr(torch._C.TensorBase, name) for name in _FACTS.split())


def without_values(cls: type[Tensor], like: Tensor) -> Any:
    """Make a tensor of ``cls`` that has the shape, strides, type and device of ``like``, and no memory."""
    return Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=like.dtype, device=like.device)


def forget_reduced(group: Any) -> None:
    """Release the input of the last reduce-scatter, which torch keeps until another stream has read it."""
    if hasattr(group.comm_ctx, "reduce_scatter_states"):
        group.comm_ctx.reduce_scatter_states.clear()
    else:  # before torch 2.12
        group.comm_ctx.reduce_scatter_state = None


def has_begun_backward(state: Any) -> bool:
    """Check whether a backward pass through a root's units has not ended; between passes: whether the last raised."""
    return bool(state._state_ctx.post_backward_final_callback_queued)


def forget_backward(root: Any, units: Iterable[Any]) -> None:
    """Reset the units of a root after a pass that raised, and drop its gradients.

    Raises:
        VisslZeroError: torch is older than 2.13, the first version with ``reset_iter_state``.
    """
    if not hasattr(root, "reset_iter_state"):
        raise VisslZeroError(
            f"A backward pass raised, and torch {torch.__version__} cannot go on after that where parameters are "
            "sharded. Restart from a checkpoint, or use torch 2.13."
        )
    root.reset_iter_state()
    # It leaves the gradients that full parameters had got before the pass raised.
    for unit in units:
        group = group_of(unit_state(unit))
        for param in group.fsdp_params if group is not None else ():
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def left_to_itself(model: nn.Module) -> Any:
    """Return the names of parameters that ``DistributedDataParallel`` ignores; None if it was told none."""
    return getattr(model, "_ddp_params_and_buffers_to_ignore", None)


def set_left_to_itself(model: nn.Module, names: Any) -> None:
    """Set the names that ``left_to_itself`` returns; torch's own setter is private too."""
    model._ddp_params_and_buffers_to_ignore = names


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's collectives on the CPU, for which torch has no public getter."""
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def call_on_gradient(params: Iterable[Tensor], method: Callable[[Any], None]) -> None:
    """Call the bound ``method`` with each parameter right after its gradient is accumulated.

    torch keeps such a hook in C++, where Python's garbage collector does not see it. So the hook holds the object of
    ``method`` weakly: else a model, its optimizer and their process groups would live until the process ends.

    Raises (in the backward pass):
        VisslZeroError: the object is gone, so the gradient would not be averaged.
    """
    target = weakref.WeakMethod(method)

    def hook(param: Tensor) -> None:
        alive = target()
        if alive is None:
            raise VisslZeroError(
                "The optimizer that initialize() returned is gone, so gradients are not averaged over ranks. "
                "Keep it as long as the model trains."
            )
        alive(param)

    for param in params:
        param.register_post_accumulate_grad_hook(hook)


def scaled_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """Multiply ``a @ b.T`` in float8 on a GPU, (n, m) in bfloat16, accumulated in float32.

    Args:
        a: (n, k) e4m3 or e5m2, contiguous.
        a_scales: (n, 1) float32, scales of its rows.
        b: (m, k) e4m3, contiguous; 16 divides k and m.
        b_scales: (m, 1) float32, scales of its rows.
    """
    scales = {"scale_a": a_scales, "scale_b": b_scales.t()}
    # bfloat16 is the one format that every kernel of scaled rows gives.
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=False)


def compiled(function: Callable[..., Any], backend: Callable[..., Any], max_graphs: int) -> Callable[..., Any]:
    """Wrap ``function`` in ``torch.compile`` with one graph per shape; beyond ``max_graphs`` shapes it runs eagerly.

    From now on, code of this process that ``torch.compile`` fails on runs eagerly, without an error.
    """
    import torch._dynamo.config as settings

    settings.suppress_errors = True
    settings.recompile_limit = max(settings.recompile_limit, max_graphs)
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}  # newer torch
    compiled_function: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False, **options)
    return compiled_function


def compile_graph(backend: str, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a traced graph with a backend of ``torch.compile``; errors are the backend's."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(backend)(graph, inputs)


@cache
def left_out_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from graphs of ``torch.compile``: a graph ends before it, another begins after it."""
    left_out: Callable[..., Any] = torch.compiler.disable(function)
    return left_out


class Tracing:
    """Counts the functions that ``torch.compile`` has traced since this object was made."""

    def __init__(self) -> None:
        self._before = self._counts()

    def has_failed(self) -> bool:
        """Check whether torch tried to trace functions and could trace none."""
        tried, done = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        return tried > 0 and done == 0

    @staticmethod
    def _counts() -> tuple[int, int]:
        from torch._dynamo.utils import counters

        return counters["frames"]["total"], counters["frames"]["ok"]
