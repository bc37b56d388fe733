"""Where Hydra finds what a run is composed of: the typed tree, and the folders and files of recipes.

The plugins below are registered when the program starts, never discovered: discovery does not see packages installed
with ``pip install -e``. Sources parse a file once for each text that it has, and give copies.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from vissl_zero.atomic import is_there
from vissl_zero.config.copies import Copies
from vissl_zero.config.recipes import recipe_folders, recipe_text
from vissl_zero.config.run_config import new_schema
from vissl_zero.errors import ConfigError

_PACKAGE = "pkg://vissl_zero.conf"
# Providers whose recipes are not for us: classy-vision puts its own into every Hydra program's `config` group.
_FOREIGN = frozenset({"classy_vision"})


class RecipeSearchPath(SearchPathPlugin):
    """Adds our typed tree and folders, and leaves out other packages' recipes."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add to Hydra's search path, which holds its own configuration and the package's."""
        if not any(element.path == _PACKAGE for element in search_path.get_path()):
            return  # another Hydra program in this process
        path = search_path.get_path()
        path[:] = [element for element in path if element.provider not in _FOREIGN]
        search_path.append(provider="vissl_zero", path=f"{SchemaSource.scheme()}://")
        for folder in recipe_folders():
            search_path.append(provider="vissl_zero", path=f"file://{folder}")


class SchemaSource(ConfigSource):
    """Hydra's source of ``root_schema``, the typed tree.

    Not its ConfigStore, which is copied with all trees in it whenever a run is composed, and each tree once more when
    it is read.

    Attributes:
        is_typed: false to compose without types, which refuses no key and no value.
    """

    is_typed: ClassVar[bool] = True

    @staticmethod
    def scheme() -> str:
        """Return what paths of this source begin with."""
        return "schema"

    def load_config(self, config_path: str) -> ConfigResult:
        """Make a tree that Hydra may change; ``config_path`` is one that ``is_config`` accepts."""
        tree = new_schema() if self.is_typed else OmegaConf.create({"VERSION": 1, "node_id": 0, "engine_name": "train"})
        return ConfigResult(self.provider, self.full_path(), tree, {"package": None})

    def is_config(self, config_path: str) -> bool:
        """Check whether a name is the tree's."""
        return self._normalize_file_name(config_path) == "root_schema.yaml"

    def is_group(self, config_path: str) -> bool:
        """Check whether a name is a group's: the tree is in the root."""
        return not config_path

    def available(self) -> bool:
        """Check whether the source can be asked: always."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List the names in a group."""
        return ["root_schema"] if not config_path and results_filter != ObjectType.GROUP else []


@lru_cache(maxsize=256)
def _parsed(source: type[ConfigSource], provider: str, folder: str, config_path: str, _: str) -> Copies[ConfigResult]:
    """Let Hydra read a file; the last argument is the text that it has now."""
    return Copies(source(provider, folder).load_config(config_path))


class PackageFiles(ImportlibResourcesConfigSource):
    """Hydra's source of YAML files in packages."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file of a composition; Hydra calls this for each."""
        text = (files(self.path) / self._normalize_file_name(config_path)).read_text(encoding="utf-8")
        return _parsed(ImportlibResourcesConfigSource, self.provider, self.full_path(), config_path, text).new()


class ModerateFiles(FileConfigSource):
    """Hydra's source of YAML files, which composes none that ``recipe_text`` refuses, wherever it is looked for."""

    def is_config(self, config_path: str) -> bool:
        """Check whether something has the file's name; ``load_config`` names what is no file."""
        path = Path(self.path, self._normalize_file_name(config_path))
        return is_there(path) and not path.is_dir()

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file of a composition, of moderate size; Hydra calls this for each."""
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            text = recipe_text(path)
        except ConfigError as error:
            if is_there(path) and not isinstance(error.__cause__, yaml.YAMLError):
                raise
            return super().load_config(config_path)  # Hydra's own error names the line
        return _parsed(FileConfigSource, self.provider, self.full_path(), config_path, text).new()


# A job of submitit unpickles the registry and lets Hydra register its own sources again, which must have the same name.
PackageFiles.__name__ = ImportlibResourcesConfigSource.__name__
ModerateFiles.__name__ = FileConfigSource.__name__


def register_sources() -> None:
    """Make Hydra ask ``RecipeSearchPath`` whenever it builds a search path, and the sources above.

    Registering again changes nothing.
    """
    plugins = Plugins.instance()  # registers Hydra's own sources
    # The registry's ``register`` keeps the class that came first.
    for source in (SchemaSource, PackageFiles, ModerateFiles):
        SourcesRegistry.instance().types[source.scheme()] = source
    if RecipeSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(RecipeSearchPath)
