"""Prediction of centroids and prototypes (DeepCluster v2, MSN): losses, heads and methods."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import at_least_float32, sinkhorn, sum_over_ranks, weighted_mean
from vissl_zero.methods.method import Batch, EmbeddingMethod, images_of, output_of
from vissl_zero.methods.prototypes_keys import DeepClusterV2LossConfig, MSNHeadConfig, MSNLossConfig
from vissl_zero.methods.swav import SwAVOutput
from vissl_zero.models.patches import PatchView, with_patches_dropped
from vissl_zero.registry import HEADS, LOSSES

NOT_ASSIGNED = -100  # the ignore_index of torch's cross-entropy


def deepcluster_loss(
    embeddings: Tensor, centroids: Sequence[Tensor], assignments: Tensor, temperature: float
) -> Tensor:
    """Compute the cross-entropy of every crop against the cluster of its image, averaged over clusterings.

    Args:
        embeddings: (V, n, D) of this rank's crops; not normalized.
        centroids: per clustering (K_i, D), unit rows.
        assignments: (H, n) int64, the cluster of each image in each of the H clusterings; ``NOT_ASSIGNED`` for an image
            without an embedding, which is ignored.
        temperature: divides the cosine similarities.
    Returns:
        0-d; the loop's mean over ranks is the mean over counted crops, however they are spread. Collective.
    Cost: one all-reduce of two numbers per clustering.
    """
    rows = F.normalize(at_least_float32(embeddings), dim=2)
    losses = []
    for centers, clusters in zip(centroids, assignments, strict=True):
        logits = (rows @ centers.to(rows.dtype).T / temperature).flatten(0, 1)
        labels = clusters.repeat(len(rows))
        errors = F.cross_entropy(logits, labels, ignore_index=NOT_ASSIGNED, reduction="none")
        losses.append(weighted_mean(errors, (labels != NOT_ASSIGNED).to(errors.dtype), embeddings.shape[1]))
    return torch.stack(losses).mean()


@torch.no_grad()
def spherical_kmeans(rows: Tensor, centroids: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """Run k-means by cosine similarity over the rows of all ranks. Collective.

    Args:
        rows: (m, D) of this rank, unit rows; any m.
        centroids: first centroids (K, D), the same on every rank. A centroid without rows stays where it is.
        num_iters: rounds.
    Returns:
        Centroids (K, D), unit rows, and the index of the nearest centroid for each row, (m,) int64.
    Cost: one all-reduce of K * (D + 1) numbers per round.
    """
    num_clusters = len(centroids)
    for _ in range(num_iters):
        nearest = _nearest(rows, centroids)
        # The last column counts rows, so that sums and counts are one all-reduce.
        sums = rows.new_zeros(num_clusters, rows.shape[1] + 1)
        sums.index_add_(0, nearest, torch.cat((rows, rows.new_ones(len(rows), 1)), dim=1))
        sums = collectives.all_reduce_sum(sums)
        means = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        centroids = F.normalize(torch.where(sums[:, -1:] > 0, means, centroids))
    return centroids, _nearest(rows, centroids)


class ClusterMemory(nn.Module):
    """The embeddings of the last epoch, and the clusterings that the next one predicts; identical on every rank.

    Args:
        num_images: S, of the data set.
        embedding_dim: D.
        num_clusters: K_i of each of the H clusterings.
        num_crops: number of crops with stored embeddings, C; clustering i uses crop ``i % C``.

    Attributes:
        embeddings: buffer (C, S, D), unit rows. It takes C * S * D numbers on every rank.
        is_known: buffer (S,) bool, images that have an embedding.
        assignments: buffer (H, S) int64.
        centroids0, centroids1, ...: buffers (K_i, D).
    """

    embeddings: Tensor
    is_known: Tensor
    assignments: Tensor

    def __init__(self, num_images: int, embedding_dim: int, num_clusters: Sequence[int], num_crops: int):
        super().__init__()
        self.num_clusters = list(num_clusters)
        self.register_buffer("embeddings", torch.zeros(num_crops, num_images, embedding_dim))
        self.register_buffer("is_known", torch.zeros(num_images, dtype=torch.bool))
        unassigned = torch.full((len(self.num_clusters), num_images), NOT_ASSIGNED)
        self.register_buffer("assignments", unassigned)
        for index, count in enumerate(self.num_clusters):
            self.register_buffer(f"centroids{index}", torch.zeros(count, embedding_dim))

    @property
    def centroids(self) -> list[Tensor]:
        """Per clustering (K_i, D)."""
        return [self.get_buffer(f"centroids{index}") for index in range(len(self.num_clusters))]

    @torch.no_grad()
    def update(self, embeddings: Tensor, sample_ids: Tensor) -> None:
        """Store the embeddings of the images of all ranks. Collective.

        Args:
            embeddings: (C, n, D) of this rank; not normalized. Images with rows that are not finite are skipped.
            sample_ids: (n,), different from each other over all ranks.
        Cost: two gathers of rows (see ``collectives.all_gather_rows``).
        """
        rows = F.normalize(at_least_float32(embeddings), dim=2).to(self.embeddings.dtype)
        rows = collectives.all_gather_rows(rows.transpose(0, 1))
        indices = collectives.all_gather_rows(sample_ids)
        is_finite = rows.isfinite().flatten(1).all(dim=1)
        # torch.where, because indexing with a mask would wait for the device.
        kept = self.embeddings[:, indices]
        self.embeddings[:, indices] = torch.where(is_finite[:, None], rows.transpose(0, 1), kept)
        self.is_known[indices] = self.is_known[indices] | is_finite

    @torch.no_grad()
    def cluster(self, epoch: int, num_iters: int) -> None:
        """Cluster the stored embeddings; each rank handles a part of the images. Collective.

        Args:
            epoch: part of the seed of the first centroids, which are embeddings drawn at random.
            num_iters: rounds of k-means.
        Raises:
            ValueError: fewer images than clusters have an embedding.
        Cost: H times ``spherical_kmeans``, and a gather of S assignments for each clustering.
        """
        known = self.is_known.nonzero()[:, 0]
        if len(known) < max(self.num_clusters):
            raise ValueError(f"{len(known)} images cannot make {max(self.num_clusters)} clusters")
        rank, world_size = collectives.rank(), collectives.world_size()
        local = known[rank * len(known) // world_size : (rank + 1) * len(known) // world_size]
        for index, count in enumerate(self.num_clusters):
            # In float64, so that rounding, which depends on the number of ranks, hardly ever changes an assignment.
            embeddings = self.embeddings[index % len(self.embeddings)].double()
            # Every clustering of every epoch has centroids of its own. The same seed on every rank needs no broadcast.
            generator = torch.Generator().manual_seed(epoch * 101 + index)
            first = embeddings[known[torch.randperm(len(known), generator=generator)[:count].to(known.device)]]
            centroids, nearest = spherical_kmeans(embeddings[local], first, num_iters)
            self.get_buffer(f"centroids{index}").copy_(centroids)
            self.assignments[index].fill_(NOT_ASSIGNED)
            # Ranks have consecutive parts of ``known``, so gathered rows are in its order.
            self.assignments[index, known] = collectives.all_gather_rows(nearest)


def _nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    return (rows @ centroids.T).argmax(dim=1)


@LOSSES.register("deepclusterv2_loss", config=DeepClusterV2LossConfig)
class DeepClusterV2(EmbeddingMethod):
    """DeepCluster v2: prediction of the k-means assignments of the last epoch's embeddings.

    The first epoch predicts assignments of the untrained model's embeddings of all images.

    Args: the fields of ``DeepClusterV2LossConfig``, with embedding_dim known.
    """

    needs_initial_embeddings = True
    remembers_images = True
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
        """Make an empty memory of the images.

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
        """Cluster the stored embeddings. Collective."""
        self.memory.cluster(epoch, self.kmeans_iters)

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over counted crops; see ``deepcluster_loss``. Collective."""
        embeddings = self._by_crop(outputs, batch)
        self._note(embeddings[0])
        assignments = self.memory.assignments[:, batch.sample_ids]
        return deepcluster_loss(embeddings, self.memory.centroids, assignments, self.temperature)

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return embeddings (C, n, D) of the crops to store, and the images' indices (n,)."""
        return self._by_crop(outputs, batch)[self.remembered_crops].detach(), batch.sample_ids

    def update_state(self, observed: Sequence[Any]) -> None:
        """Store the embeddings. Collective."""
        embeddings, sample_ids = zip(*observed, strict=True)
        self.memory.update(torch.cat(embeddings, dim=1), torch.cat(sample_ids))

    def _by_crop(self, outputs: list[Any], batch: Batch) -> Tensor:
        rows: Tensor = outputs[0]
        return rows.unflatten(0, (sum(batch.num_crops), batch.num_local))


