"""Forecast against measured peak of live tensor bytes, cell by cell, on the CPU.

    python benchmarks/plan_accuracy.py [--cells N] [--match level3] [--json out.json]

A cell trains a tiny recipe for three steps on real ranks. In the third, a tracker counts every storage that is alive:
all that Python can reach at the end of the second step, and each that an operation makes, resizes or lets go after
that. It shares no code with the forecast, which sees the recipe and no run. The rank that holds most is compared.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_on_ranks
from vissl_zero.config.compose import compose
from vissl_zero.config.host import Host
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.engine.build import build_run
from vissl_zero.engine.dry_run import dry_run
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.engine.loop import train

NUM_STEPS = 3


class LiveBytes(TorchDispatchMode):
    """The largest sum of live storages since ``begin``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._others: set[int] = set()  # storages over memory that another one is counted for
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def begin(self) -> None:
        """Start from what is alive."""
        gc.collect()
        self._sizes.clear()
        self._others.clear()
        self.now = 0
        mapped: set[tuple[int, int]] = set()
        for thing in gc.get_objects():
            try:
                is_tensor = isinstance(thing, Tensor)
            except Exception:  # noqa: BLE001 - a proxy whose class raises
                continue
            if is_tensor:
                with torch._C.DisableTorchFunctionSubclass():
                    self._see_once(thing, mapped)
        self.peak = self.now

    def _see_once(self, tensor: Tensor, mapped: set[tuple[int, int]]) -> None:
        """Count memory once that several storages lie over (buffers of offload, which are cut out of one mapping)."""
        inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not inner.is_meta and type(tensor).__name__ != "FakeTensor":
            storage = inner.untyped_storage()
            place = storage.data_ptr(), storage.nbytes()
            if storage.nbytes() and place in mapped and storage._cdata not in self._sizes:
                self._others.add(storage._cdata)
            mapped.add(place)
        self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, at its present size."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        if storage._cdata not in self._others:
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has its present size from now on."""
        key = storage._cdata
        if key in self._sizes:
            self.now += storage.nbytes() - self._sizes[key][1]
            self._sizes[key] = self._sizes[key][0], storage.nbytes()
        else:
            self._sizes[key] = weakref.ref(storage, lambda _: self._gone(key)), storage.nbytes()
            self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, (None, 0))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor):
                    self.see(tensor)
        return result


class _Begin(Hook):
    def __init__(self, tracker: LiveBytes):
        self.tracker = tracker

    def on_step(self, run: Run, step: Step) -> None:
        if run.step == NUM_STEPS - 1:
            self.tracker.begin()


def measure(plan: ResolvedRun) -> int:
    """Train; the peak of the last step on this rank."""
    torch.set_num_threads(1)
    tracker = LiveBytes()
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        tracker.resized(storage)
        return result

    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
    try:
        with tracker:
            train(run, schedules, frozen, [_Begin(tracker)])
        run.sharded.close()
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
    return tracker.peak


@dataclass(frozen=True)
class Cell:
    """One comparison; names are keys of the tables below."""

    trunk: str
    method: str
    level: str
    memory: str
    optimizer: str
    dtype: str
    ranks: int

    def __str__(self) -> str:
        return " ".join(map(str, asdict(self).values()))


TRUNKS = {
    "regnet": [
        "config.MODEL.TRUNK={NAME: regnet, REGNET: {block_type: RES_BASIC_BLOCK, depth: 6, w_0: 32, w_a: 16.0, "
        "w_m: 2.0, group_width: 16, stem_width: 32}}"
    ],
    "resnet": ["config.MODEL.TRUNK={NAME: resnet, RESNETS: {DEPTH: 18, WIDTH_PER_GROUP: 64}}"],
    "vit": [
        "config.MODEL.TRUNK={NAME: vision_transformer, VISION_TRANSFORMERS: {IMAGE_SIZE: 24, PATCH_SIZE: 8, "
        "NUM_LAYERS: 4, NUM_HEADS: 4, HIDDEN_DIM: 128, MLP_DIM: 512}}"
    ],
}
_HEAD = "config.MODEL.HEAD.PARAMS="
_CLUSTERS = "use_bn: true, num_clusters: [128]"
METHODS = {
    "swav": [_HEAD + f"[[swav_head, {{dims: [-1, 64, 32], {_CLUSTERS}}}]]"],
    "dino": [_HEAD + f"[[swav_head, {{dims: [-1, 64, 32], {_CLUSTERS}, use_weight_norm_prototypes: true}}]]"],
    "supervised": [_HEAD + "[[mlp, {dims: [-1, 10]}]]"],
    "simclr": [_HEAD + "[[mlp, {dims: [-1, 128, 64], use_bn: true, use_relu: true}]]"],
    "barlow_twins": [_HEAD + "[[mlp, {dims: [-1, 256, 256], use_bn: true, use_relu: true}]]"],
}
LEVELS = {f"level{level}": [f"config.ZERO.LEVEL={level}"] for level in range(4)}
MEMORY = {
    "kept": [],
    "recomputed": ["config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING=true"],
    "nvme": ["config.ZERO.offload_optimizer_config={device: nvme, nvme_path: /tmp}"],
}
OPTIMIZERS = {
    "adamw": [],
    "sgd": ["config.OPTIMIZER.name=sgd"],
    "larc": ["config.OPTIMIZER.name=sgd", "config.OPTIMIZER.use_larc=true"],
}
DTYPES = {
    "float32": [],
    "bfloat16": ["config.MODEL.AMP_PARAMS.USE_AMP=true", "config.MODEL.AMP_PARAMS.DTYPE=bfloat16"],
}


def planned(cell: Cell, batch: int) -> ResolvedRun:
    """The run of a cell."""
    overrides = [
        *TRUNKS[cell.trunk],
        *METHODS[cell.method],
        *LEVELS[cell.level],
        *MEMORY[cell.memory],
        *OPTIMIZERS[cell.optimizer],
        *DTYPES[cell.dtype],
        f"config.DISTRIBUTED.NUM_PROC_PER_NODE={cell.ranks}",
        "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]",
        f"config.TRAINER.MAX_STEPS={NUM_STEPS}",
        "config.TRAINER.THREADS_PER_RANK=1",
        f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={batch}",
    ]
    recipe = f"digits/{cell.method}"
    return resolve(compose(recipe, overrides).run, "/nowhere", recipe=recipe, host=Host(num_cores=1))


def cells() -> list[Cell]:
    """All cells, in an order whose beginning is a fair sample of the whole."""
    levels = [("level0", 1), ("level0", 2), ("level1", 2), ("level2", 2), ("level3", 2), ("level3", 3)]
    found = []
    for index, (trunk, method, (level, ranks)) in enumerate(itertools.product(TRUNKS, METHODS, levels)):
        memory = ("kept", "recomputed", "kept", "nvme")[index % 4]
        memory = "kept" if memory == "nvme" and level == "level0" else memory
        optimizer = (*OPTIMIZERS,)[index % 3]
        dtype = "bfloat16" if index % 5 == 2 else "float32"
        found.append(Cell(trunk, method, level, memory, optimizer, dtype, ranks))
    return [cell for start in range(7) for cell in found[start::7]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=None, help="only the first N")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first N")
    parser.add_argument("--match", default="", help="only those whose name holds this text")
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after this long")
    parser.add_argument("--json", type=Path, default=None, help="write the rows there")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    print(f"{'cell':60} {'forecast':>12} {'measured':>12} {'error':>8}")
    chosen = [cell for cell in cells() if all(word in str(cell).split() for word in given.match.split())]
    for cell in chosen[given.skip :][: given.cells]:
        if time.monotonic() - started > given.seconds:
            break
        plan = planned(cell, given.batch)
        found = dry_run(plan).forecast
        if found.step is None:
            print(f"{cell!s:60} not known: {found.unknown}", flush=True)
            continue
        measured = max(run_on_ranks(cell.ranks, measure, replace(plan, run_dir="/nowhere"), timeout_s=300))
        error = found.step.peak_bytes / measured - 1
        rows.append({**asdict(cell), "forecast": found.step.peak_bytes, "measured": measured, "error": error})
        print(
            f"{cell!s:60} {found.step.peak_bytes:12,} {measured:12,} {error:+8.2%}  {found.step.phase} "
            f"{found.step.unit}",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
    if len(rows) > 1:
        sizes = sorted(abs(row["error"]) for row in rows)
        within = sum(size <= 0.03 for size in sizes) / len(sizes)
        print(
            f"{len(rows)} cells: median error {statistics.median(sizes):.2%}, 95th percentile "
            f"{sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]:.2%}, within 3 % {within:.0%}, most under "
            f"{min(row['error'] for row in rows):+.2%}, most over {max(row['error'] for row in rows):+.2%}"
        )


if __name__ == "__main__":
    main()
