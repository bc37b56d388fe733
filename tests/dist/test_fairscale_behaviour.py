"""fairscale beside the numbers: skips, state in and out, schedules, rows, full parameters, a clean end."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.dist.cuda_streams import streams_on_cpu
from tests.dist.training import Case, Outcome, build, micro_batches, shard, train_plainly, train_step
from tests.ranks import RankError, run_on_ranks
from vissl_zero.errors import CheckpointError, VisslZeroError
from vissl_zero.optim.elementwise import sgd
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.sharded_model import ShardedModel

LEVELS = pytest.mark.parametrize("level", [1, 2, 3])
PROTOTYPES = "heads.0.prototypes0.weight"
TOLERANCE = {"float64": 1e-10, "float32": 1e-6}


def _case(level: int, **settings: Any) -> Case:
    return Case(**settings) if level < 3 else Case(dtype="float32", lr=0.01, **settings)


def _on_cpu(level: int) -> AbstractContextManager[None]:
    return streams_on_cpu() if level == 3 else nullcontext()


def _fairscale(case: Case, level: int, **changes: Any) -> ShardedModel:
    precision = Precision(case.dtype, None, case.dtype, case.dtype, use_loss_scale=True)
    return shard(case, level, engine="fairscale", **{"precision": precision, **changes})


def _largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max([(left[name] - right[name]).abs().max().item() for name in left] or [0.0])


# --- loss scale ------------------------------------------------------------------------------------------------------


def _train_with_inf(level: int, case: Case) -> dict[str, Any]:
    """A good step, one with an inf in the gradients of rank 1 alone, and the rest."""
    with _on_cpu(level):
        sharded, outcome, skipped, scales = _fairscale(case, level), Outcome(), [], []
        for step in (0, 1, 1, 2, 3):
            before = sharded.full_state()
            handle = None
            if is_bad := len(skipped) == 1:
                handle = _spoil_gradient(sharded.model) if dist.get_rank() == 1 else None
            result = train_step(sharded, case, step, outcome)
            skipped.append(result.skipped)
            scales.append(result.loss_scale)
            if handle:
                handle.remove()
            if is_bad:
                trained = [name for name, _ in sharded.named_parameters()] if before else []
                after = sharded.full_state()
                assert all(torch.equal(before[name], after[name]) for name in trained)
                outcome.losses.pop()
                outcome.grad_norms.pop()
        outcome.state = sharded.full_state()
        return {"outcome": outcome, "skipped": skipped, "scales": scales}


def _spoil_gradient(model: nn.Module) -> Any:
    def spoil(module: nn.Module, inputs: Any, output: Any) -> None:
        output[0][0].register_hook(lambda grad: grad * float("inf"))

    return model.register_forward_hook(spoil)


@LEVELS
@pytest.mark.timeout(60)
def test_an_inf_on_one_rank_makes_all_skip_and_halve_the_scale(level: int) -> None:
    case = _case(level, optimizer="larc", clip=0.05, norm="group")
    answers = run_on_ranks(2, _train_with_inf, level, case)
    for answer in answers:
        assert answer["skipped"] == [False, True, False, False, False]
        assert answer["scales"] == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    expected, outcome = train_plainly(case), answers[0]["outcome"]
    assert _largest_difference(outcome.state, expected.state) < TOLERANCE[case.dtype]
    assert outcome.losses == pytest.approx(expected.losses, abs=TOLERANCE[case.dtype])


# --- state -----------------------------------------------------------------------------------------------------------


def _resume(level: int, case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    with _on_cpu(level):
        first = _fairscale(case, level, **changes)
        for step in range(2):
            train_step(first, case, step, Outcome())
        state = _copied(first.state_dict())
        for step in (2, 3):
            train_step(first, case, step, Outcome())
        second = _fairscale(case, level, **changes)
        train_step(second, case, 0, Outcome())  # whatever it holds by then must go
        second.load_state_dict(state)
        for step in (2, 3):
            train_step(second, case, step, Outcome())
        with pytest.raises(CheckpointError, match="another layout: engine fairscale"):
            shard(case, level).load_state_dict(state)
        return {"state": state, "difference": _largest_difference(first.full_state(), second.full_state())}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("level", "changes"), [(1, {}), (2, {}), (3, {}), (3, {"flatten_parameters": False})])
def test_a_resumed_run_goes_on_as_if_never_stopped_and_parts_make_the_whole(level: int, changes: dict) -> None:
    case = _case(level, optimizer="adamw", clip=0.05)
    answers = run_on_ranks(3, _resume, level, case, changes)
    # DDP fills its buckets in another order in its first step, and with them gloo's order of summation.
    assert max(answer["difference"] for answer in answers) <= (1e-13 if level == 1 else 0.0)
    states = [answer["state"] for answer in answers]
    for name, param in build(case).named_parameters():
        for entries in (
            [state["params"][name] for state in states],
            [state["optimizer"]["state"][name]["exp_avg"] for state in states],
        ):
            assert {entry["full_shape"] for entry in entries} == {tuple(param.shape)}
            places = [(e["first_element"], e["first_element"] + e["local"].numel()) for e in entries]
            covered = [place for first, stop in sorted(places) for place in range(first, stop)]
            assert covered == list(range(param.numel())), (name, places)


# --- rows and full parameters ---------------------------------------------------------------------------------------


def _normalize(level: int, case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    with _on_cpu(level):
        sharded = _fairscale(case, level, **changes)
        train_step(sharded, case, 0, Outcome())
        images = [crops.flatten(0, 1) for crops in next(micro_batches(case, 0))]
        with torch.no_grad():
            sharded.model.eval()
            sharded.model(images)  # whatever it keeps whole from here is out of date afterwards
            before = sharded.full_state()
            sharded.normalize_rows([PROTOTYPES])
            outputs = sharded.model(images)
        with sharded.full_parameters():
            inside = {name: tensor.clone() for name, tensor in sharded.named_parameters()}
        return {"before": before, "after": sharded.full_state(), "inside": inside, "outputs": outputs, "images": images}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("level", "changes"), [(1, {}), (2, {}), (3, {}), (3, {"flatten_parameters": False})])
def test_rows_are_normalized_everywhere_and_evaluation_sees_it(level: int, changes: dict) -> None:
    case = _case(level, norm="group")
    answers = run_on_ranks(3, _normalize, level, case, changes)
    before, after = answers[0]["before"], answers[0]["after"]
    expected = before | {PROTOTYPES: nn.functional.normalize(before[PROTOTYPES], dim=1)}
    assert _largest_difference(after, expected) < TOLERANCE[case.dtype] / 10
    model = build(case).eval()
    model.load_state_dict(expected)
    for answer in answers:
        assert _largest_difference(answer["inside"], expected) < TOLERANCE[case.dtype] / 10
        for got, wanted in zip(_tensors(answer["outputs"]), _tensors(model(answer["images"])), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE[case.dtype])


def _tensors(nested: Any) -> list[Tensor]:
    return [nested] if isinstance(nested, Tensor) else [tensor for part in nested for tensor in _tensors(part)]


# --- models that fairscale does not expect ---------------------------------------------------------------------------


class _Foreign(nn.Module):
    """No units, a scalar, a frozen layer, a layer that nobody uses, and one that some forward passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.second = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3, bias=False)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.unused, self.optional = nn.Linear(2, 2), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, use_optional: bool = False) -> tuple[Tensor, Tensor]:
        hidden = self.frozen(torch.tanh(self.first(x))) * self.temperature
        scores = self.second(hidden)
        return hidden, self.optional(scores) if use_optional else scores


