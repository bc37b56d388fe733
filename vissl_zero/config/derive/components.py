"""The resolved MODEL and LOSS blocks: every key of the chosen trunk, heads and loss, typed and filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from vissl_zero.config.components import BUILTIN
from vissl_zero.config.components.trunks import TRUNK_BLOCKS
from vissl_zero.config.options import component_keys, typed_options
from vissl_zero.config.run import RunConfig
from vissl_zero.registry import HEADS, LOSSES, TRUNKS


def trunk_options(cfg: RunConfig) -> dict[str, Any]:
    """All keys of the chosen trunk. Raises ConfigError for keys of a user's trunk that it does not have."""
    trunk = cfg.MODEL.TRUNK
    if trunk.NAME in TRUNK_BLOCKS:
        return _only_fields(asdict(getattr(trunk, TRUNK_BLOCKS[trunk.NAME])), BUILTIN["trunk"][trunk.NAME])
    return typed_options(component_keys(TRUNKS, trunk.NAME), trunk.PARAMS, "config.MODEL.TRUNK.PARAMS")


def head_options(cfg: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """Name and all keys of each head. Raises ConfigError for wrong keys."""
    heads = []
    for name, options in cfg.MODEL.HEAD.PARAMS:
        heads.append(
            (name, typed_options(component_keys(HEADS, name), options or {}, f"config.MODEL.HEAD.PARAMS.{name}"))
        )
    return heads


def loss_options(cfg: RunConfig) -> dict[str, Any]:
    """All keys of the chosen loss; SwAV's inferred ones filled in. Raises ConfigError for wrong keys."""
    name = cfg.LOSS["name"]
    block: Any = cfg.LOSS.get(name) or {}
    schema = component_keys(LOSSES, name)
    given = _only_fields(asdict(block), schema) if is_dataclass(block) and not isinstance(block, type) else block
    options = typed_options(schema, given, f"config.LOSS.{name}")
    if name == "swav_loss":
        options |= {key: value for key, value in swav_facts(cfg).items() if value is not None}
    return options


def swav_facts(cfg: RunConfig) -> dict[str, Any]:
    """num_crops from the transforms, num_prototypes and embedding_dim from the head; None where they do not say."""
    head = next((options or {} for name, options in _pairs(cfg.MODEL.HEAD.PARAMS) if name == "swav_head"), {})
    dims = head.get("dims") or []
    return {
        "num_crops": num_crops(cfg.DATA.TRAIN.TRANSFORMS),
        "num_prototypes": head.get("num_clusters"),
        "embedding_dim": dims[-1] if dims else None,
    }


def inferred_notes(cfg: RunConfig) -> list[str]:
    """Notes where the loss's keys say something else than the head and the transforms they are taken from."""
    if cfg.LOSS["name"] != "swav_loss":
        return []
    notes, given = [], cfg.LOSS["swav_loss"]
    for key, value in swav_facts(cfg).items():
        said = getattr(given, key)
        if said is not None and value is not None and said != value:
            origin = "transforms" if key == "num_crops" else "head"
            notes.append(f"config.LOSS.swav_loss.{key}: {value} is used, taken from the {origin}, not {said}.")
    return notes


def num_crops(transforms: Sequence[Any]) -> int | None:
    """Crops per image that the transforms make; None if no multi-crop is among them."""
    for entry in transforms:
        if isinstance(entry, Mapping) and entry.get("name") == "ImgPilToMultiCrop":
            counts = entry.get("num_crops") or []
            return sum(counts) if all(isinstance(count, int) for count in counts) else None
    return None


def _pairs(heads: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(h[0], h[1]) for h in heads if isinstance(h, Sequence) and not isinstance(h, str) and len(h) == 2]


def _only_fields(given: Mapping[str, Any], schema: type | None) -> dict[str, Any]:
    """What of a block belongs to the component: blocks also hold VISSL's other keys."""
    assert schema is not None
    kept: dict[str, Any] = {}
    for item in fields(schema):
        value = given[item.name]
        default = item.default_factory() if callable(item.default_factory) else None
        is_block = is_dataclass(default) and isinstance(value, Mapping)
        kept[item.name] = _only_fields(value, type(default)) if is_block else value
    return kept
