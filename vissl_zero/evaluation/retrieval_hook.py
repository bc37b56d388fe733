"""The hook for retrieval of images by their features: VISSL's ``instance_retrieval_test``."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional

from vissl_zero.atomic import replacing
from vissl_zero.collectives import all_gather_objects, all_gather_rows
from vissl_zero.config.blocks.output import ImageRetrieval
from vissl_zero.data.decode import read_image
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import DataError
from vissl_zero.evaluation.features import evaluating
from vissl_zero.evaluation.retrieval import (
    AT,
    Box,
    RetrievalSet,
    Whitening,
    descriptor,
    first,
    regional_maxima,
    require_files,
    retrieval_set,
    scores,
    unit_vectors,
    whitening_images,
)
from vissl_zero.registry import HOOKS
from vissl_zero.terminal import print_line

FOLDER = "instance_retrieval"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DEBUG = {"NUM_TRAINING_SAMPLES": 10, "NUM_QUERY_SAMPLES": 10, "NUM_DATABASE_SAMPLES": 50}
_SECONDS_BETWEEN_LINES = 5.0
_NAMES = {"e": "easy", "m": "medium", "h": "hard"}


@HOOKS.register("instance_retrieval_test")
class InstanceRetrieval(Hook):
    """Ranks the images of a database for each query, and measures mean average precision.

    ``IMG_RETRIEVAL`` has the keys. Each image goes through the trunk by itself, in its own proportions; ranks share the
    images. Adds ``instance_retrieval`` to the results: ``mAP`` and ``mp@k`` (mean precision at ``k``), by VISSL's
    names: e, m and h for easy, medium and hard of revisited Oxford and Paris, the changes of Copydays, ``all`` else.
    ``instance_retrieval/`` in the run folder has these as ``metrics.json`` and, with SAVE_RETRIEVAL_RANKINGS_SCORES,
    ``rankings.json`` (for each query the numbers of the images, best first) and ``similarity_scores.json`` (for each
    image a score a query).
    """

    def __init__(self) -> None:
        self._found: RetrievalSet | None = None
        self._train: list[Path] = []

    def on_start(self, run: Run) -> None:
        options = _options(run)
        root, train = Path(options.DATASET_PATH).expanduser(), options.TRAIN_DATASET_NAME
        images = retrieval_set(root, options.EVAL_DATASET_NAME, options.USE_DISTRACTORS)
        self._found = first(images, options.NUM_DATABASE_SAMPLES, options.NUM_QUERY_SAMPLES)
        if options.TRAIN_PCA_WHITENING:
            files = whitening_images(root, train, options.WHITEN_IMG_LIST, options.USE_DISTRACTORS)
            count = options.NUM_TRAINING_SAMPLES
            self._train = files if count < 0 else files[:count]
        require_files([*self._found.images, *self._found.queries, *self._train])

    def on_end(self, run: Run) -> None:
        assert self._found is not None
        options = _options(run)
        run.sharded.consolidate_buffers()  # running statistics may differ between ranks; features must not
        whitening = self._whitening(run, options) if self._train else None
        boxes = self._found.boxes if options.CROP_QUERY_ROI else None
        queries = _vectors(run, options, self._found.queries, whitening, "queries", boxes)
        images = _vectors(run, options, self._found.images, whitening, "images")
        if options.SIMILARITY_MEASURE == "l2":
            # In float64: torch computes many distances by a product of matrices, which cancels most digits of near
            # vectors.
            similarity = -torch.cdist(queries.double(), images.double()).cpu().numpy()
        else:
            similarity = (queries @ images.T).cpu().numpy()
        measured = {name: scores(similarity, wanted) for name, wanted in self._found.wanted.items()}
        results: dict[str, Any] = {
            "mAP": {name: mean for name, (mean, _) in measured.items()},
            "mp@k": {"k": list(AT), **{name: at for name, (_, at) in measured.items()}},
        }
        run.results["instance_retrieval"] = results
        if run.is_main:
            _write(run.folder / FOLDER, results, similarity if options.SAVE_RETRIEVAL_RANKINGS_SCORES else None)
            summary = ", ".join(f"{_NAMES.get(name, name)} {mean:.1%}" for name, mean in results["mAP"].items())
            line = f"{self._found.name}: mean average precision {summary}"
            print_line(line)

    def _whitening(self, run: Run, options: ImageRetrieval) -> Whitening:
        """Fit the whitening on the training images. Collective."""
        rows = []
        for maps, is_own in _each(run, options, self._train, "images to whiten by"):
            if is_own and options.FEATS_PROCESSING_TYPE == "rmac":
                rows.append(regional_maxima(maps[0], options.SPATIAL_LEVELS, options.NORMALIZE_FEATURES)[0])
            elif is_own:
                rows.append(_plain(maps, options))
        return Whitening.of_all_ranks(_joined(run, rows), options.N_PCA)


def _options(run: Run) -> ImageRetrieval:
    """Return ``IMG_RETRIEVAL``, with the settings that DEBUG_MODE implies."""
    options = run.plan.config.IMG_RETRIEVAL
    if options.DEBUG_MODE:
        counts: dict[str, Any] = {key: count for key, count in _DEBUG.items() if getattr(options, key) == -1}
        return replace(options, **counts)
    return options


def _vectors(
    run: Run,
    options: ImageRetrieval,
    files: Sequence[Path],
    whitening: Whitening | None,
    what: str,
    boxes: Sequence[Box] | None = None,
) -> Tensor:
    """Compute the vectors (N, D) of all images, equal on every rank. Collective."""
    rows = []
    for maps, is_own in _each(run, options, files, what, boxes):
        if is_own and options.FEATS_PROCESSING_TYPE == "rmac":
            assert whitening is not None  # resolve's rules ensure it
            of_regions = regional_maxima(maps[0], options.SPATIAL_LEVELS, options.NORMALIZE_FEATURES)[0]
            white = whitening(of_regions)
            if options.NORMALIZE_FEATURES:
                row = unit_vectors(unit_vectors(white).sum(dim=0, keepdim=True))
            else:
                row = white.sum(dim=0, keepdim=True)
            rows.append(row)
        elif is_own:
            row = _plain(maps, options)
            rows.append(row if whitening is None else whitening(row))
    local_rows = _joined(run, rows)
    # Rank r has images r, r + n, r + 2 n, ...
    order = torch.tensor([index for rank in range(run.world_size) for index in range(rank, len(files), run.world_size)])
    return all_gather_rows(local_rows)[order.argsort().to(local_rows.device)]


def _plain(maps: Sequence[Tensor], options: ImageRetrieval) -> Tensor:
    kind, power = options.FEATS_PROCESSING_TYPE, options.GEM_POOL_POWER
    if kind != "gem" and len({of_scale.shape for of_scale in maps}) > 1:
        raise DataError("IMG_RETRIEVAL.IMG_SCALINGS: maps of several sizes have no mean. Write [1], or pool by gem.")
    return descriptor(maps, kind, power, options.NORMALIZE_FEATURES)


def _joined(run: Run, rows: Sequence[Tensor]) -> Tensor:
    """Join this rank's vectors (1 or more, D) to one tensor (N, D); N is 0 on a rank without an image. Collective."""
    widths = {width for of_rank in all_gather_objects({row.shape[1] for row in rows}) for width in of_rank}
    if len(widths) > 1:
        raise DataError(
            "IMG_RETRIEVAL.FEATS_PROCESSING_TYPE: images of several sizes have maps of several sizes, which cannot be "
            "compared as they are. Write rmac or gem, or CENTER_CROP: true."
        )
    # A rank without an image gathers as the others do, so its empty rows need their width and dtype.
    dtype = getattr(torch, run.plan.sharding.precision.wide)
    return torch.cat([torch.zeros(0, *widths, dtype=dtype, device=run.device), *rows])


