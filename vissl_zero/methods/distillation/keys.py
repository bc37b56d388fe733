"""Distillation's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vissl_zero.config.constraints import number
from vissl_zero.config.saved import RESOLVED_FILE
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig

WEIGHTS_FILE = "weights.safetensors"
_WITH_THE_PACKAGE = {"digits": Path(__file__).parent / "digits_teacher"}


@dataclass
class DistillationLossConfig:
    """``distillation_loss``: the softened probabilities of a trained classifier, https://arxiv.org/abs/1503.02531."""

    teacher: str = ""
    """Run folder of the trained classifier, of any trunk; digits: one of scans that comes with the package."""
    temperature: float = number(1.0, least=1e-4)
    """Divides the logits of both."""
    soft_target_alpha: float = number(1.0, least=0, most=1)
    """Weight of the teacher's probabilities; the images' own labels have the rest."""


@METHODS.register("distillation")
class DistillationSpec(MethodSpec):
    """Distillation: the probabilities of a trained, frozen classifier."""

    losses = {"distillation_loss": DistillationLossConfig}
    title = "Distillation"
    paper = "https://arxiv.org/abs/1503.02531"
    views = "1 or more crops of any sizes; the teacher sees the same"
    teacher = "a trained model, frozen"
    recipe = "digits/distillation"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """One head, a teacher that is there, labels where they count."""
        keys, path = loss_keys(cfg), f"config.LOSS.{cfg.LOSS['name']}"
        found = one_head(cfg, "mlp")
        folder = teacher_folder(keys.teacher)
        lacking = [name for name in (RESOLVED_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
        if lacking:
            must = f"must be the folder of a run that has ended: it has no {' and no '.join(lacking)}"
            fix = "Train a classifier (vissl-zero config=supervised/...) and write its run folder."
            found.append(Problem(f"{path}.teacher", keys.teacher, must, fix))
        if keys.soft_target_alpha < 1 and cfg.DATA.TRAIN.LABEL_TYPE != "standard":
            must = "must be standard where soft_target_alpha is below 1"
            fix = "Write config.DATA.TRAIN.LABEL_TYPE=standard."
            found.append(Problem("config.DATA.TRAIN.LABEL_TYPE", cfg.DATA.TRAIN.LABEL_TYPE, must, fix))
        return found


def teacher_folder(teacher: str) -> Path:
    """Where the teacher's configuration and weights are."""
    return _WITH_THE_PACKAGE.get(teacher, Path(teacher).expanduser())
