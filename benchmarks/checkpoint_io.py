"""Saving and loading sharded training state: this package's checkpoints against torch.distributed.checkpoint by hand.

    python benchmarks/checkpoint_io.py [--params 500] [--rounds 3] [--folder F]

Two ranks (gloo) hold a model of so many million parameters at level 3 in float32, with momentum. In each round both
save (synced to the disk, by default of both) and load what they have saved, one after the other, and ours saves once
more asynchronously. Prints per quantity the medians and the ratio ours / torch's of each round: time is the slower
rank's, peak memory the larger rank's growth over what it held before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from vissl_zero.checkpoint.manifest import Manifest
from vissl_zero.checkpoint.reader import open_checkpoint
from vissl_zero.checkpoint.restore import StoredState
from vissl_zero.checkpoint.snapshot import HostMemory
from vissl_zero.checkpoint.writer import commit, write_rank
from vissl_zero.config.resolved import ShardingPlan
from vissl_zero.models.unit import Unit
from vissl_zero.optim.elementwise import sgd
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES

NUM_RANKS, WIDTH = 2, 4096


def _sharded(num_params: int) -> Any:
    torch.manual_seed(0)
    layers = [Unit(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(max(num_params // WIDTH**2, 1))]
    model = nn.Sequential(*layers)
    group = ParamGroup("all", tuple(name for name, _ in model.named_parameters()), False, True, 0.0)
    plan = ShardingPlan(level=3, shard_group_size=-1)
    engine = STRATEGIES.get("torch").build()
    sharded = engine.shard(model, [group], lambda groups: (sgd(groups, momentum=0.9), None), plan, torch.device("cpu"))
    for param in sharded.optimizer.param_groups[0]["params"]:
        sharded.optimizer.state[param] = {"momentum_buffer": torch.randn_like(param)}
    return sharded


def _dtensors(sharded: Any) -> dict[str, Any]:
    """What a user would hand to torch: parameters and momenta as DTensors."""
    found = {}
    for name, source in sharded.model.named_parameters():
        local = dict(sharded.named_parameters())[name]
        momentum = sharded.optimizer.state[local]["momentum_buffer"].detach()
        found[f"model.{name}"] = source.detach()
        found[f"momentum.{name}"] = DTensor.from_local(momentum, source.device_mesh, source.placements)
    return found


def _manifest() -> Manifest:
    return Manifest(1, 0, 0, 0, NUM_RANKS, 3, "torch", 1, "", "", "", "", {})


class _Clock:
    """Seconds and peak growth of memory of what is called, the larger of all ranks."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {}

    def run(self, name: str, work: Callable[[], None]) -> None:
        dist.barrier()
        ended, peak, before = threading.Event(), [0.0], _resident_mib()

        def watch() -> None:  # some kernels do not keep the peak
            while not ended.wait(0.005):
                peak[0] = max(peak[0], _resident_mib() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun = time.perf_counter()
        work()
        seconds = time.perf_counter() - begun
        ended.set()
        watcher.join()
        own = torch.tensor([seconds, peak[0]], dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        self.found.setdefault(name, []).append((float(own[0]), float(own[1])))


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _rank(rank: int, num_params: int, num_rounds: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    sharded, clock, memory = _sharded(num_params), _Clock(), HostMemory(is_pinned=False)

    def save() -> None:
        write_rank(folder, 1, rank, list(sharded.parts()), {}, {})
        dist.barrier()
        if rank == 0:
            commit(folder, _manifest())
        dist.barrier()

    def load(is_verified: bool) -> None:
        with open_checkpoint(folder / "checkpoints" / "step_000000001") as checkpoint:
            if is_verified:
                assert list(checkpoint.verify([f"rank{rank:05d}"])) == []
                dist.barrier()
            sharded.restore(StoredState(checkpoint))

    def copy() -> None:
        for part in sharded.parts():
            memory.copy(part)

    for number in range(num_rounds + 1):  # the first warms up, and makes the buffers of the asynchronous copy
        if number == 1:
            clock = _Clock()
        clock.run("save", save)
        clock.run("save, torch", lambda: dcp.save(_dtensors(sharded), checkpoint_id=folder / "dcp", no_dist=False))
        clock.run("load", lambda: load(False))
        clock.run("load, torch", lambda: dcp.load(_dtensors(sharded), checkpoint_id=folder / "dcp"))
        clock.run("load, checked", lambda: load(True))
        clock.run("stall of an asynchronous save", copy)
        dist.barrier()
        if rank == 0:
            for path in ("dcp", "checkpoints"):
                shutil.rmtree(folder / path)
        dist.barrier()
    if rank == 0:
        _report(clock.found, num_params)
    dist.destroy_process_group()


def _report(found: dict[str, list[tuple[float, float]]], num_params: int) -> None:
    print(f"{num_params / 1e6:.0f} M parameters and momenta in float32, {NUM_RANKS} ranks, {len(found['save'])} rounds")
    print("| | s | peak MiB |\n| --- | --- | --- |")
    for name, rounds in found.items():
        seconds, mebibytes = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {seconds:.2f} | {mebibytes:.0f} |")
    pairs = [("save", "save, torch"), ("load", "load, torch"), ("load, checked", "load, torch")]
    pairs.append(("stall of an asynchronous save", "save"))
    for ours, other in pairs:
        ratios = sorted(a[0] / b[0] for a, b in zip(found[ours], found[other], strict=True))
        print(f"{ours} / {other}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=500.0, help="millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        mp.spawn(_rank, (int(options.params * 1e6), options.rounds, Path(name)), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
