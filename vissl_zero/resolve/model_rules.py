"""Rules of trunk, heads and loss: known names and keys, and combinations that are supported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vissl_zero.config.blocks.model_and_loss import ADAPTER_FILES, RegNetBlock
from vissl_zero.config.components import builtin_keys, component_keys, typed_options
from vissl_zero.config.components.heads import KEY as TAPS
from vissl_zero.config.components.heads import are_tapped, features_are_tapped
from vissl_zero.config.components.heads import problems as tap_problems
from vissl_zero.config.components.trunks import (
    ANYNET_PARAMETERS,
    REGNET_PARAMETERS,
    TRUNK_BLOCKS,
    ConvitConfig,
    VisionTransformerConfig,
    anynet_problems,
    regnet_problems,
    size_problems,
    trunk_component,
    vision_transformer_problems,
)
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.registry import HEADS, LOSSES, TRUNKS
from vissl_zero.resolve.components import loss_options, method_of, missing_weights, trunk_options
from vissl_zero.vissl.keys import NO_EFFECT, OTHER_LOSSES

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions


def known(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the loss and its keys are known, and that the names of the other blocks are losses."""
    name = cfg.LOSS.get("name")
    blocks = [key for key in cfg.LOSS if key != "name" and key not in _UNREAD]
    all_losses = f"Known: {', '.join(LOSSES)}."
    problems = [
        Problem(f"config.LOSS.{key}", "", "is not the name of a loss", did_you_mean(key, LOSSES).strip() or all_losses)
        for key in blocks
        if key not in LOSSES and key not in OTHER_LOSSES
    ]
    if not isinstance(name, str) or name not in LOSSES:
        return [LOSSES.unknown(str(name)), *problems]
    wrong = [key for key in blocks if not _is_block(cfg.LOSS[key])]
    for key in wrong:
        fix = f"Write config.LOSS.{key}.<key>=<value>."
        problems.append(Problem(f"config.LOSS.{key}", str(cfg.LOSS[key]), "must be a block of keys", fix))
    if name in wrong:
        return problems
    try:
        # Only for its errors: it checks names and types of the loss's keys.
        loss_options(cfg)
    except ConfigError as error:
        problems += error.problems
    return problems


# Keys of VISSL that stand among the losses, and are none.
_UNREAD = [key for key, value in NO_EFFECT["LOSS"].items() if not isinstance(value, Mapping)]


def _is_block(value: object) -> bool:
    return value is None or isinstance(value, Mapping) or is_dataclass(value)


