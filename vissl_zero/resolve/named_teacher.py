"""The model under DISTILLATION, and keys of the loss, where the loss names its teacher by weights alone."""

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


def with_named_teacher(cfg: RunConfig) -> RunConfig:
    """Fill in the teacher's trunk, its width and its normalization in a copy of ``cfg``.

    Raises:
        ConfigError, CheckpointError: its weights are not there, or of a network that is not known.
    """
    loss = str(cfg.LOSS.get("name"))
    spec = method_of(loss)
    keys: Any = cfg.LOSS.get(loss)
    name = spec.teacher_weights(cfg) if spec and isinstance(keys, spec.losses[loss]) else ""
    if not name:
        return cfg
    key, name = f"config.LOSS.{loss}.teacher", absolute(name)
    if name == cfg.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT.PARAMS_FILE:
        return cfg  # filled in before
    if TeacherModel() != cfg.DISTILLATION.TEACHER_MODEL:
        must = f"must be left out: {loss}.teacher names the teacher, and its trunk is that of the weights"
        raise ConfigError([Problem("config.DISTILLATION", "other values", must, "Leave DISTILLATION out.")])
    if problem := missing_weights(name, key):
        raise ConfigError([problem])
    saved = None if scheme_of(name) else saved_config(Path(name))
    if saved is not None and (saved["MODEL"].get("LORA") or {}).get("USE_LORA"):
        fix = "Give its merged weights: vissl-zero export <run> --to safetensors."
        raise ConfigError([Problem(key, name, "must not be a run with LoRA, whose weights are in two parts", fix)])
    run = run_in_subprocess(_teacher, name, saved)
    mean, std = normalization(run["DATA"]["TRAIN"]["TRANSFORMS"])
    filled = replace(
        keys,
        teacher=name,
        embedding_dim=run["feature_dim"],
        teacher_mean=mean if keys.teacher_mean is None else keys.teacher_mean,
        teacher_std=std if keys.teacher_std is None else keys.teacher_std,
    )
    heads = [_with_last(head, run["feature_dim"]) for head in cfg.MODEL.HEAD.PARAMS]
    teacher = TeacherModel(
        TRUNK=trunk_of(Trunk(), run["MODEL"]["TRUNK"]),
        HEAD=Head(PARAMS=spec.teacher_head(cfg)),
        WEIGHTS_INIT=WeightsInit(PARAMS_FILE=name),
    )
    return replace(
        cfg,
        MODEL=replace(cfg.MODEL, HEAD=replace(cfg.MODEL.HEAD, PARAMS=heads)),
        LOSS={**cfg.LOSS, loss: filled},
        DISTILLATION=replace(cfg.DISTILLATION, TEACHER_MODEL=teacher),
    )


def _teacher(name: str, saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Recognize the network of a teacher, and count its features; imports torch."""
    teacher: Mapping[str, Any] = WEIGHTS_READERS.get("teacher").build(name, saved)
    return teacher


def _with_last(head: Any, width: int) -> Any:
    """Set the last of a head's dims, where it is -1, to the teacher's width."""
    is_named = isinstance(head, Sequence) and len(head) == 2 and isinstance(head[1], Mapping)
    dims = head[1].get("dims") if is_named else None
    if not isinstance(dims, Sequence) or len(dims) < 2 or dims[-1] != -1:
        return head
    return [head[0], {**head[1], "dims": [*dims[:-1], width]}]
