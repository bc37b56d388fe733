"""VISSL's keys that are not used here, the second names of what is, and its forms of methods that have a loss here.

VISSL spells them as transforms, collators, named inputs and rows of heads around a common loss. Each function knows one
form by its mark, takes it out of the recipe and writes the same as keys of the method. What is not exactly that form
stays as it is, for the rules to refuse.

A typed dataclass per block says what is used. The rest of VISSL's tree comes from that file, so that a recipe written
for VISSL composes and a mistyped key is still refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from vissl_zero.config.components.trunks import ANYNET, FIXED_BY_NAME
from vissl_zero.errors import ConfigError, Problem

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig

_CLASSES = "cross_entropy_multiple_output_single_target"
_TRANSFORMS = "config.DATA.TRAIN.TRANSFORMS"
# VISSL's names of what a trunk gives for an image, and of all its tokens.
_FEATURE, _TOKENS = (["flatten"], ["res5avg"]), "lastBLK"
_IBOT_HEAD = "ibot_dino_head"


def use_own_methods(cfg: RunConfig) -> list[str]:
    """Replace VISSL's forms by our own keys, in place; returns a sentence for each, to say once.

    Raises:
        ConfigError: one with a value that cannot be had here.
    """
    _name_heads(cfg)
    forms = (_rotnet, _jigsaw, _pirl, _ibot, _msn)
    return [note for form in forms if (note := form(cfg))]


def _name_heads(cfg: RunConfig) -> None:
    """VISSL's ``ibot_head`` is another than ours."""
    for head in [*cfg.MODEL.HEAD.PARAMS, *cfg.DISTILLATION.TEACHER_MODEL.HEAD.PARAMS]:
        if _name_of(head) == "ibot_head" and "in_dim" in head[1]:
            head[0] = _IBOT_HEAD


def _rotnet(cfg: RunConfig) -> str:
    entry = _found(cfg.DATA.TRAIN.TRANSFORMS, "ImgRotatePil")
    if entry is None or cfg.LOSS.get("name") != _CLASSES:
        return ""
    if (count := entry.get("num_angles", 4)) != 4:
        _refuse(f"{_TRANSFORMS}.ImgRotatePil.num_angles", count, "must be 4: quarter turns", "Leave it out.")
    for split in (cfg.DATA.TRAIN, cfg.DATA.TEST):
        split.TRANSFORMS = [other for other in split.TRANSFORMS if _name(other) != "ImgRotatePil"]
    cfg.LOSS["name"], cfg.LOSS["rotnet_loss"].all_angles = "rotnet_loss", False
    return (
        "ImgRotatePil: rotnet_loss turns each training image by one angle, after it was cropped; TEST's stay upright."
    )


def _jigsaw(cfg: RunConfig) -> str:
    train = cfg.DATA.TRAIN
    entry = _found(train.TRANSFORMS, "ShuffleImgPatches")
    if entry is None or cfg.LOSS.get("name") != _CLASSES:
        return ""
    train.TRANSFORMS = [other for other in train.TRANSFORMS if other is not entry]
    file = str(entry.get("perm_file", ""))
    is_address = "://" in file
    cfg.LOSS["name"], cfg.LOSS["jigsaw_loss"].perm_file = "jigsaw_loss", "" if is_address else file
    if not is_address:
        return "ShuffleImgPatches: jigsaw_loss shuffles the tiles."
    return (
        f"ShuffleImgPatches: jigsaw_loss shuffles the tiles, in as many orders as {file} has, chosen here by the same "
        "rule; to use that file, name a copy of it on disk."
    )


