"""Distillation's keys and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import choice, number
from vissl_zero.errors import Problem
from vissl_zero.methods.dino_keys import IBOT_HEADS, patch_distillation
from vissl_zero.methods.spec import MethodSpec, crops_of, heads_of, loss_keys, num_crops_of, one_head, patch_trunk
from vissl_zero.registry import METHODS
from vissl_zero.resolve.components import as_teacher, missing_weights
from vissl_zero.resolve.saved import RESOLVED_FILE

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


_CLASSIFIERS = (
    "mlp",
    "eval_mlp",
    "mobilenet_v3_head",
    "mobilenet_v3_head_timm",
    "vision_transformer_head",
    "identity",
)
WEIGHTS_FILE = "weights.safetensors"
_WITH_THE_PACKAGE = {"digits": Path(__file__).parent / "digits_teacher"}


@dataclass
class DistillationLossConfig:
    """``distillation_loss``: the softened probabilities of a trained classifier, https://arxiv.org/abs/1503.02531."""

    teacher: str = ""
    """Run folder of the trained classifier, of any trunk; digits: one of scans that comes with the package; empty: the
    model under DISTILLATION."""
    loss_type: str = choice("kl_divergence", "cross_entropy", "mse", default="kl_divergence")
    """kl_divergence and cross_entropy of the softened probabilities, times the squared temperature (their gradients are
    the same), or mse, the mean squared difference of the outputs."""
    temperature: float = number(1.0, least=1e-4)
    """Divides the logits of both."""
    soft_target_alpha: float = number(1.0, least=0, most=1)
    """Weight of the teacher's probabilities; the images' own labels have the rest."""


@dataclass
class DINODistillationLossConfig:
    """``dino_distillation_loss``: the teacher's softmax over prototypes, predicted for crops of the same image."""

    teacher: str = ""
    """Weights that hold a head of prototypes, by a name of docs/weights.md: a run of DINO, a checkpoint of DINO's or
    DINOv2's training; empty: the model under DISTILLATION."""
    teacher_num_crops: int = number(2, least=1, most=1000)
    """First crops of an image, which the teacher sees."""
    student_num_crops: int | None = None
    """Crops of an image; null: from the transforms, which also win over a different number."""
    teacher_temperature: float = number(0.07, least=1e-4)
    """Divides the teacher's scores before the softmax."""
    student_temperature: float = number(0.1, least=1e-4)
    """Divides the student's."""
    ema_center: float | None = number(None, least=0, most=1)
    """Weight of the past in the running mean of the teacher's scores, which is subtracted from them: DINO has 0.9;
    null: nothing is."""
    output_dim: int | None = None
    """Prototypes; null: from the head, which also wins over a different number."""
    swapped_assignment: bool = False
    """A crop of the teacher's is a target for all crops but itself; else for itself and those the teacher does not
    see."""
    patch_drop: float = number(0.0, least=0, below=1)
    """Share of the patches left out of the student's crops of the first size, at random (MSN); for vision
    transformers."""


@dataclass
class IBOTDistillationLossConfig:
    """``ibot_distillation_loss``: as ``dino_distillation_loss``, and the teacher's softmax for masked patches."""

    num_global_crops: int | None = None
    """Crops that the teacher sees and that are masked: those of the first size; null: from the transforms, which also
    win over a different number."""
    student_num_crops: int | None = None
    """Crops of an image; null: from the transforms, which also win over a different number."""
    student_temp: float = number(0.1, above=0, most=1000)
    """Divides the student's scores."""
    teacher_temp: float = number(0.07, above=0, most=1000)
    """Divides the teacher's scores of crops."""
    teacher_patch_temp: float = number(0.07, above=0, most=1000)
    """Divides the teacher's scores of patches."""
    lambda1: float = number(1.0, least=0)
    """Weight of the loss of crops."""
    lambda2: float = number(1.0, least=0)
    """Weight of the loss of masked patches."""
    swapped_assignment: bool = False
    """A crop of the teacher's is a target for all crops but itself; else for itself and those the teacher does not
    see."""
    mask_ratio: list[float] = field(default_factory=lambda: [0.1, 0.5])
    """Least and largest share of the patches of a crop that are masked, in blocks."""
    mask_probability: float = 0.5
    """Share of the large crops that are masked at all."""


