"""Tiles of images and their orders, and what recipes of methods that use them are refused for."""

from __future__ import annotations

import pytest
import torch

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.config.derive.components import method_of
from vissl_zero.methods.jigsaw.method import permutations, random_order, shuffled, tiles_of
from vissl_zero.models.keyed_random import set_random_key


def test_tiles_are_cut_row_by_row_and_the_rest_is_left_out():
    image = torch.arange(49.0).view(1, 1, 7, 7)
    tiles = tiles_of(image, 9)
    assert tiles.shape == (9, 1, 1, 2, 2)
    assert tiles[1].flatten().tolist() == [2, 3, 9, 10]
    assert tiles[3].flatten().tolist() == [14, 15, 21, 22]


def test_each_image_is_shuffled_by_its_own_order():
    tiles = torch.arange(8).view(4, 2)  # tile t of image j: 2t + j
    orders = torch.tensor([[3, 2, 1, 0], [0, 1, 3, 2]])
    assert shuffled(tiles, orders).T.tolist() == [[6, 4, 2, 0], [1, 3, 7, 5]]


def test_permutations_are_different_and_far_apart():
    assert len(set(map(tuple, permutations(4, 24).tolist()))) == 24
    few = permutations(4, 4)
    assert all((few[i] != few[j]).all() for i in range(4) for j in range(i))  # a Latin square


def test_an_order_belongs_to_a_sample_not_to_its_row():
    orders = {}
    for ids in ([5, 9, 2], [2, 5]):
        set_random_key(0, 1, torch.tensor(ids))
        found = random_order(len(ids), 4, "test", torch.device("cpu"))
        assert found.sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * len(ids)
        for sample, order in zip(ids, found.tolist(), strict=True):
            assert orders.setdefault(sample, order) == order


@pytest.mark.parametrize(
    ("recipe", "override", "said"),
    [
        ("npid", "config.LOSS.nce_loss_with_memory.loss_type=nse", "nce or cross_entropy"),
        ("npid", "config.MODEL.HEAD.PARAMS=[[pirl_head,{dims:[64,64]}]]", "one mlp"),
        ("pirl", "config.MODEL.HEAD.PARAMS=[[pirl_head,{dims:[64,64],num_towers:5}]]", "4 or 9"),
        (
            "jigsaw",
            "config.MODEL.HEAD.PARAMS=[[jigsaw_head,{dims:[64,8],num_towers:4,num_permutations:25}]]",
            "24 orders",
        ),
        ("rotnet", "config.MODEL.HEAD.PARAMS=[[mlp,{dims:[64,5]}]]", "4 outputs"),
        ("deepcluster_v2", "config.LOSS.deepclusterv2_loss.num_clusters=[]", "one or more numbers"),
        ("deepcluster_v2", "config.LOSS.deepclusterv2_loss.memory_params.crops_for_mb=[2]", "from 0 to 1"),
        ("distillation", "config.LOSS.distillation_loss.teacher=nowhere", "no config.resolved.yaml"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_with_the_fix(recipe, override, said):
    cfg = compose(f"digits/{recipe}", [override]).run
    (problem,) = method_of(cfg.LOSS["name"]).problems(cfg, CPU_HOST)
    assert said in problem.must
    assert problem.fix


@pytest.mark.parametrize("recipe", ["npid", "pirl", "deepcluster_v2", "distillation", "rotnet", "jigsaw"])
def test_the_recipes_themselves_are_not(recipe):
    cfg = compose(f"digits/{recipe}").run
    assert method_of(cfg.LOSS["name"]).problems(cfg, CPU_HOST) == []
