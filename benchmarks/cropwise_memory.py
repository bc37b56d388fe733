"""Measure memory and time of a step whose crops go through the model in passes (``TRAINER.CROP_PASSES``).

    python benchmarks/cropwise_memory.py [--batch 32] [--passes 1 12] [--rounds 1] [--write]

The recipe is ``pretrain/dino/vit_small``: a ViT-S/16, 2 crops of 224 and 10 of 96 pixels, 65,536 prototypes, in float32
on one core. Each number of passes trains in a process of its own, and rounds alternate. Counted is the second step: its
peak of resident memory (Linux sets it back on demand) less what the process holds between steps, with the gradients
that both kinds of step end with taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MIB = 2**20
_TABLE = Path(__file__).with_name("cropwise_memory.md")
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": "0"}
_STEPS = 2
_NOTES = [
    "The plain step peaks before the gradients of the weights are there, and the step in passes after: with them left",
    "in, the share is 22.0 %. In passes the forward pass of the student runs once more, without graph, a third of the",
    "computation; the rest of the time is what each pass does once: the norms of 65,536 prototypes of 256 numbers, and",
    "the sum of all gradients. With 8 images a step that counts for more than the images.",
]


def step(batch: int, passes: int, folder: str) -> dict[str, float]:
    """Train some steps; return bytes and CPU seconds of the last, and the forecast of its activations."""
    import torch

    from vissl_zero.config.compose import compose
    from vissl_zero.engine.build import build_run
    from vissl_zero.engine.hook import Hook, Run, Step
    from vissl_zero.engine.loop import train
    from vissl_zero.planner.dry_run import dry_run
    from vissl_zero.resolve.host import Host
    from vissl_zero.resolve.resolve import resolve
    from vissl_zero.sharding.memory import peak_bytes, resident_bytes

    torch.set_num_threads(1)
    words = [
        *("config.DATA.TRAIN.DATA_SOURCES=[synthetic]", "config.DATA.TRAIN.DATA_PATHS=[]"),
        *("config.DATA.TEST.DATA_SOURCES=[]", "config.DATA.TEST.DATA_PATHS=[]", "config.DATA.NUM_DATALOADER_WORKERS=0"),
        *("config.MACHINE.DEVICE=cpu", "config.DISTRIBUTED.NUM_PROC_PER_NODE=1", "config.DISTRIBUTED.NUM_NODES=1"),
        *("config.NEAREST_NEIGHBOR.USE_KNN=false", f"config.DATA.TRAIN.DATA_LIMIT={batch * _STEPS}"),
        *(f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={batch}", f"config.TRAINER.MAX_STEPS={_STEPS}"),
        *(f"config.TRAINER.CROP_PASSES={passes}", "config.ZERO.LEVEL=0"),
    ]
    recipe = "pretrain/dino/vit_small"
    plan = resolve(compose(recipe, words).run, folder, recipe=recipe, host=Host(num_cores=1))
    memory = dry_run(plan).forecast.step
    assert memory is not None
    found: dict[str, float] = {"forecast": memory.by_kind["activations"]}

    class Watch(Hook):
        """Sets the peak back before the last step."""

        def on_step(self, run: Run, step: Step) -> None:
            if run.step == _STEPS - 1:
                Path("/proc/self/clear_refs").write_text("5")
                found["before"], found["start"] = resident_bytes() or 0, time.process_time()
            elif run.step == _STEPS:
                found["peak"], found["seconds"] = peak_bytes(run.device), time.process_time() - found["start"]

    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [Watch()])
    found["gradients"] = sum(p.nbytes for p in run.sharded.model.parameters() if p.requires_grad)
    found["activations"] = found["peak"] - found["before"] - found["gradients"]
    return found


def measure(batch: int, passes: int) -> dict[str, float]:
    """``step`` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "step", str(batch), str(passes), folder]
        process = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | _MALLOC | {"OMP_NUM_THREADS": "1"}
        )
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def table(batch: int, found: dict[int, list[dict[str, float]]]) -> list[str]:
    """Write the lines of the page."""

    def middle(passes: int, key: str) -> float:
        return statistics.median(row[key] for row in found[passes])

    plain = min(found)
    lines = [
        "# Crops in passes",
        f"`python benchmarks/cropwise_memory.py --batch {batch} --passes {' '.join(map(str, found))} --rounds "
        f"{len(found[plain])}`, {datetime.now(UTC):%Y-%m-%d}, a share of 2 cores beside other work: "
        "`pretrain/dino/vit_small` (2 crops of 224 and 10 of 96 pixels, 65,536 prototypes), level 0, one core, "
        f"float32. Activations are the peak of a step less what stands before it "
        "and the gradients of the weights.",
        "",
        "| `CROP_PASSES` | activations | share | forecast | CPU seconds a step | ratio of the pairs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for passes, rows in found.items():
        share = middle(passes, "activations") / middle(plain, "activations")
        ratios = sorted(row["seconds"] / one["seconds"] for row, one in zip(rows, found[plain], strict=True))
        lines.append(
            f"| {passes} | {middle(passes, 'activations') / MIB:,.0f} MiB | {share:.1%} | "
            f"{middle(passes, 'forecast') / MIB:,.0f} MiB | {middle(passes, 'seconds'):.1f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    return [*lines, "", *_NOTES]


def main(words: Sequence[str]) -> None:
    """See the module."""
    if words[:1] == ["step"]:
        batch, passes, folder = words[1:]
        print(json.dumps(step(int(batch), int(passes), folder)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="images of a step")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 12])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write {_TABLE.name}")
    options = parser.parse_args(words)
    found: dict[int, list[dict[str, float]]] = {passes: [] for passes in options.passes}
    for _ in range(options.rounds):
        for passes, rows in found.items():
            rows.append(measure(options.batch, passes))
            shown: dict[str, Any] = {
                key: round(value / MIB) if value > MIB else value for key, value in rows[-1].items()
            }
            print(passes, shown, flush=True)
    lines = table(options.batch, found)
    print("\n".join(lines))
    if options.write:
        _TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
