"""Supervised cross-entropy: keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vissl_zero.config.blocks.data import MIXING_COLLATOR
from vissl_zero.config.constraints import number
from vissl_zero.errors import Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


@dataclass
class CrossEntropyConfig:
    """``CrossEntropyLoss`` and ``cross_entropy_multiple_output_single_target``."""

    weight: list[float] | None = None
    """Weight of each class; null: all equal."""
    ignore_index: int = -1
    """Label of images that do not count."""
    normalize_output: bool = False
    """Divide the logits by their L2 norm first."""
    temperature: float = number(1.0, least=1e-4)
    """Divides the logits before the softmax."""


@METHODS.register("supervised")
class SupervisedSpec(MethodSpec):
    """Supervised cross-entropy."""

    losses = {
        "CrossEntropyLoss": CrossEntropyConfig,
        "cross_entropy_multiple_output_single_target": CrossEntropyConfig,
    }
    title = "Supervised"
    paper = ""
    views = "1 or more crops, with labels"
    couples = "nothing"
    recipe = "digits/supervised"

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check that images have labels, and that class weights are not combined with mixing."""
        keys, problems = loss_keys(cfg), list[Problem]()
        if keys.weight is not None and cfg.DATA.TRAIN.COLLATE_FUNCTION == MIXING_COLLATOR:
            must = "must be null where images are mixed"
            problems.append(Problem(f"config.LOSS.{cfg.LOSS['name']}.weight", str(keys.weight), must, "Leave it out."))
        if cfg.DATA.TRAIN.LABEL_TYPE != "standard" and not cfg.TEST_ONLY:
            fix = "Write config.DATA.TRAIN.LABEL_TYPE=standard."
            must = "must be standard for a supervised loss"
            problems.append(Problem("config.DATA.TRAIN.LABEL_TYPE", cfg.DATA.TRAIN.LABEL_TYPE, must, fix))
        return problems
