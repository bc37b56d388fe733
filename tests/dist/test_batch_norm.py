"""Batch norm across ranks equals one process with all rows, to 1e-12 in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.dist.case import Case, Outcome
from tests.dist.plain import train_plainly
from tests.dist.training import shard, train_sharded
from tests.ranks import RankError, run_on_ranks
from vissl_zero.errors import VisslZeroError
from vissl_zero.models.model import Unit
from vissl_zero.resolve.resolved import OffloadPlan, Precision
from vissl_zero.sharding.model.batch_norm import (
    BatchNorm,
    batch_norm_group,
    convert_batch_norms,
    frozen_statistics,
    synchronize_,
)

NUM_FEATURES = 5
PLACES = {1: (), 2: (4, 3), 3: (2, 3, 2)}
CLASSES = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _layer(num_dims: int, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(3)
    layer = CLASSES[num_dims](NUM_FEATURES, **options).double()
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def _rows(num_dims: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Inputs far from zero, where naive sums of squares lose digits, and output gradients."""
    generator = torch.Generator().manual_seed(num_rows)
    shape = (num_rows, NUM_FEATURES, *PLACES[num_dims])
    x, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return x * 3 + 100, grad


def _run(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Two batches forward and backward, then evaluation; what a training run could see of the layer."""
    for _ in range(2):
        x = x.detach().requires_grad_()
        output = layer(x)
        output.backward(grad)
    seen = {"output": output.detach(), "grad": x.grad, "eval": layer.eval()(x).detach()}
    seen |= {f"grad of {name}": param.grad for name, param in layer.named_parameters()}
    return seen | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def _run_on_rank(num_dims: int, options: dict[str, Any], counts: list[int], ranks_per_group: int) -> dict[str, Tensor]:
    model = nn.Sequential(_layer(num_dims, options))
    group = batch_norm_group(ranks_per_group, 30)
    assert convert_batch_norms(model, group, is_recomputed=False, only_marked=False) == 1
    assert isinstance(model[0], BatchNorm)
    start = sum(counts[: dist.get_rank()])
    mine = slice(start, start + counts[dist.get_rank()])
    x, grad = _rows(num_dims, sum(counts))
    return _run(model[0], x[mine], grad[mine])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("num_dims", "options", "counts"),
    [
        (1, {}, [3, 4]),
        (2, {}, [5, 1, 2]),
        (2, {}, [4, 0, 3]),
        (2, {"momentum": None}, [2, 2, 2, 2]),
        (2, {"affine": False}, [3, 2]),
        (2, {"track_running_stats": False}, [3, 2]),
        (3, {"eps": 1e-2, "momentum": 0.3}, [1, 4]),
    ],
)
def test_equals_one_process_with_all_rows(num_dims: int, options: dict[str, Any], counts: list[int]) -> None:
    expected = _run(_layer(num_dims, options), *_rows(num_dims, sum(counts)))
    answers = run_on_ranks(len(counts), _run_on_rank, num_dims, options, counts, -1)
    for name, whole in expected.items():
        parts = [answer[name] for answer in answers]
        if name in ("output", "grad", "eval"):
            found = torch.cat(parts)
        else:
            found = torch.stack(parts).sum(0) if name.startswith("grad of") else parts[0]
            assert name.startswith("grad of") or all(torch.equal(part, found) for part in parts), name
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.timeout(60)
def test_groups_share_statistics_and_gradients_among_their_own_ranks_only() -> None:
    counts = [2, 3, 4, 1]
    answers = run_on_ranks(4, _run_on_rank, 2, {}, counts, 2)
    x, grad = _rows(2, sum(counts))
    for ranks, rows in (((0, 1), slice(5)), ((2, 3), slice(5, None))):
        expected = _run(_layer(2, {}), x[rows], grad[rows])
        for name in ("output", "grad"):
            found = torch.cat([answers[rank][name] for rank in ranks])
            torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12)
        for rank in ranks:
            for name in ("running_mean", "running_var"):
                torch.testing.assert_close(answers[rank][name], expected[name], rtol=1e-12, atol=1e-12)


def _half_on_rank(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    layer = _layer(2, {}).float()
    synchronize_(layer, dist.group.WORLD)
    x, grad = _rows(2, 8)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    x = (x[mine] - 100).to(dtype).requires_grad_()
    output = layer(x)
    output.backward(grad[mine].to(dtype))
    return output.detach(), x.grad, layer.running_var


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_normalized_with_float32_statistics(dtype: torch.dtype) -> None:
    half, single = (run_on_ranks(2, _half_on_rank, kind)[0] for kind in (dtype, torch.float32))
    assert half[0].dtype == half[1].dtype == dtype
    assert half[2].dtype == torch.float32
    for found, expected in zip(half, single, strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


# Narrow enough that batch norm keeps the masters' format, and wide enough to be compared.
NARROW = Precision(master="float64", compute="float32", reduce="float64")
NARROW_CASES = {
    "larc": Case(optimizer="larc", clip=1.0, num_micro_batches=2, batch_sizes=(11, 8)),
    "adamw": Case(optimizer="adamw", norm="local_batch", frozen_steps=2, undecayed=True, ema=True, lr=0.01),
    "adam": Case(optimizer="adam", unused=True, lr=0.01),
}
_reference = cache(train_plainly)


def _train_narrow(name: str, level: int, folder: str, changes: dict[str, Any]) -> tuple[Outcome, int]:
    tiers = {key: replace(tier, nvme_path=folder) for key, tier in changes.items() if isinstance(tier, OffloadPlan)}
    norm = shard(NARROW_CASES[name], level, precision=NARROW).model.get_submodule("trunk.blocks.0.1")
    assert type(norm.weight.data) is Tensor, "batch norm is replicated"  # not a DTensor
    outcome = train_sharded(NARROW_CASES[name], level, changes | tiers | {"precision": NARROW})
    return outcome, norm.weight.numel()


NVME = OffloadPlan("nvme")
NARROW_RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("larc", 2, {}),
    ("larc", 3, {"deterministic": True}),
    ("larc", 4, {"shard_group_size": 2}),
    ("adamw", 2, {"checkpoint_every": 1}),
    ("adamw", 3, {"offload_optimizer": NVME}),
    ("adam", 2, {"needs_whole_tensors": True}),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "world_size", "level", "changes"),
    [
        *(pytest.param(*run[:2], 3, run[2]) for run in NARROW_RUNS),
        *(pytest.param(*run[:2], level, run[2], marks=pytest.mark.slow) for run in NARROW_RUNS for level in (1, 2)),
        ("adamw", 2, 3, {"offload_optimizer": NVME, "offload_params": NVME}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_batch_norm_of_a_narrower_model_trains_whole_on_every_rank(
    name: str, world_size: int, level: int, changes: dict[str, Any], tmp_path: Any
) -> None:
    case = NARROW_CASES[name]
    reference = _reference(case, num_ranks=world_size if case.norm == "local_batch" else 1)
    outcome, num_elements = run_on_ranks(world_size, _train_narrow, name, level, str(tmp_path), changes)[0]
    assert num_elements == len(reference.state["trunk.blocks.0.1.weight"])
    distance = outcome.relative_distance(reference)
    print(distance)
    assert 0 < max(distance.values()) < 2e-5, distance


def _read_gradient() -> None:
    model, optimizer = vissl_zero.initialize(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).bfloat16(), {"type": "SGD", "lr": 0.1}, {"level": 3}
    )
    optimizer.backward(model(torch.ones(2, 3, 4, 4, dtype=torch.bfloat16)).square().mean())
    with pytest.raises(VisslZeroError, match="batch norm in half precision, was read"):
        model[1].weight.grad.norm()


def test_a_loop_is_not_shown_a_gradient_that_differs_between_ranks() -> None:
    run_on_ranks(2, _read_gradient)


class _Activated(nn.BatchNorm1d):
    """Has a layer of its own, as some of timm's do, and gives more than a tensor."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.PReLU()

    def forward(self, input: Tensor) -> Any:
        return self.act(super().forward(input)), None


class _Unpacked(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input), None


class _First(nn.Module):
    def forward(self, given: Any) -> Tensor:
        return given[0]


def _losses_of(kind: type[nn.Module], level: int, has_second: bool) -> list[float]:
    """A second optimizer trains the batch norm, if there is one."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), kind(8), *([_First()] * (kind is not nn.BatchNorm1d)), nn.Linear(8, 3)]
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(dist.get_rank())
    mine = [*model[0].parameters(), *model[-1].parameters(), *([] if has_second else model[1].parameters())]
    model, optimizer = vissl_zero.initialize(model, torch.optim.SGD(mine, lr=0.5), {"level": level, "bf16": True})
    second = torch.optim.SGD(model[1].parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        losses.append(model(torch.randn(16, 6, generator=generator)).square().mean())
        optimizer.backward(losses[-1])
        if has_second:
            second.step()
            second.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "has_second"), [(nn.BatchNorm1d, True), (_Activated, False), (_Unpacked, False), (_Unpacked, True)]
)
def test_unusual_batch_norms_in_half_precision_train_as_at_level_0(kind: type[nn.Module], has_second: bool) -> None:
    expected = run_on_ranks(2, _losses_of, kind, 0, has_second)[0]
    assert expected[2] < 0.9 * expected[0]
    for level in (1, 3):
        losses = run_on_ranks(2, _losses_of, kind, level, has_second)[0]
        assert losses == pytest.approx(expected, rel=0.02), level


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.norm.bias = self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class _TwoNames(nn.Module):
    """A batch norm that stands in a Sequential too, as where an encoder takes over torchvision's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.stem = nn.Sequential(self.linear, self.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x)


def _tied_across_blocks() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)]
    blocks[2][1].weight, blocks[1][1] = blocks[0][1].weight, blocks[0][1]
    return nn.Sequential(*blocks)


