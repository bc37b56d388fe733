"""The order of a step, on full parameters in one process; many ranks are in tests/dist."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vissl_zero.optim.adaptation import Larc, Lars
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.precision import LossScale
from vissl_zero.sharding.state.shard import Shard
from vissl_zero.sharding.update.stepper import Clipping, Stepper, dots


def _shards(**grads: list[float] | None) -> list[Shard]:
    shards = []
    for name, grad in grads.items():
        param = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        param.grad = None if grad is None else torch.tensor(grad, dtype=torch.float64)
        shards.append(Shard(name, param, param, param.shape))
    return shards


def _stepper(shards: list[Shard], lr: float = 1.0, weight_decay: float = 0.0, **changes: object) -> Stepper:
    group = {"params": [shard.local for shard in shards], "lr": lr, "weight_decay": weight_decay}
    settings = {"adaptation": None, "clipping": None, "loss_scale": None, "group": None} | changes
    return Stepper(shards, torch.optim.SGD([group], momentum=0.9), **settings)  # type: ignore[arg-type]


def test_the_norm_is_of_unscaled_gradients_before_clipping() -> None:
    shards = _shards(a=[3.0 * 8, 0.0], b=[0.0, 4.0 * 8])
    result = _stepper(shards, clipping=Clipping(2.5), loss_scale=LossScale(scale=8.0)).step(frozen=())
    assert (float(result.grad_norm), result.skipped, result.loss_scale) == (5.0, False, 8.0)
    assert shards[0].local.tolist() == pytest.approx([3.0 - 1.5, 4.0], abs=1e-5)
    assert shards[1].local.tolist() == pytest.approx([3.0, 4.0 - 2.0], abs=1e-5)


def test_a_small_norm_is_clipped_as_torch_clips_it() -> None:
    """What is added to the norm counts where the norm is as small."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    param.grad = torch.tensor([3e-6, 4e-6], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([param], 1e-6)
    factor = Clipping(1e-6).factors(("a",), torch.tensor([25e-12], dtype=torch.float64))
    torch.testing.assert_close(param.grad, factor * torch.tensor([3e-6, 4e-6], dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("per", "norms"),
    [
        ("model", [13.0] * 5),
        ("tensor", [3.0, 12.0, 4.0, 0.0, 0.0]),
        ("part", [3.0, 160.0**0.5, 160.0**0.5, 0.0, 0.0]),  # a head is a part, and so is what stands alone
    ],
)
def test_gradients_are_clipped_together_by_part_or_one_by_one(per: str, norms: list[float]) -> None:
    names = ("trunk.blocks.0.weight", "heads.0.0.weight", "heads.0.1.bias", "heads.1.0.weight", "heads")
    clipping = Clipping.of(ShardingPlan(0, clip_grad=3.5, clip_grad_per=per))
    assert clipping is not None and Clipping.of(ShardingPlan(0)) is None
    found = clipping.factors(names, torch.tensor([9.0, 144.0, 16.0, 0.0, 0.0], dtype=torch.float64))
    assert found.expand(5).tolist() == pytest.approx([min(1.0, 3.5 / max(norm, 1e-9)) for norm in norms], rel=1e-5)
    apart = Clipping(1.0, "part").factors(("trunk.a", "trunk.b", "temperature"), torch.tensor([9.0, 16.0, 4.0]))
    assert apart.tolist() == pytest.approx([0.2, 0.2, 0.5])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_skip_only_under_loss_scaling(bad: float) -> None:
    shards, scale = _shards(a=[bad, 1.0], b=[1.0, 1.0]), LossScale(scale=8.0)
    result = _stepper(shards, loss_scale=scale).step(frozen=())
    assert result.skipped and scale.scale == 4.0
    assert shards[1].local.tolist() == [3.0, 4.0]
    assert not _stepper(_shards(a=[bad, 1.0])).step(frozen=()).skipped


@pytest.mark.parametrize(("scale", "is_stuck"), [(2.0, False), (1.0, True), (0.5, True)])
def test_a_step_that_overflows_names_its_gradients_and_is_stuck_once_nothing_is_scaled(
    scale: float, is_stuck: bool
) -> None:
    shards = _shards(a=[1.0, 1.0], b=[float("inf"), 1.0], c=[0.0, float("nan")])
    result = _stepper(shards, loss_scale=LossScale(scale=scale)).step(frozen={"a"})
    assert (result.nonfinite_gradients(), result.is_stuck) == (["b", "c"], is_stuck)
    fine = _stepper(_shards(a=[1.0, 1.0]), loss_scale=LossScale(scale=scale)).step(frozen=())
    assert (fine.nonfinite_gradients(), fine.is_stuck) == ([], False)


def test_products_of_pairs_where_some_are_empty() -> None:
    left, right, none = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), torch.zeros(0, 1)
    assert dots([left, none, right], [right, none, right]).tolist() == [11.0, 0.0, 25.0]
    assert dots([left.double()], [right]).dtype == torch.float64


