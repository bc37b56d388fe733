"""Measure steps of DINO with the crops of both sizes packed (``MODEL.PACK_CROPS``), against steps without.

    torchrun --nproc-per-node 2 benchmarks/packed_crops.py [--level 3] [--width 384] [--batch 2] [--device gpu]

One run trains, on images that are made up. Its blocks pack in every other step; which comes first alternates. Prints
median and quartiles of the pairs' ratios, of wall time and of rank 0's processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist

from vissl_zero.config.compose import compose
from vissl_zero.engine import loop
from vissl_zero.engine.build import build_run
from vissl_zero.models.trunks.vision_transformer import TransformerTrunk
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

_WARM_UP = 4  # steps; in the first three units are watched more closely
_RECIPE = "pretrain/dino/vit_small"


def planned(options: argparse.Namespace, folder: str) -> ResolvedRun:
    """Resolve ViT-S's recipe with other crops, width, depth and prototypes."""
    width, sides, num_gpus = options.width, options.sides, dist.get_world_size() if options.device == "gpu" else 0
    crops = f"total_num_crops: 10, num_crops: [2, 8], size_crops: {sides}, crop_scales: [[0.3, 1], [0.05, 0.3]]"
    trunk = f"IMAGE_SIZE: {sides[0]}, NUM_LAYERS: {options.depth}, NUM_HEADS: {width // 64}, HIDDEN_DIM: {width}"
    head = f"dims: [{width}, 256, 64], num_clusters: [1024], use_weight_norm_prototypes: true"
    words = [
        *("config.DATA.TRAIN.DATA_SOURCES=[synthetic]", "config.DATA.TRAIN.DATA_PATHS=[]"),
        *("config.DATA.TEST.DATA_SOURCES=[]", "config.DATA.TEST.DATA_PATHS=[]", "config.DATA.NUM_DATALOADER_WORKERS=0"),
        *(f"config.MACHINE.DEVICE={options.device}", "config.DISTRIBUTED.NUM_NODES=1"),
        f"config.DISTRIBUTED.NUM_PROC_PER_NODE={dist.get_world_size()}",
        *("config.NEAREST_NEIGHBOR.USE_KNN=false", "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]"),
        *(f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={options.batch}", f"config.ZERO.LEVEL={options.level}"),
        f"config.DATA.TRAIN.TRANSFORMS=[{{name: ImgPilToMultiCrop, {crops}}}, {{name: ToTensor}}]",
        f"config.MODEL.TRUNK.VISION_TRANSFORMERS={{{trunk}, MLP_DIM: {4 * width}}}",
        f"config.MODEL.HEAD.PARAMS=[[swav_head, {{{head}}}]]",
        "config.MODEL.PACK_CROPS=true",
    ]
    return resolve(compose(_RECIPE, words).run, folder, recipe=_RECIPE, host=Host(num_gpus=num_gpus, num_cores=2))


def ratios_text(ratios: Sequence[float]) -> str:
    """Write median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Every rank."""
    parser = argparse.ArgumentParser()
    for name, default in {"level": 3, "width": 384, "depth": 4, "batch": 2, "rounds": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sides", type=int, nargs=2, default=[224, 96], help="of the large and the small crops")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "gpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    with tempfile.TemporaryDirectory() as folder:
        run, schedules, _ = build_run(planned(options, folder), device)
    trunk = next(module for module in run.sharded.model.modules() if isinstance(module, TransformerTrunk))
    micro_batches = next(iter(run.loader.epoch(0)))
    run.sharded.model.train()

    def step(is_packing: bool) -> tuple[float, float]:
        trunk.is_packing = is_packing
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        loop._train_step(run, micro_batches, schedules.apply(run.sharded, run.step), (0.0, 0.0), [])
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - processor

    with patch.object(loop, "_is_logged", lambda run, step: False):
        for at in range(_WARM_UP):
            step(at % 2 > 0)
        rounds = []
        for at in range(options.rounds):
            order = (False, True) if at % 2 else (True, False)
            taken = {is_packing: step(is_packing) for is_packing in order}
            rounds.append([*(taken[True][i] / taken[False][i] for i in range(2)), taken[False][0]])
    if dist.get_rank() == 0:
        walls, processors, seconds = zip(*rounds, strict=True)
        print(f"{options}: {statistics.median(seconds):.3f} s a step without")
        print(f"  packed over not, wall time: {ratios_text(walls)}, processor time: {ratios_text(processors)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
