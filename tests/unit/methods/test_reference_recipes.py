"""Recipes ``reference/<dataset>/<method>`` and the script that trains them, ``benchmarks/reference.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vissl_zero
from tests.benchmark_scripts import load_benchmark
from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.config.recipes import list_recipes
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.optimizer_plan import peak
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

reference = load_benchmark("reference")
SCRIPT = Path(reference.__file__)
RECIPES = {
    recipe.name: recipe for recipe in list_recipes() if recipe.name.startswith("reference/") and not recipe.is_part
}
# Epochs, batch, and learning rates of the benchmark: SGD's, and Adam's in SwAV.
SETTINGS = {"cifar10": (200, 512, 0.24, 0.004), "imagenette": (800, 256, 0.06, 0.001)}


def resolved(recipe: str, *overrides: str) -> ResolvedRun:
    words = ["config.DATA.TRAIN.DATA_SOURCES=[synthetic]", "config.DATA.TEST.DATA_SOURCES=[synthetic]", *overrides]
    return resolve(compose(recipe, words).run, "runs/x", recipe=recipe, host=CPU_HOST)


def tiny_images(folder: Path) -> Path:
    """A folder of two classes, dark and bright, with eight images of 32 pixels each in both splits."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for name, least in (("bright", 128), ("dark", 0)):
            (folder / split / name).mkdir(parents=True)
            for index in range(8):
                pixels = random.integers(least, least + 128, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder


def test_every_recipe_has_a_published_figure_and_says_it():
    published = {
        f"reference/{dataset}/{method}": top1
        for dataset, top1s in reference.PUBLISHED.items()
        for method, top1 in top1s.items()
    }
    assert RECIPES.keys() == published.keys()
    for name, top1 in published.items():
        assert f": {top1} % kNN top-1" in RECIPES[name].summary


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_settings_of_the_benchmark(name):
    plan = resolved(name)
    _, dataset, method = name.split("/")
    epochs, batch, sgd, adam = SETTINGS[dataset]
    config, rate = plan.config, peak(plan.optimizer.lr)
    assert (config.OPTIMIZER.num_epochs, plan.global_batch) == (epochs, batch)
    assert rate == pytest.approx({"swav": adam, "simsiam": 0.06}.get(method, sgd))
    decay = {"swav": 1e-6}.get(method, 5e-4)
    assert (plan.optimizer.weight_decay, config.OPTIMIZER.regularize_bn, config.OPTIMIZER.regularize_bias) == (
        decay,
        True,
        True,
    )
    knn = config.NEAREST_NEIGHBOR
    assert (knn.TOPK, knn.SIGMA, knn.EVERY_NUM_EPOCHS, knn.MAX_TEST_IMAGES) == (200, 0.1, 1, 10000)
    assert config.MODEL.TRUNK.RESNETS.DEPTH == 18


def lightly_transform(method: str) -> Callable[[Image.Image], list[Tensor]]:
    """The transform of a method in lightly's script for CIFAR-10."""
    from lightly import transforms

    if method == "byol":
        first = transforms.BYOLView1Transform(input_size=32, gaussian_blur=0.0)
        return transforms.BYOLTransform(first, transforms.BYOLView2Transform(input_size=32, gaussian_blur=0.0))
    if method == "dino":
        return transforms.DINOTransform(global_crop_size=32, n_local_views=0, cj_strength=0.5, gaussian_blur=(0, 0, 0))
    if method == "simsiam":
        return transforms.SimSiamTransform(input_size=32, gaussian_blur=0.0)
    if method == "swav":
        crops = {"crop_sizes": [32], "crop_counts": [2], "crop_min_scales": [0.14], "crop_max_scales": [1.0]}
        return transforms.SwaVTransform(**crops, cj_strength=0.5, gaussian_blur=0)
    return transforms.SimCLRTransform(input_size=32, cj_strength=0.5, gaussian_blur=0.0)


def statistics(views: list[Tensor]) -> list[float]:
    """Brightness, contrast, two colors, grayness and two gradients of each view; what the views have in common."""
    found = []
    for view in views:
        colors, gradients = view.diff(dim=0).abs().mean(dim=(1, 2)), [view.diff(dim=dim).abs().mean() for dim in (1, 2)]
        found += [view.mean(), view.std(), *colors, (view.std(dim=0).mean() < 0.2).float(), *gradients]
    return [float(value) for value in (*found, (views[0] - views[1]).abs().mean(), (views[0] * views[1]).mean())]


@pytest.mark.filterwarnings("ignore")  # lightly's own
@pytest.mark.parametrize("method", ["byol", "dino", "simclr", "simsiam", "swav"])
def test_crops_are_distributed_as_lightlys(method):
    num_images, num_draws = 40, 12
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (num_images, 6, 6, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC) for pixels in coarse]
    ours, theirs = vissl_zero.load_views(f"reference/cifar10/{method}"), lightly_transform(method)
    draws = range(num_draws)
    own = np.array([[statistics(ours(image, epoch=e, index=i)) for e in draws] for i, image in enumerate(images)])
    torch.manual_seed(0)
    np.random.seed(0)
    peer = np.array([[statistics(theirs(image)) for _ in draws] for image in images])
    apart = (own - peer).mean(axis=1)  # of each image
    assert np.abs(apart.mean(axis=0) / (apart.std(axis=0) / num_images**0.5)).max() < 4


