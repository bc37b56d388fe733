"""``ZERO.LEVEL: fit`` changes memory and never the model: against level 0 in float64, whatever it chose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ranks import run_on_ranks
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.planner.fit_plans import with_settings
from vissl_zero.planner.planning import fitted, plan_run
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

# A dozen runs on real ranks, and a forecast of every plan.
pytestmark = pytest.mark.slow

RECIPE = "digits/supervised"
COMMON = (
    "config.TRAINER.DTYPE=float64",
    "config.TRAINER.MAX_STEPS=2",
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8",
)
WIDE = ("config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 2048, 2048, 10]}]]",)
HOST = Host(num_cores=1)


def trained(plan: ResolvedRun) -> tuple[list[float], dict[str, torch.Tensor]]:
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [])
    state = run.sharded.full_state()
    run.sharded.close()
    return [record.loss for record in run.records], state


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    composed = compose(RECIPE, [*COMMON, "config.ZERO.LEVEL=0"])
    plan = resolve(composed.run, tmp_path_factory.mktemp("plain"), recipe=RECIPE, host=HOST)
    return run_on_ranks(2, trained, plan)[0]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def candidates(disk):
    words = [*COMMON, f"config.ZERO.offload_optimizer_config.nvme_path={disk}"]
    return plan_run(compose(RECIPE, [*words, "config.DRY_RUN=true"]).run, RECIPE).candidates


@pytest.mark.parametrize("wanted", ["level 0, recomputed", "level 1", "level 3, recomputed"])
def test_fit_trains_what_level_0_trains(wanted, plain, candidates, tmp_path):
    """The budget is what the wanted plan takes; of those that fit it is taken where it is the cheapest."""
    peak = next(c.forecast.step.resident_bytes for c in candidates if str(c) == wanted)
    composed = compose(RECIPE, [*COMMON, "config.ZERO.LEVEL=fit", f"config.ZERO.MEMORY_GB={peak / 2**30}"])
    one = fitted(composed)
    plan = resolve(one.run, tmp_path, recipe=RECIPE, written=one.written, notes=one.notes, host=HOST)
    assert plan.global_batch == 16 and plan.sharding.level <= int(wanted[6])
    assert_trains(plan, plain)


@pytest.mark.parametrize(
    "wanted",
    [
        "level 2",
        "level 3",
        "level 1, recomputed",
        "level 1, optimizer on nvme",
        "level 3, recomputed, optimizer on nvme",
        "level 3, optimizer on nvme, parameters on nvme",
    ],
)
def test_every_tier_trains_what_level_0_trains(wanted, plain, candidates, tmp_path):
    candidate = next(c for c in candidates if str(c) == wanted)
    plan = resolve(
        with_settings(compose(RECIPE, [*COMMON]).run, candidate.settings()), tmp_path, recipe=RECIPE, host=HOST
    )
    assert plan.sharding.level == candidate.sharding.level
    assert plan.sharding.offload_params.device == candidate.sharding.offload_params.device
    assert_trains(plan, plain)


def test_a_plan_that_recomputes_some_blocks_trains_what_level_0_trains(plain, candidates, tmp_path):
    recomputed = next(c for c in candidates if str(c) == "level 0, recomputed")
    names = recomputed.forecast.wrap_plan.checkpointed
    settings = replace(
        recomputed, sharding=replace(recomputed.sharding, level=3, checkpoint_blocks=names[::2])
    ).settings()
    plan = resolve(with_settings(compose(RECIPE, [*COMMON]).run, settings), tmp_path, recipe=RECIPE, host=HOST)
    assert plan.sharding.checkpoint_blocks == names[::2] and len(names) > 2
    assert_trains(plan, plain)


def test_a_plan_that_keeps_some_parameters_in_memory_trains_what_level_0_trains(plain, candidates, tmp_path):
    on_disk = next(c for c in candidates if str(c) == "level 3, optimizer on nvme, parameters on nvme")
    tier = replace(on_disk.sharding.offload_params, max_in_cpu=5_000)
    settings = replace(on_disk, sharding=replace(on_disk.sharding, offload_params=tier)).settings()
    plan = resolve(with_settings(compose(RECIPE, [*COMMON]).run, settings), tmp_path, recipe=RECIPE, host=HOST)
    assert plan.sharding.offload_params.max_in_cpu == 5_000
    assert_trains(plan, plain)


def test_a_budget_that_only_a_disk_meets_trains_what_level_0_trains(disk, tmp_path):
    """Of a model wide enough for its state to be larger than the buffers of a disk."""
    words = [*COMMON, *WIDE, f"config.ZERO.offload_optimizer_config.nvme_path={disk}"]
    every = plan_run(compose(RECIPE, [*words, "config.DRY_RUN=true"]).run, RECIPE).candidates
    needed = {c.sharding.offload_optimizer.device: c.forecast.step.resident_bytes for c in reversed(every)}
    least = min(c.forecast.step.resident_bytes for c in every if c.sharding.offload_optimizer.device == "none")
    assert needed["nvme"] < least, "no budget asks for the disk"
    budget = f"config.ZERO.MEMORY_GB={needed['nvme'] / 2**30}"
    one = fitted(compose(RECIPE, [*words, "config.ZERO.LEVEL=fit", budget]))
    plan = resolve(one.run, tmp_path / "fit", recipe=RECIPE, written=one.written, notes=one.notes, host=HOST)
    assert plan.sharding.offload_optimizer.device == "nvme"
    plain = resolve(compose(RECIPE, [*COMMON, *WIDE, "config.ZERO.LEVEL=0"]).run, tmp_path, recipe=RECIPE, host=HOST)
    assert_trains(plan, run_on_ranks(2, trained, plain)[0])


def assert_trains(plan, plain):
    """Losses and weights to 1e-10."""
    losses, state = run_on_ranks(2, trained, plan)[0]
    assert losses == pytest.approx(plain[0], abs=1e-10)
    assert state.keys() == plain[1].keys()
    assert all(torch.allclose(state[name], value, rtol=0, atol=1e-10) for name, value in plain[1].items())
