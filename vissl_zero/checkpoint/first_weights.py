"""``MODEL.WEIGHTS_INIT``: weights of another run, or from elsewhere, to begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rich
import torch
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.checkpoint.foreign_layouts import read_foreign
from vissl_zero.checkpoint.matching import Match, match
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.errors import CheckpointError, printable

_FOUND_BY_ITSELF = ("classy_state_dict", "")


@torch.no_grad()
def load_first_weights(model: nn.Module, plan: ResolvedRun) -> Mapping[str, Callable[[], Tensor]]:
    """Fill ``model`` from ``WEIGHTS_INIT.PARAMS_FILE``, if it is given; rank 0 says what did not match.

    Every rank reads the file for itself. In evaluation mode (``FEATURE_EVAL_SETTINGS``) heads are left as they are.

    Args:
        model: unsharded, on the CPU; what is on the meta device is left alone.
        plan: of the run.
    Returns:
        By full name, what reads each tensor that was found.
    Raises:
        CheckpointError: the file is unreadable, damaged or refused, or the trunk would not be complete.
    """
    options, settings = plan.config["MODEL"]["WEIGHTS_INIT"], plan.config["MODEL"]["FEATURE_EVAL_SETTINGS"]
    wants_heads = not settings["EVAL_MODE_ON"] or settings["EVAL_TRUNK_AND_HEAD"]
    if not options["PARAMS_FILE"]:
        return {}
    return _fill(model, options, wants_heads, wants_heads and settings["ASSERT_HEAD_LAYER_SHAPE_INIT"])


@torch.no_grad()
def load_teacher(model: nn.Module, plan: ResolvedRun) -> Mapping[str, Callable[[], Tensor]]:
    """Fill the model under DISTILLATION from its own ``WEIGHTS_INIT.PARAMS_FILE``: trunk and heads.

    Args, Returns and Raises: as for ``load_first_weights``; the heads must be complete too.
    """
    return _fill(
        model, plan.config["DISTILLATION"]["TEACHER_MODEL"]["WEIGHTS_INIT"], wants_heads=True, heads_must_fit=True
    )


def _fill(
    model: nn.Module, options: Mapping[str, Any], wants_heads: bool, heads_must_fit: bool
) -> dict[str, Callable[[], Tensor]]:
    key = options["STATE_DICT_KEY_NAME"]
    foreign = read_foreign(Path(options["PARAMS_FILE"]), "" if key in _FOUND_BY_ITSELF else key)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    prefixes = options["REMOVE_PREFIX"], options["APPEND_PREFIX"]
    found = match(foreign, shapes, *prefixes, skip=[*options["SKIP_LAYERS"], *([] if wants_heads else ["heads."])])
    _require(found, options["PARAMS_FILE"], heads_must_fit)
    for entry in found.entries:
        if not tensors[entry.key].is_meta:
            tensors[entry.key].copy_(entry.read())
    if collectives.rank() == 0:
        _say(f"Beginning with {len(found.entries)} tensors of {options['PARAMS_FILE']} ({foreign.layout}).")
        for sentence in [*(f"passed over: {reason}" for reason in foreign.passed_over), *found.sentences()]:
            _say(sentence)
    return {entry.key: entry.read for entry in found.entries}


def _require(found: Match, path: str, heads_must_fit: bool) -> None:
    wrong = found.lacks("trunk") + (sorted(n for n in found.other_shape if n.startswith("heads.")) * heads_must_fit)
    if wrong or not found.entries:
        some = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        count = f"{len(found.entries)} of its {found.num_foreign} tensors fit, {len(wrong)} of the model's lack theirs"
        about = "\n".join(found.sentences())
        raise CheckpointError(
            f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE: {path} does not fit the model ({count}): "
            f"{some or 'no tensor matches'}. "
            "Write config.MODEL.TRUNK.NAME=auto for the trunk of the run they are of, correct the heads, or leave "
            f"tensors out with SKIP_LAYERS.\n{about}"
        )


def _say(line: str) -> None:
    rich.get_console().print(printable(line), markup=False, highlight=False, soft_wrap=True)
