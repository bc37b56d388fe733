"""From a recipe's name and overrides to a typed configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.catalogue import find_catalogue, use_catalogue
from vissl_zero.config.composition_errors import EXPLAINABLE, added_keys, every_mistake, explain, of_another_program
from vissl_zero.config.derive.data_plan import use_own_images
from vissl_zero.config.derive.measuring import begin_program
from vissl_zero.config.recipes import recipe_folders, register_search_path
from vissl_zero.config.run_config import RunConfig, schema
from vissl_zero.config.vissl import use_own_names, without_vissl_keys
from vissl_zero.config.vissl_programs import ELSEWHERE, PROGRAMS, TRAIN
from vissl_zero.errors import ConfigError, Problem, did_you_mean

_ITEMS: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "list[str]": (str, "texts", "[a,b]"),
    "list[int]": (int, "whole numbers", "[1,2]"),
    "list[float]": ((int, float), "numbers", "[0.1,0.2]"),
}
# Run folders, and those above them, that Hydra made: removed again where a run comes to nothing.
new_folders: set[Path] = set()


@cache  # building the schema's node takes a fifth of a second
def register() -> None:
    """Register the schema, the search path and the resolvers. Repeating it does nothing."""
    ConfigStore.instance().store(name="root_schema", node=schema(), provider="vissl_zero")
    register_search_path()
    # Cached, because the name holds the time: every reader must get the same folder.
    OmegaConf.register_new_resolver("vissl_zero_run_dir", _run_dir, replace=True, use_cache=True)


def _run_dir(chosen: str | None, recipe: str | None) -> str:
    """The folder Hydra makes for a single run: CHECKPOINT.DIR, or a new one under runs/."""
    if chosen:
        folder = Path(chosen).expanduser()
        remember_new(folder)
        return str(folder)
    # To the millisecond: runs that a script starts side by side must not share a folder.
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
        run: typed, every ``${...}`` resolved, VISSL's second names replaced.
        written: the same tree as plain containers, with every ``${...}`` as it was written.
        recipe: what ``config=`` named.
        node_id: number of this machine, from 0.
        notes: sentences to say once.
    """

    run: RunConfig
    written: dict[str, Any]
    recipe: str
    node_id: int = 0
    notes: tuple[str, ...] = ()

    def user_yaml(self) -> str:
        """Text of ``config.user.yaml``: a recipe that gives this run again, interpolations unresolved."""
        tree = OmegaConf.to_yaml({"config": without_vissl_keys(self.written)})
        return f"# @package _global_\n# {self.recipe}, as composed.\n{tree}"


def typed(
    cfg: DictConfig, recipe: str, overrides: Sequence[str] = (), folders: Sequence[Path] | None = None
) -> Composed:
    """A composed tree (the root that holds ``config:``) as dataclasses.

    Args:
        cfg: what Hydra composed.
        recipe: what ``config=`` named.
        overrides: of the command line.
        folders: in which Hydra looked for recipes, those of the command line first; unset: those that
            ``overrides`` name and ``recipe_folders()``.
    Raises:
        ConfigError: an interpolation cannot be resolved or a value is missing.
    """
    if problems := added_keys(cfg) or _other_programs(cfg):
        raise ConfigError(problems)
    try:
        run = OmegaConf.to_object(cfg.config)
        written = OmegaConf.to_container(cfg.config, resolve=False)
    except EXPLAINABLE as error:
        raise explain(error) from error
    assert isinstance(run, RunConfig) and isinstance(written, dict)
    if problems := one_or_many(run):
        raise ConfigError(problems)
    if cfg.engine_name != TRAIN:
        begin_program(run, cfg.engine_name)
        # ``config.user.yaml`` holds no root keys, and must name the program when it is composed again.
        written["PROGRAM"] = cfg.engine_name
    elif run.PROGRAM in PROGRAMS:
        begin_program(run, run.PROGRAM)
    chosen = {word.split("=")[0].lstrip("+").removeprefix("config.") for word in overrides}
    notes = use_own_names(run, chosen) + use_own_images(run.DATA, chosen)
    notes += use_catalogue(run.DATA, find_catalogue(_named_folders(overrides) if folders is None else folders))
    if not 0 <= cfg.node_id < max(1, run.DISTRIBUTED.NUM_NODES):
        must = f"must be 0 to {run.DISTRIBUTED.NUM_NODES - 1}, as there are {run.DISTRIBUTED.NUM_NODES} machines"
        fix = "Give each machine its own number; config.DISTRIBUTED.NUM_NODES is their number."
        raise ConfigError([Problem("node_id", str(cfg.node_id), must, fix)])
    return Composed(run, {str(key): value for key, value in written.items()}, recipe, cfg.node_id, tuple(notes))


def _named_folders(overrides: Sequence[str]) -> list[Path]:
    """Folders outside of packages in which recipes are looked for, those of the command line first."""
    words = [word for word in overrides if word.startswith("hydra.searchpath=")]
    values = [override.value() for override in OverridesParser.create().parse_overrides(words)]
    named = [str(path) for value in values if isinstance(value, list) for path in value]
    return [*(Path(path.removeprefix("file://")) for path in named), *recipe_folders()]


