"""Fine-tune, adapt and distil our own runs on CIFAR-10's images: what ``benchmarks/transfer.md`` shows.

Usage: python benchmarks/transfer.py --data <folder> [--seeds 0 1 2] [--processes 2] [--write]

The folder has train/ and test/, with a folder of JPEGs for each class in both. Figures are top-1 on 2,000 test images.

Labels: SimCLR trains a transformer on 5,000 images without labels. Then 1,000 labeled images train it further
(finetune/classification), train adapters of it (finetune/lora), and train the same trunk from nothing, for as many
steps each.

Distillation: SimCLR trains a RegNet on the 5,000 images. A smaller RegNet learns from it (feature_distillation), or by
SimCLR alone, for as many steps on the same crops, without labels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from cifar_methods import _MEAN, _NUM_TEST, _SIDE, _STD, _crop, _images, _top1
from one_process import be_a_rank, train_here

from vissl_zero.config.compose import compose
from vissl_zero.data.source import build_eval_sources
from vissl_zero.evaluation.trunk import load_trunk
from vissl_zero.resolve.resolve import resolve

PAGE = Path(__file__).with_name("transfer.md")
_MARKS = "<!-- table: written by benchmarks/transfer.py -->", "<!-- end of the table -->"
_NUM_IMAGES, _NUM_LABELED = 5000, 1000
_TRANSFORMER = (
    "{IMAGE_SIZE: 24, PATCH_SIZE: 6, NUM_LAYERS: 3, NUM_HEADS: 4, HIDDEN_DIM: 64, MLP_DIM: 128, QKV_BIAS: true}"
)
_SMALL = (
    "{block_type: RES_BASIC_BLOCK, depth: 3, w_0: 16, w_a: 16.0, w_m: 2.0, group_width: 16, stem_width: 16, "
    "use_se: false}"
)
_COLORS = f"{{name: Normalize, mean: {_MEAN.tolist()}, std: {_STD.tolist()}}}"
_PRETRAINED, _TUNED, _STUDENT = 16, 20, 4  # epochs
_RATES = {"from nothing": 0.002, "fine-tuned": 0.001, "LoRA": 0.005}  # the best tried by seed 0
_TABLES = {
    "with 1,000 labels, 320 steps": {
        "from nothing": "trunk and head from nothing",
        "LoRA": "adapters of our SimCLR run, and a head (`finetune/lora`)",
        "fine-tuned": "all of our SimCLR run, and a head (`finetune/classification`)",
    },
    "without labels, 312 steps; kNN / linear": {
        "alone": "small RegNet by SimCLR alone",
        "distilled": "small RegNet from the features of ours (`feature_distillation_loss`)",
        "teacher": "its teacher: RegNet by SimCLR, four times the steps",
    },
}


def main() -> None:
    """Run all seeds, print the table, and put it into the page where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    args = parser.parse_args()
    jobs = [(args.data.absolute(), kind, seed) for seed in args.seeds for kind in (_labels, _distillation)]
    found: dict[str, dict[int, list[float]]] = {}
    with ProcessPoolExecutor(args.processes, get_context("spawn"), be_a_rank) as pool:
        for (_, _, seed), figures in zip(jobs, pool.map(_run, jobs), strict=True):
            print(seed, json.dumps(figures), flush=True)
            for arm, values in figures.items():
                found.setdefault(arm, {})[seed] = values
    text = "\n".join(_table(found, args.seeds))
    print(text)
    if args.write:
        page = PAGE.read_text()
        begin, end = page.index(_MARKS[0]) + len(_MARKS[0]), page.index(_MARKS[1])
        PAGE.write_text(f"{page[:begin]}\n{text}\n{page[end:]}")


def _table(found: Mapping[str, Mapping[int, Sequence[float]]], seeds: Sequence[int]) -> Iterator[str]:
    yield f"{datetime.now(UTC):%Y-%m-%d}; top-1 in percent, by seed and their mean."
    for title, arms in _TABLES.items():
        yield ""
        yield f"| {title} | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |"
        yield f"|{' --- |' * (len(seeds) + 2)}"
        for arm, what in arms.items():
            rows = [found[arm][seed] for seed in seeds]
            rows.append([mean(column) for column in zip(*rows, strict=True)])
            cells = (" / ".join(f"{value:.1f}" for value in row) for row in rows)
            yield f"| {what} | {' | '.join(cells)} |"


def _run(job: tuple[Path, Any, int]) -> dict[str, list[float]]:
    data, kind, seed = job
    with tempfile.TemporaryDirectory() as temporary:
        figures: dict[str, list[float]] = kind(data, seed, Path(temporary))
    return figures


