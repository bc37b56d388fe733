"""SwAV, and SwAV with a teacher: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, crops_of, heads_of, loss_keys, one_head, share, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class SwAVHeadConfig:
    """``swav_head``: projection MLP, then one linear layer of prototypes per entry of ``num_clusters``."""

    dims: list[int] = MISSING
    """Widths of the projection MLP, from the trunk's features to the embedding."""
    num_clusters: list[int] = MISSING
    """Number of prototypes of each prototype layer."""
    use_bn: bool = False
    """Batch norm between the layers of the MLP."""
    use_bias: bool = True
    """Bias in the layers of the MLP (prototypes have none)."""
    skip_last_bn: bool = True
    """No batch norm or activation after the last layer of the MLP."""
    normalize_feats: bool = True
    """Divide embeddings by their L2 norm before they are scored."""
    activation_name: str = "ReLU"
    """Activation between the layers: ``ReLU``, ``GELU``, or ``SiLU``."""
    return_embeddings: bool = True
    """Give embeddings beside the scores. false is for losses of scores alone (dino_loss, dino_distillation_loss);
    those that need embeddings refuse it."""
    use_weight_norm_prototypes: bool = False
    """Prototypes are directions times learned lengths, 1 at the start: torch's weight_norm (DINO)."""
    normalize_last_layer: bool = False
    """The lengths stay 1; for use_weight_norm_prototypes."""


@dataclass
class SwAVQueueConfig:
    """``LOSS.swav_loss.queue``: embeddings of past images that join the assignment."""

    queue_length: int = number(0, least=0)
    """Source images in the one queue of all ranks; 0: no queue; else at least the global micro-batch."""
    start_iter: int = number(0, least=0)
    """Optimizer steps before the queue is used."""
    start_epoch: int = number(0, least=0)
    """Epochs before the queue is used (with ``start_iter``: whichever is later)."""


@dataclass
class SwAVLossConfig:
    """``swav_loss``: swapped prediction of cluster assignments, https://arxiv.org/abs/2006.09882."""

    embedding_dim: int | None = None
    """Width of the embeddings; null: from the head, which also wins over a different number."""
    temperature: float = number(0.1, least=1e-4)
    """Divides the scores before the softmax."""
    use_double_precision: bool = False
    """Compute assignments and loss in float64."""
    normalize_last_layer: bool = True
    """Divide prototypes by their L2 norm after every step."""
    # Three rounds suffice for small epsilons, and more cost communication (section 3.1 of the paper).
    num_iters: int = number(3, least=1, most=10000)
    """Rounds of Sinkhorn's algorithm."""
    epsilon: float = number(0.05, least=1e-4)
    """Entropy regularization of the assignment; larger is softer."""
    shk_powerlaw: float = number(0.0, least=0, most=100)
    """Prototype i has a share of the images proportional to i to the power of minus this; 0: all have equal shares."""
    num_crops: int | None = None
    """Crops per image; null: from the transforms, which also win over a different number."""
    crops_for_assign: list[int] = field(default_factory=lambda: [0, 1])
    """Crops whose assignments are predicted by the others."""
    num_prototypes: list[int] | None = None
    """Prototypes per layer; null: from the head, which also wins over a different list."""
    temp_hard_assignment_iters: int = number(0, least=0)
    """Optimizer steps from the start in which assignments are rounded to one prototype."""
    queue: SwAVQueueConfig = field(default_factory=SwAVQueueConfig)
    """Past embeddings in the assignment."""


def _needs_embeddings(cfg: RunConfig) -> list[Problem]:
    """Check that a ``swav_head`` returns embeddings, which the loss needs."""
    must = f"must be true for {cfg.LOSS['name']}, which needs embeddings"
    return [
        Problem(f"config.MODEL.HEAD.PARAMS[{index}][1].return_embeddings", "False", must, "Leave it out.")
        for index, (_, options) in enumerate(heads_of(cfg))
        if not options.get("return_embeddings", True)
    ]


