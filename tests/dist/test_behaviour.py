"""What the loop relies on beside the numbers: skips, state in and out, full parameters, clean failures."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.case import forward
from tests.dist.training import DOUBLE, Case, Outcome, build, loss_of, micro_batches, shard, train_plainly, train_step
from tests.ranks import RankError, close_pool, run_on_ranks
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError, ConfigError, VisslZeroError
from vissl_zero.optim.adaptation import Larc
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import TRUNKS
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.checks.replica_check import ModelsDifferError, require_equal_models
from vissl_zero.sharding.engines.torch.strategy import TorchStrategy
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.state.shard import Shard
from vissl_zero.sharding.update.stepper import Stepper

SCALED = Precision(master="float64", compute="float64", reduce="float64", use_loss_scale=True)
LEVELS = pytest.mark.parametrize("level", [0, 1, 2, 3])
PROTOTYPES = "heads.0.prototypes0.weight"


def _whole(sharded: ShardedModel) -> dict[str, Tensor]:
    with sharded.full_parameters():
        return {name: tensor.clone() for name, tensor in sharded.named_parameters()}


def _images(case: Case) -> list[Tensor]:
    return [crops.flatten(0, 1) for crops in next(micro_batches(case, 0))]


# --- loss scale ------------------------------------------------------------------------------------------------------


def _train_with_inf(level: int, case: Case) -> dict[str, Any]:
    """A good step, one with an inf on rank 1 alone, and the rest."""
    sharded = shard(case, level, precision=SCALED)
    outcome, skipped, scales = Outcome(), [], []
    for step in (0, 1, 1, 2, 3):
        is_bad = len(skipped) == 1
        before = _whole(sharded)
        if is_bad:
            _put_inf(sharded, level)
        result = train_step(sharded, case, step, outcome)
        skipped.append(result.skipped)
        scales.append(result.loss_scale)
        if is_bad:
            assert all(torch.equal(before[name], tensor) for name, tensor in _whole(sharded).items())
            outcome.losses.pop()
            outcome.grad_norms.pop()
    outcome.state = sharded.full_state()
    return {"outcome": outcome, "skipped": skipped, "scales": scales}


def _put_inf(sharded: ShardedModel, level: int) -> None:
    """Into rank 1's gradient of the step to come: before it is averaged at level 0, in its shard alone elsewhere."""
    if dist.get_rank() != 1:
        return
    original = sharded.step

    def poisoned() -> Any:
        sharded.step = original  # type: ignore[method-assign]
        for shard_ in sharded._trained:  # type: ignore[attr-defined]
            grad = shard_.local_grad()
            if grad is not None and grad.numel():
                grad.view(-1)[0] = float("inf")
                break
        return original()

    if level:
        sharded.step = poisoned  # type: ignore[method-assign]
    else:
        param = next(param for param in sharded.model.parameters() if param.requires_grad)
        handle = param.register_hook(lambda grad: handle.remove() or grad * float("inf"))


@LEVELS
@pytest.mark.timeout(60)
def test_an_inf_on_one_rank_makes_all_skip_and_halve_the_scale(level: int) -> None:
    case = Case(optimizer="larc", clip=0.05, norm="group")
    answers = run_on_ranks(2, _train_with_inf, level, case)
    for answer in answers:
        assert answer["skipped"] == [False, True, False, False, False]
        assert answer["scales"] == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    # The steps that were taken are those of an unscaled run: norms, clipping and LARC see unscaled gradients.
    distance = answers[0]["outcome"].distance(train_plainly(case))
    assert max(distance.values()) < 1e-10, distance


def _larc_states(level: int, case: Case) -> list[dict[str, Tensor]]:
    states = []
    for use_loss_scale in (False, True):
        sharded = shard(case, level, precision=SCALED if use_loss_scale else DOUBLE)
        results = [train_step(sharded, case, step, Outcome()) for step in range(2)]
        assert {result.loss_scale for result in results} == {65536.0 if use_loss_scale else 1.0}
        states.append(sharded.full_state())
    return states


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [1, 3])
def test_larc_makes_the_same_update_at_loss_scale_1_and_65536(level: int) -> None:
    plain, scaled = run_on_ranks(2, _larc_states, level, Case(optimizer="larc_clip", clip=0.05, norm="group"))[0]
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)  # the scale is a power of two: not a bit


# --- gradients that not every rank has -------------------------------------------------------------------------------


