"""Inactive keys: changed from their defaults although this run does not read them. Each is noted once, with the reason.

Inactive keys of sharding are in ``sharding_plan.py``, because they follow from the plan. VISSL's unused keys are
refused if they would change the result, and noted otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from vissl_zero.config.blocks.data import MIXING_COLLATOR
from vissl_zero.config.blocks.machine import Slurm
from vissl_zero.config.blocks.optimizer import Scheduler
from vissl_zero.config.blocks.output import METERS, ClusterFit, ImageRetrieval, LowShotBenchmark, Svm
from vissl_zero.config.catalog import BUILT_IN
from vissl_zero.config.components import builtin_keys
from vissl_zero.config.components.heads import are_tapped, features_are_tapped
from vissl_zero.config.components.trunks import FURTHER_BLOCKS, TRUNK_BLOCKS
from vissl_zero.config.programs import CLUSTERING, LOW_SHOT, RETRIEVAL, SVM_PROGRAMS, TRAIN
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.resolve.components import takes_other_model
from vissl_zero.resolve.data_plan import crop_sides
from vissl_zero.resolve.optimizer_plan import KEYS, one_rate
from vissl_zero.resolve.pairs import SOURCE as FOLDER_OF_PAIRS
from vissl_zero.vissl.keys import OTHER_LOSSES, VisslKey, vissl_keys

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

_OPTIMIZER = "OPTIMIZER.head_optimizer_params"
_SCHEDULES = "OPTIMIZER.param_schedulers"
# Switch -> keys that have an effect only while the switch is set (a block means all of its keys).
_SWITCHES: dict[str, tuple[str, ...]] = {
    "MODEL.WEIGHTS_INIT.PARAMS_FILE": ("MODEL.WEIGHTS_INIT",),
    f"{_OPTIMIZER}.use_different_wd": (f"{_OPTIMIZER}.weight_decay",),
    f"{_OPTIMIZER}.use_different_lr": (f"{_SCHEDULES}.lr_head",),
    f"{_SCHEDULES}.lr.auto_lr_scaling.auto_scale": (
        f"{_SCHEDULES}.lr.auto_lr_scaling.base_value",
        f"{_SCHEDULES}.lr.auto_lr_scaling.base_lr_batch_size",
        f"{_SCHEDULES}.lr.auto_lr_scaling.scaling_type",
        f"{_SCHEDULES}.lr.auto_lr_scaling.keep_shape",
    ),
    f"{_SCHEDULES}.weight_decay.name": (f"{_SCHEDULES}.weight_decay",),
    f"{_SCHEDULES}.weight_decay_head.name": (f"{_SCHEDULES}.weight_decay_head",),
    "HOOKS.EMA_MODEL.SAVE_EMA_MODEL": (
        "HOOKS.EMA_MODEL.UPDATE_ITER",
        "HOOKS.EMA_MODEL.WARMUP",
        "HOOKS.EMA_MODEL.DECAY",
    ),
    "HOOKS.EARLY_STOPPING.METRIC": (
        "HOOKS.EARLY_STOPPING.PATIENCE",
        "HOOKS.EARLY_STOPPING.MODE",
        "HOOKS.EARLY_STOPPING.MIN_DELTA",
    ),
    "HOOKS.CAPTURE_BAD_STEP.USE_CAPTURE": (
        "HOOKS.CAPTURE_BAD_STEP.SPIKE_FACTOR",
        "HOOKS.CAPTURE_BAD_STEP.MOST",
    ),
    "NEAREST_NEIGHBOR.USE_KNN": (
        "NEAREST_NEIGHBOR.EVERY_NUM_EPOCHS",
        "NEAREST_NEIGHBOR.TOPK",
        "NEAREST_NEIGHBOR.SIGMA",
        "NEAREST_NEIGHBOR.L2_NORM_FEATS",
        "NEAREST_NEIGHBOR.MAX_TRAIN_IMAGES",
        "NEAREST_NEIGHBOR.MAX_TEST_IMAGES",
        "NEAREST_NEIGHBOR.ALSO_TOPK",
        "NEAREST_NEIGHBOR.ALSO_SIGMA",
        "NEAREST_NEIGHBOR.LIDAR_IMAGES",
    ),
    "MODEL.FLOAT8.USE_FLOAT8": ("MODEL.FLOAT8.LAYERS", "MODEL.FLOAT8.SCALES"),
    "MODEL.LORA.USE_LORA": (
        "MODEL.LORA.R",
        "MODEL.LORA.LORA_ALPHA",
        "MODEL.LORA.LORA_DROPOUT",
        "MODEL.LORA.TARGET_MODULES",
        "MODEL.LORA.ADAPTER_FOLDER",
    ),
    "ONLINE_PROBE.USE_PROBE": ("ONLINE_PROBE.EVERY_NUM_EPOCHS", "ONLINE_PROBE.LR"),
    "NEAREST_NEIGHBOR.LIDAR_IMAGES": ("NEAREST_NEIGHBOR.LIDAR_VIEWS",),
    "DISTILLATION.CACHE_FEATURES": ("DISTILLATION.CACHE_FOLDER",),
    "DISTRIBUTED.MAX_RESTARTS": ("DISTRIBUTED.MIN_PROC_PER_NODE",),
}


@dataclass(frozen=True)
class Inactive:
    """Keys that have no effect if ``when`` is true of the configuration, and the reason."""

    keys: tuple[str, ...]
    when: Callable[[RunConfig], bool]
    why: str


def _of_split(split: str, when: Callable[[Any], bool]) -> Callable[[RunConfig], bool]:
    # A function of its own, because a lambda in a loop would see the loop's last split.
    return lambda cfg: when(getattr(cfg.DATA, split))


def can_measure_top1(cfg: RunConfig) -> bool:
    """Check whether the method may predict classes, and TEST has images."""
    predicts_no_class = cfg.LOSS["name"] in builtin_keys("loss") and cfg.LOSS["name"] not in _WITH_CLASSES
    return bool(cfg.DATA.TEST.DATA_SOURCES) and not predicts_no_class


def _measures_test(cfg: RunConfig) -> bool:
    """Check whether a metric on TEST may be measured: top-1 or mIoU."""
    return can_measure_top1(cfg) or segments(cfg)


def segments(cfg: RunConfig) -> bool:
    """Check whether the method predicts the class of each pixel, and TEST has images."""
    return bool(cfg.DATA.TEST.DATA_SOURCES) and cfg.LOSS["name"] == "segmentation_loss"


def _does_not_count(meter: str) -> Callable[[RunConfig], bool]:
    return lambda cfg: (
        meter not in (cfg.METERS.name, *cfg.METERS.names) or not (cfg.TEST_MODEL and can_measure_top1(cfg))
    )


_REGNET, _RESNET, _EVAL = "MODEL.TRUNK.REGNET", "MODEL.TRUNK.RESNETS", "MODEL.FEATURE_EVAL_SETTINGS"
SEED_BESIDE_SEEDS = "config.SEEDS lists the seeds"
_WITH_CLASSES = ("CrossEntropyLoss", "cross_entropy_multiple_output_single_target")
_WITHOUT_SIZE: tuple[list[str], ...] = (["digits"], ["disk_folder"], [FOLDER_OF_PAIRS], [])
_CONDITIONS: tuple[Inactive, ...] = (
    Inactive(("SEED_VALUE",), lambda cfg: bool(cfg.SEEDS), SEED_BESIDE_SEEDS),
    *(
        Inactive(
            (f"DATA.{split}.DEFAULT_GRAY_IMG_SIZE",),
            _of_split(split, lambda data: data.DATA_SOURCES in _WITHOUT_SIZE),
            "only images that a source makes have this size",
        )
        for split in ("TRAIN", "TEST")
    ),
    Inactive(
        tuple(f"DATA.TEST.{key}" for key in ("BATCHSIZE_PER_REPLICA", "DROP_LAST")),
        lambda _: True,
        "evaluation takes every image once, in batches of its own",
    ),
    Inactive(
        tuple(
            f"DATA.TEST.{key}" for key in ("DATA_LIMIT", "LABEL_TYPE", "LABEL_SOURCES", "LABEL_PATHS", "SOURCE_PARAMS")
        ),
        lambda cfg: not cfg.DATA.TEST.DATA_SOURCES,
        "TEST has no data source",
    ),
    *(
        Inactive(
            tuple(f"DATA.{split}.DATA_LIMIT_SAMPLING.{key}" for key in ("SEED", "IS_BALANCED", "SKIP_NUM_SAMPLES")),
            _of_split(split, lambda data: data.DATA_LIMIT == -1),
            "DATA_LIMIT is -1: all images are used",
        )
        for split in ("TRAIN", "TEST")
    ),
    *(
        Inactive(
            (f"DATA.{split}.COLLATE_FUNCTION_PARAMS",),
            _of_split(split, lambda data: data.COLLATE_FUNCTION != MIXING_COLLATOR),
            "only cutmixup_collator has keys",
        )
        for split in ("TRAIN", "TEST")
    ),
    Inactive(
        tuple(f"DATA.TRAIN.COLLATE_FUNCTION_PARAMS.{key}" for key in ("num_classes", "label_smoothing")),
        lambda cfg: cfg.DATA.TRAIN.COLLATE_FUNCTION == MIXING_COLLATOR and cfg.LOSS["name"] not in _WITH_CLASSES,
        "the loss has no labels to mix",
    ),
    Inactive(("TRAINER.ROUNDING",), lambda cfg: cfg.TRAINER.DTYPE != "bfloat16", "TRAINER.DTYPE is not bfloat16"),
    Inactive(
        ("MODEL.PACK_CROPS",),
        lambda cfg: not cfg.MODEL.VIEWS_APART and len(crop_sides(cfg.DATA.TRAIN.TRANSFORMS)) < 2,
        "the crops of an image have one size",
    ),
    Inactive(("TRAINER.CROP_PASSES",), lambda cfg: cfg.TEST_ONLY, "nothing is trained"),
    Inactive(
        ("DATA.ON_BROKEN_IMAGE",),
        lambda cfg: {*cfg.DATA.TRAIN.DATA_SOURCES, *cfg.DATA.TEST.DATA_SOURCES} <= {*BUILT_IN},
        "no image is read from a file",
    ),
    Inactive(
        ("DATA.WORKER_TIMEOUT_S",), lambda cfg: cfg.DATA.NUM_DATALOADER_WORKERS == 0, "there are no loader processes"
    ),
    Inactive(
        ("DATA.TRAIN.LABEL_TYPE", "DATA.TEST.LABEL_TYPE"),
        lambda cfg: cfg.TEST_ONLY,
        "nothing is trained: each image counts under its own label",
    ),
    Inactive(
        tuple(f"SVM.{item.name}" for item in fields(Svm)),
        lambda cfg: cfg.PROGRAM not in SVM_PROGRAMS,
        "engine_name is neither train_svm nor train_svm_low_shot",
    ),
    Inactive(
        tuple(f"CLUSTERFIT.{item.name}" for item in fields(ClusterFit)),
        lambda cfg: cfg.PROGRAM != CLUSTERING,
        f"engine_name is not {CLUSTERING}",
    ),
    Inactive(
        tuple(f"LOW_SHOT_BENCHMARK.{item.name}" for item in fields(LowShotBenchmark)),
        lambda cfg: cfg.PROGRAM != LOW_SHOT,
        f"engine_name is not {LOW_SHOT}",
    ),
    Inactive(
        tuple(f"IMG_RETRIEVAL.{item.name}" for item in fields(ImageRetrieval)),
        lambda cfg: cfg.PROGRAM != RETRIEVAL,
        f"engine_name is not {RETRIEVAL}",
    ),
    Inactive(
        ("IMG_RETRIEVAL.SPATIAL_LEVELS",),
        lambda cfg: cfg.IMG_RETRIEVAL.FEATS_PROCESSING_TYPE != "rmac",
        "FEATS_PROCESSING_TYPE is not rmac",
    ),
    Inactive(
        ("IMG_RETRIEVAL.GEM_POOL_POWER",),
        lambda cfg: cfg.IMG_RETRIEVAL.FEATS_PROCESSING_TYPE != "gem",
        "FEATS_PROCESSING_TYPE is not gem",
    ),
    Inactive(
        ("IMG_RETRIEVAL.TRAIN_DATASET_NAME", "IMG_RETRIEVAL.N_PCA", "IMG_RETRIEVAL.NUM_TRAINING_SAMPLES"),
        lambda cfg: not cfg.IMG_RETRIEVAL.TRAIN_PCA_WHITENING,
        "TRAIN_PCA_WHITENING is off",
    ),
    Inactive(
        ("IMG_RETRIEVAL.WHITEN_IMG_LIST",),
        lambda cfg: cfg.IMG_RETRIEVAL.TRAIN_DATASET_NAME != "whitening",
        "TRAIN_DATASET_NAME is not whitening",
    ),
    Inactive(("CLUSTERFIT.DATA_LIMIT_SAMPLING.SEED",), lambda cfg: cfg.CLUSTERFIT.DATA_LIMIT == -1, "DATA_LIMIT is -1"),
    Inactive(("SVM.low_shot",), lambda cfg: cfg.PROGRAM == "train_svm", "engine_name is not train_svm_low_shot"),
    Inactive(
        ("SVM.cross_val_folds",),
        lambda cfg: cfg.PROGRAM == "train_svm_low_shot",
        "the best cost is reported; nothing is cross-validated",
    ),
    Inactive(
        (f"{_REGNET}.se_ratio",),
        lambda cfg: cfg.MODEL.TRUNK.NAME == "regnet" and not cfg.MODEL.TRUNK.REGNET.use_se,
        "use_se is off",
    ),
    Inactive(
        (f"{_RESNET}.GROUPNORM_GROUPS",),
        lambda cfg: cfg.MODEL.TRUNK.NAME == "resnet" and cfg.MODEL.TRUNK.RESNETS.NORM != "GroupNorm",
        "NORM is not GroupNorm",
    ),
    Inactive(
        ("MODEL.HEAD.BATCHNORM_EPS", "MODEL.HEAD.BATCHNORM_MOMENTUM"),
        lambda cfg: not any(_has_batch_norm(head) for head in cfg.MODEL.HEAD.PARAMS),
        "no head has batch norm",
    ),
    Inactive(
        (f"{_EVAL}.ASSERT_HEAD_LAYER_SHAPE_INIT", f"{_EVAL}.EVAL_MODE_ON"),
        lambda cfg: not cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE and not cfg.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY,
        "no weights are loaded",
    ),
    Inactive(
        (f"{_EVAL}.EVAL_TRUNK_AND_HEAD",),
        lambda cfg: not cfg.MODEL.FEATURE_EVAL_SETTINGS.EVAL_MODE_ON,
        "without EVAL_MODE_ON the heads are taken from WEIGHTS_INIT anyway",
    ),
    Inactive(
        (f"{_EVAL}.LINEAR_EVAL_FEAT_POOL_OPS_MAP",),
        lambda cfg: not (are_tapped(cfg) or features_are_tapped(cfg)),
        "the trunk is not frozen in evaluation mode (EVAL_MODE_ON, FREEZE_TRUNK_ONLY)",
    ),
    Inactive(
        (f"{_EVAL}.SHOULD_FLATTEN_FEATS",),
        lambda cfg: not are_tapped(cfg),
        "no head sees an inner layer (LINEAR_EVAL_FEAT_POOL_OPS_MAP)",
    ),
    Inactive(
        tuple(f"LOSS.swav_loss.queue.{key}" for key in ("start_iter", "start_epoch")),
        lambda cfg: cfg.LOSS["name"] == "swav_loss" and cfg.LOSS["swav_loss"].queue.queue_length == 0,
        "queue_length is 0",
    ),
    Inactive(
        ("LOSS.swav_loss.queue.start_epoch",),
        lambda cfg: (
            cfg.LOSS["name"] == "swav_loss" and cfg.LOSS["swav_loss"].queue.start_epoch >= cfg.OPTIMIZER.num_epochs
        ),
        "the run ends before the queue begins",
    ),
    Inactive(
        ("OPTIMIZER.regularize_bn", "OPTIMIZER.regularize_bias", "OPTIMIZER.non_regularized_parameters"),
        lambda cfg: not cfg.OPTIMIZER.head_optimizer_params.use_different_wd and _trunk_decay(cfg) == 0,
        "weight decay is 0",
    ),
    Inactive(
        (
            f"{_OPTIMIZER}.use_different_lr",
            f"{_OPTIMIZER}.use_different_wd",
            f"{_OPTIMIZER}.weight_decay",
            f"{_SCHEDULES}.lr_head",
            f"{_SCHEDULES}.weight_decay_head",
            "OPTIMIZER.regularize_bn",
            "OPTIMIZER.regularize_bias",
            "OPTIMIZER.non_regularized_parameters",
        ),
        lambda cfg: one_rate(cfg.OPTIMIZER),
        "parameters are grouped otherwise (construct_single_param_group_only, param_group_constructor)",
    ),
    Inactive(
        (f"{_OPTIMIZER}.use_different_wd",),
        lambda cfg: cfg.OPTIMIZER.head_optimizer_params.weight_decay == _trunk_decay(cfg),
        "the heads' weight decay is that of the trunk",
    ),
    Inactive(
        ("OPTIMIZER.linear_eval_heads",),
        lambda cfg: cfg.OPTIMIZER.param_group_constructor != "linear_eval_heads" or one_rate(cfg.OPTIMIZER),
        "param_group_constructor is not linear_eval_heads",
    ),
    Inactive(("OPTIMIZER.use_zero",), lambda cfg: cfg.OPTIMIZER.use_zero is False, "only True asks for sharded state"),
    Inactive(
        ("OPTIMIZER.param_group_constructor",),
        lambda cfg: cfg.OPTIMIZER.construct_single_param_group_only,
        "construct_single_param_group_only is set",
    ),
    Inactive(
        ("TEST_EVERY_NUM_EPOCH",),
        lambda cfg: not (cfg.TEST_MODEL and _measures_test(cfg)),
        "neither top-1 nor mIoU on TEST is measured",
    ),
    Inactive(
        ("METERS.name", "METERS.names", "METERS.model_output_mask"),
        lambda cfg: not (cfg.TEST_MODEL and can_measure_top1(cfg)),
        "no top-1 on TEST is measured",
    ),
    Inactive(
        ("CHECKPOINT.SAVE_BEST",),
        lambda cfg: cfg.CHECKPOINT.BEST_METRIC == "top1" and not (cfg.TEST_MODEL and can_measure_top1(cfg)),
        "no top-1 on TEST is measured",
    ),
    Inactive(("CHECKPOINT.BEST_METRIC",), lambda cfg: not cfg.CHECKPOINT.SAVE_BEST, "SAVE_BEST is false"),
    Inactive(
        ("EVALUATED_MODEL",),
        lambda cfg: not (cfg.NEAREST_NEIGHBOR.USE_KNN or cfg.ONLINE_PROBE.USE_PROBE),
        "neither kNN nor the online probe is on",
    ),
    Inactive(
        ("TEST_MODEL",),
        lambda cfg: cfg.PROGRAM == TRAIN and not _measures_test(cfg),
        "neither top-1 nor mIoU on TEST is measured either way",
    ),
    *(
        Inactive(
            (f"METERS.{meter}.topk_values",),
            _does_not_count(meter),
            "METERS.names does not ask for it, or no top-1 on TEST is measured",
        )
        for meter in METERS
    ),
    Inactive(
        tuple(f"CHECKPOINT.{key}" for key in ("KEEP_LAST", "KEEP_EVERY", "ASYNC")),
        lambda cfg: cfg.CHECKPOINT.CHECKPOINT_FREQUENCY == cfg.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY == -1,
        "no checkpoint is written",
    ),
    Inactive(
        ("CHECKPOINT.LATEST_CHECKPOINT_RESUME_FILE_NUM", "CHECKPOINT.ALLOW_CHANGED"),
        lambda cfg: not cfg.CHECKPOINT.AUTO_RESUME,
        "AUTO_RESUME is off",
    ),
)


def _has_batch_norm(head: Any) -> bool:
    """Check whether a head may have batch norm; a head of the user's may."""
    name, keys = head[0], head[1]
    return bool(keys.get("use_bn", name not in ("swav_head", "mlp")))


