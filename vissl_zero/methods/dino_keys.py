"""Self-distillation of crops and of masked patches: DINO, iBOT and DINOv2: keys and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING

from vissl_zero.config.constraints import above_zero, at_least, choice, number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, heads_of, loss_keys, one_head, patch_trunk, share, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class DINOLossConfig:
    """``dino_loss``: self-distillation, https://arxiv.org/abs/2104.14294."""

    momentum: float = 0.996
    """Weight of the teacher's past at the start; it goes to the final one along half a cosine."""
    # From 0.996 to 1: section 3.1 of the paper.
    final_momentum: float = 1.0
    """That weight after the last step."""
    student_temp: float = 0.1
    """Divides the student's scores."""
    teacher_temp_min: float = 0.04
    """Divides the teacher's scores in the first step."""
    teacher_temp_max: float = 0.07
    """Divides them after the warm-up."""
    # 30 epochs of ImageNet in batches of 1,024.
    teacher_temp_warmup_iters: int = 37500
    """Optimizer steps in which the teacher's temperature goes from one to the other in a straight line; 0: it has its
    maximum at once."""
    teacher_temp_interval: str = choice("step", "epoch", default="step")
    """How often it changes: step, as in VISSL and DINOv2, or epoch, as in DINO's own code."""
    crops_for_teacher: list[int] = field(default_factory=lambda: [0, 1])
    """Crops that the teacher sees, the first of all."""
    ema_center: float = 0.9
    """Weight of the past in the center."""
    output_dim: int | None = None
    """Prototypes; null: from the head, which also wins over a different number."""


@dataclass
class DINOHeadConfig:
    """``dino_head``: an MLP with GELU and one layer of weight-normalized prototypes, as DINO's authors have it."""

    in_dim: int = number(MISSING, least=1)
    """Features of the trunk."""
    num_clusters: list[int] = MISSING
    """Number of prototypes: one entry."""
    use_bn: bool = False
    """Batch norm between the layers of the MLP."""
    normalize_last_layer: bool = True
    """Prototypes have unit length; off: the length of each is learned."""
    num_layers: int = number(3, least=1, most=100)
    """Layers of the MLP."""
    hidden_dim: int = number(2048, least=1)
    """Width between them."""
    bottleneck_dim: int = number(256, least=1)
    """Width of the embedding that is scored, which has unit length."""


@METHODS.register("dino")
class DINOSpec(MethodSpec):
    """DINO: self-distillation from a teacher that sees the large crops."""

    losses = {"dino_loss": DINOLossConfig}
    heads = {"dino_head": DINOHeadConfig}
    shape_keys = ("output_dim",)
    title = "DINO"
    paper = "https://arxiv.org/abs/2104.14294"
    views = "2 or more crops of any sizes; the teacher sees the first"
    teacher = "momentum, cosine to 1"
    teacher_follows = True
    couples = "the center: mean of the teacher's scores over the batch"
    recipe = "digits/dino"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer output_dim from the head."""
        counts = next((options.get("num_clusters") for _, options in heads_of(cfg)), None)
        return {"output_dim": (counts[0] if counts else None, "head")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two or more crops, one head with one layer of prototypes, and numbers in range."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        return [
            *one_head(cfg, "swav_head", "dino_head"),
            *self._one_layer(cfg),
            *two_views(cfg, exactly=False),
            *_teacher_crops(keys.crops_for_teacher, f"config.{path}.crops_for_teacher", crops_of(cfg)),
            *share(f"{path}.momentum", keys.momentum),
            *share(f"{path}.final_momentum", keys.final_momentum),
            *share(f"{path}.ema_center", keys.ema_center),
            *above_zero(f"{path}.student_temp", keys.student_temp),
            *above_zero(f"{path}.teacher_temp_min", keys.teacher_temp_min),
            *above_zero(f"{path}.teacher_temp_max", keys.teacher_temp_max),
            *at_least(f"{path}.teacher_temp_warmup_iters", keys.teacher_temp_warmup_iters, 0),
        ]

    def _one_layer(self, cfg: RunConfig) -> list[Problem]:
        counts = next((options.get("num_clusters") for _, options in heads_of(cfg)), None)
        if counts is None or len(counts) == 1:
            return []
        must = "must have one layer of prototypes for dino_loss"
        return [
            Problem("config.MODEL.HEAD.PARAMS", str(list(counts)), must, "Write num_clusters: [65536], for example.")
        ]


def _teacher_crops(crops: list[int], key: str, counts: list[int] | None) -> list[Problem]:
    """Check that the teacher's crops are the first crops, in order."""
    # dino_loss pairs the teacher's view i with the student's view i.
    total = sum(counts or [])
    if crops and crops == list(range(len(crops))) and len(crops) <= max(total, 1):
        return []
    must = f"must be the first crops, in order, and at most the {total} that the transforms make"
    return [Problem(key, str(crops), must, "Write [0, 1], the two large crops.")]


