"""DeepCluster v2 as the loop runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.deepcluster_v2.keys import DeepClusterV2LossConfig
from vissl_zero.methods.deepcluster_v2.loss import ClusterMemory, deepcluster_loss
from vissl_zero.methods.embedding import EmbeddingMethod
from vissl_zero.methods.method import Batch
from vissl_zero.registry import LOSSES


@LOSSES.register("deepclusterv2_loss", config=DeepClusterV2LossConfig)
class DeepClusterV2(EmbeddingMethod):
    """DeepCluster v2: prediction of the k-means assignments of the last epoch's embeddings.

    Those of the first epoch come from a pass of the untrained model over all images.

    Args: the fields of ``DeepClusterV2LossConfig``, with embedding_dim known.
    """

    looks_first = True
    memory: ClusterMemory

    def __init__(
        self,
        embedding_dim: int,
        num_clusters: Sequence[int],
        temperature: float = 0.1,
        kmeans_iters: int = 10,
        memory_params: Mapping[str, Sequence[int]] | None = None,
    ):
        super().__init__()
        self.embedding_dim = embedding_dim
        self.num_clusters = list(num_clusters)
        self.temperature = temperature
        self.kmeans_iters = kmeans_iters
        self.remembered_crops = list((memory_params or {}).get("crops_for_mb", [0]))
        self.guessing_loss = sum(math.log(count) for count in self.num_clusters) / len(self.num_clusters)

    def set_images(self, num_images: int) -> None:
        """An empty memory of them.

        Raises:
            ConfigError: there are more clusters than images.
        """
        if 0 < num_images < max(self.num_clusters):
            must = f"must be at most the {num_images} training images"
            got, fix = str(self.num_clusters), "Write fewer clusters."
            raise ConfigError([Problem("config.LOSS.deepclusterv2_loss.num_clusters", got, must, fix)])
        crops = len(self.remembered_crops)
        self.memory = ClusterMemory(num_images, self.embedding_dim, self.num_clusters, crops)

    def on_epoch(self, epoch: int) -> None:
        """Cluster what is remembered. Collective."""
        self.memory.cluster(epoch, self.kmeans_iters)

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """The mean over counted crops; see ``deepcluster_loss``. Collective."""
        embeddings = self._by_crop(outputs, batch)
        self._note(embeddings[0])
        assignments = self.memory.assignments[:, batch.sample_ids]
        return deepcluster_loss(embeddings, self.memory.centroids, assignments, self.temperature)

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Remember the images. Collective."""
        self.memory.update(self._by_crop(outputs, batch)[self.remembered_crops].detach(), batch.sample_ids)

    def _by_crop(self, outputs: list[Any], batch: Batch) -> Tensor:
        rows: Tensor = outputs[0]
        return rows.unflatten(0, (sum(batch.num_crops), batch.num_local))
