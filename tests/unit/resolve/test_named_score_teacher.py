"""A teacher whose scores of prototypes are learned: its head comes with its weights, or there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import yaml
from torch import nn

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.checkpoint.first_weights import load_teacher
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import other_model
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

LOSS = "config.LOSS.dino_distillation_loss"
IMAGENET = "[0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]"
VIEWS = (
    "config.DATA.TRAIN.TRANSFORMS=[{name: ImgPilToMultiCrop, total_num_crops: 3, num_crops: [3], size_crops: [32], "
    f"crop_scales: [[0.5, 1]]}}, {{name: ToTensor}}, {{name: Normalize, mean: {IMAGENET}}}]"
)
HEAD = "config.MODEL.HEAD.PARAMS=[[dino_head, {in_dim: 512, hidden_dim: 16, bottleneck_dim: 8, num_clusters: [-1]}]]"


def resolved(teacher: Path, *words: str) -> ResolvedRun:
    named = ["config.LOSS.name=dino_distillation_loss", f"{LOSS}.teacher={teacher}", VIEWS, HEAD, *words]
    return resolve(compose("digits/distillation", named).run, "runs/x", host=CPU_HOST)


class _Last(nn.Module):
    """``nn.utils.weight_norm(nn.Linear(...))`` as DINO's checkpoints name its tensors."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.weight_g, self.weight_v = nn.Parameter(torch.ones(count, 1)), nn.Parameter(torch.randn(count, width))


def network(head: str, use_bn: bool = False) -> nn.ModuleDict:
    """The teacher of facebookresearch/dino's ``main_dino.py`` ("head") or of DINOv2's training ("dino_head")."""
    norm = [nn.BatchNorm1d(10)] if use_bn else []
    layers = [nn.Linear(64, 10), *norm, nn.GELU(), nn.Linear(10, 10), *norm, nn.GELU(), nn.Linear(10, 6)]
    backbone = timm.create_model(
        "vit_tiny_patch16_224", embed_dim=64, depth=2, num_heads=1, img_size=32, patch_size=8, num_classes=0
    )
    parts = nn.ModuleDict({"mlp": nn.Sequential(*layers), "last_layer": _Last(6, 20)})
    return nn.ModuleDict({"backbone": backbone, head: parts})


@pytest.mark.parametrize(("head", "use_bn"), [("head", False), ("dino_head", False), ("head", True)])
def test_the_head_of_a_checkpoint_of_dinos_training_is_found_and_filled(tmp_path, head, use_bn):
    net = network(head, use_bn)
    student = {f"module.{name}": tensor + 1 for name, tensor in net.state_dict().items()}
    torch.save({"student": student, "teacher": net.state_dict(), "epoch": 1}, tmp_path / "dino.pth")
    plan = resolved(tmp_path / "dino.pth", f"{LOSS}.ema_center=0.9")
    ((name, keys),) = plan.config.DISTILLATION.TEACHER_MODEL.HEAD.PARAMS
    sizes = {
        key: keys[key] for key in ("in_dim", "hidden_dim", "bottleneck_dim", "num_layers", "num_clusters", "use_bn")
    }
    expected = {"in_dim": 64, "hidden_dim": 10, "bottleneck_dim": 6, "num_layers": 3, "num_clusters": [20]}
    assert name == "dino_head" and sizes == {**expected, "use_bn": use_bn}
    assert plan.config.MODEL.HEAD.PARAMS[0][1]["num_clusters"] == [20]
    assert plan.config.LOSS["dino_distillation_loss"]["output_dim"] == 20
    teacher = other_model(plan, 0)
    assert teacher is not None
    load_teacher(teacher, plan)
    head_of = teacher.eval().heads[0]
    rows = torch.randn(3, 64)
    last, embedded = net[head]["last_layer"], nn.functional.normalize(net.eval()[head]["mlp"](rows), dim=-1)
    scores = embedded @ nn.functional.normalize(last.weight_v, dim=1).T * last.weight_g.T
    torch.testing.assert_close(head_of(rows).scores[0], scores)


def test_the_head_of_a_run_is_that_of_its_configuration(tmp_path):
    def head_of(name: str, keys: dict) -> list:
        config = {"MODEL": {"TRUNK": {"NAME": "resnet"}, "HEAD": {"PARAMS": [[name, keys]]}}}
        transforms = [{"name": "Normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}]
        config["DATA"] = {"TRAIN": {"TRANSFORMS": transforms}, "TEST": {}}
        (tmp_path / "config.resolved.yaml").write_text(yaml.safe_dump({"config": config}))
        return list(resolved(tmp_path).config.DISTILLATION.TEACHER_MODEL.HEAD.PARAMS)

    sizes = {"normalize_last_layer": True, "num_layers": 2, "hidden_dim": 12, "bottleneck_dim": 4}
    ((name, keys),) = head_of("ibot_dino_head", {"in_dim": 2048, "out_dim": 9, "patch_out_dim": 5, **sizes})
    assert name == "dino_head" and keys["num_clusters"] == [9] and keys["hidden_dim"] == 12
    ((name, keys),) = head_of("swav_head", {"dims": [2048, 8], "num_clusters": [7]})
    assert name == "swav_head" and keys["num_clusters"] == [7]
    with pytest.raises(ConfigError, match="must be weights that hold a head of prototypes"):
        head_of("mlp", {"dims": [2048, 10]})


def test_weights_without_a_head_and_images_that_it_does_not_expect_are_refused(tmp_path):
    torch.save(network("head")["backbone"].state_dict(), tmp_path / "vit.pth")
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path / "vit.pth")
    text = str(caught.value)
    assert f"{LOSS}.teacher" in text and "Write config.LOSS.name=feature_distillation_loss" in text
    torch.save({"teacher": network("head").state_dict()}, tmp_path / "dino.pth")
    with pytest.raises(ConfigError, match=r"must normalize as the teacher's weights expect, by mean \[0.485"):
        resolved(tmp_path / "dino.pth", VIEWS.replace("0.485", "0.5"))
