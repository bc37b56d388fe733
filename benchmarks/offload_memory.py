"""The memory of a rank with everything on NVMe, and the largest model that a memory limit admits.

    python benchmarks/offload_memory.py bound <folder>              peak memory against units and buffers, in a cgroup
    python benchmarks/offload_memory.py largest <folder> --gib 2    largest model with and without offload
    python benchmarks/offload_memory.py recipe <folder> --gib 2 --times 30    the same of a recipe: one step, and more

Each training runs in a process of its own, in a memory cgroup that kills it when it takes more than it may (version 1
or 2, whichever can be written to; else the limit is one on its data, by ``prlimit``, and a line says so). The model is
a chain of equal blocks, built on the meta device, trained with AdamW on two rows at level 3 on one rank, where nothing
is divided among ranks and memory is largest. ``recipe`` trains ``digits/simclr`` with a vision transformer of ViT-L's
blocks, as a user starts it: first without offload at level 0, with ever more blocks until the limit kills it, then at
level 3 with parameters and optimizer on NVMe, with so many times the parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from memory_group import MemoryGroup

MIB = 2**20
STATE_BYTES = 16  # of one parameter: itself, its gradient and Adam's two averages, float32


def train(width: int, num_blocks: int, num_steps: int, folder: str | None) -> dict[str, Any]:
    """Train a chain of blocks of two ``width`` x ``width`` layers; returns bytes and seconds.

    Args:
        width, num_blocks, num_steps: sizes.
        folder: on the disk; None: nothing rests there.
    """
    import torch
    from torch import nn

    import vissl_zero
    from vissl_zero.sharding.memory import peak_bytes

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows + self.down(self.up(rows).relu())

    torch.set_num_threads(1)
    tier = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "fast_init": True}
    tiers = {"offload_param_config": tier, "offload_optimizer_config": tier.copy()} if folder else {}
    tiers.get("offload_optimizer_config", {}).pop("max_in_cpu", None)
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    model, optimizer = vissl_zero.initialize(model, {"type": "AdamW", "lr": 1e-4}, {"level": 3, **tiers})
    after_start, seconds = peak_bytes(torch.device("cpu")), []
    for step in range(num_steps):
        start = time.perf_counter()
        rows = torch.randn(2, width, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    buffers = getattr(optimizer._sharded.optimizer, "resident_tensors", []) if folder else []
    optimizer.close()
    return {
        "peak": peak_bytes(torch.device("cpu")),
        "after_start": after_start,
        "buffers": sum(buffer.numel() for buffer in buffers),
        "params": num_blocks * 2 * width**2,
        "unit": 2 * width**2 * 4,
        "step_s": sorted(seconds)[len(seconds) // 2],
    }


class Limit:
    """A memory cgroup of a given size, or a limit on the data of a process where there is none to be had.

    Args:
        num_bytes: that a process in it may take.
    Attributes:
        kind: what it is, for people.
    """

    def __init__(self, num_bytes: int):
        self._num_bytes = num_bytes
        self._group: MemoryGroup | None = None
        self.kind = "prlimit RLIMIT_DATA"
        with suppress(RuntimeError):
            self._group = MemoryGroup(str(num_bytes), num_bytes)
            self.kind = f"memory cgroup ({self._group.kind})"

    def enter(self) -> None:
        """Put this process under it; for ``preexec_fn``."""
        if self._group is not None:
            self._group.enter()
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self._num_bytes, self._num_bytes))

    def kills(self) -> int:
        """How many processes under it the kernel has killed so far."""
        return 0 if self._group is None else self._group.kills()

    def remove(self) -> None:
        """Undo it; no process may be in it any more."""
        if self._group is not None:
            self._group.close()


def run(width: int, num_blocks: int, num_steps: int, folder: str | None, limit: Limit | None) -> dict[str, Any] | None:
    """``train`` in a process under ``limit``; None if it was killed or refused memory."""
    arguments = [str(width), str(num_blocks), str(num_steps), folder or ""]
    process = subprocess.run(
        [sys.executable, __file__, "train", *arguments],
        capture_output=True,
        text=True,
        preexec_fn=limit.enter if limit else None,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if process.returncode == 0:
        result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return result
    if process.returncode == -9 or "memory" in process.stderr or "bad_alloc" in process.stderr:
        return None
    raise RuntimeError(process.stderr)


def bound(folder: str, width: int, num_blocks: int, num_steps: int = 3) -> dict[str, Any]:
    """Train under a limit of exactly what is promised, with everything on NVMe and with nothing.

    Returns:
        ``overhead``, ``unit``, ``buffers``, ``allowed`` and ``state`` in bytes, what ``run`` gave for both, ``kind``.
    """
    overhead = run(8, 2, num_steps, folder, None)
    free = run(width, num_blocks, num_steps, folder, None)
    assert overhead is not None
    assert free is not None
    unit, buffers = free["unit"], free["buffers"]
    allowed = 3 * unit + buffers
    limit = Limit(overhead["peak"] + allowed)
    try:
        offloaded = run(width, num_blocks, num_steps, folder, limit)
        plain = run(width, num_blocks, num_steps, None, limit)
    finally:
        limit.remove()
    return {
        "overhead": overhead["peak"],
        "unit": unit,
        "buffers": buffers,
        "allowed": allowed,
        "state": free["params"] * STATE_BYTES,
        "peak_without_limit": free["peak"] - overhead["peak"],
        "offloaded": offloaded,
        "plain": plain,
        "kind": limit.kind,
    }


def largest(folder: str, limit_bytes: int, width: int, disk_share: float) -> dict[str, Any]:
    """The longest chain that trains under a limit: without offload by bisection, with NVMe what the disk holds.

    Args:
        folder: on the disk.
        limit_bytes: of the process, everything included.
        width: of the blocks.
        disk_share: part of the free disk that may be filled.
    """
    limit = Limit(limit_bytes)
    block_params = 2 * width**2
    try:
        fits, fails = 0, 1 + limit_bytes // (block_params * STATE_BYTES)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if run(width, middle, 2, None, limit) else (fits, middle)
        disk = os.statvfs(folder)
        room = int(disk.f_bavail * disk.f_frsize * disk_share)
        num_blocks = room // (block_params * STATE_BYTES)
        found = run(width, num_blocks, 2, folder, limit)
    finally:
        limit.remove()
    return {
        "plain_params": fits * block_params,
        "nvme_params": num_blocks * block_params,
        "ratio": num_blocks / max(fits, 1),
        "disk": num_blocks * block_params * STATE_BYTES,
        "run": found,
        "kind": limit.kind,
    }


def run_recipe(num_blocks: int, folder: str, limit: Limit, is_offloaded: bool) -> dict[str, Any] | None:
    """One step of a recipe on one rank, launcher and all under ``limit``; None if that killed it.

    Returns:
        ``params`` that were trained (counted in the weights it wrote), ``peak`` and ``seconds`` from start to end.
    """
    sizes = "IMAGE_SIZE: 16, PATCH_SIZE: 8, NUM_HEADS: 16, HIDDEN_DIM: 1024, MLP_DIM: 4096"
    tier = "{device: nvme, nvme_path: %s, fast_init: true%s}"
    places = [
        f"config.ZERO.offload_optimizer_config={tier % (folder, '')}",
        f"config.ZERO.offload_param_config={tier % (folder, ', max_in_cpu: 0')}",
    ]
    start, kills = time.perf_counter(), limit.kills()
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        process = subprocess.run(
            [
                *(sys.executable, "-m", "vissl_zero.cli", "config=digits/simclr"),
                "config.MODEL.TRUNK.NAME=vision_transformer",
                f"config.MODEL.TRUNK.VISION_TRANSFORMERS={{{sizes}, NUM_LAYERS: {num_blocks}}}",
                "config.MODEL.HEAD.PARAMS=[[mlp,{dims:[1024,128]}]]",
                "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=2",
                *("config.TRAINER.MAX_STEPS=1", "config.LOG_FREQUENCY=1", "config.NEAREST_NEIGHBOR.USE_KNN=false"),
                *("config.CHECKPOINT.CHECKPOINT_FREQUENCY=-1", f"config.CHECKPOINT.DIR={run_folder}"),
                *("config.DISTRIBUTED.NUM_PROC_PER_NODE=1", f"config.ZERO.LEVEL={3 if is_offloaded else 0}"),
                *(places if is_offloaded else []),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=limit.enter,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if process.returncode == 0:
            (step,) = Path(run_folder, "metrics.jsonl").read_text().splitlines()
            weights = Path(run_folder, "weights.safetensors")
            with weights.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            return {
                "params": sum(math.prod(shape) for shape in shapes),
                "loss": json.loads(step)["loss"],
                "peak": json.loads(step)["bytes"]["peak"],
                "seconds": time.perf_counter() - start,
            }
    if limit.kills() > kills or "memory" in process.stdout or "bad_alloc" in process.stdout:
        return None
    raise RuntimeError(process.stdout)


def recipe(folder: str, limit_bytes: int, times: float) -> dict[str, Any]:
    """The largest ViT that a recipe trains without offload under a limit, and one ``times`` as large with it.

    Args:
        folder: on the disk, with 20 bytes a parameter: shards, gradients, state, and the weights that are written.
        limit_bytes: of the launcher and its rank together, everything included.
        times: how much larger.
    """
    limit = Limit(limit_bytes)
    block_params = 12 * 1024**2 + 13 * 1024
    try:
        fits, fails = 1, 1 + limit_bytes // (block_params * STATE_BYTES)
        plain = run_recipe(fits, folder, limit, is_offloaded=False)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            found = run_recipe(middle, folder, limit, is_offloaded=False)
            print(f"{middle} blocks without offload:", found or "killed", flush=True)
            plain, fits, fails = (found, middle, fails) if found else (plain, fits, middle)
        assert plain is not None
        num_blocks = math.ceil(times * plain["params"] / block_params)
        disk = os.statvfs(folder)
        if (needed := 20 * num_blocks * block_params) > (room := disk.f_bavail * disk.f_frsize):
            raise SystemExit(f"{folder} needs {needed / 1e9:.0f} GB and has {room / 1e9:.0f}")
        offloaded = run_recipe(num_blocks, folder, limit, is_offloaded=True)
    finally:
        limit.remove()
    ratio = offloaded["params"] / plain["params"] if offloaded else None
    return {"plain": plain, "offloaded": offloaded, "ratio": ratio, "kind": limit.kind}


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["train"]:
        width, num_blocks, num_steps, folder = sys.argv[2:]
        print(json.dumps(train(int(width), int(num_blocks), int(num_steps), folder or None)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bound", "largest", "recipe"])
    parser.add_argument("folder")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--disk-share", type=float, default=0.6, help="of what is free")
    parser.add_argument("--times", type=float, default=30.0, help="of a recipe: with offload over without")
    args = parser.parse_args()
    if args.what == "bound":
        found = bound(args.folder, args.width, args.blocks)
    elif args.what == "recipe":
        found = recipe(args.folder, int(args.gib * 2**30), args.times)
    else:
        found = largest(args.folder, int(args.gib * 2**30), args.width, args.disk_share)
    for key, value in found.items():
        print(key, f"{value:,} ({value / MIB:,.0f} Mi)" if isinstance(value, int) else value)


if __name__ == "__main__":
    main()