def _losses_of_a_whole_model(build: Callable[[], nn.Module], level: int) -> list[float]:
    torch.manual_seed(0)
    model, generator = build(), torch.Generator().manual_seed(dist.get_rank())
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.5}, {"level": level, "bf16": True})
    losses = []
    for _ in range(3):
        loss = model(torch.randn(16, 6, generator=generator)).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.timeout(60)
def test_a_model_that_is_a_batch_norm_trains_in_half_precision() -> None:
    build = partial(nn.BatchNorm1d, 6)
    expected = run_on_ranks(2, _losses_of_a_whole_model, build, 0)[0]
    assert expected[2] < 0.7 * expected[0]
    for level in (1, 3):
        assert run_on_ranks(2, _losses_of_a_whole_model, build, level)[0] == pytest.approx(expected, rel=0.01), level


@pytest.mark.timeout(60)
@pytest.mark.parametrize("build", [_TwoNames, _tied_across_blocks])
def test_a_batch_norm_in_two_places_trains_in_half_precision(build: Callable[[], nn.Module]) -> None:
    expected = run_on_ranks(2, _losses_of_a_whole_model, build, 0)[0]
    assert expected[2] < 0.9 * expected[0]
    for level in (1, 3):
        assert run_on_ranks(2, _losses_of_a_whole_model, build, level)[0] == pytest.approx(expected, rel=0.02), level


