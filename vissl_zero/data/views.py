"""The loader's crops of one image, for a custom loader: ``vissl_zero.load_views``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from vissl_zero.config.blocks.data import Split
from vissl_zero.config.compose import compose
from vissl_zero.data.dataset import borrowed_randomness, epoch_of_views, seed_sample
from vissl_zero.data.decode import Decoder, read_file
from vissl_zero.data.pipeline import Pipeline
from vissl_zero.data.split_pipeline import build_split_pipeline
from vissl_zero.resolve.resolve import resolve


class Views:
    """The function from an image to its crops that the loader applies. Picklable, for loader workers.

    Args:
        pipeline: pipeline of DATA.TRAIN.TRANSFORMS.
        decoder: decoder of files.
        seed: SEED_VALUE.
        period: AUGMENTATION_PERIOD.
    """

    def __init__(self, pipeline: Pipeline, decoder: Decoder, seed: int, period: int | None = None):
        self.pipeline, self.decoder, self.seed, self.period = pipeline, decoder, seed, period

    def __call__(self, image: bytes | str | Path | Image.Image, epoch: int = 0, index: int = 0) -> list[Tensor]:
        """Return the crops of a sample, which depend only on (SEED_VALUE, epoch, index) and the image.

        The global random states of torch, numpy and Python do not change.

        Args:
            image: the content of a file, a path, or an image.
            epoch: number of the epoch, from 0.
            index: index of the image in its source.
        Returns:
            (3, H, W) float32 each, in the order in which the transforms make them.
        Raises:
            BrokenImageError: the file cannot be used.
            DataError: the transforms cannot take the image.
        """
        name = f"image {index}" if isinstance(image, (bytes, Image.Image)) else str(image)
        content = read_file(image) if isinstance(image, (str, Path)) else image
        opened = self.pipeline.open(content, name, self.decoder)
        with borrowed_randomness():
            seed_sample(self.seed, epoch_of_views(epoch, self.period), index)
            return self.pipeline(opened)


def load_views(recipe: str, overrides: Sequence[str] = ()) -> Views:
    """Load the training crops of a recipe: ``views(image, epoch=0, index=0) -> list[Tensor]``.

    The crops are bit-identical to the loader's crops of image ``index`` of its source in ``epoch``.

    Args:
        recipe: value of ``config=``.
        overrides: such as ``config.SEED_VALUE=1`` or ``config.DATA.BACKEND=fast``.
    Raises:
        ConfigError: lists all problems of the recipe.
    """
    # A dry run does not require that paths exist here.
    composed = compose(recipe, [*overrides, "config.DRY_RUN=true"])
    # The recipe's images need not exist on this machine; synthetic ones always do.
    none: dict[str, Any] = {
        "DATA_PATHS": [],
        "DATASET_NAMES": [],
        "LABEL_SOURCES": [],
        "LABEL_PATHS": [],
        "SOURCE_PARAMS": {},
    }
    composed.run.DATA.TRAIN = replace(composed.run.DATA.TRAIN, DATA_SOURCES=["synthetic"], **none)
    composed.run.DATA.TEST = Split()
    plan = resolve(composed.run, ".", recipe=composed.recipe, written=composed.written, notes=composed.notes)
    data = plan.config.DATA
    return Views(build_split_pipeline(data, "TRAIN"), Decoder.of(data), plan.seed, data.AUGMENTATION_PERIOD)
