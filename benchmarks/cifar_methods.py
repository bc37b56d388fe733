"""Train ``digits/<method>`` recipes on CIFAR-10's images and note kNN and linear top-1: what ``docs/methods.md`` shows.

Usage: python benchmarks/cifar_methods.py --data <folder> [--images 5000] [--seed 0] [method ...]

The folder has train/ and test/, with a folder of JPEGs for each class in both.

All runs share this process and its one thread: the model is that of any number of processes. Images, crops, trunks and
the length of a run differ from the recipe as ``_OWN`` and ``_changes`` say. Figures go to
``vissl_zero/methods/figures.json``; methods that are not named keep theirs. Distillation first trains its teacher, the
supervised recipe on the same images.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_process import be_a_rank, train_here
from PIL import Image
from torch import Tensor

from vissl_zero.config.compose import compose
from vissl_zero.config.run_config import RunConfig
from vissl_zero.data.source import SourceRequest, build_eval_sources
from vissl_zero.data.sources.disk import DiskFolder
from vissl_zero.evaluation.features import Features, thumbnails
from vissl_zero.evaluation.knn import knn_top1
from vissl_zero.evaluation.trunk import LoadedTrunk, load_trunk
from vissl_zero.methods.spec import FIGURES, PAGE, with_table
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import build_model
from vissl_zero.registry import DATA_SOURCES, METHODS, TRANSFORMS
from vissl_zero.resolve.resolve import resolve

_SIDE = 24  # of the crops, at which an object of a whole image of 32 pixels has about its own size
_NUM_TEST = 2000
_MEAN, _STD = np.array([0.49, 0.48, 0.45], np.float32), np.array([0.25, 0.24, 0.26], np.float32)
_RATES = (1e-4, 1e-3, 1e-2)  # of weight decay in the linear classifier; a tenth of TRAIN chooses


@dataclass(frozen=True)
class _Own:
    """What a method has for itself.

    Attributes:
        epochs: such that all methods take about as long.
        views: crops per image.
        least_area: smallest share of the image in a crop.
        color: strength of the color distortion.
        keys: of the recipe.
    """

    epochs: int = 4
    views: int = 2
    least_area: float = 0.3
    color: float = 0.5
    keys: Mapping[str, Any] = field(default_factory=dict)


def _crop(size: int, least_area: float, color: float) -> str:
    return f"{{name: CifarCrop, size: {size}, least_area: {least_area}, color: {color}}}"


_TILES = "{name: ImgPatchesFromTensor, num_patches: 4, patch_jitter: 4}"
_OWN = {
    "byol": _Own(epochs=12),
    "data2vec": _Own(epochs=16, color=0.0),
    "dino": _Own(epochs=12),
    "dinov2": _Own(epochs=12),
    "ibot": _Own(epochs=16),
    "ijepa": _Own(epochs=32, color=0.0),
    # Tiles of 16 pixels with gaps of up to 4 between them: without gaps, edges that meet tell the order.
    "jigsaw": _Own(epochs=40, keys={"DATA.TRAIN.TRANSFORMS": f"[{_crop(40, 0.6, 0.5)}, {_TILES}]"}),
    "mae": _Own(epochs=48, color=0.0),
    "maskfeat": _Own(epochs=16, color=0.0),
    "msn": _Own(epochs=12),
    "npid": _Own(epochs=12, views=1),
    "pirl": _Own(epochs=6),
    "rotnet": _Own(views=1),
    "simclr": _Own(epochs=12),
    "simmim": _Own(epochs=16, color=0.0),
    "simsiam": _Own(epochs=20),
    "swav": _Own(epochs=6),
}


def main() -> None:
    """Run what is asked for, one after the other, and write after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("methods", nargs="*", choices=[[], *METHODS.builtin()], help="all, if none is named")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    be_a_rank()
    with tempfile.TemporaryDirectory() as temporary:
        bench = _Bench(args.data.absolute(), args.images, args.seed, Path(temporary))
        for method in args.methods or METHODS.builtin():
            try:
                figures = bench.figures(method)
            except Exception:  # noqa: BLE001 - the others are still wanted
                traceback.print_exc()
                continue
            command = f"python benchmarks/cifar_methods.py --data cifar10 --images {args.images} --seed {args.seed}"
            found: dict[str, Any] = json.loads(FIGURES.read_text())
            by_seed = found.setdefault(method, {}).setdefault("cifar10", {})
            noted = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "command": f"{command} {method}"}
            by_seed[str(args.seed)] = figures | noted
            found[method]["cifar10"] = dict(sorted(by_seed.items()))
            FIGURES.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
            PAGE.write_text(with_table(PAGE.read_text()))
            print(f"{datetime.now(UTC):%H:%M:%S}", method, args.seed, figures, flush=True)


