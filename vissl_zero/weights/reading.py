"""Weights by any name, with the network that they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vissl_zero.checkpoint.first_weights import FOUND_BY_ITSELF
from vissl_zero.checkpoint.foreign_layouts import Foreign, read_foreign
from vissl_zero.checkpoint.named_weights import locate
from vissl_zero.errors import CheckpointError
from vissl_zero.registry import WEIGHTS_READERS
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
