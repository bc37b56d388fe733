from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import vissl_zero
from tests.unit.reporting.example_run import make_run
from vissl_zero.reporting.weight_files import FinalWeights, stream_weights
from vissl_zero.sharding.state.shard import WholeTensor


class WholeState:
    """What the hook calls of a sharded model."""

    def __init__(self, state: dict[str, Tensor]):
        self.state, self.is_consolidated = state, False

    def consolidate_buffers(self) -> None:
        """Must come before ``whole_tensors``: the file has the mean of the ranks' running statistics."""
        self.is_consolidated = True

    def evaluated(self) -> AbstractContextManager[None]:
        """These weights are the ones to use."""
        return nullcontext()

    def whole_tensors(self) -> list[WholeTensor]:
        assert self.is_consolidated
        return entries(self.state)


def entries(state: dict[str, Tensor]) -> list[WholeTensor]:
    return [WholeTensor(name, value.dtype, tuple(value.shape), value.detach) for name, value in state.items()]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_weights_come_back_bit_for_bit_with_their_origin(tmp_path: Path) -> None:
    state = {
        "trunk.stem.0.weight": torch.randn(4, 3, dtype=torch.float64),
        "heads.0.bias": torch.randn(4).bfloat16(),
        "trunk.norm.num_batches_tracked": torch.tensor(7),
    }
    run = make_run(tmp_path)
    run.step, run.sharded = 20, WholeState(state)  # type: ignore[assignment]
    FinalWeights().on_end(run)
    weights, metadata = read(tmp_path / "weights.safetensors")
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) and weights[name].dtype == state[name].dtype for name in state)
    (tmp_path / "other").touch()
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert metadata.pop("vissl_zero_xxh3")
    known = {"format": "pt", "vissl_zero": vissl_zero.__version__}
    assert metadata == {**known, "recipe": "quickstart/swav_digits", "step": "20"}


def test_tied_and_strided_weights_are_written_under_each_name(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    state = {"a": whole, "b": whole, "c": whole.T, "d": whole[:, :2]}
    stream_weights(entries(state), tmp_path / "w.safetensors", {}, is_writer=True)
    weights, _ = read(tmp_path / "w.safetensors")
    assert torch.equal(weights["a"], weights["b"])
    assert torch.equal(weights["c"], whole.T) and torch.equal(weights["d"], whole[:, :2])


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank=1)
    run.sharded = WholeState({})  # type: ignore[assignment]
    FinalWeights().on_end(run)
    assert list(tmp_path.iterdir()) == []


class Gathered:
    """Tensors that are made when they are read; notes the order, and that none of those before is still held."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.newest: weakref.ref[np.ndarray] | None = None

    def tensors(self) -> list[WholeTensor]:
        kinds = {"half": torch.float16, "wide": torch.float64, "single": torch.float32, "last": torch.float64}
        return [WholeTensor(name, dtype, (3,), partial(self.read, name, dtype)) for name, dtype in kinds.items()]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        assert self.newest is None or self.newest() is None, "two full tensors at once"
        self.order.append(name)
        memory = np.full(3, len(self.order), dtype={2: "f2", 4: "f4", 8: "f8"}[dtype.itemsize])
        self.newest = weakref.ref(memory)
        return torch.from_numpy(memory)  # keeps it as long as anything looks at it


def test_one_whole_tensor_at_a_time_is_held_and_all_ranks_gather_in_one_order(tmp_path: Path) -> None:
    writer, other = Gathered(), Gathered()
    stream_weights(writer.tensors(), tmp_path / "w.safetensors", {}, is_writer=True)
    stream_weights(other.tensors(), tmp_path / "w.safetensors", {}, is_writer=False)
    assert writer.order == other.order == ["wide", "last", "single", "half"]
    assert {name: float(value[0]) for name, value in read(tmp_path / "w.safetensors")[0].items()} == {
        "wide": 1.0,
        "last": 2.0,
        "single": 3.0,
        "half": 4.0,
    }


def test_a_disk_that_takes_no_file_does_not_leave_other_ranks_waiting(tmp_path: Path) -> None:
    writer = Gathered()
    with pytest.raises(OSError, match="No such file"):
        stream_weights(writer.tensors(), tmp_path / "none" / "w.safetensors", {}, is_writer=True)
    assert len(writer.order) == 4