def _trunk_decay(cfg: RunConfig) -> float | None:
    schedules = cfg.OPTIMIZER.param_schedulers
    # A schedule has no one weight decay to compare with.
    if schedules.weight_decay.name or schedules.weight_decay_head.name:
        return None
    nested = cfg.OPTIMIZER.base_optimizer.weight_decay
    return cfg.OPTIMIZER.weight_decay if nested is None else nested


def _conditional(cfg: RunConfig) -> Iterator[str]:
    for entry in _CONDITIONS:
        keys = _changed(cfg, entry.keys)
        if keys and entry.when(cfg):
            yield f"{_have(keys)}: {entry.why}."


def _changed(cfg: RunConfig, keys: Iterable[str]) -> list[str]:
    """List the keys that exist and differ from their defaults."""
    # A key that repeats its default asks for nothing, so it gets no note.
    return [key for key in keys if _value(cfg, key) != _value(_defaults(), key)]


def inactive_keys(cfg: RunConfig) -> list[str]:
    """Write a sentence per switch that is off and has keys set away from their defaults, and per unread block."""
    notes = []
    for switch, keys in _SWITCHES.items():
        if not _value(cfg, switch) and (changed_keys := _changed(cfg, keys)):
            state = "off" if isinstance(_value(_defaults(), switch), bool) else "not set"
            notes.append(f"{_have(changed_keys)}: config.{switch} is {state}.")
    trunk, unset = cfg.MODEL.TRUNK, _defaults().MODEL.TRUNK
    read = {TRUNK_BLOCKS.get(trunk.NAME), FURTHER_BLOCKS.get(trunk.NAME)}
    for block in dict.fromkeys(TRUNK_BLOCKS.values()):
        # The trunk behind "auto" is known only once its weights are read.
        if trunk.NAME != "auto" and block not in read and getattr(trunk, block) != getattr(unset, block):
            notes.append(f"{_have([f'MODEL.TRUNK.{block}'])}: the trunk is {trunk.NAME}.")
    teacher, plain = cfg.DISTILLATION.TEACHER_MODEL, _defaults().DISTILLATION.TEACHER_MODEL
    if teacher != plain and not takes_other_model(cfg):
        names = _have(["DISTILLATION.TEACHER_MODEL"])
        notes.append(f"{names}: the loss is {cfg.LOSS['name']}, and its teacher is another.")
    of_rendezvous = _changed(cfg, ("DISTRIBUTED.RUN_ID", "DISTRIBUTED.SECRET_FILE"))
    if of_rendezvous and cfg.DISTRIBUTED.NUM_NODES == 1:
        notes.append(f"{_have(of_rendezvous)}: a run on one machine needs no rendezvous.")
    if cfg.TRAINER.EXACT_ACCUMULATION and cfg.ZERO.gradient_accumulation_steps <= 1:
        notes.append(f"{_have(['TRAINER.EXACT_ACCUMULATION'])}: a step has one micro-batch.")
    return list(dict.fromkeys([*notes, *_schedules(cfg), *_overridden(cfg), *_conditional(cfg)]))


