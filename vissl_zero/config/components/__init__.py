"""Keys of the built-in components, as dataclasses: recipes are checked without importing torch.

Keys of other components are checked against the dataclass that they were registered with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vissl_zero.config.components.heads import (
    ChainConfig,
    EvalMLPConfig,
    IdentityHeadConfig,
    MLPConfig,
    MobileNetHeadConfig,
    PatchPredictorConfig,
    SiameseHeadConfig,
    VisionTransformerHeadConfig,
)
from vissl_zero.config.components.optimizers import (
    AdafactorConfig,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LARSConfig,
    LionConfig,
    MuonConfig,
    NorMuonConfig,
    ScheduleFreeConfig,
    SGDConfig,
    ShampooConfig,
)
from vissl_zero.config.components.trunks import (
    BeitConfig,
    ConvitConfig,
    ConvNextConfig,
    EfficientNetConfig,
    MobileNetConfig,
    NoKeys,
    RegNetConfig,
    ResNetConfig,
    ResNetSkConfig,
    SwinConfig,
    TimmConfig,
    TorchvisionConfig,
    VisionTransformerConfig,
    XcitConfig,
)
from vissl_zero.config.constraints import constraint_problems
from vissl_zero.config.copies import Copies
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.registry import METHODS, Component, Registry

# ``Registry.kind`` -> name of the component -> dataclass of its keys.
# Listed here, not beside the components: importing these would import torch.
_BUILTIN: dict[str, dict[str, type]] = {
    "trunk": {
        "regnet": RegNetConfig,
        "resnet": ResNetConfig,
        "vision_transformer": VisionTransformerConfig,
        "beit": BeitConfig,
        "xcit": XcitConfig,
        "resnet_sk": ResNetSkConfig,
        "efficientnet": EfficientNetConfig,
        "mobilenetv3_tv": MobileNetConfig,
        "mobilenetv3_timm": MobileNetConfig,
        "convnext": ConvNextConfig,
        "swin_transformer": SwinConfig,
        "convit": ConvitConfig,
        **{f"alexnet_{name}": NoKeys for name in ("bvlc", "colorization", "deepcluster", "jigsaw", "rotnet")},
        "timm": TimmConfig,
        "torchvision": TorchvisionConfig,
    },
    "head": {
        "mlp": MLPConfig,
        "eval_mlp": EvalMLPConfig,
        "chain": ChainConfig,
        "siamese_head": SiameseHeadConfig,
        "identity": IdentityHeadConfig,
        "mobilenet_v3_head": MobileNetHeadConfig,
        "mobilenet_v3_head_timm": MobileNetHeadConfig,
        "vision_transformer_head": VisionTransformerHeadConfig,
        "patch_predictor": PatchPredictorConfig,
    },
    "base optimizer": {
        "sgd": SGDConfig,
        "adam": AdamConfig,
        "adamw": AdamWConfig,
        "lion": LionConfig,
        "adamw_schedule_free": ScheduleFreeConfig,
        "lars": LARSConfig,
        "muon": MuonConfig,
        "lamb": LambConfig,
        "adafactor": AdafactorConfig,
        "normuon": NorMuonConfig,
        "shampoo": ShampooConfig,
        "adamw_8bit": AdamW8bitConfig,
    },
}
_TABLES = {"loss": "losses", "head": "heads"}  # kind -> attribute of MethodSpec


@cache
def builtin_keys(kind: str) -> dict[str, type]:
    """Return name -> dataclass of keys for the built-in components of a kind, including losses and heads of methods."""
    keys = dict(_BUILTIN.get(kind, {}))
    if kind in ("loss", "head"):
        specs = [METHODS.get(method).build() for method in METHODS.builtin()]
        keys |= {name: schema for spec in specs for name, schema in getattr(spec, _TABLES[kind]).items()}
    return keys


def component_keys(registry: Registry, name: str) -> type | None:
    """Return the dataclass of a component's keys. Imports torch only for components that are not built in."""
    return builtin_keys(registry.kind).get(name) or registry.get(name).config