def msn_loss(
    anchors: Tensor,
    target: Tensor,
    temperature: float,
    sharpening: float,
    mean_entropy_weight: float,
    entropy_weight: float,
    use_sinkhorn: bool,
) -> Tensor:
    """Compute the cross-entropy of masked anchors against the sharpened target, minus the mean prediction's entropy.

    Args:
        anchors: (V, n, K) cosine similarities of the student's masked views to the prototypes.
        target: (n, K) similarities of the teacher's unmasked view to the same prototypes; no gradient goes into it.
        temperature: divides the cosine similarities.
        sharpening: exponent 1 / sharpening of the target's probabilities.
        mean_entropy_weight: weight of ln K minus the entropy of the mean prediction over the anchors of all ranks.
        entropy_weight: weight of the mean entropy of the predictions.
        use_sinkhorn: balance the targets, so that the samples of all ranks use the prototypes equally.
    Returns:
        0-d: the mean over this rank's anchors, plus the mean-entropy term, the same on every rank. Collective.
    Cost: one all-reduce of K + 1 numbers, again in the backward pass; with Sinkhorn, six more of K numbers.
    """
    log_probabilities = F.log_softmax(at_least_float32(anchors) / temperature, dim=2)
    with torch.no_grad():
        # p ** (1 / sharpening), normalized, is a softmax at a lower temperature.
        log_targets = F.log_softmax(at_least_float32(target) / (temperature * sharpening), dim=1)
        # Sinkhorn on probabilities is Sinkhorn on their logarithms with epsilon 1.
        targets = sinkhorn(log_targets[None], 1.0, 3)[0] if use_sinkhorn else log_targets.exp()
    probabilities = log_probabilities.exp()
    num_anchors = anchors.shape[0] * anchors.shape[1]
    loss = -(targets * log_probabilities).sum() / max(num_anchors, 1)
    # The entropy of a mean is no mean of entropies: the mean prediction must be that of all ranks, with its gradient.
    sums = sum_over_ranks(torch.cat((probabilities.sum(dim=(0, 1)), probabilities.new_tensor([num_anchors]))))
    mean = sums[:-1] / sums[-1].detach().clamp(min=1)
    # ln K - H(mean), at least 0. xlogy: a prototype that no anchor uses adds 0, not NaN.
    # Without it all images could take one prototype, which makes the first term 0 (section 3 of the paper).
    loss = loss + mean_entropy_weight * (math.log(len(mean)) + torch.special.xlogy(mean, mean).sum())
    if entropy_weight:
        loss = loss - entropy_weight * (probabilities * log_probabilities).sum() / max(num_anchors, 1)
    return loss


