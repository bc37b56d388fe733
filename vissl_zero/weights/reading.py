"""Weights by any name, with the network that they are of."""

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
from vissl_zero.registry import WEIGHTS_READERS
from vissl_zero.resolve.components import trunk_of, trunk_options
from vissl_zero.weights.recognition import Recognized, recognize


@dataclass(frozen=True)
class Found:
    """Weights and their network."""

    weights: Foreign
    network: Recognized


def find(name: str, key: str = "") -> Found:
    """Read the names and shapes of weights, and find their network.

    Args:
        name: a file, a folder of transformers or timm, or a library's name (``docs/weights.md``).
        key: where a torch file holds the state dict; empty: detected.
    Raises:
        CheckpointError: not on this machine, unreadable, or of a network that is not known.
    """
    located = locate(name)
    if not located.path.exists():
        raise CheckpointError(f"There is no {located.path}. Give a file of weights, a folder or a run folder.")
    foreign = read_foreign(located.path, "" if key in FOUND_BY_ITSELF else key)
    return Found(foreign, recognize(foreign, located.model, located.preprocessing))


@WEIGHTS_READERS.register("network")
def network_of(name: str, key: str = "") -> dict[str, Any]:
    """Find the network of weights and describe it as the configuration of a run. Args and Raises: as for ``find``."""
    return as_run(find(name, key).network)


@WEIGHTS_READERS.register("teacher")
def teacher_of(name: str, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe the network of weights as ``network_of``, and count its features (``feature_dim``).

    Args:
        name: see ``find``.
        saved: the configuration of the run that the weights are of; None: they are recognized.
    Raises:
        CheckpointError, ConfigError: as ``find``, or the trunk cannot be built.
    """
    run = dict(saved or network_of(name))
    trunk = trunk_of(Trunk(), run["MODEL"]["TRUNK"])
    if trunk.NAME not in TRUNK_BLOCKS:
        trunk = replace(trunk, PARAMS=trunk_options(trunk))
    with torch.device("meta"):
        return {**run, "feature_dim": int(build_trunk(trunk).feature_dim)}  # type: ignore[arg-type]


def as_run(network: Recognized) -> dict[str, Any]:
    """Describe a network as the configuration of a run would: ``MODEL.TRUNK``, and transforms of evaluation."""
    normalize = {"name": "Normalize", "mean": list(network.mean), "std": list(network.std)}
    train = [{"name": "RandomResizedCrop", "size": network.size}, {"name": "RandomHorizontalFlip"}]
    test = [{"name": "Resize", "size": network.size}, {"name": "CenterCrop", "size": network.size}]
    return {
        "MODEL": {"TRUNK": dict(network.trunk)},
        "DATA": {
            "TRAIN": {"TRANSFORMS": [*train, {"name": "ToTensor"}, normalize]},
            "TEST": {"TRANSFORMS": [*test, {"name": "ToTensor"}, normalize]},
        },
        "recognized": network.text,
        "others": list(network.others),
    }
