"""Recipes: where they are looked for, which there are, and the sentence each says about itself.

In this order: the package, the project's ``configs/``, ``./configs``, installed packages (entry-point group
``vissl_zero.recipes``), --config-dir. ``hydra.searchpath`` comes last, as Hydra has it. The plugin below is registered
when the program starts, never discovered: discovery does not see packages installed with ``pip install -e``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from vissl_zero.errors import Problem
from vissl_zero.registry import broken_plugin

RECIPE_GROUP = "vissl_zero.recipes"
PACKAGE = "pkg://vissl_zero.conf"
# Providers whose recipes are not for us: classy-vision puts its own into every Hydra program's `config` group.
_FOREIGN = frozenset({"classy_vision"})


class RecipeSearchPath(SearchPathPlugin):
    """Adds our folders and leaves out other packages' recipes."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra with a path that holds Hydra's own configuration and the package's."""
        if not any(element.path == PACKAGE for element in search_path.get_path()):
            return  # another Hydra program in this process
        path = search_path.get_path()
        path[:] = [element for element in path if element.provider not in _FOREIGN]
        for folder in recipe_folders():
            search_path.append(provider="vissl_zero", path=f"file://{folder}")


def recipe_folders() -> list[Path]:
    """Existing folders with recipes outside the package: of a source checkout, the working directory, plugins."""
    checkout = Path(__file__).parents[2]
    folders = [Path("configs").resolve()]
    if (checkout / "setup.py").is_file():
        folders.insert(0, checkout / "configs")
    folders += recipe_packages()[0]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


@cache
def recipe_packages() -> tuple[list[Path], list[Problem]]:
    """Folders of the packages that plugins name, none of them imported; and what is wrong with those left out."""
    folders, broken = [], []
    for entry_point in entry_points(group=RECIPE_GROUP):
        try:
            spec = find_spec(entry_point.value)
            places = list(spec.submodule_search_locations or []) if spec else []
            if not places:
                raise ModuleNotFoundError(f"there is no package {entry_point.value}")
            folders += [Path(place) for place in places]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - finding a package runs the one above it
            broken.append(broken_plugin(entry_point, error))
    return folders, broken


def register_search_path() -> None:
    """Make Hydra ask ``RecipeSearchPath`` whenever it builds a search path. Registering again changes nothing."""
    if RecipeSearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(RecipeSearchPath)


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
    """All recipes and parts of the package, the project and ``./configs``, in the order in which they are found.

    Args:
        folders: more folders to look in (--config-dir, hydra.searchpath); theirs come first.
    """
    roots = [*map(Path, folders), Path(str(files("vissl_zero.conf"))), *recipe_folders()]
    found: dict[str, Recipe] = {}
    for root in roots:
        for folder, _, names in sorted(os.walk(root / "config")):
            for name in sorted(names):
                if name.endswith(".yaml"):
                    path = Path(folder) / name
                    recipe = _read(str(path.relative_to(root / "config").with_suffix("")), path)
                    found.setdefault(recipe.name, recipe)
    return list(found.values())


def recipe_names(folders: Sequence[str | Path] = ()) -> list[str]:
    """Names that ``config=`` takes; ``folders`` as for ``list_recipes``."""
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
