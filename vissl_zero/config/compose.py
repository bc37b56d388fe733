"""Compose a typed configuration from a recipe's name and overrides.

Errors of Hydra and OmegaConf become one sentence: the key, what it must be, what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, ValueNode
from omegaconf.errors import (
    OmegaConfBaseException,
)
from yaml import MarkedYAMLError, YAMLError

from vissl_zero.config.catalog import find_catalog, use_catalog, use_own_images
from vissl_zero.config.environment import mask_environment
from vissl_zero.config.expansion import require_moderate_texts
from vissl_zero.config.explanations import MOST_LISTED, explain_value, unknown_key
from vissl_zero.config.override_paths import blocked
from vissl_zero.config.override_words import searchpath_override
from vissl_zero.config.programs import PROGRAMS, TRAIN, begin_program
from vissl_zero.config.recipes import list_recipes, recipe_folders, recipe_names
from vissl_zero.config.run_config import RunConfig, new_schema, schema
from vissl_zero.config.sources import SchemaSource, register_sources
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.vissl.keys import todays_key, without_vissl_keys
from vissl_zero.vissl.names import use_own_names
from vissl_zero.vissl.programs import DETECTION, ELSEWHERE

# Errors that a user's mistake in a configuration raises. Any other error is a defect and keeps its traceback.
EXPLAINABLE = (HydraException, OmegaConfBaseException, YAMLError, RecursionError)
# Errors of Hydra before a job starts: a folder or file cannot be used, or flags contradict each other.
BEFORE_A_JOB = (OSError, ValueError, UserWarning)
# Python's errors that Hydra does not catch if a key path continues below a list.
IN_A_LIST = (TypeError, ValueError)


def explain(error: BaseException, folders: Sequence[str] = (), overrides: Sequence[str] = ()) -> ConfigError:
    """Convert an error into a ``ConfigError`` with a one-sentence message.

    Args:
        error: instance of a class in ``EXPLAINABLE`` or ``BEFORE_A_JOB``.
        folders: additional folders of recipes, from --config-dir and hydra.searchpath.
        overrides: overrides of the command line.
    """
    # Some of OmegaConf's errors are also ValueErrors.
    if isinstance(error, BEFORE_A_JOB) and not isinstance(error, EXPLAINABLE):
        return ConfigError([_around_a_job(error)])
    if any(isinstance(link, RecursionError) for link in _chain(error)):
        fix = "Reduce the nesting, and check that no recipe lists itself in its defaults."
        return ConfigError([Problem("configuration", "", "must not be nested too deeply, or in itself", fix)])
    # Hydra raises its own errors from those of OmegaConf and YAML, which know the key or the line.
    cause = next((link for link in _chain(error) if isinstance(link, (OmegaConfBaseException, YAMLError))), None)
    if isinstance(cause, YAMLError):
        return ConfigError([_yaml(cause)])
    if isinstance(cause, OmegaConfBaseException):
        if problems := list(_without_prefix(overrides)):
            return ConfigError(problems)
        return ConfigError([explain_value(cause, schema())])
    if isinstance(error, MissingConfigException):
        return ConfigError([_missing_file(error, folders, overrides)])
    if isinstance(error, OverrideParseException):
        fix = (
            "Write key=value. A value with blanks, commas or brackets of its own needs quotes twice, for the shell and "
            "for Hydra: \"config.A='/my, photos'\", \"config.A=['/a, b', /c]\"."
        )
        return ConfigError([Problem("command line", repr(error.override), "must be an override", fix)])
    return ConfigError([_of_hydra(" ".join(str(error).split()), folders)])


def _of_hydra(text: str, folders: Sequence[str]) -> Problem:
    """Return the problem of an error of Hydra that has no class of its own."""
    if ambiguous := re.match(r"Ambiguous value for argument '([^=']+)=(.*?)'", text):
        fix = "Write a decimal point: 0.1. Write [a,b] for a list; add -m to run once with each value."
        return Problem(ambiguous[1], repr(ambiguous[2]), "must be one value, and commas separate several", fix)
    if "does not support sweep type" in text:
        fix = (
            "Add hydra/sweeper=optuna and config.OBJECTIVE=loss_last, say, or write the values: 0.1,0.2 or range(1,10)."
        )
        return Problem("command line", "", "interval() gives no values without a search", fix)
    if "You must specify 'config'" in text:
        return _no_recipe(folders)
    return Problem("command line", "", text.rstrip("."), "See vissl-zero --help.")


def _without_prefix(overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield the problem of each override that lacks ``config.`` before its key."""
    tree = schema()
    for word in overrides:
        key, is_override, _ = word.lstrip("+~").partition("=")
        block = key.split(".")[0]
        if is_override and block not in tree and block in tree.config:
            yield Problem(key, "", "is not a key", f"Write config.{word.lstrip('+~')}.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    # Under a debugger or a tracer, OmegaConf's errors are causes of each other.
    met: set[int] = set()
    while error is not None and id(error) not in met:
        yield error
        met.add(id(error))
        error = error.__cause__ or error.__context__


def _no_recipe(folders: Sequence[str] = ()) -> Problem:
    """Return the problem of a command without ``config=``."""
    number = len(recipe_names(folders))
    fix = f"Write config=<recipe>. First: config=quickstart/swav_digits; vissl-zero list recipes lists {number}"
    return Problem("config", "", "must name a recipe", f"{fix}, vissl-zero --help the rest.")


def _around_a_job(error: OSError | ValueError | UserWarning) -> Problem:
    if isinstance(error, FileExistsError | NotADirectoryError):
        fix = "Name another folder; that of a sweep is hydra.sweep.dir."
        return Problem(
            "config.CHECKPOINT.DIR", repr(str(error.filename)), "must name a folder, and a file is there", fix
        )
    if isinstance(error, OSError) and error.filename is not None:
        fix = "Name another folder with config.CHECKPOINT.DIR (a sweep: hydra.sweep.dir), or change its permissions."
        return Problem(str(error.filename), "", f"cannot be used ({error.strerror})", fix)
    text = " ".join(str(error).split())
    if isinstance(error, UserWarning):
        path = text.partition("path=")[2].removesuffix(" is not available.")
        return Problem("hydra.searchpath", repr(path), "must name folders that exist", "Write [file:///a/folder].")
    return Problem("command line", "", text.rstrip("."), "See vissl-zero --help and --hydra-help.")


def _missing_file(error: MissingConfigException, folders: Sequence[str], overrides: Sequence[str]) -> Problem:
    name = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = name.partition("/")
    if not name:
        return Problem("--config-path", "", "must be left out: it hides our defaults", "Use --config-dir instead.")
    if group != "config":
        options = error.options or []
        hint = f"Known: {', '.join(options)}." if options else "See vissl-zero --help."
        return Problem("command line", repr(name), "must name a configuration file that exists", hint)
    for folder in folders:
        if fix := _level_of_folder(Path(folder), option):
            return Problem("--config-dir", repr(str(folder)), "must name the folder that holds config/", fix)
    if any(word.removeprefix("config=") == f"{option}.yaml" for word in overrides):
        path = Path(f"{option}.yaml").absolute()
        there = [recipe.argument for recipe in list_recipes(folders) if recipe.path.absolute() == path]
        fix = f"Write {there[0]}." if there else f"Put it in configs/config/ and write config={path.stem}."
        return Problem("config", repr(f"{option}.yaml"), "must name a recipe, not a file", fix)
    arguments = {recipe.name: recipe.argument for recipe in list_recipes(folders)}
    if Path(option).is_absolute() or option.startswith("."):
        fix = "A recipe is named by its path under a folder config/, which --config-dir or ./configs holds."
    elif near := get_close_matches(option, arguments, cutoff=0.5):
        fix = f"Did you mean {' or '.join(arguments[name] for name in near)}?"
    else:
        names = recipe_names(folders)
        fix = f"Recipes: {', '.join(names if len(names) <= MOST_LISTED else [*names[:MOST_LISTED], '...'])}."
    where = f" --config-dir {folders[0]}" if folders else ""
    return Problem("config", repr(option), "must name a recipe", f"{fix} vissl-zero list recipes{where} lists all.")


def _level_of_folder(folder: Path, option: str) -> str:
    """Return a hint if --config-dir names a folder that is one level too low or too high; else empty."""
    if (folder / "config").is_dir():
        return ""
    if (folder / f"{option}.yaml").is_file() or folder.name == "config":
        return f"Write --config-dir {folder.parent}."
    inside = next(
        (path for path in (folder / "configs", *folder.glob("*/configs")) if (path / "config").is_dir()), None
    )
    return f"Write --config-dir {inside}." if inside else f"There is no folder {folder / 'config'}."


def _yaml(error: YAMLError) -> Problem:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    where = f"{mark.name}, line {mark.line + 1}" if mark else "recipe"
    what = (error.problem if isinstance(error, MarkedYAMLError) else None) or str(error)
    return Problem(where, "", f"is not YAML ({what})", "Correct that line.")


def _added_keys(cfg: DictConfig, prefix: str = "") -> list[Problem]:
    """Return problems of unknown keys that were added by ``+key=value`` on the command line."""
    problems: list[Problem] = []
    kind = OmegaConf.get_type(cfg)
    names = {f.name for f in fields(kind)} if is_dataclass(kind) else None
    for name in map(str, cfg):
        child = cfg._get_node(name)
        if names is not None and name not in names:
            problems.append(unknown_key(f"{prefix}{name}", schema()))
        elif isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            problems += _added_keys(child, f"{prefix}{name}.")
    return problems


# Every file of Detectron2 has one of these keys at its root.
_OF_DETECTRON = {"_BASE_", "SOLVER", "DATASETS"}


def of_another_program(tree: DictConfig) -> list[Problem]:
    """Return the problem of a file of Detectron2, such as VISSL's object_detection, that is used as a recipe."""
    block = tree.get("config")
    if not isinstance(block, DictConfig) or block._is_none() or not {*map(str, block)} & _OF_DETECTRON:
        return []
    return [Problem("config", "", "must name a recipe, and this is a configuration of Detectron2", DETECTION)]


def every_mistake(tree: DictConfig, typed: DictConfig | None = None, prefix: str = "") -> list[Problem]:
    """Return a problem for every key and value of an untyped tree that the typed tree does not accept."""
    node = new_schema() if typed is None else typed
    is_open, problems = OmegaConf.get_type(node) is dict, []
    for name in map(str, tree):
        child, below = tree._get_node(name), node._get_node(name) if name in node else None
        if name not in node:
            problems += [] if is_open else [unknown_key(f"{prefix}{name}", schema())]
        elif isinstance(child, DictConfig) and isinstance(below, DictConfig):
            problems += every_mistake(child, below, f"{prefix}{name}.")
        else:
            try:
                # A typed node checks what is assigned to it.
                node[name] = child._value() if isinstance(child, ValueNode) else child
            except OmegaConfBaseException as error:
                problems.append(explain_value(error, schema()))
    return problems


_ITEMS: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "list[str]": (str, "texts", "[a,b]"),
    "list[int]": (int, "whole numbers", "[1,2]"),
    "list[float]": ((int, float), "numbers", "[0.1,0.2]"),
}
# Run folders that Hydra has created, and their parents: removed if the run fails before it starts.
new_folders: set[Path] = set()


