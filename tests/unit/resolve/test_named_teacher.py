"""A teacher that is named by its weights alone: trunk, width and normalization come from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

LOSS = "config.LOSS.feature_distillation_loss"


def resolved(*words: str) -> ResolvedRun:
    recipe = "digits/feature_distillation"
    return resolve(compose(recipe, words).run, "runs/x", recipe=recipe, host=CPU_HOST)


def keys_of(plan: ResolvedRun) -> dict[str, Any]:
    return dict(plan.config.LOSS["feature_distillation_loss"])


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "vit.pth"
    net = timm.create_model("vit_tiny_patch16_224", embed_dim=64, depth=2, num_heads=1, img_size=32, patch_size=8)
    torch.save(net.state_dict(), path)
    return path


def test_the_trunk_of_a_file_is_detected(vit):
    plan = resolved(f"{LOSS}.teacher={vit}")
    teacher, keys = plan.config.DISTILLATION.TEACHER_MODEL, keys_of(plan)
    assert plan.learns_from_other and teacher.WEIGHTS_INIT.PARAMS_FILE == keys["teacher"] == str(vit)
    assert teacher.TRUNK.NAME.startswith("timm/vit") and teacher.TRUNK.PARAMS["model_args"]["embed_dim"] == 64
    assert keys["embedding_dim"] == 64 and plan.config.MODEL.HEAD.PARAMS[0][1]["dims"] == [-1, 64]
    assert keys["teacher_mean"] == [0.485, 0.456, 0.406] and keys["student_mean"] == [0.5, 0.5, 0.5]
    assert plan.config.MODEL.TRUNK.NAME == "regnet"  # of the student


def test_the_trunk_of_a_run_folder_and_its_normalization_are_those_of_the_run(monkeypatch, tmp_path):
    plan = resolved(f"{LOSS}.teacher_std=[0.3,0.3,0.3]")
    teacher, keys = plan.config.DISTILLATION.TEACHER_MODEL, keys_of(plan)
    assert Path(keys["teacher"]).name == "digits_teacher" and teacher.TRUNK.REGNET.w_0 == 8
    assert (keys["teacher_mean"], keys["teacher_std"]) == ([0.5] * 3, [0.3] * 3)
    (tmp_path / "mine").symlink_to(keys["teacher"])
    monkeypatch.chdir(tmp_path)
    assert keys_of(resolved(f"{LOSS}.teacher=mine"))["teacher"] == str(tmp_path / "mine")  # workers may start elsewhere


def problems(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*words)
    return str(caught.value)


def test_a_teacher_must_be_named_exist_and_not_be_described_too():
    assert f"{LOSS}.teacher" in (text := problems(f"{LOSS}.teacher=''")) and "must name the weights" in text
    assert f"{LOSS}.teacher" in (text := problems(f"{LOSS}.teacher=nowhere.pth")) and "that exists" in text
    text = problems("config.DISTILLATION.TEACHER_MODEL.TRUNK.NAME=regnet")
    assert "config.DISTILLATION" in text and "must be left out" in text


def test_all_that_does_not_fit_the_teacher_is_said_at_once():
    head = "config.MODEL.HEAD.PARAMS=[[siamese_head,{dims:[-1,7]}]]"
    text = problems(head, f"{LOSS}.queue_weight=0", f"{LOSS}.teacher_std=[0,1,1]", f"{LOSS}.teacher_mean=[0.5]")
    said = {
        "config.MODEL.HEAD.PARAMS": ("must be one mlp", "must end in 32"),
        f"{LOSS}.queue_weight": ("must not be 0",),
        f"{LOSS}.teacher_std": ("three numbers above 0",),
        f"{LOSS}.teacher_mean": ("three numbers, for red",),
    }
    for key, sentences in said.items():
        assert key in text and all(sentence in text for sentence in sentences), key


def test_a_run_with_lora_is_no_teacher(tmp_path):
    config = {"MODEL": {"TRUNK": {"NAME": "resnet"}, "LORA": {"USE_LORA": True}}, "DATA": {"TRAIN": {}, "TEST": {}}}
    (tmp_path / "config.resolved.yaml").write_text(yaml.safe_dump({"config": config}))
    with pytest.raises(ConfigError, match="vissl-zero export <run> --to safetensors"):
        resolved(f"{LOSS}.teacher={tmp_path}")