@dataclass
class IBOTHeadConfig:
    """``ibot_head``: projection MLP and prototypes for the class token and for patches; iBOT and DINOv2 need it."""

    dims: list[int] = MISSING
    """Widths of the projection MLP, from the trunk's features to the embedding."""
    num_clusters: list[int] = MISSING
    """Prototypes. One number: patches share the class token's head. Two: they have a head of their own."""
    activation_name: str = "GELU"
    """Activation between the layers: ``ReLU``, ``GELU``, or ``SiLU``."""
    normalize_last_layer: bool = True
    """Prototypes have unit length; off: the length of each is learned."""


@dataclass
class IBOTDINOHeadConfig:
    """``ibot_dino_head``: ``dino_head`` for class tokens and patches too; VISSL's ``ibot_head``."""

    in_dim: int = number(MISSING, least=1)
    """Features of the trunk."""
    out_dim: int = number(MISSING, least=1)
    """Prototypes of crops."""
    patch_out_dim: int = number(0, least=0)
    """Prototypes of patches; 0: as many as of crops."""
    shared_head: bool = False
    """Patches are scored against the prototypes of crops."""
    normalize_last_layer: bool = True
    """Prototypes have unit length; off: the length of each is learned."""
    num_layers: int = number(3, least=1, most=100)
    """Layers of the MLP, which crops and patches share."""
    hidden_dim: int = number(2048, least=1)
    """Width between them."""
    bottleneck_dim: int = number(256, least=1)
    """Width of the embedding that is scored, which has unit length."""


@dataclass
class IBOTLossConfig:
    """``ibot_loss``: self-distillation of crops and of masked patches, https://arxiv.org/abs/2111.07832."""

    teacher_momentum: float = 0.996
    """Weight of the teacher's past at the start; it grows to 1 along half a cosine."""
    # Temperatures and warm-up of the paper's ViT-S/16, as the README of bytedance/ibot trains it.
    warmup_teacher_temp: float = number(0.04, above=0, most=1000)
    """Divides the teacher's scores of crops in the first step."""
    teacher_temp: float = number(0.07, above=0, most=1000)
    """Divides them after the warm-up."""
    warmup_teacher_patch_temp: float = number(0.04, above=0, most=1000)
    """Divides the teacher's scores of patches in the first step."""
    teacher_patch_temp: float = number(0.07, above=0, most=1000)
    """Divides them after the warm-up."""
    warmup_teacher_temp_epochs: int = number(30, least=0)
    """Epochs in which both temperatures go from one to the other in a straight line; 0: they have their maxima at
    once."""
    teacher_temp_interval: str = choice("step", "epoch", default="epoch")
    """How often both change."""
    student_temp: float = number(0.1, above=0, most=1000)
    """Divides the student's scores."""
    center_momentum: float = 0.9
    """Weight of the past in the center of crops."""
    center_momentum2: float = 0.9
    """Weight of the past in the center of patches."""
    lambda1: float = number(1.0, least=0)
    """Weight of the loss of crops."""
    lambda2: float = number(1.0, least=0)
    """Weight of the loss of masked patches."""
    mim_start_epoch: int = number(0, least=0)
    """Epochs before patches are masked."""
    # Half of the crops masked, at a ratio of 0.3 with a range of 0.2 to both sides: the settings of the paper.
    mask_ratio: list[float] = field(default_factory=lambda: [0.1, 0.5])
    """Least and largest share of the patches of a crop that are masked, in blocks."""
    mask_probability: float = 0.5
    """Share of the large crops that are masked at all."""
    num_global_crops: int | None = None
    """Crops that the teacher sees and that are masked: those of the first size; null: from the transforms, which also
    win over a different number."""
    out_dim: int | None = None
    """Prototypes of crops; null: from the head, which also wins over a different number."""
    patch_out_dim: int | None = None
    """Prototypes of patches; null: from the head, which also wins over a different number."""