def _each(
    run: Run, options: ImageRetrieval, files: Sequence[Path], what: str, boxes: Sequence[Box] | None = None
) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield the maps (1, C, H, W) at each scale of this rank's images, and whether the image differs from the last.

    Collective: each rank gets as many images, so that a sharded model can be called.
    """
    dtype = getattr(torch, run.plan.sharding.precision.master)
    num_steps = -(-len(files) // run.world_size)
    image_ids = [step * run.world_size + run.rank for step in range(num_steps)]

    def load(index: int) -> Tensor:
        # A rank without an image left runs the last one again, because a sharded model needs all ranks.
        index = min(index, len(files) - 1)
        return prepared(read_image(files[index]), options, None if boxes is None else boxes[index])

    began, last_progress = time.monotonic(), time.monotonic()
    with run.sharded.evaluated(), evaluating(run.sharded.model):
        for index, image in zip(
            image_ids, _ahead(load, image_ids, run.plan.config.DATA.NUM_DATALOADER_WORKERS), strict=True
        ):
            image = image[None].to(run.device, dtype)
            maps = []
            for scale in options.IMG_SCALINGS:
                scaled = image
                if scale != 1:
                    scaled = F.interpolate(image, scale_factor=scale, mode="bilinear", align_corners=False)
                (features,) = run.sharded.model([scaled], features_only=True)
                features = features.to(torch.promote_types(features.dtype, torch.float32))
                maps.append(features if features.ndim == 4 else features.flatten(1)[:, :, None, None])
            yield maps, index < len(files)
            now, num_done = time.monotonic(), min(index + 1, len(files))
            if run.is_main and now - last_progress >= _SECONDS_BETWEEN_LINES and num_done < len(files):
                last_progress = now
                text = f"{what}: {num_done:,} of {len(files):,}, {num_done / (now - began):.1f} images/s"
                print_line(text)


def _ahead(load: Callable[[int], Tensor], items: Sequence[int], num_threads: int) -> Iterator[Tensor]:
    """Yield the result of ``load`` for each item, in order; threads load a few items ahead."""
    if num_threads < 1:
        yield from map(load, items)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[Tensor]] = deque()
        for item in items:
            waiting.append(pool.submit(load, item))
            # No further ahead, or decoded images would fill the memory while the model computes.
            if len(waiting) > 2 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def prepared(image: Image.Image, options: ImageRetrieval, box: Box | None = None) -> Tensor:
    """Convert an RGB image to a normalized tensor (3, H, W): longer side RESIZE_IMG pixels, or a center crop.

    Args:
        image: whole image.
        options: the block ``IMG_RETRIEVAL``.
        box: part of the image to use: left, top, right and bottom in pixels; None: the whole image.
    """
    side, ratio = options.RESIZE_IMG, 1.0
    if options.CENTER_CROP:
        image = functional.center_crop(functional.resize(image, [int(256 / 224 * side)]), [side, side])
    elif side > 0:
        ratio = side / max(image.size)
        width, height = (int(np.round(length * ratio)) for length in image.size)
        image = image.resize((max(width, 1), max(height, 1)), Image.Resampling.BILINEAR)
    # Resized before it is cropped: the box then shows the object at the size that it has in the database.
    pixels = functional.normalize(functional.to_tensor(image), list(_MEAN), list(_STD))
    if box is not None:
        left, top, right, bottom = (max(0, int(np.round(edge * ratio))) for edge in box)
        pixels = pixels[:, top:bottom, left:right]
        if not pixels.numel():
            raise DataError(
                f"IMG_RETRIEVAL.CROP_QUERY_ROI: the box {box} leaves nothing of an image. Correct the list."
            )
    return pixels


def _write(folder: Path, results: dict[str, Any], similarity: np.ndarray | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {"metrics.json": results}
    if similarity is not None:
        files["rankings.json"] = np.argsort(-similarity, axis=1, kind="stable").tolist()
        files["similarity_scores.json"] = similarity.T.tolist()
    for name, content in files.items():
        with replacing(folder / name) as path:
            path.write_text(json.dumps(content) + "\n")
