"""What the first hour on a GPU is for: phases in order of value, each bounded in time, and a table of what they found.

    python tools/gpu_hour.py [--minutes 28] [--json gpu_hour.json] [--phases tests exactness]
    python tools/gpu_hour.py --rehearse

Every cell is written to the JSON file as soon as it ends, so that a machine that is taken away loses at most one. A
second call leaves out cells that the file has. ``--rehearse`` runs a few cells of each phase on the CPU, smaller.
Runs are of ``vissl-zero`` in processes of their own: what fails is noted, and the next one begins.
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
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

DIGITS = ("config=quickstart/swav_digits", "config.NEAREST_NEIGHBOR.USE_KNN=false")
AMP = "config.MODEL.AMP_PARAMS.USE_AMP=true"
TABLE = Path("benchmarks/gpu.md")


@dataclass(frozen=True)
class Cell:
    """One thing to run.

    Attributes:
        phase, name: what it is for, and what it is.
        arguments: of ``vissl-zero``; for tests, of pytest.
        minutes: most that it may take; the sum is printed first.
        is_rehearsed: it is run on the CPU too.
        tolerance: of its losses beside those of level 0 in float64; None: not compared.
    """

    phase: str
    name: str
    arguments: tuple[str, ...]
    minutes: float
    is_rehearsed: bool = False
    tolerance: float | None = None


def _exact(name: str, *arguments: str, tolerance: float = 1e-8, is_rehearsed: bool = False) -> Cell:
    steps = ("config.TRAINER.MAX_STEPS=4", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16")
    return Cell("exactness", name, (*DIGITS, *steps, *arguments), 0.7, is_rehearsed, tolerance)


def _vit(name: str, width: int, depth: int, *arguments: str, phase: str = "speed", batch: int = 32) -> Cell:
    trunk = (
        f"{{IMAGE_SIZE: 224, PATCH_SIZE: 16, NUM_LAYERS: {depth}, NUM_HEADS: {width // 64}, HIDDEN_DIM: {width}, "
        f"MLP_DIM: {4 * width}}}"
    )
    made_up = ("config.DATA.TRAIN.DATA_SOURCES=[synthetic]", "config.DATA.TRAIN.DATA_LIMIT=2048")
    model = (
        "config.MODEL.TRUNK.NAME=vision_transformer",
        f"config.MODEL.TRUNK.VISION_TRANSFORMERS={trunk}",
        f"config.MODEL.HEAD.PARAMS=[[swav_head,{{dims: [{width}, 128], num_clusters: [300]}}]]",
    )
    size = (f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={batch}", "config.TRAINER.MAX_STEPS=12")
    return Cell(phase, name, (*DIGITS, *made_up, *model, *size, *arguments), 1.2)


def cells() -> list[Cell]:
    """All, the most valuable first."""
    double = "config.TRAINER.DTYPE=float64"
    level = "config.ZERO.LEVEL={}".format
    found = [Cell("tests", "tests/gpu", ("tests/gpu", "-q", "-p", "no:randomly"), 6.0, True)]
    found.append(_exact("level 0, float64", level(0), double, is_rehearsed=True))
    found += [_exact(f"level {n}, float64", level(n), double, is_rehearsed=n == 3) for n in (1, 2, 3)]
    fairscale = "config.ZERO.ENGINE=fairscale"
    found += [_exact(f"fairscale {n}, float64", level(n), double, fairscale) for n in (1, 2, 3)]
    found += [
        _exact(f"level {n}, {dtype}", level(n), AMP, f"config.MODEL.AMP_PARAMS.DTYPE={dtype}", tolerance=0.1)
        for n in (0, 3)
        for dtype in ("bfloat16", "float16")
    ]
    for tier in ("cpu", "nvme"):
        device, path = "config.ZERO.{}.device=" + tier, "config.ZERO.{}.nvme_path=" + tempfile.gettempdir()
        kinds = ("offload_param_config", "offload_optimizer_config")
        keys = [form.format(kind) for kind in kinds for form in (device, *([path] if tier == "nvme" else []))]
        found.append(_exact(f"level 3, {tier}", level(3), double, *keys))
    for name, width, depth in (("ViT-S", 384, 12), ("ViT-B", 768, 12), ("ViT-L", 1024, 24)):
        found += [_vit(f"{name}, level {n}, bfloat16", width, depth, level(n), AMP) for n in (0, 3)]
    found.append(_vit("ViT-B, level 3, compiled", 768, 12, level(3), AMP, "config.ZERO.compile=inductor"))
    host = [f"config.ZERO.{kind}.device=cpu" for kind in ("offload_param_config", "offload_optimizer_config")]
    for width, depth in ((2048, 32), (4096, 32), (5120, 40)):
        name = f"{12 * width**2 * depth / 1e9:.1f} billion parameters, offloaded to the CPU"
        found.append(_vit(name, width, depth, level(3), AMP, *host, phase="offload", batch=8))
    return found


def main() -> int:
    """Run what is left, in order; the exit code is 1 where a cell has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=28.0, help="for all; a cell that does not fit is left out")
    parser.add_argument("--json", type=Path, default=Path("gpu_hour.json"))
    parser.add_argument("--table", type=Path, help=f"{TABLE}, unless rehearsed")
    parser.add_argument("--phases", nargs="+", choices=sorted({cell.phase for cell in cells()}))
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    chosen = [cell for cell in cells() if cell.is_rehearsed or not given.rehearse]
    chosen = [cell for cell in chosen if not given.phases or cell.phase in given.phases]
    for phase in dict.fromkeys(cell.phase for cell in chosen):
        own = [cell.minutes for cell in chosen if cell.phase == phase]
        print(f"{phase}: {len(own)} cells, at most {sum(own):.0f} minutes")
    print(f"Stops after {given.minutes:g} minutes; {given.json} keeps what is done.", flush=True)
    end, done = time.monotonic() + 60 * given.minutes, _read(given.json)
    for cell in chosen:
        left_s = end - time.monotonic()
        if (cell.phase, cell.name) in {(row["phase"], row["name"]) for row in done} or left_s < 20:
            continue
        limit_s = 60 * cell.minutes * (3 if given.rehearse else 1)
        done.append(run(cell, min(limit_s, left_s), given.rehearse))
        _write(given.json, done)
        print(json.dumps(done[-1]), flush=True)
    table = given.table or (None if given.rehearse else TABLE)
    if table is not None:
        table.write_text(as_table(done))
    return int(any("error" in row for row in done))


