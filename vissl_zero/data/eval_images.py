"""Images for evaluation: every one once, in the source's order, without augmentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from vissl_zero.data.batch import Batch
from vissl_zero.data.dataset import MicroBatchDataset
from vissl_zero.data.order import sequential
from vissl_zero.data.source import Source, build_eval_sources
from vissl_zero.data.transforms.pipeline import Pipeline, build_eval_pipeline
from vissl_zero.data.workers import BatchStream
from vissl_zero.errors import DataError


class EvalImages:
    """The images of a source under the evaluation transforms.

    Attributes:
        source: the images and their labels.
        transform: Resize, CenterCrop, ToTensor, Normalize or what TEST.TRANSFORMS say; one crop.
    """

    def __init__(self, source: Source, transform: Pipeline, stream: BatchStream):
        self.source = source
        self.transform = transform
        self._stream = stream

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share of every image once.

        Every rank gets the same number of batches, so a sharded model can be called on each. Put results in their
        place by ``sample_ids``: a rank left without a sample in the last batch gets a copy of the last one.

        Args:
            batch_size: images per batch over all ranks.
            rank, world_size: which share.
        Raises:
            DataError: an image cannot be used, or the transforms make several crops.
        """
        for batch in self._stream.load(sequential(len(self.source), batch_size, rank, world_size)):
            if sum(batch.num_crops) != 1:
                raise DataError(
                    f"config.DATA.TEST.TRANSFORMS make {sum(batch.num_crops)} crops of an image; evaluation needs one. "
                    "Leave them empty to resize and crop as TRAIN's largest crops are."
                )
            yield batch


def build_eval_images(data_cfg: Mapping[str, Any], seed: int) -> tuple[EvalImages, EvalImages | None]:
    """Images of TRAIN (a kNN's index) and of TEST (its queries), both under the evaluation transforms.

    TEST is None where config.DATA.TEST names no source. A class has the same number in both.

    Raises:
        ConfigError, DataError: as ``build_loader``; also a class of TEST that TRAIN does not have.
    """
    train, test = build_eval_sources(data_cfg, seed)
    return eval_images(train, data_cfg, seed), None if test is None else eval_images(test, data_cfg, seed)


def require_evaluation(data_cfg: Mapping[str, Any], seed: int) -> None:
    """Find out before training what would be wrong with the images that are evaluated on after it.

    Cost: indexing the sources; no image is read.

    Raises:
        ConfigError, DataError: as ``build_eval_images``; also transforms that cannot follow one another.
    """
    for images in build_eval_images(data_cfg, seed):
        if images is not None:
            images.transform(Image.new("RGB", (1024, 1024)))  # large enough for any crop


def eval_images(source: Source, data_cfg: Mapping[str, Any], seed: int) -> EvalImages:
    """The images of ``source`` under the evaluation transforms of ``data_cfg``.

    Raises:
        ConfigError: a transform is unknown, or its arguments do not fit.
    """
    pipeline = build_eval_pipeline(data_cfg)
    dataset = MicroBatchDataset(source, pipeline, seed, skip_broken=data_cfg["ON_BROKEN_IMAGE"] == "skip")
    return EvalImages(source, pipeline, BatchStream(dataset, data_cfg))
