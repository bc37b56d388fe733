"""Find recipes, list them with their summaries, and tell complete recipes from parts.

Recipes are searched in this order: the package, the project's ``configs/``, ``./configs``, installed packages
(entry-point group ``vissl_zero.recipes``), --config-dir, ``hydra.searchpath``. ``sources.py`` registers it with Hydra.

In other projects' folders, such as VISSL's, a file is a complete recipe if it names a trunk, data, an optimizer and a
loss; or a trunk, data and the block of one of VISSL's programs. A file without a loss, or with a trunk alone, is an
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
from vissl_zero.config.override_words import searchpath_override
from vissl_zero.config.programs import PROGRAMS
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import broken_plugin

_RECIPE_GROUP = "vissl_zero.recipes"


def recipe_folders() -> list[Path]:
    """Return existing folders of recipes outside the package: of a checkout, the working directory and plugins."""
    checkout = Path(__file__).parents[2]
    folders = [Path("configs").resolve()]
    # Of an installed package, the folder above is site-packages, whose configs/ are not ours.
    if (checkout / "setup.py").is_file():
        folders.insert(0, checkout / "configs")
    folders += recipe_packages()[0]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


@cache
def recipe_packages() -> tuple[list[Path], list[Problem]]:
    """Return the folders of packages that plugins name, without importing them, and problems of broken plugins."""
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
        name: the value for ``config=``, such as ``pretrain/swav/my_photos``.
        path: path of the file.
        summary: first comment after the ``@package`` line.
        is_part: the file is not a whole run: it is added to a recipe with ``+config/<group>=<file>``.
    """

    name: str
    path: Path
    summary: str
    is_part: bool

    @property
    def argument(self) -> str:
        """Return the command-line argument: ``config=<recipe>``, or ``+config/<group>=<file>`` for a part."""
        group, _, file = self.name.rpartition("/")
        return f"+config/{group}={file}" if self.is_part else f"config={self.name}"


def list_recipes(folders: Sequence[str | Path] = ()) -> list[Recipe]:
    """Return all recipes and parts of the package, the project, ``./configs`` and plugins, in search order.

    Args:
        folders: additional folders (--config-dir, hydra.searchpath), which are searched first.
    """
    recipes: dict[str, Recipe] = {}
    for root in [*map(Path, folders), *_roots()]:
        for folder, _, names in sorted(os.walk(root / "config")):
            for name in sorted(names):
                path = Path(folder) / name
                if name.endswith(".yaml") and is_file(path):
                    recipe = _read(str(path.relative_to(root / "config").with_suffix("")), path)
                    # The first file of a name counts, as in Hydra's search path.
                    recipes.setdefault(recipe.name, recipe)
    return list(recipes.values())


def find_recipe(name: str) -> Recipe | None:
    """Return the recipe or part of a name, in the folders of ``list_recipes``; None if there is none."""
    paths = (root / "config" / f"{name}.yaml" for root in _roots())
    return next((_read(name, path) for path in paths if is_file(path)), None)


def _roots() -> list[Path]:
    return [Path(str(files("vissl_zero.conf"))), *recipe_folders()]


def recipe_names(folders: Sequence[str | Path] = ()) -> list[str]:
    """Return the names for ``config=``; ``folders`` as for ``list_recipes``."""
    return [recipe.name for recipe in list_recipes(folders) if not recipe.is_part]


def _read(name: str, path: Path) -> Recipe:
    comments: list[str] = []
    # Only the comments at its top: parsing the hundreds of recipes would take seconds.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith("#"):
                break
            comments.append(line.lstrip("# ").strip())
    text = [comment for comment in comments if not comment.startswith("@package")]
    return Recipe(name, path, text[0] if text else "", any("+config/" in comment for comment in text))


_COMPLETE = {"trunk", "data", "optimizer"}
# Block -> the one program of VISSL that reads it.
_PROGRAM_BLOCKS = {
    # The first that a file has counts, so this one stands before the block around it.
    "SVM.low_shot": "train_svm_low_shot",
    "SVM": "train_svm",
    "CLUSTERFIT": "cluster_features_and_label",
    "IMG_RETRIEVAL": "instance_retrieval_test",
    "LOW_SHOT_BENCHMARK": "low_shot_test",
}
# libyaml is many times faster, but not every build of PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_BYTES = 2**22  # the longest of VISSL's recipes has 20 KiB
_MAX_VALUES, _MAX_DEPTH, _MAX_DIGITS = 100_000, 50, 1000


