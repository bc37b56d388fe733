"""Rules and derived values of DATA: sources, labels and transforms, and what DATA_PATHS and IMG_SIZE imply."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vissl_zero.atomic import is_file, is_folder, is_there
from vissl_zero.config.blocks.data import MIXING_COLLATOR, MixingConfig, Split
from vissl_zero.config.catalog import READ_FILES, missing
from vissl_zero.config.components import typed_options
from vissl_zero.config.components.trunks import patch_side
from vissl_zero.config.constraints import one_of
from vissl_zero.config.programs import RETRIEVAL
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.registry import DATA_SOURCES, TRANSFORMS
from vissl_zero.resolve.channels import RGB, channels
from vissl_zero.resolve.fast_forms import fast_backend
from vissl_zero.resolve.image_files import EXTENSIONS, image_files
from vissl_zero.resolve.other_files import endings_in, held
from vissl_zero.vissl.programs import SEGMENTATION

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

_MULTI_CROP, _PATCHES_AND_IMAGE = ("size_crops",), ("crop_size_image", "crop_size_patches")
_SIZED = ("RandomResizedCrop", "CenterCrop", "RandomCrop", "Resize", "FiveCrop", "TenCrop")


def with_image_size(cfg: RunConfig) -> RunConfig:
    """Return a copy of ``cfg`` whose transforms make crops of DATA.IMG_SIZE: all sizes are multiplied by one factor.

    For a vision transformer, sizes are rounded to whole patches: 224 and 96 pixels at IMG_SIZE=64 become 64 and 32.
    """
    size, train, test = cfg.DATA.IMG_SIZE, cfg.DATA.TRAIN, cfg.DATA.TEST
    largest = _largest_crop(train.TRANSFORMS)
    # A rule reports sizes out of range; scaling by them here could make crops of no pixel, or of any amount of memory.
    if size is None or not largest or not 1 <= size <= 65536:
        return cfg
    factor, side = size / largest, patch_side(cfg.MODEL.TRUNK)
    side = side if size % side == 0 else 1  # not a multiple: the rule ``_whole_patches`` reports it
    data = replace(
        cfg.DATA,
        TRAIN=replace(train, TRANSFORMS=_scaled(train.TRANSFORMS, factor, side)),
        TEST=replace(test, TRANSFORMS=_scaled(test.TRANSFORMS, factor, side)),
    )
    return replace(cfg, DATA=data)


def _largest_crop(transforms: Sequence[Any]) -> int | None:
    """Return the longest side in pixels of the last sized transform's images; None if no transform sets a size."""
    return max(crop_sides(transforms), default=None)


def crop_sides(transforms: Sequence[Any]) -> list[int]:
    """Return the sides in pixels of the last sized transform's images; empty if no transform sets a size."""
    entry, keys = _last_sized(transforms)
    values = [side for key in keys for value in _as_list(entry[key]) for side in _as_list(value)]
    return [side for side in values if isinstance(side, int) and side > 0]


def _last_sized(transforms: Sequence[Any]) -> tuple[Any, Sequence[str]]:
    """Return the last transform that sets a size, and the keys that set it: the trunk sees images of this size."""
    sized = ((entry, [key for key in _size_keys(entry) if entry.get(key)]) for entry in reversed(transforms))
    return next(((entry, keys) for entry, keys in sized if keys), ({}, ()))


def _size_keys(entry: Any) -> Sequence[str]:
    if not isinstance(entry, Mapping):
        return ()
    if entry.get("name") in _SIZED:
        return ("size",)
    return next((keys for keys in (_MULTI_CROP, _PATCHES_AND_IMAGE) if keys[0] in entry), ())


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _scaled(transforms: Sequence[Any], factor: float, side: int) -> list[Any]:
    last, scaled = _last_sized(transforms)[0], []
    for entry in transforms:
        whole = side if entry is last else 1  # earlier sizes are cropped again: no need for whole patches
        sizes = {key: _times(entry[key], factor, whole) for key in _size_keys(entry) if key in entry}
        scaled.append({**entry, **sizes} if sizes else entry)
    return scaled


def _times(value: Any, factor: float, whole: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_times(side, factor, whole) for side in value]
    return max(1, round(value * factor / whole)) * whole if isinstance(value, int) else value


def splits(cfg: RunConfig) -> dict[str, Split]:
    """Return TRAIN, and TEST where it has a source."""
    return {"TRAIN": cfg.DATA.TRAIN} | ({"TEST": cfg.DATA.TEST} if cfg.DATA.TEST.DATA_SOURCES else {})


