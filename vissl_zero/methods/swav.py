"""SwAV, and SwAV with a teacher: losses, head and methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.gather import EmbeddingQueue, sinkhorn
from vissl_zero.methods.health import ClusteringCollapse, clustering_health, clustering_sums, trivial_loss
from vissl_zero.methods.method import Batch, Method, images_of
from vissl_zero.methods.swav_keys import SwAVHeadConfig, SwAVLossConfig, SwAVMomentumLossConfig
from vissl_zero.registry import HEADS, LOSSES

_ACTIVATIONS: dict[str, type[nn.Module]] = {"ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}


class SwAVOutput(NamedTuple):
    """Outputs of the head; a tuple, so that hooks of sharded modules see the tensors in it.

    Attributes:
        embeddings: (n, D), of unit length where ``normalize_feats``; at least float32.
        scores: per layer of prototypes (n, K_i).
        probe_scores: per layer (q, K_i) without gradient; None without a probe.
    """

    embeddings: Tensor
    scores: list[Tensor]
    probe_scores: list[Tensor] | None


class NormalizedPrototypes(nn.Module):
    """A linear layer whose rows have direction ``weight_v`` and length ``weight_g``, as ``torch.nn.utils.weight_norm``.

    Attributes:
        weight_v: (K, D), directions.
        weight_g: (K, 1), lengths, 1 at the start; not trained if ``is_unit``.
    """

    def __init__(self, width: int, num_prototypes: int, is_unit: bool):
        super().__init__()
        # The names of weight_norm's parameters, which checkpoints of VISSL and DINO have.
        self.weight_v = nn.Parameter(torch.zeros(num_prototypes, width))
        self.weight_g = nn.Parameter(torch.ones(num_prototypes, 1), requires_grad=not is_unit)

    @property
    def weight(self) -> Tensor:
        """The prototypes (K, D): unit directions times lengths."""
        return F.normalize(self.weight_v) * self.weight_g

    def forward(self, rows: Tensor) -> Tensor:
        """Score rows, (n, D) -> (n, K)."""
        return F.linear(rows.to(self.weight_v.dtype), self.weight)

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw directions from the distribution of ``nn.Linear``'s weights; set lengths to 1."""
        bound = 1 / math.sqrt(self.weight_v.shape[1])
        drawn = torch.empty(self.weight_v.shape).uniform_(-bound, bound, generator=generator_for("weight_v"))
        self.weight_v.data.copy_(drawn)
        self.weight_g.data.fill_(1.0)


@HEADS.register("swav_head", config=SwAVHeadConfig)
class SwAVHead(nn.Module):
    """The projection MLP and prototypes of SwAV and DINO.

    Args: the fields of ``SwAVHeadConfig``.

    Attributes:
        prototypes0, prototypes1, ...: linear layers without bias, or ``NormalizedPrototypes``, one per entry of
            ``num_clusters``.
    """

    def __init__(
        self,
        dims: Sequence[int],
        num_clusters: Sequence[int],
        use_bn: bool = False,
        use_bias: bool = True,
        skip_last_bn: bool = True,
        normalize_feats: bool = True,
        activation_name: str = "ReLU",
        return_embeddings: bool = True,
        use_weight_norm_prototypes: bool = False,
        normalize_last_layer: bool = False,
    ):
        super().__init__()
        # ``return_embeddings`` is VISSL's key: only a rule reads it, as embeddings cost nothing beside their scores.
        _check_head(dims, num_clusters, activation_name)
        layers: list[nn.Module] = []
        for index, (width_in, width_out) in enumerate(pairwise(dims)):
            layers.append(nn.Linear(width_in, width_out, bias=use_bias))
            if index == len(dims) - 2 and skip_last_bn:
                break
            if use_bn:
                layers.append(nn.BatchNorm1d(width_out))
            layers.append(_ACTIVATIONS[activation_name]())
        self.projection_head = nn.Sequential(*layers)
        self.num_layers = len(num_clusters)
        for index, num_prototypes in enumerate(num_clusters):
            layer: nn.Module = (
                NormalizedPrototypes(dims[-1], num_prototypes, normalize_last_layer)
                if use_weight_norm_prototypes
                else nn.Linear(dims[-1], num_prototypes, bias=False)
            )
            self.add_module(f"prototypes{index}", layer)
        self.normalize_feats = normalize_feats

    def forward(self, features: Tensor, probe: Tensor | None = None) -> SwAVOutput:
        """Embed and score the rows of all crops; score the probe too, with the same prototypes.

        Args:
            features: (n, F), all crops of all resolutions, crop-major.
            probe: (q, D) embeddings to be scored without gradient, such as the loss's queue.
        """
        x = self.projection_head(features)
        # In half precision the length of a row would be 1 to two or three digits only.
        embeddings = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.normalize_feats:
            embeddings = F.normalize(embeddings)
        scores = self._score(embeddings)
        if probe is None:
            return SwAVOutput(embeddings, scores, None)
        with torch.no_grad():
            return SwAVOutput(embeddings, scores, self._score(probe))

    def _score(self, embeddings: Tensor) -> list[Tensor]:
        scores = []
        for index in range(self.num_layers):
            layer: nn.Linear | NormalizedPrototypes = getattr(self, f"prototypes{index}")
            is_plain = isinstance(layer, nn.Linear)
            # A mixed-precision layer has half-precision weights, and embeddings are float32 at least.
            scores.append(layer(embeddings.to(layer.weight.dtype) if is_plain else embeddings))
        return scores


