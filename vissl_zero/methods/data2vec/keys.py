"""data2vec's keys, head and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys, one_head, one_size, patch_trunk, share
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig


@dataclass
class LatentHeadConfig:
    """``latent_head``: one linear layer from a masked patch's token to the teacher's embedding of it."""

    dims: list[int] = MISSING
    """Two widths, both those of the trunk's features."""


@dataclass
class Data2VecLossConfig:
    """``data2vec_loss``: regression of the mean of a teacher's last blocks, https://arxiv.org/abs/2202.03555."""

    momentum: float = 0.9998
    """Weight of the teacher's past, constant."""
    mask_ratio: float = number(0.6, above=0, below=1)
    """Share of the patches that the student does not see, in blocks as BEiT's."""
    average_top_k_layers: int = number(6, least=1, most=1000)
    """The teacher's last blocks whose outputs are averaged."""
    beta: float = number(2.0, above=0, most=1000)
    """Differences below it are squared."""


@METHODS.register("data2vec")
class Data2VecSpec(MethodSpec):
    """data2vec: a teacher's embeddings of masked patches, averaged over its last blocks."""

    losses = {"data2vec_loss": Data2VecLossConfig}
    heads = {"latent_head": LatentHeadConfig}
    title = "data2vec"
    paper = "https://arxiv.org/abs/2202.03555"
    views = "crops of one size, masked; the teacher sees them whole"
    teacher = "momentum, constant"
    recipe = "digits/data2vec"

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """A vision transformer with a mask token and enough blocks, a head of latents, one size of crops."""
        keys, path = loss_keys(cfg), f"LOSS.{cfg.LOSS['name']}"
        found = [*one_head(cfg, "latent_head"), *patch_trunk(cfg, mask_token=True), *one_size(cfg)]
        found += share(f"{path}.momentum", keys.momentum)
        depth = cfg.MODEL.TRUNK.VISION_TRANSFORMERS.NUM_LAYERS
        if cfg.MODEL.TRUNK.NAME == "vision_transformer" and keys.average_top_k_layers > depth:
            key, got = f"config.{path}.average_top_k_layers", str(keys.average_top_k_layers)
            found.append(Problem(key, got, f"must be at most the trunk's {depth} blocks", f"Write {depth} or less."))
        return found
