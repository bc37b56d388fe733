"""The rule of ``DATA.BACKEND``: transforms of the fast backend and their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

ENDS = ("ToTensor", "ImgPilToRawTensor")
_RESIZING = ("bilinear", ("bilinear", "bicubic"))
# Name -> argument -> None (any value has a fast form), or the argument's default and the values with a fast form.
FAST_FORMS: dict[str, dict[str, tuple[str, tuple[str, ...]] | None]] = {
    "RandomResizedCrop": {"size": None, "scale": None, "ratio": None, "interpolation": _RESIZING},
    "ImgPilToMultiCrop": {
        **dict.fromkeys(("total_num_crops", "num_crops", "size_crops", "crop_scales", "keeps_boxes")),
        "interpolation": _RESIZING,
    },
    "ImgReplicatePil": {"num_times": None},
    "ImgPilToPatchesAndImage": dict.fromkeys(
        (
            *("crop_scale_image", "crop_size_image", "crop_scale_patches", "crop_size_patches"),
            *("permute_patches", "num_patches"),
        )
    ),
    "Resize": {"size": None, "interpolation": _RESIZING},
    "CenterCrop": {"size": None},
    "RandomHorizontalFlip": {"p": None},
    "ColorJitter": dict.fromkeys(("brightness", "contrast", "saturation", "hue")),
    "RandomGrayscale": {"p": None},
    "RandomApply": {"transforms": None, "p": None},
    "ImgPilColorDistortion": dict.fromkeys(("strength", "brightness", "contrast", "saturation", "hue")),
    "ImgPilMultiCropRandomApply": {"transforms": None, "prob": None},
    "ImgPilGaussianBlur": dict.fromkeys(("p", "radius_min", "radius_max")),
    "RandomSolarize": {"threshold": None, "p": None},
    "ImgPilRandomSolarize": {"p": None},
    "ImgPilRandomPhotometric": {"p": None},
    "ImgPilRandomStroke": {"strength": None},
    "RandomAffine": {
        **dict.fromkeys(("degrees", "translate", "scale", "shear")),
        "interpolation": ("nearest", ("bilinear",)),
    },
}
_LIBRARIES = {"simplejpeg": "simplejpeg", "cv2": "opencv-python-headless"}


def fast_backend(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the fast backend's libraries are installed, and that every transform has a fast form."""
    if cfg.DATA.BACKEND != "fast":
        if cfg.DATA.AUGMENT_ON == "workers":
            return []
        fix = "Write config.DATA.BACKEND=fast, or config.DATA.AUGMENT_ON=workers."
        return [Problem("config.DATA.AUGMENT_ON", "device", "must be workers for config.DATA.BACKEND=pil", fix)]
    problems: list[Problem] = []
    missing = [name for module, name in _LIBRARIES.items() if find_spec(module) is None]
    if missing:
        must = f"needs {' and '.join(missing)}"
        fix = "Run pip install vissl-zero[fast], or write config.DATA.BACKEND=pil."
        problems.append(Problem("config.DATA.BACKEND", "fast", must, fix))
    for name, split in (("TRAIN", cfg.DATA.TRAIN), ("TEST", cfg.DATA.TEST)):
        if split.TRANSFORMS:
            problems += refused(split.TRANSFORMS, f"config.DATA.{name}.TRANSFORMS")
    return problems


def refused(entries: Sequence[Any], key: str) -> list[Problem]:
    """Return a problem for each transform or argument that has no fast form.

    Args:
        entries: a TRANSFORMS list.
        key: key path of the list, for messages.
    """
    names = [str(entry.get("name")) if isinstance(entry, Mapping) else str(entry) for entry in entries]
    # Up to the conversion, images are arrays of bytes. After it only Normalize has a fast form for tensors.
    at = next((index for index, name in enumerate(names) if name in ENDS), len(names))
    problems = [problem for entry in entries[:at] for problem in _refused(entry, key)]
    if names[at + 1 :] not in ([], ["Normalize"]) or at == len(names):
        must = f"must end in {' or '.join(ENDS)}, then at most Normalize, for config.DATA.BACKEND=fast"
        problems.append(Problem(key, ", ".join(names[at:]) or names[-1] if names else "[]", must, _FIX))
    return problems


_FIX = "Correct the list, or write config.DATA.BACKEND=pil."


def _refused(entry: Any, key: str) -> list[Problem]:
    if not isinstance(entry, Mapping) or "name" not in entry:
        return []  # the rule ``transforms`` reports malformed entries
    name = str(entry["name"])
    if name not in FAST_FORMS:
        must = "must have a fast form for config.DATA.BACKEND=fast"
        fix = f"Leave it out, or write config.DATA.BACKEND=pil. There are: {', '.join(FAST_FORMS)}."
        return [Problem(key, repr(name), must, fix)]
    problems, known = [], FAST_FORMS[name]
    for argument in (word for word in entry if word not in (*known, "name")):
        must = "has no fast form (config.DATA.BACKEND=fast)"
        problems.append(Problem(f"{key}.{name}.{argument}", str(entry[argument]), must, _FIX))
    for argument, limit in known.items():
        if limit is not None and (value := entry.get(argument, limit[0])) not in limit[1]:
            must = f"must be {' or '.join(limit[1])} for config.DATA.BACKEND=fast"
            problems.append(Problem(f"{key}.{name}.{argument}", str(value), must, _FIX))
    for inner in entry.get("transforms") or ():
        problems += _refused(inner, key)
    return problems
