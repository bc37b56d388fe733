"""``vissl_zero.verify``: equal where it is, and the step and the parameter where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero
from tests.ranks import RankError, run_on_ranks


class _Net(nn.Module):
    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.norm, self.dropout, self.out = norm, nn.Dropout(dropout), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(self.dropout(self.norm(x)))


class _FloatOnly(_Net):
    """Computes in float32 inside, whatever it holds."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for double")
        return super().forward(x)


class _Adapted(_Net):
    """Over a frozen base in half precision, which takes no other input."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__(norm, dropout)
        self.base = nn.Linear(7, 7).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.base(x.bfloat16()).to(x.dtype))


class _Mixed(_Adapted):
    """As above, with the base trained too."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__(norm, dropout)
        self.base.requires_grad_(True)


_NORMS = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "sync": nn.SyncBatchNorm}


def _mean(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _sum(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    """The classical mistake: ranks average sums. The loss that is shown is right."""
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    losses.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses.mean()


def _wrong_at_step_3(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    is_whole = len(batch["x"]) == 6
    (loss + (0.0 if is_whole or batch["number"] < 3 else 1e-6) * model.out.bias.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _clipped_by_hand(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    optimizer.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _with_teacher(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        targets = model.teacher[0](batch["x"]).softmax(-1)  # type: ignore[operator,index]
    scores = model(batch["x"])
    loss = F.cross_entropy(scores, batch["y"]) + F.cross_entropy(scores, targets)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _doubles_its_images(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    batch["x"] *= 2
    return _mean(model, optimizer, batch)


_STEPS = {
    "in place": _doubles_its_images,
    "teacher": _with_teacher,
    "by hand": _clipped_by_hand,
    "mean": _mean,
    "sum": _sum,
    "step 3": _wrong_at_step_3,
}


def _verify(
    zero: dict[str, Any],
    step: str = "mean",
    norm: str = "layer",
    cls: str = "net",
    dropout: float = 0.0,
    size: int = 6,
    seed: int | None = 7,
) -> vissl_zero.integration.verification.Verdict:  # type: ignore[name-defined]
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = {"net": _Net, "float": _FloatOnly, "adapted": _Adapted, "mixed": _Mixed}[cls](_NORMS[norm](7), dropout)
        if step == "teacher":
            object.__setattr__(model, "teacher", [vissl_zero.ema(model, decay=0.5)])
        return model, torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)

    torch.manual_seed(seed if seed is not None else torch.distributed.get_rank())
    batches = [{"x": torch.randn(size, 7), "y": torch.arange(size) % 3, "number": torch.tensor(n)} for n in range(1, 5)]
    if step == "in place":  # in the dtype of the comparison: nothing has to be converted
        batches = [batch | {"x": batch["x"].double()} for batch in batches]
    return vissl_zero.verify(build, _STEPS[step], batches, zero)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("zero", [{"level": 0}, {"level": 3, "gradient_accumulation_steps": 2}])
def test_a_momentum_teacher_moves_in_the_plain_run_too(zero: dict[str, Any]) -> None:
    for verdict in run_on_ranks(2, _verify, zero, "teacher"):
        assert verdict.is_equal and verdict.num_steps == 4, str(verdict)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("zero", [{"level": 1}, {"level": 3, "clip_grad": 0.1, "gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("norm", ["layer", "sync"])
def test_equal(zero: dict[str, Any], norm: str) -> None:
    for verdict in run_on_ranks(2, _verify, zero, "mean", norm):
        assert verdict.is_equal and verdict.num_steps == 4 and verdict.dtype == torch.float64, str(verdict)
        assert verdict.difference < 1e-10 and str(verdict).startswith("equal: 4 steps in float64")


@pytest.mark.timeout(90)
def test_the_first_step_and_parameter_that_differ_are_named_on_every_rank() -> None:
    for verdict in run_on_ranks(2, _verify, {"level": 2}, "sum"):
        assert not verdict.is_equal and verdict.step == 1 and verdict.difference > 1e-3
        assert verdict.name in dict(_Net(nn.LayerNorm(7)).named_parameters())
    verdict = run_on_ranks(3, _verify, {"level": 2}, "step 3")[2]
    assert (verdict.step, verdict.name) == (3, "out.bias")
    assert str(verdict).startswith("DIFFERENT: out.bias at step 3 by ")


@pytest.mark.timeout(90)
def test_a_step_may_change_its_batch() -> None:
    verdict = run_on_ranks(2, _verify, {"level": 2}, "in place")[0]
    assert verdict.is_equal, str(verdict)


@pytest.mark.timeout(90)
def test_what_would_hide_a_difference_is_left_out_and_named() -> None:
    zero = {"level": 1, "bf16": True, "rounding": "kahan", "compile": True, "float8": "blocks"}
    verdict = run_on_ranks(2, _verify, zero)[0]
    assert verdict.is_equal and verdict.dtype == torch.float64, str(verdict)
    for name in ("half precision", "float8", "rounding=kahan", "compile"):
        assert f"{name} was left out." in str(verdict)


@pytest.mark.timeout(90)
def test_likely_causes_are_named() -> None:
    verdict = run_on_ranks(2, _verify, {"level": 1}, "mean", "batch")[0]
    assert not verdict.is_equal and "batch norm is not synchronized" in str(verdict)
    verdict = run_on_ranks(2, _verify, {"level": 1}, "mean", "layer", "net", 0.5)[0]
    assert not verdict.is_equal and "draws random numbers" in str(verdict)
    verdict = run_on_ranks(1, _verify, {"level": 1}, "mean", "layer", "net", 0.5)[0]
    assert verdict.is_equal and "one process" in str(verdict)


@pytest.mark.timeout(90)
def test_a_model_that_cannot_run_in_float64_runs_in_its_own_format() -> None:
    verdict = run_on_ranks(2, _verify, {"level": 3}, "mean", "layer", "float")[0]
    assert verdict.is_equal and verdict.dtype == torch.float32 and "no kernel for double" in str(verdict)


@pytest.mark.timeout(90)
def test_a_model_of_several_formats_runs_in_them() -> None:
    verdict = run_on_ranks(2, _verify, {"level": 3}, "mean", "layer", "adapted")[0]
    assert verdict.is_equal and verdict.dtype == torch.float32 and verdict.difference < 1e-5, str(verdict)
    verdict = run_on_ranks(2, _verify, {"level": 3}, "mean", "layer", "mixed")[0]
    assert verdict.is_equal and verdict.dtype == torch.bfloat16, str(verdict)


@pytest.mark.timeout(90)
def test_a_loop_that_edits_gradients_runs_as_zero_says() -> None:
    verdict = run_on_ranks(2, _verify, {"level": 2, "keep_gradients": True}, "by hand")[0]
    assert verdict.is_equal, str(verdict)
    with pytest.raises(RankError, match="gradient was read or changed"):
        run_on_ranks(2, _verify, {"level": 2}, "by hand")


@pytest.mark.timeout(90)
def test_batches_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(RankError, match="batches: cannot be shared by 2 ranks"):
        run_on_ranks(2, _verify, {"level": 3}, "mean", "layer", "net", 0.0, 5)
    with pytest.raises(RankError, match="must be the same complete batches"):
        run_on_ranks(2, _verify, {"level": 3}, "mean", "layer", "net", 0.0, 6, None)
