"""The pipeline of a TRANSFORMS list, from an image to its crops; and the transforms of evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional

from vissl_zero.config.components import typed_options
from vissl_zero.data.changes import Changes
from vissl_zero.data.decode import Decoder
from vissl_zero.data.source import Source
from vissl_zero.errors import ConfigError, DataError, Problem, did_you_mean
from vissl_zero.registry import TRANSFORMS, Component

_SIZED = ("RandomResizedCrop", "CenterCrop", "RandomCrop", "Resize")


def derive_eval_transforms(train: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Derive the evaluation transforms from TRAIN's; ``split_pipeline.build_eval_pipeline`` describes them."""
    size = _largest_crop(train)
    sized: list[Mapping[str, Any]] = (
        [{"name": "Resize", "size": max(size)}, {"name": "CenterCrop", "size": size}] if size else []
    )
    normalize = [entry for entry in train if entry["name"] == "Normalize"]
    # A square of the training size: Resize takes the shorter side, CenterCrop the rest.
    return [*sized, {"name": "ToTensor"}, *normalize]


def _largest_crop(train: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return height and width of TRAIN's largest crop, or an empty list if nothing in TRAIN sets a size."""
    for entry in reversed(train):  # the last transform with a size decides
        if entry["name"] == "ImgPilToMultiCrop":
            return [max(entry["size_crops"])] * 2
        if entry["name"] == "ImgPilToPatchesAndImage":
            return [entry.get("crop_size_image", 224)] * 2
        if entry["name"] in _SIZED:
            size = entry["size"]
            return [size, size] if isinstance(size, int) else list(size) * (2 // len(size))
    return []


InterpolationMode = torchvision.transforms.InterpolationMode


class Pipeline:
    """A sequence of transforms; after one that makes several crops, the others act on each crop separately (VISSL).

    A transform with a true ``takes_all_crops`` takes the list of all crops, and returns a list.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]):
        self.transforms = tuple(transforms)

    def read(self, source: Source, index: int) -> Any:
        """Read an image in the form that ``crops`` takes. Raises BrokenImageError."""
        return source.image(index)

    def size(self, read: Any) -> tuple[int, int]:
        """Return height and width, in pixels, of an image from ``read``."""
        return read.height, read.width

    def open(self, image: bytes | Image.Image, name: str, decoder: Decoder) -> Any:
        """Convert a file in memory, or an image, to the form that ``crops`` takes. Raises BrokenImageError."""
        return decoder.image(image, name) if isinstance(image, bytes) else image.convert("RGB")

    def __call__(self, image: Image.Image) -> list[Tensor]:
        """Make the crops of an image, float (3, H, W) each; see ``crops``."""
        return self.crops(image)

    def sample(self, read: Any) -> tuple[list[Any], Tensor | None]:
        """Return the crops of an image from ``read``, and its mask; None without masks."""
        return self.crops(read), None

    def rows(self, images: Tensor) -> Iterable[Any]:
        """Return the rows (3, H, W) of a batch in the form that ``write`` takes."""
        return images.unbind()

    def write(self, crop: Any, row: Any) -> Any:
        """Write a crop into its row of a batch, and return the changes left to the device (see ``changes``)."""
        row.copy_(crop)

    def stacked(self, crops: Sequence[Any]) -> Tensor:
        """Stack crops of one shape into a new tensor (N, 3, H, W)."""
        batch = torch.empty((len(crops), *crops[0].shape), dtype=crops[0].dtype)
        for crop, row in zip(crops, self.rows(batch), strict=True):
            self.write(crop, row)
        return batch

    def unnormalized(self, images: Tensor) -> Tensor:
        """Return images (B, C, H, W) of the pipeline before Normalize, if it has one."""
        for transform in reversed(self.transforms):
            # Undone in reverse, should there be several.
            if isinstance(transform, torchvision.transforms.Normalize):
                mean, std = (images.new_tensor(v).view(1, -1, 1, 1) for v in (transform.mean, transform.std))
                images = images * std + mean
        return images

    def changes(self, notes: Sequence[Any]) -> Changes | None:
        """Gather the results of ``write`` for the crops of one batch; None: no changes are left to the device."""
        return None

    def crops(self, image: Any) -> list[Any]:
        """Return the crops of an image, which have ``shape`` and ``dtype``, in the order in which they were made.

        Raises:
            DataError: the transforms do not end in tensors, or one of ours or torchvision's cannot take its input.
        """
        crops: list[Any] = [self.begun(image)]
        for transform in self.transforms:
            crops = self.step(transform, crops)
        return self.finished(crops)

    def begun(self, image: Any) -> Any:
        """Convert an image to the input of the first transform."""
        return image

    def step(self, transform: Callable[[Any], Any], crops: list[Any]) -> list[Any]:
        """Apply one transform to all crops. Raises DataError as ``crops``."""
        if getattr(transform, "takes_all_crops", False):
            return list(_applied(transform, crops))
        return [made for crop in crops for made in _as_list(_applied(transform, crop))]

    def finished(self, crops: list[Any]) -> list[Any]:
        """Return the crops, after checking that they are float tensors. Raises DataError as ``crops``."""
        if not all(isinstance(crop, Tensor) and crop.ndim == 3 and torch.is_floating_point(crop) for crop in crops):
            raise DataError(
                f"TRANSFORMS must turn an image into (3, H, W) float tensors, but end in {type(crops[0]).__name__}. "
                "Add {name: ToTensor} after the transforms that work on images."
            )
        return crops


def _applied(transform: Callable[[Any], Any], crop: Any) -> Any:
    try:
        return transform(crop)
    except (TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        if type(transform).__module__.split(".")[0] not in ("torchvision", "vissl_zero"):
            raise  # a defect in a custom transform: its author needs the traceback
        name = f"TRANSFORMS: {type(transform).__name__}"
        if isinstance(error, TypeError | AttributeError) or _takes_other_kind(transform, crop):
            raise DataError(
                f"{name} cannot take a {type(crop).__name__} ({error}). Put transforms of images before "
                "{name: ToTensor} and those of tensors, such as Normalize, after it."
            ) from error
        raise DataError(
            f"{name} cannot take {_shown(crop)} ({error}). Change its arguments, or the images that it gets."
        ) from error


def _takes_other_kind(transform: Callable[[Any], Any], crop: Any) -> bool:
    """Check whether a transform that fails with an image takes it as a tensor, or a tensor as an image."""
    convert = functional.to_pil_image if isinstance(crop, Tensor) else functional.to_tensor
    try:
        transform(convert(crop))
    except Exception:  # noqa: BLE001 - whatever is wrong, it is not the kind
        return False
    return True


def _shown(crop: Any) -> str:
    if isinstance(crop, Image.Image):
        return f"an image of {crop.width} x {crop.height}"
    shape = getattr(crop, "shape", ())
    return f"a {type(crop).__name__} of {' x '.join(map(str, shape))}" if shape else f"a {type(crop).__name__}"


def _as_list(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (list, tuple)) else (result,)


def build_pipeline(entries: Sequence[Mapping[str, Any]], key: str) -> Pipeline:
    """Build the pipeline of a TRANSFORMS list.

    Args:
        entries: ``{name: ..., <argument>: ...}`` each. A name is one of the TRANSFORMS registry or of a class of
            ``torchvision.transforms``; an argument that is itself a list of such entries (RandomApply) is built too.
        key: configuration key of the list, for messages, such as ``config.DATA.TRAIN.TRANSFORMS``.
    Raises:
        ConfigError: lists every unknown name and every entry whose arguments do not fit.
    """
    built: list[Callable[[Any], Any]] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        try:
            built.append(_build(entry, f"{key}[{index}]"))
        except ConfigError as error:
            # All entries are built before the error is raised, so that it lists every problem.
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Pipeline(built)


def _build(entry: Mapping[str, Any], key: str) -> Callable[[Any], Any]:
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise ConfigError([Problem(key, str(entry), "must be {name: ..., ...}", "Add the transform's name.")])
    name = str(entry["name"])
    component = _find(name, key)
    arguments = {word: argument(value, f"{key}.{word}") for word, value in entry.items() if word != "name"}
    if component.config is not None:
        arguments = typed_options(component, arguments, key)
    try:
        transform: Callable[[Any], Any] = component.build(**arguments)
    except (TypeError, ValueError) as error:
        fix = f"{name} takes: {inspect.signature(component.build)}."
        raise ConfigError([Problem(key, str(arguments), f"{name}: {error}", fix)]) from error
    return transform


def _find(name: str, key: str) -> Component:
    if name in TRANSFORMS:
        return TRANSFORMS.get(name)
    known = torchvision_names()
    if name in known:
        return Component(name, getattr(torchvision.transforms, name), None, "")
    hint = did_you_mean(name, [*TRANSFORMS, *known])
    fix = f"Known: {', '.join(TRANSFORMS)} and the classes of torchvision.transforms.{hint}"
    raise ConfigError([Problem(key, repr(name), "must name known transforms", fix)])


def torchvision_names() -> list[str]:
    """List the transforms that torchvision offers by class name."""
    everything = vars(torchvision.transforms).items()
    return sorted(name for name, thing in everything if inspect.isclass(thing) and not issubclass(thing, Enum))


def argument(value: Any, key: str) -> Any:
    """Convert an argument from YAML, which has no enumerations and no nested transforms, for a constructor."""
    if isinstance(value, str) and value in {mode.value for mode in InterpolationMode}:
        return InterpolationMode(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) and "name" in v for v in value):
        return [_build(v, f"{key}[{index}]") for index, v in enumerate(value)]
    return value
