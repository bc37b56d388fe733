"""Where recipes are looked for, in order: the package, the project's ``configs/``, ``./configs``, --config-dir.

``hydra.searchpath`` comes last, as Hydra has it. The plugin below is registered by us when the program starts, never
discovered: discovery does not see packages installed with ``pip install -e``.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

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
    """Existing folders with recipes outside the package: of a source checkout, and of the working directory."""
    checkout = Path(__file__).parents[2]
    folders = [Path("configs").resolve()]
    if (checkout / "setup.py").is_file():
        folders.insert(0, checkout / "configs")
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def register_search_path() -> None:
    """Make Hydra ask ``RecipeSearchPath`` whenever it builds a search path. Registering again changes nothing."""
    if RecipeSearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(RecipeSearchPath)
