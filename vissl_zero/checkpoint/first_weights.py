"""``MODEL.WEIGHTS_INIT``: initial weights from another run or elsewhere, matched with the model by name and shape."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.checkpoint.adapter_folder import read_adapters
from vissl_zero.checkpoint.foreign_layouts import Foreign, as_token, read_foreign
from vissl_zero.checkpoint.named_weights import locate
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.config.blocks.model_and_loss import Lora, ModelConfig, WeightsInit
from vissl_zero.errors import CheckpointError
from vissl_zero.models.model import build_model
from vissl_zero.models.trunks.token_embedding import TokenEmbedding, interpolated
from vissl_zero.models.weight_names import is_adapters, to_our_names, without_base_layer
from vissl_zero.resolve.components import saved_config
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.terminal import print_line

# Tensors of public files that are not of the trunk, and why they are not needed.
_BESIDE_THE_TRUNK = (
    (
        r"(?:head|heads\.head|head_dist|head\.fc|fc|classifier(?:\.\d)?|last_linear)\.(?:weight|bias)",
        "classifier left out",
    ),
    (r"(?:.+\.)?(?:mask_token|masked_embed)", "mask token left out, as only methods that mask patches use it"),
    (r"(?:.+\.)?pooler\..+", "pooler left out, as features are taken before it"),
    (r"(?:.+\.)?decoder[._].+", "decoder left out, as it is no part of the trunk"),
)
COUNTERS = "num_batches_tracked"  # unused where batch norm has a momentum; older files lack it


@dataclass
class Match:
    """Matching and missing tensors. All names except ``unknown`` and ``no_tensors`` are ours.

    Attributes:
        entries: matching tensors, under our names.
        theirs: our name -> name in the file, of matching tensors.
        missing: names of the model that the file lacks.
        other_shape: name -> (shape in the file, shape in the model), of tensors that are left out for their shape.
        names_of_others: our name -> name in the file, of tensors in ``other_shape``.
        unknown: names in the file that the model lacks.
        no_tensors: entries of the file that are not tensors.
        resized: our names of position embeddings in ``entries`` that are interpolated when they are read.
        num_foreign: number of tensors in the file.
    """

    entries: list[Entry] = field(default_factory=list)
    theirs: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    other_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    names_of_others: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    no_tensors: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    num_foreign: int = 0

    def lacks(self, part: str) -> list[str]:
        """List the tensors of a part ("trunk", "heads") that the file did not fill, without batch norm's counters."""
        names = [*self.missing, *self.other_shape]
        return sorted(name for name in names if name.startswith(f"{part}.") and not name.endswith(COUNTERS))

    def sentences(self, most: int = 10) -> Iterator[str]:
        """Yield a paragraph for each kind of entry that did not match."""
        shapes = [
            f"{name} {list(theirs)} in the file, {list(ours)} here" for name, (theirs, ours) in self.other_shape.items()
        ]
        unknown = list(self.unknown)
        for pattern, reason in _BESIDE_THE_TRUNK:
            names = [name for name in unknown if re.fullmatch(pattern, name)]
            unknown = [name for name in unknown if name not in names]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield from [f"{reason}: {', '.join(names[:3])}{more}"] if names else []
        kinds = (
            ("other shape, left out", shapes),
            ("not in the file", [name for name in self.missing if not name.endswith(COUNTERS)]),
            ("not understood, left out", unknown),
            ("not plain tensors, left out", self.no_tensors),
        )
        for title, names in kinds:
            if names:
                rest = f"\n  ... and {len(names) - most} more" if len(names) > most else ""
                yield f"{len(names)} {title}:\n  " + "\n  ".join(names[:most]) + rest