@cache
def register() -> None:
    """Register the sources and the resolvers. Idempotent."""
    register_sources()
    mask_environment()
    # Cached, because the name has the time in it: every access must return the same folder.
    OmegaConf.register_new_resolver("vissl_zero_run_dir", _run_dir, replace=True, use_cache=True)


def _run_dir(chosen: str | None, recipe: str | None) -> str:
    """Return the folder that Hydra creates for a single run: CHECKPOINT.DIR, or a new folder under runs/."""
    if chosen:
        folder = Path(chosen).expanduser()
        remember_new(folder)
        return str(folder)
    # To the millisecond: runs that a script starts at the same time must not share a folder.
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
    folder = Path("runs") / f"{stamp}_{(recipe or 'several').replace('/', '-')}"  # config=[a,b] has no one name
    remember_new(folder)
    return str(folder)


def remember_new(folder: Path) -> None:
    """Remember a folder that is about to be created, and its missing parents."""
    folder = folder.absolute()
    new_folders.update(path for path in (folder, *folder.parents) if not path.exists())


@dataclass(frozen=True)
class Composed:
    """A composed recipe.

    Attributes:
        run: typed configuration with every ``${...}`` resolved and VISSL's aliases replaced.
        written: the same tree as plain containers, with every ``${...}`` as written.
        recipe: name of the recipe, the value of ``config=``.
        node_id: number of this machine, from 0.
        notes: sentences to print once.
    """

    run: RunConfig
    written: dict[str, Any]
    recipe: str
    node_id: int
    notes: tuple[str, ...]

    def user_yaml(self) -> str:
        """Return ``config.user.yaml``: a recipe that reproduces this run, with interpolations unresolved."""
        tree = OmegaConf.to_yaml({"config": without_vissl_keys(self.written)})
        return f"# @package _global_\n# {self.recipe}, as composed.\n{tree}"