@pytest.mark.timeout(60)
def test_a_batch_norm_tied_to_another_layer_is_refused_in_half_precision() -> None:
    with pytest.raises(
        RankError, match=r"norm: must share no parameter with a layer that is no batch norm in half precision"
    ):
        run_on_ranks(2, _losses_of_a_whole_model, _Tied, 1)


def _recompute_on_rank(ranks_per_group: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    seen = []
    for checkpoint in (False, True):
        unit = Unit(_layer(2, {}))
        convert_batch_norms(unit, batch_norm_group(ranks_per_group, 30), is_recomputed=True, only_marked=False)
        unit.checkpoint = checkpoint
        x = _rows(2, 4)[0].requires_grad_()
        outputs = unit([x, x[:2] * 2])
        sum(output.sin().sum() for output in outputs).backward()
        grads = {"x": x.grad} | {name: param.grad for name, param in unit.named_parameters()}
        seen.append(grads | dict(unit.named_buffers()))
    return seen[0], seen[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks_per_group", [0, -1])
def test_a_recomputed_batch_counts_once(ranks_per_group: int) -> None:
    plain, recomputed = run_on_ranks(2, _recompute_on_rank, ranks_per_group)[0]
    assert int(plain["0.num_batches_tracked"]) == 2
    for name, tensor in plain.items():
        assert torch.equal(tensor, recomputed[name]), name


def _group_of_two_in_three() -> None:
    batch_norm_group(2, 30)


def test_a_group_size_that_does_not_divide_the_world_is_refused() -> None:
    with pytest.raises(RankError, match="must divide the number of ranks, 3"):
        run_on_ranks(3, _group_of_two_in_three)


@pytest.mark.parametrize("is_ours", [False, True])
def test_frozen_statistics_stay_while_batches_are_normalized_by_their_own(is_ours: bool) -> None:
    layer, rows = nn.BatchNorm1d(NUM_FEATURES).double(), torch.randn(4, NUM_FEATURES, dtype=torch.float64)
    if is_ours:
        synchronize_(layer, None)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with frozen_statistics(layer):
        inside = layer(rows)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert torch.equal(inside, layer(rows))
    assert not torch.equal(layer.running_mean, before["running_mean"])


def _convert_timm(is_recomputed: bool) -> None:
    """timm's batch norm with an activation, as it is built, among two ranks or counted once under recomputation."""
    import timm.layers

    layer = timm.layers.BatchNormAct2d(4).double()
    rows = torch.randn(12, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = layer(rows).detach()
    mean = layer.running_mean.clone()
    layer.reset_running_stats()
    group = None if is_recomputed else dist.group.WORLD
    assert convert_batch_norms(nn.Sequential(layer), group, is_recomputed=is_recomputed, only_marked=False) == 1
    mine = slice(None) if is_recomputed else slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    torch.testing.assert_close(layer(rows[mine]).detach(), expected[mine], rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_timms_batch_norm_with_activation_is_converted(is_recomputed: bool) -> None:
    run_on_ranks(2, _convert_timm, is_recomputed)


def _train_timm(level: int | None) -> dict[str, Tensor]:
    """timm's batch norm with an activation inside, on this rank's rows; plain on all rows if ``level`` is None."""
    import timm.layers

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.BatchNormAct2d(4), nn.Conv2d(4, 2, 3)).double()
    rows = torch.randn(3, 12, 3, 7, 7, dtype=torch.float64)
    plain = torch.optim.SGD(model.parameters(), 0.1)
    if level is not None:
        model = timm.layers.convert_sync_batchnorm(model)
        rows = rows.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        model, plain = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": level})
    for x in rows:
        model(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
    return dict(model.state_dict()) if level is None else plain.full_state()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_timms_synchronized_batch_norm_with_activation_is_one_process_with_all_rows(level: int) -> None:
    expected = _train_timm(None)
    found = run_on_ranks(2, _train_timm, level)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
