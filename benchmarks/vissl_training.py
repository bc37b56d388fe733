"""VISSL's recipes really trained: 3 steps on 2 ranks of the CPU at two ZeRO levels, losses compared in float64.

    python benchmarks/vissl_training.py <checkout of facebookresearch/vissl>
    python benchmarks/vissl_training.py <checkout> --match pretrain/dino --levels 0 3 --json trained.json
    python benchmarks/vissl_training.py <checkout> --json trained.json --go-on   # with what is not in the file yet

Of each recipe only sizes (widths, depths, images, batches, numbers of prototypes), paths, machines and the number of
steps are changed, and the precision, to float64. Images are drawn and written in the format that the recipe names:
class folders, or lists of files with lists of labels (torchvision's own formats as class folders). Weights to begin
with are left out; a teacher under DISTILLATION has drawn ones. Of what trains nothing, figures are compared in place of
losses. Chosen are all recipes under ``pretrain`` and ``test``, and of every other folder the first that can be trained.
All runs share one pool of ranks.
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
from tests.unit.evaluation.example_retrieval import make_revisited
from vissl_zero.config.blocks.data import MIXING_COLLATOR, MixingConfig
from vissl_zero.config.components.heads import are_tapped
from vissl_zero.config.components.trunks import TRUNK_BLOCKS
from vissl_zero.config.compose import compose
from vissl_zero.config.programs import PREDICTIONS, PROGRAMS, RETRIEVAL
from vissl_zero.config.recipes import RecipeFile, recipe_files
from vissl_zero.config.run_config import RunConfig
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.accuracy import AccuracyHook
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.methods.spec import are_cut
from vissl_zero.models.model import Taps, build_trunk
from vissl_zero.registry import HOOKS
from vissl_zero.resolve.components import as_teacher, takes_other_model, trunk_options
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

RANKS, STEPS, BATCH = 2, 3, 4
# Sides of the largest crops, and of patches: small crops of 96/224 of them are whole numbers of patches too.
SIDE, PATCH = 28, 4
SIDES = {"xcit": 56, "convnext": 84, "resnet_sk": 56}
ALEXNET_SIDES = {"alexnet_deepcluster": 224, "alexnet_rotnet": 224}  # of the others 227: their features have one size
TILES_SIDE = 84  # of crops that are cut: a cell of the grid has more than the 21 pixels between tiles
NUM_IMAGES, NUM_CLASSES = 4 * RANKS * BATCH, 4
TIMEOUT_S = 240.0
TOLERANCE = 1e-10
# Keys of losses that count outputs, prototypes or remembered images.
_WIDTHS = ("embedding_dim", "output_dim", "out_dim", "patch_out_dim")
_HEAD_WIDTHS = (
    *("hidden_dim", "bottleneck_dim", "output_dim", "mid_channels", "num_classes"),
    *("out_dim", "patch_out_dim", "num_prototypes"),
)
_COUNTS = ("num_prototypes", "num_clusters")
_MEMORIES = ("queue_length", "local_queue_length", "queue_size")


class _Losses(Hook):
    """The loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_record(self, run: Run, record: StepRecord) -> None:
        self.values.append(float("nan") if record.loss is None else record.loss)


def losses(plan: ResolvedRun) -> list[float]:
    """Of every step. Every rank calls it."""
    hook = _Losses()
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    try:
        train(run, schedules, frozen, [hook])
    finally:
        run.sharded.close()
    return hook.values


def figures(plan: ResolvedRun) -> list[float]:
    """Every number that a run that trains nothing measures. Every rank calls it."""
    program = PROGRAMS.get(plan.config["PROGRAM"])
    hooks: list[Hook] = [KnnHook(plan), AccuracyHook(), *([HOOKS.get(program).build()] if program else [])]
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    try:
        train(run, schedules, frozen, hooks)
    finally:
        run.sharded.close()
    return list(_numbers(run.results))


