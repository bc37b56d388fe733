"""Contrastive losses whose positives are other images, NNCLR and SupCon: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import at_least, number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, head_width, loss_keys, one_head, two_views
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class NNCLRLossConfig:
    """``nnclr_loss``: the nearest neighbor in a queue is the positive, https://arxiv.org/abs/2104.14548."""

    embedding_dim: int | None = None
    """Width of the embeddings; null: from the head, which also wins over a different number."""
    # The paper's queue.
    queue_size: int = 98304
    """Projections in the one queue of all ranks; at least a micro-batch over all ranks."""
    temperature: float = number(0.1, above=0, most=1000)
    """Divides the cosine similarities."""


@METHODS.register("nnclr")
class NNCLRSpec(MethodSpec):
    """NNCLR: the nearest neighbor of a view in a queue is the other view's positive."""

    losses = {"nnclr_loss": NNCLRLossConfig}
    shape_keys = ("embedding_dim", "queue_size")
    title = "NNCLR"
    paper = "https://arxiv.org/abs/2104.14548"
    views = "2 crops"
    couples = "negatives: all images of the batch; positives: a queue of all ranks' projections"
    recipe = "digits/nnclr"

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer embedding_dim from the head."""
        return {"embedding_dim": (head_width(cfg), "head")}

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, a projector and a predictor, and a queue at least as long as a micro-batch."""
        path, batch = f"LOSS.{cfg.LOSS['name']}", decided.micro_batch
        fix = f"Write config.{path}.queue_size={batch} or more, or lower config.DATA.TRAIN.BATCHSIZE_PER_REPLICA."
        length = at_least(f"{path}.queue_size", loss_keys(cfg).queue_size, batch, fix)
        return [*one_head(cfg, "siamese_head"), *two_views(cfg), *length]


@dataclass
class SupConLossConfig:
    """``supcon_loss``: all images of the class are positives, https://arxiv.org/abs/2004.11362."""

    temperature: float = number(0.1, above=0, most=1000)
    """Divides the cosine similarities."""


@METHODS.register("supcon")
class SupConSpec(MethodSpec):
    """SupCon: all views of all images of a class are positives of each other."""

    losses = {"supcon_loss": SupConLossConfig}
    title = "SupCon"
    paper = "https://arxiv.org/abs/2004.11362"
    views = "2 crops, with labels"
    couples = "positives and negatives: all images of the batch"
    recipe = "digits/supcon"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check for two views, one projection head, and a class for each image."""
        problems = [*one_head(cfg, "mlp"), *two_views(cfg)]
        if cfg.DATA.TRAIN.LABEL_TYPE != "standard":
            fix = "Write config.DATA.TRAIN.LABEL_TYPE=standard."
            must = "must be standard for supcon_loss"
            problems.append(Problem("config.DATA.TRAIN.LABEL_TYPE", cfg.DATA.TRAIN.LABEL_TYPE, must, fix))
        return problems