class _Bench:
    """Runs that share images, seed and a folder."""

    def __init__(self, data: Path, num_images: int, seed: int, folder: Path):
        self.data = data
        self.num_images = num_images
        self.seed = seed
        self.folder = folder
        # By trunk: images and labels of both splits, and what was reached without training.
        self._splits: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._before: dict[str, dict[str, float]] = {}

    def figures(self, method: str) -> dict[str, float]:
        """Top-1 in percent, of the untrained trunk, the trained one and raw pixels; minutes of the run, of one core."""
        began = time.process_time()
        config, found = self._trained(method)
        minutes = (time.process_time() - began) / 60
        trained, kind = load_trunk(found), str(config.MODEL.TRUNK)
        if kind not in self._before:
            sources = build_eval_sources(config.DATA, self.seed)
            self._splits[kind] = splits = [_images(source, trained) for source in sources if source is not None]
            model = build_model(config.MODEL, num_classes=10)
            initialize_(model, self.seed)
            untrained = LoadedTrunk(model.trunk, trained.config, found, "untrained")
            self._before[kind] = _top1("untrained", untrained, trained, splits)
            self._before[kind] |= _top1("raw_pixels", None, trained, splits)
        after = _top1("trained", trained, trained, self._splits[kind])
        return {"epochs": config.OPTIMIZER.num_epochs, "minutes": round(minutes, 1)} | self._before[kind] | after

    def _trained(self, method: str) -> tuple[RunConfig, Path]:
        """The configuration and the folder of a run, which is trained unless it has been."""
        own, recipe = _OWN.get(method, _Own()), METHODS.get(method).build().recipe
        if method == "distillation":
            _, teacher = self._trained("supervised")
            own = _Own(keys={"LOSS.distillation_loss.teacher": teacher})
        values = self._changes(compose(recipe).run.MODEL.TRUNK.NAME, own) | own.keys
        composed = compose(recipe, [f"config.{key}={value}" for key, value in values.items()])
        plan = resolve(composed.run, self.folder / method, recipe=recipe)
        if not (self.folder / method / "summary.json").exists():
            train_here(plan)
        return plan.config, self.folder / method

    def _changes(self, trunk: str, own: _Own) -> dict[str, Any]:
        is_patches = trunk == "vision_transformer"
        copies = f"{{name: ImgReplicatePil, num_times: {own.views}}}"
        crop = _crop(_SIDE, own.least_area, own.color)
        # A convolution sees an object as large as in the crops; positions want as many patches.
        sized = f"{{name: Resize, size: [{_SIDE}, {_SIDE}]}}, " if is_patches else ""
        colors = f"{{name: Normalize, mean: {_MEAN.tolist()}, std: {_STD.tolist()}}}"
        values = {
            "DISTRIBUTED.NUM_PROC_PER_NODE": 1,
            "ZERO.LEVEL": 0,
            "SEED_VALUE": self.seed,
            "DATA.TRAIN.BATCHSIZE_PER_REPLICA": 64,
            "DATA.TRAIN.TRANSFORMS": f"[{copies}, {crop}]",
            "DATA.TEST.TRANSFORMS": f"[{sized}{{name: ToTensor}}, {colors}]",
            "OPTIMIZER.num_epochs": own.epochs,
            "NEAREST_NEIGHBOR.USE_KNN": "false",
            "CHECKPOINT.CHECKPOINT_FREQUENCY": -1,
            "TEST_MODEL": "false",
        }
        if is_patches:
            values["MODEL.TRUNK.VISION_TRANSFORMERS.IMAGE_SIZE"] = _SIDE
        for split, limit in (("train", self.num_images), ("test", _NUM_TEST)):
            values[f"DATA.{split.upper()}.DATA_SOURCES"] = "[decoded_folder]"
            values[f"DATA.{split.upper()}.DATA_PATHS"] = f"[{self.data / split}]"
            values[f"DATA.{split.upper()}.DATA_LIMIT"] = limit
        return values


@DATA_SOURCES.register("decoded_folder")
class DecodedFolder(DiskFolder):
    """``disk_folder`` with images that are decoded once in a process."""

    def __init__(self, request: SourceRequest):
        super().__init__(request)

    def image(self, index: int) -> Image.Image:
        """The image; nobody may change it."""
        return _decoded(self.name(index))


@cache
def _decoded(file: str) -> Image.Image:
    return Image.open(file).convert("RGB")