def typed(
    cfg: DictConfig, recipe: str, overrides: Sequence[str] = (), folders: Sequence[Path] | None = None
) -> Composed:
    """Convert a composed tree (the root, with the key ``config``) to dataclasses.

    Args:
        cfg: tree that Hydra composed.
        recipe: name of the recipe, the value of ``config=``.
        overrides: overrides of the command line.
        folders: folders of recipes in Hydra's order; default: those of ``overrides``, then ``recipe_folders()``.
    Raises:
        ConfigError: a key is unknown, an interpolation cannot be resolved, or a value is missing or wrong.
    """
    if problems := _added_keys(cfg) or _other_programs(cfg):
        raise ConfigError(problems)
    try:
        written = OmegaConf.to_container(cfg.config, resolve=False)
        assert isinstance(written, dict)
        # Before ``to_object``, which resolves every text.
        require_moderate_texts({"config": written})
        run = OmegaConf.to_object(cfg.config)
    except EXPLAINABLE as error:
        raise explain(error) from error
    assert isinstance(run, RunConfig)
    if problems := _one_or_many(run):
        raise ConfigError(problems)
    if cfg.engine_name != TRAIN:
        begin_program(run, cfg.engine_name)
        # ``config.user.yaml`` has no root keys, so PROGRAM must name the program when it is composed again.
        written["PROGRAM"] = cfg.engine_name
    elif run.PROGRAM in PROGRAMS:
        begin_program(run, run.PROGRAM)
    chosen = {word.split("=")[0].lstrip("+").removeprefix("config.") for word in overrides}
    # Before the catalog, whose paths would be taken for the user's own images.
    notes = use_own_names(run, chosen) + use_own_images(run.DATA, chosen)
    folders = [*_searchpath(overrides), *recipe_folders()] if folders is None else folders
    notes += use_catalog(run.DATA, find_catalog(folders))
    if not 0 <= cfg.node_id < max(1, run.DISTRIBUTED.NUM_NODES):
        must = f"must be 0 to {run.DISTRIBUTED.NUM_NODES - 1}, as there are {run.DISTRIBUTED.NUM_NODES} machines"
        fix = "Give each machine its own number; config.DISTRIBUTED.NUM_NODES is their number."
        raise ConfigError([Problem("node_id", str(cfg.node_id), must, fix)])
    return Composed(run, {str(key): value for key, value in written.items()}, recipe, cfg.node_id, tuple(notes))