def test_a_chain_of_layers_may_take_views_apart_and_other_heads_may_not():
    assert resolved("reference/cifar10/simclr").config.MODEL.VIEWS_APART
    chain = "[[chain, {heads: [[mlp, {dims: [512, 128]}], [swav_head, {dims: [128, 128], num_clusters: [8]}]]}]]"
    for words in (
        f"config.MODEL.HEAD.PARAMS={chain}",
        "config.MODEL.HEAD.PARAMS=[[swav_head, {dims: [512, 128], num_clusters: [8]}]]",
    ):
        with pytest.raises(
            ConfigError, match=r"or a chain of these where config\.MODEL\.VIEWS_APART is true \(got swav_head\)"
        ):
            resolved("reference/cifar10/swav", "config.MODEL.VIEWS_APART=true", words)


@pytest.mark.parametrize(("method", "loss"), [("byol", "byol_loss"), ("dino", "dino_loss")])
def test_a_final_momentum_beyond_one_is_refused(method, loss):
    with pytest.raises(ConfigError, match=rf"LOSS\.{loss}\.final_momentum: must be .*got 1\.5"):
        resolved(f"reference/cifar10/{method}", f"config.LOSS.{loss}.final_momentum=1.5")


def test_the_page_has_the_table_of_the_figures():
    figures = reference.PAGE.with_suffix(".json")
    rows = json.loads(figures.read_text()) if figures.exists() else []
    first, last = reference.MARKS
    page = reference.PAGE.read_text()
    assert page[page.index(first) + len(first) : page.index(last)].strip() == reference.table(rows)


def test_a_row_replaces_that_of_the_same_seed_and_changes(tmp_path):
    page = tmp_path / "page.md"
    row = {
        "top1": 80.0,
        "epoch": 3,
        "epochs": 4,
        "hours": 1.5,
        "changes": "",
        "date": "2026-01-01",
        "machine": "1 GPU",
        "seed": 0,
    }
    reference.note(page, "cifar10", "simclr", row)
    reference.note(page, "cifar10", "simclr", {**row, "seed": 1})
    reference.note(page, "cifar10", "simclr", {**row, "changes": "OPTIMIZER.num_epochs=1"})
    reference.note(page, "cifar10", "simclr", {**row, "top1": 81.0})
    lines = [line for line in page.read_text().splitlines() if "`reference/cifar10/simclr`" in line]
    assert [line.split("|")[3].strip() for line in lines] == ["81.0", "80.0", "80.0"]
    assert "| 3 of 4 | 1.5 | none | 2026-01-01 | 1 GPU | 0 |" in lines[0]


def test_the_best_epoch_counts_and_not_the_point_before_training():
    summary = {"knn_top1_by_step": [[0, 0.9], [10, 0.3], [20, 0.5], [30, 0.5]]}
    assert reference._reached(summary) == {"top1": 50.0, "epoch": 2, "epochs": 3}


def test_wrong_input_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    for words, sentence in (
        (["simcrl", "--data", str(tmp_path)], "METHOD must be one of barlow_twins, byol"),
        (["simclr", "--data", str(tmp_path)], "DATA must be a folder with train/ and test/"),
    ):
        monkeypatch.setattr(sys, "argv", ["reference.py", *words])
        with pytest.raises(SystemExit) as stopped:
            reference.main()
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_recipe_trains_from_end_to_end_and_leaves_its_row(tmp_path):
    page, images = tmp_path / "page.md", tiny_images(tmp_path / "images")
    words = ["simclr", "--data", images, "--epochs", "1", "--images", "12", "--seed", "3", "--page", page]
    changes = ["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=6", "config.DATA.NUM_DATALOADER_WORKERS=0"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, words), *changes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.index("dry run of reference/cifar10/simclr")
        < done.stdout.index("for 2 steps")
        < done.stdout.index("published: 84.8 %")
    )
    row = json.loads(page.with_suffix(".json").read_text())[0]
    assert (row["method"], row["seed"], row["epoch"], row["epochs"]) == ("simclr", 3, 1, 1)
    assert row["changes"].startswith("OPTIMIZER.num_epochs=1 DATA.TRAIN.DATA_LIMIT=12 ")
    assert 0 <= row["top1"] <= 100 and f"| {row['top1']} | 1 of 1 |" in page.read_text()
