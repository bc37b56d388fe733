"""Small runs for the hooks of this room: real plans and records, no processes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.blocks import run_block
from vissl_zero.engine.hook import Hook, Run, StepRecord
from vissl_zero.methods.method import build_method
from vissl_zero.resolve.resolved import OptimizerPlan, ResolvedRun, ShardingPlan
from vissl_zero.sharding.memory import Bytes

MIB = 2**20


def make_plan(folder: Path, **changes: Any) -> ResolvedRun:
    """A run of SwAV at level 3 in 2 processes; ``changes`` are fields of ResolvedRun."""
    config = {
        "LOG_FREQUENCY": 4,
        "PROGRAM": "train",
        "MODEL": {"HEAD": {"PARAMS": [["swav_head", {"dims": [8, 8], "num_clusters": [30]}]]}},
        "DATA": {
            "TRAIN": {"DATA_SOURCES": ["disk_folder"], "DATA_PATHS": ["/cats"], "DATA_LIMIT": -1, "TRANSFORMS": []},
            "TEST": {"DATA_SOURCES": ["digits"], "DATA_PATHS": [], "DATA_LIMIT": 90, "TRANSFORMS": []},
        },
        "CHECKPOINT": {"SAVE_BEST": False},
    }
    fields: dict[str, Any] = {
        "config": run_block(config),
        "recipe": "quickstart/swav_digits",
        "run_dir": str(folder),
        "device": "cpu",
        "backend": "gloo",
        "world_size": 2,
        "num_nodes": 1,
        "procs_per_node": 2,
        "threads_per_rank": 1,
        "seed": 0,
        "batch_per_rank": 16,
        "accumulation_steps": 1,
        "global_batch": 32,
        "num_epochs": 2,
        "max_steps": None,
        "sharding": ShardingPlan(level=3, shard_group_size=2),
        "optimizer": OptimizerPlan("sgd", {"momentum": 0.9}),
    }
    return ResolvedRun(**(fields | changes))


class _Images:
    """300 images without labels, and with nothing to look at."""

    class_names = ()

    def __len__(self) -> int:
        return 300


def make_run(folder: Path, rank: int = 0, **changes: Any) -> Run:
    """A run of 2 epochs of 10 steps that has not begun; ``changes`` are fields of ResolvedRun.

    Model is missing, the loader has images alone: a test of a hook that uses more puts it in.
    """
    plan = make_plan(folder, **changes)
    missing: Any = None
    swav = {"num_crops": 4, "num_prototypes": [30], "embedding_dim": 8}
    method = build_method({"name": "swav_loss", "swav_loss": swav})
    loader: Any = SimpleNamespace(source=_Images())
    return Run(plan, missing, method, loader, torch.device("cpu"), rank, plan.world_size, 10, 20)


def make_record(step: int, **changes: Any) -> StepRecord:
    """A step of that run; ``changes`` are fields of StepRecord."""
    fields: dict[str, Any] = {
        "step": step,
        "epoch": (step - 1) // 10,
        "loss": 2.4 + math.exp(-step / 8),
        "lr": 0.3 / 7,
        "images_per_s": 400.0 + step,
        "bytes": Bytes(3 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 1024, 700 * MIB),
        "grad_norm": 1.25,
        "watch": {"assignment_entropy": 0.5, "prototypes_in_use": 28.0, "effective_rank": 6.0},
    }
    return StepRecord(**(fields | changes))


def play(run: Run, hook: Hook, records: list[StepRecord]) -> None:
    """Do to a hook what the training loop does over these steps, epoch by epoch."""
    hook.on_start(run)
    for record in records:
        if record.epoch != run.epoch or not run.records:
            run.epoch = record.epoch
            hook.on_epoch_start(run)
        run.step = record.step
        hook.on_step(run, record)
        run.records.append(record)
        hook.on_record(run, record)
        if record.step % run.steps_per_epoch == 0:
            hook.on_epoch_end(run)
    hook.on_end(run)
    hook.close(run)
