"""Pictures of a trunk's features: nearest neighbors, and the features and attention of an image's patches.

Sources: figure 1 of DINOv2 (https://arxiv.org/abs/2304.07193: the first three principal components of patch features as
red, green and blue) and figure 1 of DINO (https://arxiv.org/abs/2104.14294: attention of the class token).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vissl_zero.data.source import Source
from vissl_zero.data.split_pipeline import build_eval_pipeline
from vissl_zero.engine.hook import Run
from vissl_zero.errors import DataError
from vissl_zero.evaluation.features import Features, evaluated, nearest

if TYPE_CHECKING:
    from vissl_zero.models.trunks.vision_transformer import TransformerTrunk


@dataclass(frozen=True)
class Neighbors:
    """A few images and their nearest neighbors; equal on every rank.

    Attributes:
        query_source, index_source: sources of the images (``source.image(id)``).
        query_ids: Q indices in ``query_source``.
        neighbor_ids: Q lists of K indices in ``index_source``, nearest first.
        matches: Q lists of K values, whether a neighbor has the query's label; None without labels.
    """

    query_source: Source
    index_source: Source
    query_ids: list[int]
    neighbor_ids: list[list[int]]
    matches: list[list[bool]] | None


def find_neighbors(
    query_source: Source,
    index_source: Source,
    queries: Features,
    index: Features,
    is_cosine: bool,
    excluded: Tensor | None,
) -> Neighbors:
    """Find neighbors of a few images, evenly spaced in the source, and so over its class folders. Not collective.

    Args:
        query_source, index_source: sources of the images.
        queries, index: features of these sources' images.
        is_cosine: whether to compare by cosine similarity; else by dot product.
        excluded: row of the index that each query must not find, which is the query itself; None: no row.
    """
    ids = middles(len(query_source), _NUM_QUERIES)
    places = torch.tensor(ids, device=queries.rows.device)
    chosen, without = queries.at(places), None if excluded is None else excluded[places]
    _, neighbors = nearest(chosen.rows, index.rows, _NUM_NEIGHBORS, is_cosine, without)
    matches = None
    if chosen.labels is not None and index.labels is not None:
        matches = (index.labels[neighbors] == chosen.labels[:, None]).tolist()
    return Neighbors(query_source, index_source, ids, neighbors.tolist(), matches)


def middles(length: int, number: int) -> list[int]:
    """Return the middle indices of ``number`` equal parts of ``length``; all indices if there are fewer."""
    number = min(number, length)
    return [(2 * part + 1) * length // (2 * number) for part in range(number)]


_NUM_QUERIES, _NUM_NEIGHBORS = 6, 5
_CUT = 0.02  # share of patches at either end of a component's range that are clipped


@dataclass(frozen=True)
class PatchPictures:
    """Pictures of one image, one pixel per patch, (h, w, 3) uint8.

    Attributes:
        image_id: index of the image in the source.
        components: first three principal components, over the patches of all images.
        attention: attention of the class token to each patch in the last block, mean over heads, from black to white;
            None without a class token.
    """

    image_id: int
    components: np.ndarray
    attention: np.ndarray | None


def patch_pictures(run: Run, source: Source, image_ids: Sequence[int]) -> list[PatchPictures]:
    """Draw patches of images, by the model that ``EVALUATED_MODEL`` names. Collective.

    Returns an empty list if the trunk is no vision transformer, or the images cannot be read.

    Cost: one forward pass over the images on every rank.
    """
    # Equal on every rank: all have the same model and read the same images, so all call the model or none.
    if _transformer(run.sharded.model) is None or not (images := _images(run, source, image_ids)):
        return []
    caught: dict[str, Tensor] = {}
    batch = torch.stack(images).to(run.device, getattr(torch, run.plan.sharding.precision.master))
    with evaluated(run) as model:
        trunk = _transformer(model)
        assert trunk is not None, "student and teacher have the same trunk"
        attention = [module for name, module in trunk.named_modules() if name.endswith("attn")][-1]
        handles = [
            trunk.norm.register_forward_hook(partial(_keep_tokens, caught)),
            attention.qkv.register_forward_hook(partial(_keep_attention, caught, attention)),
        ]
        try:
            model([batch], features_only=True)
        finally:
            for handle in handles:
                handle.remove()
    grid = [side // patch for side, patch in zip(batch.shape[2:], trunk.patch_size, strict=True)]
    components = principal_components(caught["tokens"][:, trunk.num_prefix_tokens :]).unflatten(1, grid)
    maps = caught["attention"][:, trunk.num_prefix_tokens :].unflatten(1, grid) if trunk.num_prefix_tokens else None
    return [
        PatchPictures(image_id, _bytes(components[at]), None if maps is None else _bytes(_gray(maps[at])))
        for at, image_id in enumerate(image_ids)
    ]


def principal_components(tokens: Tensor) -> Tensor:
    """Project patches (n, P, D) on their first three principal components (n, P, 3), each scaled to 0..1.

    The largest weight determines a component's sign, so that a repeated run draws the same picture.
    """
    rows = tokens.double().flatten(0, 1)
    rows = rows - rows.mean(dim=0)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    axes = vectors.flip(1)[:, :3]
    axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    values = rows @ axes
    # Single patches far out would leave all others in one color.
    low, high = values.quantile(_CUT, dim=0), values.quantile(1 - _CUT, dim=0)
    stretched = ((values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)).clamp(0, 1)
    return stretched.unflatten(0, tokens.shape[:2])


def _images(run: Run, source: Source, image_ids: Sequence[int]) -> list[Tensor]:
    pipeline = build_eval_pipeline(run.plan.config.DATA)
    try:
        images = [pipeline(source.image(image_id))[0] for image_id in image_ids]
    except (DataError, OSError):  # a report must not fail a run that has ended well
        return []
    return images if len({image.shape for image in images}) == 1 else []


def _transformer(model: nn.Module) -> TransformerTrunk | None:
    # If this module is not loaded, no model has its trunks. Its import takes half a second with timm.
    loaded = sys.modules.get("vissl_zero.models.trunks.vision_transformer")
    if loaded is None:
        return None
    return next((module for module in model.modules() if isinstance(module, loaded.TransformerTrunk)), None)


def _keep_tokens(caught: dict[str, Tensor], _module: nn.Module, _inputs: Any, output: Any) -> None:
    caught["tokens"] = output[-1].detach()


def _keep_attention(
    caught: dict[str, Tensor], attention: Any, _module: nn.Module, _inputs: Any, output: Tensor
) -> None:
    """Compute the class token's attention from queries, keys and values: fused kernels do not return it."""
    queries, keys, _ = output.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    scores = (queries[:, :, :1] * attention.scale) @ keys.transpose(-2, -1)
    caught["attention"] = scores.softmax(dim=-1)[:, :, 0].mean(dim=1).detach()


def _gray(values: Tensor) -> Tensor:
    return (values / values.amax().clamp(min=torch.finfo(values.dtype).tiny))[..., None].expand(-1, -1, 3)


def _bytes(picture: Tensor) -> np.ndarray:
    pixels: np.ndarray = (picture.double() * 255).round().to(torch.uint8).cpu().numpy()
    return pixels
