"""Plans of two published models at 8 to 4,096 ranks on described machines; writes docs/scale.md.

    python benchmarks/plan_scale.py [--ranks 8,512] [--machines h100x8] [--no-page]

Each plan is one call of ``vissl-zero plan``: no GPU, no images. What planning costs is measured in a process of its
own, at 512 ranks: processor time (import of torch included) and largest resident memory.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from vissl_zero import cli

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
RANKS = (8, 64, 512, 4096)
MACHINES = ("a100x8", "h100x8", "h200x8")
_MEASURED_AT = 512  # ranks
_TENSORS = "{name:ToTensor},{name:Normalize,mean:[0.485,0.456,0.406],std:[0.229,0.224,0.225]}"
_AMP = ["config.MODEL.AMP_PARAMS.USE_AMP=true", "config.MODEL.AMP_PARAMS.DTYPE=bfloat16"]


@dataclass(frozen=True)
class Published:
    """A model, and what its authors used.

    Attributes:
        title: for people.
        recipe: and the overrides that make it this model.
        what: a sentence on what is planned.
        said: a sentence on what was published.
    """

    title: str
    recipe: str
    overrides: list[str]
    what: str
    said: str


_SEER = "https://github.com/facebookresearch/vissl/blob/main/projects/SEER"
_DINOV3 = "https://github.com/facebookresearch/dinov3/blob/main/dinov3/configs/train/dinov3_vit7b16_pretrain.yaml"
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
            "config.DATA.TRAIN.TRANSFORMS=[{name:ImgPilToMultiCrop,total_num_crops:6,size_crops:[160,96],"
            f"num_crops:[2,4],crop_scales:[[0.08,1.0],[0.05,0.14]]}},{_TENSORS}]",
            *_AMP,
        ],
        "16 images a rank in crops of 2 x 160 and 4 x 96 pixels, bfloat16 autocast, LARC with momentum.",
        "SEER trained it on 496 A100 of 40 GB, 16 images each (7,936 a step) in these crops, with FSDP over all of "
        "them and mixed precision; eight GPUs are needed to hold the model "
        f"([Goyal et al. 2022](https://arxiv.org/abs/2202.08360); [VISSL's notes]({_SEER}/README.md) and "
        f"[model card]({_SEER}/MODEL_DOCUMENTATION.md)). Its memory a GPU was not published.",
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
            f"{_VIT}.QKV_BIAS=false",
            f"{_VIT}.DROP_PATH_RATE=0.4",
            "config.MODEL.HEAD.PARAMS=[[ibot_head,{dims:[4096,8192,8192,512],num_clusters:[262144,98304]}]]",
            "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16",
            "config.DATA.TRAIN.TRANSFORMS=[{name:ImgPilToMultiCrop,total_num_crops:10,size_crops:[256,112],"
            f"num_crops:[2,8],crop_scales:[[0.32,1.0],[0.05,0.32]]}},{_TENSORS}]",
            *_AMP,
        ],
        "16 images a rank in crops of 2 x 256 and 8 x 112 pixels, bfloat16 autocast, AdamW, a teacher of the same "
        "size. It differs from DINOv3: an MLP of 12,288 with GELU stands for its SwiGLU of 8,192 (as many parameters; "
        "what they keep for the backward pass is not the same), and learned positions for rotary ones. Its Gram loss "
        "and fp8 are left out.",
        "DINOv3 trained a ViT of 6.7 B parameters with 16 images a GPU, 4,096 a step, in these crops, with parameters "
        "in bfloat16, fp8 in the blocks, FSDP that reshards after each forward pass, and recomputation of a part "
        f"([Siméoni et al. 2025](https://arxiv.org/abs/2508.10104); [its configuration]({_DINOV3})). Its memory a GPU "
        "was not published.",
    ),
}


def words(model: Published, machine: str, ranks: int) -> list[str]:
    """The command."""
    given = [model.recipe, "--ranks", str(ranks), "--gpus", "--machine", machine, "--images", "1000000000", "--json"]
    return ["plan", *given, *model.overrides]


def planned(model: Published, machine: str, ranks: int) -> dict[str, Any]:
    """What ``plan --json`` says."""
    with redirect_stdout(io.StringIO()) as text:
        code = cli.main(words(model, machine, ranks))
    if code == 2:
        raise SystemExit(f"{model.title} cannot be planned")
    found: dict[str, Any] = json.loads(text.getvalue())
    return found


def cost(model: Published, machine: str) -> tuple[float, int]:
    """Processor seconds of planning, and largest resident bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "vissl_zero.cli", *words(model, machine, _MEASURED_AT)]
    subprocess.run(command, capture_output=True, check=False, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss * 1024


def row(found: dict[str, Any], machine: str, ranks: int) -> str:
    """A line of the table: the chosen plan, or the smallest where none fits."""
    known = [one for one in found["candidates"] if one["peak_bytes"] is not None]
    chosen = next((one for one in known if one["chosen"]), None)
    shown = chosen or min(known, key=lambda one: one["peak_bytes"])
    plain = next(one for one in known if one["plan"] == "level 0")
    peak, whole, host = (size / 2**30 for size in (shown["peak_bytes"], plain["peak_bytes"], shown["host_bytes"]))
    verdict = "yes" if chosen else f"no: {shown['excess_bytes'] / 2**30:,.1f} too much"
    time = "?" if shown["relative_time"] is None else f"{shown['relative_time']:.2f}"
    return (
        f"| {machine} | {ranks:,} | {whole:,.0f} | {shown['plan']} | {peak:,.1f} | {host:,.1f} | {verdict} | {time} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers, with commas")
    parser.add_argument("--machines", default=",".join(MACHINES), help=f"of {', '.join(MACHINES)}")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--no-page", action="store_true", help="leave docs/scale.md as it is")
    given = parser.parse_args()
    machines = given.machines.split(",")
    lines = [
        "# Internet scale on paper",
        "",
        "Forecasts for the largest models of the field, made without a GPU (`python benchmarks/plan_scale.py`, "
        f"{date.today():%-d %B %Y}). Nothing on this page has been run. How forecasts are made, and how far they were "
        "off where they could be measured: [plan.md](plan.md). The network's own buffers (nccl's) and what an "
        "allocator leaves unused are not counted.",
        "",
        "Each row is the cheapest plan that fits, or the smallest of all where none does. Time is that of a step, that "
        "of level 0 on the same machine and ranks being 1: it ranks plans and promises no seconds.",
        "At 4,096 ranks a rank may hold more than at 512: the shards of a parameter with fewer rows than ranks are "
        "padded, and so is the parameter while it is gathered.",
        "",
    ]
    costs = []
    for name in given.models.split(","):
        model = MODELS[name]
        budgets, rows = {}, []
        for machine in machines:
            for ranks in map(int, given.ranks.split(",")):
                found = planned(model, machine, ranks)
                budgets[machine] = f"{found['budget']['memory_bytes'] / 2**30:.1f} on {machine}"
                rows.append(row(found, machine, ranks))
                print(rows[-1], flush=True)
        seconds, memory = cost(model, machines[0])
        costs.append(f"- {model.title}: {seconds:.1f} s of processor time and {memory / 2**30:.2f} GiB.")
        print(costs[-1], flush=True)
        lines += [
            f"## {model.title}",
            "",
            f"**Planned**: {model.what}",
            "",
            f"**Published**: {model.said}",
            "",
            f"GiB that a rank may use: {', '.join(budgets.values())}.",
            "",
            "| machine | ranks | level 0, GiB | plan | GiB a rank | host, GiB a rank | fits | time |",
            "| --- | ---: | ---: | --- | ---: | ---: | --- | ---: |",
            *rows,
            "",
        ]
    lines += [
        "## What planning costs",
        "",
        f"For {_MEASURED_AT} ranks, on two cores:",
        "",
        *costs,
    ]
    if not given.no_page:
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
