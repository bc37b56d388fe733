"""``ZERO.LEVEL: fit`` changes memory and never the model: against level 0 in float64, whatever it chose."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_on_ranks
from vissl_zero.config.compose import compose
from vissl_zero.config.host import Host
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.engine.planning import fitted, plan_run, with_candidate

pytestmark = pytest.mark.slow  # four runs on real ranks, and a forecast of every plan

RECIPE = "digits/supervised"
COMMON = (
    "config.TRAINER.DTYPE=float64",
    "config.TRAINER.MAX_STEPS=2",
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8",
)


def trained(plan: ResolvedRun) -> tuple[list[float], dict[str, torch.Tensor]]:
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [])
    state = run.sharded.full_state()
    run.sharded.close()
    return [record.loss for record in run.records], state


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    composed = compose(RECIPE, [*COMMON, "config.ZERO.LEVEL=0"])
    plan = resolve(composed.run, tmp_path_factory.mktemp("plain"), recipe=RECIPE, host=Host(num_cores=1))
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
    peak = next(c.forecast.step.peak_bytes for c in candidates if str(c) == wanted)
    composed = compose(RECIPE, [*COMMON, "config.ZERO.LEVEL=fit", f"config.ZERO.MEMORY_GB={peak / 2**30}"])
    cfg, notes, written = fitted(composed)
    plan = resolve(cfg, tmp_path, recipe=RECIPE, written=written, notes=notes, host=Host(num_cores=1))
    assert plan.global_batch == 16 and plan.sharding.level <= int(wanted[6])
    losses, state = run_on_ranks(2, trained, plan)[0]
    assert losses == pytest.approx(plain[0], abs=1e-10)
    assert all(torch.allclose(state[name], value, rtol=0, atol=1e-10) for name, value in plain[1].items())


def test_a_plan_with_everything_on_a_disk_trains_the_same(plain, candidates, tmp_path):
    candidate = next(c for c in candidates if c.sharding.offload_params.device == "nvme")
    cfg = with_candidate(compose(RECIPE, [*COMMON]).run, candidate)
    plan = resolve(cfg, tmp_path, recipe=RECIPE, host=Host(num_cores=1))
    assert plan.sharding.offload_params.device == plan.sharding.offload_optimizer.device == "nvme"
    losses, state = run_on_ranks(2, trained, plan)[0]
    assert losses == pytest.approx(plain[0], abs=1e-10)
    assert all(torch.allclose(state[name], value, rtol=0, atol=1e-10) for name, value in plain[1].items())
