"""Saving and loading sharded training state: this package's checkpoints against torch.distributed.checkpoint by hand.

    python benchmarks/checkpoint_io.py [--params 500] [--rounds 5] [--folder F]

Two ranks (gloo) hold a model of so many million parameters at level 3 in float32, with momentum. In each round each
side saves (synced to the disk, by default of both), loads what it has saved and removes it; in turns first. What is
loaded has just been written, and is read from the page cache as far as that holds it. Then ours saves twice more,
asynchronously: once with a training step after it, once with an update at once, which is the worst there is.
The stall is the time for which training waits: in the call that saves, and before the update; beside it stands how long
that step takes, since copying and writing share the processors with it. Prints medians and
quartiles per quantity and of the ratio ours / torch's of each round: time is the slower rank's, peak memory the larger
rank's growth over what it held before.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from vissl_zero.checkpoint.folder import Manifest, open_checkpoint
from vissl_zero.checkpoint.resume import StoredState
from vissl_zero.checkpoint.saver import Saver
from vissl_zero.checkpoint.snapshot import Snapshot
from vissl_zero.models.model import Unit
from vissl_zero.optim.elementwise import sgd
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.resolve.resolved import ShardingPlan

NUM_RANKS, WIDTH, NUM_SAMPLES = 2, 4096, 4


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


class _Clock:
    """Seconds and peak growth of memory of what is called, the larger of all ranks."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {}

    def run(self, name: str, work: Callable[[], float | None]) -> None:
        """Call ``work``; its seconds are those it takes, or those it returns."""
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed is not to hide what this one takes
        dist.barrier()
        ended, peak, before = threading.Event(), [0.0], _resident_mib()

        def watch() -> None:  # some kernels do not keep the peak
            while not ended.wait(0.005):
                peak[0] = max(peak[0], _resident_mib() - before)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        begun = time.perf_counter()
        seconds = work()
        if seconds is None:
            seconds = time.perf_counter() - begun
        ended.set()
        watcher.join()
        self.note(name, seconds, peak[0])

    def note(self, name: str, seconds: float, peak_mib: float = 0.0) -> None:
        """Keep what was measured on this rank."""
        own = torch.tensor([seconds, peak_mib], dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        self.found.setdefault(name, []).append((float(own[0]), float(own[1])))


class _Stall:
    """Stands before a sharded model and notes for how long its next change waits."""

    def __init__(self, sharded: Any):
        self._sharded = sharded
        self.seconds = 0.0

    def before_next_change(self, wait: Callable[[], object]) -> None:
        def timed() -> None:
            begun = time.perf_counter()
            wait()
            self.seconds += time.perf_counter() - begun

        self._sharded.before_next_change(timed)


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class _Work:
    """What is timed, on one rank."""

    def __init__(self, num_params: int, rank: int, folder: Path):
        self.sharded, self._rank, self._folder = _sharded(num_params), rank, folder
        self._savers = {is_async: Saver(folder, is_async, keep_last=-1, keep_every=-1) for is_async in (False, True)}
        self.seconds_meanwhile = 0.0
        self._batch = [torch.randn(NUM_SAMPLES, WIDTH)]

    def step(self) -> None:
        with self.sharded.micro_batch(is_last=True):
            self.sharded.backward(self.sharded.model(self._batch)[0].square().mean())
        self.sharded.step()
        self.sharded.zero_grad()

    def save(self) -> None:
        self._store(False, self.sharded)

    def _store(self, is_async: bool, sharded: Any) -> Saver:
        manifest = Manifest(1, 0, 0, 0, NUM_RANKS, 3, "torch", 1, "", "", "", "", {})
        snapshot = Snapshot(list(self.sharded.parts()), [], self.sharded.scalars(), {}, manifest)
        self._savers[is_async].store(snapshot, sharded)
        return self._savers[is_async]

    def stall(self, work: Callable[[], object]) -> float:
        """Seconds that training waits for an asynchronous save with ``work``, an update in the end, after it."""
        begun, stall = time.perf_counter(), _Stall(self.sharded)
        saver = self._store(True, stall)
        saved = time.perf_counter()
        work()
        self.seconds_meanwhile = time.perf_counter() - saved
        stall.seconds += saved - begun
        saver.finish()
        self.remove("checkpoints")
        return stall.seconds

    def save_torch(self) -> None:
        dcp.save(_dtensors(self.sharded), checkpoint_id=self._folder / "dcp", no_dist=False)

    def load(self, is_verified: bool) -> None:
        with open_checkpoint(self._folder / "checkpoints" / "step_000000001") as checkpoint:
            if is_verified:
                assert list(checkpoint.verify([f"rank{self._rank:05d}"])) == []
                dist.barrier()
            self.sharded.restore(StoredState(checkpoint))

    def load_torch(self) -> None:
        dcp.load(_dtensors(self.sharded), checkpoint_id=self._folder / "dcp")

    def remove(self, name: str) -> None:
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(self._folder / name)
            os.sync()
        dist.barrier()


def _rank(rank: int, num_params: int, num_rounds: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    work, clock = _Work(num_params, rank, folder), _Clock()
    for number in range(num_rounds + 1):  # the first warms up, and makes the buffers of the asynchronous copy
        if number == 1:
            clock = _Clock()
        ours: dict[str, Callable[[], None]] = {"save": work.save, "load": partial(work.load, False)}
        ours["load, checked"] = partial(work.load, True)
        theirs: dict[str, Callable[[], None]] = {"save, torch": work.save_torch, "load, torch": work.load_torch}
        sides = [(ours, "checkpoints"), (theirs, "dcp")]
        for pieces, name in sides if number % 2 else reversed(sides):
            for kind, piece in pieces.items():
                clock.run(kind, piece)
            work.remove(name)  # the second is to find the disk and the page cache as the first did
        clock.run("a training step", work.step)
        clock.run("stall, a step after it", lambda: work.stall(work.step))
        clock.note("a training step after it", work.seconds_meanwhile)
        clock.run("stall, an update at once", lambda: work.stall(work.sharded.step))
        if rank == 0:  # for whoever has to interrupt it
            latest = ", ".join(f"{name} {rounds[-1][0]:.3f}" for name, rounds in clock.found.items())
            print(f"round {number}: {latest}", file=sys.stderr, flush=True)
    if rank == 0:
        _report(clock.found, num_params)
    dist.destroy_process_group()


def _report(found: dict[str, list[tuple[float, float]]], num_params: int) -> None:
    print(
        f"{num_params / 1e6:.0f} M parameters and momenta in float32, {NUM_RANKS} ranks, {len(found['save'])} rounds\n"
    )
    print("| | s | peak MiB over what was held |\n| --- | --- | --- |")
    for name, rounds in found.items():
        seconds, mebibytes = zip(*rounds, strict=True)
        print(f"| {name} | {_spread(seconds)} | {statistics.median(mebibytes):.0f} |")
    print("\n| ratio of one round | time |\n| --- | --- |")
    pairs = [("save", "save, torch"), ("load", "load, torch"), ("load, checked", "load, torch")]
    pairs.append(("a training step after it", "a training step"))
    pairs += [(name, "save") for name in found if name.startswith("stall")]
    for ours, other in pairs:
        print(
            f"| {ours} / {other} | {_spread([a[0] / b[0] for a, b in zip(found[ours], found[other], strict=True)])} |"
        )


def _spread(numbers: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else [*numbers] * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=500.0, help="millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        mp.spawn(_rank, (int(options.params * 1e6), options.rounds, Path(name)), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