def _searchpath(overrides: Sequence[str]) -> list[Path]:
    """Return the folders that hydra.searchpath names on the command line."""
    words = [word for word in overrides if word.startswith("hydra.searchpath=")]
    values = [override.value() for override in OverridesParser.create().parse_overrides(words)]
    named = [str(path) for value in values if isinstance(value, list) for path in value]
    # Other schemes, such as pkg://, name no folder.
    return [Path(path.removeprefix("file://")) for path in named if "://" not in path.removeprefix("file://")]


def _one_or_many(block: Any, path: str = "config") -> list[Problem]:
    """Convert a single string to a list wherever a field accepts both, in place.

    Returns:
        Problems of values that are neither, and of blocks that an interpolation replaced by a value.
    """
    problems: list[Problem] = []
    for item in fields(block):
        key, value = f"{path}.{item.name}", getattr(block, item.name)
        if is_dataclass(value):
            problems += _one_or_many(value, key)
        elif isinstance(item.default_factory, type) and is_dataclass(item.default_factory):
            problems.append(Problem(key, repr(value), "must be a block of keys", f"Write {key}.<key>=<value>."))
        elif str(item.type).startswith("dict[") and not isinstance(value, dict):
            problems.append(Problem(key, repr(value), "must be a block of keys", f"Write {key}={{a: 1}}."))
        elif item.metadata.get("texts"):
            values = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(text, (str, int, float)) for text in values):
                problems.append(
                    Problem(key, str(value), "must be a string or a list of strings", f"Write {key}=[a,b].")
                )
            setattr(block, item.name, [str(text) for text in values])
        elif item.type in _ITEMS and value is not None:  # OmegaConf accepts lists and blocks as items
            kind, words, example = _ITEMS[str(item.type)]
            if not all(isinstance(part, kind) for part in value):
                problems.append(Problem(key, str(value), f"must be a list of {words}", f"Write {key}={example}."))
    return problems


