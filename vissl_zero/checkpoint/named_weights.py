"""Locate named weights on this machine: ``timm:``, ``hf:``, ``torchvision:``, ``torchhub:``, or a path.

Nothing is downloaded here: ranks should not use the network, and the same command must train the same model later. If
weights are not in the library's cache, the error has the command that downloads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vissl_zero.config.weights_name import scheme_of
from vissl_zero.errors import CheckpointError, did_you_mean

_HF_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_META = "https://dl.fbaipublicfiles.com"
# torch.hub's name -> URL of the file of facebookresearch/dinov2 or facebookresearch/dino.
_HUB_FILES = {
    f"dinov2_vit{size}14{registers}": f"{_META}/dinov2/dinov2_vit{size}14/dinov2_vit{size}14{file}_pretrain.pth"
    for size in "sblg"
    for registers, file in (("", ""), ("_reg", "_reg4"))
} | {
    "dino_vits16": f"{_META}/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth",
    "dino_vits8": f"{_META}/dino/dino_deitsmall8_pretrain/dino_deitsmall8_pretrain.pth",
    "dino_vitb16": f"{_META}/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
    "dino_vitb8": f"{_META}/dino/dino_vitbase8_pretrain/dino_vitbase8_pretrain.pth",
    "dino_resnet50": f"{_META}/dino/dino_resnet50_pretrain/dino_resnet50_pretrain.pth",
}


@dataclass(frozen=True)
class Located:
    """Weights on this machine.

    Attributes:
        path: path of the file or folder.
        model: the library's model in the form of TRUNK.NAME (``timm/...``, ``torchvision/...``); empty: not known.
        preprocessing: ``size``, ``mean`` and ``std`` if the library has them.
    """

    path: Path
    model: str = ""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)


def locate(name: str) -> Located:
    """Return the location of weights by name; a path is returned without a check.

    Raises:
        CheckpointError: the name is unknown, or its file is not on this machine; the message has the download command.
    """
    scheme = scheme_of(name)
    if not scheme:
        return Located(Path(name).expanduser())
    rest = name.split(":", 1)[1]
    finders = {"hf": _hugging_face, "timm": _timm, "torchvision": _torchvision, "torchhub": _torch_hub}
    return finders[scheme](rest)


def _hub_folder() -> Path:
    """Return torch.hub's folder of checkpoints (``TORCH_HOME``), without importing torch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return Path(os.environ.get("TORCH_HOME", cache / "torch")).expanduser() / "hub" / "checkpoints"


def _hugging_face(repo: str) -> Located:
    if Path(repo).expanduser().is_dir():
        return Located(Path(repo).expanduser())
    return Located(_snapshot(repo, f"hf:{repo}"))


def _snapshot(repo: str, name: str) -> Path:
    """Return the folder of a repository in Hugging Face's cache; raises CheckpointError if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        # safetensors first: reading it needs no pickle.
        cached = [try_to_load_from_cache(repo, file) for file in _HF_FILES]
    except HFValidationError as error:
        raise CheckpointError(
            f"{name}: {repo!r} is neither a folder nor <owner>/<name> of the Hub. Correct it."
        ) from error
    for place in cached:
        if isinstance(place, str):
            return Path(place).parent
    raise CheckpointError(
        f"{name} is not in Hugging Face's cache. Fill it where there is a network: "
        f"hf download {repo} (HF_HOME names the cache's folder)."
    )


def _timm(name: str) -> Located:
    import timm

    if not timm.is_model(name.split(".")[0]):
        hint = did_you_mean(name, timm.list_models())
        raise CheckpointError(f"timm:{name}: timm has no such model.{hint or ' timm.list_models() lists them.'}")
    try:
        config = timm.models.get_pretrained_cfg(name)
    except RuntimeError:  # the tag after the dot does not belong to the model
        config = None
    if config is None:
        known = timm.list_pretrained(f"{name.split('.')[0]}*")
        raise CheckpointError(f"timm:{name}: timm has no such weights; it has {', '.join(known[:5]) or 'none'}.")
    preprocessing = {"size": config.input_size[-1], "mean": list(config.mean), "std": list(config.std)}
    model = f"timm/{name.split('.')[0]}"
    if config.hf_hub_id:
        return Located(_snapshot(config.hf_hub_id, f"timm:{name}"), model, preprocessing)
    if isinstance(config.url, str) and config.url:
        return Located(_hub_file(config.url, f"timm:{name}"), model, preprocessing)
    raise CheckpointError(f"timm:{name}: nobody has published weights of this model. Name another, or give a file.")


def _torchvision(name: str) -> Located:
    import torchvision

    model, _, which = name.partition(".")
    if model not in torchvision.models.list_models(module=torchvision.models):
        hint = did_you_mean(model, torchvision.models.list_models(module=torchvision.models))
        raise CheckpointError(f"torchvision:{name}: torchvision has no such classifier.{hint}")
    kinds = torchvision.models.get_model_weights(model)
    if which and which not in kinds.__members__:
        raise CheckpointError(f"torchvision:{name}: must be one of {', '.join(kinds.__members__)} after the dot.")
    weights = kinds[which or "DEFAULT"]
    views = weights.transforms()
    preprocessing = {"size": views.crop_size[0], "mean": list(views.mean), "std": list(views.std)}
    return Located(_hub_file(weights.url, f"torchvision:{name}"), f"torchvision/{model}", preprocessing)


def _torch_hub(name: str) -> Located:
    if name not in _HUB_FILES:
        hint = did_you_mean(name, _HUB_FILES)
        raise CheckpointError(f"torchhub:{name}: must be one of {', '.join(_HUB_FILES)}.{hint}")
    return Located(_hub_file(_HUB_FILES[name], f"torchhub:{name}"))


def _hub_file(url: str, name: str) -> Path:
    file = _hub_folder() / url.rsplit("/", 1)[-1]
    if not file.is_file():
        raise CheckpointError(
            f"{name} is not in torch's cache. Fill it where there is a network: curl -L --create-dirs -o {file} {url} "
            "(TORCH_HOME names the cache's folder)."
        )
    return file
