"""A million images as files and in 1,000 tars: time of the index and of the first batch, and memory of a rank.

    python benchmarks/million_files.py FOLDER [--images 1000000]

Writes a folder of 1,000 classes (hard links of a JPEG of 8 x 8 pixels) and 1,000 tars (2 GB) into FOLDER, or uses those
that an earlier call left there. Each row is a new process, without workers: the index the first time, again, and after
a file was added. Times are of the clock; memory is the peak beyond what the program's imports take.
benchmarks/million_files.md has figures.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from PIL import Image

from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.data.loader import build_loader

PARTS = 1000
BATCH = 256
TRANSFORMS = [{"name": "RandomResizedCrop", "size": 8}, {"name": "ToTensor"}]


def write_folder(folder: Path, per_part: int, jpeg: bytes) -> None:
    """Write the classes; a file system allows a few ten thousand links of a file, so each class has its own."""
    for part in range(PARTS):
        (folder / f"class_{part:04d}").mkdir(parents=True)
        first = folder / f"class_{part:04d}" / "000000.jpg"
        first.write_bytes(jpeg)
        for index in range(1, per_part):
            os.link(first, folder / f"class_{part:04d}" / f"{index:06d}.jpg")


def write_tars(folder: Path, per_part: int, jpeg: bytes) -> None:
    """Write the tars, all of the same content."""
    folder.mkdir(parents=True)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for index in range(per_part):
            add(tar, f"{index:06d}.jpg", jpeg)
            add(tar, f"{index:06d}.cls", str(index % 10).encode())
    for part in range(PARTS):
        (folder / f"part-{part:06d}.tar").write_bytes(file.getvalue())


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def peak_mib() -> float:
    """Most memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def probe(source: str, path: str) -> None:
    """Build the loader and load a batch, in a process of its own; prints what that took."""
    before, begun = peak_mib(), time.perf_counter()
    split = Split(DATA_SOURCES=[source], DATA_PATHS=[path], TRANSFORMS=TRANSFORMS)
    loader = build_loader(Data(TRAIN=split, NUM_DATALOADER_WORKERS=0), "TRAIN", 0, BATCH, 0, 1, 1)
    indexed = time.perf_counter()
    next(loader.epoch(0))
    loaded = time.perf_counter()
    found = {"images": len(loader.source), "index": indexed - begun, "first": loaded - begun}
    print(json.dumps({**found, "mib": peak_mib() - before, "imports": before}))


def row(title: str, source: str, path: Path) -> None:
    """Print what a new process takes."""
    words = [sys.executable, __file__, str(path), "--probe", source]
    found = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    print(
        f"{title:22s} {found['images']:>9,} images  index {found['index']:6.2f} s  first batch {found['first']:6.2f} s"
        f"   {found['mib']:4.0f} MiB beyond {found['imports']:.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(options.probe, str(options.folder))
        return
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 80, 200)).save(file, "JPEG")
    jpeg, per_part = file.getvalue(), options.images // PARTS
    folder, tars = options.folder / "folder", options.folder / "tars"
    for path, write in ((folder, write_folder), (tars, write_tars)):
        if not path.exists():
            write(path, per_part, jpeg)
    for index in tars.glob(".*.npz"):
        index.unlink()
    row("folder, first", "disk_folder", folder)
    row("folder, again", "disk_folder", folder)
    extra = folder / "class_0500" / "extra.jpg"
    extra.write_bytes(jpeg)
    row("folder, a file more", "disk_folder", folder)
    extra.unlink()
    row("tars, first", "webdataset", tars)
    row("tars, again", "webdataset", tars)
    with tarfile.open(tars / "part-000500.tar", "a") as tar:
        add(tar, "extra.jpg", jpeg)
        add(tar, "extra.cls", b"3")
    row("tars, a file more", "webdataset", tars)


if __name__ == "__main__":
    main()