@HEADS.register("msn_head", config=MSNHeadConfig)
class MSNHead(nn.Module):
    """Three linear layers with GELU between them, embeddings of unit length, prototypes of unit length.

    Parameters have VISSL's names (``fc.fc1.weight``, ``fc.bn1.weight``, ``prototypes``).

    Args: the fields of ``MSNHeadConfig``.
    """

    def __init__(
        self, in_dim: int, num_prototypes: int, use_bn: bool = False, hidden_dim: int = 2048, output_dim: int = 256
    ):
        super().__init__()
        layers: dict[str, nn.Module] = {}
        for index, width in enumerate((in_dim, hidden_dim), start=1):
            layers[f"fc{index}"] = nn.Linear(width, hidden_dim)
            if use_bn:
                layers[f"bn{index}"] = nn.BatchNorm1d(hidden_dim)
            layers[f"gelu{index}"] = nn.GELU()
        layers["fc3"] = nn.Linear(hidden_dim, output_dim)
        self.fc = nn.Sequential(OrderedDict(layers))
        self.prototypes = nn.Parameter(torch.zeros(num_prototypes, output_dim))

    def forward(self, features: Tensor, probe: Tensor | None = None) -> SwAVOutput:
        """Embed and score the rows of all crops; score the probe (q, D) too, without gradient."""
        x = self.fc(features)
        embeddings = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)))
        scores = [self._score(embeddings)]
        if probe is None:
            return SwAVOutput(embeddings, scores, None)
        with torch.no_grad():
            return SwAVOutput(embeddings, scores, [self._score(probe)])

    def _score(self, embeddings: Tensor) -> Tensor:
        # Normalized at each use: an optimizer step moves prototypes off the unit sphere.
        return F.linear(embeddings.to(self.prototypes.dtype), F.normalize(self.prototypes))

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw layers from a truncated normal of deviation 0.02 and prototypes uniformly, as VISSL; set biases to 0."""
        for name, module in self.fc.named_modules(prefix="fc"):
            if isinstance(module, nn.Linear):
                drawn = torch.empty(module.weight.shape)
                nn.init.trunc_normal_(drawn, std=0.02, generator=generator_for(f"{name}.weight"))
                module.weight.data.copy_(drawn)
                nn.init.zeros_(module.bias)
        bound = self.prototypes.shape[1] ** -0.5
        drawn = torch.empty(self.prototypes.shape).uniform_(-bound, bound, generator=generator_for("prototypes"))
        self.prototypes.data.copy_(drawn)


@LOSSES.register("msn_loss", config=MSNLossConfig)
class MSN(EmbeddingMethod):
    """MSN: masked crops predict the prototypes that a teacher assigns to the full first crop.

    The student's prototypes also score the teacher's embeddings, which the student's head gets as a probe.

    Args: the fields of ``MSNLossConfig``, with output_dim known.
    """

    has_teacher = True

    def __init__(
        self,
        output_dim: int,
        momentum: float = 0.996,
        final_momentum: float = 1.0,
        temperature: float = 0.1,
        sharpening: float = 0.25,
        mean_entropy_weight: float = 1.0,
        entropy_weight: float = 0.0,
        use_sinkhorn: bool = True,
        patch_drop: float = 0.15,
    ):
        super().__init__()
        self.guessing_loss = math.log(output_dim)
        self.first_momentum, self.last_momentum = momentum, final_momentum
        self.temperature = temperature
        self.sharpening = sharpening
        self.mean_entropy_weight = mean_entropy_weight
        self.entropy_weight = entropy_weight
        self.use_sinkhorn = use_sinkhorn
        self.patch_drop = patch_drop
        self._targets: Tensor | None = None

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on the whole first crop, and keep its embeddings for ``probe``."""
        outputs: list[Any] = model(images_of(batch, [0]))
        # The loop runs the teacher before the student, whose forward pass scores these.
        self._targets = output_of(outputs, "embeddings").embeddings.detach()
        return outputs

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on all other crops, with patches dropped from crops of the first size."""
        crops = range(1, sum(batch.num_crops))
        outputs: list[Any] = model(images_of(batch, crops), self.probe(), choose_patches=self._choose_patches)
        return outputs

    def probe(self) -> Tensor | None:
        """Return the teacher's embeddings."""
        return self._targets

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``msn_loss``. Collective."""
        student = output_of(outputs, "probe_scores")
        self._note(student.embeddings)
        anchors = student.scores[0].unflatten(0, (sum(batch.num_crops) - 1, batch.num_local))
        return msn_loss(
            anchors,
            student.probe_scores[0],
            self.temperature,
            self.sharpening,
            self.mean_entropy_weight,
            self.entropy_weight,
            self.use_sinkhorn,
        )

    def momentum(self, step: int) -> float:
        """Return the teacher's momentum; see ``Method``."""
        return self._linear_momentum(self.first_momentum, step, self.last_momentum)

    def _choose_patches(self, images: Sequence[Tensor], patch_size: tuple[int, int]) -> list[PatchView]:
        return with_patches_dropped(images, patch_size, self.patch_drop, self.epoch)
