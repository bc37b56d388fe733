"""RegNet X/Y from classy-vision's building blocks (https://arxiv.org/abs/2003.13678)."""

from __future__ import annotations

from typing import Any

from torch import nn

# isort: split
from classy_vision.models import MODEL_REGISTRY
from classy_vision.models.anynet import ActivationType, AnyNet, AnyNetParams, BlockType, StemType
from classy_vision.models.regnet import RegNet as ClassyRegNet
from classy_vision.models.regnet import RegNetParams

from vissl_zero.config.components.trunks import (
    ANYNET_PARAMETERS,
    REGNET_PARAMETERS,
    RegNetConfig,
    anynet_problems,
    regnet_problems,
)
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.model import Unit
from vissl_zero.models.trunks.resnet import StagedTrunk
from vissl_zero.registry import TRUNKS

_KEY = "config.MODEL.TRUNK.REGNET"


@TRUNKS.register("regnet", config=RegNetConfig)
class RegNet(StagedTrunk):
    """RegNet X/Y by name or by depth, w_0, w_a, w_m and group_width.

    Images may have any size of at least 1 pixel.

    Args:
        options: fields of ``RegNetConfig``.

    Raises:
        ConfigError: the name is unknown, or the parameters make no RegNet.
    """

    def __init__(self, **options: Any):
        config = RegNetConfig(**options)
        build = _from_stages if config.name == config.ANYNET else _named if config.name else _from_parameters
        # Stem and blocks only: classy-vision's model forwards ``__call__`` to an inner module, past hooks of the model.
        net = build(config)
        stages = [list(stage) for stage in net.trunk_output]
        # The last norm of the last block has the width of its output, for every type of block.
        norms = [layer for layer in stages[-1][-1].modules() if isinstance(layer, nn.BatchNorm2d)]
        super().__init__(Unit(*net.stem.stem), stages, feature_dim=norms[-1].num_features)


def _regnet_names() -> list[str]:
    """List the published networks that ``REGNET.name`` accepts."""
    return sorted(name for name in MODEL_REGISTRY if name.startswith("regnet_"))


def _named(config: RegNetConfig) -> ClassyRegNet:
    assert config.name is not None
    if config.name not in _regnet_names():
        fix = f"Known: {', '.join(_regnet_names())}.{did_you_mean(config.name, _regnet_names())}"
        raise ConfigError([Problem(f"{_KEY}.name", repr(config.name), "must name a published RegNet", fix)])
    default = RegNetConfig()
    set_too = [key for key in config.FIXED_BY_NAME if getattr(config, key) != getattr(default, key)]
    if set_too:
        fix = f"Leave out {', '.join(set_too)}, or leave out name and give {', '.join(REGNET_PARAMETERS)}."
        raise ConfigError([Problem(f"{_KEY}.name", repr(config.name), "decides the architecture by itself", fix)])
    return MODEL_REGISTRY[config.name](**_common(config))


def _from_parameters(config: RegNetConfig) -> ClassyRegNet:
    missing = [key for key in REGNET_PARAMETERS if getattr(config, key) is None]
    if missing:
        raise ConfigError([Problem(_KEY, "", f"lacks {', '.join(missing)}", "Give them, or a name.")])
    if problems := regnet_problems(config):
        raise ConfigError(problems)
    params = RegNetParams(
        **{key: getattr(config, key) for key in REGNET_PARAMETERS},
        bottleneck_multiplier=config.bottleneck_multiplier,
        block_type=_member(BlockType, "block_type", config.block_type),
        activation=_member(ActivationType, "activation_type", config.activation_type),
        use_se=config.use_se,
        se_ratio=config.se_ratio,
        **_common(config),
    )
    return ClassyRegNet(params)


def _from_stages(config: RegNetConfig) -> AnyNet:
    if problems := anynet_problems(config, _KEY):
        raise ConfigError(problems)
    params = AnyNetParams(
        **{key: getattr(config, key) for key in ANYNET_PARAMETERS},
        block_type=_member(BlockType, "block_type", config.block_type),
        activation=_member(ActivationType, "activation_type", config.activation_type),
        use_se=config.use_se,
        se_ratio=config.se_ratio,
        **_common(config),
    )
    return AnyNet(params)


def _common(config: RegNetConfig) -> dict[str, Any]:
    """Return arguments that a named RegNet also takes."""
    return {
        "stem_type": _member(StemType, "stem_type", config.stem_type),
        "stem_width": config.stem_width,
        "bn_epsilon": config.bn_epsilon,
        "bn_momentum": config.bn_momentum,
    }


def _member(enum: Any, key: str, value: str) -> Any:
    name = value.upper()
    if name not in enum.__members__:
        known = ", ".join(enum.__members__)
        raise ConfigError([Problem(f"{_KEY}.{key}", repr(value), f"must be one of {known}", "Correct it.")])
    return enum[name]
