"""Optimizer state on a disk: how fast it streams, against the disk itself, and what a step costs.

    python benchmarks/optimizer_streaming.py /path/on/a/local/disk

Prints, each measured in turn, several times: the pipeline alone, by the size of its records; AdamW's steps with its
state streamed and in memory; raw direct reads and writes of the same records by a few threads, nothing else, on huge
pages and on single ones; the same traffic through the page cache and through a memory map; and, where it is installed,
fio's engines, direct, with the same block and depth, mixed reads and writes. Bytes count once for reading and once for
writing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vissl_zero.optim.elementwise import adamw
from vissl_zero.sharding.offload.block_file import (
    NUM_THREADS,
    BlockFile,
    Cell,
    OffloadFolder,
    RecordPipeline,
    new_run_name,
    page_buffers,
)
from vissl_zero.sharding.offload.state_place import UpdateKernel
from vissl_zero.sharding.offload.streamed_optimizer import RECORD_BYTES, StreamedOptimizer

MIB = 2**20
RECORD_SIZES = (MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB)


class Stream:
    """The pipeline by itself: records are read and written back."""

    def __init__(self, folder: OffloadFolder, num_bytes: int, record_bytes: int):
        sizes = [record_bytes] * (num_bytes // record_bytes)
        self._file = BlockFile(folder, f"records-{record_bytes}", sizes, is_touched=True)
        self._items = [[Cell(self._file, index)] for index in range(len(sizes))]
        self._pipeline = RecordPipeline([record_bytes])

    def run(self) -> None:
        """Once through all of them."""
        self._pipeline.run(self._items, lambda position, tray: (0,))

    def close(self) -> None:
        """Let go of the file."""
        self._pipeline.close()
        self._file.close()


class Raw:
    """Every record is read and written back by a few threads; ``longest`` is the time of the slowest request so far."""

    def __init__(
        self, path: Path, num_bytes: int, num_threads: int, flags: int = os.O_DIRECT, has_huge_pages: bool = True
    ):
        self._path, self._num_bytes, self._num_threads, self._flags = path, num_bytes, num_threads, flags
        self._buffers: queue.Queue[memoryview | mmap.mmap] = queue.Queue()
        huge = page_buffers([RECORD_BYTES] * num_threads) if has_huge_pages else []
        for position in range(num_threads):
            self._buffers.put(huge[position].view(RECORD_BYTES) if huge else mmap.mmap(-1, RECORD_BYTES))
        self.longest = 0.0

    def run(self) -> None:
        """Once through all of them."""
        fd = os.open(self._path, os.O_RDWR | self._flags)

        def one(offset: int) -> None:
            buffer = self._buffers.get()
            for request in (os.preadv, os.pwritev):
                start = time.perf_counter()
                request(fd, [buffer], offset)
                self.longest = max(self.longest, time.perf_counter() - start)
            self._buffers.put(buffer)

        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(one, range(0, self._num_bytes, RECORD_BYTES)))
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def mapped(path: Path, num_bytes: int) -> None:
    """Add one to every byte of a memory map."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), num_bytes) as memory:
        memory.madvise(mmap.MADV_SEQUENTIAL)
        for offset in range(0, num_bytes, RECORD_BYTES):
            memory[offset : offset + RECORD_BYTES] = bytes(memory[offset : offset + RECORD_BYTES])
        memory.flush()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fio(path: Path, num_bytes: int, engine: str) -> float:
    """Half reads and half writes, as many bytes of each as a step; seconds by fio's own clock, its start left out."""
    depth = NUM_THREADS
    is_async = engine != "psync"
    shape = [f"--iodepth={depth}"] if is_async else [f"--numjobs={depth}", "--thread", "--group_reporting"]
    command = [
        *("fio", "--name=mixed", f"--filename={path}", f"--ioengine={engine}", "--direct=1", "--output-format=json"),
        *("--rw=rw", "--rwmixread=50", f"--bs={RECORD_BYTES}", f"--size={num_bytes}"),
        *(f"--io_size={2 * num_bytes // (1 if is_async else depth)}", *shape),
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    jobs = json.loads(output[output.index("{") :])["jobs"]
    return max(job[direction]["runtime"] for job in jobs for direction in ("read", "write")) / 1000


def seconds(work: Callable[[], float | None]) -> float:
    """Wall time of one run, or what it measured itself."""
    start = time.perf_counter()
    own = work()
    return time.perf_counter() - start if own is None else own


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--mib", type=int, default=512, help="of optimizer state")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    num_bytes = args.mib * MIB
    params = [nn.Parameter(torch.zeros(num_bytes // 8 // 4)) for _ in range(4)]
    for param in params:
        param.grad = torch.full_like(param, 0.1)
    in_memory = adamw([{"params": params, "lr": 1e-3}])
    kernel = UpdateKernel(adamw([{"params": [nn.Parameter(torch.zeros(1))], "lr": 1e-3}]))
    folder = OffloadFolder(args.path, new_run_name(), rank=0)
    streamed = StreamedOptimizer(kernel, [params], folder, is_fast_init=False)
    streams = {size: Stream(folder, num_bytes, size) for size in RECORD_SIZES}
    scratch = Path(args.path) / "streaming_scratch.bin"
    scratch.touch(mode=0o600, exist_ok=False)
    with scratch.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    raws = {
        "disk, direct, 4 threads": Raw(scratch, num_bytes, 4),
        "disk, direct, 2 threads": Raw(scratch, num_bytes, 2),
        "  4 threads, 4 KiB pages": Raw(scratch, num_bytes, 4, has_huge_pages=False),
        "disk, page cache": Raw(scratch, num_bytes, 4, flags=0),
    }
    works: dict[str, Callable[[], float | None]] = {
        **{f"pipeline, {size // 1024} KiB": stream.run for size, stream in streams.items()},
        "optimizer, streamed": lambda: streamed.step(),
        **{name: work.run for name, work in raws.items()},
        "disk, memory map": lambda: mapped(scratch, num_bytes),
        "optimizer, in memory": lambda: in_memory.step(),
    }
    if shutil.which("fio"):
        works |= {f"fio, {name}": partial(fio, scratch, num_bytes, name) for name in ("libaio", "io_uring", "psync")}
    try:
        for work in works.values():
            work()
        times = {name: [] for name in works}  # type: dict[str, list[float]]
        for _ in range(args.rounds):
            for name, work in works.items():
                times[name].append(seconds(work))
    finally:
        for stream in streams.values():
            stream.close()
        streamed.close()
        scratch.unlink()
    for name, found in times.items():
        median = statistics.median(found)
        slowest = f"  longest request {raws[name].longest * 1000:.0f} ms" if name in raws else ""
        print(f"{name:26} {median:7.3f} s  {2 * args.mib / median:7.0f} MiB/s  (fastest {min(found):.3f} s){slowest}")


if __name__ == "__main__":
    main()