@dataclass
class SwAVDistillationLossConfig:
    """``swav_distillation_loss``: the clusters that SwAV's assignment of a trained teacher's scores gives a crop."""

    temperature: float = number(0.1, least=1e-4)
    """Divides the student's scores before the softmax."""
    epsilon: float = number(0.03, least=1e-4)
    """Entropy regularization of the assignment; larger is softer."""
    num_iters: int = number(3, least=0, most=10000)
    """Rounds of Sinkhorn's algorithm; 0: the softmax of the teacher's scores."""
    use_double_precision: bool = False
    """Compute assignments and loss in float64."""
    temp_hard_assignment_iters: int = number(0, least=0)
    """Optimizer steps from the start in which assignments are rounded to one prototype."""
    num_crops: int | None = None
    """Crops of an image; null: from the transforms, which also win over a different number."""
    num_prototypes: list[int] | None = None
    """Prototypes; null: from the teacher's head, which also wins over a different number."""
    embedding_dim: int | None = None
    """Width of the teacher's embeddings; null: from its head."""
    local_queue_length: int = number(0, least=0)
    """Past crops of the teacher that join the assignment, for each process; 0: none."""
    queue_length: int | None = None
    """The same over all processes, in one queue; null: local_queue_length times the processes of the recipe."""
    queue_start_iter: int = number(0, least=0)
    """Optimizer steps before the queue is used."""
    normalize_student_feats: bool = False
    """Divide what the student gives by its L2 norm first."""
    use_student_prototypes: bool = True
    """Compare the scores of a student with prototypes; else take its embeddings."""
    use_teacher_prototypes: bool = False
    """Score what the student gives against the teacher's prototypes; else it is the scores."""
    use_two_crops_for_teacher: bool = True
    """The teacher sees the first two crops; else the first."""
    swapped_assignment: bool = False
    """A crop of the teacher's is a target for all crops but itself; else for itself and those the teacher does not
    see."""


_TEACHER = "config.DISTILLATION.TEACHER_MODEL"


