"""VISSL's recipes really trained: 3 steps on 2 ranks of the CPU at two ZeRO levels, losses compared in float64.

    python benchmarks/vissl_training.py <checkout of facebookresearch/vissl>
    python benchmarks/vissl_training.py <checkout> --match pretrain/dino --levels 0 3 --json trained.json

Of each recipe only sizes (widths, depths, images, batches, numbers of prototypes), paths, machines and the number of
steps are changed, and the precision, to float64. Images are drawn and written in the format that the recipe names:
class folders, or lists of files with lists of labels (torchvision's own formats as class folders). Weights to begin
with are left out. Chosen are all recipes under ``pretrain``, and of every other folder the first that ``explain``
accepts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.ranks import close_pool, run_on_ranks
from vissl_zero.config.account import account_of
from vissl_zero.config.compose import compose
from vissl_zero.config.host import Host
from vissl_zero.config.recipe_files import RecipeFile, recipe_files
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.run import RunConfig
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.engine.loop import train

RANKS, STEPS, BATCH, SIDE, PATCH = 2, 3, 4, 56, 8
NUM_IMAGES, NUM_CLASSES = 4 * RANKS * BATCH, 4
TIMEOUT_S = 240.0
TOLERANCE = 1e-10
# Keys of losses that count outputs, prototypes or remembered images.
_WIDTHS = ("embedding_dim", "output_dim", "out_dim", "patch_out_dim")
_COUNTS = ("num_prototypes", "num_clusters")
_MEMORIES = ("queue_length", "queue_size")


class _Losses(Hook):
    """The loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, run: Run, record: StepRecord) -> None:
        self.values.append(record.loss)


def losses(plan: ResolvedRun) -> list[float]:
    """Of every step. Every rank calls it."""
    hook = _Losses()
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    try:
        train(run, schedules, frozen, [hook])
    finally:
        run.sharded.close()
    return hook.values


def write_images(folder: Path) -> None:
    """Four class folders of images, and the lists that name them and their classes."""
    draw = np.random.default_rng(0)
    paths, labels = [], []
    for number in range(NUM_IMAGES):
        label = number % NUM_CLASSES
        path = folder / "folders" / f"class_{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (SIDE + 8, SIDE + 8, 3), dtype=np.uint8)).save(path)
        paths.append(str(path))
        labels.append(label)
    np.save(folder / "images.npy", np.array(paths))
    np.save(folder / "labels.npy", np.array(labels))


def small(run: RunConfig, images: Path, level: int) -> RunConfig:
    """The recipe at sizes that a CPU trains in seconds, in place."""
    run.MACHINE.DEVICE, run.DISTRIBUTED.BACKEND = "cpu", "gloo"
    run.DISTRIBUTED.NUM_NODES, run.DISTRIBUTED.NUM_PROC_PER_NODE = 1, RANKS
    run.TRAINER.MAX_STEPS, run.TRAINER.DTYPE, run.ZERO.LEVEL = STEPS, "float64", level
    run.MODEL.AMP_PARAMS.USE_AMP, run.SLURM.USE_SLURM = False, False
    run.MODEL.WEIGHTS_INIT.PARAMS_FILE = ""
    run.MODEL.FSDP_CONFIG.mixed_precision = False
    run.DATA.NUM_DATALOADER_WORKERS, run.DATA.IMG_SIZE = 0, SIDE
    for split in (run.DATA.TRAIN, run.DATA.TEST):
        if not split.DATA_SOURCES:
            continue
        split.BATCHSIZE_PER_REPLICA, split.DATA_LIMIT = BATCH, -1
        is_list = split.DATA_SOURCES == ["disk_filelist"]
        split.DATA_PATHS = [str(images / ("images.npy" if is_list else "folders"))]
        if "disk_filelist" in split.LABEL_SOURCES:
            split.LABEL_PATHS = [str(images / "labels.npy")]
        if split.DATA_SOURCES == ["torchvision_dataset"]:
            split.DATA_SOURCES, split.LABEL_SOURCES = ["disk_folder"], ["disk_folder"]
    _shrink_trunk(run)
    run.MODEL.HEAD.PARAMS = [_shrunk_head(head) for head in run.MODEL.HEAD.PARAMS]
    run.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP = [
        [name, min(1, steps)] for name, steps in run.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP
    ]
    name = run.LOSS["name"]
    if name in run.LOSS:
        run.LOSS[name] = _shrunk_loss(run.LOSS[name])
    return run


def _shrink_trunk(run: RunConfig) -> None:
    trunk = run.MODEL.TRUNK
    trunk.RESNETS.DEPTH = 18
    if trunk.NAME == "resnet":
        trunk.RESNETS.WIDTH_MULTIPLIER = 1
        trunk.RESNETS.GROUPS, trunk.RESNETS.WIDTH_PER_GROUP = 1, 64
    regnet = trunk.REGNET
    if trunk.NAME == "regnet":
        regnet.name, regnet.depth, regnet.w_0, regnet.w_a, regnet.w_m = None, 6, 8, 8.0, 2.0
        regnet.group_width, regnet.stem_width = 8, 8
        regnet.depths, regnet.widths, regnet.group_widths = [], [], []
        regnet.bottleneck_multipliers, regnet.strides = [], []
        regnet.stage_checkpoints, regnet.stage_checkpointing = [], []
    for block in (trunk.VISION_TRANSFORMERS, trunk.BEIT, trunk.XCIT):
        block.IMAGE_SIZE, block.PATCH_SIZE, block.NUM_LAYERS = SIDE, PATCH, 4
        block.NUM_HEADS, block.HIDDEN_DIM = 2, 32
    trunk.VISION_TRANSFORMERS.MLP_DIM = 64


