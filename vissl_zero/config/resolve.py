"""From the typed configuration to the frozen plan of a run: rules first, then every derived value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vissl_zero.config.components.trunks import TRUNK_BLOCKS
from vissl_zero.config.derive.components import head_options, inferred_notes, loss_options, trunk_options
from vissl_zero.config.derive.optimizer import optimizer_plan
from vissl_zero.config.derive.placement import global_batch, placement
from vissl_zero.config.derive.sharding import sharding_plan
from vissl_zero.config.derive.switched_off import switched_off
from vissl_zero.config.derive.weights import with_trunk_of_weights
from vissl_zero.config.host import Host, cluster_host, this_host
from vissl_zero.config.plain_tree import find, leaves, without_vissl_keys
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.rules import problems
from vissl_zero.config.rules.vissl import no_effect
from vissl_zero.config.run import RunConfig
from vissl_zero.config.saved import load_resolved, save_resolved
from vissl_zero.config.search_path import recipe_packages
from vissl_zero.errors import ConfigError
from vissl_zero.registry import load_plugins

__all__ = ["load_resolved", "resolve", "save_resolved"]


def resolve(
    cfg: RunConfig,
    run_dir: str | Path,
    *,
    recipe: str = "",
    written: Mapping[str, Any] | None = None,
    host: Host | None = None,
) -> ResolvedRun:
    """Check a configuration and decide every derived value. Imports the user's modules (``IMPORTS``), never torch.

    Args:
        cfg: as ``compose`` gives it.
        run_dir: the run folder where CHECKPOINT.DIR is null.
        recipe: what ``config=`` named.
        written: the tree with ``${...}`` as written (``Composed.written``), so that their values can be masked on disk.
        host: the machine to plan for; this one by default.
    Raises:
        ConfigError: everything that is wrong, all problems at once.
    """
    broken = [*load_plugins(cfg.IMPORTS), *recipe_packages()[1]]
    cfg = with_trunk_of_weights(cfg)
    host = host or _host(cfg)
    if found := problems(cfg, host):
        raise ConfigError([*found, *broken])
    place, step = placement(cfg, host), global_batch(cfg, host)
    sharding, sharding_notes = sharding_plan(cfg, place)
    optimizer, optimizer_notes = optimizer_plan(cfg, step)
    notes = (*map(str, broken), *place.notes, *sharding_notes, *optimizer_notes)
    config = _config(cfg)
    return ResolvedRun(
        config=config,
        recipe=recipe,
        run_dir=str(Path(cfg.CHECKPOINT.DIR or run_dir).expanduser().absolute()),
        device=place.device,
        backend=place.backend,
        world_size=place.world_size,
        num_nodes=place.num_nodes,
        procs_per_node=place.procs_per_node,
        threads_per_rank=place.threads_per_rank,
        seed=cfg.SEED_VALUE,
        batch_per_rank=cfg.DATA.TRAIN.BATCHSIZE_PER_REPLICA,
        accumulation_steps=cfg.ZERO.gradient_accumulation_steps,
        global_batch=step,
        num_epochs=cfg.OPTIMIZER.num_epochs,
        max_steps=cfg.TRAINER.MAX_STEPS,
        sharding=sharding,
        optimizer=optimizer,
        notes=(*notes, *inferred_notes(cfg), *switched_off(cfg), *no_effect(cfg)),
        interpolations=_interpolations(written or {}, config),
    )


def _host(cfg: RunConfig) -> Host:
    """The machine to plan for: this one, or a node of the cluster that the run is submitted to."""
    here = this_host()
    if not cfg.SLURM.USE_SLURM or here.torchrun:
        return here
    procs = cfg.DISTRIBUTED.NUM_PROC_PER_NODE
    return cluster_host(procs, cfg.SLURM.NUM_CPU_PER_PROC * procs, cfg.MACHINE.DEVICE, cfg.SLURM.PARTITION)


def _config(cfg: RunConfig) -> dict[str, Any]:
    """The whole tree as plain containers, the chosen components' blocks complete."""
    tree = without_vissl_keys(asdict(cfg))
    model, name = tree["MODEL"], cfg.MODEL.TRUNK.NAME
    model["TRUNK"] = {"NAME": name, TRUNK_BLOCKS.get(name, "PARAMS"): trunk_options(cfg)}
    model["HEAD"]["PARAMS"] = [[head, options] for head, options in head_options(cfg)]
    if cfg.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY:
        model["NON_TRAINABLE_PARAMS"] = [*model["NON_TRAINABLE_PARAMS"], "trunk"]
    if path := cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE:
        model["WEIGHTS_INIT"]["PARAMS_FILE"] = str(Path(path).expanduser().absolute())  # workers may start elsewhere
    loss = cfg.LOSS["name"]
    tree["LOSS"] = {"name": loss, loss: loss_options(cfg)}
    return tree


def _interpolations(written: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    texts = {path: value for path, value in leaves(written) if isinstance(value, str) and "${" in value}
    return {path: text for path, text in texts.items() if find(config, path)}