def _foreign(level: int, changes: dict[str, Any]) -> tuple[nn.Module, list[ParamGroup], ShardingPlan]:
    torch.manual_seed(3)
    dtype = "float32" if level == 3 else "float64"
    model = _Foreign().to(getattr(torch, dtype))
    names = tuple(name for name, param in model.named_parameters() if param.requires_grad)
    plan = ShardingPlan(level=level, engine="fairscale", precision=Precision(dtype, None, dtype, dtype), **changes)
    return model, [ParamGroup("all", names, False, True, 0.1)], plan


def _train_foreign(level: int, changes: dict[str, Any], uses: list[bool]) -> dict[str, Tensor]:
    """Three steps with as many micro-batches as ``uses``: which of them use the optional layer."""
    with _on_cpu(level):
        model, groups, plan = _foreign(level, changes)
        build_optimizer = lambda groups: (sgd(groups, momentum=0.9), None)  # noqa: E731
        sharded = STRATEGIES.get("fairscale").build().shard(model, groups, build_optimizer, plan, torch.device("cpu"))
        sharded.optimizer.param_groups[0]["lr"] = 0.05
        for step in range(3):
            for index, use_optional in enumerate(uses):
                rows = _rows(step)[dist.get_rank() :: dist.get_world_size()].to(next(model.parameters()).dtype)
                with sharded.micro_batch(is_last=index == len(uses) - 1):
                    hidden, scores = sharded.model(rows, use_optional)
                    sharded.backward((hidden.sin().sum(1) + scores.square().sum(1)).mean())
            sharded.step()
            sharded.zero_grad()
        return sharded.full_state()


