"""Two views of an image, contrasted (SimCLR, MoCo) or not (BYOL, SimSiam, Barlow Twins, VICReg): keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import above_zero, at_least
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, head_width, loss_keys, one_head, share, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class SimCLRLossConfig:
    """``simclr_info_nce_loss``: NT-Xent, https://arxiv.org/abs/2002.05709."""

    temperature: float = 0.1
    """Divides the cosine similarities."""


@dataclass
class MultiCropSimCLRLossConfig(SimCLRLossConfig):
    """``multicrop_simclr_info_nce_loss``: NT-Xent with every other crop of an image as a positive of its own."""

    num_crops: int | None = None
    """Crops of an image; null: from the transforms, which also win over a different number."""


@METHODS.register("simclr")
class SimCLRSpec(MethodSpec):
    """SimCLR: NT-Xent between views, negatives from all ranks."""

    losses = {
        "simclr_info_nce_loss": SimCLRLossConfig,
        "multicrop_simclr_info_nce_loss": MultiCropSimCLRLossConfig,
    }
    title = "SimCLR"
    paper = "https://arxiv.org/abs/2002.05709"
    views = "2 crops; multicrop: 2 or more of any sizes"
    couples = "negatives: all images of the batch"
    recipe = "digits/simclr"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer the number of crops."""
        if not _has_many_crops(cfg):
            return {}
        return {"num_crops": (sum(crops_of(cfg) or []) or None, "transforms")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views (multicrop: two or more) and one projection head."""
        temperature = above_zero(f"LOSS.{cfg.LOSS['name']}.temperature", loss_keys(cfg).temperature)
        return [*one_head(cfg, "mlp"), *two_views(cfg, not _has_many_crops(cfg)), *temperature]


def _has_many_crops(cfg: RunConfig) -> bool:
    return bool(cfg.LOSS["name"] == "multicrop_simclr_info_nce_loss")


@dataclass
class MoCoLossConfig:
    """``moco_loss``: InfoNCE against a queue, https://arxiv.org/abs/1911.05722 and 2003.04297."""

    embedding_dim: int | None = None
    """Width of the embeddings; null: from the head, which also wins over a different number."""
    # MoCo's queue and momentum; v2 (arXiv 2003.04297) raised the temperature from 0.07.
    queue_size: int = 65536
    """Keys in the one queue of all ranks; at least a micro-batch over all ranks."""
    momentum: float = 0.999
    """Weight of the teacher's past."""
    temperature: float = 0.2
    """Divides the cosine similarities."""


@METHODS.register("moco_v2")
class MoCoV2Spec(MethodSpec):
    """MoCo v2: InfoNCE against a queue of the teacher's keys."""

    losses = {"moco_loss": MoCoLossConfig}
    shape_keys = ("embedding_dim", "queue_size")
    title = "MoCo v2"
    paper = "https://arxiv.org/abs/2003.04297"
    views = "2 crops: one for the student, one for the teacher"
    teacher = "momentum, constant"
    teacher_follows = True
    couples = "negatives: a queue of all ranks' keys"
    recipe = "digits/moco_v2"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer embedding_dim from the head."""
        return {"embedding_dim": (head_width(cfg), "head")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, one projection head, and a queue at least as long as a micro-batch."""
        keys, path, batch = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}", decided.micro_batch
        fix = f"Write config.{path}.queue_size={batch} or more, or lower config.DATA.TRAIN.BATCHSIZE_PER_REPLICA."
        return [
            *one_head(cfg, "mlp"),
            *two_views(cfg),
            *at_least(f"{path}.queue_size", keys.queue_size, batch, fix),
            *share(f"{path}.momentum", keys.momentum),
            *above_zero(f"{path}.temperature", keys.temperature),
        ]


@dataclass
class MoCoV3LossConfig:
    """``moco_v3_loss``: symmetric InfoNCE within the batch, https://arxiv.org/abs/2104.02057."""

    momentum: float = 0.99
    """Weight of the teacher's past at the start; it grows to 1 along half a cosine."""
    temperature: float = 0.2
    """Divides the cosine similarities."""


