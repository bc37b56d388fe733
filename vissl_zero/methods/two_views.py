"""Two views of an image agree: losses and methods.

With negatives: SimCLR, MoCo v2 and MoCo v3. Without: BYOL, SimSiam, Barlow Twins and VICReg.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.methods.gather import at_least_float32, count_samples, gather_samples, sum_over_ranks
from vissl_zero.methods.method import Batch, EmbeddingMethod, crops_of, images_of, output_of
from vissl_zero.methods.two_views_keys import (
    BarlowTwinsLossConfig,
    BYOLLossConfig,
    MoCoLossConfig,
    MoCoV3LossConfig,
    MultiCropSimCLRLossConfig,
    SimCLRLossConfig,
    SimSiamLossConfig,
    VICRegLossConfig,
)
from vissl_zero.registry import LOSSES


def nt_xent(views: Sequence[Tensor], temperature: float) -> Tensor:
    """Compute the cross-entropy of identifying another view of the image among the views of all images of all ranks.

    With more than two views, each other view is a positive in turn, against the views of other images only.

    Args:
        views: (n, D) embeddings of each view of this rank's samples; not normalized.
        temperature: divides the cosine similarities.
    Returns:
        0-d, the mean over this rank's pairs of different views of an image.
    Cost: an all-gather of V * n rows, and an all-reduce of V * N rows in the backward pass.
    """
    z = F.normalize(at_least_float32(torch.stack(tuple(views))), dim=2)
    counts = count_samples(z.shape[1], z.device)
    everyone = gather_samples(z.transpose(0, 1), counts).transpose(0, 1)
    logits = z.flatten(0, 1) @ everyone.flatten(0, 1).T / temperature  # (V n, V N), both view-major
    numbers = range(len(views))
    # (V, V - 1): for each view, the others in order, which are its positives.
    others = torch.tensor([[other for other in numbers if other != view] for view in numbers], device=logits.device)
    image = (counts.first + torch.arange(counts.local, device=logits.device)).repeat(len(views))[:, None]
    positives = logits.gather(1, image + others.repeat_interleave(counts.local, dim=0) * counts.total)
    of_image = image + torch.arange(len(views), device=logits.device) * counts.total
    # The image's own views are no negatives of each other, as in VISSL's multicrop_simclr_info_nce_loss.py.
    # Not minus infinity: with a single image all logits are masked, and the gradient of their logsumexp would be NaN.
    negatives = logits.scatter(1, of_image, torch.finfo(logits.dtype).min / 2).logsumexp(dim=1, keepdim=True)
    return (torch.logaddexp(positives, negatives) - positives).sum() / max(positives.numel(), 1)


@LOSSES.register("simclr_info_nce_loss", config=SimCLRLossConfig)
@LOSSES.register("multicrop_simclr_info_nce_loss", config=MultiCropSimCLRLossConfig)
class SimCLR(EmbeddingMethod):
    """SimCLR: NT-Xent between views, negatives from all ranks.

    Args: the fields of ``MultiCropSimCLRLossConfig``, with num_crops known.
    """

    def __init__(self, temperature: float = 0.1, num_crops: int = 2):
        super().__init__()
        self.num_crops = num_crops
        self.temperature = temperature

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over this rank's views; see ``nt_xent``. Collective."""
        views = crops_of(outputs[0], self.num_crops, batch)
        self._note(views[0])
        return nt_xent(views, self.temperature)


def info_nce(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of identifying the image's key among this key and the keys in the queue.

    Args:
        queries: (n, D), from the student; not normalized.
        keys: (n, D), from the momentum encoder; not normalized; no gradient goes into them.
        queue: (K, D) unit vectors, the same on every rank.
        temperature: divides the cosine similarities.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    queries = F.normalize(at_least_float32(queries))
    # MoCo (arXiv 1911.05722, section 3.2): the momentum encoder gets no gradient, its keys are constants.
    keys = F.normalize(at_least_float32(keys.detach()))
    positive = (queries * keys).sum(dim=1, keepdim=True)
    logits = torch.cat((positive, queries @ queue.to(queries.dtype).T), dim=1) / temperature
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).sum() / max(len(queries), 1)