def _rows(step: int) -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _train_foreign_plainly(level: int, uses: list[bool]) -> dict[str, Tensor]:
    model, _, _ = _foreign(level, {})
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        for use_optional in uses:
            hidden, scores = model(_rows(step).to(params[0].dtype), use_optional)
            (hidden.sin().sum(1) + scores.square().sum(1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("level", "changes", "uses"),
    [
        (1, {}, [False]),
        (2, {}, [True, True]),
        (2, {"reduce_buffer_size": 0}, [False, True]),
        (3, {}, [True, False]),
        (3, {"flatten_parameters": False, "wrap_threshold": 4}, [True, False]),
        (3, {"wrap_threshold": 4}, [False]),
    ],
)
def test_a_model_without_units_trains_the_same(level: int, changes: dict, uses: list[bool]) -> None:
    state = run_on_ranks(3, _train_foreign, level, changes, uses)[0]
    difference = _largest_difference(state, _train_foreign_plainly(level, uses))
    assert difference < (1e-10 if level < 3 else 1e-6), difference


@pytest.mark.timeout(60)
def test_a_parameter_that_the_last_micro_batch_does_not_use_is_an_error_at_level_2() -> None:
    with pytest.raises(RankError, match=r"did not use optional\.weight, which an earlier one did.*ENGINE=torch"):
        run_on_ranks(2, _train_foreign, 2, {}, [True, False])


# --- the end ---------------------------------------------------------------------------------------------------------

_SCRIPT = """
import sys, torch, torch.distributed as dist
from tests.dist.training import Case, Outcome, shard, train_step
torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
sharded = shard(Case(), 2, engine="fairscale", reduce_buffer_size=0)
train_step(sharded, Case(), 0, Outcome())
dist.barrier()
if rank == 0:  # rank 1 ends without: the group goes with the interpreter
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_run_without_buffers_ends_with_exit_code_0(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE) for rank in range(2)]
    errors = [rank.communicate(timeout=80)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert all("Warning" not in error for error in errors), errors


class _Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _output_of_another_class(level: int) -> Tensor:
    model = nn.Sequential(nn.Linear(3, 3))
    model, _ = vissl_zero.initialize(model, {"type": "SGD"}, {"level": level, "engine": "fairscale"})
    model.__class__ = _Doubled
    return model(torch.ones(2, 3)).detach() - 2 * model[0](torch.ones(2, 3)).detach()


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_runs_the_forward_of_the_class_it_has(level: int) -> None:
    assert not any(difference.any() for difference in run_on_ranks(2, _output_of_another_class, level))


def _two_optimizers(level: int, micro_batches: int) -> float:
    """Train the last layer by an optimizer of torch's own; returns the largest difference from one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain = copy.deepcopy(model)
    last = list(model[2].parameters())
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, first = vissl_zero.initialize(
        model,
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        {"level": level, "engine": "fairscale", "gradient_accumulation_steps": micro_batches},
    )
    second, of_plain = torch.optim.SGD(last, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for part in rows.chunk(micro_batches):
            first.backward(model(part[rank::num_ranks]).square().mean())
            first.step()
            first.zero_grad()
        second.step()
        second.zero_grad()
        plain(rows).square().mean().backward()
        of_plain.step()
        of_plain.zero_grad()
    return max(
        float((mine - theirs).abs().max().detach())
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("level", [1, 2])
def test_an_optimizer_of_the_loop_trains_what_ours_leaves_out(level: int, micro_batches: int) -> None:
    assert max(run_on_ranks(3, _two_optimizers, level, micro_batches)) < 1e-15


# --- gradients in loops of one's own ----------------------------------------------------------------------------------


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _halve(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad / 2


def _drop(model: nn.Module) -> None:
    model[0].weight.grad = None


def _keep(model: nn.Module) -> None:
    """Leave the gradients alone."""


def _loop(zero: dict[str, Any] | None, change: Any, zeroes: str) -> dict[str, Tensor] | str:
    """Three steps; ``change`` is made before the second, and gradients are zeroed by the model or the optimizer."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 5)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if zero is not None:
        model, optimizer = vissl_zero.initialize(model, optimizer, zero)
    try:
        for step in range(3):
            rows = torch.randn(12, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            if zero is not None:
                rows = rows.chunk(dist.get_world_size())[dist.get_rank()]
            model(rows).square().mean().backward()
            if step == 1:
                change(model)
            optimizer.step()
            if zeroes:
                {"model": model, "optimizer": optimizer}[zeroes].zero_grad()
    except VisslZeroError as error:
        return str(error)
    return {name: param.detach() for name, param in model.named_parameters()}


_OWNER = "only the rank that updates a parameter has its averaged gradient"
_SPENT = "A gradient was used after optimizer.step()"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("change", "zeroes", "refusals"),
    [
        (_keep, "model", ("", "")),
        (_keep, "", (_SPENT, _SPENT)),
        (_drop, "optimizer", ("", "")),
        (_clip, "optimizer", ("", _OWNER)),
        (_halve, "optimizer", ("", _OWNER)),
    ],
)
def test_a_loop_that_handles_gradients_is_exact_or_refused(
    change: Any, zeroes: str, refusals: tuple[str, str], level: int
) -> None:
    results = run_on_ranks(3, _loop, {"level": level, "engine": "fairscale"}, change, zeroes)
    if refusal := refusals[level - 1]:
        assert any(refusal in result for result in results) and all(isinstance(result, str) for result in results)
    else:
        assert _largest_difference(results[0], _loop(None, change, zeroes)) < TOLERANCE["float64"]


def _copied_after_a_step() -> list[str]:
    model, optimizer = vissl_zero.initialize(
        nn.Sequential(nn.Linear(3, 3)), {"type": "SGD"}, {"level": 1, "engine": "fairscale"}
    )
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    return [type(param).__name__ for param in copy.deepcopy(model).parameters()]


def test_the_copy_of_a_model_is_plain() -> None:
    assert run_on_ranks(2, _copied_after_a_step) == [["Parameter"] * 2] * 2


def _used_by_one_rank(level: int) -> str | list[Tensor]:
    torch.manual_seed(1)
    layers: Any = nn.ModuleList(nn.Linear(7, 7) for _ in range(3)).double()
    layers, optimizer = vissl_zero.initialize(
        layers, {"type": "SGD", "lr": 0.1}, {"level": level, "engine": "fairscale"}
    )
    x = torch.ones(2, 7, dtype=torch.float64)
    loss = layers[0](x).square().mean()
    if dist.get_rank() == 0:
        loss = loss + layers[1](x).square().mean() + layers[2](x).square().mean()
    optimizer.backward(loss)
    try:
        optimizer.step()
    except VisslZeroError as error:
        return str(error)
    return [param.detach() for param in layers.parameters()]


def test_layers_that_one_rank_uses_are_refused_at_level_2() -> None:
    """On level 1 they are exact: an absent gradient counts as zero."""
    for told in run_on_ranks(2, _used_by_one_rank, 2):
        assert "the ranks differ in which parameters their losses use" in told
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3)).double()
    x = torch.ones(2, 7, dtype=torch.float64)
    first, *others = (layer(x).square().mean() for layer in layers)
    (first + sum(others) / 2).backward()
    for param, trained in zip(layers.parameters(), run_on_ranks(2, _used_by_one_rank, 1)[1], strict=True):
        assert torch.allclose(param - 0.1 * param.grad, trained, rtol=0, atol=1e-10)
