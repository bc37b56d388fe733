"""Processor time that the loader adds to reading and transforming images: order, seeds, collating, workers, transfer.

    python benchmarks/loader_overhead.py [--views swav224|cifar] [--files FOLDER] [--backends pil fast]

Rounds run every arm once, in an order that changes: the pipeline alone (read, decode, transform, write each crop's
values to the memory of one of three batches in turn, as whoever hands batches over has to), the same in 2 processes at
once, which share the machine's memory and cache, the loader in the process itself, and the loader with 2 workers,
whose processor time counts. Medians of paired ratios, each to the pipeline in as many processes;
``benchmarks/augmentation.md`` has figures.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from augmentation import VIEWS, entries, photographs

from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.data.loader import Loader, build_loader

_BATCH = {"swav224": 24, "cifar": 128}
_IN_TURN = 3


def pipeline_alone(loader: Loader, batch: int) -> Callable[[int], float]:
    """Return what runs so many images through the loader's pipeline, and gives processor seconds."""
    shapes = [tuple(crop.shape) for crop in _crops(loader, 0)]
    rows = [loader.transform.rows(torch.zeros(batch * _IN_TURN, *shape)) for shape in shapes]
    places = list(zip(*rows, strict=True))

    def run(count: int) -> float:
        begun = time.process_time()
        for number in range(count):
            for crop, place in zip(_crops(loader, number), places[number % len(places)], strict=True):
                loader.transform.write(crop, place)
        return time.process_time() - begun

    return run


class PipelineInTwo:
    """The pipeline alone in two processes at once."""

    def __init__(self, build: Callable[[], Loader], batch: int):
        context = multiprocessing.get_context("forkserver")
        self._processes = [ProcessPoolExecutor(1, context, _begin, (build, batch)) for _ in range(2)]

    def __call__(self, count: int) -> float:
        return sum(future.result() for future in [one.submit(_run, count // 2) for one in self._processes])


def _begin(build: Callable[[], Loader], batch: int) -> None:
    global _run_alone
    torch.set_num_threads(1)
    _run_alone = pipeline_alone(build(), batch)


def _run(count: int) -> float:
    return _run_alone(count)


def _crops(loader: Loader, number: int) -> list[Any]:
    index = number % len(loader.source)
    return loader.transform.crops(loader.transform.read(loader.source, index))


def whole_loader(loader: Loader, batch: int) -> Callable[[int], float]:
    """Return what takes so many images from the loader, and gives processor seconds of all its processes."""
    epochs = itertools.count()

    def run(count: int) -> float:
        steps, before, begun = loader.epoch(next(epochs)), _workers_s(loader), time.process_time()
        for batches in itertools.islice(steps, count // batch):
            del batches
        for _ in steps:
            raise AssertionError("an epoch is as long as a round")
        return time.process_time() - begun + _workers_s(loader) - before

    next(iter(loader.epoch(next(epochs))))  # starts the workers
    return run


def _workers_s(loader: Loader) -> float:
    # A process's clock in nanoseconds, as clock_getcpuclockid(3) numbers it; /proc counts in hundredths of a second.
    return sum(time.clock_gettime(~worker.pid << 3 | 2) for worker in loader._stream._workers)


def main() -> None:
    """Run the rounds and print a line for each backend and arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", choices=VIEWS, default="swav224")
    parser.add_argument("--files", type=Path, help="a folder of JPEGs")
    parser.add_argument("--backends", nargs="+", default=["pil", "fast"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, help="in a round (20 batches)")
    options = parser.parse_args()
    options.images = options.images or 20 * _BATCH[options.views]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.files is None:
            for index, file in enumerate(photographs()):
                (Path(folder) / f"{index:02d}.jpg").write_bytes(file)
        measure(options, options.files or Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure each backend on the files of a folder."""
    files = sorted(folder.rglob("*.jp*g"))
    listed = Path(tempfile.mkdtemp()) / "list.txt"
    listed.write_text("\n".join(str(files[index % len(files)]) for index in range(options.images)))
    batch = _BATCH[options.views]
    for backend in options.backends:
        split = Split(
            DATA_SOURCES=["disk_filelist"], DATA_PATHS=[str(listed)], TRANSFORMS=entries(VIEWS[options.views])
        )

        def build(num_workers: int, backend: str = backend, split: Split = split) -> Callable[[], Loader]:
            data = Data(BACKEND=backend, TRAIN=split, NUM_DATALOADER_WORKERS=num_workers, WORKER_TIMEOUT_S=300.0)
            return partial(build_loader, data, "TRAIN", 0, batch, 0, 1, 1)

        bases = {"loader, 0 workers": "pipeline", "loader, 2 workers": "pipeline in 2"}
        arms = {
            "pipeline": pipeline_alone(build(0)(), batch),
            "pipeline in 2": PipelineInTwo(build(0), batch),
            "loader, 0 workers": whole_loader(build(0)(), batch),
            "loader, 2 workers": whole_loader(build(2)(), batch),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(options.rounds + 1):
            names = list(arms)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken = arms[name](options.images)
                if turn:  # the first warms up
                    seconds[name].append(taken)
        for name, taken in seconds.items():
            ratios = [a / b for a, b in zip(taken, seconds[bases.get(name, "pipeline")], strict=True)]
            each, added = 1e3 * statistics.median(taken) / options.images, 100 * (statistics.median(ratios) - 1)
            print(f"{options.views}, {backend}, {name:18s} {each:6.3f} ms/image, {added:+5.1f} %", flush=True)


if __name__ == "__main__":
    main()
