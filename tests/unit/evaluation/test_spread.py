"""RankMe and LiDAR against their formulas written out, and what they say of features with a known spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.unit.evaluation.example_run import make_config, make_plan
from tests.unit.evaluation.test_knn_hook import trained
from tests.unit.evaluation.test_patch_pictures import make_transformer_config
from vissl_zero.data.source import Subset, build_eval_sources
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.evaluation.features import lidar, rankme, view_features
from vissl_zero.evaluation.pictures import patch_pictures
from vissl_zero.resolve.resolved import OptimizerPlan


def test_rankme_is_the_papers_formula():
    rows = np.random.default_rng(0).normal(size=(40, 6)) * [5, 3, 2, 1, 0.5, 0.1]
    values = np.linalg.svd(rows, compute_uv=False)
    shares = values / values.sum() + 1e-7
    assert rankme(torch.from_numpy(rows)) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-12)


def test_rankme_of_features_that_are_hardly_used_is_no_rounding():
    """An orthogonal matrix keeps singular values: the root of rounding would be 1e-8."""
    rows = torch.randn(9000, 6, dtype=torch.float64) * torch.tensor([1, 1e-3, 1e-6, 1e-9, 1e-9, 0])
    turned = rows @ torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    assert rankme(turned) == pytest.approx(rankme(rows), rel=1e-13)


def test_rankme_of_known_spreads():
    assert rankme(torch.eye(8)) == pytest.approx(8, rel=1e-4)
    assert rankme(torch.ones(8, 5)) == pytest.approx(1, rel=1e-3)
    assert math.isnan(rankme(torch.full((3, 2), torch.nan)))


def test_lidar_is_the_papers_formula():
    generator = np.random.default_rng(1)
    views = generator.normal(size=(7, 1, 4)) * [3, 2, 1, 0] + generator.normal(size=(7, 5, 4)) * [0.1, 0.5, 1, 2]
    mean = views.mean(axis=(0, 1))
    between, within = np.zeros((4, 4)), 1e-4 * np.eye(4)
    for image in views:
        center = image.mean(axis=0)
        between += np.outer(center - mean, center - mean) / 6
        for view in image:
            within += np.outer(view - center, view - center) / (7 * 4)
    # The eigenvalues of W^-1/2 B W^-1/2 are those of W^-1 B.
    values = np.linalg.eigvals(np.linalg.solve(within, between)).real.clip(min=0)
    shares = values / values.sum() + 1e-7
    assert lidar(torch.from_numpy(views)) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-6)


def test_lidar_counts_what_tells_images_apart_and_not_what_augmentation_changes():
    torch.manual_seed(0)
    noise = torch.randn(30, 8, 10) * torch.tensor([0.01] * 3 + [3.0] * 7)
    images = torch.cat([torch.randn(30, 1, 3), torch.zeros(30, 1, 7)], dim=2)
    assert lidar(images + noise) == pytest.approx(3, abs=0.3)
    assert rankme((images + noise).flatten(0, 1)) > 6
    assert math.isnan(lidar(torch.full((3, 2, 2), torch.inf)))


def test_a_run_reports_them_and_other_votes():
    options = {"ALSO_TOPK": [1, 5, 200], "ALSO_SIGMA": [1.0], "LIDAR_IMAGES": 9, "LIDAR_VIEWS": 3}
    run, _ = trained(make_config(**options), max_steps=2)
    results = run.results
    assert 1 <= results["rankme_before"] <= 32 and 1 <= results["rankme_after"] <= 32
    assert results["rankme_before"] != results["rankme_after"]
    assert 1 <= results["lidar"] <= 9
    votes = results["knn_top1_by_vote"]
    assert list(votes) == [f"k={k} T={sigma}" for k in (5, 1, 200) for sigma in ("0.07", "1")]
    assert votes["k=5 T=0.07"] == results["knn_top1_after"]
    assert votes["k=1 T=0.07"] == votes["k=1 T=1"]  # a vote of one
    assert len(set(votes.values())) > 2


@pytest.mark.parametrize("what", ["lidar", "pictures"])
def test_schedule_free_weights_are_those_to_evaluate(what):
    """LiDAR and pictures look at the weights that kNN and RankMe look at, not at those that are trained."""
    optimizer = OptimizerPlan("adamw_schedule_free", {}, lr={"name": "constant", "value": 0.01})
    plan = make_plan(make_transformer_config(), max_steps=3, optimizer=optimizer)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [])
    weight, seen = next(run.sharded.model.parameters()), []
    run.sharded.model.register_forward_hook(lambda *_: seen.append(weight.detach().clone()))
    trained = weight.detach().clone()
    with run.sharded.evaluated():
        evaluated = weight.detach().clone()
    assert not torch.equal(trained, evaluated)
    source, _ = build_eval_sources(plan.config.DATA, plan.seed)
    if what == "lidar":
        view_features(run, Subset(source, (0, 1, 2)), 2)
    else:
        patch_pictures(run, source, [0, 5])
    assert seen and all(torch.equal(found, evaluated) for found in seen)
    assert torch.equal(weight, trained)