class KeyQueue(nn.Module):
    """A ring buffer of the keys of the last steps of all ranks, identical on every rank.

    Args:
        length: keys kept, K.
        embedding_dim: D.

    Attributes:
        keys: buffer (K, D), unit rows.
        position: buffer, 0-d int64; row of the next key.
    """

    keys: Tensor
    position: Tensor

    def __init__(self, length: int, embedding_dim: int):
        super().__init__()
        # Random unit vectors, as in MoCo's builder.py; a constant seed makes them the same on every rank.
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("keys", F.normalize(torch.randn(length, embedding_dim, generator=generator)))
        # On the device: it decides no shape, so the host never has to read it.
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, keys: Tensor) -> None:
        """Replace the oldest keys by the new keys of all ranks, in the order of samples. Collective.

        Args:
            keys: (n, D) of this rank; not normalized; n may differ between ranks.
        Cost: see ``collectives.all_gather_rows``.
        """
        # A step that the loss scaler skips may have infinities, which would stay for K samples.
        finite = torch.nan_to_num(keys.to(self.keys.dtype), nan=0.0, posinf=0.0, neginf=0.0)
        newest = collectives.all_gather_rows(F.normalize(finite))
        length = len(self.keys)
        # All rows at once, where they wrap around too: MoCo's code asserts that a batch divides the queue.
        rows = (self.position + torch.arange(len(newest), device=newest.device)) % length
        # With more keys than rows, the last ones win: index_copy_ with repeated rows is undefined.
        self.keys.index_copy_(0, rows[-length:], newest[-length:])
        self.position.copy_((self.position + len(newest)) % length)


@LOSSES.register("moco_loss", config=MoCoLossConfig)
class MoCoV2(EmbeddingMethod):
    """MoCo v2: InfoNCE against a queue of the teacher's keys.

    The student sees the first crop, the teacher the second. Batch norm over the batch of all ranks
    (``SYNC_BN_CONFIG``) replaces MoCo's shuffling of the batch.

    Args: the fields of ``MoCoLossConfig``, with embedding_dim known.
    """

    has_teacher = True
    teacher_crops = (1,)

    def __init__(self, embedding_dim: int, queue_size: int = 65536, momentum: float = 0.999, temperature: float = 0.2):
        super().__init__()
        self.queue = KeyQueue(queue_size, embedding_dim)
        self.momenta = momentum, momentum
        self.temperature = temperature

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Compute the queries: the first crop."""
        outputs: list[Any] = model(images_of(batch, [0]))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``info_nce``."""
        (queries,), (keys,) = crops_of(outputs[0], 1, batch), crops_of(teacher_outputs[0], 1, batch)
        self._note(queries)
        return info_nce(queries, keys, self.queue.keys, self.temperature)

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return the teacher's keys (n, D)."""
        assert teacher_outputs is not None
        return teacher_outputs[0].detach()

    def update_state(self, observed: Sequence[Any]) -> None:
        """Queue the keys. Collective."""
        for keys in observed:
            self.queue.push(keys)


