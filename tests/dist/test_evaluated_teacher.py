"""EVALUATED_MODEL=teacher: kNN, spread, pictures and probe are of the momentum copy, the same at every level."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.unit.evaluation.example_run import make_config, make_plan
from tests.unit.evaluation.test_patch_pictures import VIT
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Run
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.accuracy import OnlineProbeHook
from vissl_zero.evaluation.features import evaluating
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.resolve.resolved import OffloadPlan

_STEPS = 4


def _config(which: str, trunk: str) -> dict[str, Any]:
    """MoCo v2, whose teacher sees the second crop, on a RegNet (batch norm) or a vision transformer (pictures)."""
    config = make_config(EVERY_NUM_EPOCHS=1, LIDAR_IMAGES=6, LIDAR_VIEWS=3)
    crops = {"num_crops": [2], "size_crops": [8], "crop_scales": [[0.3, 1.0]], "total_num_crops": 2}
    config["DATA"]["TRAIN"]["TRANSFORMS"].insert(0, {"name": "ImgPilToMultiCrop"} | crops)
    width = 32
    if trunk == "vision_transformer":
        config["MODEL"]["TRUNK"] = {"NAME": trunk, "VISION_TRANSFORMERS": VIT}
        width = VIT["HIDDEN_DIM"]
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [width, 8]}]]
    keys = {"embedding_dim": 8, "queue_size": 32, "momentum": 0.9}
    config["LOSS"] = {"name": "moco_loss", "moco_loss": keys}
    config["ONLINE_PROBE"] |= {"USE_PROBE": True, "LR": 0.03}
    config["EVALUATED_MODEL"] = which
    return config


def _features_by_hand(run: Run, model: torch.nn.Module, hook: KnnHook) -> Tensor:
    """Features of the images of the index, one batch, by the model itself."""
    source = hook.neighbors_after.index_source  # type: ignore[union-attr]
    pixels = [np.asarray(source.image(index), dtype=np.float64) / 255 for index in range(len(source))]
    images = (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) - 0.3) / 0.4
    with evaluating(model):
        (rows,) = model([images], features_only=True)
    return rows


def _train(
    which: str, trunk: str, level: int, world_size: int, accumulation: int = 1, disk: str = ""
) -> tuple[dict[str, Any], list[Any], dict[str, Tensor], dict[str, float]]:
    plan = make_plan(_config(which, trunk), level=level, world_size=world_size, max_steps=_STEPS)
    plan = dataclasses.replace(
        plan,
        batch_per_rank=plan.batch_per_rank // accumulation,
        accumulation_steps=accumulation,
        exact_accumulation=accumulation > 1,
        sharding=dataclasses.replace(
            plan.sharding, offload_params=OffloadPlan("nvme" if disk else "none", disk or None)
        ),
    )
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hook = KnnHook(plan)
    train(run, schedules, frozen, [hook, OnlineProbeHook()])
    assert hook.neighbors_after is not None
    pictures = [(picture.components, picture.attention) for picture in hook.pictures]
    ranks = {}
    if world_size == 1:
        for name, model in (("student", run.sharded.model), ("teacher", run.sharded.teacher)):
            rows = _features_by_hand(run, model, hook).double()
            values = torch.linalg.svdvals(rows)
            shares = values / values.sum() + 1e-7
            ranks[name] = float(torch.exp(-(shares * shares.log()).sum()))
    return run.results, pictures, dict(run.probe.state_dict()), ranks  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=["regnet", "vision_transformer"])
def alone(request: Any) -> Any:
    return request.param, {which: _train(which, request.param, 0, 1) for which in ("student", "teacher")}


def test_each_is_measured_by_its_own_features(alone: Any) -> None:
    _, found = alone
    for which in ("student", "teacher"):
        results, _, _, ranks = found[which]
        assert results["rankme_after"] == pytest.approx(ranks[which], rel=1e-4)
        assert abs(ranks["student"] - ranks["teacher"]) > 1e-3
    one, other = (found[which] for which in ("student", "teacher"))
    assert one[0]["rankme_before"] == pytest.approx(other[0]["rankme_before"], rel=1e-9)
    assert one[0]["lidar"] != other[0]["lidar"]
    assert not torch.equal(one[2]["weight"], other[2]["weight"])
    assert 0 <= other[0]["probe_top1"] <= 1


def test_pictures_are_the_teachers(alone: Any) -> None:
    trunk, found = alone
    pictures = [found[which][1] for which in ("student", "teacher")]
    if trunk == "regnet":
        assert pictures == [[], []]
    else:
        assert any((a[0] != b[0]).any() for a, b in zip(*pictures, strict=True))


@pytest.mark.parametrize(("level", "is_on_disk"), [(0, False), (2, False), (3, False), (3, True)])
def test_the_same_at_every_level(alone: Any, tmp_path: Path, level: int, is_on_disk: bool) -> None:
    trunk, found = alone
    wanted, disk = found["teacher"], str(tmp_path) if is_on_disk else ""
    for results, pictures, probe, _ in run_on_ranks(2, _train, "teacher", trunk, level, 2, 1, disk):
        assert results.keys() == wanted[0].keys()
        for name, value in wanted[0].items():
            is_rank = name.startswith(("rankme", "lidar"))
            assert results[name] == (pytest.approx(value, rel=1e-5) if is_rank else value), name
        for (components, attention), (c, a) in zip(pictures, wanted[1], strict=True):
            assert np.abs(components.astype(int) - c).max() <= 1
            assert np.abs(attention.astype(int) - a).max() <= 1
        for name, value in wanted[2].items():
            torch.testing.assert_close(probe[name], value, rtol=0, atol=1e-10)


def test_exact_accumulation_shows_the_probe_the_same_features() -> None:
    """A transformer has no batch norm: the same batch in one piece and in two gives the same probe."""
    wanted, found = (_train("teacher", "vision_transformer", 0, 1, accumulation)[2] for accumulation in (1, 2))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


def test_a_loss_without_a_momentum_copy_is_refused() -> None:
    config = make_config()
    config["EVALUATED_MODEL"] = "teacher"
    with pytest.raises(ConfigError, match="CrossEntropyLoss has no teacher"):
        build_run(make_plan(config), torch.device("cpu"))
