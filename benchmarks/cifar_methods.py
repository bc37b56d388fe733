"""Train ``digits/<method>`` recipes on CIFAR-10's images and note kNN and linear top-1: what ``docs/methods.md`` shows.

Usage: python benchmarks/cifar_methods.py --data <folder> [--images 5000] [--epochs 12] [--seed 0] [method ...]

The folder has train/ and test/, with a folder of JPEGs for each class in both.

One process and one thread each: the model is that of any number of processes. Images, crops and the length of the run
differ from the recipe, and RegNet is twice as wide. Figures go to ``vissl_zero/methods/figures.json``; methods that are
not named keep theirs. Distillation is left out: it needs a classifier of these images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vissl_zero.config.compose import compose
from vissl_zero.config.saved import RESOLVED_FILE, read_saved
from vissl_zero.data.source import build_eval_sources
from vissl_zero.evaluation.features import Features, thumbnails
from vissl_zero.evaluation.knn import knn_top1
from vissl_zero.evaluation.trunk import LoadedTrunk, load_trunk
from vissl_zero.methods.spec import FIGURES, PAGE, crops_of, with_table
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import build_model
from vissl_zero.registry import METHODS

_SIDE = 32
_NUM_TEST = 2000
_COLOURS = "{name: Normalize, mean: [0.49, 0.48, 0.45], std: [0.25, 0.24, 0.26]}"
_RATES = (1e-4, 1e-3, 1e-2)  # of weight decay in the linear classifier; a tenth of TRAIN chooses


def main() -> None:
    """Run what is asked for, one after the other, and write after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("methods", nargs="*", choices=[[], *METHODS.builtin()], help="all, if none is named")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for method in args.methods or [name for name in METHODS.builtin() if name != "distillation"]:
        figures = _train(METHODS.get(method).build().recipe, args)
        options = f"--images {args.images} --epochs {args.epochs} --seed {args.seed}"
        command = f"python benchmarks/cifar_methods.py --data cifar10 {options} {method}"
        found: dict[str, Any] = json.loads(FIGURES.read_text())
        by_seed = found.setdefault(method, {}).setdefault("cifar10", {})
        by_seed[str(args.seed)] = figures | {"date": f"{datetime.now(UTC):%Y-%m-%d}", "command": command}
        FIGURES.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        PAGE.write_text(with_table(PAGE.read_text()))
        print(method, figures, flush=True)


def _train(recipe: str, args: argparse.Namespace) -> dict[str, float]:
    """Top-1 in percent, of the untrained trunk, the trained one and raw pixels."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary, "run")
        command = [sys.executable, "-m", "vissl_zero.cli", f"config={recipe}", f"config.CHECKPOINT.DIR={run}"]
        started = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *_changes(recipe, args)], check=True, stdout=subprocess.DEVNULL, env=environment)
        minutes = (time.monotonic() - started) / 60
        config = read_saved(run / RESOLVED_FILE)["config"]
        model = build_model(config["MODEL"], num_classes=10)
        initialize_(model, args.seed)
        trained = load_trunk(run)
        untrained = LoadedTrunk(model.trunk, trained._pipeline, run)
        figures: dict[str, float] = {"minutes": round(minutes, 1)}
        sources = build_eval_sources(config["DATA"], args.seed)
        splits = [_images(source, trained) for source in sources if source is not None]
        for name, of in (("untrained", untrained), ("trained", trained), ("raw_pixels", None)):
            index, queries = (Features(_rows(images, of, trained), labels) for images, labels in splits)
            figures[f"{name}_knn"] = round(100 * (knn_top1(queries, index) or 0.0), 1)
            figures[f"{name}_linear"] = round(100 * _linear_top1(index, queries), 1)
    return figures


def _changes(recipe: str, args: argparse.Namespace) -> list[str]:
    cfg = compose(recipe).run
    count = sum(crops_of(cfg) or [1])
    crops = f"total_num_crops: {count}, size_crops: [{_SIDE}], num_crops: [{count}], crop_scales: [[0.3, 1.0]]"
    train = (
        f"[{{name: ImgPilToMultiCrop, {crops}}}, {{name: RandomHorizontalFlip, p: 0.5}}, "
        f"{{name: ImgPilColorDistortion, strength: 0.5}}, {{name: ToTensor}}, {_COLOURS}]"
    )
    test = f"[{{name: ToTensor}}, {_COLOURS}]"
    trunk = {
        "regnet": "REGNET={w_0: 64, w_a: 64.0, group_width: 64, stem_width: 32}",
        "vision_transformer": f"VISION_TRANSFORMERS={{IMAGE_SIZE: {_SIDE}}}",
    }[cfg.MODEL.TRUNK.NAME]
    block, _, keys = trunk.partition("=")
    batch = cfg.DATA.TRAIN.BATCHSIZE_PER_REPLICA * int(cfg.DISTRIBUTED.NUM_PROC_PER_NODE)
    values = {
        "DISTRIBUTED.NUM_PROC_PER_NODE": 1,
        "ZERO.LEVEL": 0,
        "SEED_VALUE": args.seed,
        "DATA.TRAIN.DATA_SOURCES": "[disk_folder]",
        "DATA.TRAIN.DATA_PATHS": f"[{args.data.absolute() / 'train'}]",
        "DATA.TRAIN.DATA_LIMIT": args.images,
        "DATA.TRAIN.BATCHSIZE_PER_REPLICA": batch,
        "DATA.TRAIN.TRANSFORMS": train,
        "DATA.TEST.DATA_SOURCES": "[disk_folder]",
        "DATA.TEST.DATA_PATHS": f"[{args.data.absolute() / 'test'}]",
        "DATA.TEST.DATA_LIMIT": _NUM_TEST,
        "DATA.TEST.TRANSFORMS": test,
        f"MODEL.TRUNK.{block}": keys,
        "OPTIMIZER.num_epochs": args.epochs,
        "NEAREST_NEIGHBOR.USE_KNN": "false",
        "CHECKPOINT.CHECKPOINT_FREQUENCY": -1,
    }
    return [f"config.{key}={value}" for key, value in values.items()]


def _images(source: Any, trunk: LoadedTrunk) -> tuple[Tensor, Tensor]:
    images = torch.stack([trunk.transform(source.image(index)) for index in range(len(source))])
    return images, torch.tensor([source.label(index) for index in range(len(source))])


@torch.no_grad()
def _rows(images: Tensor, trunk: LoadedTrunk | None, trained: LoadedTrunk) -> Tensor:
    """Features, or thumbnails for pixels."""
    if trunk is None:
        return thumbnails(images, trained._pipeline)
    return torch.cat([trunk(part) for part in images.split(250)])


def _linear_top1(index: Features, queries: Features) -> float:
    """Multinomial logistic regression on standardised features, at most 100 iterations of L-BFGS."""
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
