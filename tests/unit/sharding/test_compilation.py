"""What is said of units that are compiled: progress where it takes long, and each that runs eagerly."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from vissl_zero.models.keyed_random import KeyedDropout
from vissl_zero.sharding.model import compilation

pytestmark = pytest.mark.filterwarnings("error")
X = torch.ones(1, 2)


class _Torch:
    """Stands in for torch.compile: a graph per call as long as ``seconds`` has entries, which it takes to make."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now, self.seconds, self.cannot_trace, self.fails = 100.0, [0.0], False, False
        self.drawing: list[Any] = []
        patch.setattr(compilation.time, "perf_counter", lambda: self.now)
        patch.setattr(compilation, "compiled", self._compiled)
        patch.setattr(compilation, "compile_graph", self._compile_graph)
        patch.setattr(compilation, "Tracing", lambda: self)
        patch.setattr(compilation, "left_out_of_graphs", self._left_out)
        patch.setattr(compilation, "change_drawing", self.drawing.append)

    def has_failed(self) -> bool:
        return self.cannot_trace

    def _compiled(self, function: Callable[..., Any], make: Callable[..., Any], max_graphs: int) -> Callable[..., Any]:
        def call(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.seconds:
                make(torch.fx.symbolic_trace(nn.Identity()), list(args))
            return function(unit, *args, **kwargs)

        return call

    def _compile_graph(self, backend: str, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        assert backend == "inductor"
        warnings.warn("of its settings", stacklevel=1)
        self.now += self.seconds.pop(0)
        if self.fails:
            raise NotImplementedError("\n no kernel\nfor it")
        return lambda *args: args

    @staticmethod
    def _left_out(function: Callable[..., Any]) -> Callable[..., Any]:
        def left_out(*args: Any) -> Any:
            return function(*args)

        left_out.is_left_out = True  # type: ignore[attr-defined]
        return left_out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> _Torch:
    return _Torch(monkeypatch)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def test_progress_is_told_where_it_takes_more_than_a_second(stand_in: _Torch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3))
    compilation.compile_units(model, list(model), "inductor")
    stand_in.seconds = [2.0, 1.0, 0.5]
    model(X)
    assert _said(caplog) == [
        "Compiling 3 units as they first run; this step and the next ones take longer.",
        "Compiled 1 of 3 units (0), 2 s so far.",
        "Compiled 3 of 3 units (2), 4 s so far.",
    ]
    stand_in.seconds = [3.0, 1.0, 0.5]
    model(X)
    assert _said(caplog) == ["Compiled another graph of 0, 3 s."]
    model(X)
    assert _said(caplog) == []


def test_other_ranks_leave_progress_to_the_first(
    stand_in: _Torch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(compilation.collectives, "rank", lambda: 1)
    model = nn.Sequential(nn.Linear(2, 2))
    compilation.compile_units(model, list(model), "inductor")
    stand_in.seconds, stand_in.cannot_trace = [2.0], True
    model(X)
    assert _said(caplog) == ["Uncompiled: 0 runs eagerly: torch cannot trace it."]


def test_only_the_inner_of_two_units_is_compiled(stand_in: _Torch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    compilation.compile_units(model, [model, model[0], model[0][0], model[1]], "inductor")
    model(X)
    assert _said(caplog)[-1].startswith("Compiled 2 of 2 units (1)")


def test_what_the_backend_cannot_compile_is_named_once(stand_in: _Torch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Linear(2, 2)
    compilation.compile_units(model, [model], "inductor")
    stand_in.seconds, stand_in.fails = [2.0, 2.0], True
    expected = model(X), model(X)
    assert torch.equal(*expected)
    assert _said(caplog)[1:] == [
        "Uncompiled: the model runs eagerly: NotImplementedError: no kernel.",
        "Compiled 1 of 1 units (the model), 2 s so far.",
        "Compiled another graph of the model, 2 s.",
    ]


def test_layers_that_draw_stay_out_of_graphs(stand_in: _Torch) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), KeyedDropout(0.5)))
    compilation.compile_units(model, list(model), "inductor")
    assert [hasattr(layer.forward, "is_left_out") for layer in model[0]] == [False, True]
    assert stand_in.drawing == [stand_in._left_out]
    assert model.eval()(X).shape == (1, 2)


def test_hooks_of_fully_shard_are_no_hooks_of_the_user(
    stand_in: _Torch, caplog: pytest.LogCaptureFixture, group: dist.ProcessGroup
) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(_Twice())
    fully_shard(model[0].inner)
    compilation.compile_units(model, list(model), "inductor")
    model(X)
    assert _said(caplog)[-1].startswith("Compiled 1 of 1 units (0)")


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, plus: float = 0.0) -> Tensor:
        return self.inner(self.inner(x)) + plus


def test_a_compiled_unit_takes_keywords_and_is_pickled_as_it_was(stand_in: _Torch) -> None:
    unit = _Twice()
    before = unit(X)
    compilation.compile_units(unit, [unit], "inductor")
    for _ in range(2):  # the first run compiles
        assert torch.equal(unit(X, plus=1.0), before + 1.0)
    again = pickle.loads(pickle.dumps(unit))
    assert torch.equal(again(X, plus=1.0), before + 1.0)
    hook = unit.inner.register_forward_hook(lambda *args: None)
    assert torch.equal(unit(X, plus=1.0), before + 1.0)
    hook.remove()


def test_a_unit_with_hooks_inside_waits_and_is_named_in_the_end(
    stand_in: _Torch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph could not call the hooks: checks of the first steps go away, a user's stay."""
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(_Twice())
    compilation.compile_units(model, list(model), "inductor")
    seen: list[Any] = []
    hook = model[0].inner.register_forward_hook(lambda *args: seen.append(args))
    for _ in range(compilation._PATIENCE - 1):
        model(X)
    assert len(seen) == 2 * (compilation._PATIENCE - 1) and _said(caplog) == []
    model(X)
    model(X)
    assert _said(caplog) == ["Uncompiled: 0 runs eagerly: a layer inside it has forward hooks."], "once"
    hook.remove()
    model(X)
    assert _said(caplog)[-1].startswith("Compiled 1 of 1 units (0)")


def test_a_unit_whose_forward_pass_was_replaced_stays_eager(stand_in: _Torch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].forward = lambda x: x + 1
    compilation.compile_units(model, list(model), "inductor")
    model(X)
    first, *_, last = _said(caplog)
    assert first == "Uncompiled: 0 runs eagerly: its forward pass is not a method of its class."
    assert last.startswith("Compiled 1 of 1 units (1)")
