"""Training state on the CPU or on NVMe trains the same model as in place: every pair of tiers, level and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import vissl_zero
from tests.dist.delayed_streams import Stream, Streams
from tests.ranks import run_on_ranks
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.errors import ConfigError, VisslZeroError
from vissl_zero.launch import worker
from vissl_zero.resolve.resolved import OffloadPlan
from vissl_zero.sharding.engines.torch import fully_sharded
from vissl_zero.sharding.engines.torch import strategy as torch_strategy
from vissl_zero.sharding.offload import layout, streamed_optimizer
from vissl_zero.sharding.offload.block_file import OffloadError
from vissl_zero.sharding.torch_private import group_of, shard_data, unit_state

NUM_STEPS, ACCUMULATION = 20, 2
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "larc": {"type": "LARC", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02},
    "adamw": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4},
    "lion": {"type": "Lion", "lr": 1e-3, "weight_decay": 0.1},
}


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    layers = [nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 51), nn.Tanh(), nn.Linear(51, 3)]
    return nn.Sequential(*layers).to(dtype)


def _build(optimizer: str, level: int, tiers: dict[str, Any], dtype: torch.dtype) -> Any:
    # Records of one kibi-element: shards are cut, and small ones share a record.
    streamed_optimizer.RECORD_BYTES = 4096
    layout.CHUNK_ELEMENTS = 1024
    zero = {"level": level, "clip_grad": 0.5, "gradient_accumulation_steps": ACCUMULATION, **tiers}
    zero |= {"wrap_threshold": 1000} if level == 3 else {}
    return vissl_zero.initialize(_model(dtype), OPTIMIZERS[optimizer], zero)


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        for index in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(step * ACCUMULATION + index)
            images = torch.randn(8, 40, generator=generator, dtype=torch.float64).to(dtype)
            images = images.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
            optimizer.backward(model(images).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def _cloned(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _cloned(value) for key, value in tree.items()}
    return tree


def _distance(a: Any, b: Any) -> float:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max((_distance(a[key], b[key]) for key in a), default=0.0)
    return float((a - b).abs().max()) if isinstance(a, Tensor) and a.numel() else 0.0


def _compare(optimizer: str, level: int, pairs: list[dict[str, Any]], dtype: torch.dtype) -> list[float]:
    """Distance of parameters and optimizer state from those without offload, after 20 steps and a resume after 9."""
    model, plain = _build(optimizer, level, {}, dtype)
    _train(model, plain, range(NUM_STEPS))
    expected = plain.state_dict()
    found = []
    for tiers in pairs:
        model, first = _build(optimizer, level, tiers, dtype)
        _train(model, first, range(9))
        saved = _cloned(first.state_dict())
        model, second = _build(optimizer, level, tiers, dtype)
        _train(model, second, range(2))  # of another run: all of it must be forgotten
        second.load_state_dict(saved)
        _train(model, second, range(9, NUM_STEPS))
        state = second.state_dict()
        found.append(_distance(state["params"], expected["params"]))
        found.append(_distance(state["optimizer"]["state"], expected["optimizer"]["state"]))
        first.close()
        second.close()
    return found


def _tier(device: str, folder: Path, **keys: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {}), **keys}


OFTEN = ("adamw", "larc")


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("optimizer", "level"),
    # Level 3 is the slowest: the slow tests take it with one optimizer that has state and one that needs layers whole.
    [
        pytest.param(name, level, marks=pytest.mark.soak if level == 3 and name not in OFTEN else pytest.mark.slow)
        for name, level in product(OPTIMIZERS, (1, 2, 3))
    ],
)
def test_equals_no_offload(optimizer: str, level: int, tmp_path: Path) -> None:
    pairs: list[dict[str, Any]] = [{"offload_optimizer_config": _tier("nvme", tmp_path, fast_init=level == 1)}]
    pairs.append({"offload_optimizer_config": _tier("cpu", tmp_path)})
    if level == 3:
        cpu = {"offload_param_config": _tier("cpu", tmp_path, pin_memory=False)}
        nvme = {"offload_param_config": _tier("nvme", tmp_path, pin_memory=False)}
        some_in_cpu = {"offload_param_config": _tier("nvme", tmp_path, max_in_cpu=1600, fast_init=True)}
        pairs += [params | state for params in (cpu, nvme) for state in ({}, *pairs[:2])]
        pairs.append(some_in_cpu | pairs[0])
    distances = run_on_ranks(2, _compare, optimizer, level, pairs, torch.float64, timeout_s=80)
    assert max(map(max, distances)) < 1e-10, distances
    assert list(tmp_path.iterdir()) == [], "files are gone with the optimizers"


@contextmanager
def _host_shards() -> Iterator[None]:
    """Keep master copies apart from what the model computes with, as they are with a GPU."""
    with (
        patch.object(torch_strategy, "keeps_parameters_whole", lambda *_: False),
        patch.object(fully_sharded, "needs_host_shards", lambda plan, _: plan.offload_optimizer.device != "none"),
    ):
        yield


def _compare_with_host_shards(level: int, folder: str) -> list[float]:
    pairs = [{"offload_optimizer_config": _tier(device, Path(folder))} for device in ("cpu", "nvme")]
    with _host_shards():
        model, optimizer = _build("larc", level, pairs[0], torch.float64)
        weights = dict(model.named_parameters())
        assert all(weights[name] is not param for name, param in optimizer._sharded.named_parameters())
        return _compare("larc", level, pairs, torch.float64)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [1, 3])
def test_master_copies_on_the_host_train_what_is_on_the_device(level: int, tmp_path: Path) -> None:
    distances = run_on_ranks(2, _compare_with_host_shards, level, str(tmp_path))
    assert max(map(max, distances)) < 1e-10, distances


def _trained_on_streams(level: int, folder: str) -> dict[str, list[float]]:
    """By optimizer: the distance from training without streams with each way to run them, then without their waits."""
    found = {}
    device = {"offload_optimizer_config": {"device": "cpu"}}
    disk = {"offload_optimizer_config": _tier("nvme", Path(folder))}
    lamb = {"type": "LAMB", "lr": 1e-2}
    with _host_shards(), patch.dict(OPTIMIZERS, lamb=lamb):
        for name, tiers in (("sgd", device), ("adamw", device), ("larc", device), ("lamb", device), ("adamw", disk)):
            expected = _trained(tiers, name, level)
            distances = []
            for is_late in (True, False):
                # The device's own work, on the CPU, is never late.
                with Streams(is_main_late=False, is_side_late=is_late).present():
                    distances.append(_distance(_trained(tiers, name, level), expected))
            with Streams(False, True).present(), patch.object(Stream, "wait_stream", lambda *_: None):
                distances.append(_distance(_trained(tiers, name, level), expected))
            found[f"{name}, {len(found)}"] = distances
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [1, 3])
def test_copies_beside_the_update_give_the_same_bits_and_are_waited_for(level: int, tmp_path: Path) -> None:
    found, _ = run_on_ranks(2, _trained_on_streams, level, str(tmp_path), timeout_s=50)  # full weights are rank 0's
    assert all(distances[:2] == [0.0, 0.0] for distances in found.values()), found
    assert all(distances[2] > 0.0 for distances in found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_float32_is_bit_identical(optimizer: str, tmp_path: Path) -> None:
    state, params = ({f"offload_{kind}_config": _tier("nvme", tmp_path)} for kind in ("optimizer", "param"))
    found = run_on_ranks(2, _compare, optimizer, 3, [state, params, state | params], torch.float32)
    assert found == [[0.0] * 6] * 2


def _compare_without_accumulation(*arguments: Any) -> list[float]:
    """Norms are then known before the step, without a pass over the file of gradients."""
    with patch.dict(globals(), ACCUMULATION=1):
        return _compare(*arguments)


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clipped_step_of_one_backward_pass_on_ranks_with_unequal_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    state, params = ({f"offload_{kind}_config": _tier("nvme", tmp_path)} for kind in ("optimizer", "param"))
    some = {"offload_param_config": _tier("nvme", tmp_path, max_in_cpu=900)}  # parts of one unit in both places
    pairs = [params, state | params, state | some]
    found = run_on_ranks(3, _compare_without_accumulation, "adamw", 3, pairs, dtype, timeout_s=80)
    assert max(map(max, found)) <= (0.0 if dtype == torch.float32 else 1e-10), found


def _trained(tiers: dict[str, Any], name: str = "sgd", level: int = 3) -> dict[str, Tensor]:
    model, optimizer = _build(name, level, tiers, torch.float64)
    _train(model, optimizer, range(3))
    if tiers:
        assert any(shard.local is not shard.source for shard in optimizer._sharded._shards.values())
    weights = optimizer.full_state()
    optimizer.close()
    return weights


def _distance_of_host_shards() -> float:
    with _host_shards():
        return _distance(_trained({"offload_optimizer_config": {"device": "cpu"}}), _trained({}))


@pytest.mark.timeout(60)
def test_the_model_computes_with_what_the_update_made_of_master_copies() -> None:
    assert run_on_ranks(1, _distance_of_host_shards)[0] < 1e-12


def _train_with_gradients_cleared(tiers: dict[str, Any], how: str) -> dict[str, Tensor]:
    """Train at level 3 on two backward passes a step, after the gradient of a third was cleared."""
    given = {"type": "SGD", "lr": 0.1, "momentum": 0.9}
    model, optimizer = vissl_zero.initialize(_model(torch.float64), given, {"level": 3, **tiers})
    for step in range(3):
        for index in range(3):
            generator = torch.Generator().manual_seed(3 * step + index)
            images = torch.randn(8, 40, generator=generator, dtype=torch.float64)
            images = images.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
            optimizer.backward(model(images).square().mean())
            if index == 0 and how == "optimizer":
                optimizer.zero_grad()
            elif index == 0 and how == "module":
                model.zero_grad()
            elif index == 0:
                for param in model.parameters():
                    param.grad = None
        optimizer.step()
        optimizer.zero_grad()
    weights = optimizer.full_state()
    optimizer.close()
    return weights


def _distances_of_cleared_gradients(folder: str) -> list[float]:
    expected = _train_with_gradients_cleared({}, "optimizer")
    host = {"offload_optimizer_config": _tier("cpu", Path(folder))}
    disk = {f"offload_{kind}_config": _tier("nvme", Path(folder)) for kind in ("optimizer", "param")}
    distances = []
    for how in ("module", "parameters"):
        distances.append(_distance(_train_with_gradients_cleared(disk, how), expected))
        with _host_shards():
            distances.append(_distance(_train_with_gradients_cleared(host, how), expected))
    return distances


@pytest.mark.timeout(60)
def test_a_loop_clears_gradients_wherever_they_are(tmp_path: Path) -> None:
    distances = run_on_ranks(2, _distances_of_cleared_gradients, str(tmp_path))
    assert max(map(max, distances)) < 1e-12, distances


def _distance_of_shards_on_a_disk(folder: str) -> float:
    """Between the shards that a rank alone reads, and the full parameters."""
    _, optimizer = _build("sgd", 3, {"offload_param_config": _tier("nvme", Path(folder))}, torch.float64)
    shards, whole = dict(optimizer._sharded.named_parameters()), optimizer.full_state()
    optimizer.close()
    return _distance(shards, whole)


@pytest.mark.timeout(60)
def test_a_shard_on_a_disk_is_read_by_its_name(tmp_path: Path) -> None:
    assert run_on_ranks(1, _distance_of_shards_on_a_disk, str(tmp_path))[0] == 0.0


def _shards_in_memory(folder: str) -> list[int]:
    """How many shards rest in memory: at the start, between forward and backward pass, and after a step."""
    model, optimizer = _build("sgd", 3, {"offload_param_config": _tier("nvme", Path(folder))}, torch.float64)
    groups = [group_of(unit_state(unit)) for unit in model.modules() if isinstance(unit, FSDPModule)]

    def num_held() -> int:
        return sum(not shard_data(param).is_meta for group in groups if group for param in group.fsdp_params)

    found = [num_held()]
    for _ in range(ACCUMULATION):
        loss = model(torch.ones(2, 40, dtype=torch.float64)).square().mean()
        found.append(num_held())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    found.append(num_held())
    optimizer.close()
    return found


@pytest.mark.timeout(60)
def test_a_shard_on_a_disk_is_in_memory_only_while_its_unit_is_gathered(tmp_path: Path) -> None:
    assert run_on_ranks(1, _shards_in_memory, str(tmp_path))[0] == [0, 0, 0, 0]


def _start(folder: str, optimizer: dict[str, Any], params: dict[str, Any]) -> tuple[int, int, int]:
    """Elements that rest in memory and in all, and bytes that the start has written."""

    def written() -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "wchar" in line)

    before = written()
    tiers = {"offload_optimizer_config": _tier("nvme", Path(folder), **optimizer)}
    _, trained = _build(
        "adamw", 3, tiers | {"offload_param_config": _tier("nvme", Path(folder), **params)}, torch.float64
    )
    after = written()
    shards = trained._sharded._shards.values()
    resting = sum(shard.local.numel() for shard in shards if not shard.is_on_disk)
    trained.close()
    return resting, sum(shard.local.numel() for shard in shards), after - before


@pytest.mark.timeout(60)
def test_max_in_cpu_bounds_what_stays_in_memory_and_fast_init_what_is_written_at_the_start(tmp_path: Path) -> None:
    def start(optimizer: dict[str, Any], params: dict[str, Any]) -> tuple[int, int, int]:
        return run_on_ranks(2, _start, str(tmp_path), optimizer, params)[0]

    none, everything, written = start({}, {})
    assert none == 0
    some, _, _ = start({}, {"max_in_cpu": 1600})
    assert 1000 < some <= 1600 < everything, "the first layer's shard, and whatever else there is room for"
    assert start({}, {"max_in_cpu": 1e9})[0] == everything
    of_optimizer, of_params = start({"fast_init": True}, {})[2], start({}, {"fast_init": True})[2]
    assert written - of_optimizer >= 2 * 8 * everything, "Adam's two averages are not touched"
    assert written - of_params >= 8 * everything, "nor are the gradients"
    assert list(tmp_path.iterdir()) == []
    start({"keep_files": True}, {})
    assert [path.name for path in tmp_path.glob("*/rank*/*")] == ["optimizer.state"] * 2


def _run_recipe(folder: str, disk: str, fails: bool) -> list[str]:
    """What is left on the disk when this rank's part of a recipe's run is over; its process ends by ``os._exit``."""
    plan = make_plan(make_config(USE_KNN=False), folder, level=3, world_size=2, max_steps=2)
    sharding = replace(plan.sharding, offload_params=OffloadPlan("nvme", nvme_path=disk))
    try:
        with patch.object(worker, "train", side_effect=ValueError) if fails else nullcontext():
            worker.train_rank(replace(plan, sharding=sharding))
    except ValueError:
        assert fails
    torch.distributed.barrier()
    return [path.name for path in Path(disk).iterdir()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_well_or_not_leaves_no_files(fails: bool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert run_on_ranks(2, _run_recipe, str(tmp_path), str(disk), fails) == [[], []]


def _folder_per_rank(folders: list[str]) -> str:
    """The error of each rank for its own ``nvme_path``."""
    tier = {"device": "nvme", "nvme_path": folders[torch.distributed.get_rank()]}
    try:
        _build("sgd", 2, {"offload_optimizer_config": tier}, torch.float64)
    except OffloadError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60)
def test_a_folder_that_one_rank_cannot_use_stops_all(tmp_path: Path) -> None:
    told = run_on_ranks(2, _folder_per_rank, [str(tmp_path), str(tmp_path / "missing")])
    assert "1 other rank(s) cannot use" in told[0]
    assert "missing does not exist" in told[1]
    assert list(tmp_path.iterdir()) == []


def _unstreamable(given: dict[str, Any], folder: str) -> str:
    zero = {"level": 1, "offload_optimizer_config": {"device": "nvme", "nvme_path": folder}}
    try:
        vissl_zero.initialize(_model(torch.float32), given, zero)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60)
def test_optimizers_that_cannot_be_streamed_are_refused_by_name(tmp_path: Path) -> None:
    for kind, reason in [
        ("Adagrad", "makes state when it is built"),
        ("ScheduleFreeAdamW", "other weights to evaluate"),
    ]:
        told = run_on_ranks(1, _unstreamable, {"type": kind, "lr": 0.1}, str(tmp_path))[0]
        assert told.startswith(
            "offload_optimizer_config.device: can be nvme only with an optimizer that is updated piece"
        )
        assert reason in told
    assert run_on_ranks(1, _unstreamable, {"type": "SGD", "lr": 0.1}, str(tmp_path))[0] == "", (
        "no state, nothing to stream"
    )


def _groups(model: nn.Module, options: list[dict[str, Any]], **given: Any) -> torch.optim.Optimizer:
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    groups = [{"params": layer.parameters(), **group} for layer, group in zip(layers, options, strict=True)]
    return getattr(torch.optim, given.pop("type"))(groups, **given)


def _trained_with_options(
    given: dict[str, Any], options: list[dict[str, Any]], later: dict[int, dict[str, Any]], folder: str
) -> list[float] | str:
    """Distance from level 0 of two tiers with options by group, of which some change before a step; or a refusal."""
    disk = {"device": "nvme", "nvme_path": folder}
    tiers = {"level": 1, "offload_optimizer_config": disk}, {"level": 3, "offload_param_config": disk}
    states = []
    for zero in ({"level": 0}, *tiers):
        model = _model(torch.float64)
        model, optimizer = vissl_zero.initialize(model, _groups(model, options, **given), zero)
        try:
            for step in range(5):
                for group in optimizer.param_groups:
                    group |= later.get(step, {})
                images = torch.randn(4, 40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                optimizer.backward(model(images).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            states.append(optimizer.full_state())
        except VisslZeroError as error:
            return str(error)
        finally:
            optimizer.close()
    return [_distance(states[0], state) for state in states[1:]]


SGD, ADAM = {"type": "SGD", "lr": 0.05}, {"type": "AdamW", "lr": 1e-2, "eps": 1e-3}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("given", "options", "later"),
    [
        (SGD, [{}, {"momentum": 0.9}, {}], {}),
        (ADAM, [{}, {"amsgrad": True}, {}], {}),
        (SGD | {"momentum": 0.9}, [{}] * 3, {0: {"dampening": 0.5}, 3: {"momentum": 0.5}}),
        (SGD | {"momentum": 0.9, "dampening": 0.5}, [{}, {"momentum": 0.0}, {"dampening": 0.0}], {}),
    ],
)
def test_options_that_differ_between_groups_or_change_train_the_same(
    given: dict[str, Any], options: list[dict[str, Any]], later: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    distances = run_on_ranks(1, _trained_with_options, given, options, later, str(tmp_path))[0]
    assert max(distances) < 1e-10, distances


def _continued(given: dict[str, Any], options: list[dict[str, Any]], zero: dict[str, Any] | None, folder: str) -> Any:
    """Weights after four steps; with ``zero``, two of them at level 0 and two after a load by it."""
    model = _model(torch.float64)
    optimizer: Any = _groups(model, options, **given)
    settings = {} if zero is None else {0: {"level": 0}, 2: zero}
    for step in range(4):
        if step in settings:
            if step:
                optimizer.save(folder)
                model = _model(torch.float64)
            model, optimizer = vissl_zero.initialize(model, _groups(model, options, **given), settings[step])
            if step:
                optimizer.load(folder)
        images = torch.randn(4, 40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(images).square().mean()
        loss.backward() if zero is None else optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if zero is None:
        return {name: param.detach() for name, param in model.named_parameters()}
    state = optimizer.full_state()
    optimizer.close()
    return state


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize(
    ("given", "options"),
    [
        (ADAM, [{"amsgrad": True}, {}, {}]),
        (ADAM, [{}, {"amsgrad": True}, {}]),
        ({"type": "RMSprop", "lr": 1e-2, "eps": 1e-2}, [{"centered": True}, {"momentum": 0.9}, {}]),
    ],
)
def test_state_of_groups_that_keep_different_keys_goes_from_tier_to_tier(
    given: dict[str, Any], options: list[dict[str, Any]], is_on_disk: bool, tmp_path: Path
) -> None:
    disk = {"offload_optimizer_config": {"device": "nvme", "nvme_path": str(tmp_path)}} if is_on_disk else {}
    state = run_on_ranks(1, _continued, given, options, {"level": 1, **disk}, str(tmp_path / "run"))[0]
    assert _distance(_continued(given, options, None, ""), state) < 1e-10


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("given", "options", "later", "key"),
    [
        (SGD, {}, {"momentum": 0.9}, "momentum_buffer"),
        (ADAM, {}, {"amsgrad": True}, "max_exp_avg_sq"),
        # The others' momenta have made a place, of zeros; a first step with dampening needs none there.
        (SGD, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, "momentum_buffer"),
    ],
)
def test_options_that_need_state_without_a_place_are_refused(
    given: dict[str, Any], options: dict[str, Any], later: dict[str, Any], key: str, tmp_path: Path
) -> None:
    told = run_on_ranks(1, _trained_with_options, given, [{}, options, options], {0: later}, str(tmp_path))[0]
    assert f"The options of group 0 need further state ({key})" in told


class Reorders(nn.Linear):
    """Has a table of indices among its parameters, before the others."""

    def __init__(self) -> None:
        super().__init__(7, 4, dtype=torch.float64)
        weight, bias = self._parameters.pop("weight"), self._parameters.pop("bias")
        self.order = nn.Parameter(torch.arange(7).flip(0), requires_grad=False)
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.order])


def _trained_with_indices(zero: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Reorders()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = vissl_zero.initialize(model, optimizer, zero)
    for step in range(3):
        images = torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.backward(model(images).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.full_state()
    optimizer.close()
    return state


def _distance_with_indices(zero: dict[str, Any]) -> float:
    return _distance(_trained_with_indices({"level": 0}), _trained_with_indices(zero))


@pytest.mark.timeout(60)
def test_a_group_may_begin_with_a_frozen_parameter_of_integers(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"level": 3, "offload_optimizer_config": disk, "offload_param_config": disk}
    assert run_on_ranks(1, _distance_with_indices, zero)[0] < 1e-10


def _shards_exchanged(folder: str) -> str:
    zero = {"level": 3, "offload_param_config": {"device": "nvme", "nvme_path": folder}}
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, zero)
    torch.utils.swap_tensors(model[0].weight, model[2].weight)
    try:
        optimizer.backward(model(torch.ones(4, 7)).square().mean())
        optimizer.step()
    except VisslZeroError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60)
def test_parameters_on_a_disk_that_are_exchanged_are_refused(tmp_path: Path) -> None:
    told = run_on_ranks(1, _shards_exchanged, str(tmp_path))[0]
    assert told.startswith("0.weight has been exchanged for another parameter")


def _colossalai(zero: dict[str, Any]) -> dict[str, Any]:
    """Weights after four steps with the optimizer and the ``zero`` of ColossalAI's page."""
    layout.CHUNK_ELEMENTS, streamed_optimizer.RECORD_BYTES = 1024, 4096
    optimizer = {"type": "Adam", "lr": 0.001, "weight_decay": 0}
    model, optimizer = vissl_zero.initialize(_model(torch.float32), optimizer, zero)
    for step in range(4):
        images = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(images).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = optimizer.full_state()
    assert (optimizer.last_step.loss_scale > 1.0) == ("type" in zero)
    optimizer.close()
    return weights


