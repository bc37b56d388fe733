"""Turn the typed configuration into the frozen plan of a run: check all rules, then derive every value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.model_and_loss import default_loss
from vissl_zero.config.blocks.optimizer import Optimizer
from vissl_zero.config.components.heads import are_tapped, features_are_tapped
from vissl_zero.config.components.trunks import FURTHER_BLOCKS, TRUNK_BLOCKS
from vissl_zero.config.constraints import constraint_problems
from vissl_zero.config.programs import RETRIEVAL, TRAIN
from vissl_zero.config.recipes import find_recipe, recipe_packages
from vissl_zero.config.run_config import RunConfig
from vissl_zero.config.weights_name import absolute
from vissl_zero.errors import CheckpointError, ConfigError, Problem, problems_of
from vissl_zero.registry import load_plugins
from vissl_zero.resolve.boxes import BOX_RULES
from vissl_zero.resolve.channels import with_channels
from vissl_zero.resolve.components import (
    as_teacher,
    head_options,
    inferred_notes,
    left_to_weights,
    loss_options,
    takes_other_model,
    trunk_options,
    with_run_of_weights,
)
from vissl_zero.resolve.data_plan import DATA_RULES, mixing_notes, paths, with_image_size
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.followed_figure import FOLLOWED_FIGURE_RULES
from vissl_zero.resolve.host import Host, assumed_host, cluster_host, idle_cores, this_host
from vissl_zero.resolve.inactive import VISSL_RULES, inactive_keys, no_effect
from vissl_zero.resolve.logger_rules import LOGGER_RULES
from vissl_zero.resolve.measuring import PROGRAM_RULES, only_measures, tests_alone, without_training
from vissl_zero.resolve.model_rules import MODEL_RULES
from vissl_zero.resolve.named_teacher import with_named_teacher
from vissl_zero.resolve.optimizer_plan import OPTIMIZER_RULES, optimizer_plan
from vissl_zero.resolve.pairs import PAIR_RULES
from vissl_zero.resolve.placement_plan import (
    GPU_NAMES,
    PLACEMENT_RULES,
    is_submitted,
    ranks,
)
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import config_data, copies_of, find, leaves, load_resolved, save_resolved
from vissl_zero.resolve.sharding_plan import SHARDING_RULES, sharding_plan
from vissl_zero.resolve.teacher_features import teacher_features

__all__ = ["load_resolved", "resolve", "save_resolved"]


Rule = Callable[[RunConfig, Decisions], Problem | list[Problem] | None]

# A rule is a pure function of configuration and decisions. All rules run, so that one error lists all problems.
RULES: tuple[Rule, ...] = (
    *DATA_RULES,
    *PAIR_RULES,
    *BOX_RULES,
    *MODEL_RULES,
    *OPTIMIZER_RULES,
    *SHARDING_RULES,
    *PLACEMENT_RULES,
    *PROGRAM_RULES,
    *LOGGER_RULES,
    *FOLLOWED_FIGURE_RULES,
    teacher_features,
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
    """Check a configuration and return the plan of the run. Imports the user's modules (``IMPORTS``), never torch.

    Args:
        cfg: configuration that ``compose`` returned.
        run_dir: run folder to use if CHECKPOINT.DIR is null.
        recipe: name of the recipe, the value of ``config=``.
        written: the tree with ``${...}`` as written (``Composed.written``), so that their values can be masked on disk.
        notes: notes of ``compose`` (``Composed.notes``).
        host: the machine to plan for; this one by default.
    Raises:
        ConfigError: the configuration has problems; the error lists all of them.
    """
    # First, because these modules register the names that the rules look up.
    broken = [*load_plugins(cfg.IMPORTS), *recipe_packages()[1]]
    # Alone, because a part lacks most of a recipe: nearly every rule would report a problem.
    if problem := _part_alone(cfg, recipe):
        raise ConfigError([problem])
    # Before ``without_training``, which gives TRAIN the images of TEST.
    if tests_alone(cfg):
        notes = (*notes, "TEST's images alone are measured: config.DATA.TRAIN names none, so there is no kNN.")
    cfg = without_training(cfg)
    try:
        cfg = with_run_of_weights(cfg)
    except (ConfigError, CheckpointError) as error:
        raise _without_weights(cfg, Decisions(cfg, host or _host(cfg)), error) from error
    try:
        # From the inside out: IMG_SIZE scales transforms that may be those of the weights' run, and the images of the
        # teacher must be normalized as the result says.
        cfg = with_named_teacher(with_channels(with_image_size(cfg)))
    except (ConfigError, CheckpointError) as error:  # the rules would judge images or a teacher that stay unknown
        raise _joined(error, paths(cfg)) from error
    decided = Decisions(cfg, host or _host(cfg))
    # A module that cannot be imported may be the cause of other problems, such as an unknown name. Without other
    # problems this run does not need it, and a note is enough.
    if all_problems := problems(decided):
        raise ConfigError([*all_problems, *broken])
    place, step = decided.placement, decided.global_batch
    sharding, sharding_notes = sharding_plan(decided)
    optimizer, optimizer_notes = optimizer_plan(cfg, step, place.num_nodes)
    notes = (*map(str, broken), *notes, *place.notes, *sharding_notes, *optimizer_notes)
    if only_measures(cfg) and cfg.PROGRAM == TRAIN:
        notes = (*notes, "Nothing is trained: FEATURE_EVAL_SETTINGS freezes trunk and head; LOSS does not count.")
    learns_from_other = takes_other_model(cfg)
    data = config_data(_filled(cfg), learns_from_other)
    texts = {path: value for path, value in leaves(written or {}) if isinstance(value, str) and "${" in value}
    # Blocks of components that were not chosen are not saved, so that nothing is left to mask there.
    interpolations = {path: text for path, text in texts.items() if find(data, path)}

    def derived(changed: RunConfig) -> dict[str, Any]:
        return {
            "sharding": asdict(sharding_plan(Decisions(changed, decided.host))[0]),
            "optimizer": asdict(optimizer_plan(changed, step, place.num_nodes)[0]),
        }

    return ResolvedRun(
        config=block_of(RunConfig, data),
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
        learns_from_other=learns_from_other,
        exact_accumulation=cfg.TRAINER.EXACT_ACCUMULATION,
        crop_passes=cfg.TRAINER.CROP_PASSES,
        global_batch=step,
        num_epochs=cfg.OPTIMIZER.num_epochs,
        max_steps=cfg.TRAINER.MAX_STEPS,
        sharding=sharding,
        optimizer=optimizer,
        notes=(
            *notes,
            *mixing_notes(cfg, place.world_size),
            *inferred_notes(cfg),
            *inactive_keys(cfg),
            *no_effect(cfg),
        ),
        interpolations=interpolations,
        copies=copies_of(derived, cfg, interpolations) if interpolations else {},
    )


def _without_weights(
    cfg: RunConfig, decided: Decisions, error: ConfigError | CheckpointError
) -> ConfigError | CheckpointError:
    """Return the error of weights that say nothing of the network, with all problems that do not depend on them."""
    known = problems_of(error)
    told = {problem.key for problem in known} | left_to_weights(cfg)
    others = [problem for problem in problems(decided, known) if problem.key not in told]
    return _joined(error, others)


def _joined(error: ConfigError | CheckpointError, others: Sequence[Problem]) -> ConfigError | CheckpointError:
    """Return the error with other problems; the error itself if there are none."""
    return ConfigError([*problems_of(error), *others]) if others else error


def problems(decided: Decisions, known: Sequence[Problem] = ()) -> list[Problem]:
    """Return all problems of a configuration, each once: those known, then of single values, then of the rules."""
    cfg = decided.cfg
    collected = [*known, *constraint_problems(cfg, "config", unchecked_blocks(cfg))]
    for rule in RULES:
        try:
            verdict = rule(cfg, decided)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
            # Without a wrong value to blame, the rule itself is wrong.
            if not collected:
                raise
            continue  # the cause is a wrong value, which is reported already
        collected += [verdict] if isinstance(verdict, Problem) else verdict or []
    return list(dict.fromkeys(collected))


def unchecked_blocks(cfg: RunConfig) -> set[str]:
    """Return paths of blocks that this run does not read: other trunks and losses, and blocks that are off."""
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


def _part_alone(cfg: RunConfig, recipe: str) -> Problem | None:
    """Return the problem of a part of a recipe that is used as a whole recipe; None for a whole recipe."""
    # A part says so in its comment. Without such a comment, a file is a part if it names no images, and no heads
    # together with a method.
    named = find_recipe(recipe)
    part = named if named and named.is_part else None
    has_method = cfg.TEST_ONLY or cfg.LOSS["name"] != default_loss()["name"] or Optimizer() != cfg.OPTIMIZER
    is_whole = cfg.DATA.TRAIN.DATA_SOURCES or (cfg.MODEL.HEAD.PARAMS and has_method)
    if not recipe or (part is None and is_whole):
        return None
    if cfg.IMG_RETRIEVAL.DATASET_PATH and part is None and cfg.MODEL.TRUNK.NAME:
        must = "must be given to the program that it is for, and names images of IMG_RETRIEVAL alone"
        return Problem("config", repr(recipe), must, f"Write vissl-zero {RETRIEVAL} config={recipe}.")
    group, _, file = recipe.rpartition("/")
    argument = part.argument if part else f"+config/{group}={file}"
    must = "must name a complete recipe, and this is a part of one"
    return Problem("config", repr(recipe), must, f"Add it to a recipe: vissl-zero config=<recipe> {argument}.")


def _host(cfg: RunConfig) -> Host:
    """Return the machine to plan for: this one, or a node of the cluster that the run is submitted to."""
    here = this_host()
    if cfg.DRY_RUN and not is_submitted(cfg):
        procs = ranks(cfg, here)[1]
        is_elsewhere = cfg.MACHINE.DEVICE in GPU_NAMES and here.num_gpus < procs
        return assumed_host(here, procs) if is_elsewhere else here
    if not is_submitted(cfg) or here.torchrun:
        # Measuring idle cores takes a fifth of a second, so it is skipped if the user has set the threads.
        is_set = cfg.TRAINER.THREADS_PER_RANK or here.num_threads
        return here if is_set else replace(here, num_idle_cores=idle_cores(here))
    procs = cfg.DISTRIBUTED.NUM_PROC_PER_NODE
    return cluster_host(procs, cfg.SLURM.NUM_CPU_PER_PROC * procs, cfg.MACHINE.DEVICE, cfg.SLURM.PARTITION)


def _filled(cfg: RunConfig) -> RunConfig:
    """Return a copy with all keys of the chosen components, absolute paths, and keys that follow from others."""
    # The caller's tree stays as written: errors and notes name what the user wrote.
    cfg = copy.deepcopy(cfg)
    model, settings = cfg.MODEL, cfg.MODEL.FEATURE_EVAL_SETTINGS
    if not (are_tapped(cfg) or features_are_tapped(cfg)):
        settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP = []
    if settings.FREEZE_TRUNK_ONLY:
        model.NON_TRAINABLE_PARAMS = [*model.NON_TRAINABLE_PARAMS, "trunk"]
    # Half the timeout of collectives: a hanging loader is reported before the other ranks time out.
    if cfg.DATA.WORKER_TIMEOUT_S is None:
        cfg.DATA.WORKER_TIMEOUT_S = cfg.DISTRIBUTED.TIMEOUT_S / 2
    for split in (cfg.DATA.TRAIN, cfg.DATA.TEST):
        split.DATA_PATHS = [str(Path(path).expanduser().absolute()) for path in split.DATA_PATHS]
    if cfg.DISTILLATION.CACHE_FOLDER:
        cfg.DISTILLATION.CACHE_FOLDER = str(Path(cfg.DISTILLATION.CACHE_FOLDER).expanduser().absolute())
    loss, has_other_teacher = cfg.LOSS["name"], takes_other_model(cfg)
    cfg.LOSS = {"name": loss, loss: loss_options(cfg)}
    teacher = as_teacher(cfg)
    _fill_model(cfg)
    if model.LORA.ADAPTER_FOLDER:
        model.LORA.ADAPTER_FOLDER = str(Path(model.LORA.ADAPTER_FOLDER).expanduser().absolute())
    # A sweep of learning rates trains a copy of the head for each factor, on the features of one forward pass.
    model.HEAD.PARAMS *= len(cfg.OPTIMIZER.head_optimizer_params.lr_factors) or 1
    if has_other_teacher:
        _fill_model(teacher)  # shares the blocks of cfg.DISTILLATION.TEACHER_MODEL
    return cfg


def _fill_model(cfg: RunConfig) -> None:
    """Fill in the keys of trunk and heads of ``cfg.MODEL`` and the absolute path of its weights, in place."""
    model = cfg.MODEL
    if model.TRUNK.NAME not in TRUNK_BLOCKS:
        model.TRUNK.PARAMS = trunk_options(model.TRUNK)
    model.HEAD.PARAMS = [[head, options] for head, options in head_options(cfg)]
    if path := model.WEIGHTS_INIT.PARAMS_FILE:
        model.WEIGHTS_INIT.PARAMS_FILE = absolute(path)  # workers may start in another directory