def _pirl(cfg: RunConfig) -> str:
    old: Any = cfg.LOSS.get("nce_loss_with_memory")
    train, model = _blocks(cfg)
    is_named = cfg.LOSS.get("name") == "nce_loss_with_memory" and not isinstance(old, Mapping) and old is not None
    if not is_named or _found(train.TRANSFORMS, "ImgPilToPatchesAndImage") is None:
        return ""
    inputs = [entry[0] for entry in model.MULTI_INPUT_HEAD_MAPPING if len(entry) == 2 and entry[1] in _FEATURE]
    heads = model.HEAD.PARAMS
    weights, whole = list(old.loss_weights), old.update_mem_with_emb_index
    if sorted(inputs) != ["images", "patches"] or len(heads) != len(weights) or whole not in (0, 1):
        return ""
    if old.memory_params.update_mem_on_forward or inputs[whole] != "images" or abs(sum(weights) - 1) > 1e-9:
        return ""
    rows = {name: _row(head) for name, head in zip(inputs, heads, strict=True)}
    widths = [part[1]["dims"] for part in rows["images"] if part[1].get("dims")] or [[]]
    towers = [part[1] for part in rows["patches"] if part[0] == "siamese_concat_view"] or [{}]
    keys = {"dims": widths[0][:1] + widths[-1][-1:], "num_towers": towers[0].get("num_towers", 9)}
    model.HEAD.PARAMS = [["pirl_head", {**keys, "of_image": rows["images"], "of_tiles": rows["patches"]}]]
    model.MULTI_INPUT_HEAD_MAPPING, train.INPUT_KEY_NAMES = [], ["data"]
    new = cfg.LOSS["pirl_loss"]
    new.loss_type, new.temperature = old.loss_type, old.temperature
    new.negative_sampling_params.num_negatives = old.negative_sampling_params.num_negatives
    new.memory_params.momentum = old.memory_params.momentum
    new.tile_weight = weights[inputs.index("patches")]
    cfg.LOSS["name"] = "pirl_loss"
    del cfg.LOSS["nce_loss_with_memory"]
    return "nce_loss_with_memory of patches and images is pirl_loss; its head, pirl_head."


def _row(head: Any) -> list[Any]:
    """VISSL's heads for one input: [name, keys] each, of which it reads no third part."""
    heads = [head] if isinstance(head, list) and head and isinstance(head[0], str) else head
    return [part[:2] for part in heads]


def _ibot(cfg: RunConfig) -> str:
    train, model = _blocks(cfg)
    patches = model.TRUNK.VISION_TRANSFORMERS
    mapping = [
        ["global_views", {"feat_names": [_TOKENS], "additional_keys": ["mask"]}],
        ["local_views", {"feat_names": ["lastCLS"]}],
    ]
    entry = _found(train.TRANSFORMS, "MaskedImageModeling")
    loss_name, other = str(cfg.LOSS.get("name")), _teacher(cfg)
    is_loss = loss_name in ("ibot_loss", "ibot_distillation_loss")
    if entry is None or not is_loss or mapping != model.MULTI_INPUT_HEAD_MAPPING:
        return ""
    if mapping == other.MULTI_INPUT_HEAD_MAPPING:
        other.MULTI_INPUT_HEAD_MAPPING = []
    loss = cfg.LOSS[loss_name]
    loss.mask_ratio, loss.mask_probability = _masked_shares(entry)
    size, key = entry.get("patch_size", 16), f"{_TRANSFORMS}.MaskedImageModeling"
    if size != patches.PATCH_SIZE:
        must = f"must be the trunk's, {patches.PATCH_SIZE}"
        _refuse(f"{key}.patch_size", size, must, f"Write patch_size: {patches.PATCH_SIZE}.")
    if "log_aspect_ratio" in entry:
        must = "must be left out: blocks are at most 1 to 0.3, in both directions"
        _refuse(f"{key}.log_aspect_ratio", entry["log_aspect_ratio"], must, "Leave it out.")
    train.TRANSFORMS = [other for other in train.TRANSFORMS if other is not entry]
    train.INPUT_KEY_NAMES, train.TARGET_KEY_NAMES, model.MULTI_INPUT_HEAD_MAPPING = ["data"], ["label"], []
    if patches.MASKED_IMAGE_MODELING.NAME == "ibot":
        patches.MASKED_IMAGE_MODELING.NAME, patches.USE_MASK_TOKEN = "", True
    if all(_name_of(head) == _IBOT_HEAD and head[1].get("shared_head") for head in model.HEAD.PARAMS):
        # In VISSL the shared layer has two names.
        model.TEMP_FROZEN_PARAMS_ITER_MAP = [
            pair for pair in model.TEMP_FROZEN_PARAMS_ITER_MAP if ".prototypes1." not in str(pair[:1])
        ]
    return f"MaskedImageModeling: {loss_name} draws the masks; its mask_ratio and mask_probability are taken from it."