def _step_with_missing(adaptation: Larc | None) -> list[list[float]]:
    """Three shards of two rows a rank: with a gradient everywhere, on rank 0 alone, and nowhere."""
    shards = []
    for name in ("everywhere", "on_rank_0", "nowhere"):
        param = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        if name == "everywhere" or (name == "on_rank_0" and dist.get_rank() == 0):
            param.grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
        shards.append(Shard(name, param, param, torch.Size([2 * dist.get_world_size()])))
    group = {"params": [shard.local for shard in shards], "lr": 1.0, "weight_decay": 0.1}
    stepper = Stepper(shards, torch.optim.SGD([group]), adaptation, None, None, dist.group.WORLD)
    result = stepper.step(frozen=())
    return [*(shard.local.tolist() for shard in shards), [float(result.grad_norm) ** 2]]


@pytest.mark.timeout(30)
def test_a_gradient_missing_on_some_ranks_is_zero_there_and_one_missing_everywhere_is_no_gradient() -> None:
    first, second = run_on_ranks(2, _step_with_missing, None)
    assert first[0] == second[0] == pytest.approx([3.0 - 1.3, 4.0 - 2.4])
    assert first[1] == pytest.approx([3.0 - 1.3, 4.0 - 2.4])
    assert second[1] == pytest.approx([3.0 - 0.3, 4.0 - 0.4])
    assert first[2] == second[2] == [3.0, 4.0]
    assert first[3] == second[3] == pytest.approx([5.0 * 3])
    adapted, _ = run_on_ranks(2, _step_with_missing, Larc(trust_coefficient=0.1, eps=0.0))
    norm, grad = 50**0.5, 5**0.5  # of the full tensor: two ranks' parameters, rank 0's gradient
    rate = 0.1 * norm / (grad + 0.1 * norm)
    assert adapted[1] == pytest.approx([3.0 - rate * 1.3, 4.0 - rate * 2.4])


# --- models that know nothing of units -------------------------------------------------------------------------------