# Shares of red, green and blue in gray; and their rotation by the angle of hue, in the plane of constant gray (YIQ).
_GREY = np.array([0.299, 0.587, 0.114])
_TO_YIQ = np.array([_GREY, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_FROM_YIQ = np.linalg.inv(_TO_YIQ)


@TRANSFORMS.register("CifarCrop")
class CifarCrop:
    """A random resized crop, mirrored or not, in other colors, as a normalized tensor: SimCLR's views, cheaply.

    Brightness, contrast, saturation and hue are one matrix for each crop, and values are not cut off at 0 and 1.

    Args:
        size: side in pixels.
        least_area: smallest share of the image's area.
        color: strength of the distortion; 0: none, and no gray crops.
    """

    def __init__(self, size: int, least_area: float, color: float):
        self.size = size
        self.least_area = least_area
        self.color = color

    def __call__(self, image: Image.Image) -> Tensor:
        area = random.uniform(self.least_area, 1.0) * image.width * image.height
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = min(math.sqrt(area * ratio), image.width), min(math.sqrt(area / ratio), image.height)
        left, top = random.uniform(0, image.width - width), random.uniform(0, image.height - height)
        box = (left, top, left + width, top + height)
        crop = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(crop, dtype=np.float32) / 255
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        if self.color:
            pixels = self._in_other_colors(pixels)
        return torch.from_numpy(np.ascontiguousarray(((pixels - _MEAN) / _STD).transpose(2, 0, 1)))

    def _in_other_colors(self, pixels: np.ndarray) -> np.ndarray:
        matrix, offset = np.eye(3), np.zeros(3)
        if random.random() < 0.8:
            light, contrast, saturation = (1 + 0.8 * self.color * random.uniform(-1, 1) for _ in range(3))
            angle = 2 * math.pi * 0.2 * self.color * random.uniform(-1, 1)
            turn = np.eye(3)
            turn[1:, 1:] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            saturated = saturation * np.eye(3) + (1 - saturation) * np.outer(np.ones(3), _GREY)
            matrix = light * contrast * (_FROM_YIQ @ turn @ _TO_YIQ @ saturated)
            offset += light * (1 - contrast) * float(pixels.mean(axis=(0, 1)) @ _GREY)
        if random.random() < 0.2:
            gray = np.outer(np.ones(3), _GREY)
            matrix, offset = gray @ matrix, gray @ offset
        changed: np.ndarray = pixels @ matrix.T.astype(np.float32) + offset.astype(np.float32)
        return changed


def _images(source: Any, trunk: LoadedTrunk) -> tuple[Tensor, Tensor]:
    images = torch.stack([trunk.transform(source.image(index)) for index in range(len(source))])
    return images, torch.tensor([source.label(index) for index in range(len(source))])


def _top1(
    name: str, trunk: LoadedTrunk | None, trained: LoadedTrunk, splits: list[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    index, queries = (Features(_rows(images, trunk, trained), labels) for images, labels in splits)
    return {
        f"{name}_knn": round(100 * (knn_top1(queries, index) or 0.0), 1),
        f"{name}_linear": round(100 * _linear_top1(index, queries), 1),
    }


@torch.no_grad()
def _rows(images: Tensor, trunk: LoadedTrunk | None, trained: LoadedTrunk) -> Tensor:
    """Features, or thumbnails for pixels."""
    if trunk is None:
        return thumbnails(images, trained.transform._pipeline)
    return torch.cat([trunk(part) for part in images.split(250)])


def _linear_top1(index: Features, queries: Features) -> float:
    """Multinomial logistic regression on standardized features, at most 100 iterations of L-BFGS."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    warnings.simplefilter("ignore", ConvergenceWarning)  # with the smallest decay; the held-out tenth chooses

    assert index.labels is not None
    assert queries.labels is not None
    rows, mean, scale = index.rows, index.rows.mean(dim=0), index.rows.std(dim=0) + 1e-6
    rows, asked = (((t - mean) / scale).numpy() for t in (rows, queries.rows))
    labels, wanted = index.labels.numpy(), queries.labels.numpy()
    is_held_out = np.arange(len(labels)) % 10 == 0

    def top1(rate: float, x: Any, y: Any, x_new: Any, y_new: Any) -> float:
        fitted = LogisticRegression(C=1 / (rate * len(y)), max_iter=100).fit(x, y)
        return float((fitted.predict(x_new) == y_new).mean())

    own = rows[~is_held_out], labels[~is_held_out], rows[is_held_out], labels[is_held_out]
    best = max(_RATES, key=lambda rate: top1(rate, *own))
    return top1(best, rows, labels, asked, wanted)


if __name__ == "__main__":
    main()