def _masked_shares(entry: Mapping[str, Any]) -> tuple[list[float], float]:
    """Least and largest share of masked patches, and how often there is one: VISSL draws one of several spans."""
    means, spreads = entry.get("pred_ratio_mean", [0.3]), entry.get("pred_ratio_var", [0.0])
    spans = [(mean - spread, mean + spread) for mean, spread in zip(means, spreads, strict=False)]
    masked = [span for span in spans if span[1] > 0]
    if not masked or len(set(masked)) > 1 or not 0 <= masked[0][0] <= masked[0][1] <= 1 or len(means) != len(spreads):
        must = "must be one span of shares from 0 to 1, and none besides: mean and spread of 0"
        fix = "Write pred_ratio_mean: [0.0, 0.3], pred_ratio_var: [0.0, 0.2], for example."
        _refuse(f"{_TRANSFORMS}.MaskedImageModeling.pred_ratio_mean", f"{means} and {spreads}", must, fix)
    low, high = (round(share, 12) for share in masked[0])  # 0.3 - 0.2 is 0.1
    return [low, high], len(masked) / len(spans)


def _msn(cfg: RunConfig) -> str:
    modeling = _blocks(cfg)[1].TRUNK.VISION_TRANSFORMERS.MASKED_IMAGE_MODELING
    own, others = _temperatures(cfg.MODEL.HEAD.PARAMS), _temperatures(_teacher(cfg).HEAD.PARAMS)
    old, name = cfg.LOSS.get("msn_distillation_loss"), cfg.LOSS.get("name")
    if name == "msn_distillation_loss" and isinstance(old, Mapping) and others:
        # The teacher's head gives the softmax that DINO's distillation takes of scores.
        name, new = "dino_distillation_loss", cfg.LOSS["dino_distillation_loss"]
        new.teacher_temperature = others[0]
        for key in ("swapped_assignment", "student_temperature", "teacher_num_crops", "student_num_crops"):
            setattr(new, key, old.get(key, getattr(new, key)))
        cfg.LOSS["name"] = name
        del cfg.LOSS["msn_distillation_loss"]
    if modeling.NAME != "msn" or name not in ("msn_loss", "dino_distillation_loss"):
        return ""
    loss = cfg.LOSS[name]
    loss.patch_drop = float(modeling.PARAMS.get("drop_ratio", 0.0))
    if name == "msn_loss" and own:
        loss.temperature = own[0]
    modeling.NAME, modeling.PARAMS = "", {}
    the_loss = " The loss is the paper's." if name == "msn_loss" else ""
    return f"MASKED_IMAGE_MODELING: {name} leaves patches out; its patch_drop is drop_ratio.{the_loss}"


def _temperatures(heads: list[Any]) -> list[float]:
    """Of each msn_head, taken out: here the loss has it. What is measured is the embedding, as with return_query."""
    found = []
    for head in heads:
        if _name_of(head) == "msn_head":
            found.append(float(head[1].pop("temperature", 0.1)))
            head[1].pop("return_query", None)
    return found


def _teacher(cfg: RunConfig) -> Any:
    return cfg.DISTILLATION.TEACHER_MODEL


def _blocks(cfg: RunConfig) -> tuple[Any, Any]:
    """DATA.TRAIN and MODEL; VISSL's keys are added to their classes as the tables are read."""
    return cfg.DATA.TRAIN, cfg.MODEL


def _found(transforms: list[Any], name: str) -> Mapping[str, Any] | None:
    return next((entry for entry in transforms if _name(entry) == name), None)


def _name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else None


def _name_of(head: Any) -> Any:
    is_head = isinstance(head, list) and len(head) == 2 and isinstance(head[1], dict)
    return head[0] if is_head else None


def _refuse(key: str, got: Any, must: str, fix: str) -> None:
    raise ConfigError([Problem(key, str(got), must, fix)])


T = TypeVar("T")


