"""Every recipe composes, types and resolves; the blocks that VISSL documents do what they say."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import Composed, compose
from vissl_zero.config.recipes import list_recipes
from vissl_zero.data.split_pipeline import build_split_pipeline
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import LarcPlan, Precision, ResolvedRun

RECIPES = [recipe for recipe in list_recipes() if not recipe.is_part]
PARTS = [recipe for recipe in list_recipes() if recipe.is_part]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a recipe for images on disk accepts: files are counted, not opened."""
    folder = tmp_path_factory.mktemp("images")
    for part, number in (("train", 8200), ("test", 300)):  # the largest batch of a paper's is 8,192
        for index in range(number):
            path = folder / part / f"class{index % 2}" / f"{index}.jpg"
            if index < 2:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for kind in ("images", "masks"):
        (folder / "pairs" / kind).mkdir(parents=True)
        for index in range(64):
            (folder / "pairs" / kind / f"{index}.png").touch()
    (folder / "pairs" / "classes.txt").write_text("sky\nground\n")
    return folder


def resolved(recipe: str, *overrides: str) -> ResolvedRun:
    return resolved_from(compose(recipe, overrides), recipe)


def resolved_from(composed: Composed, recipe: str) -> ResolvedRun:
    return resolve(composed.run, "runs/x", recipe=recipe, written=composed.written, host=CPU_HOST)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_resolves(recipe, images):
    composed = compose(recipe.name)
    written = composed.run
    for split, part in (("TRAIN", "train"), ("TEST", "test")):
        if getattr(written.DATA, split).DATA_SOURCES == ["disk_folder"]:
            getattr(written.DATA, split).DATA_PATHS = [f"{images}/{part}"]
        if getattr(written.DATA, split).DATA_SOURCES == ["segmentation_folder"]:
            getattr(written.DATA, split).DATA_PATHS = [f"{images}/pairs"]
    if written.MODEL.TRUNK.NAME == "auto":
        trunk = {"NAME": "resnet", "RESNETS": {"DEPTH": 18, "unknown": 1}}
        if written.MODEL.WEIGHTS_INIT.CONTINUE:
            trunk = {"NAME": "vision_transformer", "VISION_TRANSFORMERS": {"IMAGE_SIZE": 224, "PATCH_SIZE": 16}}
        data = asdict(compose("supervised/digits").run.DATA)
        (images / "config.resolved.yaml").write_text(
            yaml.safe_dump({"config": {"MODEL": {"TRUNK": trunk}, "DATA": data}})
        )
        written.MODEL.WEIGHTS_INIT.PARAMS_FILE = str(images)
    if recipe.name.startswith("distill/"):
        written.LOSS["feature_distillation_loss"].teacher = "digits"
    plan = resolved_from(composed, recipe.name)
    assert plan.recipe == recipe.name
    assert plan.config.MODEL.TRUNK.NAME in ("regnet", "resnet", "vision_transformer", "timm/convnext_small")
    assert plan.notes == ()
    for split in ("TRAIN", "TEST"):
        if getattr(plan.config.DATA, split).TRANSFORMS:
            assert build_split_pipeline(plan.config.DATA, split).transforms


@pytest.mark.parametrize("recipe", [*RECIPES, *PARTS], ids=lambda recipe: recipe.name)
def test_recipe_says_in_a_sentence_what_it_is(recipe):
    assert len(recipe.summary) > 20
    assert recipe.is_part == (recipe.argument in recipe.summary)


def test_quickstart_keeps_its_promises():
    plan = resolved("quickstart/swav_digits")
    written = compose("quickstart/swav_digits").run
    assert (plan.sharding.level, plan.world_size, plan.global_batch) == (3, 2, 64)
    assert plan.config.LOSS["swav_loss"]["queue"]["queue_length"] >= 64
    assert plan.sharding.precision == Precision()
    assert plan.config.DATA.TRAIN.DROP_LAST is True
    assert written.OPTIMIZER.use_zero is None
    assert written.OPTIMIZER.name != "zero"
    assert not written.MODEL.SHARDED_DDP_SETUP.USE_SDP
    assert not written.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP


@pytest.mark.parametrize(("part", "level"), [("oss", 1), ("sdp", 2), ("fsdp", 3)])
def test_documented_blocks_on_a_flat_recipe(part, level):
    plan = resolved(
        "quickstart/swav_digits", f"+config/zero={part}", "config.ZERO.LEVEL=auto", "config.OPTIMIZER.name=null"
    )
    assert plan.sharding.level == level


def test_documented_optimizer_is_that_sgd():
    plan = resolved("supervised/digits", "+config/zero=oss", "config.OPTIMIZER.weight_decay=0.5")
    assert plan.sharding.level == 1
    assert plan.optimizer.name == "sgd"
    assert plan.optimizer.weight_decay == 1e-6
    assert plan.optimizer.options == {"momentum": 0.9, "nesterov": False}
    assert plan.optimizer.larc is None


def test_documented_fsdp_block():
    plan = resolved("supervised/digits", "+config/zero=fsdp")
    assert (plan.sharding.level, plan.sharding.wrap_threshold, plan.sharding.verbose) == (3, 0, True)
    assert plan.sharding.precision == Precision()
    amp = resolved("supervised/digits", "+config/zero=fsdp", "config.MODEL.AMP_PARAMS.USE_AMP=true")
    assert amp.sharding.precision == Precision(autocast="bfloat16")


def test_published_recipe_has_its_larc():
    plan = resolved("pretrain/swav/regnet_16gf", "config.DATA.TRAIN.DATA_SOURCES=[synthetic]")
    assert plan.optimizer.larc == LarcPlan(clip=False, trust_coefficient=0.001, eps=1e-8)


def test_recipes_stand_at_the_top_and_the_package_reaches_them():
    root = Path(__file__).parents[2]
    at_the_top = {path.relative_to(root / "configs") for path in (root / "configs/config").rglob("*.yaml")}
    packaged = root / "vissl_zero/conf/config"
    assert Path("config/pretrain/swav/my_photos.yaml") in at_the_top
    assert packaged.resolve() == root / "configs/config"
    # A link, not a copy: a recipe added at the top is in the next wheel without a word more.
    assert packaged.is_symlink() and not Path(packaged.readlink()).is_absolute()