class _Foreign(nn.Module):
    """Parameters outside any block, a scalar, a block's weight tied to the outside, and a scalar nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)) for _ in range(3))
        self.layers[1][0].bias = self.embed.bias
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x * self.temperature


def _train_foreign(level: int | None) -> dict[str, Tensor]:
    """Three clipped LARC steps on 6 rows: through a strategy, or by hand on all of them."""
    torch.manual_seed(0)
    model = _Foreign().double()
    names = tuple(name for name, _ in model.named_parameters())
    rows, world_size = torch.randn(6, 5, dtype=torch.float64), 1 if level is None else dist.get_world_size()
    mine = rows.chunk(world_size)[0 if level is None else dist.get_rank()]
    sharded = TorchStrategy().shard(
        model,
        [ParamGroup("all", names, False, True, 0.01)],
        lambda groups: (torch.optim.SGD(groups, momentum=0.9), Larc(trust_coefficient=0.05)),
        ShardingPlan(level=level or 0, clip_grad=0.1, precision=DOUBLE),
        torch.device("cpu"),
    )
    sharded.optimizer.param_groups[0]["lr"] = 0.5
    for step in range(3):
        for is_last in (False, True):
            with sharded.micro_batch(is_last):
                sharded.backward(sharded.model(mine * (step + 1 + is_last)).square().sum(1).mean() / 2)
        sharded.step()
        sharded.zero_grad()
    return sharded.full_state()


@LEVELS
@pytest.mark.timeout(60)
def test_a_model_without_units_and_with_scalars_trains_the_same(level: int) -> None:
    expected = _train_foreign(None)  # no process group here: full parameters, plain modules
    state = run_on_ranks(3, _train_foreign, level)[0]
    assert state.keys() == expected.keys()
    assert state["unused"].item() == 5.0 and state["temperature"].item() != 2.0
    for name, tensor in expected.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- state -----------------------------------------------------------------------------------------------------------


def _resume(level: int, case: Case) -> dict[str, Any]:
    first = shard(case, level, precision=SCALED)
    outcome = Outcome()
    for step in range(2):
        train_step(first, case, step, outcome)
    state = _copied(first.state_dict())
    for step in (2, 3):
        train_step(first, case, step, outcome)
    second, resumed = shard(case, level, precision=SCALED), Outcome()
    second.load_state_dict(state)
    for step in (2, 3):
        train_step(second, case, step, resumed)
    with pytest.raises(CheckpointError, match=r"another layout: level"):
        shard(case, (level + 1) % 4, precision=SCALED).load_state_dict(state)
    whole = first.full_state()
    return {
        "state": state,
        "loss": max(abs(a - b) for a, b in zip(outcome.losses[2:], resumed.losses, strict=True)),
        "end": max(
            [(whole[name] - tensor).abs().max().item() for name, tensor in second.full_state().items()] or [0.0]
        ),
    }


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


@LEVELS
@pytest.mark.timeout(60)
def test_a_resumed_run_goes_on_as_if_never_stopped_and_shards_say_where_they_belong(level: int) -> None:
    case = Case(optimizer="adamw")
    answers = run_on_ranks(3, _resume, level, case)
    # DDP fills its buckets in another order in its first step, and with them gloo's order of summation.
    tolerance = 0.0 if level else 1e-13
    assert max(max(answer["loss"], answer["end"]) for answer in answers) <= tolerance
    for name, param in build(case).named_parameters():
        for kind in ("param", "exp_avg"):
            states = [answer["state"] for answer in answers]
            entries = [
                state["params"][name] if kind == "param" else state["optimizer"]["state"][name][kind]
                for state in states
            ]
            assert {entry["full_shape"] for entry in entries} == {tuple(param.shape)}
            places = [range(e["first_element"], e["first_element"] + e["local"].numel()) for e in entries]
            covered = [place for part in places for place in part]
            assert covered == list(range(param.numel())) * (1 if level else 3), (name, places)


def _export(level: int) -> dict[str, Any]:
    case = Case(unused=True, tied=True)
    sharded = shard(case, level)
    inside = _whole(sharded)
    outside = {name: tuple(tensor.shape) for name, tensor in sharded.named_parameters()}
    return {"inside": inside, "outside": outside, "state": sharded.full_state()}


@LEVELS
@pytest.mark.timeout(60)
def test_whole_parameters_come_back_under_their_own_names(level: int) -> None:
    model = build(Case(unused=True, tied=True))
    answers = run_on_ranks(3, _export, level)
    for rank, answer in enumerate(answers):
        for name, param in model.named_parameters():
            assert torch.equal(answer["inside"][name], param), name
            rows = -(-len(param) // 3)
            local = max(0, min(rows, len(param) - rank * rows)) if level else len(param)
            assert answer["outside"][name] == (local, *param.shape[1:]), name
    expected = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    assert answers[0]["state"].keys() == expected
    assert answers[1]["state"] == answers[2]["state"] == {}


# --- rows, buffers, evaluation ---------------------------------------------------------------------------------------


def _normalize(level: int) -> tuple[Tensor, Tensor, Tensor]:
    case = Case()
    sharded = shard(case, level)
    sharded.model.eval()
    with torch.no_grad():
        sharded.model(_images(case))  # at levels 1 and 2 this leaves parameters whole, to go out of date
        sharded.normalize_rows([PROTOTYPES])
        (_, (scores,)) = sharded.model(_images(case))[0]
    return _whole(sharded)[PROTOTYPES], scores, sharded.model(_images(case), features_only=True)[1]


@LEVELS
@pytest.mark.timeout(60)
def test_rows_are_normalized_and_the_next_forward_pass_knows(level: int) -> None:
    model = build(Case()).eval()
    with torch.no_grad():
        prototypes = model.get_parameter(PROTOTYPES)
        prototypes.copy_(F.normalize(prototypes, dim=1))
        (_, (scores,)) = model(_images(Case()))[0]
        features = model(_images(Case()), features_only=True)[1]
    for weight, sharded_scores, sharded_features in run_on_ranks(3, _normalize, level):
        torch.testing.assert_close(weight, prototypes, rtol=0, atol=1e-14)
        torch.testing.assert_close(sharded_scores, scores, rtol=0, atol=1e-12)
        torch.testing.assert_close(sharded_features.detach(), features, rtol=0, atol=1e-12)


def _consolidate(level: int) -> list[dict[str, Tensor]]:
    case = Case()
    sharded = shard(case, level, sync_bn_group=0)
    train_step(sharded, case, 0, Outcome())
    buffers = dict(build(case).named_buffers())
    before = {name: tensor for name, tensor in sharded.state_dict()["buffers"].items() if name in buffers}
    before = {name: tensor.clone() for name, tensor in before.items()}
    sharded.consolidate_buffers()
    return [before, sharded.state_dict()["buffers"]]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [0, 3])
def test_buffers_become_the_mean_over_ranks(level: int) -> None:
    (first, merged), (second, other) = run_on_ranks(2, _consolidate, level)
    name = "trunk.stem.1.running_mean"
    assert not torch.equal(first[name], second[name])
    torch.testing.assert_close(merged[name], (first[name] + second[name]) / 2)
    assert torch.equal(merged[name], other[name])
    assert int(merged["trunk.stem.1.num_batches_tracked"]) == 2  # one per resolution


def _consolidate_teacher(level: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    case = Case()
    sharded = shard(case, level, sync_bn_group=0)
    assert sharded.whole_teacher_tensors() == [] and sharded.full_teacher_state() == {}
    sharded.adopt_teacher(build(case))
    batch = next(iter(micro_batches(case, 0)))
    with torch.no_grad():
        forward(sharded.teacher, case, [crops[:, dist.get_rank() :: 2] for crops in batch])
    before = {name: buffer.clone() for name, buffer in sharded.buffers().items()}
    return before, {tensor.name: tensor.read().clone() for tensor in sharded.whole_teacher_tensors()}


@pytest.mark.parametrize("level", [0, 3])
def test_weights_of_a_teacher_have_the_mean_of_its_buffers(level: int) -> None:
    (first, merged), (second, other) = run_on_ranks(2, _consolidate_teacher, level)
    name = "trunk.stem.1.running_mean"
    means = [buffers[f"teacher:{name}"] for buffers in (first, second)]
    assert not torch.equal(*means)
    torch.testing.assert_close(merged[name], (means[0] + means[1]) / 2)
    assert merged.keys() == other.keys() and all(torch.equal(merged[key], other[key]) for key in merged)


def _equal_everywhere(level: int) -> tuple[set[str], set[str]]:
    sharded = shard(case := Case(), level)
    before = set(sharded.replicated())
    sharded.adopt_teacher(build(case))
    return before, set(sharded.replicated())


@pytest.mark.parametrize("level", [0, 3])
def test_ranks_hold_the_teacher_alike_where_they_hold_the_model_alike(level: int) -> None:
    for before, after in run_on_ranks(2, _equal_everywhere, level):
        assert before and after == before | {f"teacher:{name}" for name in before}


def _freeze_unknown() -> None:
    shard(Case(), 3).freeze(["heads.0.prototypes9.weight"])


def test_freezing_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(RankError, match="not parameters of the model"):
        run_on_ranks(1, _freeze_unknown)


# --- precision -------------------------------------------------------------------------------------------------------


def _train_in(level: int, precision: Precision, changes: dict[str, Any]) -> dict[str, Any]:
    case = Case(optimizer="larc", clip=1.0)
    sharded = shard(case, level, precision=precision, **changes)
    dtypes: set[torch.dtype] = set()
    layer = sharded.model.get_submodule("trunk.blocks.0")
    layer[1].register_forward_hook(lambda module, args, output: dtypes.add((module.weight.dtype, output.dtype)))
    losses = []
    for _ in range(3):
        images = [image.float() for image in _images(case)]
        for group in sharded.optimizer.param_groups:
            group["lr"] = 0.1
        with sharded.micro_batch(is_last=True):
            embeddings, (scores,) = sharded.model(images)[0]
            assert embeddings.dtype == scores.dtype == torch.float32
            loss = loss_of([(embeddings, [scores])], 12)
            sharded.backward(loss)
        losses.append(loss.item())
        sharded.step()
        sharded.zero_grad()
    assert {tensor.dtype for _, tensor in sharded.named_parameters()} == {torch.float32}
    return {"losses": losses, "dtypes": dtypes}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("changes", [{}, {"checkpoint_every": 1, "wrap_threshold": 40}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_half_precision_parameters_keep_batch_norm_in_float32(level: int, changes: dict[str, Any]) -> None:
    single = run_on_ranks(2, _train_in, level, Precision(), changes)[0]
    half = Precision(compute="bfloat16", reduce="float32")
    answer = run_on_ranks(2, _train_in, level, half, changes)[0]
    assert answer["dtypes"] == {(torch.float32, torch.bfloat16)}
    assert answer["losses"] == pytest.approx(single["losses"], rel=0.02)
    assert answer["losses"] != single["losses"]


@LEVELS
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("dtype", "use_loss_scale"), [("bfloat16", False), ("float16", True)])
def test_autocast_is_entered_by_the_model(level: int, dtype: str, use_loss_scale: bool) -> None:
    single = run_on_ranks(2, _train_in, level, Precision(), {})[0]
    answer = run_on_ranks(2, _train_in, level, Precision(autocast=dtype, use_loss_scale=use_loss_scale), {})[0]
    assert answer["losses"] == pytest.approx(single["losses"], rel=0.02)
    assert answer["losses"] != single["losses"]


# --- failures --------------------------------------------------------------------------------------------------------


def _differing(kind: str) -> None:
    case = Case(unused=kind == "layout" and dist.get_rank() == 1)
    model = build(case)
    if kind == "value" and dist.get_rank() == 1:
        with torch.no_grad():
            weight = model.get_parameter("trunk.blocks.1.0.weight")
            weight.copy_(weight.flatten().flip(0).view_as(weight))  # the same values in another order
    with pytest.raises(ModelsDifferError) as caught:
        require_equal_models(model, torch.device("cpu"))
    expected = {
        "value": "trunk.blocks.1.0.weight differs between them",
        "layout": "The ranks differ in parameters or buffers: rank 0 has",
    }[kind]
    assert expected in str(caught.value)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["value", "layout"])
def test_ranks_with_different_models_are_told_so_on_every_rank(kind: str) -> None:
    run_on_ranks(3, _differing, kind)


def _differing_counters() -> dict[str, Tensor]:
    model, rank = nn.BatchNorm1d(3), dist.get_rank()
    model.register_buffer("scalar", torch.tensor(rank))
    model.register_buffer("flags", rank == torch.arange(6).view(3, 2).T % 3)
    model.num_batches_tracked.fill_(1 + rank)
    require_equal_models(model, torch.device("cpu"))
    return dict(model.named_buffers())


@pytest.mark.timeout(30)
def test_counters_start_with_the_values_of_rank_0() -> None:
    for buffers in run_on_ranks(3, _differing_counters):
        assert buffers["scalar"] == 0 and buffers["num_batches_tracked"] == 1
        assert buffers["flags"].tolist() == [[True, False, False], [False, True, False]]


def _raise_alone(level: int) -> tuple[str, float]:
    case = Case()
    sharded = shard(case, level)
    train_step(sharded, case, 0, Outcome())
    started = time.monotonic()
    try:
        if dist.get_rank() == 1:
            raise ValueError("rank 1 alone")
        train_step(sharded, case, 1, Outcome())
        ended = "no error"
    # The last where a loop of the user's has run in this process before: its waiting calls are watched.
    except (RuntimeError, ValueError, VisslZeroError) as error:
        ended = str(error)
    # Long enough for the other rank to notice first: a busy machine takes more than 5 s to notice a limit of 3.
    time.sleep(max(0.0, 16.0 - (time.monotonic() - started)) if dist.get_rank() == 1 else 0.0)
    raise AssertionError(f"ended after {time.monotonic() - started:.0f} s with {ended}")


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_rank_that_raises_alone_leaves_nobody_hanging(level: int) -> None:
    started = time.monotonic()
    words = r"(?s)ended after [1-5]?[0-9] s with (?!no error).*(Timed out|timeout|Connection|waits in)"
    with pytest.raises(RankError, match=words):
        run_on_ranks(2, _raise_alone, level, group_timeout_s=3, timeout_s=90)
    assert time.monotonic() - started < 90


def _train_briefly(level: int) -> None:
    case = Case()
    train_step(shard(case, level), case, 0, Outcome())


@pytest.mark.timeout(60)
def test_processes_exit_cleanly_after_every_level() -> None:
    for level in range(4):
        run_on_ranks(2, _train_briefly, level)
    assert close_pool() == [0, 0, 0, 0]


@TRUNKS.register("drawing_plugin")
class _DrawingPlugin(nn.Module):
    """A trunk of somebody else's, with a random layer that has no class of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_dim = 32
        self.embed = nn.Conv2d(3, 32, 4, 4)
        self.noise = _Noise()

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return [self.noise(self.embed(x).mean(dim=(2, 3))) for x in images]


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


def _plugin_that_draws(level: int) -> str:
    config = make_config()
    config["MODEL"]["TRUNK"] = {"NAME": "drawing_plugin", "PARAMS": {}}
    run, schedules, frozen = build_run(make_plan(config, level=level, world_size=2, max_steps=1), torch.device("cpu"))
    try:
        train(run, schedules, frozen, [])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("level", [0, 3])
def test_a_plugins_random_layer_is_refused_by_name_on_every_rank(level: int) -> None:
    for message in run_on_ranks(2, _plugin_that_draws, level):
        assert "layer 'trunk.noise'" in message and "(got _Noise)" in message
