"""Prediction of centroids and prototypes (DeepCluster v2, MSN): keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import (
    MethodSpec,
    crops_of,
    head_width,
    heads_of,
    loss_keys,
    num_crops_of,
    one_head,
    patch_trunk,
    share,
    two_views,
)
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class ClusterMemoryConfig:
    """``memory_params``: the embeddings that are clustered."""

    crops_for_mb: list[int] = field(default_factory=lambda: [0])
    """Crops whose embeddings are remembered; clusterings take them in turn."""


@dataclass
class DeepClusterV2LossConfig:
    """``deepclusterv2_loss``: prediction of k-means assignments, https://arxiv.org/abs/2006.09882, appendix D."""

    embedding_dim: int | None = None
    """Width of the embeddings; null: from the head, which also wins over a different number."""
    temperature: float = number(0.1, least=1e-4)
    """Divides the cosine similarities to the centroids."""
    # Three clusterings of 3,000: appendix D of the paper.
    num_clusters: list[int] = field(default_factory=lambda: [3000, 3000, 3000])
    """Clusters of each clustering; at most as many as an epoch has images."""
    kmeans_iters: int = number(10, least=1)
    """Rounds of k-means, at the start of each epoch."""
    memory_params: ClusterMemoryConfig = field(default_factory=ClusterMemoryConfig)
    """The memory: an embedding of every training image for each of its crops, on every process."""


@METHODS.register("deepcluster_v2")
class DeepClusterV2Spec(MethodSpec):
    """DeepCluster v2: prediction of the k-means assignments of the last epoch's embeddings."""

    losses = {"deepclusterv2_loss": DeepClusterV2LossConfig}
    shape_keys = ("embedding_dim", "num_clusters", "memory_params.crops_for_mb")
    title = "DeepCluster v2"
    paper = "https://arxiv.org/abs/2006.09882"
    views = "1 or more crops of any sizes"
    couples = "k-means over all images, at the start of an epoch"
    recipe = "digits/deepcluster_v2"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer embedding_dim from the head."""
        return {"embedding_dim": (head_width(cfg), "head")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for one projection head, positive numbers of clusters, and stored crops that exist."""
        keys, path = loss_keys(cfg), f"config.LOSS.{cfg.LOSS['name']}"
        problems = one_head(cfg, "mlp")
        if not keys.num_clusters or min(keys.num_clusters) < 1:
            must, fix = "must have one or more numbers, each at least 1", "Write [3000, 3000, 3000]."
            problems.append(Problem(f"{path}.num_clusters", str(list(keys.num_clusters)), must, fix))
        count, crops = num_crops_of(cfg), keys.memory_params.crops_for_mb
        if not crops or not all(0 <= crop < count for crop in crops):
            must = f"must list crops from 0 to {count - 1}"
            problems.append(Problem(f"{path}.memory_params.crops_for_mb", str(list(crops)), must, "Write [0]."))
        return problems


@dataclass
class MSNHeadConfig:
    """``msn_head``: an MLP with GELU and prototypes that are scored at unit length, as MSN's authors have it."""

    in_dim: int = number(MISSING, least=1)
    """Features of the trunk."""
    num_prototypes: int = number(MISSING, least=1)
    """Prototypes."""
    use_bn: bool = False
    """Batch norm between the layers of the MLP."""
    hidden_dim: int = number(2048, least=1)
    """Width between its three layers."""
    output_dim: int = number(256, least=1)
    """Width of the embedding that is scored, which has unit length."""


@dataclass
class MSNLossConfig:
    """``msn_loss``: masked crops take the prototypes of a whole one, https://arxiv.org/abs/2204.07141."""

    momentum: float = 0.996
    """Weight of the teacher's past at the start; it grows in a straight line."""
    final_momentum: float = 1.0
    """That weight after the last step."""
    temperature: float = number(0.1, above=0, most=1000)
    """Divides the cosine similarities to the prototypes."""
    # A target temperature of 0.025 against 0.1, as in the paper.
    sharpening: float = number(0.25, above=0, most=1)
    """The target's probabilities are raised to 1 over it."""
    mean_entropy_weight: float = number(1.0, least=0)
    """Weight of the term that makes the batch use all prototypes."""
    entropy_weight: float = number(0.0, least=0)
    """Weight of the mean entropy of the student's predictions."""
    use_sinkhorn: bool = True
    """Bring targets to equal use of the prototypes."""
    patch_drop: float = number(0.15, least=0, below=1)
    """Share of the patches left out of the student's crops of the first size, at random."""
    output_dim: int | None = None
    """Prototypes; null: from the head, which also wins over a different number."""


@METHODS.register("msn")
class MSNSpec(MethodSpec):
    """MSN: masked crops predict the prototypes that a teacher assigns to the full first crop."""

    losses = {"msn_loss": MSNLossConfig}
    heads = {"msn_head": MSNHeadConfig}
    title = "MSN"
    paper = "https://arxiv.org/abs/2204.07141"
    views = (
        "2 or more crops of the first size, others of any; the teacher sees the first, the student parts of the rest"
    )
    teacher = "momentum, linear to 1"
    teacher_follows = True
    couples = "the entropy of the mean prediction; Sinkhorn over the batch"
    recipe = "digits/msn"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer output_dim from the head."""
        options = next((options for _, options in heads_of(cfg)), {})
        counts = options.get("num_clusters") or [options.get("num_prototypes")]
        return {"output_dim": (counts[0], "head")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe: a vision transformer, one head with a layer of unit-length prototypes, two large crops."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        problems = [*one_head(cfg, "swav_head", "msn_head"), *patch_trunk(cfg), *two_views(cfg, exactly=False)]
        counts = crops_of(cfg)
        if counts and sum(counts) >= 2 and counts[0] < 2:
            must = "must begin with two crops of the first size: the teacher's and one of the student's"
            problems.append(
                Problem("config.DATA.TRAIN.TRANSFORMS", str(counts), must, "Write num_crops: [2, 10], for example.")
            )
        for name, options in heads_of(cfg):
            if name == "swav_head" and not (
                options.get("use_weight_norm_prototypes") and len(options["num_clusters"]) == 1
            ):
                must = "must have one layer of prototypes of unit length for msn_loss"
                fix = "Write num_clusters: [1024] and use_weight_norm_prototypes: true."
                problems.append(Problem("config.MODEL.HEAD.PARAMS", str(dict(options)), must, fix))
        momenta = [(f"{path}.{name}", getattr(keys, name)) for name in ("momentum", "final_momentum")]
        return [*problems, *(problem for key, value in momenta for problem in share(key, value))]