def run(cell: Cell, limit_s: float, is_rehearsal: bool) -> dict[str, Any]:
    """Return what one cell has found: its losses, speed and memory, or its error."""
    started, row = time.monotonic(), {"phase": cell.phase, "name": cell.name, "card": _card()}
    with tempfile.TemporaryDirectory() as folder:
        if cell.phase == "tests":
            command = [sys.executable, "-m", "pytest", *cell.arguments]
        else:
            device = f"config.MACHINE.DEVICE={'cpu' if is_rehearsal else 'gpu'}"
            place = ("config.DISTRIBUTED.NUM_PROC_PER_NODE=1", f"config.CHECKPOINT.DIR={folder}/run")
            command = [sys.executable, "-m", "vissl_zero.cli", *cell.arguments, device, *place]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
            row["seconds"] = round(time.monotonic() - started, 1)
            if done.returncode not in (0, *([5] if cell.phase == "tests" else [])):  # 5: no tests were left to run
                return row | {"error": (done.stdout + done.stderr)[-600:]}
        except subprocess.TimeoutExpired:
            return row | {"error": f"not done after {limit_s:.0f} s"}
        if cell.phase == "tests":
            return row | {"result": done.stdout.strip().splitlines()[-1]}
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
    speeds = [step["images_per_s"] for step in steps[2:]] or [steps[-1]["images_per_s"]]
    found = {"losses": [step["loss"] for step in steps], "images_per_s": round(statistics.median(speeds), 1)}
    return row | found | {"peak_bytes": steps[-1]["bytes"]["peak"]} | {"tolerance": cell.tolerance}


def as_table(rows: list[dict[str, Any]]) -> str:
    """``benchmarks/gpu.md``."""
    cards = ", ".join(sorted({row["card"] for row in rows}))
    lines = [f"# On a GPU\n\n`python tools/gpu_hour.py` on {cards}, {date.today():%Y-%m-%d}.\n"]
    lines += ["| phase | cell | s | images/s | peak GiB | result |", "| --- | --- | --- | --- | --- | --- |"]
    exact = next((row["losses"] for row in rows if row["name"] == "level 0, float64" and "losses" in row), None)
    for row in rows:
        result = row.get("error", row.get("result", "trained")).replace("\n", " ").replace("|", "/")[-120:]
        if row.get("tolerance") is not None and "losses" in row and exact:
            apart = max(abs(a - b) for a, b in zip(row["losses"], exact, strict=True))
            result = f"losses {apart:.1e} apart" + ("" if apart <= row["tolerance"] else f", over {row['tolerance']:g}")
        peak = f"{row['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in row else ""
        lines.append(
            f"| {row['phase']} | {row['name']} | {row.get('seconds', '')} | {row.get('images_per_s', '')} | {peak} | "
            f"{result} |"
        )
    return "\n".join(lines) + "\n"


def _card() -> str:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found = ""
    return found.splitlines()[0] if found else "a CPU"


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(partial, path)  # noqa: PTH105 - one call that either happens or not


if __name__ == "__main__":
    sys.exit(main())