@dataclass(frozen=True)
class RecipeFile:
    """The arguments that compose a recipe file.

    Attributes:
        recipe: name of the recipe, as for ``config=``.
        overlay: name of a part that is composed on the recipe; empty: none.
        folder: folder with ``config/``; empty: the recipe is in the default folders.
        program: program of a recipe without ``engine_name``, such as VISSL's SVM recipes.
    """

    recipe: str
    overlay: str = ""
    folder: str = ""
    program: str = ""

    def __str__(self) -> str:
        return f"{self.recipe} + {self.overlay}" if self.overlay else self.recipe

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the command line in addition to ``config=``."""
        group, _, choice = self.overlay.rpartition("/")
        words = searchpath_override([self.folder] if self.folder else [])
        words += [f"engine_name={self.program}"] if self.program else []
        return [*words, f"+config/{group}={choice}"] if self.overlay else words

    @property
    def file(self) -> Path:
        """Return the file of the overlay, or of the recipe without one."""
        return Path(self.folder) / "config" / f"{self.overlay or self.recipe}.yaml"


def recipe_files(folder: Path, with_parts: bool = False) -> Iterator[RecipeFile]:
    """Yield every recipe in ``folder`` and its subfolders, overlays with their base.

    Args:
        folder: ``config/`` of a tree of recipes, or any folder below it.
        with_parts: also yield files that name only a trunk.
    Raises:
        ConfigError: no folder above is called ``config``.
    """
    root = _config_folder(folder)
    # The base of an overlay may be in a folder above ``folder``.
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
    """Return the arguments that compose one YAML file, on its base if it is an overlay. Raises as ``recipe_files``."""
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
    """Read the text of a recipe file, with limits that make untrusted files safe to parse.

    Raises:
        ConfigError: it is not a regular file of YAML, or too large or too deep for a recipe.
    """
    # Without the limits, Hydra would expand nested aliases without end.
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
    """Raise ValueError if YAML is too deep, or too large with aliases expanded; YAMLError if it is no YAML."""
    sizes: dict[str | None, int] = {}  # anchor -> number of values
    blocks: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, number of values so far) of each open block
    # By events, which build nothing, however large the file would become.
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            blocks.append((event.anchor, 1))
            size = 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = blocks.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias *{event.anchor} has no anchor before it, or stands in its own block")
            size = sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            size = sizes[event.anchor] = 1
            # Python refuses to convert more than 4,300 digits, with an error that names no key.
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
    """Return the nearest folder called ``config`` at or above ``folder``; names of recipes are relative to it."""
    folder = folder.absolute()
    for candidate in (folder, *folder.parents):
        if candidate.name == "config":
            return candidate
    fix = "Recipes are named by their path below a folder called config: move them there, or name a recipe."
    raise ConfigError([Problem("recipes", repr(str(folder)), "must stand in or below a folder called config", fix)])


def _begins_with_recipe(file: Path) -> bool:
    """Check whether a file names its base itself: ``defaults: [/config/<recipe>]``."""
    tree = _tree(file)
    defaults = tree.get("defaults") if isinstance(tree, dict) else None
    return any(str(name).startswith("/config/") for name in (defaults if isinstance(defaults, list) else ()))


def _base(file: Path, bases: list[Path]) -> Path | None:
    """Return the first of ``bases`` in the nearest folder above a file; None if there is none."""
    return next((base for folder in file.parents for base in bases if base.parent == folder), None)


def _blocks(file: Path) -> set[str]:
    """Return which of trunk, data, optimizer and loss a file has; empty if it is not a recipe."""
    tree = _tree(file)
    config = _block(tree, "config")
    data = _block(config, "DATA")
    blocks = {"trunk"} if _block(_block(config, "MODEL"), "TRUNK").get("NAME") else set()
    blocks |= {"data"} if data.get("TRAIN") or data.get("TEST") else set()
    blocks |= {"optimizer"} if config.get("OPTIMIZER") else set()
    # Recipes of VISSL's programs train nothing: they are complete without an optimizer and a loss.
    engine = tree.get("engine_name") if isinstance(tree, dict) else None
    is_of_program = (
        _block(config, "NEAREST_NEIGHBOR") or _program(tree) or (isinstance(engine, str) and engine in PROGRAMS)
    )
    names_images = _block(data, "TRAIN").get("DATA_SOURCES") or _block(config, "IMG_RETRIEVAL")
    if names_images and is_of_program and "trunk" in blocks:
        blocks |= {"data", "optimizer", "loss"}
    return blocks | ({"loss"} if _block(config, "LOSS").get("name") else set())


def _program(tree: Any) -> str:
    """Return the program that reads a file's blocks; empty if ``engine_name`` is set, or no program needs them."""
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
    except (ConfigError, yaml.YAMLError, TypeError, ValueError):  # such as keys that are lists, and impossible dates
        return None


def _block(tree: Any, key: str) -> dict[str, Any]:
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, dict) else {}