def _overridden(cfg: RunConfig) -> Iterator[str]:
    """Yield notes on keys of OPTIMIZER that give way to another one."""
    block = cfg.OPTIMIZER
    schedules, nested = block.param_schedulers, block.base_optimizer
    if block.lr is not None and schedules.lr.auto_lr_scaling.auto_scale:
        yield f"{_have([f'{_SCHEDULES}.lr.auto_lr_scaling'])}: OPTIMIZER.lr={block.lr:g} is the peak at any batch."
    if block.weight_decay is not None and nested.weight_decay not in (None, block.weight_decay):
        yield f"{_have(['OPTIMIZER.weight_decay'])}: base_optimizer.weight_decay={nested.weight_decay:g} is used."


def _schedules(cfg: RunConfig) -> Iterator[str]:
    """Yield notes on keys of other schedules than the one that is named."""
    block, unset = cfg.OPTIMIZER.param_schedulers, Scheduler()
    every = {key for keys in KEYS.values() for key in keys}
    for name in ("lr", "lr_head", "weight_decay", "weight_decay_head"):
        schedule: Scheduler = getattr(block, name)
        # An unknown schedule is refused by a rule. That ``lr_head`` is off is a note of ``_SWITCHES``.
        if schedule.name not in KEYS or (
            name == "lr_head" and not cfg.OPTIMIZER.head_optimizer_params.use_different_lr
        ):
            continue
        other = sorted(every - {*KEYS[schedule.name]})
        if set_keys := [key for key in other if getattr(schedule, key) != getattr(unset, key)]:
            yield f"{_have([f'{_SCHEDULES}.{name}.{key}' for key in set_keys])}: the schedule is {schedule.name}."
        if name.startswith("weight_decay") and schedule.auto_lr_scaling.auto_scale:
            yield f"{_have([f'{_SCHEDULES}.{name}.auto_lr_scaling'])}: only learning rates are scaled."


