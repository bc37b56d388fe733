"""What people do with weights of others, at every level: each recipe against one process, to 1e-10 in float64.

A job is a recipe that starts from weights of any origin (docs/weights.md), as it is but for sizes and rates. Its cells
are levels 0 to 3 on 1, 2 and 3 ranks, and level 3 with parameters and optimizer on NVMe. ``evaluate`` and
``embed`` are the runs that the commands start. Compared are losses, figures, features, and the weights of student and
teacher. ``pytest -m soak tests/dist/test_jobs.py -rP`` prints the largest difference of each job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.ranks import run_on_ranks
from tests.unit.config.example_config import CPU_HOST
from vissl_zero.checkpoint.first_weights import load_first_weights, load_teacher
from vissl_zero.config.compose import compose
from vissl_zero.config.override_words import as_word
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.evaluation.feature_files import read_features
from vissl_zero.reporting.hooks import ReportImage, build_hooks
from vissl_zero.resolve.resolve import resolve

TOLERANCE = 1e-10
SIDE, PATCH, WIDTH = 16, 8, 64
# More images than features, so that RankMe has no singular value of 0; no number of ranks shares either evenly.
NUM_TRAIN, NUM_TEST = 73, 7
BATCH, NUM_TRAINED, NUM_STEPS = 12, 29, 3  # the last step has 5 images

PHOTOS, SCENES, WEIGHTS = "photos", "scenes", "vit.pth"
CROPS: list[dict[str, Any]] = [
    {"name": "ImgPilToMultiCrop", "total_num_crops": 4, "size_crops": [16, 8], "num_crops": [2, 2]}
    | {"crop_scales": [[0.3, 1.0], [0.1, 0.3]]},
    {"name": "RandomHorizontalFlip"},
    {"name": "ImgPilColorDistortion", "strength": 0.5},
    {"name": "ToTensor"},
]
PAIRS = [
    {**CROPS[0], "total_num_crops": 2, "size_crops": [16], "num_crops": [2], "crop_scales": [[0.3, 1.0]]},
    *CROPS[1:],
]
ONE = [{**PAIRS[0], "total_num_crops": 1, "num_crops": [1]}, *CROPS[1:]]
FROM_FILE = "MODEL.WEIGHTS_INIT.PARAMS_FILE"
CLASSES = {FROM_FILE: WEIGHTS, "DATA.TRAIN.DATA_PATHS": [f"{PHOTOS}/train"], "DATA.TEST.DATA_PATHS": [f"{PHOTOS}/val"]}
UNLABELED = {FROM_FILE: WEIGHTS, "DATA.TRAIN.DATA_PATHS": [f"{PHOTOS}/train"]}
MASKS = {FROM_FILE: WEIGHTS, "DATA.TRAIN.DATA_PATHS": [f"{SCENES}/train"], "DATA.TEST.DATA_PATHS": [f"{SCENES}/val"]}
REGNET = {
    "depth": 3,
    "w_0": 8,
    "w_a": 8.0,
    "w_m": 2.0,
    "group_width": 8,
    "stem_width": 8,
    "stem_type": "RES_STEM_CIFAR",
}
CLUSTERS = {"activation_name": "GELU", "use_weight_norm_prototypes": True, "normalize_last_layer": True}
IBOT = [["ibot_head", {"dims": [-1, 9, 5], "num_clusters": [7]}]]
# The gradient of a bias before batch norm is 0, and AdamW divides its rounding by its size.
BEFORE_BATCH_NORM = {"OPTIMIZER.PARAMS.eps": 1e-6}
FAST_RATE = {"OPTIMIZER.param_schedulers.lr.auto_lr_scaling.base_value": 0.01}
# recipe -> its keys
JOBS: dict[str, dict[str, Any]] = {
    "benchmark/evaluate": CLASSES,
    "benchmark/embed": UNLABELED,
    "continue/dino": {
        **UNLABELED,
        "DATA.TRAIN.TRANSFORMS": CROPS,
        "MODEL.HEAD.PARAMS": [["swav_head", {"dims": [-1, 9, 5], "num_clusters": [7], **CLUSTERS}]],
    },
    "continue/dinov2": {**UNLABELED, "DATA.TRAIN.TRANSFORMS": CROPS, "MODEL.HEAD.PARAMS": IBOT},
    "continue/ibot": {**UNLABELED, "DATA.TRAIN.TRANSFORMS": CROPS, "MODEL.HEAD.PARAMS": IBOT},
    "continue/mae": {
        **UNLABELED,
        "DATA.TRAIN.TRANSFORMS": ONE,
        "MODEL.HEAD.PARAMS": [["patch_predictor", {"dims": [-1, 8, 192], "depth": 1, "num_heads": 2}]],
    },
    "continue/simclr": {**UNLABELED, **BEFORE_BATCH_NORM, "DATA.TRAIN.TRANSFORMS": PAIRS},
    "continue/swav": {**UNLABELED, **BEFORE_BATCH_NORM, "DATA.TRAIN.TRANSFORMS": CROPS},
    "finetune/classification": {**CLASSES, **FAST_RATE, "OPTIMIZER.layer_decay": 0.75},
    "finetune/lora": {**CLASSES, **FAST_RATE, "MODEL.LORA.R": 3},
    "finetune/segmentation": {
        **MASKS,
        **FAST_RATE,
        "DATA.TRAIN.SOURCE_PARAMS.num_classes": 4,
        "MODEL.HEAD.PARAMS": [["fcn_head", {"dims": [-1, 5, -1]}]],
    },
    "distill/photos": {
        "LOSS.feature_distillation_loss.teacher": WEIGHTS,
        "DATA.TRAIN.DATA_LIMIT": NUM_STEPS * BATCH,  # images are mixed in pairs, which a step of 5 would part
        "LOSS.feature_distillation_loss.queue_size": 40,
        "DATA.TRAIN.DATA_PATHS": [f"{PHOTOS}/train"],
        "DATA.TRAIN.TRANSFORMS": ONE,
        "MODEL.TRUNK": {"NAME": "regnet", "REGNET": REGNET},
    },
}


@dataclass(frozen=True)
class Cell:
    """Where a job runs."""

    level: int
    world_size: int
    is_on_nvme: bool = False

    def __str__(self) -> str:
        return f"level {self.level}, {self.world_size} ranks{', NVMe' * self.is_on_nvme}"


ALONE = Cell(0, 1)
CELLS = [Cell(level, ranks) for ranks, level in product((1, 2, 3), range(4)) if (level, ranks) != (0, 1)]
CELLS.append(Cell(3, 2, is_on_nvme=True))
SOME = [Cell(2, 3), CELLS[-1]]
FAST = ("benchmark/embed", "continue/dino")


@dataclass
class Outcome:
    """What a run leaves: its figures, and tensors in float64, those of the teacher behind "teacher:"."""

    figures: dict[str, Any]
    tensors: dict[str, Tensor]

    def distance(self, other: Outcome) -> float:
        """Return the largest difference of any number; all else must be equal."""
        (own, form), (others, other_form) = (pytree.tree_flatten((it.figures, it.tensors)) for it in (self, other))
        assert form == other_form
        assert None not in self.figures.values()  # all were measured; parts of one may be None
        pairs = [*zip(own, others, strict=True)]
        assert [pair for pair in pairs if isinstance(pair[0], str | None) and pair[0] != pair[1]] == []
        pairs = [pair for pair in pairs if not isinstance(pair[0], str | None)]
        wide = ([torch.as_tensor(number, dtype=torch.float64) for number in pair] for pair in pairs)
        return max(float((one - two).abs().max()) for one, two in wide)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write photos of three classes, images with masks, and a vision transformer of timm's for larger images."""
    root, numbers = tmp_path_factory.mktemp("jobs"), np.random.default_rng(0)
    for split, count in (("train", NUM_TRAIN), ("val", NUM_TEST)):
        for kind in ("images", "masks"):
            (root / SCENES / split / kind).mkdir(parents=True)
        for index in range(count):
            color = index % 3
            pixels = numbers.normal(0, 60, (20, 24, 3)).clip(0) + 30 * np.eye(3)[color]
            photo = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            (root / PHOTOS / split / "rgb"[color]).mkdir(parents=True, exist_ok=True)
            photo.save(root / PHOTOS / split / "rgb"[color] / f"{index:02}.png")
            photo.save(root / SCENES / split / "images" / f"{index:02}.png")
            mask = Image.fromarray(numbers.choice([0, 1, 2, 3, 255], (5, 6)).astype(np.uint8))
            mask.resize((24, 20), Image.Resampling.NEAREST).save(root / SCENES / split / "masks" / f"{index:02}.png")
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=PATCH, depth=2, embed_dim=WIDTH, num_heads=1
    )
    torch.manual_seed(3)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    torch.save(net.state_dict(), root / WEIGHTS)
    return root


