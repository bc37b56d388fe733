"""Recipes: where they are looked for, which there are, and the sentence each says about itself.

In this order: the package, the project's ``configs/``, ``./configs``, installed packages (entry-point group
``vissl_zero.recipes``), --config-dir. ``hydra.searchpath`` comes last, as Hydra has it. ``sources.py`` tells Hydra.

In folders of others, such as VISSL's: which files are complete recipes, and what the others are parts of. A file is
complete if it names a trunk, data, an optimizer and a loss; or a trunk, data and how kNN votes, or what another of
VISSL's programs reads, which it is then composed for. One that lacks the loss, or that names a trunk alone, is an
overlay: it is composed on the first complete recipe in the nearest folder above it, as VISSL's ``models/`` are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from vissl_zero.atomic import is_file, read_regular
from vissl_zero.config.programs import PROGRAMS
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import broken_plugin

_RECIPE_GROUP = "vissl_zero.recipes"


def recipe_folders() -> list[Path]:
    """List existing folders with recipes outside the package: of a checkout, the working directory, plugins."""
    checkout = Path(__file__).parents[2]
    folders = [Path("configs").resolve()]
    if (checkout / "setup.py").is_file():
        folders.insert(0, checkout / "configs")
    folders += recipe_packages()[0]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


@cache
def recipe_packages() -> tuple[list[Path], list[Problem]]:
    """List the folders of packages that plugins name, none of them imported; and what is wrong with those left out."""
    folders, broken = [], []
    for entry_point in entry_points(group=_RECIPE_GROUP):
        try:
            spec = find_spec(entry_point.value)
            places = list(spec.submodule_search_locations or []) if spec else []
            if not places:
                raise ModuleNotFoundError(f"there is no package {entry_point.value}")
            folders += [Path(place) for place in places]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - finding a package runs the one above it
            broken.append(broken_plugin(entry_point, error))
    return folders, broken


@dataclass(frozen=True)
class Recipe:
    """A YAML file of the ``config`` group.

    Attributes:
        name: what ``config=`` takes, such as ``pretrain/swav/my_photos``.
        path: the file.
        summary: its first comment after the ``@package`` line.
        is_part: to be added to a recipe with ``+config/<group>=<file>``, as its comment shows; not a run by itself.
    """

    name: str
    path: Path
    summary: str
    is_part: bool

    @property
    def argument(self) -> str:
        """What to write on the command line: ``config=<recipe>``, or ``+config/<group>=<file>`` for a part."""
        group, _, file = self.name.rpartition("/")
        return f"+config/{group}={file}" if self.is_part else f"config={self.name}"


def list_recipes(folders: Sequence[str | Path] = ()) -> list[Recipe]:
    """List all recipes and parts of the package, the project and ``./configs``, in the order in which they are found.

    Args:
        folders: more folders to look in (--config-dir, hydra.searchpath); theirs come first.
    """
    recipes: dict[str, Recipe] = {}
    for root in [*map(Path, folders), *_roots()]:
        for folder, _, names in sorted(os.walk(root / "config")):
            for name in sorted(names):
                path = Path(folder) / name
                if name.endswith(".yaml") and is_file(path):
                    recipe = _read(str(path.relative_to(root / "config").with_suffix("")), path)
                    recipes.setdefault(recipe.name, recipe)
    return list(recipes.values())


def find_recipe(name: str) -> Recipe | None:
    """Find the recipe or part of a name where ``list_recipes`` looks; None where there is none."""
    paths = (root / "config" / f"{name}.yaml" for root in _roots())
    return next((_read(name, path) for path in paths if is_file(path)), None)


def _roots() -> list[Path]:
    return [Path(str(files("vissl_zero.conf"))), *recipe_folders()]


def recipe_names(folders: Sequence[str | Path] = ()) -> list[str]:
    """List the names that ``config=`` takes; ``folders`` as for ``list_recipes``."""
    return [recipe.name for recipe in list_recipes(folders) if not recipe.is_part]


def _read(name: str, path: Path) -> Recipe:
    comments: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith("#"):
                break
            comments.append(line.lstrip("# ").strip())
    text = [comment for comment in comments if not comment.startswith("@package")]
    return Recipe(name, path, text[0] if text else "", any("+config/" in comment for comment in text))


_COMPLETE = {"trunk", "data", "optimizer"}
# Blocks that one of VISSL's programs alone reads.
_PROGRAM_BLOCKS = {
    "SVM.low_shot": "train_svm_low_shot",
    "SVM": "train_svm",
    "CLUSTERFIT": "cluster_features_and_label",
    "IMG_RETRIEVAL": "instance_retrieval_test",
    "LOW_SHOT_BENCHMARK": "low_shot_test",
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_BYTES = 2**22  # the longest of VISSL's recipes has 20 KiB
_MAX_VALUES, _MAX_DEPTH, _MAX_DIGITS = 100_000, 50, 1000


@dataclass(frozen=True)
class RecipeFile:
    """A recipe as ``config=`` takes it, and where it is looked for.

    Attributes:
        overlay: name of a part that is laid over the recipe; empty for none.
        folder: holds ``config/``; empty for recipes that are found without it.
        program: program that the recipe is for, where no ``engine_name`` in it says so: VISSL's SVM recipes.
    """

    recipe: str
    overlay: str = ""
    folder: str = ""
    program: str = ""

    def __str__(self) -> str:
        return f"{self.recipe} + {self.overlay}" if self.overlay else self.recipe

    @property
    def overrides(self) -> list[str]:
        """What the command line would say beyond ``config=``."""
        group, _, choice = self.overlay.rpartition("/")
        words = [f"hydra.searchpath=['file://{self.folder}']"] if self.folder else []
        words += [f"engine_name={self.program}"] if self.program else []
        return [*words, f"+config/{group}={choice}"] if self.overlay else words

    @property
    def file(self) -> Path:
        """The file of the overlay, else of the recipe."""
        return Path(self.folder) / "config" / f"{self.overlay or self.recipe}.yaml"


def recipe_files(folder: Path, with_parts: bool = False) -> Iterator[RecipeFile]:
    """Yield every recipe in ``folder`` and below it, each overlay on its base.

    Args:
        folder: ``config/`` of a tree of recipes, or any folder below it.
        with_parts: also files that name no more than a trunk.
    Raises:
        ConfigError: no folder above is called ``config``.
    """
    root = _config_folder(folder)
    # Bases may stand above the folder that is asked for.
    inside = sorted(folder.rglob("*.yaml"))
    above = [file for parent in folder.parents if parent.is_relative_to(root) for file in sorted(parent.glob("*.yaml"))]
    blocks = {file: _blocks(file) for file in (*inside, *above)}
    bases = [file for file, names in blocks.items() if names >= _COMPLETE | {"loss"}]

    def name(file: Path) -> str:
        return file.relative_to(root).with_suffix("").as_posix()

    for file in inside:
        if file in bases or (blocks[file] and _begins_with_recipe(file)):
            yield RecipeFile(name(file), "", str(root.parent), _program(_tree(file)))
            continue
        is_overlay = blocks[file] >= _COMPLETE or (with_parts and "trunk" in blocks[file])
        if is_overlay and (base := _base(file, bases)):
            yield RecipeFile(name(base), name(file), str(root.parent), _program(_tree(base)))


def recipe_file(path: Path) -> RecipeFile:
    """Read one YAML file as a recipe, on its base if it is an overlay. Errors as for ``recipe_files``."""
    path = path.absolute()
    root = _config_folder(path.parent)
    name = path.relative_to(root).with_suffix("").as_posix()
    if _blocks(path) >= _COMPLETE | {"loss"} or _begins_with_recipe(path):
        return RecipeFile(name, "", str(root.parent), _program(_tree(path)))
    around = [file for parent in path.parents if parent.is_relative_to(root) for file in sorted(parent.glob("*.yaml"))]
    base = _base(path, [file for file in around if _blocks(file) >= _COMPLETE | {"loss"}])
    if base is None:
        return RecipeFile(name, folder=str(root.parent))
    return RecipeFile(base.relative_to(root).with_suffix("").as_posix(), name, str(root.parent), _program(_tree(base)))


def recipe_text(path: Path) -> str:
    """Read a recipe file, which may be anyone's: Hydra would unfold aliases for ever, or end in a traceback.

    Raises:
        ConfigError: it is no regular file of YAML, or larger or deeper than any recipe is.
    """
    try:
        text = read_regular(path, _MAX_BYTES, follow_links=True).decode()
        require_moderate(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        must = f"must be a recipe that can be read ({reason})"
        raise ConfigError([Problem(str(path), "", must, "Correct the file.")]) from error
    return text


@lru_cache(maxsize=256)
def require_moderate(text: str) -> None:
    """Count values with aliases unfolded, without unfolding them. Raises ValueError, YAMLError."""
    sizes: dict[str, int] = {}
    blocks: list[tuple[str | None, int]] = [(None, 0)]  # anchor and values so far, of every block that is open
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            blocks.append((event.anchor, 1))
            size = 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = blocks.pop()
            sizes[anchor or ""] = size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias *{event.anchor} has no anchor before it, or stands in its own block")
            size = sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            size = sizes[event.anchor or ""] = 1
            if len(event.value) > _MAX_DIGITS and event.value.strip("+-").isdecimal():
                raise ValueError(f"it has a number of more than {_MAX_DIGITS} digits")
        else:
            size = 0
        outer, values = blocks[-1]
        blocks[-1] = (outer, values + size)
        if len(blocks) > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        if values + size > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES:,} values, with aliases unfolded")


def _config_folder(folder: Path) -> Path:
    """Find the folder ``config`` that recipe names begin below: the nearest at or above ``folder``."""
    folder = folder.absolute()
    for candidate in (folder, *folder.parents):
        if candidate.name == "config":
            return candidate
    fix = "Recipes are named by their path below a folder called config: move them there, or name a recipe."
    raise ConfigError([Problem("recipes", repr(str(folder)), "must stand in or below a folder called config", fix)])


def _begins_with_recipe(file: Path) -> bool:
    """Check whether a file names its own base: ``defaults: [/config/<recipe>]``."""
    tree = _tree(file)
    defaults = tree.get("defaults") if isinstance(tree, dict) else None
    return any(str(name).startswith("/config/") for name in (defaults if isinstance(defaults, list) else ()))


def _base(file: Path, bases: list[Path]) -> Path | None:
    """Find the complete recipe, one of ``bases``, in the nearest folder above a file; None where there is none."""
    return next((base for folder in file.parents for base in bases if base.parent == folder and base != file), None)


def _blocks(file: Path) -> set[str]:
    """Find which of trunk, data, optimizer and loss a file names; nothing where it is no YAML of ours."""
    tree = _tree(file)
    config = _block(tree, "config")
    data = _block(config, "DATA")
    blocks = {"trunk"} if _block(_block(config, "MODEL"), "TRUNK").get("NAME") else set()
    blocks |= {"data"} if data.get("TRAIN") or data.get("TEST") else set()
    blocks |= {"optimizer"} if config.get("OPTIMIZER") else set()
    # Recipes of VISSL's programs train nothing, so that they name neither.
    engine = tree.get("engine_name") if isinstance(tree, dict) else None
    is_of_program = (
        _block(config, "NEAREST_NEIGHBOR") or _program(tree) or (isinstance(engine, str) and engine in PROGRAMS)
    )
    names_images = _block(data, "TRAIN").get("DATA_SOURCES") or _block(config, "IMG_RETRIEVAL")
    if names_images and is_of_program and "trunk" in blocks:
        blocks |= {"data", "optimizer", "loss"}
    return blocks | ({"loss"} if _block(config, "LOSS").get("name") else set())


def _program(tree: Any) -> str:
    """Infer the program that a file's blocks are for; empty where it says so itself, or is for none."""
    config = _block(tree, "config")
    if isinstance(tree, dict) and tree.get("engine_name"):
        return ""
    return next((program for block, program in _PROGRAM_BLOCKS.items() if _block_at(config, block)), "")


def _block_at(config: dict[str, Any], path: str) -> dict[str, Any]:
    for part in path.split("."):
        config = _block(config, part)
    return config


def _tree(file: Path) -> Any:
    try:
        return yaml.load(recipe_text(file), _LOADER)  # noqa: S506 - a safe loader
    except (ConfigError, yaml.YAMLError, TypeError, ValueError):  # keys that are lists, dates that are none
        return None


def _block(tree: Any, key: str) -> dict[str, Any]:
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, dict) else {}