def symmetric_info_nce(
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """Compute the cross-entropy of identifying, for each view, the other view's key among the keys of all ranks.

    Args:
        queries: (n, D) of each of the two views, from the student's predictor; not normalized.
        keys: (n, D) of each view, from the momentum encoder; no gradient goes into them.
        temperature: divides the cosine similarities; the loss is scaled by twice its value.
    Returns:
        0-d: the mean over this rank's samples, both directions added.
    Cost: one all-gather of 2n rows; none in the backward pass.
    """
    counts = count_samples(len(queries[0]), queries[0].device)
    # Detached, so the gather below has no backward pass.
    local_keys = F.normalize(at_least_float32(torch.stack(keys, dim=1).detach()), dim=2)
    every_key = gather_samples(local_keys, counts)  # (N, 2, D)
    labels = counts.first + torch.arange(counts.local, device=local_keys.device)
    terms = []
    for view, query in enumerate(queries):
        logits = F.normalize(at_least_float32(query)) @ every_key[:, 1 - view].T / temperature
        terms.append(F.cross_entropy(logits, labels, reduction="sum") / max(counts.local, 1))
    # The factor of contrastive_loss in facebookresearch/moco-v3 moco/builder.py.
    return torch.stack(terms).sum() * (2 * temperature)


@LOSSES.register("moco_v3_loss", config=MoCoV3LossConfig)
class MoCoV3(EmbeddingMethod):
    """MoCo v3: symmetric InfoNCE against the teacher's keys of the batch.

    Args: the fields of ``MoCoV3LossConfig``.
    """

    has_teacher = True

    def __init__(self, momentum: float = 0.99, temperature: float = 0.2):
        super().__init__()
        self.momenta = momentum, 1.0
        self.temperature = temperature

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``symmetric_info_nce``. Collective."""
        queries = crops_of(output_of(outputs, "predictions").predictions, 2, batch)
        keys = crops_of(output_of(teacher_outputs, "projections").projections, 2, batch)
        self._note(outputs[0].projections)
        return symmetric_info_nce((queries[0], queries[1]), (keys[0], keys[1]), self.temperature)


def cosine(predictions: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cosine similarity over this rank's samples; no gradient goes into the targets.

    Args:
        predictions, targets: (n, D); not normalized.
    Returns:
        0-d. No communication.
    """
    predictions = F.normalize(at_least_float32(predictions))
    # SimSiam's targets are outputs of the student: without the stopped gradient, all embeddings become equal
    # (arXiv 2011.10566, section 4.1). BYOL's come from a teacher, which has no graph.
    targets = F.normalize(at_least_float32(targets.detach()))
    return (predictions * targets).sum() / max(len(predictions), 1)


def byol_loss(predictions: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """Sum the squared distances of unit vectors between each view's prediction and the other view's target.

    Args:
        predictions: (n, D) of each view, from the student's predictor.
        targets: (n, D) of each view, from the momentum encoder.
    Returns:
        0-d: the mean over this rank's samples, between 0 and 8. No communication.
    """
    return 4 - 2 * cosine(predictions[0], targets[1]) - 2 * cosine(predictions[1], targets[0])


@LOSSES.register("byol_loss", config=BYOLLossConfig)
class BYOL(EmbeddingMethod):
    """BYOL: the student predicts the teacher's projection of the other view.

    Args: the fields of ``BYOLLossConfig``.
    """

    has_teacher = True
    guessing_loss = 4.0  # orthogonal unit vectors have a squared distance of 2, in both directions

    def __init__(self, momentum: float = 0.99, final_momentum: float = 1.0):
        super().__init__()
        self.momenta = momentum, final_momentum

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any]) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``byol_loss``."""
        predictions = crops_of(output_of(outputs, "predictions").predictions, 2, batch)
        targets = crops_of(output_of(teacher_outputs, "projections").projections, 2, batch)
        self._note(outputs[0].projections)
        return byol_loss((predictions[0], predictions[1]), (targets[0], targets[1]))


def simsiam_loss(predictions: tuple[Tensor, Tensor], projections: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the negative cosine similarity, averaged over both directions; no gradient goes into the projections.

    Args:
        predictions: (n, D) of each view, from the predictor.
        projections: (n, D) of each view, the inputs of the predictor.
    Returns:
        0-d: the mean over this rank's samples, between -1 and 1. No communication.
    """
    return -(cosine(predictions[0], projections[1]) + cosine(predictions[1], projections[0])) / 2


@LOSSES.register("simsiam_loss", config=SimSiamLossConfig)
class SimSiam(EmbeddingMethod):
    """SimSiam: prediction of the other view, without gradient through the target."""

    guessing_loss = 0.0  # the cosine of orthogonal vectors

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the mean loss over this rank's samples; see ``simsiam_loss``."""
        projections = crops_of(output_of(outputs, "projections").projections, 2, batch)
        predictions = crops_of(output_of(outputs, "predictions").predictions, 2, batch)
        self._note(projections[0])
        return simsiam_loss((predictions[0], predictions[1]), (projections[0], projections[1]))


_BATCH_NORM_EPS = 1e-5  # barlowtwins/main.py standardizes with nn.BatchNorm1d(affine=False)