def match(
    foreign: Foreign,
    shapes: Mapping[str, Sequence[int]] | None,
    remove_prefix: str = "",
    append_prefix: str = "",
    skip: Sequence[str] = (),
) -> Match:
    """Find our name for every tensor.

    Args:
        foreign: weights to match.
        shapes: shapes of the model's parameters and buffers by name; None: every tensor with a name of ours matches.
        remove_prefix, append_prefix: prefix removed from names that begin with it, and then prefix added to all names.
        skip: substrings; names that contain one are left out, as by VISSL's SKIP_LAYERS.
    """
    matched = Match(no_tensors=list(foreign.no_tensors), num_foreign=len(foreign.entries))
    entries = [as_token(entry) for entry in foreign.entries]
    renamed = {append_prefix + entry.key.removeprefix(remove_prefix): entry for entry in entries}
    # Names that the model has are not translated: another library may use the same name for another tensor.
    direct = {name: name for name in renamed if shapes is not None and name in shapes}
    adapted = {without_base_layer(name): name for name in shapes or ()}
    ours = to_our_names((name for name in renamed if name not in direct), adapted)
    matched.unknown += [renamed[name].key for name in ours.unknown]
    for plain, old in {**ours.names, **direct}.items():
        name, entry = adapted.get(plain, plain), renamed[old]
        if _is_skipped(name, skip):
            continue
        if shapes is not None and name not in shapes:
            matched.unknown.append(entry.key)
        elif shapes is not None and tuple(shapes[name]) != entry.shape:
            matched.other_shape[name] = (entry.shape, tuple(shapes[name]))
            matched.names_of_others[name] = entry.key
        else:
            matched.entries.append(Entry(name, entry.dtype, entry.shape, entry.read))
            matched.theirs[name] = entry.key
    taken = {*matched.theirs, *matched.other_shape}
    wanted = [name for name in shapes or () if name not in taken and not _is_skipped(name, skip)]
    starts_adapters = not any(map(is_adapters, renamed))  # weights without any are what adapters are added to
    matched.missing = sorted(name for name in wanted if not (starts_adapters and is_adapters(name)))
    return matched


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    return any(part in name or part in without_base_layer(name) for part in skip)


