"""Keys of the built-in losses, written as ``LOSS: {name: <loss>, <loss>: {key: value}}``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SwAVQueueConfig:
    """``LOSS.swav_loss.queue``: embeddings of past images that join the assignment."""

    queue_length: int = 0
    """Source images in the one queue of all ranks; 0: no queue; else at least the global micro-batch."""
    start_iter: int = 0
    """Optimizer steps before the queue is used."""
    start_epoch: int = 0
    """Epochs before the queue is used (with ``start_iter``: whichever is later)."""


@dataclass
class SwAVLossConfig:
    """``swav_loss``: swapped prediction of cluster assignments, https://arxiv.org/abs/2006.09882."""

    embedding_dim: int | None = None
    """Width of the embeddings; null: from the head, which also wins over a different number."""
    temperature: float = 0.1
    """Divides the scores before the softmax."""
    use_double_precision: bool = False
    """Compute assignments and loss in float64."""
    normalize_last_layer: bool = True
    """Divide prototypes by their L2 norm after every step."""
    num_iters: int = 3
    """Rounds of Sinkhorn's algorithm."""
    epsilon: float = 0.05
    """Entropy regularisation of the assignment; larger is softer."""
    num_crops: int | None = None
    """Crops per image; null: from the transforms, which also win over a different number."""
    crops_for_assign: list[int] = field(default_factory=lambda: [0, 1])
    """Crops whose assignments are predicted by the others."""
    num_prototypes: list[int] | None = None
    """Prototypes per layer; null: from the head, which also wins over a different list."""
    temp_hard_assignment_iters: int = 0
    """Optimizer steps from the start in which assignments are rounded to one prototype."""
    queue: SwAVQueueConfig = field(default_factory=SwAVQueueConfig)
    """Past embeddings in the assignment."""


@dataclass
class CrossEntropyConfig:
    """``CrossEntropyLoss`` and ``cross_entropy_multiple_output_single_target``."""

    weight: list[float] | None = None
    """Weight of each class; null: all equal."""
    ignore_index: int = -1
    """Label of images that do not count."""
    normalize_output: bool = False
    """Divide the logits by their L2 norm first."""
    temperature: float = 1.0
    """Divides the logits before the softmax."""