def one_or_many(block: Any, path: str = "config") -> list[Problem]:
    """Make a single text a list of one wherever a field takes both, in place.

    Returns:
        What is neither, and blocks in whose place an interpolation put a value.
    """
    problems: list[Problem] = []
    for item in fields(block):
        key, value = f"{path}.{item.name}", getattr(block, item.name)
        if is_dataclass(value):
            problems += one_or_many(value, key)
        elif isinstance(item.default_factory, type) and is_dataclass(item.default_factory):
            problems.append(Problem(key, repr(value), "must be a block of keys", f"Write {key}.<key>=<value>."))
        elif str(item.type).startswith("dict[") and not isinstance(value, dict):
            problems.append(Problem(key, repr(value), "must be a block of keys", f"Write {key}={{a: 1}}."))
        elif "texts" in item.metadata:
            values = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(text, (str, int, float)) for text in values):
                problems.append(
                    Problem(key, str(value), "must be a string or a list of strings", f"Write {key}=[a,b].")
                )
            setattr(block, item.name, [str(text) for text in values])
        elif item.type in _ITEMS and value is not None:  # OmegaConf lets lists and blocks pass as items
            kind, words, example = _ITEMS[str(item.type)]
            if not all(isinstance(part, kind) for part in value):
                problems.append(Problem(key, str(value), f"must be a list of {words}", f"Write {key}={example}."))
    return problems


def plain_words(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra takes them: ``a[1].b=2`` becomes ``a.1.b=2``, ``DIR=/home/jörg`` gets quotes."""
    words = []
    for word in overrides:
        key, equals, value = word.partition("=")
        words.append(re.sub(r"\[(\d+)\]", r".\1", key) + equals + _quoted(value))
    return words


# A path may hold what is syntax to Hydra (`/photos (2)`). A comma may be meant as a sweep, quotes as quotes.
_ODD_PATH = re.compile(r"(?=.*[^\w/ .:+\-@%*?|$])(/|\.\.?/|~/)[^,'\"\\$]*")


def _quoted(value: str) -> str:
    """A plain value, or each item of a list, in the quotes that Hydra's grammar asks for."""
    if _ODD_PATH.fullmatch(value):
        return f"'{value}'"
    if value.startswith("[") and value.endswith("]") and not {*value[1:-1]} & {*"'\"\\[]{}$"}:
        return f"[{','.join(_quoted(item.strip()) for item in value[1:-1].split(','))}]"
    return value if value.isascii() or {*value} & {*"'\"\\(){}[],"} else f"'{value}'"


def _other_programs(cfg: DictConfig) -> list[Problem]:
    """VISSL's other programs, which a recipe's root names."""
    found = []
    if cfg.engine_name not in (TRAIN, *PROGRAMS):
        found.append(unknown_engine(cfg.engine_name))
    if cfg.VERSION != 1:
        found.append(Problem("VERSION", repr(cfg.VERSION), "must be 1", "Use a recipe of version 1."))
    return found


def unknown_engine(name: object) -> Problem:
    """An ``engine_name`` that is none of ours."""
    known = [TRAIN, *PROGRAMS]
    if why := ELSEWHERE.get(str(name)):
        return Problem("engine_name", repr(name), "must be a program that is here", why)
    return Problem("engine_name", repr(name), f"must be {' or '.join(known)}", did_you_mean(str(name), known).strip())


def compose(recipe: str, overrides: Sequence[str] = ()) -> Composed:
    """Compose as the command line does, without starting anything.

    Args:
        recipe: what ``config=`` would name.
        overrides: such as ``config.ZERO.LEVEL=3`` or ``+config/zero=fsdp``.
    Raises:
        ConfigError: an unknown recipe, a mistyped key or a mistyped value.
    """
    register()
    # Hydra refuses to be initialised twice in one process.
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("vissl_zero.conf", version_base="1.3", job_name="vissl-zero"):
            words = plain_words(overrides)
            cfg = hydra.compose("defaults", [f"config={recipe}", *words])
            return typed(cfg, recipe, words)
    except EXPLAINABLE as error:
        raise explained(error, [f"config={recipe}", *overrides]) from error


def explained(error: BaseException, overrides: Sequence[str], folders: Sequence[str] = ()) -> ConfigError:
    """What composing refused as one ConfigError: every mistyped key and value, though Hydra stops at the first.

    Args:
        error: of ``EXPLAINABLE`` or ``BEFORE_A_JOB``.
        overrides: of the command line, ``config=`` too.
        folders: that --config-dir and hydra.searchpath name.
    """
    first = explain(error, folders)
    try:
        tree = untyped(plain_words(overrides), folders)
        found = of_another_program(tree)
        if found:
            return ConfigError(found)
        found = every_mistake(tree)
    except Exception:  # noqa: BLE001 - what is wrong beyond the first mistake cannot be composed either
        return first
    # Where even the first mistake is not found again, the untyped tree is not what the user meant.
    return ConfigError(found) if first.problems[0].key in [problem.key for problem in found] else first


def untyped(overrides: Sequence[str], folders: Sequence[str] = ()) -> DictConfig:
    """The same composition without types, which refuses no key and no value; arguments as for ``explained``."""
    register()
    is_value = re.compile(r"\+{0,2}(?!hydra\b|config=)[^=/~]+=")
    # Without the types most keys do not exist yet, and ``++`` is Hydra's only form that takes both kinds.
    words = [f"++{word.lstrip('+')}" if is_value.match(word) else word for word in overrides]
    if folders:
        words.append(f"hydra.searchpath=[{','.join(f'file://{Path(folder).absolute()}' for folder in folders)}]")
    GlobalHydra.instance().clear()
    store = ConfigStore.instance()
    typed_node = store.repo["root_schema.yaml"]
    store.store(name="root_schema", node={"VERSION": 1, "node_id": 0, "engine_name": "train"}, provider="vissl_zero")
    try:
        with hydra.initialize_config_module("vissl_zero.conf", version_base="1.3", job_name="vissl-zero"):
            return hydra.compose("defaults", words)
    finally:
        # The store is the process's: whoever composes next needs the types again.
        store.repo["root_schema.yaml"] = typed_node


def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The typed configuration of a recipe; arguments and errors as ``compose``."""
    return compose(recipe, overrides).run