def test_lars_scales_the_decayed_gradient_and_leaves_a_missing_one() -> None:
    shards = _shards(a=[0.0, 1.0], b=None)
    _stepper(shards, weight_decay=0.1, adaptation=Lars(eta=0.3, eps=0.0)).step(frozen=())
    rate = 0.3 * 5 / (0.3**2 + 1.4**2) ** 0.5
    assert shards[0].local.tolist() == pytest.approx([3.0 - rate * 0.3, 4.0 - rate * 1.4])
    assert shards[1].local.tolist() == [3.0, 4.0]


def test_frozen_and_missing_gradients_neither_decay_nor_move_nor_count() -> None:
    shards = _shards(moving=[3.0, 4.0], frozen=[100.0, 100.0], missing=None)
    stepper = _stepper(shards, weight_decay=0.5)
    result = stepper.step(frozen={"frozen"})
    assert float(result.grad_norm) == 5.0
    assert shards[0].local.tolist() == [3.0 - 4.5, 4.0 - 6.0]
    assert shards[1].local.tolist() == shards[2].local.tolist() == [3.0, 4.0]
    assert list(stepper._optimizer.state) == [shards[0].local]


def test_adaptation_takes_over_weight_decay_for_the_step_only() -> None:
    shards = _shards(a=[0.0, 1.0])
    stepper = _stepper(shards, weight_decay=0.1, adaptation=Larc(trust_coefficient=0.3, eps=0.0))
    stepper.step(frozen=())
    rate = 0.3 * 5 / (1 + 0.1 * 5)
    assert shards[0].local.tolist() == pytest.approx([3.0 - rate * 0.3, 4.0 - rate * 1.4])
    assert stepper._optimizer.param_groups[0]["weight_decay"] == 0.1


def test_clipping_comes_before_adaptation() -> None:
    shards = _shards(a=[0.0, 100.0])
    _stepper(shards, clipping=Clipping(1.0), weight_decay=0.1, adaptation=Larc(trust_coefficient=0.3, eps=0.0)).step(
        frozen=()
    )
    rate = 0.3 * 5 / (1 + 0.1 * 5)
    assert shards[0].local.tolist() == pytest.approx([3.0 - rate * 0.3, 4.0 - rate * 1.4])


@pytest.mark.parametrize("adaptation", [None, Larc(eps=0.0)])
def test_changes_that_are_noted_are_those_of_this_step(adaptation: Larc | None) -> None:
    shards = _shards(a=[0.0, 100.0], b=[0.0, 1.0], c=None)
    shards[0].noted = []
    stepper = _stepper(shards, clipping=Clipping(1.0), adaptation=adaptation)
    for _ in range(2):
        stepper.step(frozen=())
        assert shards[0].noted is not None and len(shards[0].noted) == 1
    assert shards[0].grad().tolist() == [0.0, 100.0], "left to the update"
    assert shards[1].grad().tolist() != [0.0, 1.0]


def test_nothing_to_move_is_no_error() -> None:
    shards = _shards(a=None)
    result = _stepper(shards, clipping=Clipping(1.0), adaptation=Larc(), loss_scale=LossScale()).step(frozen=())
    assert float(result.grad_norm) == 0.0 and not result.skipped


@pytest.mark.parametrize("has_first", [True, False])
def test_a_gradient_that_only_other_ranks_have_is_zero_here(has_first: bool, group: dist.ProcessGroup) -> None:
    shards = _shards(a=[1.0, 2.0] if has_first else None, b=None, c=None)
    _stepper(shards, group=group)._agree_on_missing(shards, torch.tensor([1.0, 2.0, 0.0]))
    grads = [None if shard.local.grad is None else shard.local.grad.tolist() for shard in shards]
    assert grads == [[1.0, 2.0] if has_first else [0.0, 0.0], [0.0, 0.0], None]