def _numbers(found: Any) -> Iterator[float]:
    if isinstance(found, Mapping):
        for value in found.values():
            yield from _numbers(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _numbers(value)
    elif isinstance(found, (int, float)):
        yield float(found)


def write_images(folder: Path) -> None:
    """Four class folders of images, the lists that name them and their classes, and two data sets to find images in."""
    for name in ("roxford5k", "rparis6k"):
        make_revisited(folder, name)
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
    name = run.MODEL.TRUNK.NAME
    run.MACHINE.DEVICE, run.DISTRIBUTED.BACKEND = "cpu", "gloo"
    run.DISTRIBUTED.NUM_NODES, run.DISTRIBUTED.NUM_PROC_PER_NODE = 1, RANKS
    run.TRAINER.MAX_STEPS, run.TRAINER.DTYPE, run.ZERO.LEVEL = STEPS, "float64", level
    run.MODEL.AMP_PARAMS.USE_AMP, run.SLURM.USE_SLURM = False, False
    # Any file: it is not read here, but predictions must name one.
    run.MODEL.WEIGHTS_INIT.PARAMS_FILE = str(images / "labels.npy") if run.PROGRAM == PREDICTIONS else ""
    if run.PROGRAM == RETRIEVAL:
        run.IMG_RETRIEVAL.DATASET_PATH, run.IMG_RETRIEVAL.N_PCA, run.IMG_RETRIEVAL.RESIZE_IMG = str(images), 4, 64
    run.MODEL.FSDP_CONFIG.mixed_precision, run.MODEL.FSDP_CONFIG.compute_dtype = False, "float32"
    side = ALEXNET_SIDES.get(name, 227) if name.startswith("alexnet") else SIDES.get(name, SIDE)
    side = TILES_SIDE if are_cut(run) else side
    run.DATA.NUM_DATALOADER_WORKERS, run.DATA.IMG_SIZE = 0, side
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
    if run.DATA.TRAIN.COLLATE_FUNCTION == MIXING_COLLATOR:
        params = run.DATA.TRAIN.COLLATE_FUNCTION_PARAMS
        params["num_classes"] = _width(params.get("num_classes", MixingConfig().num_classes))
    _shrink_trunk(run, side)
    _fit_heads(run, side)
    if takes_other_model(run):
        teacher = as_teacher(run)  # shares its blocks with DISTILLATION
        _shrink_trunk(teacher, side)
        _fit_heads(teacher, side)
        teacher.MODEL.WEIGHTS_INIT.PARAMS_FILE = str(images / "labels.npy")  # any file: it is not read here
    run.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP = [
        [parameter, min(1, steps)] for parameter, steps in run.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP
    ]
    loss = run.LOSS["name"]
    if loss in run.LOSS:
        run.LOSS[loss] = _shrunk_loss(run.LOSS[loss])
    return run


def _shrink_trunk(run: RunConfig, side: int) -> None:
    trunk = run.MODEL.TRUNK
    trunk.RESNETS.DEPTH, trunk.RESNETS.WIDTH_MULTIPLIER = 18, 1
    trunk.RESNETS.GROUPS, trunk.RESNETS.WIDTH_PER_GROUP = 1, 64
    regnet = trunk.REGNET
    if trunk.NAME == "regnet":
        regnet.name, regnet.depth, regnet.w_0, regnet.w_a, regnet.w_m = None, 6, 8, 8.0, 2.0
        regnet.group_width, regnet.stem_width = 8, 8
        regnet.depths, regnet.widths, regnet.group_widths = [], [], []
        regnet.bottleneck_multipliers, regnet.strides = [], []
        regnet.stage_checkpoints, regnet.stage_checkpointing = [], []
    for block in (trunk.VISION_TRANSFORMERS, trunk.BEIT, trunk.XCIT):
        block.IMAGE_SIZE, block.PATCH_SIZE, block.NUM_LAYERS = side, PATCH, 4
        block.NUM_HEADS, block.HIDDEN_DIM = 4, 32
    trunk.XCIT.PATCH_SIZE = 8
    trunk.VISION_TRANSFORMERS.MLP_DIM, trunk.CONVIT.N_GPSA_LAYERS = 64, 2
    trunk.RESNETS_SK.DEPTH, trunk.RESNETS_SK.WIDTH_MULTIPLIER = 50, 1
    trunk.CONVNEXT.DEPTH, trunk.CONVNEXT.DIMS = [1, 1, 2, 1], [8, 16, 16, 32]
    swin = trunk.SWIN_TRANSFORMER
    swin.IMAGE_SIZE, swin.EMBED_DIM, swin.DEPTHS, swin.NUM_HEADS = side, 12, [1, 2], [3, 6]
    trunk.EFFICIENT_NETS.model_version = "B0"


def _fit_heads(run: RunConfig, side: int) -> None:
    """First widths as the small trunk has them, the others a 64th."""
    name = run.MODEL.TRUNK.NAME
    trunk = build_trunk({"NAME": name, TRUNK_BLOCKS.get(name, "PARAMS"): trunk_options(run)})
    shapes: list[tuple[int, ...]] = [(int(trunk.feature_dim),)] * len(run.MODEL.HEAD.PARAMS)
    settings = run.MODEL.FEATURE_EVAL_SETTINGS
    settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP = [
        [layer, ["AdaptiveAvgPool2d", [[2, 2]]] if "AvgPool" in pooling[0] else pooling]
        for layer, pooling in settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP
    ]
    if are_tapped(run):
        taps = Taps(trunk, settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP, should_flatten=settings.SHOULD_FLATTEN_FEATS)
        with torch.no_grad():
            shapes = [tuple(rows.shape[1:]) for rows in taps(trunk.eval()([torch.zeros(1, 3, side, side)]))]
    heads = zip(run.MODEL.HEAD.PARAMS, shapes, strict=True)
    run.MODEL.HEAD.PARAMS = [_shrunk_head(head, shape) for head, shape in heads]


def _width(width: int) -> int:
    return width if width < 8 else min(max(8, width // 64), NUM_IMAGES // 2)


def _shrunk_head(head: Any, shape: tuple[int, ...]) -> Any:
    name, keys = head[0], dict(head[1])
    features = int(np.prod(shape))
    for row in ("heads", "of_image", "of_tiles"):
        if keys.get(row):
            keys[row] = _shrunk_row(keys[row], features)
    if keys.get("dims"):
        keys["dims"] = [features, *map(_width, keys["dims"][1:])]
    for key, value in (("in_dim", features), ("in_plane", features), ("in_channels", shape[0])):
        if key in keys:
            keys[key] = value
    for key in _HEAD_WIDTHS:
        if key in keys:
            keys[key] = _width(keys[key])
    if keys.get("num_clusters"):
        keys["num_clusters"] = [_width(count) for count in keys["num_clusters"]]
    if keys.get("predictor_dims"):
        keys["predictor_dims"] = [_width(count) for count in keys["predictor_dims"]]
    return [name, keys]


def _shrunk_row(heads: list[Any], features: int) -> list[Any]:
    """Heads one after another."""
    shrunk = []
    for head in heads:
        name, keys = _shrunk_head(head, (features,))
        shrunk.append([name, keys])
        features = keys["dims"][-1] if "dims" in keys else features * keys.get("num_towers", 1)
    return shrunk


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


def chosen(root: Path, match: str) -> Iterator[list[RecipeFile]]:
    """Each recipe under pretrain and test, and those of every other folder, of which one is to be trained."""
    folders: dict[str, list[RecipeFile]] = {}
    for recipe in recipe_files(root):
        name = recipe.overlay or recipe.recipe
        if match not in str(recipe):
            continue
        if name.startswith(("pretrain/", "test/")):
            yield [recipe]
        else:
            folders.setdefault(name.rpartition("/")[0], []).append(recipe)
    yield from folders.values()


def trained(recipe: RecipeFile, images: Path, levels: list[int]) -> dict[str, Any]:
    """Losses at each level and the greatest relative difference, or what went wrong."""
    began = time.monotonic()
    row: dict[str, Any] = {"recipe": str(recipe), "losses": {}, "difference": None, "refused": "", "error": ""}
    try:
        plans = [plan_of(recipe, images, level) for level in levels]
        only_measures = bool(plans[0].config["TEST_ONLY"])
        for level, plan in zip(levels, plans, strict=True):
            of = figures if only_measures else losses
            row["losses"][level] = run_on_ranks(RANKS, of, plan, timeout_s=TIMEOUT_S)[0]
        first, *others = row["losses"].values()
        if not first or (len(first) != STEPS and not only_measures):
            row["error"] = f"{len(first)} steps"
        row["difference"] = max(
            abs(a - b) / max(1.0, abs(a)) for other in others for a, b in zip(first, other, strict=True)
        )
    except ConfigError as error:
        row["refused"] = " | ".join(map(str, error.problems))[:600] or str(error)[:600]
    except Exception as error:  # noqa: BLE001 - a failure is a figure of its own
        row["error"] = " | ".join(str(error).strip().splitlines()[-3:])[-600:] or type(error).__name__
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _word(row: Mapping[str, Any]) -> str:
    if row["refused"]:
        return "refused"
    return "equal" if row["difference"] is not None and row["difference"] <= TOLERANCE else "FAILED"


def main() -> None:
    """Print a line for each recipe, and the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of facebookresearch/vissl")
    parser.add_argument("--match", default="", help="only recipes whose name holds this")
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--most", type=int, default=10_000, help="so many recipes")
    parser.add_argument("--json", type=Path, help="write every row here, as they come")
    parser.add_argument("--go-on", action="store_true", help="keep what stands in --json, train the others")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if args.go_on and args.json.exists():
        rows = json.loads(args.json.read_text())
    seen, new = {row["recipe"]: _word(row) for row in rows}, 0
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder)
        write_images(images)
        for kind in chosen((args.checkout / "configs/config").absolute(), args.match):
            if new == args.most:
                break
            is_done = any(seen.get(str(recipe), "refused") != "refused" for recipe in kind)
            for recipe in [] if is_done else [recipe for recipe in kind if str(recipe) not in seen]:
                row = trained(recipe, images, args.levels)
                rows.append(row)
                what = row["refused"] or row["error"] or f"{row['difference']:.1e}"
                print(f"{_word(row)} {row['seconds']:5.1f} s {row['recipe']}: {what}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1))
                new += _word(row) != "refused"
                if _word(row) != "refused":
                    break
    close_pool()
    words = [_word(row) for row in rows]
    print(f"{words.count('equal')} of {len(rows) - words.count('refused')} recipes train {STEPS} steps", end=" ")
    print(f"or measure, with the same figures at levels {args.levels}; {words.count('refused')} are refused")


if __name__ == "__main__":
    main()
