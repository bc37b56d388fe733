"""From the typed configuration to the frozen plan of a run: rules first, then every derived value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vissl_zero.config.blocks.model_and_loss import default_loss
from vissl_zero.config.blocks.optimizer import Optimizer
from vissl_zero.config.components.heads import are_tapped, features_are_tapped
from vissl_zero.config.components.trunks import FURTHER_BLOCKS, TRUNK_BLOCKS
from vissl_zero.config.constraints import constraint_problems
from vissl_zero.config.programs import TRAIN
from vissl_zero.config.recipes import list_recipes, recipe_packages
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import load_plugins
from vissl_zero.resolve.components import (
    as_teacher,
    head_options,
    inferred_notes,
    loss_options,
    takes_other_model,
    trunk_options,
    with_run_of_weights,
)
from vissl_zero.resolve.data_plan import DATA_RULES, with_image_size
from vissl_zero.resolve.host import Host, assumed_host, cluster_host, idle_cores, this_host
from vissl_zero.resolve.inactive import VISSL_RULES, inactive_keys, no_effect
from vissl_zero.resolve.logger_rules import LOGGER_RULES
from vissl_zero.resolve.measuring import PROGRAM_RULES, only_measures, tests_alone, without_training
from vissl_zero.resolve.model_rules import MODEL_RULES
from vissl_zero.resolve.optimizer_plan import OPTIMIZER_RULES, optimizer_plan
from vissl_zero.resolve.placement_plan import (
    GPU_NAMES,
    PLACEMENT_RULES,
    global_batch,
    is_submitted,
    placement,
    ranks,
)
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import copies_of, find, leaves, load_resolved, save_resolved
from vissl_zero.resolve.sharding_plan import SHARDING_RULES, sharding_plan
from vissl_zero.vissl.keys import without_vissl_keys

__all__ = ["load_resolved", "resolve", "save_resolved"]


Rule = Callable[[RunConfig, Host], Problem | list[Problem] | None]

# All of them run, and all problems are reported together. A rule is a pure function of the configuration and the host.
RULES: tuple[Rule, ...] = (
    *DATA_RULES,
    *MODEL_RULES,
    *OPTIMIZER_RULES,
    *SHARDING_RULES,
    *PLACEMENT_RULES,
    *PROGRAM_RULES,
    *LOGGER_RULES,
    *VISSL_RULES,
)


def resolve(
    cfg: RunConfig,
    run_dir: str | Path,
    *,
    recipe: str = "",
    written: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    host: Host | None = None,
) -> ResolvedRun:
    """Check a configuration and decide every derived value. Imports the user's modules (``IMPORTS``), never torch.

    Args:
        cfg: as ``compose`` gives it.
        run_dir: the run folder where CHECKPOINT.DIR is null.
        recipe: what ``config=`` named.
        written: the tree with ``${...}`` as written (``Composed.written``), so that their values can be masked on disk.
        notes: sentences of composing (``Composed.notes``).
        host: the machine to plan for; this one by default.
    Raises:
        ConfigError: everything that is wrong, all problems at once.
    """
    # First: all that follows looks up names in the registries, which these modules fill.
    broken = [*load_plugins(cfg.IMPORTS), *recipe_packages()[1]]
    # On its own: a part lacks most of a recipe, and each check below would say so.
    if problem := part_alone(cfg, recipe):
        raise ConfigError([problem])
    if tests_alone(cfg):
        notes = (*notes, "TEST's images alone are measured: config.DATA.TRAIN names none, so there is no kNN.")
    cfg = with_image_size(with_run_of_weights(without_training(cfg)))
    host = host or _host(cfg)
    # Modules that cannot be imported are problems only beside others, which they may explain; else they are notes.
    if found := problems(cfg, host):
        raise ConfigError([*found, *broken])
    place, step = placement(cfg, host), global_batch(cfg, host)
    sharding, sharding_notes = sharding_plan(cfg, place)
    optimizer, optimizer_notes = optimizer_plan(cfg, step, place.num_nodes)
    notes = (*map(str, broken), *notes, *place.notes, *sharding_notes, *optimizer_notes)
    if only_measures(cfg) and cfg.PROGRAM == TRAIN:
        notes = (*notes, "Nothing is trained: FEATURE_EVAL_SETTINGS freezes trunk and head; LOSS does not count.")
    config = _config(cfg)
    interpolations = _interpolations(written or {}, config)

    def derived(changed: RunConfig) -> dict[str, Any]:
        return {
            "sharding": asdict(sharding_plan(changed, place)[0]),
            "optimizer": asdict(optimizer_plan(changed, step, place.num_nodes)[0]),
        }

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
        exact_accumulation=cfg.TRAINER.EXACT_ACCUMULATION,
        global_batch=step,
        num_epochs=cfg.OPTIMIZER.num_epochs,
        max_steps=cfg.TRAINER.MAX_STEPS,
        sharding=sharding,
        optimizer=optimizer,
        notes=(*notes, *inferred_notes(cfg), *inactive_keys(cfg), *no_effect(cfg)),
        interpolations=interpolations,
        copies=copies_of(derived, cfg, interpolations) if interpolations else {},
    )


def problems(cfg: RunConfig, host: Host) -> list[Problem]:
    """Everything that is wrong with a configuration: values by themselves, then keys together; each problem once."""
    found = list(constraint_problems(cfg, "config", unread_blocks(cfg)))
    for rule in RULES:
        try:
            verdict = rule(cfg, host)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
            if not found:
                raise
            continue  # it stumbles over a value that is among the problems already
        found += [verdict] if isinstance(verdict, Problem) else verdict or []
    return list(dict.fromkeys(found))


def unread_blocks(cfg: RunConfig) -> set[str]:
    """Paths of blocks that this run does not read: of other trunks and losses, and of what is switched off."""
    name = cfg.MODEL.TRUNK.NAME
    others = {*TRUNK_BLOCKS.values()} - {TRUNK_BLOCKS.get(name), FURTHER_BLOCKS.get(name)}
    unread = {f"config.MODEL.TRUNK.{block}" for block in others}
    unread |= {f"config.LOSS.{name}" for name in cfg.LOSS if name not in ("name", cfg.LOSS.get("name"))}
    schedules, head = cfg.OPTIMIZER.param_schedulers, cfg.OPTIMIZER.head_optimizer_params
    off = {
        "SLURM": not cfg.SLURM.USE_SLURM,
        "MODEL.GRAD_CLIP": not cfg.MODEL.GRAD_CLIP.USE_GRAD_CLIP,
        "OPTIMIZER.param_schedulers.lr_head": not head.use_different_lr,
        "OPTIMIZER.param_schedulers.weight_decay": not schedules.weight_decay.name,
        "OPTIMIZER.param_schedulers.weight_decay_head": not schedules.weight_decay_head.name,
    }
    return unread | {f"config.{path}" for path, is_off in off.items() if is_off}


def part_alone(cfg: RunConfig, recipe: str) -> Problem | None:
    """A part of a recipe given as one: its comment says so, it names no images and no heads, or heads and no more."""
    part = next((found for found in list_recipes() if found.name == recipe and found.is_part), None)
    has_method = cfg.TEST_ONLY or cfg.LOSS["name"] != default_loss()["name"] or Optimizer() != cfg.OPTIMIZER
    is_whole = cfg.DATA.TRAIN.DATA_SOURCES or (cfg.MODEL.HEAD.PARAMS and has_method)
    if not recipe or (part is None and is_whole):
        return None
    group, _, file = recipe.rpartition("/")
    argument = part.argument if part else f"+config/{group}={file}"
    must = "must name a complete recipe, and this is a part of one"
    return Problem("config", repr(recipe), must, f"Add it to a recipe: vissl-zero config=<recipe> {argument}.")


def _host(cfg: RunConfig) -> Host:
    """The machine to plan for: this one, or a node of the cluster that the run is submitted to."""
    here = this_host()
    if cfg.DRY_RUN and not is_submitted(cfg):
        procs = ranks(cfg, here)[1]
        is_elsewhere = cfg.MACHINE.DEVICE in GPU_NAMES and here.num_gpus < procs
        return assumed_host(here, procs) if is_elsewhere else here
    if not is_submitted(cfg) or here.torchrun:
        # Looking at idle cores takes a fifth of a second: only where nobody has said how many threads.
        is_asked = cfg.TRAINER.THREADS_PER_RANK or here.num_threads
        return here if is_asked else replace(here, num_idle_cores=idle_cores(here))
    procs = cfg.DISTRIBUTED.NUM_PROC_PER_NODE
    return cluster_host(procs, cfg.SLURM.NUM_CPU_PER_PROC * procs, cfg.MACHINE.DEVICE, cfg.SLURM.PARTITION)


def _config(cfg: RunConfig) -> dict[str, Any]:
    """The whole tree as plain containers, the chosen components' blocks complete."""
    tree = without_vissl_keys(asdict(cfg))
    model, name = tree["MODEL"], cfg.MODEL.TRUNK.NAME
    model["TRUNK"] = {"NAME": name, TRUNK_BLOCKS.get(name, "PARAMS"): trunk_options(cfg)}
    model["HEAD"]["PARAMS"] = [[head, options] for head, options in head_options(cfg)]
    if not (are_tapped(cfg) or features_are_tapped(cfg)):
        model["FEATURE_EVAL_SETTINGS"]["LINEAR_EVAL_FEAT_POOL_OPS_MAP"] = []
    if cfg.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY:
        model["NON_TRAINABLE_PARAMS"] = [*model["NON_TRAINABLE_PARAMS"], "trunk"]
    if path := cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE:
        model["WEIGHTS_INIT"]["PARAMS_FILE"] = str(Path(path).expanduser().absolute())  # workers may start elsewhere
    if cfg.DATA.WORKER_TIMEOUT_S is None:
        tree["DATA"]["WORKER_TIMEOUT_S"] = cfg.DISTRIBUTED.TIMEOUT_S / 2
    for split in ("TRAIN", "TEST"):
        paths = tree["DATA"][split]["DATA_PATHS"]
        tree["DATA"][split]["DATA_PATHS"] = [str(Path(path).expanduser().absolute()) for path in paths]
    if factors := cfg.OPTIMIZER.head_optimizer_params.lr_factors:
        model["HEAD"]["PARAMS"] *= len(factors)
    del tree["DISTILLATION"]
    if takes_other_model(cfg):
        tree["DISTILLATION"] = {"TEACHER_MODEL": _teacher(as_teacher(cfg))}
    loss = cfg.LOSS["name"]
    tree["LOSS"] = {"name": loss, loss: loss_options(cfg)}
    return tree


def _teacher(cfg: RunConfig) -> dict[str, Any]:
    """What builds the teacher, and fills it."""
    name, weights = cfg.MODEL.TRUNK.NAME, asdict(cfg.MODEL.WEIGHTS_INIT)
    return {
        "TRUNK": {"NAME": name, TRUNK_BLOCKS.get(name, "PARAMS"): trunk_options(cfg)},
        "HEAD": {**asdict(cfg.MODEL.HEAD), "PARAMS": [[head, options] for head, options in head_options(cfg)]},
        "INPUT_TYPE": cfg.MODEL.INPUT_TYPE,
        "WEIGHTS_INIT": {**weights, "PARAMS_FILE": str(Path(weights["PARAMS_FILE"]).expanduser().absolute())},
    }


def _interpolations(written: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    texts = {path: value for path, value in leaves(written) if isinstance(value, str) and "${" in value}
    return {path: text for path, text in texts.items() if find(config, path)}