def _run(job: str, cell: Cell, root: str) -> Outcome:
    keys = {**JOBS[job]}
    for key in (FROM_FILE, "LOSS.feature_distillation_loss.teacher"):
        if key in keys:
            keys[key] = f"{root}/{keys[key]}"
    for key in ("DATA.TRAIN.DATA_PATHS", "DATA.TEST.DATA_PATHS"):
        keys[key] = [f"{root}/{path}" for path in keys.get(key, [])]
    keys |= {"TRAINER.DTYPE": "float64", "TRAINER.THREADS_PER_RANK": 1, "MACHINE.DEVICE": "cpu"}
    keys |= {"DATA.NUM_DATALOADER_WORKERS": 0, "DATA.TRAIN.BATCHSIZE_PER_REPLICA": BATCH // cell.world_size}
    keys |= {"ZERO.LEVEL": cell.level, "DISTRIBUTED.NUM_PROC_PER_NODE": cell.world_size}
    if not job.startswith("benchmark"):
        keys |= {"OPTIMIZER.num_epochs": 1, "CHECKPOINT.CHECKPOINT_FREQUENCY": -1}
        keys.setdefault("DATA.TRAIN.DATA_LIMIT", NUM_TRAINED)
    name = f"{job}-{cell}".replace("/", "-").replace(" ", "_").replace(",", "")
    if cell.is_on_nvme:
        tier = {"device": "nvme", "nvme_path": f"{root}/{name}"}
        keys |= {"ZERO.offload_param_config": tier, "ZERO.offload_optimizer_config": tier}
    composed = compose(job, [f"++config.{key}={as_word(value)}" for key, value in keys.items()])
    place = Path(root) / name / "run"
    place.mkdir(parents=True, exist_ok=True)
    plan = resolve(composed.run, str(place), recipe=job, written=composed.written, host=CPU_HOST)
    run, schedules, frozen = build_run(
        plan,
        torch.device("cpu"),
        lambda model: load_first_weights(model, plan),
        lambda teacher: load_teacher(teacher, plan),
    )
    try:
        train(run, schedules, frozen, [hook for hook in build_hooks(plan) if not isinstance(hook, ReportImage)])
        run.sharded.consolidate_buffers()
        tensors = run.sharded.full_state()
        tensors |= {f"teacher:{name}": tensor for name, tensor in run.sharded.full_teacher_state().items()}
        if job == "benchmark/embed" and run.is_main:
            tensors["features"] = read_features(place).rows
        figures = {f"loss {record.step}": record.loss for record in run.records}
        figures |= {name: value for name, value in run.results.items() if not name.startswith("bytes")}
        return Outcome(figures, tensors)
    finally:
        run.sharded.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], Outcome]:
    """What a job leaves in one process."""
    return cache(lambda job: run_on_ranks(1, _run, job, ALONE, str(folder))[0])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("job", "cells"),
    [
        *(pytest.param(job, [Cell(3, 3)], id=f"{job}, one cell") for job in JOBS if job in FAST),
        *(pytest.param(job, SOME, id=f"{job}, some cells", marks=pytest.mark.slow) for job in JOBS),
        *(pytest.param(job, CELLS, id=f"{job}, every cell", marks=pytest.mark.soak) for job in JOBS),
    ],
)
def test_a_job_gives_what_one_process_gives(job: str, cells: list[Cell], folder: Path, alone: Any) -> None:
    distances = {}
    for cell in cells:
        outcome = run_on_ranks(cell.world_size, _run, job, cell, str(folder))[0]
        losses = {value for name, value in outcome.figures.items() if name.startswith("loss ")}
        assert len(losses) == (0 if job.startswith("benchmark") else NUM_STEPS), "nothing is trained"
        distances[str(cell)] = outcome.distance(alone(job))
        assert distances[str(cell)] < TOLERANCE, cell
    print(f"{job}: {len(cells)} cells, largest difference {max(distances.values()):.1e}")
