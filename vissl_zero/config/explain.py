"""Say in a sentence what Hydra and OmegaConf refuse: which key, what it must be, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
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
from vissl_zero.config.unknown_key import unknown_key
from vissl_zero.errors import ConfigError, Problem

# What composing a configuration raises for a user's mistake; anything else is a defect and keeps its traceback.
EXPLAINABLE = (HydraException, OmegaConfBaseException, YAMLError)
# The same, as long as Hydra works by itself: a folder or file that cannot be used, flags that cannot go together.
BEFORE_A_JOB = (OSError, ValueError, UserWarning)


def explain(error: BaseException) -> ConfigError:
    """The same error as a ``ConfigError`` with one sentence; ``error`` is of ``EXPLAINABLE`` or ``BEFORE_A_JOB``."""
    if isinstance(error, BEFORE_A_JOB) and not isinstance(error, EXPLAINABLE):
        return ConfigError([_around_a_job(error)])
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


def _around_a_job(error: OSError | ValueError | UserWarning) -> Problem:
    if isinstance(error, OSError) and error.filename is not None:
        fix = "Name another folder with config.CHECKPOINT.DIR (a sweep: hydra.sweep.dir), or change its permissions."
        return Problem(str(error.filename), "", f"cannot be used ({error.strerror})", fix)
    if isinstance(error, UnicodeDecodeError):
        must = f"must be UTF-8 text ({error.reason} at byte {error.start})"
        return Problem("config", "", must, "Correct the file that config= or a +config/ part names.")
    text = " ".join(str(error).split())
    if isinstance(error, UserWarning):
        path = text.partition("path=")[2].removesuffix(" is not available.")
        return Problem("hydra.searchpath", repr(path), "must name folders that exist", "Write [file:///a/folder].")
    return Problem("command line", "", text.rstrip("."), "See vissl-zero --help and --hydra-help.")


def _missing_file(error: MissingConfigException) -> Problem:
    name = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = name.partition("/")
    if not name:
        return Problem("--config-path", "", "must be left out: it hides our defaults", "Use --config-dir instead.")
    if group != "config":
        options = error.options or []
        hint = f"Known: {', '.join(options)}." if options else "See vissl-zero --help."
        return Problem("command line", repr(name), "must name a configuration file that exists", hint)
    arguments = {recipe.name: recipe.argument for recipe in list_recipes()}
    if Path(option).is_absolute() or option.startswith("."):
        fix = "A recipe is named by its path under a folder config/, which --config-dir or ./configs holds."
    elif near := get_close_matches(option, arguments, cutoff=0.5):
        fix = f"Did you mean {' or '.join(arguments[name] for name in near)}?"
    else:
        fix = f"Recipes: {', '.join(recipe_names())}."
    return Problem("config", repr(option), "must name a recipe", f"{fix} vissl-zero list recipes lists all.")


def _yaml(error: YAMLError) -> Problem:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    where = f"{mark.name}, line {mark.line + 1}" if mark else "recipe"
    what = (error.problem if isinstance(error, MarkedYAMLError) else None) or str(error)
    return Problem(where, "", f"is not YAML ({what})", "Correct that line.")


def explain_value(error: OmegaConfBaseException, prefix: str = "", tree: DictConfig | None = None) -> Problem:
    """One mistyped key or value as a problem.

    Args:
        error: what OmegaConf raised.
        prefix: of the key path, for nodes that were checked apart from the whole tree.
        tree: that node; by default the whole tree.
    """
    key = prefix + str(error.full_key or error.key or "configuration")
    first_line = str(error.msg or error).split("\n", 1)[0].strip()
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        return unknown_key(key.removeprefix(prefix), prefix, tree)
    if isinstance(error, MissingMandatoryValue):
        return Problem(key, "", "must be given", f"Write {key}=<value>.")
    if isinstance(error, InterpolationResolutionError):
        fix = "Correct what stands in ${...}."
        if missing := re.search(r"Environment variable '(\w+)' not found", first_line):
            first_line = f"needs the environment variable {missing.group(1)}, which is not set"
            fix = "Set it, or give a default as in ${oc.env:NAME,default}."
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
