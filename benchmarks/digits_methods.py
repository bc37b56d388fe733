"""Train every ``digits/<method>`` recipe to its end and note its kNN figures and time: what ``docs/methods.md`` shows.

Usage: python benchmarks/digits_methods.py [--processes N] [method ...]

Writes ``vissl_zero/methods/figures.json`` (methods that are not named keep their figures) and the page's table. With
another number of processes the batch of all of them stays that of the recipe. One process is this one, with one thread
and ZeRO level 0: the model is the same but for rounding, which moved BYOL by 0.9 points, at little more than half of
the processor's time. Seconds are of the whole command, evaluations included, and of the run alone with one process;
the processor's are those of all processes together.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from one_process import be_a_rank, train_here

from vissl_zero.config.compose import compose
from vissl_zero.methods.spec import FIGURES, PAGE, with_table
from vissl_zero.registry import METHODS
from vissl_zero.resolve.resolve import resolve


def main() -> None:
    """Run what is asked for, one after the other, and write after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("methods", nargs="*", choices=[[], *METHODS.builtin()], help="all, if none is named")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.processes == 1:
        be_a_rank()
    for method in args.methods or METHODS.builtin():
        figures = _train(METHODS.get(method).build().recipe, args.processes)
        found: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        command = f"python benchmarks/digits_methods.py --processes {args.processes} {method}"
        found[method] = found.get(method, {}) | figures | {"date": f"{datetime.now(UTC):%Y-%m-%d}", "command": command}
        FIGURES.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        print(method, figures, flush=True)
    PAGE.write_text(with_table(PAGE.read_text()))


def _train(recipe: str, processes: int) -> dict[str, float]:
    """Figures of ``_reached``, in percent; seconds by the clock and of the processor."""
    cfg = compose(recipe).run
    batch = cfg.DATA.TRAIN.BATCHSIZE_PER_REPLICA * int(cfg.DISTRIBUTED.NUM_PROC_PER_NODE) // processes
    changes = [f"config.DISTRIBUTED.NUM_PROC_PER_NODE={processes}", f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={batch}"]
    if processes == 1:
        changes.append("config.ZERO.LEVEL=0")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        began, used = time.perf_counter(), _processor_seconds()
        if processes == 1:
            train_here(resolve(compose(recipe, changes).run, folder, recipe=recipe))
        else:
            command = [sys.executable, "-m", "vissl_zero.cli", f"config={recipe}", f"config.CHECKPOINT.DIR={folder}"]
            subprocess.run([*command, *changes], check=True, stdout=subprocess.DEVNULL)
        times = {"seconds": time.perf_counter() - began, "processor_seconds": _processor_seconds() - used}
        summary = json.loads((folder / "summary.json").read_text())
    return _reached(summary) | {name: round(seconds, 1) for name, seconds in times.items()}


def _reached(summary: dict[str, Any]) -> dict[str, float]:
    """Read kNN top-1 before and after, and of raw pixels, or of pixels with classes mIoU before and after."""
    if "miou" in summary:
        shares = {"miou_untrained": summary["miou_by_step"][0][1], "miou_trained": summary["miou"]}
    else:
        names = (("untrained", "before"), ("trained", "after"), ("raw_pixels", "raw_pixels"))
        shares = {name: summary[f"knn_top1_{key}"] for name, key in names}
    return {name: round(100 * share, 1) for name, share in shares.items()}


def _processor_seconds() -> float:
    """Of this process, of all that have been waited for, and of theirs."""
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in both)


if __name__ == "__main__":
    main()
