"""Classifiers of torchvision by name, without their last layer: ConvNeXt, Swin, EfficientNet, ViT and all others."""

from __future__ import annotations

from functools import partial
from typing import Any

import torchvision
from torch import nn

from vissl_zero.config.components.trunks import TorchvisionConfig
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.trunks.timm_trunk import TimmTrunk
from vissl_zero.registry import TRUNKS

_KEY = "config.MODEL.TRUNK"
_LARGE = ("googlenet", "inception_v3")  # drawing their weights takes a minute, unless init_weights is false
_CLASSIFIERS = ("fc", "head", "heads", "classifier")


@TRUNKS.register("torchvision", config=TorchvisionConfig)
def build_torchvision_trunk(name: str, model_args: dict[str, Any] | None = None) -> nn.Module:
    """Build a torchvision classifier without its last layer. Parameters have torchvision's names below ``net.``.

    Args: the fields of ``TorchvisionConfig``.

    Raises:
        ConfigError: there is no such model, or it does not take an argument.
    """
    build = partial(_create, name, dict(model_args or {}))
    return TimmTrunk(build(), build)


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        fix = f"vissl-zero list trunks names the others.{did_you_mean(name, known)}"
        raise ConfigError(
            [Problem(f"{_KEY}.NAME", f"torchvision/{name}", "must name a classifier of torchvision", fix)]
        )
    # Auxiliary classifiers would make the model return a tuple in training.
    options = {"init_weights": False, "aux_logits": False} if name in _LARGE else {}
    try:
        net: nn.Module = torchvision.models.get_model(name, weights=None, **options, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem(f"{_KEY}.PARAMS.model_args", str(arguments), str(error), "Correct it.")]) from error
    path = next(part for part in _CLASSIFIERS if hasattr(net, part))
    last = [child for child, module in net.get_submodule(path).named_modules() if isinstance(module, nn.Linear)][-1:]
    target = f"{path}.{last[0]}" if last and last[0] else path
    parent, _, child = target.rpartition(".")
    # SqueezeNet's classifier is a convolution over maps, which are pooled here.
    setattr(net.get_submodule(parent), child, nn.Identity() if last else nn.AdaptiveAvgPool2d(1))
    if isinstance(net, torchvision.models.VisionTransformer):
        # torchvision's position embeddings fit one size of images.
        net.pretrained_cfg = {"fixed_input_size": True, "input_size": (3, net.image_size, net.image_size)}
    return net
