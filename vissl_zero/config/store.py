"""Make the typed tree and our resolvers known to Hydra and OmegaConf."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from vissl_zero.config.run import Root
from vissl_zero.config.search_path import register_search_path

# Run folders that were not there before Hydra made them: to be taken back where a run comes to nothing.
new_folders: set[Path] = set()


@cache  # building the schema's node takes a fifth of a second
def register() -> None:
    """Register the schema, the search path and the resolvers. Repeating it does nothing."""
    ConfigStore.instance().store(name="root_schema", node=Root, provider="vissl_zero")
    register_search_path()
    OmegaConf.register_new_resolver("vissl_zero_run_dir", _run_dir, replace=True, use_cache=True)


def _run_dir(chosen: str | None, recipe: str | None) -> str:
    """The folder Hydra makes for a single run: CHECKPOINT.DIR, or a new one under runs/."""
    if chosen:
        folder = Path(chosen).expanduser()
        if not folder.exists():
            new_folders.add(folder.absolute())
        return str(folder)
    # To the millisecond: runs that a script starts side by side must not share a folder.
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
    return f"runs/{stamp}_{(recipe or 'several').replace('/', '-')}"  # config=[a,b] has no one name
