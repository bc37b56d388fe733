"""Fill in DISTILLATION and keys of the loss if the loss names its teacher by weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vissl_zero.config.blocks.model_and_loss import Head, TeacherModel, Trunk, WeightsInit
from vissl_zero.config.run_config import RunConfig
from vissl_zero.config.weights_name import absolute, scheme_of
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.lifetime import run_in_subprocess
from vissl_zero.registry import WEIGHTS_READERS
from vissl_zero.resolve.components import method_of, missing_weights, normalization, saved_config, trunk_of


def teacher_name(cfg: RunConfig) -> str:
    """Return the weights that the loss names as its teacher; empty if it names none."""
    loss = str(cfg.LOSS.get("name"))
    spec = method_of(loss)
    return spec.teacher_weights(cfg) if spec and isinstance(cfg.LOSS.get(loss), spec.losses[loss]) else ""


def with_named_teacher(cfg: RunConfig) -> RunConfig:
    """Return a copy of ``cfg`` with the teacher's trunk, width and normalization filled in.

    Raises:
        ConfigError, CheckpointError: the teacher's weights do not exist, or their network is not recognized.
    """
    name = teacher_name(cfg)
    if not name:
        return cfg
    loss = str(cfg.LOSS["name"])
    spec, keys = method_of(loss), cfg.LOSS[loss]
    assert spec is not None
    # A saved configuration may be read from another working directory.
    key, name = f"config.LOSS.{loss}.teacher", absolute(name)
    if name == cfg.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT.PARAMS_FILE:
        return cfg  # a resolved configuration: the teacher is filled in already
    if TeacherModel() != cfg.DISTILLATION.TEACHER_MODEL:
        must = f"must be left out: {loss}.teacher names the teacher, and its trunk is that of the weights"
        raise ConfigError([Problem("config.DISTILLATION", "other values", must, "Leave DISTILLATION out.")])
    if problem := missing_weights(name, key):
        raise ConfigError([problem])
    saved = None if scheme_of(name) else saved_config(Path(name))
    # The teacher is built without adapters, so that it would be the network before its training.
    if saved is not None and (saved["MODEL"].get("LORA") or {}).get("USE_LORA"):
        fix = "Give its merged weights: vissl-zero export <run> --to safetensors."
        raise ConfigError([Problem(key, name, "must not be a run with LoRA, whose weights are in two parts", fix)])
    head = spec.teacher_head(cfg)
    # In a subprocess: this imports torch, which the launcher does not.
    run = run_in_subprocess(_teacher, name, saved, head is None)
    head = head or run["score_head"]
    if head is None:
        must = "must be weights that hold a head of prototypes, as those of DINO's training do"
        fix = "Write config.LOSS.name=feature_distillation_loss, which learns from features alone."
        raise ConfigError([Problem(key, name, must, fix)])
    mean, std = normalization(run["DATA"]["TRAIN"]["TRANSFORMS"])
    if not hasattr(keys, "teacher_mean"):  # the loss cannot renormalize the images for its teacher
        _require_normalization(cfg, mean, std)
    # The student's last layer must be as wide as what the teacher gives: features, or scores of prototypes.
    width = run["feature_dim"] if spec.teacher_head(cfg) else int(head[0][1]["num_clusters"][0])
    facts = {
        "embedding_dim": run["feature_dim"],
        "teacher_mean": mean if getattr(keys, "teacher_mean", None) is None else keys.teacher_mean,
        "teacher_std": std if getattr(keys, "teacher_std", None) is None else keys.teacher_std,
    }
    filled = replace(keys, teacher=name, **{key: value for key, value in facts.items() if hasattr(keys, key)})
    heads = [_with_last(head, width) for head in cfg.MODEL.HEAD.PARAMS]
    teacher = TeacherModel(
        TRUNK=trunk_of(Trunk(), run["MODEL"]["TRUNK"]),
        HEAD=Head(PARAMS=head),
        WEIGHTS_INIT=WeightsInit(PARAMS_FILE=name),
    )
    return replace(
        cfg,
        MODEL=replace(cfg.MODEL, HEAD=replace(cfg.MODEL.HEAD, PARAMS=heads)),
        LOSS={**cfg.LOSS, loss: filled},
        DISTILLATION=replace(cfg.DISTILLATION, TEACHER_MODEL=teacher),
    )


def _teacher(name: str, saved: Mapping[str, Any] | None, wants_scores: bool) -> Mapping[str, Any]:
    """Return the teacher's MODEL and DATA blocks, its number of features and its head of prototypes."""
    teacher: Mapping[str, Any] = WEIGHTS_READERS.get("teacher").build(name, saved, wants_scores)
    return teacher


def _require_normalization(cfg: RunConfig, mean: Any, std: Any) -> None:
    """Raise ConfigError if the student's images are not normalized as the teacher expects."""
    # Student and teacher see the same tensors, so one Normalize must suit both.
    students = normalization(cfg.DATA.TRAIN.TRANSFORMS)
    if [list(values) for values in students] != [list(mean), list(std)]:
        must = f"must normalize as the teacher's weights expect, by mean {list(mean)} and std {list(std)}"
        fix = "Correct Normalize, or add it after ToTensor."
        got = f"mean {list(students[0])} and std {list(students[1])}"
        raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", got, must, fix)])


def _with_last(head: Any, width: int) -> Any:
    """Return ``head`` with ``width`` in place of -1 as its last width or its number of prototypes."""
    is_named = isinstance(head, Sequence) and len(head) == 2 and isinstance(head[1], Mapping)
    if is_named and head[1].get("num_clusters") == [-1]:
        return [head[0], {**head[1], "num_clusters": [width]}]
    dims = head[1].get("dims") if is_named else None
    if not isinstance(dims, Sequence) or len(dims) < 2 or dims[-1] != -1:
        return head
    return [head[0], {**head[1], "dims": [*dims[:-1], width]}]
