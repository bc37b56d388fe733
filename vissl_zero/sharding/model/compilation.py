"""``torch.compile``, unit by unit: inside the unit, so that gathering, recomputing and reducing stay outside.

A graph has the layers of one unit for one resolution, and depends on neither ranks nor level. Identical blocks share
their graphs. A unit that cannot be compiled runs eagerly, with a warning that names it.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from vissl_zero import collectives
from vissl_zero.models.keyed_random import KeyedDropout, KeyedDropPath, change_drawing
from vissl_zero.models.model import Unit
from vissl_zero.sharding.model.batch_norm import BatchNorm
from vissl_zero.sharding.torch_private import Tracing, compile_graph, compiled, has_forward_hooks, left_out_of_graphs

_log = logging.getLogger(__name__)

_MAX_GRAPHS = 32
# Layers that read state of the step or call collectives: a graph ends before each, and another begins after it.
_EAGER_LAYERS = (BatchNorm, KeyedDropout, KeyedDropPath)
_PATIENCE = 100  # forward passes with hooks inside before a unit is reported as never compiled


def compile_units(model: nn.Module, units: Sequence[nn.Module], backend: str) -> None:
    """Compile ``units`` of ``model`` when they first run; in place. Not a collective.

    A unit that contains others stays eager: the inner ones are compiled. So does a unit as long as a layer inside has
    forward hooks (checks of the first steps), which a graph could not call.

    Args:
        model: not sharded yet.
        units: units to compile.
        backend: backend of ``torch.compile``: "inductor", or "aot_eager", which traces and makes no code.
    """
    chosen = set(units)
    names = {
        unit: name or "the model"
        for name, unit in model.named_modules()
        if unit in chosen and not any(part in chosen for part in unit.modules() if part is not unit)
    }
    for unit in names:
        for layer in unit.modules():
            if isinstance(layer, _EAGER_LAYERS):
                layer.forward = MethodType(left_out_of_graphs(type(layer).forward), layer)  # type: ignore[method-assign]
    change_drawing(left_out_of_graphs)
    compiler = _Compiler(names, backend)
    for unit in names:
        compiler.install(unit)


class _Compiler:
    """Compiles the units of one model; logs progress, and the units that cannot be compiled.

    Args:
        names: names of the units.
        backend: backend of ``torch.compile``.
    """

    def __init__(self, names: dict[nn.Module, str], backend: str):
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary(names)
        self._backend = backend
        self._num_units = len(names)
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._refused: set[str] = set()
        self._num_done = 0
        self._started = 0.0
        self._num_hooked_passes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary(dict.fromkeys(names, 0))

    def install(self, unit: nn.Module) -> None:
        """Replace the body of ``unit`` with the compiled one. In place."""
        name = "apply_layers" if isinstance(unit, Unit) else "forward"
        function = getattr(getattr(unit, name), "__func__", None)
        if function is None:
            self._log_eager(self._names[unit], "its forward pass is not a method of its class")
            self._num_units -= 1
            return
        shapes = tuple((key, tuple(param.shape), param.dtype) for key, param in unit.named_parameters())
        # Units of one kind share one compiled function: torch then reuses its graphs instead of compiling each block.
        kind = (function, tuple(type(layer) for layer in unit.modules()), shapes)
        if kind not in self._compiled:
            self._compiled[kind] = compiled(function, self._make, _MAX_GRAPHS)
        in_graphs, is_first = self._compiled[kind], True
        name_of_unit = self._names[unit]
        inner = [layer for layer in unit.modules() if layer is not unit]

        def run(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            if self_ is not unit or self._has_hooks_inside(unit, inner):  # a copy has layers of its own
                return function(self_, *args, **kwargs)
            self._current = name_of_unit
            if not is_first:
                return in_graphs(self_, *args, **kwargs)
            with self._first_run(unit):
                result = in_graphs(self_, *args, **kwargs)
            is_first = False
            return result

        run.__name__ = name  # pickle finds a method by it
        setattr(unit, name, MethodType(run, unit))

    def _has_hooks_inside(self, unit: nn.Module, inner: Sequence[nn.Module]) -> bool:
        """Check whether layers inside a unit have forward hooks, other than those of ``fully_shard``."""
        if not any(has_forward_hooks(layer) and not isinstance(layer, FSDPModule) for layer in inner):
            return False
        self._num_hooked_passes[unit] += 1
        if self._num_hooked_passes[unit] == _PATIENCE:
            self._log_eager(self._names[unit], "a layer inside it has forward hooks")
        return True

    @contextmanager
    def _first_run(self, unit: nn.Module) -> Iterator[None]:
        """Time the first run of a unit, which compiles it, and log the progress. A context."""
        name = self._names[unit]
        self._started = self._started or time.perf_counter()
        if self._num_done == 0:
            _log_on_rank_0(
                "Compiling %d units as they first run; this step and the next ones take longer.", self._num_units
            )
        self._is_first_run, began, tracing = True, time.perf_counter(), Tracing()
        try:
            yield
        finally:
            self._is_first_run = False
            self._num_done += 1
            took, total = time.perf_counter() - began, time.perf_counter() - self._started
            if tracing.has_failed():
                self._log_eager(name, "torch cannot trace it")
            if took > 1.0 or self._num_done == self._num_units:
                _log_on_rank_0(
                    "Compiled %d of %d units (%s), %.0f s so far.", self._num_done, self._num_units, name, total
                )

    def _make(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph; return the graph itself if that fails."""
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # inductor's, on its own settings
                return compile_graph(self._backend, graph, inputs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the graph can run eagerly
            first, *_ = [*str(error).strip().splitlines(), ""]
            self._log_eager(self._current, f"{type(error).__name__}: {first[:200]}")
            return graph.forward
        finally:
            took = time.perf_counter() - began
            if took > 1.0 and not self._is_first_run:  # recompiled, for training after evaluation or for another shape
                _log_on_rank_0("Compiled another graph of %s, %.0f s.", self._current, took)

    def _log_eager(self, name: str, why: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            _log.warning("Uncompiled: %s runs eagerly: %s.", name, why)


def _log_on_rank_0(text: str, *values: Any) -> None:
    if collectives.rank() == 0:
        _log.warning(text, *values)