@METHODS.register("moco_v3")
class MoCoV3Spec(MethodSpec):
    """MoCo v3: symmetric InfoNCE against the teacher's keys of the batch."""

    losses = {"moco_v3_loss": MoCoV3LossConfig}
    title = "MoCo v3"
    paper = "https://arxiv.org/abs/2104.02057"
    views = "2 crops"
    teacher = "momentum, cosine to 1"
    teacher_follows = True
    couples = "negatives: the teacher's keys of the batch"
    recipe = "digits/moco_v3"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, a projector and a predictor."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        numbers = [*share(f"{path}.momentum", keys.momentum), *above_zero(f"{path}.temperature", keys.temperature)]
        return [*one_head(cfg, "siamese_head"), *two_views(cfg), *numbers]


@dataclass
class BYOLLossConfig:
    """``byol_loss``: prediction of a teacher's projection, https://arxiv.org/abs/2006.07733."""

    momentum: float = 0.99
    """Weight of the teacher's past at the start; it goes to the final one along half a cosine."""
    final_momentum: float = 1.0
    """That weight after the last step."""


@METHODS.register("byol")
class BYOLSpec(MethodSpec):
    """BYOL: prediction of a teacher's projection of the other view."""

    losses = {"byol_loss": BYOLLossConfig}
    title = "BYOL"
    paper = "https://arxiv.org/abs/2006.07733"
    views = "2 crops"
    teacher = "momentum, cosine to 1"
    teacher_follows = True
    recipe = "digits/byol"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, a projector and a predictor."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        momenta = [*share(f"{path}.momentum", keys.momentum), *share(f"{path}.final_momentum", keys.final_momentum)]
        return [*one_head(cfg, "siamese_head"), *two_views(cfg), *momenta]


@dataclass
class SimSiamLossConfig:
    """``simsiam_loss``: negative cosine similarity, https://arxiv.org/abs/2011.10566. It has no keys."""


@METHODS.register("simsiam")
class SimSiamSpec(MethodSpec):
    """SimSiam: prediction of the other view, gradient stopped."""

    losses = {"simsiam_loss": SimSiamLossConfig}
    title = "SimSiam"
    paper = "https://arxiv.org/abs/2011.10566"
    views = "2 crops"
    recipe = "digits/simsiam"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, a projector and a predictor."""
        return [*one_head(cfg, "siamese_head"), *two_views(cfg)]


@dataclass
class BarlowTwinsLossConfig:
    """``barlow_twins_loss``: cross-correlation towards the identity, https://arxiv.org/abs/2103.03230."""

    # The default of main.py in facebookresearch/barlowtwins.
    lambda_: float = 0.0051
    """Weight of the elements off the diagonal."""
    scale_loss: float = 0.024
    """Factor of the whole loss."""


@METHODS.register("barlow_twins")
class BarlowTwinsSpec(MethodSpec):
    """Barlow Twins: cross-correlation of two views towards the identity."""

    losses = {"barlow_twins_loss": BarlowTwinsLossConfig}
    title = "Barlow Twins"
    paper = "https://arxiv.org/abs/2103.03230"
    views = "2 crops"
    couples = "cross-correlation over the batch"
    recipe = "digits/barlow_twins"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, one projection head."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        numbers = [*at_least(f"{path}.lambda_", keys.lambda_, 0), *above_zero(f"{path}.scale_loss", keys.scale_loss)]
        return [*one_head(cfg, "mlp"), *two_views(cfg), *numbers]


@dataclass
class VICRegLossConfig:
    """``vicreg_loss``: variance, invariance, covariance, https://arxiv.org/abs/2105.04906."""

    # 25, 25 and 1: section 4.2 of the paper.
    sim_coeff: float = 25.0
    """Weight of the distance between the views."""
    std_coeff: float = 25.0
    """Weight of what each feature's deviation lacks to 1."""
    cov_coeff: float = 1.0
    """Weight of the covariances between features."""


@METHODS.register("vicreg")
class VICRegSpec(MethodSpec):
    """VICReg: variance, invariance and covariance of two views."""

    losses = {"vicreg_loss": VICRegLossConfig}
    title = "VICReg"
    paper = "https://arxiv.org/abs/2105.04906"
    views = "2 crops"
    couples = "variance and covariance over the batch"
    recipe = "digits/vicreg"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, one projection head."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        names = ("sim_coeff", "std_coeff", "cov_coeff")
        numbers = [problem for name in names for problem in at_least(f"{path}.{name}", getattr(keys, name), 0)]
        return [*one_head(cfg, "mlp"), *two_views(cfg), *numbers]