def mixing_notes(cfg: RunConfig, world_size: int) -> list[str]:
    """Return a note if the number of ranks changes which images are mixed with each other."""
    # Images are mixed in pairs. An odd number of images on a rank leaves the last image unmixed.
    train = cfg.DATA.TRAIN
    if train.COLLATE_FUNCTION != MIXING_COLLATOR or world_size == 1:
        return []
    if train.BATCHSIZE_PER_REPLICA % 2:
        fix = "an odd number of images a rank leaves one unmixed. Write an even BATCHSIZE_PER_REPLICA"
    elif not train.DROP_LAST:
        fix = "the last step of an epoch may leave a rank an odd number. Write config.DATA.TRAIN.DROP_LAST=true"
    else:
        return []
    return [f"Images are mixed in pairs, and {fix} to train the same model on any number of ranks."]


def sources(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that each split names one known source."""
    problems: list[Problem] = []
    for name, split in splits(cfg).items():
        key, names = f"config.DATA.{name}.DATA_SOURCES", list(dict.fromkeys(split.DATA_SOURCES))
        if not names:
            fix = f"Write config.DATA.{name}.DATA_PATHS=<folder of images>."
            problems.append(
                Problem(key, "[]", "must name a data source", f"{fix} Known sources: {', '.join(DATA_SOURCES)}.")
            )
        elif len(names) != 1:
            fix = f"Known: {', '.join(DATA_SOURCES)}. Several DATA_PATHS of one source are joined."
            problems.append(Problem(key, str(names), "must name one data source", fix))
        elif names[0] not in DATA_SOURCES:
            problems.append(replace(DATA_SOURCES.unknown(names[0]), key=key))
    return problems


def labels(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that sources of labels are known, and that files of labels exist."""
    problems: list[Problem] = []
    for name, split in splits(cfg).items():
        key = f"DATA.{name}"
        for source in split.LABEL_SOURCES:
            problems += one_of(f"{key}.LABEL_SOURCES", source, tuple(DATA_SOURCES))
        if "disk_filelist" in split.LABEL_SOURCES and not split.LABEL_PATHS:
            fix = f"Write config.{key}.LABEL_PATHS=[<labels.npy>]."
            problems.append(Problem(f"config.{key}.LABEL_PATHS", "[]", "must name the files of labels", fix))
        for path in split.LABEL_PATHS:
            # A dry run may plan for another machine, as in ``paths``.
            if not is_file(path) and not cfg.DRY_RUN:
                fix = "Correct the path."
                problems.append(Problem(f"config.{key}.LABEL_PATHS", repr(path), "must name files that exist", fix))
    return problems


def datasets(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that data sets named without paths are in a catalog, and have a class per image, not per pixel."""
    problems = missing(cfg.DATA)
    for name, split in splits(cfg).items():
        if of_pixels := [dataset for dataset in split.DATASET_NAMES if dataset.endswith("_SEGMENTATION")]:
            must = "must have a class for each image: this one has classes of pixels"
            problems.append(Problem(f"config.DATA.{name}.DATASET_NAMES", str(of_pixels), must, SEGMENTATION))
    return problems


def image_size(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that a transform sets a size if IMG_SIZE is given."""
    size = cfg.DATA.IMG_SIZE
    if size is not None and size >= 1 and _largest_crop(cfg.DATA.TRAIN.TRANSFORMS) is None:
        must = "must be left out: no transform of config.DATA.TRAIN.TRANSFORMS sets a size"
        return [Problem("config.DATA.IMG_SIZE", str(size), must, f"Add {{name: Resize, size: [{size}, {size}]}}.")]
    return []


def _whole_patches(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the sides of a vision transformer's crops are multiples of its patch size."""
    side, size = patch_side(cfg.MODEL.TRUNK), cfg.DATA.IMG_SIZE
    must = f"must be a multiple of the trunk's patches of {side} pixels"
    if size is not None and size % side:
        return [Problem("config.DATA.IMG_SIZE", str(size), must, f"Write {_multiples(size, side)}.")]
    problems: list[Problem] = []
    for name, split in splits(cfg).items():
        for crop in sorted({crop for crop in crop_sides(split.TRANSFORMS) if crop % side}):
            fix = f"Write {_multiples(crop, side)}."
            problems.append(Problem(f"config.DATA.{name}.TRANSFORMS", f"crops of {crop} pixels", must, fix))
    return problems


def _multiples(size: int, side: int) -> str:
    below = size // side * side
    return f"{below} or {below + side}" if below else str(side)


def transforms(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that every transform is built in, torchvision's or registered."""
    problems: list[Problem] = []
    # TEST's transforms are checked without a TEST source too: TRAIN's images are evaluated with them.
    for name, split in (("TRAIN", cfg.DATA.TRAIN), ("TEST", cfg.DATA.TEST)):
        key = f"config.DATA.{name}.TRANSFORMS"
        problems += _unknown_transforms(split.TRANSFORMS, key, cfg.DATA.IN_CHANNELS)
    return problems


def _unknown_transforms(entries: list[object], key: str, count: int) -> list[Problem]:
    problems: list[Problem] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or "name" not in entry:
            problems.append(Problem(key, str(entry), "must be a list of {name: ..., ...}", "Add the transform's name."))
            continue
        name = str(entry["name"])
        if name not in TRANSFORMS and name not in torchvision_names():
            known = [*TRANSFORMS, *torchvision_names()]
            fix = (
                f"Known: {', '.join(TRANSFORMS)} and the classes of torchvision.transforms.{did_you_mean(name, known)}"
            )
            problems.append(Problem(key, repr(name), "must name known transforms", fix))
        if name in _SHAPES:
            problems += _SHAPES[name](entry, f"{key}.{name}", count)
        for value in entry.values():
            if isinstance(value, list) and value and all(isinstance(v, Mapping) and "name" in v for v in value):
                problems += _unknown_transforms(list(value), key, count)
    return problems


def _multi_crop(entry: Mapping[str, object], key: str, _: int) -> list[Problem]:
    """Check that each kind of crop has a count, a size and a range of scales."""
    counts, sizes, scales = (entry.get(name) for name in ("num_crops", "size_crops", "crop_scales"))
    if not (_are_counts(counts) and _are_counts(sizes)):
        fix = "Write num_crops: [2, 6], size_crops: [224, 96], for example."
        return [Problem(key, f"num_crops {counts}, size_crops {sizes}", "must list whole numbers, at least 1", fix)]
    if not isinstance(scales, list) or not all(_is_pair(pair) for pair in scales):
        fix = "Write crop_scales: [[0.14, 1.0], [0.05, 0.14]], for example."
        return [Problem(f"{key}.crop_scales", str(scales), "must list pairs of shares, the smaller one first", fix)]
    return []


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is int and value >= 1 for value in values)


def _is_pair(pair: object) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(value) in (int, float) for value in pair)
    return is_pair and 0 < pair[0] <= pair[1]  # type: ignore[index]


def _normalize(entry: Mapping[str, object], key: str, count: int) -> list[Problem]:
    """Check that mean and std have one number per channel, or one for all channels; std must be above 0."""
    which = "3 numbers, one for each of red, green and blue" if count == RGB else f"{count} numbers, one a channel"
    example = ", ".join(["0.5"] * min(count, RGB)) + (", ..." if count > RGB else "")
    problems = []
    for name in ("mean", "std"):
        values = entry.get(name)
        # By type, because a bool is an int to Python.
        is_list = (
            isinstance(values, list) and len(values) in (1, count) and all(type(v) in (int, float) for v in values)
        )
        if not is_list or (name == "std" and not all(value > 0 for value in values)):  # type: ignore[attr-defined]
            must = f"must be {which}" + (", above 0" if name == "std" else "")
            problems.append(Problem(f"{key}.{name}", str(values), must, f"Write {name}: [{example}], for example."))
    return problems


_SHAPES = {"ImgPilToMultiCrop": _multi_crop, "Normalize": _normalize}


@cache
def torchvision_names() -> frozenset[str]:
    """Return the names of the transforms that torchvision exports."""
    # Parsed from its source: importing torchvision would import torch, which takes seconds.
    spec = find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    names: set[str] = set()
    for module in ("transforms", "autoaugment"):  # torchvision.transforms re-exports these with `import *`
        tree = ast.parse((Path(spec.origin).parent / "transforms" / f"{module}.py").read_text())
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
                names.update(ast.literal_eval(statement.value))
    return frozenset(names - {"AutoAugmentPolicy"})  # an enumeration, not a transform


def _same_origin(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Refuse a user's own TEST images while TRAIN still has the digits, whose classes are different."""
    train, test = cfg.DATA.TRAIN, cfg.DATA.TEST
    if test.DATA_SOURCES != ["disk_folder"] or train.DATA_SOURCES != ["digits"]:
        return None
    must = "must name your training images too, because config.DATA.TEST.DATA_PATHS names your own images"
    return Problem("config.DATA.TRAIN.DATA_PATHS", "[]", must, "Write config.DATA.TRAIN.DATA_PATHS=<folder>.")


# The source's own split of scikit-learn's 1,797 images, counted without importing scikit-learn.
_NUM_DIGITS = {"TRAIN": 1_437, "TEST": 360}


def paths(cfg: RunConfig, decided: Decisions | None = None) -> list[Problem]:
    """Check that the folders of a disk_folder exist and have images."""
    problems: list[Problem] = []
    # A dry run may plan for another machine, whose paths do not exist here. But if some of the paths exist, or a
    # missing path resembles an existing folder, then the missing path is a mistake.
    named = [path for split in splits(cfg).values() for path in split.DATA_PATHS]
    is_elsewhere = cfg.DRY_RUN and all(named) and not any(is_there(path) or _resembles(Path(path)) for path in named)
    for name, split in splits(cfg).items():
        key = f"config.DATA.{name}.DATA_PATHS"
        if split.DATA_SOURCES != ["disk_folder"] or cfg.PROGRAM == RETRIEVAL:  # retrieval reads DATASET_PATH instead
            continue
        if not split.DATA_PATHS:
            fix = f"Write {key}=[/path/to/images]."
            problems.append(Problem(key, "[]", "must name a folder with images", fix))
        problems += [
            problem
            for path in split.DATA_PATHS
            if not is_elsewhere and (problem := _path_problem(key, path, endings_of(cfg)))
        ]
    return problems


def _path_problem(key: str, text: str, endings: tuple[str, ...]) -> Problem | None:
    if not text:  # often an unset shell variable; Path("") would be the working directory
        return Problem(key, "''", "must name a folder with images", f"Write {key}=[/path/to/images].")
    if "\0" in text:
        return Problem(
            key, repr(text), "must name a folder, and a path cannot contain a zero byte", "Correct the path."
        )
    path = Path(text)
    if not is_there(path):
        existing, missing = _missing_part(path)
        fix = f"{existing} exists, {missing!r} in it does not.{names_like(existing, missing, _may_hold_images)}"
        return Problem(key, repr(str(path)), "must name a folder that exists", fix)
    if not path.is_dir():
        fix = f"Name the folder that holds it, {path.absolute().parent}, or files of one kind: {', '.join(READ_FILES)}."
        return Problem(key, repr(str(path)), "must name a folder, not a file", fix)
    try:
        # Only the first image: listing a data set of millions takes minutes.
        is_empty = next(image_files(path, endings), None) is None
    except OSError as error:
        fix = f"Make it readable ({error.strerror}: {error.filename})."
        return Problem(key, repr(str(path)), "must name a folder that can be listed", fix)
    if is_empty:
        fix = f"Put images there ({', '.join(endings)}), or name another folder.{held(endings_in(path))}"
        return Problem(key, repr(str(path)), "must name a folder that holds images", fix)
    return None


def _resembles(path: Path) -> bool:
    """Check whether the parent of ``path`` exists and has an entry of a similar name."""
    existing, missing = _missing_part(path)
    return existing / missing == path.absolute() and bool(names_like(existing, missing, _may_hold_images))


def names_like(folder: Path, name: str, may_be: Callable[[Path], bool] = Path.exists) -> str:
    """Write ``" Did you mean 'a'?"`` for the names in ``folder`` that are like ``name``, or an empty string.

    Args:
        folder: folder to look in.
        name: name that does not exist.
        may_be: whether an entry of the folder may be meant.
    """
    try:
        return did_you_mean(name, sorted(entry.name for entry in folder.iterdir() if may_be(entry)))
    # A parent that cannot be listed gives no hint, and the missing path is reported in any case.
    except OSError:
        return ""


def _may_hold_images(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in READ_FILES


def _missing_part(path: Path) -> tuple[Path, str]:
    """Return the last folder of a path that exists, and the name in it that does not."""
    existing = next((parent for parent in path.absolute().parents if is_folder(parent)), Path("/"))
    return existing, path.absolute().relative_to(existing).parts[0]


def endings_of(cfg: RunConfig) -> tuple[str, ...]:
    """Return the file extensions of images; with channels other than RGB, arrays (.npy) are images too."""
    return EXTENSIONS if cfg.DATA.IN_CHANNELS == RGB else (*EXTENSIONS, ".npy")


def num_images(name: str, split: Split, most: int, endings: tuple[str, ...] = EXTENSIONS) -> int | None:
    """Count the images of a split (``name``: TRAIN or TEST), up to ``most``; None if its folder cannot be read.

    Archives and lists are not opened; their count is taken to be ``most``.
    """
    source = split.DATA_SOURCES[0] if len(split.DATA_SOURCES) == 1 else ""
    if source == "digits":
        count = _NUM_DIGITS[name]
    elif source == "disk_folder":
        try:
            # A folder may have millions of images: counting stops at ``most``.
            count = sum(1 for path in split.DATA_PATHS for _ in islice(image_files(path, endings), most))
        except OSError:
            return None
    else:
        count = split.DATA_LIMIT if source == "synthetic" and split.DATA_LIMIT > 0 else most
    return min(count, split.DATA_LIMIT) if split.DATA_LIMIT > 0 else count


def enough(cfg: RunConfig, decided: Decisions) -> Problem | None:
    """Check that every process has at least one image, and every epoch at least one step."""
    train, world_size = cfg.DATA.TRAIN, decided.world_size
    step = decided.micro_batch * max(1, cfg.ZERO.gradient_accumulation_steps)
    # No more images than the two comparisons below need.
    count = num_images("TRAIN", train, max(world_size, step), endings_of(cfg))
    if not count:
        return None  # no path or an unknown source: other rules report it
    if count < world_size:
        must = f"must be at most the number of images, {count}"
        key = "config.DISTRIBUTED.NUM_PROC_PER_NODE"
        return Problem(key, f"{world_size} processes", must, f"Lower it to {count} or less, or add images.")
    if train.DROP_LAST and count < step:
        must = f"drops every image: the {count} there are make less than one step of {step}"
        fix = "Set it to False, or lower config.DATA.TRAIN.BATCHSIZE_PER_REPLICA."
        return Problem("config.DATA.TRAIN.DROP_LAST", "True", must, fix)
    return None


def mixing(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that images are mixed only in training, with valid keys, for a loss with mixed labels or none."""
    problems, key, train = [], "COLLATE_FUNCTION", cfg.DATA.TRAIN
    if cfg.DATA.TEST.COLLATE_FUNCTION == MIXING_COLLATOR:
        fix = "Write default_collate."
        problems.append(
            Problem(f"config.DATA.TEST.{key}", MIXING_COLLATOR, "must not mix the images of an evaluation", fix)
        )
    if train.COLLATE_FUNCTION != MIXING_COLLATOR:
        return problems
    loss, params = cfg.LOSS.get("name"), f"config.DATA.TRAIN.{key}_PARAMS"
    if loss not in _MIXABLE:
        fix = f"Write multicrop_collator, or one of these losses: {', '.join(_MIXABLE)}."
        return [
            *problems,
            Problem(f"config.DATA.TRAIN.{key}", MIXING_COLLATOR, f"must not mix images for the loss {loss}", fix),
        ]
    try:
        keys = MixingConfig(**typed_options(MixingConfig, train.COLLATE_FUNCTION_PARAMS, params))
    except ConfigError as error:
        return [*problems, *error.problems]
    if not (keys.mixup_alpha or keys.cutmix_alpha or keys.cutmix_minmax):
        must = "must have a mixup_alpha or a cutmix_alpha above 0, or cutmix_minmax"
        problems.append(Problem(params, str(keys), must, "Write mixup_alpha: 0.8, or another collator."))
    sides = keys.cutmix_minmax
    if sides is not None and not (len(sides) == 2 and 0 <= sides[0] < sides[1] <= 1):
        must = "must be two shares of the side, the smaller first"
        problems.append(Problem(f"{params}.cutmix_minmax", str(sides), must, "Write [0.2, 0.8], for example."))
    if keys.ssl_method not in ("", _MIXABLE[loss]):
        must = f"must be {_MIXABLE[loss] or 'empty'} for the loss {loss}"
        problems.append(Problem(f"{params}.ssl_method", keys.ssl_method, must, "Correct it, or leave it out."))
    if cfg.ONLINE_PROBE.USE_PROBE:
        fix = "Set it to false, or write another collator."
        problems.append(Problem("config.ONLINE_PROBE.USE_PROBE", "True", "must be false where images are mixed", fix))
    return problems


# Loss for which images can be mixed -> VISSL's ``ssl_method`` for it; empty: ssl_method is not used.
_MIXABLE = {
    "CrossEntropyLoss": "",
    "cross_entropy_multiple_output_single_target": "",
    "swav_loss": "swav",
    "simclr_info_nce_loss": "simclr",
    "moco_loss": "moco",
    "feature_distillation_loss": "",
}
DATA_RULES = (
    *(mixing, sources, datasets, _same_origin, image_size, _whole_patches, labels, transforms),
    *(fast_backend, channels, paths, enough),
)
