"""Plans of two published models at 8 to 4,096 ranks on described machines; writes docs/scale.md.

    python benchmarks/plan_scale.py [--ranks 8,512] [--no-page]

Each plan is one call of ``vissl-zero plan`` in a process of its own: no GPU, no images. Its processor time (import of
torch included) and its largest resident memory are noted beside what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
RANKS = (8, 64, 512, 4096)
_AMP = ["config.MODEL.AMP_PARAMS.USE_AMP=true", "config.MODEL.AMP_PARAMS.DTYPE=bfloat16"]


@dataclass(frozen=True)
class Published:
    """A model, and what its authors used.

    Attributes:
        title: for people.
        recipe: and the overrides that make it this model.
        machine: profile.
        what: a sentence on what is planned.
        said: a sentence on what was published.
    """

    title: str
    recipe: str
    overrides: list[str]
    machine: str
    what: str
    said: str


_REGNET = "config.MODEL.TRUNK.REGNET"
_VIT = "config.MODEL.TRUNK.VISION_TRANSFORMERS"
MODELS = {
    "regnet_10b": Published(
        "RegNet-10B with SwAV",
        "pretrain/swav/regnet_16gf",
        [
            *(f"{_REGNET}.{key}" for key in ("depth=27", "w_0=1744", "w_a=620.83", "w_m=2.52", "group_width=1010")),
            "config.MODEL.HEAD.PARAMS=[[swav_head,{dims:[28280,8192,256],num_clusters:[3000]}]]",
            "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16",
            *_AMP,
        ],
        "a100x8",
        "16 images a rank in two crops of 160 and four of 96 pixels, bfloat16 autocast, LARC.",
        "SEER trained it on 496 A100 of 40 GB with FSDP and recomputation, eight GPUs being the least that hold it "
        "([Goyal et al. 2022](https://arxiv.org/abs/2202.08360)).",
    ),
    "vit_7b": Published(
        "ViT-7B with DINOv2's losses, teacher and multi-crop",
        "pretrain/dinov2/vit_large",
        [
            f"{_VIT}.NUM_LAYERS=40",
            f"{_VIT}.HIDDEN_DIM=4096",
            f"{_VIT}.NUM_HEADS=32",
            f"{_VIT}.MLP_DIM=12288",
            f"{_VIT}.NUM_REGISTERS=4",
            f"{_VIT}.IMAGE_SIZE=256",
            "config.MODEL.HEAD.PARAMS=[[ibot_head,{dims:[4096,8192,8192,512],num_clusters:[262144]}]]",
            "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16",
            "config.DATA.TRAIN.TRANSFORMS=[{name:ImgPilToMultiCrop,total_num_crops:10,size_crops:[256,112],"
            "num_crops:[2,8],crop_scales:[[0.32,1.0],[0.05,0.32]]},{name:ToTensor},"
            "{name:Normalize,mean:[0.485,0.456,0.406],std:[0.229,0.224,0.225]}]",
            *_AMP,
        ],
        "h100x8",
        "16 images a rank in two crops of 256 and eight of 112 pixels, bfloat16 autocast, AdamW, a teacher of the same "
        "size; an MLP of 12,288 has the parameters of DINOv3's SwiGLU of 8,192.",
        "DINOv3 trained a ViT-7B (6.7 B parameters, 40 blocks of 4,096) on 256 H100, 4,096 images a step: 16 a GPU "
        "([Siméoni et al. 2025](https://arxiv.org/abs/2508.10104)).",
    ),
}


def planned(model: Published, ranks: int) -> tuple[dict[str, Any], float, int]:
    """What ``plan --json`` says, processor seconds, largest resident bytes."""
    words = [model.recipe, "--ranks", str(ranks), "--gpus", "--machine", model.machine, "--images", "1000000000"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "vissl_zero.cli", "plan", *words, "--json", *model.overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode == 2 or not done.stdout:
        raise SystemExit(done.stderr)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds, after.ru_maxrss * 1024


def row(found: dict[str, Any], ranks: int) -> str:
    """A line of the table: the chosen plan, or the smallest where none fits."""
    known = [one for one in found["candidates"] if one["peak_bytes"] is not None]
    chosen = next((one for one in known if one["chosen"]), None)
    shown = chosen or min(known, key=lambda one: one["peak_bytes"])
    plain = next(one for one in known if one["plan"] == "level 0")
    peak, whole = (one["peak_bytes"] / 2**30 for one in (shown, plain))
    verdict = "yes" if chosen else "no"
    time = "?" if shown["relative_time"] is None else f"{shown['relative_time']:.2f}"
    return f"| {ranks:,} | {whole:,.0f} | {shown['plan']} | {peak:,.1f} | {verdict} | {time} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers, with commas")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--no-page", action="store_true", help="leave docs/scale.md as it is")
    given = parser.parse_args()
    lines = [
        "# Internet scale on paper",
        "",
        "Forecasts of the largest models of the field, made without a GPU (`python benchmarks/plan_scale.py`, "
        f"{date.today():%-d %B %Y}). Nothing on this page has been run. How they are made, and how far such forecasts "
        "were off where they could be measured: [plan.md](plan.md). The network's own buffers (nccl's) and what an "
        "allocator leaves unused are not counted.",
        "",
    ]
    slowest: dict[str, tuple[float, int]] = {}
    for name in given.models.split(","):
        model = MODELS[name]
        rows = []
        for ranks in map(int, given.ranks.split(",")):
            found, seconds, memory = planned(model, ranks)
            rows.append(row(found, ranks))
            slowest[model.title] = max(slowest.get(model.title, (0.0, 0)), (seconds, memory))
            print(f"{name} {ranks}: {seconds:.1f} s of processor time, {memory / 2**30:.2f} GiB", flush=True)
            print(rows[-1], flush=True)
        budget, machine = found["budget"], found["machine"]
        lines += [
            f"## {model.title}",
            "",
            f"{model.what} {model.said}",
            "",
            f"On {machine['name']}: {budget['memory_bytes'] / 2**30:.1f} GiB a rank.",
            "",
            "| ranks | level 0, GiB | cheapest that fits, or the smallest | GiB a rank | fits | time, level 0 = 1 |",
            "| ---: | ---: | --- | ---: | --- | ---: |",
            *rows,
            "",
        ]
    lines += ["## What planning costs", ""]
    for title, (seconds, memory) in slowest.items():
        lines.append(f"- {title}: at most {seconds:.0f} s of processor time and {memory / 2**30:.1f} GiB.")
    if not given.no_page:
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