def plain_words(overrides: Sequence[str]) -> list[str]:
    """Rewrite overrides for Hydra: ``a[1].b=2`` becomes ``a.1.b=2``, ``DIR=/home/jörg`` gets quotes.

    ``+config.a=2`` becomes ``++config.a=2``: a key that VISSL lacks and that needs a plus there may be typed here.
    """
    words = []
    for word in overrides:
        key, equals, value = word.partition("=")
        name = key.lstrip("+~")
        sign = key.removesuffix(name)
        sign = "++" if sign == "+" and equals and name.startswith("config.") else sign
        words.append(sign + re.sub(r"\[(\d+)\]", r".\1", todays_key(name)) + equals + _quoted(value))
    return words


# Paths with characters that are syntax to Hydra (`/photos (2)`), except commas and quotes: they may be meant as such.
_ODD_PATH = re.compile(r"(?=.*[^\w/ .:+\-@%*?|$])(/|\.\.?/|~/)[^,'\"\\$]*")


def _quoted(value: str) -> str:
    """Return a plain value, or each item of a list, in quotes if Hydra's grammar needs them."""
    if _ODD_PATH.fullmatch(value):
        return f"'{value}'"
    if value.startswith("[") and value.endswith("]") and not {*value[1:-1]} & {*"'\"\\[]{}$"}:
        return f"[{','.join(_quoted(item.strip()) for item in value[1:-1].split(','))}]"
    return value if value.isascii() or {*value} & {*"'\"\\(){}[],"} else f"'{value}'"


def _other_programs(cfg: DictConfig) -> list[Problem]:
    """Return problems of the root keys: a program that does not exist here, or another version."""
    programs = []
    if cfg.engine_name not in (TRAIN, *PROGRAMS):
        programs.append(unknown_engine(cfg.engine_name))
    if cfg.VERSION != 1:
        programs.append(Problem("VERSION", repr(cfg.VERSION), "must be 1", "Use a recipe of version 1."))
    return programs


def unknown_engine(name: object) -> Problem:
    """Return the problem of an unknown ``engine_name``."""
    known = [TRAIN, *PROGRAMS]
    if why := ELSEWHERE.get(str(name)):
        return Problem("engine_name", repr(name), "must be a program that is here", why)
    return Problem("engine_name", repr(name), f"must be {' or '.join(known)}", did_you_mean(str(name), known).strip())