def _width(width: int) -> int:
    return width if width < NUM_CLASSES else max(8, width // 64)


def _shrunk_head(head: Any) -> Any:
    name, keys = head
    keys = dict(keys)
    if name == "chain":
        keys["heads"] = [_shrunk_head(inner) for inner in keys["heads"]]
        keys["heads"][1:] = [
            _first_as(inner, before) for before, inner in zip(keys["heads"], keys["heads"][1:], strict=False)
        ]
    if keys.get("dims"):
        keys["dims"] = [-1, *map(_width, keys["dims"][1:])]
    keys.pop("in_channels", None)
    if keys.get("num_clusters"):
        keys["num_clusters"] = [_width(count) for count in keys["num_clusters"]]
    if keys.get("predictor_dims"):
        keys["predictor_dims"] = [_width(count) for count in keys["predictor_dims"]]
    return [name, keys]


def _first_as(head: Any, before: Any) -> Any:
    dims = head[1].get("dims")
    return [head[0], {**head[1], "dims": [before[1]["dims"][-1], *dims[1:]]}] if dims else head


def _shrunk_loss(block: Any) -> Any:
    """Numbers of outputs, of prototypes and of remembered images; a queue is used from the first step on."""
    if dataclasses.is_dataclass(block) and not isinstance(block, type):
        values = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        return dataclasses.replace(block, **{key: _shrunk(key, value) for key, value in values.items()})
    return {key: _shrunk(key, value) for key, value in block.items()}


def _shrunk(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return _shrunk_loss(value)
    if key in _COUNTS and isinstance(value, list):
        return [_width(count) for count in value]
    if key in _WIDTHS and isinstance(value, int):
        return _width(value)
    if key in _MEMORIES and value:
        return 2 * RANKS * BATCH
    return {"start_iter": 0, "num_negatives": 4}.get(key, value)


def plan_of(recipe: RecipeFile, images: Path, level: int) -> ResolvedRun:
    """The small recipe, resolved for 2 ranks of the CPU."""
    composed = compose(recipe.recipe, [*recipe.overrides, "config.DRY_RUN=true"])
    host = Host(num_gpus=0, why_no_gpu="", num_cores=RANKS)
    return resolve(small(composed.run, images, level), str(images / "run"), recipe=recipe.recipe, host=host)


def chosen(root: Path, match: str) -> Iterator[RecipeFile]:
    """All accepted recipes under pretrain, the first accepted one of every other folder, and each kind of model."""
    folders: set[str] = set()
    for recipe in recipe_files(root):
        name = recipe.overlay or recipe.recipe
        folder = name.rpartition("/")[0]
        if match not in str(recipe) or (folder in folders and not name.startswith("pretrain/")):
            continue
        if account_of(recipe).is_accepted:
            folders.add(folder)
            yield recipe


def trained(recipe: RecipeFile, images: Path, levels: list[int]) -> dict[str, Any]:
    """Losses at each level and the greatest relative difference, or what went wrong."""
    began = time.monotonic()
    row: dict[str, Any] = {"recipe": str(recipe), "losses": {}, "difference": None, "error": ""}
    try:
        for level in levels:
            row["losses"][level] = run_on_ranks(RANKS, losses, plan_of(recipe, images, level), timeout_s=TIMEOUT_S)[0]
        first, *others = row["losses"].values()
        assert len(first) == STEPS, f"{len(first)} steps"
        row["difference"] = max(
            abs(a - b) / max(1.0, abs(a)) for other in others for a, b in zip(first, other, strict=True)
        )
    except Exception as error:  # noqa: BLE001 - a failure is a figure of its own
        row["error"] = " | ".join(str(error).strip().splitlines()[-3:])[-600:] or type(error).__name__
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Print a line for each recipe, and the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of facebookresearch/vissl")
    parser.add_argument("--match", default="", help="only recipes whose name holds this")
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--most", type=int, default=10_000, help="so many recipes")
    parser.add_argument("--json", type=Path, help="write every row here, as they come")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder)
        write_images(images)
        for recipe in chosen((args.checkout / "configs/config").absolute(), args.match):
            rows.append(trained(recipe, images, args.levels))
            row = rows[-1]
            is_equal = row["difference"] is not None and row["difference"] <= TOLERANCE
            what = row["error"] or f"{row['difference']:.1e}"
            print(f"{'equal' if is_equal else 'FAILED'} {row['seconds']:5.1f} s {row['recipe']}: {what}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
            if len(rows) == args.most:
                break
    close_pool()
    equal = [row for row in rows if row["difference"] is not None and row["difference"] <= TOLERANCE]
    print(f"{len(equal)} of {len(rows)} recipes train {STEPS} steps with the same losses at levels {args.levels}")


if __name__ == "__main__":
    main()
