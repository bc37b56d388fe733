"""From a recipe's name and overrides to a typed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from vissl_zero.config.explain import EXPLAINABLE, explain
from vissl_zero.config.plain_tree import without_vissl_keys
from vissl_zero.config.run import RunConfig
from vissl_zero.config.store import register
from vissl_zero.config.unknown_key import added_keys
from vissl_zero.config.vissl_twins import use_own_names
from vissl_zero.errors import ConfigError, Problem


@dataclass(frozen=True)
class Composed:
    """A composed recipe.

    Attributes:
        run: typed, every ``${...}`` resolved, VISSL's second names replaced (``vissl_twins``).
        written: the same tree as plain containers, with every ``${...}`` as it was written.
        recipe: what ``config=`` named.
        node_id: number of this machine, from 0.
    """

    run: RunConfig
    written: dict[str, Any]
    recipe: str
    node_id: int = 0

    def user_yaml(self) -> str:
        """Text of ``config.user.yaml``: a recipe that gives this run again, interpolations unresolved."""
        tree = OmegaConf.to_yaml({"config": without_vissl_keys(self.written)})
        return f"# @package _global_\n# {self.recipe}, as composed.\n{tree}"


def typed(cfg: DictConfig, recipe: str) -> Composed:
    """A composed tree (the root that holds ``config:``) as dataclasses.

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
    use_own_names(run)
    if not 0 <= cfg.node_id < max(1, run.DISTRIBUTED.NUM_NODES):
        must = f"must be 0 to {run.DISTRIBUTED.NUM_NODES - 1}, as there are {run.DISTRIBUTED.NUM_NODES} machines"
        fix = "Give each machine its own number; config.DISTRIBUTED.NUM_NODES says how many there are."
        raise ConfigError([Problem("node_id", str(cfg.node_id), must, fix)])
    return Composed(run, {str(key): value for key, value in written.items()}, recipe, cfg.node_id)


def _other_programs(cfg: DictConfig) -> list[Problem]:
    """VISSL's other programs, which a recipe's root names."""
    found = []
    for key, only in (("engine_name", "train"), ("VERSION", 1)):
        if cfg[key] != only:
            found.append(Problem(key, repr(cfg[key]), f"must be {only}", "Use a recipe that trains."))
    return found


def compose(recipe: str, overrides: Sequence[str] = ()) -> Composed:
    """Compose as the command line does, without starting anything.

    Args:
        recipe: what ``config=`` would name.
        overrides: such as ``config.ZERO.LEVEL=3`` or ``+config/zero=fsdp``.
    Raises:
        ConfigError: an unknown recipe, a mistyped key or a mistyped value.
    """
    register()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("vissl_zero.conf", version_base="1.3", job_name="vissl-zero"):
            cfg = hydra.compose("defaults", [f"config={recipe}", *overrides])
            return typed(cfg, recipe)
    except EXPLAINABLE as error:
        raise explain(error) from error


def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The typed configuration of a recipe; arguments and errors as ``compose``."""
    return compose(recipe, overrides).run