@cache
def _defaults(schema: type) -> Copies[DictConfig]:
    # A copy takes a fraction of the time that OmegaConf needs to build a typed node.
    return Copies(OmegaConf.structured(schema))


def typed_options(component: Component | type | None, options: Mapping[str, Any], key_path: str) -> dict[str, Any]:
    """Return all keys of a component: ``options`` over the defaults, with the types of its dataclass.

    Args:
        component: registered component, or the dataclass itself; None if the component has no keys.
        options: keys in the recipe.
        key_path: key path of ``options``, such as ``config.MODEL.TRUNK.PARAMS``, for messages.
    Raises:
        ConfigError: keys are unknown or missing, or values have a wrong type; one error has all problems.
    """
    schema = component.config if isinstance(component, Component) else component
    if schema is None:
        if options:
            without = " ".join(f"~{key_path}.{name}" for name in options)
            fix = (
                f"Leave them out ({without} on the command line), or register it with config=<a dataclass of its keys>."
            )
            raise ConfigError(
                [Problem(key_path, str(dict(options)), "must be empty: this component declares no keys", fix)]
            )
        return {}
    names = [f.name for f in fields(schema)]
    problems = []
    for name in (name for name in options if name not in names):
        fix = did_you_mean(str(name), names).strip() or f"Known: {', '.join(names)}."
        problems.append(Problem(f"{key_path}.{name}", "", "is not a key", fix))
    node = _defaults(schema).new()
    known = {name: copy.deepcopy(value) for name, value in options.items() if name in names}
    try:
        node.merge_with(known)
    except OmegaConfBaseException:  # raised at the first wrong value: find all of them
        for name, value in known.items():
            try:
                node.merge_with({name: value})
            except OmegaConfBaseException as error:
                in_items = list(_of_items(node._get_node(name), value, f"{key_path}.{name}"))
                problems += in_items or [_explained(error, key_path, node)]
    for name in OmegaConf.missing_keys(node):
        if not any(problem.key == f"{key_path}.{name}" for problem in problems):
            problems.append(Problem(f"{key_path}.{name}", "", "must be given", "Add it to the recipe."))
    if problems:
        raise ConfigError(problems)
    return _plain(node, key_path)


def _of_items(node: Any, value: Any, key: str) -> Iterator[Problem]:
    """Yield the problems of blocks in a list: OmegaConf names a key in one of them, and not the block."""
    item_type = node._metadata.element_type if isinstance(node, ListConfig) else None
    if isinstance(value, list) and isinstance(item_type, type) and is_dataclass(item_type):
        for index, item in enumerate(value):
            place = f"{key}[{index}]"
            if not isinstance(item, Mapping):
                known = ", ".join(f.name for f in fields(item_type))
                yield Problem(place, repr(item), "must be a block of keys", f"Known: {known}.")
                continue
            try:
                typed_options(item_type, item, place)
            except ConfigError as error:
                yield from error.problems


def _plain(node: Any, key_path: str) -> dict[str, Any]:
    assert isinstance(node, DictConfig)
    try:
        typed = OmegaConf.to_object(node)  # runs __post_init__, where a dataclass checks its own ranges
        if problems := list(constraint_problems(typed, key_path)):
            raise ConfigError(problems)
    except OmegaConfBaseException as error:
        raise ConfigError([_explained(error, key_path, node)]) from error
    except ValueError as error:
        raise ConfigError([Problem(key_path, "", str(error).rstrip("."), "Correct the value.")]) from error
    return {str(name): value for name, value in OmegaConf.to_container(node, resolve=True).items()}  # type: ignore[union-attr]


def _explained(error: OmegaConfBaseException, key_path: str, node: DictConfig) -> Problem:
    # Imported here, because it imports Hydra, which would slow down the start of every rank.
    from vissl_zero.config.explanations import explain_value

    return explain_value(error, node, f"{key_path}.")