@pytest.mark.timeout(90)
def test_colossalais_dictionaries_verbatim(tmp_path: Path) -> None:
    optimizer_cpu = {"offload_optimizer_config": {"device": "cpu", "pin_memory": True, "fast_init": True}}
    params_cpu = {"offload_param_config": {"device": "cpu", "pin_memory": True, "fast_init": 1_000_000_000}}
    path, in_cpu = str(tmp_path), 2000
    nvme = {
        "offload_optimizer_config": {"device": "nvme", "pin_memory": True, "fast_init": True, "nvme_path": path},
        "offload_param_config": {"device": "nvme", "pin_memory": True, "max_in_cpu": in_cpu, "nvme_path": path},
    }
    zero = {"type": "ZeroRedundancyOptimizer_Level_3", "dynamic_loss_scale": True, "clip_grad": 1.0}
    expected = run_on_ranks(2, _colossalai, zero)[0]
    for tiers in (optimizer_cpu, optimizer_cpu | params_cpu, nvme):
        found = run_on_ranks(2, _colossalai, zero | tiers)[0]
        assert _distance(found, expected) == 0.0, tiers
    run_on_ranks(1, _colossalai, nvme)  # names no level: there is only one


def _train_and_save(optimizer: str, zero: dict[str, Any], folder: str, load: bool, steps: range) -> dict[str, Any]:
    """Weights at the end of ``steps``; begun from ``folder`` or not, saved there in any case."""
    model, trained = _build(optimizer, zero["level"], zero, torch.float64)
    if load:
        _train(model, trained, range(2))  # of another run: all of it must be forgotten
        trained.load(folder)
        assert trained.num_updates == steps.start
    _train(model, trained, steps)
    trained.save(folder)
    weights = trained.full_state()
    trained.close()
    return weights


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_saved_state_goes_on_at_another_level_tier_and_number_of_ranks(tmp_path: Path) -> None:
    nvme = {f"offload_{kind}_config": _tier("nvme", tmp_path) for kind in ("optimizer", "param")}
    for optimizer in ("adamw", "larc"):
        here, there = str(tmp_path / f"{optimizer}_here"), str(tmp_path / f"{optimizer}_there")
        expected = run_on_ranks(1, _train_and_save, optimizer, {"level": 0}, there, False, range(12))[0]
        run_on_ranks(2, _train_and_save, optimizer, {"level": 3, **nvme}, here, False, range(5))
        run_on_ranks(1, _train_and_save, optimizer, {"level": 1}, here, True, range(5, 8))
        found = run_on_ranks(2, _train_and_save, optimizer, {"level": 3, **nvme}, here, True, range(8, 12))[0]
        assert _distance(found, expected) < 1e-10