@METHODS.register("ibot")
class IBOTSpec(MethodSpec):
    """iBOT: DINO, and self-distillation of masked patches."""

    losses = {"ibot_loss": IBOTLossConfig}
    heads = {"ibot_head": IBOTHeadConfig, "ibot_dino_head": IBOTDINOHeadConfig}
    shape_keys: ClassVar[Sequence[str]] = ("out_dim", "patch_out_dim")
    title = "iBOT"
    paper = "https://arxiv.org/abs/2111.07832"
    views = "2 or more crops of any sizes, those of the first size masked; the teacher sees these whole"
    teacher = "momentum, cosine to 1"
    teacher_follows = True
    couples = "two centers: means of the teacher's scores over the batch"
    recipe = "digits/ibot"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer prototypes from the head, crops from the transforms."""
        clusters: list[Any] = _prototypes_of(cfg) or [None]
        crops = crops_of(cfg)
        return {
            "num_global_crops": (crops[0] if crops else None, "transforms"),
            "out_dim": (clusters[0], "head"),
            "patch_out_dim": (clusters[-1], "head"),
        }

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe: a vision transformer with a mask token, one head, two crops or more, numbers in range."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        return [
            *patch_distillation(cfg, path, keys.mask_ratio, keys.mask_probability),
            *share(f"{path}.teacher_momentum", keys.teacher_momentum),
            *share(f"{path}.center_momentum", keys.center_momentum),
            *share(f"{path}.center_momentum2", keys.center_momentum2),
        ]


IBOT_HEADS = ("ibot_head", "ibot_dino_head")


def _prototypes_of(cfg: RunConfig) -> list[int] | None:
    """Return the first head's numbers of prototypes: one for crops and patches together, or one for each."""
    name, keys = next(heads_of(cfg), ("", {}))
    if name != "ibot_dino_head":
        return keys.get("num_clusters")
    of_crops = keys.get("out_dim")
    is_shared = keys.get("shared_head") or not keys.get("patch_out_dim")
    return None if of_crops is None else [of_crops] if is_shared else [of_crops, keys["patch_out_dim"]]


def patch_distillation(cfg: RunConfig, path: str, ratio: Sequence[float], probability: float) -> list[Problem]:
    """Check the recipe of iBOT, DINOv2 and iBOT's distillation; see ``distills_patches``."""
    return distills_patches(cfg, path, ratio, probability, IBOT_HEADS)


def distills_patches(
    cfg: RunConfig, path: str, ratio: Sequence[float], probability: float, heads: Sequence[str]
) -> list[Problem]:
    """Check for one of ``heads``, a vision transformer with a mask token, two or more crops, and shares in range."""
    problems = [
        *one_head(cfg, *heads),
        *patch_trunk(cfg, mask_token=True),
        *two_views(cfg, exactly=False),
        *share(f"{path}.mask_probability", probability),
    ]
    if len(ratio) != 2 or not 0 <= ratio[0] <= ratio[1] <= 1 or ratio[1] == 0:
        must = "must be two shares of the patches, the least and the largest"
        problems.append(Problem(f"config.{path}.mask_ratio", str(list(ratio)), must, "Write [0.1, 0.5]."))
    clusters = _prototypes_of(cfg)
    if clusters is not None and len(clusters) not in (1, 2):
        must = "must be one number, or one for crops and one for patches"
        problems.append(Problem("config.MODEL.HEAD.PARAMS", str(list(clusters)), must, "Write num_clusters: [8192]."))
    return problems


@dataclass
class DINOv2LossConfig:
    """``dinov2_loss``: DINO, iBOT and KoLeo with Sinkhorn's centering, https://arxiv.org/abs/2304.07193."""

    # This and the other defaults: ssl_default_config.yaml of facebookresearch/dinov2.
    momentum: float = 0.992
    """Weight of the teacher's past at the start; it grows to 1 along half a cosine."""
    student_temp: float = number(0.1, above=0, most=1000)
    """Divides the student's scores."""
    teacher_temp_min: float = number(0.04, above=0, most=1000)
    """Divides the teacher's scores in the first step."""
    teacher_temp_max: float = number(0.07, above=0, most=1000)
    """Divides them after the warm-up."""
    teacher_temp_warmup_iters: int = number(37500, least=0)
    """Optimizer steps in which the teacher's temperature goes from one to the other in a straight line; 0: it has its
    maximum at once."""
    dino_weight: float = number(1.0, least=0)
    """Weight of the loss of crops."""
    ibot_weight: float = number(1.0, least=0)
    """Weight of the loss of masked patches."""
    koleo_weight: float = number(0.1, least=0)
    """Weight of KoLeo on the large crops' features."""
    mask_ratio: list[float] = field(default_factory=lambda: [0.1, 0.5])
    """Least and largest share of the patches of a crop that are masked, in blocks."""
    mask_probability: float = 0.5
    """Share of the large crops that are masked at all."""
    num_global_crops: int | None = None
    """Crops that the teacher sees and that are masked: those of the first size; null: from the transforms, which also
    win over a different number."""


@METHODS.register("dinov2")
class DINOv2Spec(IBOTSpec):
    """DINOv2: DINO, iBOT and KoLeo, with Sinkhorn's centering."""

    losses = {"dinov2_loss": DINOv2LossConfig}
    heads = {}
    shape_keys = ()
    title = "DINOv2"
    paper = "https://arxiv.org/abs/2304.07193"
    couples = "Sinkhorn over the teacher's crops and masked patches; KoLeo's nearest neighbor in the batch"
    recipe = "digits/dinov2"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer the crops from the transforms."""
        crops = crops_of(cfg)
        return {"num_global_crops": (crops[0] if crops else None, "transforms")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe by iBOT's rules."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        problems = patch_distillation(cfg, path, keys.mask_ratio, keys.mask_probability)
        return [*problems, *share(f"{path}.momentum", keys.momentum)]