def _have(keys: list[str]) -> str:
    return f"{', '.join(f'config.{key}' for key in keys)} {'has' if len(keys) == 1 else 'have'} no effect"


@cache
def _defaults() -> RunConfig:
    return RunConfig()


def _value(cfg: RunConfig, path: str, otherwise: Any = None) -> Any:
    node: Any = cfg
    for part in path.split("."):
        node = node.get(part, otherwise) if isinstance(node, Mapping) else getattr(node, part, otherwise)
    return node


def refused(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Report VISSL's unused keys whose value would change what is trained."""
    return [_problem(key, value) for key, value in _set_keys(cfg) if key.is_refused]


def meters(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the meters of METERS exist here."""
    names = [cfg.METERS.name, *cfg.METERS.names] if cfg.METERS.name else cfg.METERS.names
    must = f"must be {' or '.join(METERS)}: each image has one class here"
    fix = "Leave it out. For several classes an image, train SVMs (train_svm), which measure average precision."
    return [Problem("config.METERS.names", str(name), must, fix) for name in names if name not in METERS]


def no_effect(cfg: RunConfig) -> list[str]:
    """Return a list with one sentence that names the set keys without effect; empty if there are none."""
    keys = [key.path for key, _ in _set_keys(cfg) if not key.is_refused]
    # Recipes of VISSL bring blocks of losses that do not exist here. Only the loss that is named is computed.
    keys += [f"LOSS.{name}" for name in cfg.LOSS if name in OTHER_LOSSES]
    if not cfg.SLURM.USE_SLURM and Slurm() != cfg.SLURM:
        keys.append("SLURM (USE_SLURM is off)")
    for split in ("TRAIN", "TEST"):
        block = getattr(cfg.DATA, split)
        if block.DATA_PATHS and block.DATA_SOURCES in (["digits"], ["synthetic"]):
            keys.append(f"DATA.{split}.DATA_PATHS")
    return [f"Keys without effect here: {', '.join(keys)}."] if keys else []


def _problem(key: VisslKey, value: Any) -> Problem:
    allowed = " or ".join(str(allowed) for allowed in key.allowed)
    must = f"must be {allowed}: nothing else is implemented"
    return Problem(f"config.{key.path}", str(value), must, f"{key.why} Leave the key out.")


def _set_keys(cfg: RunConfig) -> list[tuple[VisslKey, Any]]:
    """Return the keys in ``cfg`` that only VISSL uses, with their values, unless a value changes nothing."""
    keys = []
    for key in vissl_keys():
        value = _value(cfg, key.path, _MISSING)
        if value is not _MISSING and value not in key.allowed:
            keys.append((key, value))
    return keys


_MISSING = object()  # the value of a key whose block was deleted or is not a block


VISSL_RULES = (refused, meters)
