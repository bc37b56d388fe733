"""Keys that the typed tree does not have: what was probably meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.recipes import list_recipes
from vissl_zero.config.run import Root
from vissl_zero.errors import Problem, did_you_mean

_MOST_LISTED = 20


def unknown_key(key: str, prefix: str = "", tree: DictConfig | None = None) -> Problem:
    """The problem of a key that is not there, with the closest keys beside it or where else it stands.

    Args:
        key: path in ``tree``.
        prefix: of that path, for messages.
        tree: where to look; by default the whole typed tree.
    """
    root = OmegaConf.structured(Root) if tree is None else tree
    node, parts, depth = root, key.split("."), 0
    while depth < len(parts) - 1 and isinstance(node, DictConfig) and parts[depth] in node:
        node = node._get_node(parts[depth])
        depth += 1
    wrong, full = parts[depth], prefix + key
    if "/" in wrong:
        known = ", ".join(recipe.argument for recipe in list_recipes() if recipe.is_part)
        return Problem(f"+{full}", "", "must name a folder of recipes and a file in it", f"Parts: {known}.")
    if OmegaConf.get_type(node) is dict:
        fix = f"In a file, write it there; on the command line, new keys of this block need a plus: +{full}=<value>."
        return Problem(full, "", "is not in the recipe yet", fix)
    siblings = [str(name) for name in node] if isinstance(node, DictConfig) and not node._is_none() else []
    elsewhere = [prefix + path for path in _paths(root) if path.rsplit(".", 1)[-1] == wrong][:3]
    fix = did_you_mean(wrong, siblings).strip()
    if full.startswith("config.config"):
        fix = "Head the recipe's file with the line '# @package _global_'."
    if not fix and elsewhere:
        fix = f"A key of that name stands at {', '.join(elsewhere)}."
    return Problem(full, "", "is not a key", fix or f"Keys there: {', '.join(siblings[:_MOST_LISTED])}.")


def added_keys(cfg: DictConfig, prefix: str = "") -> list[Problem]:
    """Keys that ``+key=value`` on the command line added to blocks that do not have them."""
    problems: list[Problem] = []
    schema = OmegaConf.get_type(cfg)
    names = {f.name for f in fields(schema)} if is_dataclass(schema) else None
    for name in map(str, cfg):
        child = cfg._get_node(name)
        if names is not None and name not in names:
            problems.append(unknown_key(f"{prefix}{name}"))
        elif isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            problems += added_keys(child, f"{prefix}{name}.")
    return problems


def _paths(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every key path below a node."""
    for name in map(str, node):
        yield f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _paths(child, f"{prefix}{name}.")
