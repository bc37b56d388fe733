"""Hydra's sources of a configuration: the typed tree, and the folders and files of recipes.

The plugins below are registered at the start of the program, because Hydra's discovery does not find packages
installed with ``pip install -e``. Sources cache parsed files by their text, and return copies.
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
from omegaconf import DictConfig, OmegaConf

from vissl_zero.atomic import is_there
from vissl_zero.config.copies import Copies
from vissl_zero.config.recipes import recipe_folders, recipe_text
from vissl_zero.config.run_config import new_schema
from vissl_zero.errors import ConfigError
from vissl_zero.vissl.keys import move_blocks

_PACKAGE = "pkg://vissl_zero.conf"
# Providers whose recipes are ignored: classy-vision adds its own to the ``config`` group of every Hydra program.
_FOREIGN = frozenset({"classy_vision"})


class RecipeSearchPath(SearchPathPlugin):
    """Adds the typed tree and the folders of recipes to Hydra's search path, and removes other packages' recipes."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change Hydra's search path, which has Hydra's own configuration and the package's."""
        if not any(element.path == _PACKAGE for element in search_path.get_path()):
            return  # another Hydra program in this process
        path = search_path.get_path()
        path[:] = [element for element in path if element.provider not in _FOREIGN]
        search_path.append(provider="vissl_zero", path=f"{SchemaSource.scheme()}://")
        for folder in recipe_folders():
            search_path.append(provider="vissl_zero", path=f"file://{folder}")


class SchemaSource(ConfigSource):
    """Hydra's source of ``root_schema``, the typed tree.

    Attributes:
        is_typed: False composes without types, so that any key and any value is accepted.
    """

    # Hydra's ConfigStore is not used: Hydra copies it with all its trees for every composition, and each tree again.
    is_typed: ClassVar[bool] = True

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source's paths."""
        return "schema"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a new tree, which Hydra may change."""
        tree = new_schema() if self.is_typed else OmegaConf.create({"VERSION": 1, "node_id": 0, "engine_name": "train"})
        return ConfigResult(self.provider, self.full_path(), tree, {"package": None})

    def is_config(self, config_path: str) -> bool:
        """Check whether a name is ``root_schema``."""
        return self._normalize_file_name(config_path) == "root_schema.yaml"

    def is_group(self, config_path: str) -> bool:
        """Check whether a name is a group: only the root is, which has the tree."""
        return not config_path

    def available(self) -> bool:
        """Return True: the source is always available."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group."""
        return ["root_schema"] if not config_path and results_filter != ObjectType.GROUP else []


@lru_cache(maxsize=256)
def _parsed(source: type[ConfigSource], provider: str, folder: str, config_path: str, _: str) -> Copies[ConfigResult]:
    """Parse a file by Hydra. The last argument is the file's text, so that the cache misses if it has changed."""
    result = source(provider, folder).load_config(config_path)
    if isinstance(result.config, DictConfig):
        move_blocks(result.config)
    return Copies(result)


class PackageFiles(ImportlibResourcesConfigSource):
    """Hydra's source of YAML files in packages."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file of a composition."""
        text = (files(self.path) / self._normalize_file_name(config_path)).read_text(encoding="utf-8")
        return _parsed(ImportlibResourcesConfigSource, self.provider, self.full_path(), config_path, text).new()


class ModerateFiles(FileConfigSource):
    """Hydra's source of YAML files in folders, with the limits of ``recipe_text``."""

    def is_config(self, config_path: str) -> bool:
        """Check whether the file exists; ``load_config`` reports what is not a regular file."""
        path = Path(self.path, self._normalize_file_name(config_path))
        return is_there(path) and not path.is_dir()

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file of a composition. Raises ConfigError for files that ``recipe_text`` refuses."""
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            text = recipe_text(path)
        except ConfigError as error:
            if is_there(path) and not isinstance(error.__cause__, yaml.YAMLError):
                raise
            return super().load_config(config_path)  # Hydra's own error names the line
        return _parsed(FileConfigSource, self.provider, self.full_path(), config_path, text).new()


# Hydra registers its sources again in a job of submitit, after unpickling the registry; the names must be equal then.
PackageFiles.__name__ = ImportlibResourcesConfigSource.__name__
ModerateFiles.__name__ = FileConfigSource.__name__


def register_sources() -> None:
    """Register ``RecipeSearchPath`` and the sources above with Hydra. Idempotent."""
    plugins = Plugins.instance()  # registers Hydra's own sources
    # Not by the registry's ``register``, which keeps the class that was registered first.
    for source in (SchemaSource, PackageFiles, ModerateFiles):
        SourcesRegistry.instance().types[source.scheme()] = source
    if RecipeSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(RecipeSearchPath)
