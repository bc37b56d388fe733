"""VISSL's forms of methods that have a loss here.

It spells them as transforms, collators, named inputs and rows of heads around a common loss. Each
function knows one form by its mark, takes it out of the recipe and writes the same as keys of the method. What is not
exactly that form stays as it is, for the rules to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vissl_zero.errors import ConfigError, Problem

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig

_CLASSES = "cross_entropy_multiple_output_single_target"
# VISSL's names of what a trunk gives for an image, and of all its tokens.
_FEATURE, _TOKENS = (["flatten"], ["res5avg"]), "lastBLK"
_IBOT_HEAD = "ibot_dino_head"


def use_own_methods(cfg: RunConfig) -> list[str]:
    """Replace VISSL's forms by our own keys, in place. Return a sentence for each, to say once.

    Raises:
        ConfigError: one with a value that cannot be had here.
    """
    # Before the forms: ``_ibot`` looks for the head under the name that it gets here.
    for head in [*cfg.MODEL.HEAD.PARAMS, *cfg.DISTILLATION.TEACHER_MODEL.HEAD.PARAMS]:
        if _name_of(head) == "ibot_head" and "in_dim" in head[1]:  # VISSL's, which is another than ours
            head[0] = _IBOT_HEAD
    forms = (_rotnet, _jigsaw, _pirl, _ibot, _msn)
    return [note for form in forms if (note := form(cfg))]


def _rotnet(cfg: RunConfig) -> str:
    entry = _found(cfg.DATA.TRAIN.TRANSFORMS, "ImgRotatePil")
    if entry is None or cfg.LOSS.get("name") != _CLASSES:
        return ""
    if (count := entry.get("num_angles", 4)) != 4:
        key = f"{_place(cfg.DATA.TRAIN.TRANSFORMS, entry)}.num_angles"
        _refuse(key, count, "must be 4: quarter turns", "Leave it out.")
    for split in (cfg.DATA.TRAIN, cfg.DATA.TEST):
        split.TRANSFORMS = [other for other in split.TRANSFORMS if _name(other) != "ImgRotatePil"]
    # One angle an image, as VISSL draws it; rotnet_loss's default is all four, as in the paper.
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
    # VISSL's recipes name a file on its server, and nothing is downloaded here.
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
    # pirl_loss updates its memory after the step, with embeddings of whole images. Its one weight is that of the tiles:
    # the image gets the rest.
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
    """Return VISSL's heads for one input: [name, keys] each, of which it reads no third part."""
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
    loss, size, key = cfg.LOSS[loss_name], entry.get("patch_size", 16), _place(train.TRANSFORMS, entry)
    loss.mask_ratio, loss.mask_probability = _masked_shares(entry, key)
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


def _masked_shares(entry: Mapping[str, Any], key: str) -> tuple[list[float], float]:
    """Return the range of the share of masked patches, and the share of masked images. VISSL draws one of several."""
    means, spreads = entry.get("pred_ratio_mean", [0.3]), entry.get("pred_ratio_var", [0.0])
    spans = [(mean - spread, mean + spread) for mean, spread in zip(means, spreads, strict=False)]
    masked = [span for span in spans if span[1] > 0]
    if not masked or len(set(masked)) > 1 or not 0 <= masked[0][0] <= masked[0][1] <= 1 or len(means) != len(spreads):
        must = "must be one range of shares from 0 to 1, and optionally one of mean and spread 0 (no mask)"
        fix = "Write pred_ratio_mean: [0.0, 0.3], pred_ratio_var: [0.0, 0.2], for example."
        _refuse(f"{key}.pred_ratio_mean", f"{means} and {spreads}", must, fix)
    low, high = (round(share, 12) for share in masked[0])  # 0.3 - 0.2 is 0.1
    return [low, high], len(masked) / len(spans)


def _msn(cfg: RunConfig) -> str:
    modeling = _blocks(cfg)[1].TRUNK.VISION_TRANSFORMERS.MASKED_IMAGE_MODELING
    ours, others = _temperatures(cfg.MODEL.HEAD.PARAMS), _temperatures(_teacher(cfg).HEAD.PARAMS)
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
    if name == "msn_loss" and ours:
        loss.temperature = ours[0]
    modeling.NAME, modeling.PARAMS = "", {}
    the_loss = " The loss is the paper's." if name == "msn_loss" else ""
    return f"MASKED_IMAGE_MODELING: {name} leaves patches out; its patch_drop is drop_ratio.{the_loss}"


def _temperatures(heads: list[Any]) -> list[float]:
    """Take ``temperature`` out of each msn_head, for it is a key of the loss here; drop ``return_query``, always on."""
    temperatures = []
    for head in heads:
        if _name_of(head) == "msn_head":
            temperatures.append(float(head[1].pop("temperature", 0.1)))
            head[1].pop("return_query", None)
    return temperatures


def _teacher(cfg: RunConfig) -> Any:
    return cfg.DISTILLATION.TEACHER_MODEL


def _blocks(cfg: RunConfig) -> tuple[Any, Any]:
    """Return DATA.TRAIN and MODEL; VISSL's keys are added to their classes as the tables are read."""
    return cfg.DATA.TRAIN, cfg.MODEL


def _found(transforms: list[Any], name: str) -> Mapping[str, Any] | None:
    return next((entry for entry in transforms if _name(entry) == name), None)


def _place(transforms: list[Any], entry: Any) -> str:
    """Return the key of an entry of TRAIN's transforms, by its position."""
    return f"config.DATA.TRAIN.TRANSFORMS[{transforms.index(entry)}]"


def _name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else None


def _name_of(head: Any) -> Any:
    is_head = isinstance(head, list) and len(head) == 2 and isinstance(head[1], dict)
    return head[0] if is_head else None


def _refuse(key: str, got: Any, must: str, fix: str) -> None:
    raise ConfigError([Problem(key, str(got), must, fix)])
