"""Tiles of images and their orders, and what recipes of methods that use them are refused for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.errors import ConfigError
from vissl_zero.methods.pretext import (
    PIRL,
    Jigsaw,
    PIRLHead,
    RotNet,
    SiameseConcatView,
    permutations,
    permutations_of,
    random_order,
    shuffled,
    tiles_of,
)
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.resolve.components import loss_options, method_of
from vissl_zero.resolve.decisions import Decisions


def test_tiles_are_cut_row_by_row_and_the_rest_is_left_out():
    image = torch.arange(49.0).view(1, 1, 7, 7)
    tiles = tiles_of(image, 9)
    assert tiles.shape == (9, 1, 1, 2, 2)
    assert tiles[1].flatten().tolist() == [2, 3, 9, 10]
    assert tiles[3].flatten().tolist() == [14, 15, 21, 22]


def test_an_image_and_tiles_that_the_transforms_have_made_go_to_the_model_as_they_are():
    crops = [torch.zeros(2, 3, 8, 8), torch.zeros(8, 3, 4, 4)]
    batch, seen = ImageBatch(crops, [1, 4], None, torch.arange(2), 2), []
    method = PIRL(num_towers=4, are_cut=True, embedding_dim=3)
    method.run_student(lambda images, probe: seen.append(images), batch)
    assert seen[0] is crops


def test_each_image_is_shuffled_by_its_own_order():
    tiles = torch.arange(8).view(4, 2)  # tile t of image j: 2t + j
    orders = torch.tensor([[3, 2, 1, 0], [0, 1, 3, 2]])
    assert shuffled(tiles, orders).T.tolist() == [[6, 4, 2, 0], [1, 3, 7, 5]]


def test_permutations_are_different_and_far_apart():
    assert len(set(map(tuple, permutations(4, 24).tolist()))) == 24
    few = permutations(4, 4)
    assert all((few[i] != few[j]).all() for i in range(4) for j in range(i))  # a Latin square


def test_orders_are_made_again_rather_than_saved():
    assert Jigsaw(num_towers=4, num_permutations=24).state_dict() == {}


def test_an_order_belongs_to_a_sample_not_to_its_row():
    orders = {}
    for ids in ([5, 9, 2], [2, 5]):
        set_random_key(0, 1, torch.tensor(ids))
        found = random_order(len(ids), 4, "test", torch.device("cpu"))
        assert found.sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * len(ids)
        for sample, order in zip(ids, found.tolist(), strict=True):
            assert orders.setdefault(sample, order) == order


def batch_of(images, ids, num_crops):
    return ImageBatch(
        images=[images], num_crops=[num_crops], targets=None, sample_ids=torch.tensor(ids), num_global=len(ids)
    )


def test_an_image_is_turned_by_one_angle_of_its_own():
    ids = [5, 9, 2, 7, 1, 3]
    images = torch.rand(6, 3, 4, 4)
    set_random_key(0, 1, torch.tensor(ids))
    method, seen = RotNet(all_angles=False), []
    method.run_student(lambda tensors: seen.extend(tensors) or tensors, batch_of(images, ids, 1))
    labels = method.labels(batch_of(images, ids, 1), 6, torch.device("cpu"))
    assert len(set(labels.tolist())) > 1
    for image, turned, label in zip(images, seen[0], labels.tolist(), strict=True):
        assert torch.equal(turned, torch.rot90(image, label, (1, 2)))


def test_tiles_that_come_cut_are_shuffled_by_the_orders_of_a_file(tmp_path):
    ids, file = [5, 9, 2], tmp_path / "orders.npy"
    np.save(file, np.array([[1, 2, 3, 4], [4, 3, 2, 1]]))
    tiles = torch.rand(4, 3, 3, 2, 2)  # tile, image
    set_random_key(0, 1, torch.tensor(ids))
    method, seen = Jigsaw(num_towers=4, num_permutations=2, perm_file=str(file), are_cut=True), []
    batch = batch_of(tiles.flatten(0, 1), ids, 4)
    method.run_student(lambda tensors: seen.extend(tensors) or tensors, batch)
    labels = method.labels(batch, 3, torch.device("cpu"))
    for index, label in enumerate(labels.tolist()):
        assert torch.equal(seen[0].view_as(tiles)[:, index], tiles[:, index].flip(0) if label else tiles[:, index])


def test_a_file_of_other_orders_is_refused(tmp_path):
    np.save(tmp_path / "orders.npy", np.array([[1, 2, 2, 4]]))
    for file in ("orders.npy", "missing.npy"):
        with pytest.raises(ConfigError, match="must hold 1 orders of 4 tiles"):
            permutations_of(str(tmp_path / file), 4, 1)


def test_tiles_side_by_side():
    features = torch.arange(12.0).view(6, 2)  # tile 0 of images 0 and 1, tile 1, tile 2
    assert SiameseConcatView(3)(features).tolist() == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_pirl_projects_an_image_and_its_tiles_by_heads_of_their_own():
    of_tiles = [["mlp", {"dims": [6, 4]}], ["siamese_concat_view", {"num_towers": 4}], ["mlp", {"dims": [16, 5]}]]
    head = PIRLHead([6, 5], 4, of_image=[["mlp", {"dims": [6, 3, 5], "use_relu": True}]], of_tiles=of_tiles)
    rows = torch.rand(10, 6)
    images, tiles = head(rows)
    assert torch.equal(images, head.of_image(rows[:2])) and tiles.shape == (2, 5)
    first = head.of_tiles[0](rows[[2, 4, 6, 8]]).flatten()  # the tiles of the first image
    torch.testing.assert_close(tiles[0], head.of_tiles[2](first[None])[0])
    with pytest.raises(ConfigError, match="both of_image and of_tiles"):
        PIRLHead([6, 5], 4, of_tiles=of_tiles)


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
    (problem,) = method_of(cfg.LOSS["name"]).problems(cfg, Decisions(cfg, CPU_HOST))
    assert said in problem.must
    assert problem.fix


@pytest.mark.parametrize(
    ("recipe", "head"),
    [("jigsaw", "[jigsaw_head,{dims:[64,8]}]"), ("pirl", "[pirl_head,{dims:[64,8]}]")],
)
def test_a_head_that_names_no_number_of_tiles_takes_nine(recipe, head):
    cfg = compose(f"digits/{recipe}", [f"config.MODEL.HEAD.PARAMS=[{head}]"]).run
    assert loss_options(cfg)["num_towers"] == 9
    assert loss_options(cfg).get("num_permutations", 1000) == 1000
    assert method_of(cfg.LOSS["name"]).problems(cfg, Decisions(cfg, CPU_HOST)) == []


@pytest.mark.parametrize("recipe", ["npid", "pirl", "deepcluster_v2", "distillation", "rotnet", "jigsaw"])
def test_the_recipes_themselves_are_not(recipe):
    cfg = compose(f"digits/{recipe}").run
    assert method_of(cfg.LOSS["name"]).problems(cfg, Decisions(cfg, CPU_HOST)) == []
