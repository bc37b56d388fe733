"""Train a reference recipe to its end, with kNN after each epoch, and note what it reached beside what is published.

Usage: make reference METHOD=simclr DATA=<folder> [DATASET=imagenette] [EPOCHS=n] [IMAGES=n] [SEED=n] [RUN=<folder>]
       [CHANGES="config.A.B=value ..."]

The folder is CIFAR-10's, with train/ and test/, or Imagenette's, with train/ and val/; each holds a folder of images
for each class. The plan and the estimated time come first. The best epoch counts, as in lightly's benchmark. The row
goes to ``benchmarks/reference.json``, and from there into the table of ``benchmarks/reference.md``; a run that was
changed is a row of its own. Without RUN the run folder is temporary.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vissl_zero.config.compose import compose
from vissl_zero.planner.planning import plan_run
from vissl_zero.reporting.quantity import duration_text
from vissl_zero.resolve.host import this_host

PAGE = Path(__file__).with_suffix(".md")
MARKS = "<!-- table: written by benchmarks/reference.py -->", "<!-- end of the table -->"
# lightly's benchmark, kNN top-1 in percent of a ResNet-18: of 200 epochs with batches of 512, and of 800 with 256.
PUBLISHED = {
    "cifar10": {
        "barlow_twins": 81.9,
        "byol": 86.8,
        "dino": 81.3,
        "moco_v2": 84.7,
        "simclr": 84.8,
        "simsiam": 76.4,
        "swav": 84.2,
    },
    "imagenette": {
        "barlow_twins": 85.2,
        "byol": 88.7,
        "dino": 88.8,
        "moco_v2": 87.4,
        "simclr": 88.9,
        "simsiam": 87.2,
        "swav": 90.2,
    },
}
_TEST = {"cifar10": "test", "imagenette": "val"}  # folder of the test images


def main() -> None:
    """Show the plan, train, and write the row.

    Raises:
        SystemExit: with 2 for wrong input, else with the code of the run.
    """
    args = _arguments()
    recipe = f"reference/{args.dataset}/{args.method}"
    changes = [f"config.OPTIMIZER.num_epochs={args.epochs}"] if args.epochs else []
    changes += [f"config.DATA.TRAIN.DATA_LIMIT={args.images}"] if args.images else []
    changes += args.changes
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"config.DATA.TRAIN.DATA_PATHS=['{args.data / 'train'}']",
            f"config.DATA.TEST.DATA_PATHS=['{args.data / _TEST[args.dataset]}']",
            f"config.SEED_VALUE={args.seed}",
            f"config.CHECKPOINT.DIR={args.run or folder}",
            *changes,
        ]
        _run(recipe, *words, "--dry-run")
        print(f"estimated           {_estimate(recipe, words)}", flush=True)
        began = time.perf_counter()
        _run(recipe, *words)
        hours = (time.perf_counter() - began) / 3600
        reached = _reached(json.loads(Path(args.run or folder, "summary.json").read_text()))
    row = {
        **reached,
        "hours": round(hours, 2),
        "changes": " ".join(change.removeprefix("config.") for change in changes),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": _machine(),
        "seed": args.seed,
    }
    note(args.page, args.dataset, args.method, row)
    published = PUBLISHED[args.dataset][args.method]
    print(f"{recipe}: kNN top-1 {row['top1']} % after epoch {row['epoch']}; published: {published} %", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("method", help=f"one of {', '.join(PUBLISHED['cifar10'])}")
    parser.add_argument("--dataset", choices=PUBLISHED, default="cifar10")
    parser.add_argument("--data", type=Path, required=True, help="folder with the images")
    parser.add_argument("--epochs", type=int, help="fewer than the recipe has")
    parser.add_argument("--images", type=int, help="fewer training images than there are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="keep the run folder there; the same command continues it")
    parser.add_argument("--page", type=Path, default=PAGE, help="page with the table; its figures are beside it")
    parser.add_argument("changes", nargs="*", help="further config.A.B=value")
    args = parser.parse_intermixed_args()
    if args.method not in PUBLISHED[args.dataset]:
        parser.error(f"METHOD must be one of {', '.join(PUBLISHED[args.dataset])}, not {args.method!r}")
    args.data = args.data.absolute()
    for split in ("train", _TEST[args.dataset]):
        if not (args.data / split).is_dir():
            parser.error(
                f"DATA must be a folder with train/ and {_TEST[args.dataset]}/, and {args.data / split} is none"
            )
    return args


def _run(recipe: str, *words: str) -> None:
    command = [sys.executable, "-m", "vissl_zero.cli", f"config={recipe}", *words]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


def _estimate(recipe: str, words: Sequence[str]) -> str:
    """Say how long the steps will take by the planner's forecast, which knows neither the loader nor kNN."""
    planned = plan_run(compose(recipe, words).run, recipe)
    chosen = planned.chosen
    if chosen is None or chosen.forecast.seconds is None:
        return "not known"
    steps = planned.plan.num_epochs * (planned.num_images // planned.plan.global_batch)
    seconds = duration_text(steps * chosen.forecast.seconds)
    return f"{seconds} for {steps:,} steps ({planned.machine.name}), without loading and kNN"


def _reached(summary: Mapping[str, Any]) -> dict[str, float]:
    """Read the best epoch and its top-1 in percent; the first point of the curve is before training."""
    points = summary.get("knn_top1_by_step") or [[0, summary["knn_top1_before"]], [1, summary["knn_top1_after"]]]
    top1s = [top1 for _, top1 in points[1:]]
    return {"top1": round(100 * max(top1s), 1), "epoch": 1 + top1s.index(max(top1s)), "epochs": len(top1s)}


def _machine() -> str:
    host = this_host()
    return f"{host.num_gpus} {torch.cuda.get_device_name()}" if host.num_gpus else f"{host.num_cores} CPU cores"


def note(page: Path, dataset: str, method: str, row: Mapping[str, Any]) -> None:
    """Write a row into the figures beside ``page``, in place of one of the same seed and changes, and the table."""
    figures = page.with_suffix(".json")
    rows: list[dict[str, Any]] = json.loads(figures.read_text()) if figures.exists() else []
    new = {"dataset": dataset, "method": method, **row}
    same = ("dataset", "method", "seed", "changes")
    rows = [old for old in rows if any(old[key] != new[key] for key in same)] + [new]
    rows.sort(key=lambda row: [row[key] for key in same])
    figures.write_text(json.dumps(rows, indent=1) + "\n")
    text = page.read_text() if page.exists() else "\n".join(MARKS)
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    page.write_text(f"{text[:begin]}\n{table(rows)}\n{text[end:]}")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write all recipes, and under each what its runs reached, in Markdown."""
    titles = ("recipe", "published", "ours", "best epoch", "hours", "changes", "date", "machine", "seed")
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for dataset, methods in PUBLISHED.items():
        for method, published in methods.items():
            runs = [row for row in rows if (row["dataset"], row["method"]) == (dataset, method)]
            for cells in map(_cells, runs) if runs else [["not trained", *[""] * 6]]:
                lines.append(f"| `reference/{dataset}/{method}` | {published} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(run: Mapping[str, Any]) -> list[str]:
    changes = f"`{run['changes']}`" if run["changes"] else "none"
    epoch = f"{run['epoch']} of {run['epochs']}"
    return [str(cell) for cell in (run["top1"], epoch, run["hours"], changes, run["date"], run["machine"], run["seed"])]


if __name__ == "__main__":
    main()
