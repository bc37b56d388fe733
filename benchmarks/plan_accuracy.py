"""Forecast against measured peak of live tensor bytes, cell by cell, on the CPU.

    python benchmarks/plan_accuracy.py [--cells N] [--match level3] [--json out.json]

A cell trains a tiny recipe, or a small network in a loop of its own (``own_nets.py``), for three steps on real ranks.
In the third, a tracker counts every storage that is alive: all that Python can reach at the end of the second step, and
each that an operation makes, resizes or lets go after that. It shares no code with the forecast, which sees the recipe
(in a loop of its own: the model, the optimizer and a sample) and no run. The rank that holds most is compared.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import own_nets
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_on_ranks
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.engine.loop import train
from vissl_zero.integration.initialize import initialize
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import Precision, ResolvedRun

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


@contextmanager
def tracked() -> Iterator[LiveBytes]:
    """A tracker that is told of storages that are resized, too."""
    torch.set_num_threads(1)
    tracker = LiveBytes()
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        tracker.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
    try:
        with tracker:
            yield tracker
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


def measure(plan: ResolvedRun) -> int:
    """Train; the peak of the last step on this rank."""
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    with tracked() as tracker:
        train(run, schedules, frozen, [_Begin(tracker)])
    run.sharded.close()
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
    "convnext": [
        "config.MODEL.TRUNK.NAME=timm/convnext_atto",
        "+config.MODEL.TRUNK.PARAMS.model_args={output_stride: 8, depths: [1, 1, 2, 1], dims: [32, 64, 128, 256]}",
    ],
}
_HEAD = "config.MODEL.HEAD.PARAMS="
_CLUSTERS = "use_bn: true, num_clusters: [128]"


def _crops(sizes: Sequence[int]) -> str:
    """Two crops of each size, in pixels."""
    number, each, scales = 2 * len(sizes), [2] * len(sizes), [[0.75, 1.0]] * len(sizes)
    crops = f"total_num_crops: {number}, size_crops: {[*sizes]}, num_crops: {each}, crop_scales: {scales}"
    norm = "{name: Normalize, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}"
    return f"config.DATA.TRAIN.TRANSFORMS=[{{name: ImgPilToMultiCrop, {crops}}}, {{name: ToTensor}}, {norm}]"


METHODS = {
    "swav": [_HEAD + f"[[swav_head, {{dims: [-1, 64, 32], {_CLUSTERS}}}]]", _crops([24, 16])],
    "dino": [
        _HEAD + f"[[swav_head, {{dims: [-1, 64, 32], {_CLUSTERS}, use_weight_norm_prototypes: true}}]]",
        _crops([24, 16]),
    ],
    "supervised": [_HEAD + "[[mlp, {dims: [-1, 10]}]]", _crops([24])],
    "simclr": [_HEAD + "[[mlp, {dims: [-1, 128, 64], use_bn: true, use_relu: true}]]", _crops([24])],
    "barlow_twins": [_HEAD + "[[mlp, {dims: [-1, 256, 256], use_bn: true, use_relu: true}]]", _crops([24])],
}
LEVELS = {f"level{level}": [f"config.ZERO.LEVEL={level}"] for level in range(4)}
_RECOMPUTE = "config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING=true"
_TIER = "{device: nvme, nvme_path: /tmp}"
MEMORY = {
    "kept": [],
    "recomputed": [_RECOMPUTE],
    "half_recomputed": [_RECOMPUTE, "config.MODEL.ACTIVATION_CHECKPOINTING.EVERY_N_BLOCKS=2"],
    "nvme": [f"config.ZERO.offload_optimizer_config={_TIER}"],
    "both": [f"config.ZERO.offload_{what}_config={_TIER}" for what in ("optimizer", "param")],
}
_TIERS = {"level0": (), "level1": ("nvme",), "level2": ("nvme",), "level3": ("nvme", "both")}
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
    """All cells, in an order whose beginning is a fair sample of the whole. What is not crossed is drawn."""
    draw = random.Random(0)
    sizes = [("level0", 1), ("level0", 2), ("level1", 2), ("level2", 3), ("level3", 2), ("level3", 3), ("level3", 4)]
    found = []
    for trunk, method, (level, ranks) in itertools.product(TRUNKS, METHODS, sizes):
        memory = draw.choice(["kept", "recomputed", "half_recomputed", *_TIERS[level]])
        dtype = draw.choice(["float32", "float32", "bfloat16"])
        found.append(Cell(trunk, method, level, memory, draw.choice([*OPTIMIZERS]), dtype, ranks))
    draw.shuffle(found)
    return [*own_cells(), *found]


OWN = "own loop"  # in the place of a method


def own_cells() -> list[Cell]:
    """Each network of ``own_nets.py`` at every level."""
    draw = random.Random(0)
    found = []
    for net, level in itertools.product(own_nets.NETS, LEVELS):
        memory = draw.choice(["kept", *_TIERS[level]])
        ranks = draw.choice([1, 2, 3] if level == "level0" else [2, 3])
        dtype = draw.choice(["float32", "float32", "bfloat16"])
        found.append(Cell(net, OWN, level, memory, draw.choice([*own_nets.OPTIMIZERS]), dtype, ranks))
    draw.shuffle(found)
    for net, level in itertools.product(own_nets.NETS, ("level1", "level2", "level3")):
        found.append(Cell(net, OWN, level, "kept", draw.choice([*own_nets.OPTIMIZERS]), HALF, draw.choice([1, 2, 3])))
    return found


HALF = "half"  # parameters are computed in bfloat16, over masters in float32
_FORMATS = Precision("float32", None, "bfloat16", "float32")
_NVME = {"device": "nvme", "nvme_path": "/tmp"}


def measure_own(cell: Cell, batch: int) -> tuple[int, int]:
    """Forecast, and the peak of the last step of a plain loop, on this rank."""
    net, level = own_nets.NETS[cell.trunk], int(cell.level[-1])
    model = net.build()
    options = dict(own_nets.OPTIMIZERS[cell.optimizer])
    tiers = [_NVME if cell.memory in memory else {} for memory in (("nvme", "both"), ("both",))]

    def loss_of(model: Any, batch: Sequence[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cell.dtype == "bfloat16"):
            return net.loss(model, *batch)

    given = net.batch(batch)
    formats = _FORMATS if cell.dtype == HALF else Precision()
    forecast = own_nets.forecast(model, options, level, *tiers, lambda model: loss_of(model, given), formats)
    zero = {"level": level, "offload_optimizer_config": tiers[0], "offload_param_config": tiers[1]}
    zero["bf16"] = cell.dtype == HALF
    del given
    model, optimizer = initialize(model, optimizer=options, zero=zero, device="cpu")
    with tracked() as tracker:
        for step in range(NUM_STEPS):
            given = net.batch(batch)
            if step == NUM_STEPS - 1:
                tracker.begin()
            optimizer.backward(loss_of(model, given))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return forecast, tracker.peak


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
    chosen = [cell for cell in cells() if all(word in str(cell).split() for word in given.match.split())]
    for cell in chosen[given.skip :][: given.cells]:
        if time.monotonic() - started > given.seconds:
            break
        rows.append(compared(cell, given.batch))
        print(line(rows[-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
    if len(rows) > 1:
        print(f"\n{summary(rows)}")


def compared(cell: Cell, batch: int) -> dict[str, Any]:
    """A row: the cell, bytes of both, and the error."""
    if cell.method == OWN:
        found = run_on_ranks(cell.ranks, measure_own, cell, batch, timeout_s=300)
        forecast, measured = max(pair[0] for pair in found), max(pair[1] for pair in found)
        where = ""
    else:
        plan = planned(cell, batch)
        step = dry_run(plan).forecast.step
        assert step is not None
        forecast, where = step.peak_bytes, f"{step.phase} {step.unit}"
        measured = max(run_on_ranks(cell.ranks, measure, replace(plan, run_dir="/nowhere"), timeout_s=300))
    return {**asdict(cell), "forecast": forecast, "measured": measured, "error": forecast / measured - 1, "at": where}


_COLUMNS = "trunk", "method", "level", "ranks", "memory", "optimizer", "dtype"


def line(row: dict[str, Any]) -> str:
    """A row of the table in benchmarks/plan_accuracy.md."""
    words = [str(row[column]).removeprefix("level").replace("_", " ") for column in _COLUMNS]
    sizes = [f"{row[name] / 1e6:.2f}" for name in ("forecast", "measured")]
    return f"| {' | '.join([*words, *sizes])} | {row['error']:+.2%} |"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Median, tail, and the worst on either side."""
    sizes = sorted(abs(row["error"]) for row in rows)
    within = sum(size <= 0.03 for size in sizes)
    return (
        f"{len(rows)} cells: median error {statistics.median(sizes):.2%}, 95th percentile "
        f"{sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]:.2%}, {within} within 3 %, most under "
        f"{min(row['error'] for row in rows):+.2%}, most over {max(row['error'] for row in rows):+.2%}"
    )


if __name__ == "__main__":
    main()
