"""The CUDA device that is not there: what torch asks of it, and what is noted of what a step does to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vissl_zero.sharding.checks.replica_check import StepCheck
from vissl_zero.sharding.engines.gradient_average import GradientAverage
from vissl_zero.sharding.engines.torch import fully_sharded, unit_guard
from vissl_zero.sharding.model import prepare

CUDA = torch.device("cuda", 0)
MEMORY = 80 * 2**30


def compiled(folder: Path) -> Path:
    """Compile the device; the library to preload. Takes 4 s.

    Raises:
        OSError, subprocess.CalledProcessError: there is no C++ compiler.
    """
    library, source, torch_folder = folder / "fake_cuda.so", Path(__file__).with_name("device.cpp"), torch.__path__[0]
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-rpath,{torch_folder}/lib"]
    places = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", *options, str(source), "-o", str(library), *places], check=True, capture_output=True)
    return library


class Stream:
    """The only one: what is put on it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...


class Event:
    """Of that stream."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> Event:
        return self

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_THE_STREAM = Stream()
_make_mesh = fully_sharded._mesh
_move = nn.Module.to
_make_tensor = torch.tensor


def _mesh(*arguments: Any) -> Any:
    with _disable_current_modes():  # a mesh is a table of ranks, which is read
        return _make_mesh(*arguments)


def _to(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
    """``Module.to`` where torch cannot move fake tensors in place: they must be on the device already."""
    if not arguments or not any(isinstance(tensor, FakeTensor) for tensor in module.parameters()):
        return _move(module, *arguments, **options)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    assert all(tensor.device == CUDA for _, tensor in tensors), [n for n, t in tensors if t.device != CUDA]
    return module


def _tensor(values: Any, *, device: Any = None, **options: Any) -> Tensor:
    """``torch.tensor``, which cannot put numbers on a device that is not there: made on the host, and moved."""
    options.pop("pin_memory", None)  # real memory, which there is no CUDA to lock
    made = _make_tensor(values, **options)
    return made if device is None else made.to(device)


def _marks(check: StepCheck, problem: str | None, facts: Any, marks: Any = ()) -> Any:
    assert problem is None, problem
    assert check._device.type == "cpu" or not check._is_needed  # the host reads it in every step
    return [bool(mark) for mark in marks]


def _all_say_the_same(found: list[Any], value: Any, group: Any = None) -> None:
    found[:] = [value] * len(found)


@contextmanager
def present() -> Iterator[None]:
    """Inside, torch has a CUDA device of 80 GiB."""
    properties = type("Properties", (), {"total_memory": MEMORY, "name": "fake", "major": 9, "minor": 0})()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda *_: True,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_allocated": lambda *_: 0,
        "synchronize": lambda *_: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: _THE_STREAM,
        "default_stream": lambda *_: _THE_STREAM,
        "stream": lambda stream: nullcontext(),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(patch.object(nn.Module, "to", _to))
        stack.enter_context(patch.object(torch, "tensor", _tensor))
        # Where every answer is yes, some rank would always have one more backward pass.
        stack.enter_context(patch.object(GradientAverage, "_agree_to_open", lambda *_: False))
        stack.enter_context(patch.object(StepCheck, "require_equal", _marks))
        # Comparisons of parameters with their shards, in the first passes and in samples, are reads by design.
        stack.enter_context(patch.object(unit_guard, "_FIRST_RUNS", 0))
        stack.enter_context(patch.object(unit_guard, "_SAMPLED_RUNS", 10**9))
        stack.enter_context(patch.object(fully_sharded, "_mesh", _mesh))
        stack.enter_context(patch.object(prepare, "_refuse_shared_memory", lambda *_: None))  # no addresses
        stack.enter_context(patch.object(FSDPParam, "reset_sharded_param", lambda param: None))  # compares addresses
        stack.enter_context(patch.object(dist, "all_gather_object", _all_say_the_same))
        stack.enter_context(patch.object(dist, "broadcast_object_list", lambda *_, **__: None))
        yield


class Watch(TorchDispatchMode):
    """Counts when the host waits for the device. A value that is asked for is 1; places that are asked for are none.

    That a CPU tensor meets a CUDA one is an error of fake tensors themselves (but for 0-d tensors, which are numbers);
    that it meets nccl is one of this.

    Attributes:
        reads: operations that read device memory on the host, by their name.
        uploads: copies to the device from memory that is not page-locked or that are waited for.
        collectives: messages among the ranks, by their name.
        on_host: number of them that move tensors in host memory, which gloo takes and nccl does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.uploads: list[str] = []
        self.collectives: list[str] = []
        self.on_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with this rank's shards
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        if "_local_scalar_dense" in name:
            if args[0].device.type == "cuda":
                self.reads.append("item")
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func is torch.ops.aten._to_copy.default:
            self._note_copy(args[0].device, torch.device(kwargs.get("device") or args[0].device), kwargs)
        elif func is torch.ops.aten.copy_.default:
            options = dict(kwargs, non_blocking=args[2]) if len(args) > 2 else kwargs
            self._note_copy(args[1].device, args[0].device, options)
        elif func is torch.ops.aten.equal.default:
            if args[0].device.type == "cuda":
                self.reads.append("equal")
            return True
        elif func is torch.ops.aten._pin_memory.default:
            return torch.empty_like(args[0])
        elif func is torch.ops.aten.is_pinned.default:
            return True
        elif func is torch.ops.aten.nonzero.default:
            if args[0].device.type == "cuda":
                self.reads.append("nonzero")
            return args[0].new_empty(0, args[0].ndim, dtype=torch.int64)
        elif func is torch.ops.aten.batch_norm_update_stats.default:  # torch has no shapes for it
            return tuple(args[0].new_empty(2, args[0].shape[1]).unbind())
        if name.startswith("c10d.") and "barrier" not in name:
            self.collectives.append(name)
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            devices = {tensor.device.type for tensor in tensors if isinstance(tensor, FakeTensor)}
            if len(devices) > 1:
                raise AssertionError(f"{name} of tensors on {devices}")
            self.on_host += devices == {"cpu"}
        return func(*args, **kwargs)

    def _note_copy(self, source: torch.device, target: torch.device, options: dict[str, Any]) -> None:
        if source.type == "cuda" and target.type == "cpu" and not options.get("non_blocking"):
            self.reads.append("copy")
        if source.type == "cpu" and target.type == "cuda" and not options.get("non_blocking"):
            self.uploads.append("copy")