def shapes_of(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters and buffers by full name, without memory for their data.

    Args:
        model_config: ``config.MODEL`` after resolution.
    Raises:
        ConfigError: the model cannot be built.
    """
    with torch.device("meta"):
        model = build_model(model_config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


FOUND_BY_ITSELF = ("classy_state_dict", "")


@torch.no_grad()
def load_first_weights(model: nn.Module, plan: ResolvedRun) -> Mapping[str, Callable[[], Tensor]]:
    """Fill ``model`` from ``WEIGHTS_INIT.PARAMS_FILE``, if it is set; rank 0 prints what did not match.

    Every rank reads the file. In evaluation mode (``FEATURE_EVAL_SETTINGS``), heads are not filled.

    Args:
        model: unsharded model on the CPU; tensors on the meta device are not filled.
        plan: plan of the run.
    Returns:
        Full name -> reader of each matching tensor.
    Raises:
        CheckpointError: the file is unreadable, damaged or refused, or the trunk would be incomplete.
    """
    options, settings = plan.config.MODEL.WEIGHTS_INIT, plan.config.MODEL.FEATURE_EVAL_SETTINGS
    wants_heads = not settings.EVAL_MODE_ON or settings.EVAL_TRUNK_AND_HEAD
    if not options.PARAMS_FILE:
        return {}
    # An evaluated head must have been trained: measurements of a random head would be meaningless.
    is_measured = settings.FREEZE_TRUNK_AND_HEAD or plan.config.TEST_ONLY
    needs: Literal["trunk", "head shapes", "heads"] = "trunk"
    if is_measured and not settings.EXTRACT_TRUNK_FEATURES_ONLY and wants_heads:
        needs = "heads"
    elif wants_heads and settings.ASSERT_HEAD_LAYER_SHAPE_INIT:
        needs = "head shapes"
    matched = _fill(model, options, wants_heads, needs)
    if plan.config.MODEL.LORA.USE_LORA:
        # A factor other than the trained one changes the model without any error.
        if any(map(is_adapters, matched)) and saved_config(Path(options.PARAMS_FILE).expanduser()) is None:
            raise CheckpointError(
                f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE: {options.PARAMS_FILE} has adapters, and no configuration "
                "beside it says their LORA_ALPHA. Give the folder of the run."
            )
        matched |= _fill_adapters(model, plan.config.MODEL.LORA, has_adapters=any(map(is_adapters, matched)))
        if (is_measured or settings.FREEZE_TRUNK_ONLY) and not any(map(is_adapters, matched)):
            raise CheckpointError(
                f"config.MODEL.LORA.USE_LORA: must be false, as this run trains no adapters, and {options.PARAMS_FILE} "
                "has none. Write false, or give the run that has trained some."
            )
    return matched


def _fill_adapters(model: nn.Module, options: Lora, has_adapters: bool) -> dict[str, Callable[[], Tensor]]:
    """Fill the adapters of ``model`` from ADAPTER_FOLDER, if it is set, except tensors on the meta device.

    Returns:
        readers of the adapters' tensors, by parameter name.
    """
    if not options.ADAPTER_FOLDER:
        return {}
    if has_adapters:
        raise CheckpointError(
            "config.MODEL.LORA.ADAPTER_FOLDER: must be empty, as the weights of WEIGHTS_INIT have adapters of their "
            "own. Leave it out, or give the weights that this adapter was trained over."
        )
    readers = read_adapters(model, options)
    parameters = dict(model.named_parameters())
    for name, read in readers.items():
        if not parameters[name].is_meta:
            parameters[name].copy_(read())
    if collectives.rank() == 0:
        print_line(f"Beginning with {len(readers)} tensors of the adapter in {options.ADAPTER_FOLDER}.")
    return readers


@torch.no_grad()
def load_teacher(model: nn.Module, plan: ResolvedRun) -> Mapping[str, Callable[[], Tensor]]:
    """Fill the model under DISTILLATION from its own ``WEIGHTS_INIT.PARAMS_FILE``: trunk and heads.

    Args, Returns and Raises: see ``load_first_weights``; the heads must be complete too.
    """
    options = plan.config.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT
    matched = _fill(model, options, wants_heads=True, needs="head shapes", opening="The teacher has")
    keys = plan.config.LOSS[plan.config.LOSS["name"]]
    if collectives.rank() == 0 and "teacher_mean" in keys:
        print_line(f"Its images are normalized by mean {keys['teacher_mean']} and std {keys['teacher_std']}.")
    return matched


def _fill(
    model: nn.Module,
    options: WeightsInit,
    wants_heads: bool,
    needs: Literal["trunk", "head shapes", "heads"],
    opening: str = "Beginning with",
) -> dict[str, Callable[[], Tensor]]:
    key = options.STATE_DICT_KEY_NAME
    foreign = read_foreign(locate(options.PARAMS_FILE).path, "" if key in FOUND_BY_ITSELF else key)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    _require_place_for_adapters(foreign, shapes, options.PARAMS_FILE)
    prefixes = options.REMOVE_PREFIX, options.APPEND_PREFIX
    matched = match(foreign, shapes, *prefixes, skip=[*options.SKIP_LAYERS, *([] if wants_heads else ["heads."])])
    if options.CONTINUE:
        _adapt(matched, model, {entry.key: as_token(entry) for entry in foreign.entries})
    _require(matched, options.PARAMS_FILE, needs, _MAY_LACK if options.CONTINUE else "")
    for entry in matched.entries:
        if not tensors[entry.key].is_meta:
            tensors[entry.key].copy_(entry.read())
    if collectives.rank() == 0:
        print_line(f"{opening} {len(matched.entries)} tensors of {options.PARAMS_FILE} ({foreign.layout}).")
        if options.CONTINUE:
            anew = len([name for name in matched.missing if not name.endswith(COUNTERS)]) + len(matched.other_shape)
            out = len(matched.unknown) + len(matched.no_tensors) + len(matched.other_shape)
            counts = (
                f"{len(matched.entries) - len(matched.resized)} tensors as they are, {len(matched.resized)} resized"
            )
            print_line(f"Continuing with {counts}; {anew} of the model start anew, {out} of the file are left out.")
        for sentence in [*(f"passed over: {reason}" for reason in foreign.passed_over), *matched.sentences()]:
            print_line(sentence)
        for head in sorted({name.rpartition(".")[0] for name in matched.other_shape if name.startswith("heads.")}):
            print_line(f"{head} starts anew, since it has another shape than in the file.")
    return {entry.key: entry.read for entry in matched.entries}


def _require_place_for_adapters(foreign: Foreign, shapes: Mapping[str, Sequence[int]], path: str) -> None:
    """Refuse weights with LoRA adapters for a model without: the weights alone would be another network."""
    if any(is_adapters(entry.key) for entry in foreign.entries) and not any(map(is_adapters, shapes)):
        raise CheckpointError(
            f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE: {path} holds LoRA adapters, and this model has none. Write "
            "config.MODEL.TRUNK.NAME=auto, which takes MODEL.LORA from the run, or give merged weights "
            "(vissl-zero export <run> --to safetensors)."
        )


_MAY_LACK = ".mask_token"  # most files have none: few methods train it


def _adapt(matched: Match, model: nn.Module, foreign: Mapping[str, Entry]) -> None:
    """Also accept position embeddings of another image size, interpolated as in the trunk."""
    for name, (theirs, ours) in list(matched.other_shape.items()):
        parent, _, key = name.rpartition(".")
        embedding = model.get_submodule(parent) if key == "pos_embed" else None
        if not isinstance(embedding, TokenEmbedding) or theirs[-1] != ours[-1]:
            continue
        # Positions of class and register tokens have no place in the grid, and stay as they are.
        prefix = embedding.num_prefix_positions
        side = math.isqrt(max(theirs[1] - prefix, 0))
        # The file does not name its grid. Only a square one can be told from the number of positions.
        if not side or side * side != theirs[1] - prefix:
            continue
        entry = foreign[matched.names_of_others[name]]
        read = partial(_resized, entry.read, prefix, side, embedding.grid_size, embedding.position_resize)
        matched.entries.append(Entry(name, entry.dtype, ours, read))
        matched.theirs[name] = entry.key
        matched.resized.append(name)
        del matched.other_shape[name]


def _resized(read: Callable[[], Tensor], prefix: int, side: int, grid: tuple[int, int], how: str) -> Tensor:
    positions = read()
    patches = interpolated(positions[:, prefix:], (side, side), grid, how)
    return torch.cat([positions[:, :prefix], patches], dim=1)


def _require(matched: Match, path: str, needs: Literal["trunk", "head shapes", "heads"], may_lack: str = "") -> None:
    key = "config.MODEL.WEIGHTS_INIT.PARAMS_FILE"
    if needs == "heads" and (lost := matched.lacks("heads")):
        raise CheckpointError(
            f"{key}: {path} has no trained weights of heads that this run measures ({', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}): figures of random heads would mean nothing. Give the weights of the "
            "run that trained them, or measure the trunk alone: "
            "config.MODEL.FEATURE_EVAL_SETTINGS.EVAL_MODE_ON=true and EVAL_TRUNK_AND_HEAD=false (recipe benchmark/knn)."
        )
    is_asserted = needs == "head shapes"
    lacks = [name for name in matched.lacks("trunk") if not may_lack or not name.endswith(may_lack)]
    wrong = lacks + (sorted(n for n in matched.other_shape if n.startswith("heads.")) * is_asserted)
    if wrong or not matched.entries:
        some = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        count = (
            f"{len(matched.entries)} of its {matched.num_foreign} tensors fit, {len(wrong)} of the model's lack theirs"
        )
        about = "\n".join(matched.sentences())
        raise CheckpointError(
            f"{key}: {path} does not fit the model ({count}): {some or 'no tensor matches'}. "
            "Write config.MODEL.TRUNK.NAME=auto for the trunk that the weights are of, correct the heads, or leave "
            f"tensors out with SKIP_LAYERS.\n{about}"
        )