def _labels(data: Path, seed: int, folder: Path) -> dict[str, list[float]]:
    """Return top-1 of a classifier from nothing, fine-tuned and by LoRA, in percent."""
    trunk = {"MODEL.TRUNK.NAME": "vision_transformer", "MODEL.TRUNK.VISION_TRANSFORMERS": _TRANSFORMER}
    ours = _train("digits/simclr", folder / "ours", _unlabeled(data, seed, _PRETRAINED) | trunk)
    weights = {"MODEL.WEIGHTS_INIT.PARAMS_FILE": ours}
    arms = {
        "from nothing": ("finetune/classification", trunk),
        "fine-tuned": ("finetune/classification", weights),
        "LoRA": ("finetune/lora", weights),
    }
    found = {}
    for arm, (recipe, keys) in arms.items():
        run = _train(recipe, folder / arm, _labeled(data, seed) | keys | {"OPTIMIZER.lr": _RATES[arm]})
        found[arm] = [round(100 * json.loads((run / "summary.json").read_text())["top1"], 1)]
    return found


def _distillation(data: Path, seed: int, folder: Path) -> dict[str, list[float]]:
    """Return kNN and linear top-1 of a teacher, of a student of it, and of that student alone, in percent."""
    small = {"MODEL.TRUNK.REGNET": _SMALL}
    unlabeled = _unlabeled(data, seed, _STUDENT)
    teacher = _train("digits/simclr", folder / "teacher", _unlabeled(data, seed, _PRETRAINED))
    learns = {"LOSS.feature_distillation_loss.teacher": teacher, "LOSS.feature_distillation_loss.queue_size": 2048}
    runs = {
        "alone": _train("digits/simclr", folder / "alone", unlabeled | small),
        "distilled": _train("digits/feature_distillation", folder / "distilled", unlabeled | small | learns),
        "teacher": teacher,
    }
    found = {}
    for arm, run in runs.items():
        trunk = load_trunk(run)
        config = compose("digits/simclr", _words(unlabeled)).run.DATA
        splits = [_images(source, trunk) for source in build_eval_sources(config, seed) if source is not None]
        found[arm] = list(_top1("it", trunk, trunk, splits).values())
    return found


def _train(recipe: str, folder: Path, keys: Mapping[str, Any]) -> Path:
    train_here(resolve(compose(recipe, _words(keys)).run, folder, recipe=recipe))
    return folder


def _words(keys: Mapping[str, Any]) -> list[str]:
    return [f"config.{key}={value}" for key, value in keys.items()]


def _unlabeled(data: Path, seed: int, num_epochs: int) -> dict[str, Any]:
    copies = "{name: ImgReplicatePil, num_times: 2}"
    views = {"DATA.TRAIN.TRANSFORMS": f"[{copies}, {_crop(_SIDE, 0.3, 0.5)}]", "DATA.TRAIN.DATA_LIMIT": _NUM_IMAGES}
    return (
        _all(data, seed)
        | views
        | {"OPTIMIZER.num_epochs": num_epochs, "NEAREST_NEIGHBOR.USE_KNN": "false", "TEST_MODEL": "false"}
    )


def _labeled(data: Path, seed: int) -> dict[str, Any]:
    views = {"DATA.TRAIN.TRANSFORMS": f"[{_crop(_SIDE, 0.3, 0.0)}]", "DATA.TRAIN.DATA_LIMIT": _NUM_LABELED}
    # Figures of the last epoch alone: the best one would be chosen on the test images.
    return (
        _all(data, seed)
        | views
        | {"OPTIMIZER.num_epochs": _TUNED, "TEST_EVERY_NUM_EPOCH": _TUNED, "CHECKPOINT.SAVE_BEST": "false"}
    )


def _all(data: Path, seed: int) -> dict[str, Any]:
    sized = f"[{{name: Resize, size: [{_SIDE}, {_SIDE}]}}, {{name: ToTensor}}, {_COLORS}]"
    sources = {
        f"DATA.{split.upper()}.{key}": value
        for split in ("train", "test")
        for key, value in (("DATA_SOURCES", "[decoded_folder]"), ("DATA_PATHS", f"[{data / split}]"))
    }
    return sources | {
        "DATA.NUM_DATALOADER_WORKERS": 0,
        "DATA.TEST.TRANSFORMS": sized,
        "DATA.TEST.DATA_LIMIT": _NUM_TEST,
        "DATA.TRAIN.BATCHSIZE_PER_REPLICA": 64,
        "DISTRIBUTED.NUM_PROC_PER_NODE": 1,
        "ZERO.LEVEL": 0,
        "SEED_VALUE": seed,
        "CHECKPOINT.CHECKPOINT_FREQUENCY": -1,
    }


if __name__ == "__main__":
    main()
