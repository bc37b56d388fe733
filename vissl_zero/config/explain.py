"""Say in a sentence what Hydra and OmegaConf refuse: which key, what it must be, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError

from vissl_zero.config.recipes import list_recipes, recipe_names
from vissl_zero.config.run import Root
from vissl_zero.errors import ConfigError, Problem, did_you_mean

# What composing a configuration raises for a user's mistake; anything else is a defect and keeps its traceback.
EXPLAINABLE = (HydraException, OmegaConfBaseException, YAMLError)


def explain(error: BaseException) -> ConfigError:
    """The same error as a ``ConfigError`` with one sentence; ``error`` is one of ``EXPLAINABLE``."""
    cause = next((link for link in _chain(error) if isinstance(link, (OmegaConfBaseException, YAMLError))), None)
    if isinstance(cause, YAMLError):
        return ConfigError([_yaml(cause)])
    if isinstance(cause, OmegaConfBaseException):
        return ConfigError([explain_value(cause)])
    if isinstance(error, MissingConfigException):
        return ConfigError([_missing_file(error)])
    if isinstance(error, OverrideParseException):
        fix = "Write key=value; quote what the shell would change, such as 'config.A=[1, 2]'."
        return ConfigError([Problem("command line", repr(error.override), "must be an override", fix)])
    text = " ".join(str(error).split())
    if "You must specify 'config'" in text:
        return ConfigError([no_recipe()])
    return ConfigError([Problem("command line", "", text.rstrip("."), "See vissl-zero --help.")])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def no_recipe() -> Problem:
    """The problem of a command without ``config=``."""
    return Problem("config", "", "must name a recipe", f"Write config=<recipe>. Recipes: {', '.join(recipe_names())}.")


def _missing_file(error: MissingConfigException) -> Problem:
    name = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = name.partition("/")
    if group != "config":
        options = error.options or []
        hint = f"Known: {', '.join(options)}." if options else "See vissl-zero --help."
        return Problem("command line", repr(name), "must name a configuration file that exists", hint)
    arguments = {recipe.name: recipe.argument for recipe in list_recipes()}
    if near := get_close_matches(option, arguments, cutoff=0.5):
        fix = f"Did you mean {' or '.join(arguments[name] for name in near)}?"
    else:
        fix = f"Recipes: {', '.join(recipe_names())}."
    return Problem("config", repr(option), "must name a recipe", f"{fix} vissl-zero list recipes lists all.")


def _yaml(error: YAMLError) -> Problem:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    where = f"{mark.name}, line {mark.line + 1}" if mark else "recipe"
    what = (error.problem if isinstance(error, MarkedYAMLError) else None) or str(error)
    return Problem(where, "", f"is not YAML ({what})", "Correct that line.")


def explain_value(error: OmegaConfBaseException, prefix: str = "") -> Problem:
    """One mistyped key or value as a problem.

    Args:
        error: what OmegaConf raised.
        prefix: of the key path, for nodes that were checked apart from the whole tree.
    """
    key = prefix + str(error.full_key or error.key or "configuration")
    first_line = str(error.msg or error).split("\n", 1)[0].strip()
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        return unknown_key(key)
    if isinstance(error, MissingMandatoryValue):
        return Problem(key, "", "must be given", f"Write {key}=<value>.")
    if isinstance(error, InterpolationResolutionError):
        fix = "Set the environment variable, or give a default as in ${oc.env:NAME,default}."
        return Problem(key, "", first_line.rstrip("."), fix)
    if isinstance(error, ValidationError):
        return _wrong_type(key, first_line)
    return Problem(key, "", first_line.rstrip("."), "See docs/configuration.md.")


_REFUSALS: tuple[tuple[str, str], ...] = (
    # OmegaConf's words, with the value if they have it -> what it must be
    (r"Value '(?P<got>.*?)' (?:of type '\w+' )?could not be converted to Integer", "a whole number"),
    (r"Value '(?P<got>.*?)' (?:of type '\w+' )?could not be converted to Float", "a number"),
    (r"Value '(?P<got>.*)' is not a valid bool", "true or false"),
    (r"Cannot convert '\w+' to string: '(?P<got>.*)'", "text"),
    (r".*is not a ListConfig, list or tuple", "a list"),
    (r"Invalid type assigned: \w+ is not a subclass of \w+. value: (?P<got>.*)", "a block of keys"),
    (r"Cannot assign \w+ to .*Dict", "a block of keys"),
    (r"Value '(?P<got>.*)' of type '\w+' is incompatible with type hint 'Union\[int, str\]'", "a number or a word"),
    (
        r"Value '(?P<got>.*)' of type '\w+' is incompatible with type hint 'Union\[bool, float\]'",
        "true, false or a number",
    ),
)


def _wrong_type(key: str, message: str) -> Problem:
    for pattern, must in _REFUSALS:
        if found := re.match(pattern, message):
            got = found.groupdict().get("got", "")
            return Problem(key, repr(got) if got else "", f"must be {must}", f"Correct the value of {key}.")
    if "not Optional" in message or "None" in message:
        return Problem(key, "null", "must have a value", "Leave the key out to get its default.")
    return Problem(key, "", message.rstrip("."), "See docs/configuration.md.")


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


def unknown_key(key: str) -> Problem:
    """The problem of a key that the typed tree does not have, with the closest keys and where else it stands."""
    node, parts = OmegaConf.structured(Root), key.split(".")
    depth = 0
    while depth < len(parts) - 1 and isinstance(node, DictConfig) and parts[depth] in node:
        node = node._get_node(parts[depth])
        depth += 1
    parent, wrong = ".".join(parts[:depth]), parts[depth]
    siblings = [str(name) for name in node] if isinstance(node, DictConfig) and not node._is_none() else []
    if OmegaConf.get_type(node) is dict:
        fix = f"In a file, write it there; on the command line, new keys of this block need a plus: +{key}=<value>."
        return Problem(key, "", "is not in the recipe yet", fix)
    hint = did_you_mean(wrong, siblings).strip()
    elsewhere = [path for path in _paths() if path.rsplit(".", 1)[-1] == wrong][:3]
    if not hint and elsewhere:
        hint = f"A key of that name stands at {', '.join(elsewhere)}."
    if "/" in wrong:
        known_parts = ", ".join(recipe.argument for recipe in list_recipes() if recipe.is_part)
        return Problem(f"+{key}", "", "must name a folder of recipes and a file in it", f"Parts: {known_parts}.")
    fix = hint or f"Keys of {parent or 'the root'}: {', '.join(siblings[:20])}."
    return Problem(key, "", "is not a key", fix)


def _paths() -> list[str]:
    """Every key path of the typed tree."""

    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        for name in map(str, node):
            yield f"{prefix}{name}"
            child = node._get_node(name)
            if isinstance(child, DictConfig) and not child._is_none():
                yield from walk(child, f"{prefix}{name}.")

    return list(walk(OmegaConf.structured(Root), ""))