def compose(recipe: str, overrides: Sequence[str] = ()) -> Composed:
    """Compose a recipe as the command line does, without starting a run.

    Args:
        recipe: name of the recipe, as for ``config=``.
        overrides: overrides such as ``config.ZERO.LEVEL=3`` or ``+config/zero=fsdp``.
    Raises:
        ConfigError: the recipe or a key is unknown, or a value is wrong.
    """
    register()
    try:
        words = plain_words(overrides)
        return typed(_composed([f"config={recipe}", *words]), recipe, words)
    except (*EXPLAINABLE, *IN_A_LIST) as error:
        raise explained(error, [f"config={recipe}", *overrides]) from error


def explained(error: BaseException, overrides: Sequence[str], folders: Sequence[str] = ()) -> ConfigError:
    """Return one ConfigError with all wrong keys and values of a recipe whose composition failed.

    Args:
        error: error of ``EXPLAINABLE``, ``BEFORE_A_JOB`` or ``IN_A_LIST``.
        overrides: overrides of the command line, including ``config=``.
        folders: additional folders of recipes, from --config-dir and hydra.searchpath.
    Raises:
        TypeError: ``error`` itself, if it is not caused by an override.
    """
    # Hydra stops at the first mistake. Composing again without types finds the others.
    words = plain_words(overrides)
    lost = _blocked(words, folders)
    if isinstance(error, TypeError) and not lost:
        raise error
    in_lists = list(lost.values())
    first = explain(error, [*folders, *map(str, _searchpath_or_none(overrides))], overrides) if not lost else None
    try:
        tree = untyped([word for word in words if word not in lost], folders)
        problems = of_another_program(tree)
        if problems:
            return ConfigError(problems)
        problems = every_mistake(tree)
    except Exception:  # noqa: BLE001 - what is wrong beyond the first mistake cannot be composed either
        return first or ConfigError(in_lists)
    if first is None:
        return ConfigError([*in_lists, *problems])
    # If the first mistake is not found again, the untyped tree differs from the recipe: report the first alone.
    return ConfigError(problems) if first.problems[0].key in [problem.key for problem in problems] else first


def _blocked(words: Sequence[str], folders: Sequence[str]) -> dict[str, Problem]:
    """Return ``blocked`` for the recipe without overrides of values; empty if it cannot be composed."""
    try:
        return blocked(_composed([word for word in words if not _OF_A_VALUE.match(word)], folders), words)
    except Exception:  # noqa: BLE001 - then the first mistake is another one
        return {}


def _searchpath_or_none(overrides: Sequence[str]) -> list[Path]:
    try:
        return _searchpath(plain_words(overrides))
    except HydraException:  # an override that cannot be parsed is refused in words of its own
        return []


def untyped(overrides: Sequence[str], folders: Sequence[str] = ()) -> DictConfig:
    """Compose without types, so that any key and value is accepted; arguments as for ``explained``."""
    register()
    # Without types most keys do not exist yet; ``++`` is Hydra's only form for both new and existing keys.
    words = [f"++{word.lstrip('+')}" if _SETS.match(word) else word for word in overrides]
    SchemaSource.is_typed = False
    try:
        return _composed(words, folders)
    finally:
        # The flag is global in this process: the next composition needs types again.
        SchemaSource.is_typed = True


def _composed(words: Sequence[str], folders: Sequence[str] = ()) -> DictConfig:
    # Hydra refuses to be initialized twice in one process.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("vissl_zero.conf", version_base="1.3", job_name="vissl-zero"):
        return hydra.compose("defaults", [*words, *searchpath_override(folders)])


_SETS = re.compile(r"\+{0,2}(?!hydra\b|config=)[^=/~]+=")
_OF_A_VALUE = re.compile(rf"{_SETS.pattern}|~")


def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the typed configuration of a recipe; arguments and errors as ``compose``."""
    return compose(recipe, overrides).run
