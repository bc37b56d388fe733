"""A tiny supervised run on digits that can be built for real, at any level and world size."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from vissl_zero.config.run_config import RunConfig

# The defaults of the typed tree are all a run needs that a test does not say.
from vissl_zero.resolve.resolved import OptimizerPlan, Precision, ResolvedRun, ShardingPlan

NUM_TRAIN, NUM_TEST = 65, 31  # one more than whole batches of 16 on 2 ranks, and of 15 on 3: a rank is left without


def make_config(**knn: Any) -> dict[str, Any]:
    """RegNet of three blocks, a linear head, digits at 8x8; ``knn``: keys of NEAREST_NEIGHBOR."""
    config = asdict(RunConfig())
    del config["DISTILLATION"]  # as resolved: no loss learns from another model
    to_tensor = {"name": "ToTensor"}, {"name": "Normalize", "mean": [0.3] * 3, "std": [0.4] * 3}
    config["DATA"]["NUM_DATALOADER_WORKERS"] = 0
    config["DATA"]["TRAIN"] |= {"DATA_SOURCES": ["digits"], "DATA_LIMIT": NUM_TRAIN, "TRANSFORMS": [*to_tensor]}
    config["DATA"]["TRAIN"]["DROP_LAST"] = True  # batch norm cannot train on the one image left
    config["DATA"]["TEST"] |= {"DATA_SOURCES": ["digits"], "DATA_LIMIT": NUM_TEST}
    regnet = {"depth": 3, "w_0": 8, "w_a": 8.0, "w_m": 2.0, "group_width": 8, "stem_width": 8}
    config["MODEL"]["TRUNK"]["NAME"] = "regnet"
    config["MODEL"]["TRUNK"]["REGNET"] = regnet | {"stem_type": "RES_STEM_CIFAR"}
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [32, 10]}]]
    config["LOSS"] = {"name": "CrossEntropyLoss", "CrossEntropyLoss": {}}
    config["NEAREST_NEIGHBOR"] |= {"TOPK": 5, **knn}
    return config


def make_plan(
    config: dict[str, Any], folder: os.PathLike[str] | str = "", level: int = 0, world_size: int = 1, **changes: Any
) -> ResolvedRun:
    """Two epochs of 16 images a step in float64; ``changes`` are fields of ResolvedRun."""
    fields: dict[str, Any] = {
        "config": config,
        "recipe": "a/test",
        "run_dir": str(folder),
        "device": "cpu",
        "backend": "gloo",
        "world_size": world_size,
        "num_nodes": 1,
        "procs_per_node": world_size,
        "threads_per_rank": 1,
        "seed": 3,
        "batch_per_rank": 16 // world_size,
        "accumulation_steps": 1,
        "global_batch": 16,
        "num_epochs": 2,
        "max_steps": None,
        "sharding": ShardingPlan(
            level=level,
            shard_group_size=world_size,
            sync_bn_group=world_size,
            precision=Precision(master="float64", compute="float64", reduce="float64"),
        ),
        "optimizer": OptimizerPlan("sgd", {"momentum": 0.9}, lr={"name": "constant", "value": 0.1}),
    }
    return ResolvedRun(**(fields | changes))
