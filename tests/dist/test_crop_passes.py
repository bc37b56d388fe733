"""CROP_PASSES: a step whose crops go through the model in passes is the plain step, in float64, everywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.test_method_parity import (
    BATCH,
    CASES,
    TOLERANCE,
    TRANSFORMERS,
    Result,
    _train,
    make_method_plan,
    plain,
)
from tests.ranks import run_on_ranks
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.engine.passes import cut
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.accuracy import OnlineProbeHook
from vissl_zero.methods.supervised import CrossEntropy
from vissl_zero.resolve.resolved import OffloadPlan, OptimizerPlan, ResolvedRun

CPU = torch.device("cpu")
JOINED = ("pirl", "jigsaw")  # their heads join the tiles of an image
METHODS = [name for name in CASES if name not in JOINED]
NAMED = ("simclr", "swav", "dino", "ibot", "dinov2", "lejepa")


def _norm(method: str) -> str:
    return "vit" if method in TRANSFORMERS else "group"


def test_passes_have_about_as_many_pixels_and_take_all_rows_in_order() -> None:
    images = [torch.zeros(2 * 8, 3, 224, 224), torch.zeros(10 * 8, 3, 96, 96)]
    passes = cut(images, 12, by_crop=False)
    assert len(passes) == 12
    pixels = [sum((part.stop - part.first) * (224**2, 96**2)[part.tensor] for part in parts) for parts in passes]
    assert max(pixels) <= sum(pixels) / 12 + 224**2 / 2
    for tensor, rows in enumerate(images):
        bounds = [(parts[tensor].first, parts[tensor].stop) for parts in passes]
        assert [row for first, stop in bounds for row in range(first, stop)] == list(range(len(rows)))
    assert len(cut([torch.zeros(0, 3, 8, 8)], 3, by_crop=False)) == 3  # as many as on the ranks that have samples
    apart = cut([torch.zeros(5, 3, 8, 8), *[torch.zeros(5, 3, 4, 4)] * 3], 16, by_crop=True)
    assert [[part.tensor for part in parts] for parts in apart] == [[0], [1], [2], [3]]
    together = cut([torch.zeros(5, 3, 8, 8), *[torch.zeros(5, 3, 4, 4)] * 4], 2, by_crop=True)
    assert [[part.tensor for part in parts] for parts in together] == [[0], [1, 2, 3, 4]]


def _one_step(method: str, passes: int) -> Result:
    """Weights after a step of plain SGD at rate 1: their change is the gradient."""
    sgd = OptimizerPlan("sgd", {}, lr={"name": "constant", "value": 1.0})
    plan = make_method_plan(method, 0, 1, _norm(method), max_steps=1, optimizer=sgd, crop_passes=passes)
    return _train(plan)


@pytest.mark.parametrize("method", NAMED)
def test_gradients_are_those_of_the_plain_step(method: str) -> None:
    whole = _one_step(method, 1)
    for passes in (2, 5):
        assert _one_step(method, passes).distance(whole) < 1e-12, f"{passes} passes"


def _cells(method: str, world_size: int, levels: list[int], folder: str, changes: dict[str, Any]) -> list[Result]:
    """In one task of the pool. The last of 2 ranks rests on NVMe."""
    norm = _norm(method)
    plans = [make_method_plan(method, level, world_size, norm, **changes) for level in levels]
    if world_size == 2 and method in NAMED:
        tiers = {key: OffloadPlan("nvme", nvme_path=folder) for key in ("offload_params", "offload_optimizer")}
        plans.append(dataclasses.replace(plans[-1], sharding=dataclasses.replace(plans[-1].sharding, **tiers)))
    return [_train(plan) for plan in plans]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("method", "world_size", "levels"),
    [
        ("ibot", 2, [3]),
        *(pytest.param(name, 2, [0, 1, 2, 3], marks=pytest.mark.slow) for name in NAMED),
        *(pytest.param(name, 2, [3], marks=pytest.mark.soak) for name in METHODS if name not in NAMED),
        pytest.param("dino", 3, [0, 3], marks=pytest.mark.slow),
    ],
)
def test_a_method_in_passes_equals_plain_torch(method: str, world_size: int, levels: list[int], tmp_path: Path) -> None:
    results = run_on_ranks(world_size, _cells, method, world_size, levels, str(tmp_path), {"crop_passes": 5})[0]
    for cell, result in enumerate(results):
        assert result.distance(plain(method, _norm(method))) < TOLERANCE, f"cell {cell}"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", ["dino", "simclr", "ibot"])
def test_passes_of_several_micro_batches(method: str, tmp_path: Path) -> None:
    """A loss for each, and one for all of them."""
    changes = {"batch_per_rank": BATCH // 4, "accumulation_steps": 2, "crop_passes": 3}
    apart = run_on_ranks(2, _cells, method, 2, [0, 3], str(tmp_path), changes)[0]
    joined = {"exact_accumulation": True, **changes}
    together = run_on_ranks(2, _cells, method, 2, [2, 3], str(tmp_path), joined)[0]
    for result in apart:
        assert result.distance(plain(method, _norm(method), 2)) < TOLERANCE
    for result in together:
        assert result.distance(plain(method, _norm(method))) < TOLERANCE


def _fairscale(method: str) -> list[Result]:
    plans = [make_method_plan(method, level, 2, _norm(method), crop_passes=3) for level in (1, 2)]
    return [_train(dataclasses.replace(p, sharding=dataclasses.replace(p.sharding, engine="fairscale"))) for p in plans]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_passes_under_fairscale() -> None:
    for level, result in enumerate(run_on_ranks(2, _fairscale, "ibot")[0], 1):
        assert result.distance(plain("ibot", "vit")) < TOLERANCE, f"level {level}"


def _uneven(method: str, level: int, passes: int) -> Result:
    """The last batch of an epoch has two samples: the third rank has none."""
    plan = make_method_plan(method, level, 3, _norm(method), crop_passes=passes)
    data = plan.config.DATA.TRAIN
    data.DATA_LIMIT, data.DROP_LAST = BATCH + 2, False
    return _train(plan)


@pytest.mark.timeout(200)
def test_a_rank_without_samples_makes_as_many_passes() -> None:
    whole = run_on_ranks(3, _uneven, "dino", 0, 1)[0]
    assert run_on_ranks(3, _uneven, "dino", 3, 5)[0].distance(whole) < TOLERANCE


def _random(passes: int, recomputed: bool) -> Result:
    """Dropout everywhere, in paths too."""
    plan = make_method_plan("lejepa", 0, 1, "vit", crop_passes=passes)
    model = plan.config.MODEL
    for key in ("DROPOUT_RATE", "ATTENTION_DROPOUT_RATE", "DROP_PATH_RATE"):
        setattr(model.TRUNK.VISION_TRANSFORMERS, key, 0.3)
    model.HEAD.PARAMS[0][1]["use_dropout"] = True
    sharding = dataclasses.replace(plan.sharding, checkpoint_every=int(recomputed))
    return _train(dataclasses.replace(plan, sharding=sharding))


def test_random_layers_draw_the_same_in_passes() -> None:
    whole = _random(1, recomputed=False)
    assert abs(whole.losses[0] - plain("lejepa", "vit").losses[0]) > 1e-6, "nothing is dropped"
    assert _random(5, recomputed=False).distance(whole) < TOLERANCE
    assert _random(3, recomputed=True).distance(whole) < TOLERANCE


def _apart(method: str, level: int, world_size: int, passes: int) -> Result:
    plan = make_method_plan(method, level, world_size, "batch", crop_passes=passes)
    plan.config.MODEL.VIEWS_APART = True
    return _train(plan)


@pytest.mark.timeout(200)
def test_batch_norm_keeps_its_statistics_where_views_go_apart() -> None:
    """Running ones too; a pass has whole crops."""
    for world_size, level in ((1, 0), (2, 3)):
        result = run_on_ranks(world_size, _apart, "byol", level, world_size, 2)[0]
        assert result.distance(plain("byol", "batch", views_apart=True)) < TOLERANCE, f"{world_size} ranks"


def _refusal(plan: ResolvedRun) -> str:
    with pytest.raises(ConfigError) as raised:
        build_run(plan, CPU)
    return str(raised.value)


def test_rows_that_see_each_other_are_refused() -> None:
    message = _refusal(make_method_plan("simclr", 0, 1, "batch", crop_passes=2))
    assert "config.TRAINER.CROP_PASSES" in message
    assert "must be 1: the crops of one size share the statistics of batch norm (trunk." in message
    assert "Write config.MODEL.VIEWS_APART=true" in message
    plan = make_method_plan("simclr", 0, 1, "vit", crop_passes=2)
    plan.config.MODEL.VIEWS_APART = True
    plan.config.MODEL.HEAD.PARAMS[0][1]["use_dropout"] = True
    assert "must be 1 where views go apart and a head has dropout" in _refusal(plan)


class _Twice(CrossEntropy):
    def run_student(self, model: nn.Module, batch: Any) -> list[Any]:
        outputs: list[Tensor] = model(batch.images)
        return [outputs[0] + model(batch.images)[0]]


def test_a_method_that_calls_the_model_again_is_refused_by_name() -> None:
    run, schedules, frozen = build_run(make_method_plan("supervised", 0, 1, "group", crop_passes=2), CPU)
    run.method.__class__ = _Twice
    with pytest.raises(ConfigError, match="CrossEntropyLoss calls it again"):
        train(run, schedules, frozen, [])


def _probe(passes: int, evaluated: str) -> dict[str, Tensor]:
    plan = make_method_plan("dino", 0, 1, "vit", crop_passes=passes)
    plan.config.ONLINE_PROBE.USE_PROBE = True
    plan.config.EVALUATED_MODEL = evaluated
    run, schedules, frozen = build_run(plan, CPU)
    train(run, schedules, frozen, [OnlineProbeHook()])
    assert run.probe is not None
    return run.probe.state_dict()


@pytest.mark.parametrize("evaluated", ["student", "teacher"])
def test_the_probe_sees_the_features_of_all_passes(evaluated: str) -> None:
    wanted, found = (_probe(passes, evaluated) for passes in (1, 5))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE)