@METHODS.register("swav")
class SwAVSpec(MethodSpec):
    """SwAV: swapped prediction of Sinkhorn assignments across crops."""

    losses = {"swav_loss": SwAVLossConfig}
    heads = {"swav_head": SwAVHeadConfig}
    shape_keys = ("num_prototypes", "embedding_dim", "queue.queue_length", "crops_for_assign")
    title = "SwAV"
    paper = "https://arxiv.org/abs/2006.09882"
    views = "2 or more crops of any sizes"
    couples = "Sinkhorn over the batch and the queue"
    recipe = "digits/swav"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer num_crops from the transforms, num_prototypes and embedding_dim from the head."""
        head = next((options for name, options in heads_of(cfg) if name == "swav_head"), {})
        dims, crops = head.get("dims") or [], crops_of(cfg)
        return {
            "num_crops": (None if crops is None else sum(crops), "transforms"),
            "num_prototypes": (head.get("num_clusters"), "head"),
            "embedding_dim": (dims[-1] if dims else None, "head"),
        }

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for one head of prototypes, two or more crops, a long enough queue, and numbers in range."""
        keys: SwAVLossConfig = loss_keys(cfg)
        path = f"LOSS.{cfg.LOSS['name']}"
        return [
            *one_head(cfg, "swav_head"),
            *_needs_embeddings(cfg),
            *_lengths(cfg, keys, path),
            *self._crops(cfg, keys, path),
            *_prototypes(keys, path),
            *_queue(keys, path, decided.micro_batch),
        ]

    def _crops(self, cfg: RunConfig, keys: SwAVLossConfig, path: str) -> list[Problem]:
        count = self.inferred(cfg)["num_crops"][0] or keys.num_crops
        if not count or count < 2:
            return two_views(cfg, exactly=False)
        wrong = [crop for crop in keys.crops_for_assign if not 0 <= crop < count]
        if keys.crops_for_assign and not wrong:
            return []
        must = f"must list crops from 0 to {count - 1}"
        got = str(keys.crops_for_assign)
        return [Problem(f"config.{path}.crops_for_assign", got, must, "Write [0, 1], the two large crops.")]


def _prototypes(keys: SwAVLossConfig, path: str) -> list[Problem]:
    if keys.num_prototypes is None or (keys.num_prototypes and min(keys.num_prototypes) >= 1):
        return []
    must = "must have at least 1 prototype in each layer"
    fix = "Leave it out: it is taken from the head's num_clusters."
    return [Problem(f"config.{path}.num_prototypes", str(keys.num_prototypes), must, fix)]


def _lengths(cfg: RunConfig, keys: SwAVLossConfig, path: str) -> list[Problem]:
    """Check that prototypes that the loss normalizes have no weight norm."""
    # The loss normalizes the rows of ``weight``, which a head with weight norm computes from two parameters.
    has_lengths = any(options.get("use_weight_norm_prototypes") for _, options in heads_of(cfg))
    if not (has_lengths and keys.normalize_last_layer):
        return []
    must = "must be false for a head with use_weight_norm_prototypes, which has a normalize_last_layer of its own"
    return [Problem(f"config.{path}.normalize_last_layer", "True", must, "Write false.")]


def _queue(keys: SwAVLossConfig, path: str, batch: int) -> list[Problem]:
    length = keys.queue.queue_length
    if length == 0 or length >= batch:
        return []
    must = f"must be 0 (no queue) or at least the batch over all processes, {batch} images"
    fix = f"Write config.{path}.queue.queue_length={batch}, or lower config.DATA.TRAIN.BATCHSIZE_PER_REPLICA."
    return [Problem(f"config.{path}.queue.queue_length", str(length), must, fix)]


@dataclass
class SwAVMomentumLossConfig(SwAVLossConfig):
    """``swav_momentum_loss``: SwAV whose assignments, and queue, come from a momentum copy of the model."""

    momentum: float = 0.99
    """Weight of the teacher's past."""


@METHODS.register("swav_momentum")
class SwAVMomentumSpec(SwAVSpec):
    """SwAV with assignments from a teacher."""

    losses = {"swav_momentum_loss": SwAVMomentumLossConfig}
    heads = {}
    title = "SwAV with momentum"
    teacher = "momentum, constant"
    teacher_follows = True
    recipe = "digits/swav_momentum"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check the recipe by SwAV's rules, and that the momentum is between 0 and 1."""
        return [*super().problems(cfg, decided), *share(f"LOSS.{cfg.LOSS['name']}.momentum", loss_keys(cfg).momentum)]
