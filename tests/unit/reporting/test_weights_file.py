from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import vissl_zero
from tests.unit.reporting.example_run import make_run
from vissl_zero.reporting.weights_file import WeightsFile, save_weights


class WholeState:
    """What the hook calls of a sharded model."""

    def __init__(self, state: dict[str, Tensor]):
        self.state, self.is_consolidated = state, False

    def consolidate_buffers(self) -> None:
        """Must come before ``full_state``: the file has the mean of the ranks' running statistics."""
        self.is_consolidated = True

    def full_state(self) -> dict[str, Tensor]:
        assert self.is_consolidated
        return self.state


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
    WeightsFile().on_end(run)
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
    save_weights({"a": whole, "b": whole, "c": whole.T, "d": whole[:, :2]}, tmp_path / "w.safetensors", {})
    weights, _ = read(tmp_path / "w.safetensors")
    assert torch.equal(weights["a"], weights["b"])
    assert torch.equal(weights["c"], whole.T) and torch.equal(weights["d"], whole[:, :2])


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, rank=1)
    run.sharded = WholeState({})  # type: ignore[assignment]
    WeightsFile().on_end(run)
    assert list(tmp_path.iterdir()) == []
