"""Distill from a teacher that is larger than the memory limit: on NVMe it trains, in memory the kernel ends the run.

    python benchmarks/large_teacher.py <folder> [--gib 1.0] [--write]

The teacher is a vision transformer of ViT-L's sizes with random weights (1.1 GiB), as timm saves it; the student is
that of ``digits/feature_distillation``. Each run starts as a user starts it, its processes in one memory cgroup.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from memory_group import MemoryGroup

GIB = 2**30
_STEPS = 5
_TABLE = Path(__file__).with_name("large_teacher.md")


def write_teacher(path: Path) -> int:
    """Write the weights; return their bytes."""
    import vissl_zero  # noqa: F401 - before timm, which needs operations of torchvision

    import timm  # isort: skip
    import torch

    model = timm.create_model("vit_large_patch16_224", num_classes=0, img_size=24, patch_size=8)
    torch.save(model.state_dict(), path)
    return path.stat().st_size


def run(teacher: Path, folder: Path, name: str, num_bytes: int, words: list[str]) -> dict[str, str]:
    """Start one run under the limit; return how it ended, and the most that its processes held."""
    group = MemoryGroup(name, num_bytes)
    command = [
        sys.executable,
        "-m",
        "vissl_zero.cli",
        "config=digits/feature_distillation",
        f"config.LOSS.feature_distillation_loss.teacher={teacher}",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
        f"config.TRAINER.MAX_STEPS={_STEPS}",
        "config.NEAREST_NEIGHBOR.USE_KNN=false",
        f"config.CHECKPOINT.DIR={folder / name}",
        *words,
    ]
    try:
        ended = subprocess.run(command, preexec_fn=group.enter, capture_output=True, text=True, check=False)
        summary = folder / name / "summary.json"
        figures = json.loads(summary.read_text()) if ended.returncode == 0 else {}
        said = "trained" if ended.returncode == 0 else " ".join(ended.stderr.strip().splitlines()[-1:])
        said = f"the kernel ended {group.kills()} process" if group.kills() else said
        return {"end": said, "teacher": f"{figures['bytes']['teacher'] / 2**20:.1f} MiB" if figures else "-"}
    finally:
        group.close()


def main() -> None:
    """Run both, print them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on a disk with 4 GiB of room")
    parser.add_argument("--gib", type=float, default=1.0, help="limit of all processes of a run")
    parser.add_argument("--write", action="store_true", help=f"write {_TABLE.name}")
    options = parser.parse_args()
    limit = int(options.gib * GIB)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        size = write_teacher(folder / "teacher.pth")
        disk = f"config.ZERO.offload_param_config={{device:nvme,nvme_path:{folder}}}"
        rows = {
            "in memory, level 0": run(folder / "teacher.pth", folder, "memory", limit, ["config.ZERO.LEVEL=0"]),
            "on NVMe, level 3": run(folder / "teacher.pth", folder, "nvme", limit, ["config.ZERO.LEVEL=3", disk]),
        }
    lines = [
        "# A teacher larger than memory",
        f"`python benchmarks/large_teacher.py <folder> --gib {options.gib:g}`, {datetime.now(UTC):%Y-%m-%d}: weights "
        f"of {size / GIB:.2f} GiB, a limit of {options.gib:g} GiB for all processes of a run, {_STEPS} steps.",
        "",
        "| teacher | end of the run | in memory between steps |",
        "| --- | --- | --- |",
        *(f"| {name} | {row['end']} | {row['teacher']} |" for name, row in rows.items()),
    ]
    print("\n".join(lines))
    if options.write:
        _TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