@dataclass(frozen=True)
class VisslKey:
    """One key of the tables.

    Attributes:
        path: under ``config:``, such as ``DATA.TRAIN.STRATIFIED_SAMPLER.ENABLED``.
        allowed: values that change nothing here; the first is the default.
        is_refused: any other value is refused, because it would change the result; else it has no effect.
        why: a sentence.
    """

    path: str
    allowed: tuple[Any, ...]
    is_refused: bool
    why: str


def _read() -> dict[str, Any]:
    text = (files("vissl_zero.config") / "vissl_keys.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables


def _tree(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Entries of the file as one tree of defaults."""
    tree: dict[str, Any] = {}
    for path, entry in _paths(entries):
        *parents, last = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = _default(entry["default"])
    return tree


def _paths(entries: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in entries:
        splits = ("TRAIN", "TEST") if "*" in entry["key"] else ("",)
        yield from ((entry["key"].replace("*", split), entry) for split in splits)


def _default(value: Any) -> Any:
    if isinstance(value, dict) and [*value] == ["one_of"]:
        return OneOf(*value["one_of"])
    return {key: _default(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True)
class OneOf:
    """Values that are all fine; the first is the default."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)


_TABLES = _read()
REFUSED, NO_EFFECT = _tree(_TABLES["refused"]), _tree(_TABLES["no_effect"])
OTHER_LOSSES: frozenset[str] = frozenset(_TABLES["other_losses"])
ALIASES: dict[str, dict[str, Any]] = _TABLES["aliases"]
# What is meant otherwise than in VISSL: key (with * for a part), values it holds for (absent: all), and a sentence.
DIFFERENCES: list[dict[str, Any]] = _TABLES["differs"]
# A part of an internal file's name -> where the same file is public.
PUBLIC_FILES: dict[str, str] = _TABLES["public_files"]
TASK_LEVELS: dict[str, int] = ALIASES["task_levels"]


@cache
def vissl_keys() -> tuple[VisslKey, ...]:
    """Every key of both tables."""
    found = []
    for name in ("refused", "no_effect"):
        for start, entry in _paths(_TABLES[name]):
            for path, value in _leaves(_default(entry["default"]), start):
                allowed = value.values if isinstance(value, OneOf) else (value,)
                found.append(VisslKey(path, allowed, name == "refused", entry["why"]))
    return tuple(found)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    else:
        yield path, value


def with_vissl_keys(path: str) -> Callable[[type[T]], type[T]]:
    """Class decorator, above ``@dataclass``: add the tables' keys under ``path`` that the class does not have itself.

    Args:
        path: of the block under ``config:``; empty for the root.
    """

    def decorate(cls: type[T]) -> type[T]:
        return _extend(cls, path, [_below(REFUSED, path), _below(NO_EFFECT, path)])

    return decorate


def _below(tree: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for key in path.split(".") if path else []:
        tree = tree.get(key, {})
    return tree


def _extend(cls: type[T], path: str, trees: list[Mapping[str, Any]]) -> type[T]:
    own = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    names = [name for name in dict.fromkeys(name for tree in trees for name in tree) if name not in own]
    extra = [_field(name, f"{path}.{name}", [tree[name] for tree in trees if name in tree]) for name in names]
    extended = make_dataclass(cls.__name__, extra, bases=(cls,))
    extended.__module__, extended.__doc__ = cls.__module__, cls.__doc__
    return extended


def _field(name: str, path: str, values: list[Any]) -> tuple[str, Any, Any]:
    if isinstance(values[0], dict) and any(values):
        block: type = _extend(_empty_block(path), path, values)
        return name, block, field(default_factory=block)
    value = values[0].values[0] if isinstance(values[0], OneOf) else values[0]
    if isinstance(value, dict):
        return name, dict[str, Any], field(default_factory=dict)
    # Any: a value that has no effect, or is compared with its default, needs no type.
    return name, Any, field(default_factory=lambda: copy.deepcopy(value))


def _empty_block(path: str) -> type:
    no_fields: list[tuple[str, Any]] = []
    block = make_dataclass(path.replace(".", "_"), no_fields)
    block.__module__ = __name__  # where it is not to be found: jobs of a sweep get it pickled by value
    return block


def use_own_names(cfg: RunConfig, chosen: Collection[str] = ()) -> list[str]:
    """Replace VISSL's second names (``regnet_fsdp``, ...) and forms by the one of each, in place; returns notes.

    Args:
        cfg: as composed.
        chosen: keys under ``config:`` that the command line sets: what a recipe may leave over is a mistake there.
    """
    notes = use_own_methods(cfg)
    model, teacher, optimizer = cfg.MODEL, cfg.DISTILLATION.TEACHER_MODEL, cfg.OPTIMIZER
    for block in (model, teacher):
        keys = block.WEIGHTS_INIT.STATE_DICT_KEY_NAME
        block.WEIGHTS_INIT.STATE_DICT_KEY_NAME = ".".join(map(str, keys)) if isinstance(keys, list) else str(keys or "")
        block.TRUNK.NAME = ALIASES["trunks"].get(block.TRUNK.NAME, block.TRUNK.NAME)
        block.HEAD.PARAMS = [_head(entry) for entry in block.HEAD.PARAMS]
    notes += _named_regnet(cfg.MODEL.TRUNK, chosen)
    model.HEAD.PARAMS = _chained(cfg, model.HEAD.PARAMS)
    for part in (optimizer, optimizer.base_optimizer):
        part.name = ALIASES["optimizers"].get(part.name or "", part.name)
    return notes


def _named_regnet(trunk: Any, chosen: Collection[str]) -> list[str]:
    """Of a RegNet's name and parameters the name counts, as in VISSL: overlays name another network than their base."""
    block, path = trunk.REGNET, "MODEL.TRUNK.REGNET"
    if trunk.NAME != "regnet" or block.name in (None, ANYNET):
        return []
    unset = type(block)()
    left = [key for key in FIXED_BY_NAME if getattr(block, key) != getattr(unset, key)]
    left = [key for key in left if f"{path}.{key}" not in chosen]
    for key in left:
        setattr(block, key, getattr(unset, key))
    keys = ", ".join(f"config.{path}.{key}" for key in left)
    have = "have" if len(left) > 1 else "has"
    return [f"{keys} {have} no effect: the name {block.name} says them, as in VISSL."] if left else []


def _chained(cfg: RunConfig, heads: list[Any]) -> list[Any]:
    """Several heads on one feature as one: VISSL applies them one after another. With a map of layers, one a layer."""
    settings = cfg.MODEL.FEATURE_EVAL_SETTINGS
    has_map = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP and settings.EVAL_MODE_ON and settings.FREEZE_TRUNK_ONLY
    return heads if has_map or len(heads) < 2 or not all(map(_is_head, heads)) else [_chain(heads)]


def _chain(heads: list[Any]) -> list[Any]:
    first, last = heads[0][1].get("dims"), heads[-1][1].get("dims")
    dims = {"dims": [first[0], last[-1]]} if first and last else {}
    return ["chain", {"heads": heads, **dims}]


def _is_head(entry: Any) -> bool:
    is_pair = isinstance(entry, list) and len(entry) == 2
    return is_pair and isinstance(entry[0], str) and isinstance(entry[1], dict)


def _head(entry: Any) -> Any:
    """``[name, keys]`` under the one name; anything else is for a rule to refuse."""
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        return [ALIASES["heads"].get(entry[0], entry[0]), *entry[1:]]
    if isinstance(entry, list) and entry and all(map(_is_head, entry)):  # VISSL's nested form
        heads = [_head(inner) for inner in entry]
        return _chain(heads) if len(heads) > 1 else heads[0]
    return entry


def without_vissl_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A plain configuration without VISSL's unused keys that are at their defaults: what a person wants to read."""
    unused: dict[str, Any] = {}
    for key in vissl_keys():
        *parents, last = key.path.split(".")
        node = unused
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = key.allowed
    return _pruned(tree, unused)


def _pruned(tree: Mapping[str, Any], unused: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        below = unused.get(name)
        if isinstance(below, tuple) and value == below[0]:
            continue
        if isinstance(below, dict) and isinstance(value, Mapping):
            value = _pruned(value, below)
            if not value:
                continue
        kept[name] = value
    return kept