def _check_head(dims: Sequence[int], num_clusters: Sequence[int], activation_name: str) -> None:
    key = "config.MODEL.HEAD.PARAMS"
    problems = []
    if len(dims) < 2:
        must = "dims of swav_head must have at least two widths, from the features to the embedding"
        problems.append(Problem(key, str(list(dims)), must, "Write dims: [features, hidden, embedding]."))
    if num_clusters and min(num_clusters) < 1:
        must = "num_clusters of swav_head must be numbers of at least 1"
        problems.append(Problem(key, str(list(num_clusters)), must, "Write num_clusters: [3000]."))
    if activation_name not in _ACTIVATIONS:
        must = f"activation_name of swav_head must be one of {', '.join(_ACTIVATIONS)}"
        problems.append(Problem(key, repr(activation_name), must, "Choose one of them."))
    if problems:
        raise ConfigError(problems)


_KEY = "config.LOSS.swav_loss"


@runtime_checkable
class ClusteredOutput(Protocol):
    """The fields that the loss reads of a head's output. ``swav_head`` returns them; a custom head may."""

    @property
    def embeddings(self) -> Tensor:
        """(n, D), rows crop-major."""

    @property
    def scores(self) -> list[Tensor]:
        """Per layer of prototypes (n, K_i)."""

    @property
    def probe_scores(self) -> list[Tensor] | None:
        """Per layer (q, K_i), the rows of ``Method.probe`` scored without gradient; None without a probe."""


