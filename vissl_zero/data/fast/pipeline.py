"""The fast pipeline: from a file to crops that are written straight into a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cv2
import numpy as np
from PIL import Image
from torch import Tensor

from vissl_zero.data.decode import Decoder
from vissl_zero.data.fast.picture import EncodedPicture, Finished, Picture, opened
from vissl_zero.data.fast.transforms import FORMS, CutBoxes, Form, Replicate
from vissl_zero.data.pipeline import Pipeline, argument, build_pipeline
from vissl_zero.data.source import Source, encoded_image
from vissl_zero.errors import ConfigError, DataError, Problem
from vissl_zero.resolve.fast_forms import ENDS, refused

cv2.setNumThreads(1)  # crops are small, and other ranks and workers use the cores


class FastPipeline(Pipeline):
    """A sequence of fast forms, followed by a lookup of float values.

    Args:
        forms: forms up to the last transform of images.
        end: pipeline of the remaining transforms, ToTensor and Normalize.
        decoder: decoder of files.
    """

    def __init__(self, forms: Sequence[Form], end: Pipeline, decoder: Decoder):
        super().__init__(forms)
        self._end, self._decoder = end, decoder
        ramp = Image.fromarray(np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2))
        (values,) = end(ramp)
        # ToTensor and Normalize act on single values, so a table replaces them: (3, 256), by running them on a ramp.
        self._values = np.ascontiguousarray(values.numpy()[:, 0])
        self._tables = tuple(self._values)

    def unnormalized(self, images: Tensor) -> Tensor:
        return self._end.unnormalized(images)

    def read(self, source: Source, index: int) -> Picture | EncodedPicture:
        """Read an image. Raises BrokenImageError."""
        return opened(encoded_image(source, index), source.name(index), self._decoder)

    def size(self, read: Picture | EncodedPicture) -> tuple[int, int]:
        return read.size

    def open(self, image: bytes | Image.Image, name: str, decoder: Decoder) -> Picture | EncodedPicture:
        return opened(image, name, decoder)

    def begun(self, image: Any) -> Any:
        return opened(image, "image", self._decoder) if isinstance(image, Image.Image) else image

    def step(self, transform: Any, crops: list[Any]) -> list[Any]:
        """Apply a form to all crops.

        Raises:
            BrokenImageError: a JPEG is damaged after its header.
            DataError: a crop cannot be made.
        """
        if not getattr(transform, "takes_files", False):
            crops = [picture.opened() for picture in crops]
        try:
            return _after(transform, crops)
        except ValueError as error:
            raise DataError(f"TRANSFORMS: {type(transform).__name__}: {error}.") from error

    def finished(self, crops: list[Any]) -> list[Any]:
        """Return the pixels of the crops; values are looked up in ``write``. Raises BrokenImageError."""
        return [Finished(picture.opened().pixels, self._tables) for picture in crops]

    def rows(self, images: Tensor) -> Iterable[Any]:
        return images.numpy()  # indexing a row costs a tenth of a tensor's

    def write(self, crop: Finished, row: np.ndarray) -> Any:
        crop.write(row)

    def __call__(self, image: Any) -> list[Tensor]:
        return [self.stacked([crop])[0] for crop in self.crops(image)]


def _after(form: Form, pictures: list[Any]) -> list[Any]:
    """Apply a form, which modifies a picture in place or returns new ones."""
    if getattr(form, "takes_all_crops", False):
        form(pictures)
        return pictures
    made: list[Any] = []
    for picture in pictures:
        result = form(picture)
        made += [picture] if result is None else result if isinstance(result, list) else [result]
    return made


def build_fast_pipeline(
    entries: Sequence[Mapping[str, Any]], key: str, decoder: Decoder, kind: type[FastPipeline] = FastPipeline
) -> FastPipeline:
    """Build the fast pipeline of a TRANSFORMS list; see ``build_pipeline``.

    Args:
        entries, key: see ``build_pipeline``.
        decoder: decoder of files.
        kind: class of the pipeline.
    Raises:
        ConfigError: lists transforms and arguments that have no fast form, and wrong arguments.
    """
    if problems := refused(entries, key):
        raise ConfigError(problems)
    build_pipeline(entries, key)  # checks the arguments
    last = next(index for index, entry in enumerate(entries) if entry["name"] in ENDS)
    forms = _joined([_form(entry, f"{key}[{index}]") for index, entry in enumerate(entries[:last])])
    return kind(forms, build_pipeline(entries[last:], key), decoder)


def _form(entry: Mapping[str, Any], key: str) -> Form:
    """Build the fast form of a transform from its entry in ``TRANSFORMS``; ``key`` names the entry in errors."""
    arguments = {name: _nested(value, f"{key}.{name}") for name, value in entry.items() if name != "name"}
    try:
        return FORMS[entry["name"]](**arguments)
    except (TypeError, ValueError) as error:
        must = f"{entry['name']}: {error}"
        raise ConfigError([Problem(key, str(arguments), must, "Correct its arguments.")]) from error


def _nested(value: Any, key: str) -> Any:
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, Mapping) for part in value):
        return [_form(part, f"{key}[{index}]") for index, part in enumerate(value)]
    return argument(value, key)


def _joined(forms: list[Form]) -> list[Form]:
    """Replace copies that are cropped next by crops of one image, so that a file is decoded no larger than needed."""
    joined: list[Form] = []
    for form in forms:
        if isinstance(form, CutBoxes) and joined and isinstance(joined[-1], Replicate):
            joined[-1] = CutBoxes(form.crops * joined[-1].num_times)
        else:
            joined.append(form)
    return joined
