"""Which recipes there are, and the sentence each says about itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from vissl_zero.config.search_path import recipe_folders


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


def list_recipes() -> list[Recipe]:
    """All recipes and parts of the package, the project and ``./configs``, in the order in which they are found."""
    roots = [Path(str(files("vissl_zero.conf"))), *recipe_folders()]
    found: dict[str, Recipe] = {}
    for root in roots:
        for folder, _, names in sorted(os.walk(root / "config")):
            for name in sorted(names):
                if name.endswith(".yaml"):
                    path = Path(folder) / name
                    recipe = _read(str(path.relative_to(root / "config").with_suffix("")), path)
                    found.setdefault(recipe.name, recipe)
    return list(found.values())


def recipe_names() -> list[str]:
    """Names that ``config=`` takes."""
    return [recipe.name for recipe in list_recipes() if not recipe.is_part]


def _read(name: str, path: Path) -> Recipe:
    comments: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith("#"):
                break
            comments.append(line.lstrip("# ").strip())
    text = [comment for comment in comments if not comment.startswith("@package")]
    return Recipe(name, path, text[0] if text else "", any("+config/" in comment for comment in text))
