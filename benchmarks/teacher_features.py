"""Time an epoch of distillation with the teacher run, and with what it gave read from the disk.

    python benchmarks/teacher_features.py [--rounds 3] [--write]

The teacher is a ViT-S/16 with random weights, the student a ResNet-10 of timm, the images scans of digits at 96 pixels.
Runs of both kinds alternate, as a user starts them; counted are the epochs after the first, which fills the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

_EPOCHS, _IMAGES, _SIDE = 4, 128, 96
_TABLE = Path(__file__).with_name("teacher_features.md")
_CACHE = "config.DISTILLATION.CACHE_FEATURES=true"


def write_teacher(path: Path) -> None:
    """Write the weights as timm saves them."""
    import vissl_zero  # noqa: F401 - before timm, which needs operations of torchvision

    import timm  # isort: skip
    import torch

    torch.save(timm.create_model("vit_small_patch16_224", num_classes=0, img_size=_SIDE).state_dict(), path)


def epoch_seconds(teacher: Path, folder: Path, words: Sequence[str]) -> float:
    """Train; return the mean time of an epoch after the first, as ``metrics.jsonl`` has it."""
    command = [
        *(sys.executable, "-m", "vissl_zero.cli", "config=digits/feature_distillation", *words),
        f"config.LOSS.feature_distillation_loss.teacher={teacher}",
        f"config.DATA.TRAIN.DATA_LIMIT={_IMAGES}",
        f"config.DATA.IMG_SIZE={_SIDE}",
        "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=32",
        "config.DATA.NUM_DATALOADER_WORKERS=1",
        "config.DATA.AUGMENTATION_PERIOD=1",
        "config.MODEL.TRUNK.NAME=timm/resnet10t",
        "config.MODEL.TRUNK.PARAMS={}",
        f"config.OPTIMIZER.num_epochs={_EPOCHS}",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
        "config.NEAREST_NEIGHBOR.USE_KNN=false",
        f"config.CHECKPOINT.DIR={folder}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sum(32 / step["images_per_s"] for step in steps if step["epoch"]) / (_EPOCHS - 1)


def main() -> None:
    """Time both kinds in turn, print them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {_TABLE.name}")
    options = parser.parse_args()
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_teacher(folder / "teacher.pth")
        for number in range(options.rounds):
            run, read = (
                epoch_seconds(folder / "teacher.pth", folder / f"{name}_{number}", words)
                for name, words in (("run", ()), ("read", (_CACHE,)))
            )
            pairs.append((run, read))
            print(f"{run:.1f} s, {read:.1f} s", flush=True)
    runs, reads = zip(*pairs, strict=True)
    ratios = sorted(run / read for run, read in pairs)
    lines = [
        "# Features of a teacher, read from the disk",
        f"`python benchmarks/teacher_features.py --rounds {options.rounds}`, {datetime.now(UTC):%Y-%m-%d}: a "
        f"ViT-S/16 teaches a ResNet-10, {_IMAGES} images of {_SIDE} pixels, epochs after the first.",
        "",
        "| teacher | median of an epoch |",
        "| --- | --- |",
        f"| run in each step | {statistics.median(runs):.1f} s |",
        f"| read (`DISTILLATION.CACHE_FEATURES`) | {statistics.median(reads):.1f} s |",
        "",
        f"Ratio of the pairs: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}.",
    ]
    print("\n".join(lines))
    if options.write:
        _TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