def _cross_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Compute the cross-correlation (D, D) of two views over the samples of all ranks; differentiable. Collective.

    Args:
        first, second: (n, D) embeddings of the views of this rank's samples; not standardized.
    Cost: two all-reduces, of 2D + 1 and D * D + 2D numbers, and as many in the backward pass.
    """
    dim = first.shape[1]
    views = at_least_float32(torch.stack((first, second)))
    num_local = views.new_tensor([views.shape[1]])
    sums = sum_over_ranks(torch.cat((views.sum(dim=1).flatten(), num_local)))
    num_global = sums[-1]
    # Two passes: E[x^2] - E[x]^2 would lose half of the digits where the mean is large. This costs a second all-reduce.
    views = views - (sums[:-1] / num_global).view(2, 1, dim)
    moments = torch.cat((views.square().sum(dim=1).flatten(), (views[0].T @ views[1]).flatten()))
    # Divided by N and not by N - 1, as batch norm does.
    moments = sum_over_ranks(moments) / num_global
    deviations = torch.sqrt(moments[: 2 * dim].view(2, dim) + _BATCH_NORM_EPS)
    return moments[2 * dim :].view(dim, dim) / (deviations[0][:, None] * deviations[1][None])


def barlow_twins_loss(first: Tensor, second: Tensor, lambda_: float, scale: float) -> Tensor:
    """Compute the squared distance of the correlation from the identity, off the diagonal weighted by ``lambda_``.

    Args:
        first, second: (n, D) embeddings of the views of this rank's samples.
        lambda_: weight of the elements off the diagonal.
        scale: factor of the whole loss (VISSL's ``scale_loss``).
    Returns:
        0-d, the same on every rank: a function of the whole batch.
    Cost: see ``_cross_correlation``.
    """
    correlation = _cross_correlation(first, second)
    diagonal = correlation.diagonal()
    on_diagonal = (diagonal - 1).square().sum()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return scale * (on_diagonal + lambda_ * off_diagonal)


@LOSSES.register("barlow_twins_loss", config=BarlowTwinsLossConfig)
class BarlowTwins(EmbeddingMethod):
    """Barlow Twins: the cross-correlation of two views approaches the identity.

    Args: the fields of ``BarlowTwinsLossConfig``.
    """

    def __init__(self, lambda_: float = 0.0051, scale_loss: float = 0.024):
        super().__init__()
        self.lambda_ = lambda_
        self.scale_loss = scale_loss

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute the loss, the same on every rank; see ``barlow_twins_loss``. Collective."""
        first, second = crops_of(outputs[0], 2, batch)
        self._note(first)
        return barlow_twins_loss(first, second, self.lambda_, self.scale_loss)


_VARIANCE_EPS = 1e-4  # facebookresearch/vicreg main_vicreg.py


def vicreg_loss(
    first: Tensor,
    second: Tensor,
    invariance: float,
    variance: float,
    covariance: float,
) -> Tensor:
    """Sum the three weighted terms; variance and covariance are computed over the samples of all ranks.

    Args:
        first, second: (n, D) embeddings of the views of this rank's samples.
        invariance, variance, covariance: weights of the terms.
    Returns:
        0-d. The invariance term is the mean over this rank's samples; the others are the same on every rank.
    Cost: an all-gather of 2n rows and an all-reduce of 2N rows in the backward pass; 2 * N * D * D multiplications.
    """
    counts = count_samples(len(first), first.device)
    views = at_least_float32(torch.stack((first, second), dim=1))  # (n, 2, D)
    dim = views.shape[2]
    distance = (views[:, 0] - views[:, 1]).square().sum() / max(counts.local * dim, 1)
    everyone = gather_samples(views, counts).transpose(0, 1)
    centered = everyone - everyone.mean(dim=1, keepdim=True)
    # One sample has no variance: torch.var would return NaN.
    divisor = max(counts.total - 1, 1)
    deviations = torch.sqrt(centered.square().sum(dim=1) / divisor + _VARIANCE_EPS)
    # main_vicreg.py averages the variance terms of the two views, but sums their covariance terms.
    spread = F.relu(1 - deviations).mean(dim=1).sum() / 2
    covariances = centered.transpose(1, 2) @ centered / divisor
    diagonal = covariances.diagonal(dim1=1, dim2=2)
    redundancy = (covariances.square().sum() - diagonal.square().sum()) / dim
    return invariance * distance + variance * spread + covariance * redundancy


@LOSSES.register("vicreg_loss", config=VICRegLossConfig)
class VICReg(EmbeddingMethod):
    """VICReg: variance, invariance and covariance of two views.

    Args: the fields of ``VICRegLossConfig``.
    """

    def __init__(self, sim_coeff: float = 25.0, std_coeff: float = 25.0, cov_coeff: float = 1.0):
        super().__init__()
        self.weights = sim_coeff, std_coeff, cov_coeff

    def forward(self, outputs: list[Any], batch: Batch) -> Tensor:
        """Compute ``vicreg_loss``. Collective."""
        first, second = crops_of(outputs[0], 2, batch)
        self._note(first)
        return vicreg_loss(first, second, *self.weights)
