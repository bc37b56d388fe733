"""Optimizers of every kind on shards, against the optimizer itself on the whole model, in float64."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero
from tests.ranks import run_on_ranks
from vissl_zero.optim.adaptation import Larc
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.whole_tensor import AdamW8bit, MuonAdamW, NorMuonAdamW, Shampoo
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan
from vissl_zero.sharding.engines.torch.strategy import TorchStrategy
from vissl_zero.sharding.offload import layout, streamed_optimizer
from vissl_zero.sharding.update import whole_tensors

TOLERANCE = 1e-10
BATCH = 12


class Net(nn.Module):
    """Widths that do not divide, fewer rows than ranks, a scalar, a tied and a frozen layer."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(20, 20) for _ in range(2)])
        self.frozen = nn.Linear(20, 20).requires_grad_(not is_frozen)
        self.tied = nn.Linear(20, 20, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(self.tied(torch.tanh(self.frozen(x))) * self.scale)


def net(is_frozen: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(is_frozen).double()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


WHOLE_TENSOR = ["muon", "normuon", "shampoo", "adamw_8bit", "lamb", "adafactor", "adamp"]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that tensors of one group lie on several ranks and those of a rank in several groups."""
    matrices = {"params": [p for p in trained(model) if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in trained(model) if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
    optimizer = optimizer_over(name, [matrices, others])
    if name == "schedule_free":
        optimizer.train()
    return optimizer


def optimizer_over(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Options that leave no step to rounding."""
    import timm.optim  # after vissl_zero, which lets torchvision be imported
    from schedulefree import AdamWScheduleFree

    build = {
        "adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
        "nadam": partial(torch.optim.NAdam, eps=1e-3),
        "asgd": torch.optim.ASGD,
        "lion": timm.optim.Lion,
        "schedule_free": partial(AdamWScheduleFree, eps=1e-3),
        "muon": MuonAdamW,
        "normuon": partial(NorMuonAdamW, ns_dtype="float64"),
        "shampoo": partial(Shampoo, eps=1e-3, matrix_eps=1e-3, frequency=2, block_size=16),
        "adamw_8bit": partial(AdamW8bit, eps=1e-3, block_size=32, min_elements=50),
        "lamb": partial(timm.optim.Lamb, max_grad_norm=None, eps=1e-3),
        "adafactor": torch.optim.Adafactor,
        "adamp": partial(timm.optim.AdamP, delta=0.5, eps=1e-3),
    }[name]
    return build(groups, lr=0.01)


def loss_of(model: nn.Module, step: int, part: slice = slice(None)) -> Tensor:
    x = torch.randn(BATCH, 1, 4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    y = torch.arange(BATCH) % 2
    return F.cross_entropy(model(x[part]), y[part])


def train_plainly(
    name: str, num_steps: int, is_frozen: bool = True, clip: float | None = None, accumulation: int = 1
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters, and the optimizer's state, of one process with whole batches."""
    model = net(is_frozen)
    optimizer = optimizer_of(name, model)
    for step in range(num_steps):
        for index in range(accumulation):
            (loss_of(model, step * accumulation + index) / accumulation).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained(model), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: param.detach() for name, param in model.named_parameters(remove_duplicate=False)
    }, optimizer.state_dict()


def train(
    name: str,
    zero: dict[str, Any],
    steps: tuple[int, int],
    load: str | None = None,
    save: str | None = None,
    start: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    is_frozen: bool = True,
) -> dict[str, Tensor]:
    """The same steps, sharded; every rank on its part of each batch.

    Args:
        start: parameters and a state of plain torch's optimizer to begin from.
    """
    whole_tensors.ROUND_ELEMENTS = 1  # where something is on a disk, one tensor of each rank at a time
    layout.CHUNK_ELEMENTS, streamed_optimizer.RECORD_BYTES = 1024, 4096
    model = net(is_frozen)
    if start is not None:
        model.load_state_dict(start[0], strict=False)
    model, optimizer = vissl_zero.initialize(model, optimizer_of(name, model), zero)
    if start is not None:
        optimizer.load_state_dict(copy.deepcopy(start[1]))
    if load is not None:
        optimizer.load(load)
    size = BATCH // torch.distributed.get_world_size()
    part = slice(torch.distributed.get_rank() * size, (torch.distributed.get_rank() + 1) * size)
    for step in range(*steps):
        optimizer.backward(loss_of(model, step, part))
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        optimizer.save(save)
    state = optimizer.full_state()
    optimizer.close()
    return state


def on_disk(folder: Path, *blocks: str) -> dict[str, Any]:
    """What of "optimizer" and "param" rests there."""
    tier = {"device": "nvme", "nvme_path": str(folder)}
    return {f"offload_{block}_config": tier for block in blocks}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() <= b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["adagrad", "nadam", "asgd", "lion", "schedule_free"])
def test_state_that_is_a_number_or_there_from_the_start_goes_through_all_levels(name: str, tmp_path: Path) -> None:
    """Of a scalar parameter too, whose values and counters look alike."""
    expected, _ = train_plainly(name, 8, is_frozen=False)
    cuts = [(2, 1), (3, 3), (1, 0), (2, 2)]
    for index, (world_size, level) in enumerate(cuts):
        folders = None if index == 0 else str(tmp_path), None if index == 3 else str(tmp_path)
        got = run_on_ranks(
            world_size, train, name, {"level": level}, (2 * index, 2 * index + 2), *folders, None, False
        )[0]
    assert distance(got, expected) < TOLERANCE


@pytest.mark.timeout(120)
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("name", ["nadam", "adagrad", "lamb", "adafactor"])
def test_state_of_the_plain_optimizer_is_taken_over(name: str, level: int) -> None:
    start, expected = train_plainly(name, 3), train_plainly(name, 6)[0]
    got = run_on_ranks(2, train, name, {"level": level}, (3, 6), None, None, start)[0]
    assert distance(got, expected) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", WHOLE_TENSOR)
def test_an_optimizer_of_whole_tensors_is_itself_at_every_level_on_any_number_of_ranks(name: str) -> None:
    """With clipping and accumulation; muon gives the same bits of bfloat16 if gradients agree to 1e-13."""
    expected, _ = train_plainly(name, 4, clip=0.5, accumulation=2)
    for world_size, level in [(1, 3), (2, 1), (3, 2), (2, 3), (3, 3), (2, 0)]:
        zero = {"level": level, "clip_grad": 0.5, "gradient_accumulation_steps": 2}
        got = run_on_ranks(world_size, train, name, zero, (0, 8))[0]
        assert distance(got, expected) < TOLERANCE, (world_size, level)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", WHOLE_TENSOR)
def test_state_of_whole_tensors_goes_through_all_levels(name: str, tmp_path: Path) -> None:
    """Factored second moments, which are shaped like no parameter, and counters of groups among it."""
    expected, _ = train_plainly(name, 10, is_frozen=False)
    cuts = [
        ({"level": 1}, 2),
        ({"level": 3}, 3),
        ({"level": 0}, 1),
        ({"level": 3, "shard_group_size": 2}, 4),
        ({"level": 2}, 2),
    ]
    for index, (zero, world_size) in enumerate(cuts):
        folders = None if index == 0 else str(tmp_path), None if index == 4 else str(tmp_path)
        steps = (2 * index, 2 * index + 2)
        got = run_on_ranks(world_size, train, name, zero, steps, *folders, None, False)[0]
    assert distance(got, expected) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [*WHOLE_TENSOR, "lion", "nadam", "asgd"])
def test_state_and_parameters_rest_on_a_disk(name: str, tmp_path: Path) -> None:
    """With clipping and accumulation, in a run that resumes elsewhere between disk and memory."""
    expected, _ = train_plainly(name, 8, clip=0.5, accumulation=2)
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    both = {"level": 3, **on_disk(disk, "optimizer", "param")}
    cuts = [
        (both, 2),
        ({"level": 2, **on_disk(disk, "optimizer")}, 3),
        ({"level": 3, "shard_group_size": 2, **on_disk(disk, "param")}, 4),
        (both, 1),
    ]
    for index, (zero, world_size) in enumerate(cuts):
        folders = None if index == 0 else str(saved), None if index == 3 else str(saved)
        settings = {"clip_grad": 0.5, "gradient_accumulation_steps": 2, **zero}
        got = run_on_ranks(world_size, train, name, settings, (4 * index, 4 * index + 4), *folders)[0]
    assert distance(got, expected) < TOLERANCE
    assert not list(disk.iterdir())


def _adapted(places: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """LAMB on gradients that LARC has changed, which depend on the parameters, in several places."""
    found = []
    for place in places:
        model = net()
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        sharded = TorchStrategy().shard(
            model,
            [ParamGroup("all", tuple(names), False, False, 0.1)],
            lambda groups: (optimizer_over("lamb", groups), Larc(trust_coefficient=0.02, clip=False)),
            ShardingPlan(precision=Precision("float64", None, "float64", "float64"), **place),
            torch.device("cpu"),
        )
        for step in range(3):
            for group in sharded.optimizer.param_groups:
                group["lr"] = 0.02
            with sharded.micro_batch(is_last=True):
                sharded.backward(loss_of(sharded.model, step))
            sharded.step()
            sharded.zero_grad()
        found.append(sharded.full_state())
        sharded.close()
    return found


@pytest.mark.timeout(60)
def test_gradients_on_a_disk_are_adapted_before_full_tensors_are_updated(tmp_path: Path) -> None:
    on_nvme = OffloadPlan("nvme", nvme_path=str(tmp_path))
    places = [{"level": 1}, {"level": 3, "offload_params": on_nvme}]
    in_memory, on_the_disk = run_on_ranks(2, _adapted, places)[0]
    assert distance(in_memory, on_the_disk) < TOLERANCE
    assert distance(in_memory, {name: p.detach() for name, p in net().named_parameters()}) > 1e-4


def _eight_bit_state(zero: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """After four steps, the state of the tensors that this rank updates."""
    model = net()
    model, optimizer = vissl_zero.initialize(model, optimizer_of("adamw_8bit", model), zero)
    size = BATCH // torch.distributed.get_world_size()
    part = slice(torch.distributed.get_rank() * size, (torch.distributed.get_rank() + 1) * size)
    for step in range(4):
        optimizer.backward(loss_of(model, step, part))
        optimizer.step()
        optimizer.zero_grad()
    base = optimizer._sharded.optimizer
    found = {name: dict(base.state[shard.local]) for name, shard in base.owned.items()}
    optimizer.close()
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world_size", "level"), [(2, 1), (3, 2), (3, 3), (4, 3)])
def test_state_of_eight_bits_is_the_same_bit_for_bit(world_size: int, level: int, tmp_path: Path) -> None:
    _, expected = train_plainly("adamw_8bit", 4)
    numbers = [number for group in expected["param_groups"] for number in group["params"]]
    model = net()
    order = [param for group in optimizer_of("adamw_8bit", model).param_groups for param in group["params"]]
    names = {param: name for name, param in model.named_parameters()}
    zero = {"level": level, **(on_disk(tmp_path, "optimizer") if world_size == 4 else {})}
    states = [state for rank in run_on_ranks(world_size, _eight_bit_state, zero) for state in rank.items()]
    assert len(states) == len(order) and len(dict(states)) == len(order)
    num_coded = 0
    for number, param in zip(numbers, order, strict=True):
        for key, value in expected["state"][number].items():
            got = dict(states)[names[param]][key]
            if isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.float32):
                num_coded += value.numel() * (value.dtype == torch.uint8)
                assert torch.equal(value, got), (names[param], key)
    assert num_coded == 2 * 2 * 20 * 20  # two moments of two matrices


def _sent(level: int) -> float:
    """What a rank sends for full tensors in a step, over what it sends in an all-reduce of all gradients."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]).double()
    model, optimizer = vissl_zero.initialize(model, {"type": "Muon", "lr": 0.1}, {"level": level})
    base = optimizer._sharded.optimizer
    before = base.num_sent
    optimizer.backward(model(torch.ones(2, 64, dtype=torch.float64)).sum())
    optimizer.step()
    return (base.num_sent - before) / (2 * (4 * 64 * 64 * 8) / 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("level", "most"), [(1, 1 / 2), (2, 1 / 2), (3, 3 / 4)])
def test_traffic_of_whole_tensors_beside_ddp(level: int, most: float) -> None:
    """One Nth of what DDP moves, on N ranks, or 3/2 of it. One percent: flags of absent gradients, and padding."""
    shares = run_on_ranks(2, _sent, level)
    assert 0.9 * most < sum(shares) / 2 < 1.01 * most


def _state_bytes(level: int) -> tuple[int, int]:
    """Of this rank: optimizer state, and memory of full tensors between steps."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)]).double()
    model, optimizer = vissl_zero.initialize(model, {"type": "LAMB", "lr": 0.1}, {"level": level})
    model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    optimizer.step()
    base = optimizer._sharded.optimizer
    return optimizer.ledger().optimizer, sum(shard.local.untyped_storage().nbytes() for shard in base.owned.values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [1, 3])
def test_a_rank_holds_its_part_of_the_state(level: int) -> None:
    assert run_on_ranks(2, _state_bytes, level) == [(2 * 2 * 16 * 16 * 8, 0)] * 2  # two moments of two of four matrices


def _same_state(level: int) -> float:
    """Four steps, a restart from ``state_dict`` in the middle; and four without."""
    results = []
    for is_restarted in (False, True):
        model = net()
        model, optimizer = vissl_zero.initialize(model, optimizer_of("adafactor", model), {"level": level})
        for step in range(4):
            if is_restarted and step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                model = net()
                model, optimizer = vissl_zero.initialize(model, optimizer_of("adafactor", model), {"level": level})
                optimizer.load_state_dict(saved)
            optimizer.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.full_parameters() as params:
            results.append({name: param.clone() for name, param in params.items()})
    return distance(*results)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_state_of_whole_tensors_of_a_rank_resumes(level: int) -> None:
    assert max(run_on_ranks(2, _same_state, level)) < TOLERANCE


def _evaluated(level: int) -> tuple[float, float, bool]:
    """Of a schedule-free optimizer: distances of the weights to use, and of those after another step."""
    from schedulefree import AdamWScheduleFree

    options = {"lr": 0.05, "eps": 1e-3}
    plain, images = net(), torch.ones(2, 1, 4, 4).double()
    reference = AdamWScheduleFree(trained(plain), **options)
    reference.train()
    model, optimizer = vissl_zero.initialize(net(), {"type": "ScheduleFreeAdamW", **options}, {"level": level})

    def step_both(step: int) -> None:
        loss_of(plain, step).backward()
        reference.step()
        reference.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()

    def values() -> dict[str, Tensor]:
        with optimizer.full_parameters() as params:
            return {name: param.clone() for name, param in params.items()}

    for step in range(3):
        step_both(step)
    before = values()
    reference.eval()
    with optimizer.evaluated():
        of_average = distance(values(), dict(plain.named_parameters(remove_duplicate=False)))
        is_used = bool((model(images) - plain(images)).abs().max() < TOLERANCE)
    reference.train()
    is_restored = all(torch.equal(before[name], param) for name, param in values().items())
    step_both(3)
    return of_average, distance(values(), dict(plain.named_parameters(remove_duplicate=False))), is_used and is_restored


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_weights_to_use_of_a_schedule_free_optimizer(level: int) -> None:
    for of_average, after, is_right in run_on_ranks(2, _evaluated, level):
        assert max(of_average, after) < TOLERANCE
        assert is_right