@LOSSES.register("swav_loss", config=SwAVLossConfig)
class SwAVLoss(Method):
    """SwAV: swapped prediction of Sinkhorn assignments across crops.

    The loss is the cross-entropy between the assignment of crop c and the softmax of the scores of crop v. It is
    averaged over each c of ``crops_for_assign``, every other v, samples and layers of prototypes. Scores are converted
    to float32 at least; float64 stays. The model's first head must return a ``ClusteredOutput``.

    Args: the fields of ``SwAVLossConfig``, with embedding_dim, num_crops and num_prototypes known.

    Raises:
        ConfigError: a value is missing or out of range.
    """

    def __init__(
        self,
        num_crops: int,
        num_prototypes: Sequence[int],
        embedding_dim: int,
        temperature: float = 0.1,
        epsilon: float = 0.05,
        shk_powerlaw: float = 0.0,
        num_iters: int = 3,
        crops_for_assign: Sequence[int] = (0, 1),
        use_double_precision: bool = False,
        normalize_last_layer: bool = True,
        temp_hard_assignment_iters: int = 0,
        queue: Mapping[str, int] | None = None,
    ):
        super().__init__()
        _check(num_crops, num_prototypes, crops_for_assign, temperature, epsilon)
        queue = queue or {}
        self.num_crops = num_crops
        self.num_prototypes = list(num_prototypes)
        self.temperature = temperature
        self.epsilon = epsilon
        self.powerlaw = shk_powerlaw
        self.num_iters = num_iters
        self.crops_for_assign = list(crops_for_assign)
        self.use_double_precision = use_double_precision
        self.normalize_last_layer = normalize_last_layer
        self.temp_hard_assignment_iters = temp_hard_assignment_iters
        self.queue_start_iter = queue.get("start_iter", 0)
        self.queue_start_epoch = queue.get("start_epoch", 0)
        length = queue.get("queue_length", 0)
        self.queue = EmbeddingQueue(len(self.crops_for_assign), length, embedding_dim) if length else None
        self.guessing_loss = trivial_loss(self.num_prototypes)
        self._step = 0
        self._epoch = 0
        self._last: tuple[Tensor, list[Tensor]] | None = None

    def forward(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Tensor:
        """Average over this rank's samples, layers of prototypes and pairs of crops. Collective (see ``sinkhorn``)."""
        output = self._output_of(outputs, batch)
        assigner = output if teacher_outputs is None else teacher_outputs[0]
        probe_scores: Sequence[Tensor | None] = assigner.probe_scores or [None] * len(output.scores)
        losses, assignments = [], []
        for scores, assigner_scores, queue_scores in zip(output.scores, assigner.scores, probe_scores, strict=True):
            by_crop = self._upcast(scores).unflatten(0, (self.num_crops, batch.num_local))
            assigned = self._assign(self._assigned(self._upcast(assigner_scores), batch), queue_scores)
            losses.append(self._swapped_prediction(by_crop, assigned))
            assignments.append(assigned.flatten(0, 1))
        # Assigned crops only: small ones have no assignments to count.
        self._last = (self._assigned(assigner.embeddings, batch).flatten(0, 1), assignments)
        return torch.stack(losses).mean()

    def probe(self) -> Tensor | None:
        """Return this rank's share of the queue (C * q, D), queue by queue; None before the queue starts."""
        # No rows at all would cost a copy of the scores that they are joined with.
        if self.queue is None or not self._is_queue_on() or self.queue.num_filled == 0:
            return None
        return self.queue.local_part().flatten(0, 1)

    def join(self, parts: Sequence[list[Any]], num_samples: Sequence[int]) -> list[Any]:
        """Join outputs; see ``Method``."""
        # The queue does not change within a step, so every micro-batch has the same scores of it: keep one copy.
        (first,) = parts[0]
        (joined,) = super().join([[part[0]._replace(probe_scores=None)] for part in parts], num_samples)
        return [joined._replace(probe_scores=first.probe_scores)]

    def observe(self, outputs: list[Any], batch: Batch, teacher_outputs: list[Any] | None = None) -> Any:
        """Return embeddings (C, B, D) of the assigned crops; None before the queue starts."""
        if self.queue is None or not self._is_queue_on():
            return None
        assigner = self._output_of(outputs, batch) if teacher_outputs is None else teacher_outputs[0]
        return self._assigned(assigner.embeddings.detach(), batch)

    def update_state(self, observed: Sequence[Any]) -> None:
        """Queue the embeddings. Collective."""
        if self.queue is not None:
            for embeddings in observed:
                if embeddings is not None:
                    self.queue.push(embeddings)

    def on_step(self, step: int, epoch: int) -> None:
        """Set step and epoch: hard assignments end, and the queue starts, at a configured step."""
        self._step, self._epoch = step, epoch

    def health_sums(self) -> Tensor:
        """Compute ``clustering_sums`` of the assigned crops of the last micro-batch."""
        return clustering_sums(*self._last) if self._last is not None else super().health_sums()

    def health(self, sums: Tensor) -> dict[str, float]:
        """Compute ``clustering_health`` of the assigned crops."""
        return clustering_health(sums, self._last[0].shape[1], self.num_prototypes) if self._last is not None else {}

    def collapse_rule(self, num_steps: int) -> ClusteringCollapse:
        """Return the rule that detects nearly equal assignments of all images."""
        advice = (
            f"a lower {_KEY}.epsilon, a lower learning rate, milder crops, or prototypes frozen for longer "
            "(config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP)"
        )
        return ClusteringCollapse(trivial_loss(self.num_prototypes), max(500, num_steps // 4), advice)

    def normalized_rows(self) -> list[str]:
        """Return the names of prototypes, whose rows are set to unit length if ``normalize_last_layer``."""
        if not self.normalize_last_layer:
            return []
        return [f"heads.0.prototypes{index}.weight" for index in range(len(self.num_prototypes))]

    def _assign(self, scores: Tensor, queue_scores: Tensor | None) -> Tensor:
        """Compute assignments (C, B, K) of scores (C, B, K), balanced together with the rows of the queue."""
        num_assigned, num_samples, num_prototypes = scores.shape
        if queue_scores is not None:
            past = queue_scores.to(scores.dtype).unflatten(0, (num_assigned, len(queue_scores) // num_assigned))
            scores = torch.cat((scores, past), dim=1)
        # The queue's rows balance the prototypes and are then dropped: only this batch is predicted.
        assigned = sinkhorn(scores, self.epsilon, self.num_iters, powerlaw=self.powerlaw)[:, :num_samples]
        if self._step < self.temp_hard_assignment_iters:
            assigned = F.one_hot(assigned.argmax(dim=2), num_prototypes).to(assigned.dtype)
        return assigned

    def _swapped_prediction(self, scores: Tensor, assigned: Tensor) -> Tensor:
        """Compute the cross-entropy of each assigned crop (C, B, K) against all crops (V, B, K) except itself."""
        log_probabilities = F.log_softmax(scores / self.temperature, dim=2)
        # Cross-entropy is linear in log-probabilities, so one sum over crops replaces the loop over pairs.
        others = log_probabilities.sum(dim=0, keepdim=True) - log_probabilities[self.crops_for_assign]
        # At least 1: a rank may have no samples.
        num_terms = len(self.crops_for_assign) * (self.num_crops - 1) * max(scores.shape[1], 1)
        return -(assigned * others).sum() / num_terms

    def _assigned(self, rows: Tensor, batch: Batch) -> Tensor:
        """Select the assigned crops (C, B, ...) of the assigner's rows, without gradient."""
        # Detached: assignments are targets. main_swav.py computes them under no_grad too.
        return rows.detach().unflatten(0, (self.num_crops, batch.num_local))[self.crops_for_assign]

    def _upcast(self, scores: Tensor) -> Tensor:
        least = torch.float64 if self.use_double_precision else torch.float32
        return scores.to(torch.promote_types(scores.dtype, least))

    def _is_queue_on(self) -> bool:
        return self._step >= self.queue_start_iter and self._epoch >= self.queue_start_epoch

    def _output_of(self, outputs: list[Any], batch: Batch) -> ClusteredOutput:
        """Return the first head's output, after checking its prototypes and crops against those of this loss."""
        output = outputs[0]
        if not isinstance(output, ClusteredOutput):
            fix = 'Write config.MODEL.HEAD.PARAMS: [["swav_head", {...}]].'
            got = type(output).__name__
            raise ConfigError([Problem("config.LOSS.name", got, "swav_loss needs swav_head as the first head", fix)])
        widths = [scores.shape[1] for scores in output.scores]
        if widths != self.num_prototypes:
            must = f"must be the head's num_clusters {widths}"
            raise ConfigError([Problem(f"{_KEY}.num_prototypes", str(self.num_prototypes), must, "Leave it out.")])
        if len(output.embeddings) != self.num_crops * batch.num_local:
            must = f"must be the crops per image that the transforms make, {sum(batch.num_crops)}"
            raise ConfigError([Problem(f"{_KEY}.num_crops", str(self.num_crops), must, "Leave it out.")])
        return output


def _check(
    num_crops: int, num_prototypes: Sequence[int], crops_for_assign: Sequence[int], temperature: float, epsilon: float
) -> None:
    problems = []
    if num_crops < 2:
        must = "must be at least 2: one crop predicts the assignment of another"
        problems.append(Problem(f"{_KEY}.num_crops", str(num_crops), must, "Add crops to ImgPilToMultiCrop."))
    if not crops_for_assign or not all(0 <= crop < num_crops for crop in crops_for_assign):
        must = f"must name crops from 0 to {num_crops - 1}"
        problems.append(Problem(f"{_KEY}.crops_for_assign", str(list(crops_for_assign)), must, "Write [0, 1]."))
    if not num_prototypes or min(num_prototypes) < 1:
        must = "must have at least one number, each at least 1"
        problems.append(Problem(f"{_KEY}.num_prototypes", str(list(num_prototypes)), must, "Write [3000]."))
    for key, value in (("temperature", temperature), ("epsilon", epsilon)):
        if value <= 0:
            problems.append(Problem(f"{_KEY}.{key}", str(value), "must be positive", "Write 0.1 or 0.05."))
    if problems:
        raise ConfigError(problems)


@LOSSES.register("swav_momentum_loss", config=SwAVMomentumLossConfig)
class SwAVMomentumLoss(SwAVLoss):
    """SwAV with assignments from a teacher, which sees the assigned crops and whose embeddings are queued.

    Args: the fields of ``SwAVMomentumLossConfig``, with embedding_dim, num_crops and num_prototypes known.
    """

    has_teacher = True

    def __init__(self, momentum: float = 0.99, **keys: Any):
        super().__init__(**keys)
        self.constant_momentum = momentum
        # images_of returns crops in ascending order; the indices into the student's crops must be in the same order.
        self.crops_for_assign.sort()

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the student on all crops."""
        outputs: list[Any] = model(batch.images)
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Run the teacher on the assigned crops; its head also scores the rows of the queue."""
        outputs: list[Any] = model(images_of(batch, self.crops_for_assign), self.probe())
        return outputs

    def momentum(self, step: int) -> float:
        """Return the teacher's momentum; see ``Method``."""
        return self.constant_momentum

    def _assigned(self, rows: Tensor, batch: Batch) -> Tensor:
        """Select all rows: the teacher sees only the assigned crops. See ``SwAVLoss``."""
        return rows.detach().unflatten(0, (len(self.crops_for_assign), batch.num_local))
