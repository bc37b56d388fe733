"""Recipes that freeze trunk and head train nothing, and say of which features kNN is."""

from __future__ import annotations

import pytest
import torch

from vissl_zero.config.compose import compose
from vissl_zero.config.recipes import recipe_files
from vissl_zero.errors import ConfigError
from vissl_zero.models.model import build_model
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

SETTINGS = "config.MODEL.FEATURE_EVAL_SETTINGS"
TAPS = f"{SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP"


def _plan(*words: str) -> ResolvedRun:
    run = compose("digits/simclr", [f"{SETTINGS}.EVAL_MODE_ON=true", *words]).run
    return resolve(run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))


def test_knn_of_the_head_s_embeddings():
    head = "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 8]}], [mlp, {dims: [8, 4]}]]"
    plan = _plan(f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD=true", head)
    assert plan.config["TEST_ONLY"] and plan.config["LOSS"]["name"] == "CrossEntropyLoss"
    assert plan.config["NEAREST_NEIGHBOR"]["MAX_TRAIN_IMAGES"] == 10**8
    assert any("Nothing is trained" in note for note in plan.notes)
    model = build_model(plan.config["MODEL"], num_classes=10).eval()
    with torch.no_grad():
        (rows,) = model([torch.rand(3, 3, 32, 32)], features_only=True)
    assert rows.shape == (3, 4)


def test_knn_of_the_trunk_s_features_needs_no_head():
    plan = _plan(
        f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true",
        "config.MODEL.HEAD.PARAMS=[]",
        f"{TAPS}=[[res5avg, [Identity, []]]]",
    )
    assert plan.config["TEST_ONLY"] and not plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]["FREEZE_TRUNK_AND_HEAD"]
    maps = f"{TAPS}=[[res3, [AdaptiveAvgPool2d, [[2, 2]]]], [res5avg, [Identity, []]]]"
    plan = _plan(f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true", maps)
    model = build_model(plan.config["MODEL"], num_classes=10).eval()
    with torch.no_grad():
        (rows,) = model([torch.rand(3, 3, 32, 32)], features_only=True)
    assert model.feature_taps.widths == [rows.shape[1] - model.trunk.feature_dim, model.trunk.feature_dim]
    with pytest.raises(ConfigError, match="must name a pooling"):
        _plan(f"{SETTINGS}.EXTRACT_TRUNK_FEATURES_ONLY=true", f"{TAPS}=[[res3, [MeanPool, []]]]")


def test_images_alone_can_be_measured():
    run = compose("digits/supervised", ["config.TEST_ONLY=true", "config.DATA.TEST.DATA_SOURCES=[digits]"]).run
    run.DATA.TRAIN = type(run.DATA.TRAIN)()
    run.DATA.TEST.TRANSFORMS = [{"name": "ToTensor"}]
    plan = resolve(run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))
    assert plan.config["DATA"]["TRAIN"] == plan.config["DATA"]["TEST"]
    assert not plan.config["NEAREST_NEIGHBOR"]["USE_KNN"]
    assert any("config.DATA.TRAIN names none" in note for note in plan.notes)


def test_without_their_mode_the_switches_are_refused():
    run = compose("digits/simclr", [f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD=true"]).run
    with pytest.raises(ConfigError, match="FREEZE_TRUNK_AND_HEAD: needs EVAL_MODE_ON"):
        resolve(run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))


def test_a_knn_recipe_is_complete_and_a_base_of_its_models(tmp_path):
    data = "DATA: {TRAIN: {DATA_SOURCES: [disk_folder]}}"
    for name, text in {
        "knn/eval": f"config: {{MODEL: {{TRUNK: {{NAME: resnet}}}}, {data}, NEAREST_NEIGHBOR: {{TOPK: 20}}}}",
        "knn/models/vit": "config: {MODEL: {TRUNK: {NAME: vision_transformer}}, NEAREST_NEIGHBOR: {TOPK: 10}}",
    }.items():
        file = tmp_path / "config" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = [str(recipe) for recipe in recipe_files(tmp_path / "config", with_parts=True)]
    assert found == ["knn/eval", "knn/eval + knn/models/vit"]
