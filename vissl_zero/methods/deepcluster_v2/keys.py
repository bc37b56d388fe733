"""DeepCluster v2's keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, head_width, loss_keys, one_head
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


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
        """embedding_dim from the head."""
        return {"embedding_dim": (head_width(cfg), "head")}

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """One projection head, clusters, crops that there are."""
        keys, path = loss_keys(cfg), f"config.LOSS.{cfg.LOSS['name']}"
        found = one_head(cfg, "mlp")
        if not keys.num_clusters or min(keys.num_clusters) < 1:
            must, fix = "must have one or more numbers, each at least 1", "Write [3000, 3000, 3000]."
            found.append(Problem(f"{path}.num_clusters", str(list(keys.num_clusters)), must, fix))
        count, crops = sum(crops_of(cfg) or [1]), keys.memory_params.crops_for_mb
        if not crops or not all(0 <= crop < count for crop in crops):
            must = f"must list crops from 0 to {count - 1}"
            found.append(Problem(f"{path}.memory_params.crops_for_mb", str(list(crops)), must, "Write [0]."))
        return found