def teacher_trunk_problems(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check the model under DISTILLATION; problems name its keys, not those of MODEL."""
    from vissl_zero.resolve import model_rules as rules
    from vissl_zero.resolve.inactive import refused

    # The rules read MODEL. So they get a configuration whose MODEL is the teacher's.
    shadow, problems = as_teacher(cfg), list[Problem]()
    for rule in (rules.trunk, rules.input_type, rules.regnet, rules.vision_transformer, rules.trunk_sizes, rules.heads):
        verdict = rule(shadow, decided)
        problems += [verdict] if isinstance(verdict, Problem) else verdict or []
    problems += [problem for problem in refused(shadow, decided) if problem.key.startswith("config.MODEL.")]
    return [replace(problem, key=problem.key.replace("config.MODEL", _TEACHER, 1)) for problem in problems]


def _teacher_problems(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check the model under DISTILLATION, and that it has weights."""
    path, key = cfg.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT.PARAMS_FILE, f"{_TEACHER}.WEIGHTS_INIT.PARAMS_FILE"
    problems = teacher_trunk_problems(cfg, decided)
    if not path or missing_weights(path):
        problems.append(Problem(key, repr(path), "must name the teacher's weights", f"Write {key}=<file>."))
    return problems


@METHODS.register("distillation")
class DistillationSpec(MethodSpec):
    """Distillation: the probabilities of a trained, frozen classifier."""

    losses = {
        "distillation_loss": DistillationLossConfig,
        "dino_distillation_loss": DINODistillationLossConfig,
        "ibot_distillation_loss": IBOTDistillationLossConfig,
        "swav_distillation_loss": SwAVDistillationLossConfig,
    }
    shape_keys = ("num_prototypes", "embedding_dim", "queue_length", "output_dim")
    teacher_keys = {  # not ibot_distillation_loss: its teacher scores the patches that are masked in an epoch
        "distillation_loss": (),
        "dino_distillation_loss": ("teacher_num_crops",),
        "swav_distillation_loss": ("use_two_crops_for_teacher",),
    }
    title = "Distillation"
    paper = "https://arxiv.org/abs/1503.02531"
    views = "1 or more crops of any sizes; the teacher sees the same"
    teacher = "a trained model, frozen"
    recipe = "digits/distillation"

    def takes_other_model(self, cfg: RunConfig) -> bool:
        """Check whether the teacher is the model under DISTILLATION: no run folder is named."""
        return cfg.LOSS["name"] != "distillation_loss" or not loss_keys(cfg).teacher

    def teacher_weights(self, cfg: RunConfig) -> str:
        """Return the key ``teacher`` of ``dino_distillation_loss``."""
        return str(loss_keys(cfg).teacher) if cfg.LOSS["name"] == "dino_distillation_loss" else ""

    def teacher_head(self, cfg: RunConfig) -> list[Any] | None:
        """Return None: the teacher keeps the head of prototypes in its weights."""
        return None

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer the number of crops from the transforms, sizes from the heads, and the length of the queue."""
        if cfg.LOSS["name"] == "swav_distillation_loss":
            return _swav_sizes(cfg)
        counts = crops_of(cfg)
        crops = {"student_num_crops": (sum(counts) if counts else 1, "transforms")}
        if cfg.LOSS["name"] == "ibot_distillation_loss":
            return {**crops, "num_global_crops": (counts[0] if counts else None, "transforms")}
        if cfg.LOSS["name"] == "dino_distillation_loss":
            return {**crops, "output_dim": (_num_scores(cfg), "head")}
        return {}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for one head, a teacher that exists, enough crops for it, and labels if the loss needs them."""
        keys, path = loss_keys(cfg), f"config.LOSS.{cfg.LOSS['name']}"
        if cfg.LOSS["name"] == "swav_distillation_loss":
            return [*_swav_problems(cfg), *_teacher_problems(cfg, decided)]
        if cfg.LOSS["name"] == "ibot_distillation_loss":
            problems = patch_distillation(cfg, path.removeprefix("config."), keys.mask_ratio, keys.mask_probability)
            of_teacher = one_head(as_teacher(cfg), *IBOT_HEADS)
            problems += [replace(problem, key=f"{_TEACHER}.HEAD.PARAMS") for problem in of_teacher]
            return [*problems, *_teacher_problems(cfg, decided)]
        if cfg.LOSS["name"] == "dino_distillation_loss":
            problems = patch_trunk(cfg) if keys.patch_drop else []
            problems += one_head(cfg, "mlp", "dino_head", "swav_head")
            crops = num_crops_of(cfg)
            if keys.teacher_num_crops > crops - keys.swapped_assignment:
                must = f"must be at most {crops - keys.swapped_assignment}, with {crops} crops of an image"
                problems.append(Problem(f"{path}.teacher_num_crops", str(keys.teacher_num_crops), must, "Lower it."))
            return [*problems, *_teacher_problems(cfg, decided)]
        problems = one_head(cfg, *_CLASSIFIERS)
        if not keys.teacher:
            problems += _teacher_problems(cfg, decided)
        elif lacking := [n for n in (RESOLVED_FILE, WEIGHTS_FILE) if not (teacher_folder(keys.teacher) / n).is_file()]:
            must = f"must be the folder of a run that has ended: it has no {' and no '.join(lacking)}"
            fix = "Train a classifier (vissl-zero config=supervised/...) and write its run folder."
            problems.append(Problem(f"{path}.teacher", keys.teacher, must, fix))
        if keys.soft_target_alpha < 1 and cfg.DATA.TRAIN.LABEL_TYPE != "standard":
            must = "must be standard where soft_target_alpha is below 1"
            fix = "Write config.DATA.TRAIN.LABEL_TYPE=standard."
            problems.append(Problem("config.DATA.TRAIN.LABEL_TYPE", cfg.DATA.TRAIN.LABEL_TYPE, must, fix))
        return problems


def _num_scores(cfg: RunConfig) -> int | None:
    """Return the number of scores of the student's head; None if its keys do not say it."""
    options = next((options for _, options in heads_of(cfg)), {})
    sizes = options.get("num_clusters") or options.get("dims")
    return sizes[-1] if isinstance(sizes, Sequence) and sizes else None


def _swav_sizes(cfg: RunConfig) -> dict[str, tuple[Any, str]]:
    head = next((options for _, options in heads_of(as_teacher(cfg))), {})
    # ``dino_head`` has no dims: its embedding is the bottleneck.
    dims, crops = head.get("dims") or [head.get("bottleneck_dim", 256)], crops_of(cfg)
    processes = cfg.DISTRIBUTED.NUM_NODES * cfg.DISTRIBUTED.NUM_PROC_PER_NODE
    return {
        "num_crops": (None if crops is None else sum(crops), "transforms"),
        "num_prototypes": (head.get("num_clusters"), "teacher's head"),
        "embedding_dim": (dims[-1], "teacher's head"),
        # VISSL has a queue in each process. One queue of the same length in all has the same content at any number of
        # them.
        "queue_length": (loss_keys(cfg).local_queue_length * processes, "processes"),
    }


def _swav_problems(cfg: RunConfig) -> list[Problem]:
    """Check for a teacher with one layer of prototypes, and enough crops for teacher and student."""
    keys, problems = loss_keys(cfg), one_head(cfg, "mlp", "swav_head")
    heads = list(heads_of(as_teacher(cfg)))
    layers = [len(options.get("num_clusters") or []) for _, options in heads]
    if layers != [1] or heads[0][0] not in ("swav_head", "dino_head"):
        must = "must be one swav_head or dino_head with one layer of prototypes"
        fix = 'Write [["swav_head", {dims: [2048, 2048, 128], use_bn: true, num_clusters: [3000]}]], for example.'
        problems.append(Problem(f"{_TEACHER}.HEAD.PARAMS", str([name for name, _ in heads]), must, fix))
    crops, least = num_crops_of(cfg), 1 + (keys.use_two_crops_for_teacher or keys.swapped_assignment)
    if crops < least:
        fix = "Add an ImgPilToMultiCrop, or set use_two_crops_for_teacher and swapped_assignment to false."
        problems.append(Problem("config.DATA.TRAIN.TRANSFORMS", f"{crops}", "must make two crops of an image", fix))
    return problems


def teacher_folder(teacher: str) -> Path:
    """Return the folder with the teacher's configuration and weights."""
    return _WITH_THE_PACKAGE.get(teacher, Path(teacher).expanduser())
