"""The index of timm's and torchvision's models by names and shapes of their tensors.

``library_models.json`` holds a fingerprint for every model of the two libraries. To write it anew, after an update of
either::

    python -m vissl_zero.weights.library_index
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

_INDEX_FILE = Path(__file__).with_name("library_models.json")
# Classifiers, which depend on the number of classes; and tensors that depend on the image size, or are constant.
_CLASSIFIER = re.compile(
    r"(?:head|head_dist|fc|classifier|last_linear|head\.fc|head\.l|heads\.head|classifier\.(?:\d|fc)|head\.fc\.fc2)"
    r"\.(?:weight|bias)"
)
_OF_THE_SIZE = re.compile(
    r"(?:.*\.)?(?:num_batches_tracked|pos_embed|mask_token|relative_position_index|relative_coords_table|attn_mask"
    r"|encoder\.pos_embedding|rope\..*|rope_embed\..*)"
)


def _fingerprint(shapes: Mapping[str, Iterable[int]]) -> str:
    """Hash the names and shapes of a network, without its classifier and tensors that depend on the image size."""
    lines = [
        f"{name} {'x'.join(map(str, shape))}"
        for name, shape in sorted(shapes.items())
        if not _CLASSIFIER.fullmatch(name) and not _OF_THE_SIZE.fullmatch(name)
    ]
    # 48 bits: that two of a few thousand networks share them has a probability below 1e-7.
    return sha256("\n".join(lines).encode()).hexdigest()[:12]


@cache
def _index() -> dict[str, list[str]]:
    names: dict[str, list[str]] = json.loads(_INDEX_FILE.read_text(encoding="utf-8"))
    return names


def models_of(shapes: Mapping[str, Iterable[int]]) -> list[str]:
    """Find the models (``timm/<name>``, ``torchvision/<name>``) with these tensors; the shortest name first."""
    return _index().get(_fingerprint(shapes), [])


def _networks() -> Iterator[tuple[str, Mapping[str, Iterable[int]]]]:
    """Yield each network of timm and torchvision: its name, and the shapes of its tensors."""
    import timm
    import torch
    import torchvision

    for name in timm.list_models():
        with torch.device("meta"):
            try:
                net = timm.create_model(name, num_classes=0)
            except (RuntimeError, NotImplementedError, ValueError) as error:  # computes with its weights
                print(f"left out timm/{name}: {type(error).__name__}: {error}")
                continue
        yield f"timm/{name}", {key: tensor.shape for key, tensor in net.state_dict().items()}
    for name in torchvision.models.list_models(module=torchvision.models):
        # RegNet's widths are computed with tensors.
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            net = torchvision.models.get_model(name, weights=None, **options)
        yield f"torchvision/{name}", {key: tensor.shape for key, tensor in net.state_dict().items()}


def write_index() -> None:
    """Build every model without memory for its weights, and write their fingerprints. Takes minutes."""
    index: dict[str, list[str]] = {}
    for name, shapes in _networks():
        index.setdefault(_fingerprint(shapes), []).append(name)
    rows = [
        f"{json.dumps(key)}: {json.dumps(sorted(names, key=lambda n: (len(n), n)))}" for key, names in index.items()
    ]
    _INDEX_FILE.write_text("{\n" + ",\n".join(sorted(rows)) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write_index()
