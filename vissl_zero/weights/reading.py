"""Weights by any name, together with their network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vissl_zero.checkpoint.first_weights import FOUND_BY_ITSELF
from vissl_zero.checkpoint.foreign_layouts import Foreign, read_foreign
from vissl_zero.checkpoint.named_weights import locate
from vissl_zero.config.blocks.model_and_loss import Trunk
from vissl_zero.config.components.trunks import TRUNK_BLOCKS
from vissl_zero.errors import CheckpointError
from vissl_zero.models.model import build_trunk
from vissl_zero.models.weight_names import to_our_names
from vissl_zero.registry import WEIGHTS_READERS
from vissl_zero.resolve.channels import RGB
from vissl_zero.resolve.components import trunk_of, trunk_options
from vissl_zero.weights.recognition import Recognized, recognize


@dataclass(frozen=True)
class RecognizedWeights:
    """Weights and the network recognized in them."""

    weights: Foreign
    network: Recognized


def find(name: str, key: str = "", trunk: str = "") -> RecognizedWeights:
    """Read the names and shapes of weights, and find their network.

    Args:
        name: a file, a folder of transformers or timm, or a library's name (``docs/weights.md``).
        key: key of the state dict in a torch file; empty: it is detected.
        trunk: see ``recognize``.
    Raises:
        CheckpointError: the weights are not on this machine, cannot be read, or belong to an unknown network.
    """
    located = locate(name)
    if not located.path.exists():
        raise CheckpointError(f"There is no {located.path}. Give a file of weights, a folder or a run folder.")
    foreign = read_foreign(located.path, "" if key in FOUND_BY_ITSELF else key)
    return RecognizedWeights(foreign, recognize(foreign, located.model, located.preprocessing, trunk))


@WEIGHTS_READERS.register("network")
def network_of(name: str, key: str = "", trunk: str = "") -> dict[str, Any]:
    """Return the network of weights as the configuration of a run. Args and Raises: see ``find``."""
    return as_run(find(name, key, trunk).network)


@WEIGHTS_READERS.register("teacher")
def teacher_of(name: str, saved: Mapping[str, Any] | None, wants_scores: bool = False) -> dict[str, Any]:
    """Return the network of weights as ``network_of`` does, with the number of its features (``feature_dim``).

    Args:
        name: see ``find``.
        saved: configuration of the run that wrote the weights; None: the network is recognized.
        wants_scores: whether to add the head of prototypes (``score_head``, as HEAD.PARAMS; None without a head).
    Raises:
        CheckpointError, ConfigError: see ``find``; or the trunk cannot be built.
    """
    head = None
    if saved is not None:
        run, head = dict(saved), _saved_score_head(saved["MODEL"]) if wants_scores else None
    else:
        weights = find(name)
        run, head = as_run(weights.network), _score_head_of(weights.weights) if wants_scores else None
    trunk = trunk_of(Trunk(), run["MODEL"]["TRUNK"])
    if trunk.NAME not in TRUNK_BLOCKS:
        trunk = replace(trunk, PARAMS=trunk_options(trunk))
    with torch.device("meta"):
        feature_dim = int(build_trunk(trunk).feature_dim)  # type: ignore[arg-type]
    return {**run, "feature_dim": feature_dim, "score_head": head}


def _saved_score_head(model: Mapping[str, Any]) -> list[Any] | None:
    """Return HEAD.PARAMS of a run's head of prototypes for whole images; None without such a head."""
    heads: list[Any] = model["HEAD"]["PARAMS"]
    name, keys = heads[0] if heads else ("", {})
    if name in ("swav_head", "dino_head") and len(keys["num_clusters"]) == 1:
        return [[name, dict(keys)]]
    if name == "ibot_dino_head":  # a dino_head with further prototypes, for patches
        # The other keys are of the patches' prototypes.
        sizes = ("in_dim", "normalize_last_layer", "num_layers", "hidden_dim", "bottleneck_dim")
        return [["dino_head", {**{key: keys[key] for key in sizes}, "num_clusters": [keys["out_dim"]]}]]
    return None


def _score_head_of(weights: Foreign) -> list[Any] | None:
    """Return HEAD.PARAMS of the head that DINO and DINOv2 train with, by the shapes of its tensors; None if absent."""
    shapes = {entry.key: entry.shape for entry in weights.entries}
    names = {ours: shapes[theirs] for ours, theirs in to_our_names(shapes).names.items() if ours.startswith("heads.0.")}
    prototypes, first = names.get("heads.0.prototypes0.weight_v"), names.get("heads.0.mlp.0.weight")
    if prototypes is None or first is None:
        return None
    # Matrices are linear layers; norms and biases are vectors.
    num_layers = sum(name.startswith("heads.0.mlp.") and len(shape) == 2 for name, shape in names.items())
    sizes = {"in_dim": first[1], "hidden_dim": first[0], "bottleneck_dim": prototypes[1], "num_layers": num_layers}
    return [["dino_head", {**sizes, "num_clusters": [prototypes[0]], "use_bn": "heads.0.mlp.1.running_mean" in names}]]


def as_run(network: Recognized) -> dict[str, Any]:
    """Return a network as the configuration of a run: ``MODEL.TRUNK``, and transforms of evaluation."""
    normalize = {"name": "Normalize", "mean": list(network.mean), "std": list(network.std)}
    train = [{"name": "RandomResizedCrop", "size": network.size}, {"name": "RandomHorizontalFlip"}]
    test = [{"name": "Resize", "size": network.size}, {"name": "CenterCrop", "size": network.size}]
    channels = {} if len(network.mean) == RGB else {"IN_CHANNELS": len(network.mean)}
    return {
        "MODEL": {"TRUNK": dict(network.trunk), **channels},
        "DATA": {
            **channels,
            "TRAIN": {"TRANSFORMS": [*train, {"name": "ToTensor"}, normalize]},
            "TEST": {"TRANSFORMS": [*test, {"name": "ToTensor"}, normalize]},
        },
        "recognized": network.text,
        "others": list(network.others),
    }