def method(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Run the rules of the method that the loss belongs to."""
    name = str(cfg.LOSS.get("name"))
    spec = method_of(name)
    # Another type of block is reported by ``known`` already.
    return [] if spec is None or not isinstance(cfg.LOSS.get(name), spec.losses[name]) else spec.problems(cfg, decided)


def views_apart(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the heads can be called view by view if VIEWS_APART is set."""
    heads = [head for head in cfg.MODEL.HEAD.PARAMS if is_head(head)]
    links = [link for head in heads for link in (head[1].get("heads", []) if head[0] == "chain" else [head])]
    names = [link[0] for link in links if is_head(link)]
    together = [name for name in names if name in HEADS.builtin() and name not in _APART]
    if not cfg.MODEL.VIEWS_APART or not (together or are_tapped(cfg)):
        return []
    got = ", ".join(together) or "LINEAR_EVAL_FEAT_POOL_OPS_MAP"
    must = f"must be {', '.join(_APART)} or a chain of these where config.MODEL.VIEWS_APART is true"
    fix = "Write config.MODEL.VIEWS_APART=false, or another head."
    return [Problem("config.MODEL.HEAD.PARAMS", got, must, fix)]


_APART = ("mlp", "siamese_head", "identity", "vicregl_head")


def pack_crops(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that no head reads an inner layer if PACK_CROPS is set."""
    # Inner layers see the packed crops of all sizes as one image.
    if not cfg.MODEL.PACK_CROPS or not (are_tapped(cfg) or features_are_tapped(cfg)):
        return None
    must = "must be false where heads or features are those of inner layers (LINEAR_EVAL_FEAT_POOL_OPS_MAP)"
    return Problem("config.MODEL.PACK_CROPS", "true", must, "Leave it out.")


def lora(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that peft is installed, weights are named, targets are names or a pattern, and float8 is off."""
    # Whether the targets match layers is checked when the model is built.
    block, key, problems = cfg.MODEL.LORA, "config.MODEL.LORA", list[Problem]()
    if not block.USE_LORA:
        return []
    if find_spec("peft") is None:
        fix = f"Run pip install 'vissl-zero[lora]', or write {key}.USE_LORA=false."
        problems.append(Problem(f"{key}.USE_LORA", "True", "needs the package peft, which is not installed", fix))
    if not cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE:
        fix = "Write config.MODEL.WEIGHTS_INIT.PARAMS_FILE=<weights>."
        problems.append(
            Problem(f"{key}.USE_LORA", "True", "needs weights to begin with, because the trunk stays frozen", fix)
        )
    if not _are_targets(block.TARGET_MODULES):
        must = "must be a list of names of layers, or one regular expression of whole names"
        fix = f"Write {key}.TARGET_MODULES=[attn.qkv,attn.proj], for example."
        problems.append(Problem(f"{key}.TARGET_MODULES", str(block.TARGET_MODULES), must, fix))
    if cfg.ZERO.ENGINE == "fairscale":
        must = "is not available on fairscale, where its parity has not been shown"
        problems.append(Problem(f"{key}.USE_LORA", "True", must, "Write config.ZERO.ENGINE=torch."))
    if cfg.MODEL.FLOAT8.USE_FLOAT8:
        must = "cannot go with LORA, whose frozen layers have no float8 form"
        problems.append(Problem("config.MODEL.FLOAT8.USE_FLOAT8", "True", must, "Write false, or leave LORA out."))
    return problems


def adapter_folder(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the folder of an initial adapter has its files."""
    key, folder, problems = "config.MODEL.LORA.ADAPTER_FOLDER", cfg.MODEL.LORA.ADAPTER_FOLDER, list[Problem]()
    if not folder or not cfg.MODEL.LORA.USE_LORA:
        return []
    if not all((Path(folder).expanduser() / name).is_file() for name in ADAPTER_FILES):
        problems.append(
            Problem(key, folder, f"must be a folder with {' and '.join(ADAPTER_FILES)}", "Correct the path.")
        )
    return problems


def _are_targets(value: Any) -> bool:
    if not isinstance(value, str):
        return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(name, str) for name in value)
    try:
        return bool(re.compile(value).pattern)
    except re.error:
        return False


def evaluated_model(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that a loss whose teacher is to be evaluated has a momentum teacher."""
    # A user's loss has no spec: whether it has a teacher is known only when it is built.
    spec = method_of(cfg.LOSS.get("name"))
    is_wrong = cfg.EVALUATED_MODEL == "teacher" and spec is not None and not spec.teacher_follows
    if not is_wrong:
        return []
    if not cfg.TEST_ONLY:
        return [no_teacher(cfg.LOSS["name"])]
    must = "must be student: this run trains nothing, and its weights are one model"
    fix = "Name the momentum copy itself as the weights: <run folder>/weights_teacher.safetensors."
    return [Problem("config.EVALUATED_MODEL", "teacher", must, fix)]


def no_teacher(loss: str) -> Problem:
    """Return the problem of EVALUATED_MODEL=teacher for a loss without a momentum teacher."""
    must = f"must be student: {loss} has no teacher that follows the model"
    return Problem("config.EVALUATED_MODEL", "teacher", must, "Write config.EVALUATED_MODEL=student.")


_HEADS = "config.MODEL.HEAD.PARAMS"
# Head -> meaning of -1 as its last width.
_LAST = {
    **dict.fromkeys(("mlp", "eval_mlp", "fcn_head"), "as many as there are classes"),
    **dict.fromkeys(("patch_predictor", "pixel_head"), "as many as a patch has pixels in all channels"),
}


def trunk(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the trunk and its keys are known."""
    if trunk_component(cfg.MODEL.TRUNK.NAME) not in TRUNKS:
        return [TRUNKS.unknown(cfg.MODEL.TRUNK.NAME)]
    has_name = "name" in cfg.MODEL.TRUNK.PARAMS and trunk_component(cfg.MODEL.TRUNK.NAME) == "timm"
    if cfg.MODEL.TRUNK.NAME == "timm" or has_name:
        fix = "Write config.MODEL.TRUNK.NAME=timm/vit_small_patch16_224, for example, and no name in PARAMS."
        return [Problem("config.MODEL.TRUNK.NAME", cfg.MODEL.TRUNK.NAME, "must say the model: timm/<model>", fix)]
    if cfg.MODEL.TRUNK.NAME in TRUNK_BLOCKS and cfg.MODEL.TRUNK.PARAMS:
        fix = f"Write them under config.MODEL.TRUNK.{TRUNK_BLOCKS[cfg.MODEL.TRUNK.NAME]}."
        return [Problem("config.MODEL.TRUNK.PARAMS", str(cfg.MODEL.TRUNK.PARAMS), "is for trunks of your own", fix)]
    try:
        trunk_options(cfg.MODEL.TRUNK)
    except ConfigError as error:
        return list(error.problems)
    return []


_INPUT_TYPES = {"bgr": ("resnet", "regnet"), "lab": ("resnet", "alexnet_colorization")}


def input_type(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that the trunk supports this INPUT_TYPE, as in VISSL."""
    key, name, order = "config.MODEL.INPUT_TYPE", cfg.MODEL.TRUNK.NAME, cfg.MODEL.INPUT_TYPE
    if name == "alexnet_colorization" and order != "lab":
        fix = "Write lab, and ImgPil2LabTensor at the end of the transforms."
        return Problem(key, order, "must be lab for alexnet_colorization", fix)
    if order == "rgb" or name in _INPUT_TYPES.get(order, (name,)):
        return None
    return Problem(key, order, f"must be rgb for {name}", f"Trunks for {order}: {', '.join(_INPUT_TYPES[order])}.")


def vision_transformer(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that a vision transformer's heads divide its width, and its patches the image."""
    is_used = cfg.MODEL.TRUNK.NAME == "vision_transformer"
    return vision_transformer_problems(cfg.MODEL.TRUNK.VISION_TRANSFORMERS) if is_used else []


def regnet(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that a RegNet has a name or all of its parameters, and that they are valid."""
    if cfg.MODEL.TRUNK.NAME != "regnet":
        return []
    block, key = cfg.MODEL.TRUNK.REGNET, "config.MODEL.TRUNK.REGNET"
    stages = [name for name in ANYNET_PARAMETERS if getattr(block, name)]
    if problem := _checkpointing_problem(block, key):
        return [problem]
    if block.name == block.ANYNET:
        return anynet_problems(block, key)
    if stages:
        return [Problem(key, ", ".join(stages), "needs name: anynet", f"Write {key}.name=anynet, or leave them out.")]
    written = [name for name in REGNET_PARAMETERS if getattr(block, name) is not None]
    if block.name and written:
        fix = f"Leave out the name, or {', '.join(written)}."
        return [Problem(key, f"name and {', '.join(written)}", "must have a name or parameters, not both", fix)]
    missing = [name for name in REGNET_PARAMETERS if name not in written]
    if not block.name and missing:
        fix = f"Add {', '.join(missing)}, or write name: regnet_y_400mf."
        return [
            Problem(key, f"only {', '.join(written)}" if written else "", "must have a name or all parameters", fix)
        ]
    return regnet_problems(block)


def _checkpointing_problem(block: RegNetBlock, key: str) -> Problem | None:
    """Check that stage_checkpointing has a flag per entry of stage_checkpoints, with a stage's true flags first."""
    for index, flags in enumerate(block.stage_checkpointing):
        ends = block.stage_checkpoints[index] if index < len(block.stage_checkpoints) else []
        if flags and (len(flags) != len(ends) or sorted(flags, reverse=True) != list(flags)):
            must = f"must have a flag for each of the {len(ends)} block ends of stage {index + 1}, all true ones first"
            fix = f"Make it as long as {key}.stage_checkpoints, or leave it out."
            return Problem(f"{key}.stage_checkpointing", str(list(flags)), must, fix)
    return None


_SIZED = ("beit", "xcit", "convnext", "swin_transformer")


def trunk_sizes(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that heads divide the width, patches divide the image, and lists of stages have the same length."""
    name = cfg.MODEL.TRUNK.NAME
    if name == "convit":
        return [*vision_transformer_problems(cfg.MODEL.TRUNK.VISION_TRANSFORMERS), *_not_in_convit(cfg)]
    if name not in _SIZED:
        return []
    block = TRUNK_BLOCKS[name]
    return size_problems(f"config.MODEL.TRUNK.{block}", getattr(cfg.MODEL.TRUNK, block))


def _not_in_convit(cfg: RunConfig) -> list[Problem]:
    """Refuse keys of VISION_TRANSFORMERS that a ConViT does not have."""
    block, unset = cfg.MODEL.TRUNK.VISION_TRANSFORMERS, VisionTransformerConfig()
    known_names = {item.name for item in fields(ConvitConfig)}
    return [
        Problem(
            f"config.MODEL.TRUNK.VISION_TRANSFORMERS.{item.name}",
            str(getattr(block, item.name)),
            f"must be {getattr(unset, item.name)} for a convit, which does not have it",
            "Leave it out.",
        )
        for item in fields(VisionTransformerConfig)
        if item.name not in known_names and getattr(block, item.name) != getattr(unset, item.name)
    ]


def frozen(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that temporarily frozen parameters are pairs of a name and a number of steps."""
    key, problems = "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP", []
    for entry in cfg.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP:
        pair = list(entry) if isinstance(entry, (list, tuple)) else []
        # By type, because a bool is an int to Python.
        if [type(part) for part in pair] != [str, int] or pair[1] < 0:
            fix = "Write [[heads.0.prototypes0.weight, 313]], for example."
            problems.append(
                Problem(key, str(entry), "must hold pairs of a parameter's name and a number of steps", fix)
            )
    return problems


def heads(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that every head has the form ["name", {keys}], and that its name and keys are known."""
    if not cfg.MODEL.HEAD.PARAMS:
        fix = 'Write [["swav_head", {dims: [...], num_clusters: [...]}]] or [["mlp", {dims: [...]}]].'
        return [Problem(_HEADS, "[]", "must list at least one head", fix)]
    # With FREEZE_TRUNK_AND_HEAD features are measured after the heads, so the last head may lack prototypes.
    measured = cfg.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_AND_HEAD
    written = enumerate(cfg.MODEL.HEAD.PARAMS)
    return [problem for index, head in written for problem in _head(head, f"{_HEADS}[{index}]", is_inner=measured)]


# Head -> its keys that are lists of heads, applied one after another.
_ROWS = {"chain": ("heads",), "pirl_head": ("of_image", "of_tiles")}


def _head(head: Any, key: str, is_inner: bool) -> list[Problem]:
    if not is_head(head):
        fix = 'Write a list of lists: [["mlp", {dims: [64, 10]}]].'
        return [Problem(_HEADS, str(head), 'must hold ["name", {key: value}]', fix)]
    name, options = head
    if name not in HEADS:
        return [HEADS.unknown(name)]
    try:
        key = f"{key}[1]"
        problems = _dims(name, typed_options(component_keys(HEADS, name), options, key), key, is_inner)
        for row_key in (row_key for row_key in _ROWS.get(name, ()) if options.get(row_key)):
            row = options[row_key]
            for index, part in enumerate(row):
                problems += _head(part, f"{key}.{row_key}[{index}]", is_inner or index < len(row) - 1)
            problems += _joints(row)
        return problems
    except ConfigError as error:
        return list(error.problems)


def _joints(heads: Sequence[Any]) -> list[Problem]:
    """Check that the input width of each head in a chain is the output width of the head before."""
    widths = [list(head[1].get("dims") or []) if is_head(head) else [] for head in heads]
    return [
        Problem(
            _HEADS,
            f"{before} and then {after}",
            "must begin with the outputs of the head before: several heads are applied one after another",
            f"Write dims: [{before[-1] if before[-1] > 0 else 128}, ...] for the second.",
        )
        for before, after in pairwise(widths)
        if before and after and (before[-1] != after[0] or after[0] < 1)
    ]


def is_head(head: Any) -> bool:
    """Check whether an entry of HEAD.PARAMS has the form ["name", {key: value}]."""
    is_pair = isinstance(head, Sequence) and not isinstance(head, str) and len(head) == 2
    return is_pair and isinstance(head[0], str) and isinstance(head[1], Mapping)


def _dims(name: str, options: Mapping[str, Any], key: str, is_inner: bool) -> list[Problem]:
    """Check the widths and the numbers of prototypes of a built-in head."""
    problems = []
    if name in builtin_keys("head") and "dims" in options and name != "chain":
        problems += _widths(name, list(options["dims"]), key)
    if name in builtin_keys("head") and "num_clusters" in options:
        got = str(list(options["num_clusters"]))
        is_projection = is_inner and name == "swav_head" and not options["num_clusters"]
        if not is_projection and (not options["num_clusters"] or min(options["num_clusters"]) < 1):
            must = "must have at least 1 prototype in each layer"
            problems.append(Problem(f"{key}.num_clusters", got, must, "Write num_clusters: [3000], for example."))
    return problems


def _widths(name: str, dims: list[int], key: str) -> list[Problem]:
    outputs = [] if name in _LAST and dims[-1:] == [-1] else dims[-1:]
    if len(dims) < 2 or min([*dims[1:-1], *outputs], default=1) < 1 or (dims[0] < 1 and dims[0] != -1):
        must = "must be two or more widths, from the trunk's features (-1: as many as it has) to the outputs"
        must += f" (-1: {_LAST[name]})" if name in _LAST else ""
        return [Problem(f"{key}.dims", str(dims), must, "Write dims: [features, ..., outputs].")]
    return []


def evaluation(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that EVAL_MODE_ON is set if one of the settings is that needs it."""
    # VISSL ignores them without EVAL_MODE_ON; training the trunk instead would be a costly surprise.
    settings, key = cfg.MODEL.FEATURE_EVAL_SETTINGS, "config.MODEL.FEATURE_EVAL_SETTINGS"
    if settings.EVAL_MODE_ON:
        return []
    names = ("FREEZE_TRUNK_ONLY", "FREEZE_TRUNK_AND_HEAD", "EXTRACT_TRUNK_FEATURES_ONLY")
    fix = f"Write {key}.EVAL_MODE_ON=true."
    return [Problem(f"{key}.{name}", "True", "needs EVAL_MODE_ON", fix) for name in names if getattr(settings, name)]


def sweep(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that heads trained at several learning rates are independent of each other."""
    # Only then does the best head equal the head of a run with this learning rate alone.
    factors, settings = cfg.OPTIMIZER.head_optimizer_params.lr_factors, cfg.MODEL.FEATURE_EVAL_SETTINGS
    if not factors:
        return []
    key, problems = "config.OPTIMIZER.head_optimizer_params.lr_factors", []
    if len(cfg.MODEL.HEAD.PARAMS) != 1:
        problems.append(
            Problem(_HEADS, f"{len(cfg.MODEL.HEAD.PARAMS)} heads", f"must be one head, as {key} is given", "")
        )
    if not settings.FREEZE_TRUNK_ONLY:
        fix = "Write config.MODEL.FEATURE_EVAL_SETTINGS={EVAL_MODE_ON: true, FREEZE_TRUNK_ONLY: true}, or leave it out."
        problems.append(Problem(key, str(factors), "needs a frozen trunk: else the heads would share one", fix))
    if cfg.ZERO.clip_grad is not None or cfg.MODEL.GRAD_CLIP.USE_GRAD_CLIP:
        fix = "Leave one of the two out."
        problems.append(Problem(key, str(factors), "cannot go with clipping, which joins the heads' gradients", fix))
    return problems


def taps(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that there is one inner layer with its pooling per head, and no sweep of learning rates."""
    problems = tap_problems(cfg)
    if are_tapped(cfg) and cfg.OPTIMIZER.head_optimizer_params.lr_factors:
        fix = "Write lr_factors: [], or leave the map out."
        problems.append(Problem(TAPS, "a map", "cannot go with head_optimizer_params.lr_factors: one head each", fix))
    return problems


def probe(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that a run that trains a probe has TEST images to measure it on."""
    if not cfg.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY or cfg.TEST_ONLY or cfg.DATA.TEST.DATA_SOURCES:
        return None
    fix = "Write config.DATA.TEST.DATA_PATHS=[<class folders of test images>]."
    return Problem("config.DATA.TEST.DATA_SOURCES", "[]", "must name the images that the probe is measured on", fix)


def weights(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that the initial weights exist."""
    return missing_weights(cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE)


def continued(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that a run with CONTINUE has weights, and trains trunk and heads."""
    key, problems = "config.MODEL.WEIGHTS_INIT", []
    if cfg.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT.CONTINUE:
        name = "config.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT.CONTINUE"
        problems.append(Problem(name, "true", "must be false: this teacher is not trained", f"Leave {name} out."))
    if not cfg.MODEL.WEIGHTS_INIT.CONTINUE:
        return problems
    if not cfg.MODEL.WEIGHTS_INIT.PARAMS_FILE:
        must = "must name the weights that CONTINUE goes on from"
        fix = f"Write {key}.PARAMS_FILE=<file, run folder or timm:<model>>, or {key}.CONTINUE=false."
        problems.append(Problem(f"{key}.PARAMS_FILE", "''", must, fix))
    if cfg.TEST_ONLY or cfg.MODEL.FEATURE_EVAL_SETTINGS.EVAL_MODE_ON:
        must = "is for pretraining; TEST_ONLY and EVAL_MODE_ON measure or freeze the trunk"
        problems.append(Problem(f"{key}.CONTINUE", "true", must, f"Write {key}.CONTINUE=false."))
    return problems


MODEL_RULES = (
    trunk,
    regnet,
    vision_transformer,
    trunk_sizes,
    input_type,
    frozen,
    heads,
    views_apart,
    pack_crops,
    evaluation,
    taps,
    sweep,
    probe,
    weights,
    continued,
    lora,
    adapter_folder,
    known,
    method,
    evaluated_model,
)
