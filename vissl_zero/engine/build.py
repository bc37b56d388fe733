"""Build a run that can be trained from a resolved configuration: data, model, method, sharding."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.data.dataset import seed_sample
from vissl_zero.data.loader import build_train_loader
from vissl_zero.engine.hook import TEACHER_CHECKSUM, Run
from vissl_zero.engine.loop import Frozen, Schedules
from vissl_zero.engine.passes import require_separate_rows
from vissl_zero.engine.teacher_features import TeacherFeatures, folder_of
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.method import Method, build_method
from vissl_zero.methods.mixing import mixing_of
from vissl_zero.methods.online_probe import OnlineProbe
from vissl_zero.models.bare import build_bare, lost_operations
from vissl_zero.models.init import FirstWeights
from vissl_zero.models.model import Model, build_model
from vissl_zero.optim.param_groups import build_optimizer, freeze_untrainable, param_groups
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.model_rules import no_teacher
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.allocator import return_free_pages
from vissl_zero.sharding.model.precision import cast_to_master, dtype_of

_BEFORE_TRAINING = -1  # in place of an epoch
# Loads weights into a model's parameters, except those on the meta device; returns a reader of each, by full name.
Load = Callable[[nn.Module], Mapping[str, Callable[[], Tensor]]]


def build_run(
    plan: ResolvedRun,
    device: torch.device,
    fill: Load | None = None,
    fill_teacher: Load | None = None,
) -> tuple[Run, Schedules, Frozen]:
    """Build data, model, method and sharding of one rank. Collective: every rank calls it, with a process group.

    If parameters are sharded, the peak of parameter memory is a rank's shards and one whole unit, unless the model
    cannot be filled unit by unit (``models/bare.py``).

    Args:
        plan: plan of the run.
        device: device of this rank.
        fill: loads initial weights into the model, the same on every rank; None: random weights.
        fill_teacher: loads the weights of the model under DISTILLATION, if there is one.
    Raises:
        ConfigError, DataError: the data do not exist, or the model cannot be trained as configured.
    """
    rank, world_size = collectives.rank(), collectives.world_size()
    precision = plan.sharding.precision
    loader = build_train_loader(plan, rank, world_size)
    num_classes = len(loader.source.class_names)
    model = build_bare(lambda: build_model(plan.config.MODEL, num_classes))
    require_separate_rows(model, plan)
    return_free_pages()  # constructors of layers allocate and free temporary tensors
    weights = first_weights(model, plan, fill)
    cast_to_master(model, precision)
    freeze_untrainable(model, plan.config.MODEL.NON_TRAINABLE_PARAMS)
    # Groups and names are taken before sharding, which replaces the parameters.
    groups = param_groups(model, plan.optimizer)
    names = [name for name, _ in model.named_parameters()]
    frozen = Frozen(plan.config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP, names)
    # Losses, centers and prototypes sum over many samples, so they are never in half precision.
    method = build_method(plan.config.LOSS, len(loader.source)).to(device=device, dtype=dtype_of(precision.wide))
    _require_evaluated_model(plan, method)
    method.mixing = mixing_of(plan.config.DATA.TRAIN)
    method.views_apart = plan.config.MODEL.VIEWS_APART
    method.set_length(loader.steps_per_epoch * plan.num_epochs, loader.steps_per_epoch)
    add_probe(plan, method, model, num_classes, device)
    teacher_and_filler = _first_teacher(plan, method, model, weights, num_classes, fill_teacher)
    strategy = STRATEGIES.get(plan.sharding.engine).build()
    factory = functools.partial(build_optimizer, plan.optimizer)
    sharding = plan.sharding.of_run(plan.run_dir)
    sharded = strategy.shard(model, groups, factory, sharding, device, lambda _, name: weights.fill_(name))
    evaluated_model = model
    if teacher_and_filler is not None:
        teacher, fill_teacher_unit = teacher_and_filler
        cast_to_master(teacher, precision)
        sharded.adopt_teacher(teacher, method.teacher_follows, lambda _, name: fill_teacher_unit(name))
        evaluated_model = teacher if plan.config.EVALUATED_MODEL == "teacher" else model
    return_free_pages()
    # Set after the teacher was copied from the model, so that only one of the two keeps its features.
    evaluated_model.keeps_features = plan.config.ONLINE_PROBE.USE_PROBE
    seed_sample(plan.seed, _BEFORE_TRAINING, rank)  # for plugins: nothing here uses the global generators from now on
    run = Run(
        plan=plan,
        sharded=sharded,
        method=method,
        loader=loader,
        device=device,
        rank=rank,
        world_size=world_size,
        steps_per_epoch=loader.steps_per_epoch,
        evaluated_model=evaluated_model,
        num_steps=plan.num_steps(loader.steps_per_epoch),
    )
    if (checksum := sharded.teacher_checksum()) is not None:
        run.results[TEACHER_CHECKSUM] = checksum
        if plan.config.DISTILLATION.CACHE_FEATURES:
            source, views = loader.source, plan.config.DATA.AUGMENTATION_PERIOD
            assert views is not None
            run.teacher_features = TeacherFeatures(folder_of(plan, source, checksum), len(source), views, device)
    return run, Schedules(plan, groups, loader.steps_per_epoch), frozen


def first_weights(model: Model, plan: ResolvedRun, load: Load | None) -> FirstWeights:
    """Return the initial weights of the trained model: random, or loaded by ``load`` where it has them."""
    drawn_as = {}
    if plan.optimizer.head_lr_factors:  # a sweep of learning rates: all heads start with the same weights
        for index, head in enumerate(model.heads[1:], 1):
            head.load_state_dict(model.heads[0].state_dict())
            drawn_as[f"heads.{index}"] = "heads.0"
    if model.taps is not None:  # each head starts with the weights it would have if it were trained alone
        drawn_as = {f"heads.{index}": "" for index in range(len(model.heads))}
    weights = FirstWeights(model, plan.seed, drawn_as)
    if load is not None:
        weights.loaded = load(model)
    return weights


def _first_teacher(
    plan: ResolvedRun,
    method: Method,
    model: Model,
    weights: FirstWeights,
    num_classes: int,
    load: Load | None,
) -> tuple[Model, Callable[[str], None]] | None:
    """Return the teacher and a function that fills one of its modules by name; None for methods without a teacher.

    Args:
        plan: plan of the run.
        method: method that makes the teacher.
        model: trained model, which the teacher may be a copy of.
        weights: initial weights of ``model``.
        num_classes: number of classes of the training images.
        load: loads the weights of the model under DISTILLATION.
    """
    if not method.has_teacher:
        return None
    source, source_weights = _origin(plan, model, weights, num_classes, load)
    teacher: Model | None = None
    # First try on the meta device, which needs no memory. torch raises if the method copies a meta tensor into a
    # buffer of its own.
    with lost_operations() as lost, suppress(NotImplementedError):
        teacher = method.make_teacher(source)
    if teacher is None or lost or (teacher is not source and any(param.is_meta for param in teacher.parameters())):
        source, source_weights = _origin(plan, model, weights, num_classes, load)
        source_weights.fill_("")  # the method computes with the values of the weights
        teacher = method.make_teacher(source)
    # A teacher that the method has made has its values already. The source itself is filled while it is sharded.
    return teacher, source_weights.of_copy(teacher).fill_ if teacher is source else lambda _: None


def _origin(
    plan: ResolvedRun, model: Model, weights: FirstWeights, num_classes: int, load: Load | None
) -> tuple[Model, FirstWeights]:
    """Return the model to make a teacher from (the one under DISTILLATION, or a copy of ``model``) and its weights."""
    if not plan.learns_from_other:
        copied = copy.deepcopy(model)
        return copied, weights.of_copy(copied)
    other = build_bare(lambda: other_model(plan, num_classes) or model)
    other_weights = FirstWeights(other, plan.seed)
    if load is not None:
        other_weights.loaded = load(other)
    return other, other_weights


def _require_evaluated_model(plan: ResolvedRun, method: Method) -> None:
    """Raise ConfigError if EVALUATED_MODEL is teacher and the method has none: a user's loss, unknown to the rules."""
    if plan.config.EVALUATED_MODEL == "teacher" and not (method.has_teacher and method.teacher_follows):
        raise ConfigError([no_teacher(plan.config.LOSS["name"])])


def add_probe(plan: ResolvedRun, method: Method, model: Model, num_classes: int, device: torch.device | None) -> None:
    """Add an online probe to the method if the configuration has one; as its submodule, it is in checkpoints.

    Raises:
        ConfigError: the images have no classes.
    """
    options = plan.config.ONLINE_PROBE
    if not options.USE_PROBE:
        return
    if not num_classes:
        must = "needs a class for each training image"
        fix = "Set it to false, or put each class in a folder of its own (a single folder is no class)."
        raise ConfigError([Problem("config.ONLINE_PROBE.USE_PROBE", "true", must, fix)])
    dtype = dtype_of(plan.sharding.precision.wide)
    width = int(model.trunk.feature_dim)  # type: ignore[arg-type]
    method.online_probe = OnlineProbe(width, num_classes, options.LR, dtype, device)


def other_model(plan: ResolvedRun, num_classes: int) -> Model | None:
    """Build the model under DISTILLATION, without loading its weights; None if the loss does not learn from it.

    Args:
        plan: plan of the run.
        num_classes: number of classes of the training images.
    """
    return build_model(plan.config.DISTILLATION.TEACHER_MODEL, num_classes) if plan.learns_from_other else None
