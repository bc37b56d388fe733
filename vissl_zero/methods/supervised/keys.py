"""Keys of supervised cross-entropy, and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vissl_zero.config.blocks.data import MIXING_COLLATOR
from vissl_zero.config.constraints import choice, constraint_problems, number
from vissl_zero.config.options import typed_options
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.spec import MethodSpec, loss_keys
from vissl_zero.registry import METHODS

if TYPE_CHECKING:
    from vissl_zero.config.host import Host
    from vissl_zero.config.run import RunConfig

PARAMS_KEY = "config.DATA.TRAIN.COLLATE_FUNCTION_PARAMS"


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
    mixing: dict[str, Any] | None = None
    """Mixup and CutMix; taken from DATA.TRAIN.COLLATE_FUNCTION_PARAMS of cutmixup_collator, write it there."""


@dataclass
class MixingConfig:
    """``COLLATE_FUNCTION_PARAMS`` of ``cutmixup_collator``, as VISSL and timm have them."""

    mixup_alpha: float = number(1.0, least=0, most=2)
    """Of the Beta distribution of mixup's shares; 0: no mixup."""
    cutmix_alpha: float = number(0.0, least=0, most=2)
    """Of the Beta distribution of CutMix's areas; 0: no CutMix."""
    cutmix_minmax: list[float] | None = None
    """Least and largest side of CutMix's box over the image's, in place of cutmix_alpha."""
    prob: float = number(1.0, least=0, most=1)
    """Probability of mixing at all."""
    switch_prob: float = number(0.5, least=0, most=1)
    """Probability of CutMix where both are on."""
    mode: str = choice("batch", "batch", "pair", "elem")
    """What shares a draw: the images of a process's micro-batch, two images that are mixed with each other, nothing."""
    correct_lam: bool = True
    """CutMix: labels are mixed by the area that was pasted, where the box is cut by the border."""
    label_smoothing: float = number(0.1, least=0, below=1)
    """Share of each label that is spread over all classes."""
    num_classes: int = number(1000, least=1, most=2**31)
    """Classes; as many as the head has outputs."""


def mixing_of(cfg: RunConfig) -> dict[str, Any] | None:
    """All keys of the mixing that DATA.TRAIN asks for; None: no image is mixed. Raises ConfigError for wrong keys."""
    train = cfg.DATA.TRAIN
    if train.COLLATE_FUNCTION != MIXING_COLLATOR:
        return None
    return typed_options(MixingConfig, train.COLLATE_FUNCTION_PARAMS, PARAMS_KEY)


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

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Mixing is written where VISSL has it."""
        try:
            return {"mixing": (mixing_of(cfg), "collator")}
        except ConfigError:
            return {}  # `problems` says which key

    def problems(self, cfg: RunConfig, host: Host) -> list[Problem]:
        """There are classes to tell apart, and mixing is written in its place."""
        keys, found = loss_keys(cfg), list[Problem]()
        try:
            mixing = mixing_of(cfg)
        except ConfigError as error:
            mixing = None
            found += error.problems
        if keys.mixing is not None:
            fix = f"Write config.DATA.TRAIN.COLLATE_FUNCTION={MIXING_COLLATOR} and {PARAMS_KEY}."
            found.append(Problem(f"config.LOSS.{cfg.LOSS['name']}.mixing", str(keys.mixing), "must be null", fix))
        if mixing is not None:
            found += list(constraint_problems(MixingConfig(**mixing), PARAMS_KEY))
            if not (mixing["mixup_alpha"] or mixing["cutmix_alpha"] or mixing["cutmix_minmax"]):
                must = "must have a mixup_alpha or a cutmix_alpha above 0, or cutmix_minmax"
                found.append(Problem(PARAMS_KEY, str(mixing), must, "Write mixup_alpha: 0.8, or another collator."))
            sides = mixing["cutmix_minmax"]
            if sides is not None and not (len(sides) == 2 and 0 <= sides[0] < sides[1] <= 1):
                must = "must be two shares of the side, the smaller first"
                found.append(Problem(f"{PARAMS_KEY}.cutmix_minmax", str(sides), must, "Write [0.2, 0.8], for example."))
            if keys.weight is not None:
                must = "must be null where images are mixed"
                found.append(Problem(f"config.LOSS.{cfg.LOSS['name']}.weight", str(keys.weight), must, "Leave it out."))
        if cfg.DATA.TRAIN.LABEL_TYPE != "standard":
            fix = "Write config.DATA.TRAIN.LABEL_TYPE=standard."
            must = "must be standard for a supervised loss"
            found.append(Problem("config.DATA.TRAIN.LABEL_TYPE", cfg.DATA.TRAIN.LABEL_TYPE, must, fix))
        return found
