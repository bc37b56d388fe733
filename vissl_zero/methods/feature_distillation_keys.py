"""Feature distillation's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.distillation_keys import teacher_folder, teacher_trunk_problems
from vissl_zero.methods.spec import MethodSpec, head_width, loss_keys, one_head
from vissl_zero.registry import METHODS
from vissl_zero.resolve.components import normalization

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class FeatureDistillationLossConfig:
    """``feature_distillation_loss``: the features of a trained trunk, of weights of any origin (docs/weights.md)."""

    teacher: str = ""
    """Weights of the teacher, whose trunk is detected: a file, a run folder, hf:<repo>, timm:<model>,
    torchvision:<model> or torchhub:<model>; digits: a small one of scans that comes with the package."""
    queue_weight: float = number(1.0, least=0)
    """Weight of the KL divergence between student and teacher, each as softmax over similarities to the teacher's
    features of the batch and of a queue."""
    global_weight: float = number(0.0, least=0)
    """Weight of the squared distance between features of an image."""
    dense_weight: float = number(0.0, least=0)
    """Weight of the same distance at each place of the last maps, the student's resized to the teacher's; the head must
    be map_projection_head."""
    normalize: bool = True
    """Divide features by their L2 norm before their distance is taken; false: the mean over features as they are."""
    # lightly-train's.
    temperature: float = number(0.07, least=1e-4)
    """Divides the similarities to the queue."""
    queue_size: int = number(8192, least=1)
    """Features in the one queue of all processes, those of the batch among them; a quarter to a half of the images."""
    embedding_dim: int | None = None
    """Width of the teacher's features; null: from its weights, which also win over a different number."""
    teacher_mean: list[float] | None = None
    """Mean by which the teacher's images are normalized, red, green, blue; null: as its weights say, or ImageNet's."""
    teacher_std: list[float] | None = None
    """Their standard deviation; null: as its weights say, or ImageNet's."""
    student_mean: list[float] | None = None
    """Mean that the transforms subtract; null: read from the transforms, which override any other value."""
    student_std: list[float] | None = None
    """Standard deviation that the transforms divide by; null: as for ``student_mean``."""


_CHANNELS = 3
_MAP_HEAD = "map_projection_head"


@dataclass
class MapProjectionHeadConfig:
    """``map_projection_head``: a projection of features, and one of each place of the last maps."""

    dims: list[int] = MISSING
    """Widths of both, from the trunk's maps to the teacher's width; -1 stands for either."""
    use_bn: bool = False
    """Batch norm between layers."""
    use_relu: bool = False
    """ReLU between layers."""


@dataclass
class FeatureMapsConfig:
    """``feature_maps``: features and the last maps as they are; of a teacher."""


@METHODS.register("feature_distillation")
class FeatureDistillationSpec(MethodSpec):
    """Feature distillation: the features of a teacher, of weights of any origin."""

    losses = {"feature_distillation_loss": FeatureDistillationLossConfig}
    heads = {_MAP_HEAD: MapProjectionHeadConfig, "feature_maps": FeatureMapsConfig}
    shape_keys = ("embedding_dim", "queue_size")
    teacher_keys = {"feature_distillation_loss": ("teacher_mean", "teacher_std", "student_mean", "student_std")}
    title = "Feature distillation"
    paper = "https://arxiv.org/abs/2106.05237"
    views = "1 or more crops of any sizes; the teacher sees the same"
    teacher = "weights of any origin, frozen"
    couples = "classes: the teacher's features of the batch and of a queue"
    recipe = "digits/feature_distillation"

    def takes_other_model(self, cfg: RunConfig) -> bool:
        """Check for a named teacher: resolution puts the model of these weights under DISTILLATION."""
        return bool(loss_keys(cfg).teacher)

    def teacher_weights(self, cfg: RunConfig) -> str:
        """Return the key ``teacher``; for ``digits``, the path of the weights in the package."""
        name: str = loss_keys(cfg).teacher
        return str(teacher_folder(name)) if name == "digits" else name

    def teacher_head(self, cfg: RunConfig) -> list[Any] | None:
        """Return a head that also returns the maps, if ``dense_weight`` is not 0."""
        return [["feature_maps", {}]] if loss_keys(cfg).dense_weight else super().teacher_head(cfg)

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer the student's normalization."""
        mean, std = normalization(cfg.DATA.TRAIN.TRANSFORMS)
        return {"student_mean": (mean, "transforms"), "student_std": (std, "transforms")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for a teacher, a term with a weight above 0, and one head that ends in the teacher's width."""
        keys, path = loss_keys(cfg), f"config.LOSS.{cfg.LOSS['name']}"
        problems = one_head(cfg, _MAP_HEAD if keys.dense_weight else "mlp")
        if not keys.teacher:
            fix = f"Write {path}.teacher=torchhub:dinov2_vitb14, for example; docs/weights.md has all names."
            return [*problems, Problem(f"{path}.teacher", "''", "must name the weights to learn from", fix)]
        if not (keys.queue_weight or keys.global_weight):
            fix = f"Write {path}.queue_weight=1."
            problems.append(Problem(f"{path}.queue_weight", "0", "must not be 0 with global_weight 0", fix))
        if (width := head_width(cfg)) not in (None, keys.embedding_dim):
            must = f"must end in {keys.embedding_dim}, the teacher's features"
            fix = "Write -1 as the last of dims."
            problems.append(Problem("config.MODEL.HEAD.PARAMS", f"dims that end in {width}", must, fix))
        for name in ("teacher_mean", "teacher_std"):
            values, is_divisor = getattr(keys, name), name.endswith("std")
            if len(values) != _CHANNELS or (is_divisor and min(values) <= 0):
                must = f"must be three numbers{' above 0' * is_divisor}, for red, green and blue"
                problems.append(Problem(f"{path}.{name}", str(values), must, "Leave it out: the weights say it."))
        return [*problems, *teacher_trunk_problems(cfg, decided)]
