"""What the first hour on a GPU is for: phases in order of value, each bounded in time, and a table of what they found.

    python tools/gpu_hour.py [--minutes 28] [--json gpu_hour.json] [--phases tests speed]
    python tools/gpu_hour.py --rehearse

Every cell is a command in a process of its own. It is written to the JSON file as soon as it ends, so that a machine
that is taken away loses at most one. A second call leaves out cells that the file has. ``--rehearse`` runs a small cell
of each phase on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

TABLE = Path("benchmarks/gpu_hour.md")  # beside gpu.md, which is written by hand
_PYTEST = ("-m", "pytest", "-q", "-p", "no:randomly", "-n", str(max(1, (os.cpu_count() or 1) * 3 // 4)))
_STEP, _FORECAST = "benchmarks/gpu_step.py", "benchmarks/gpu_forecast.py"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Cell:
    """One thing to run.

    Attributes:
        phase, name: what it is for, and what it is.
        words: of the Python interpreter's command line.
        minutes: most that it may take; the sum is printed first.
        rehearsal: the words on the CPU; empty: not rehearsed.
        device: of the parity matrix (``VISSL_ZERO_TEST_DEVICE``).
        has_rows: whether it writes rows (``--json``); else its last line is the result.
    """

    phase: str
    name: str
    words: tuple[str, ...]
    minutes: float
    rehearsal: tuple[str, ...] = ()
    device: str = "cpu"
    has_rows: bool = True


def cells(cifar: Path | None = None) -> list[Cell]:
    """List all, the most valuable first; with a folder of CIFAR-10 also what trains on it."""
    matrix = "tests/dist/test_parity.py"
    on_host = ("level 3", *(f"level 3, optimizer on the CPU{end}" for end in ("", ", copied after the update")))
    packed = (*_TORCHRUN, "1", "benchmarks/packed_crops.py")
    level_3 = ("level 3", "level 3, compiled", "level 3, float8", "level 3, float8, compiled")
    compiled = ("fully_shard by hand", "fully_shard by hand, compiled", *level_3)
    return [
        Cell("tests", "tests/gpu", (*_PYTEST, "tests/gpu"), 6.0, (*_PYTEST[:-2], "tests/gpu"), has_rows=False),
        Cell(
            *("tests", f"{matrix}, one rank", (*_PYTEST, matrix, "-m", "slow", "-k", "1ranks")),
            minutes=3.0,
            device="cuda",
            has_rows=False,
        ),
        Cell(
            *("ranks", "two on one GPU, over gloo", (*_TORCHRUN, "2", "benchmarks/gpu_ranks.py")),
            minutes=1.0,
            rehearsal=(*_TORCHRUN, "2", "benchmarks/gpu_ranks.py", "--levels", "3"),
        ),
        Cell("speed", "ViT-B", (_STEP, "--models", "vit_b"), 1.5, (_STEP, "--models", "tiny", "--rounds", "2")),
        Cell("speed", "ViT-L, RegNetY-16GF, ViT-S", (_STEP, "--models", "vit_l", "regnet_y_16gf", "vit_s"), 3.0),
        Cell("speed", "ViT-B, compiled", (_STEP, "--models", "vit_b", "--systems", *compiled), 4.0),
        Cell(
            *("input", "SwAV's views of 256 images", (_STEP, "--models", "--input", "256")),
            minutes=2.0,
            rehearsal=(_STEP, "--models", "--input", "4", "--rounds", "2"),
        ),
        *(
            Cell("offload", f"{size:g} billion parameters", (_STEP, "--models", "--offload", f"{size:g}"), 3.0)
            for size in (0.8, 3.2, 6.4)  # 16 bytes a parameter: the last takes 102 of 128 GB
        ),
        Cell(
            *("offload", "ViT-L, copies beside the update", (_STEP, "--models", "vit_l", "--systems", *on_host)),
            minutes=1.5,
            rehearsal=(_STEP, "--models", "tiny", "--rounds", "2", "--systems", *on_host[1:]),
        ),
        Cell(
            *("packing", "DINO, ViT-S", (*packed, "--device", "gpu", "--depth", "12", "--batch", "32")),
            minutes=2.0,
            rehearsal=(*packed, "--width", "64", "--depth", "1", "--sides", "32", "16", "--rounds", "2"),
            has_rows=False,
        ),
        Cell(
            *("forecast", "20 plans", (_FORECAST,)),
            minutes=4.0,
            rehearsal=(_FORECAST, "--models", "tiny", "--plans", "level 0", "level 2", "level 3"),
        ),
        *([_on_cifar(cifar)] if cifar is not None else []),
    ]


def _on_cifar(folder: Path) -> Cell:
    """SimCLR as lightly's benchmark has it, with a schedule of fewer epochs."""
    words = ("benchmarks/reference.py", "simclr", "--data", str(folder), "--epochs")
    small = ("config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8", "config.DATA.TEST.BATCHSIZE_PER_REPLICA=8")
    rehearsal = (*words, "1", "--page", "{folder}/reference.md", *small)
    return Cell("cifar", "SimCLR, 10 epochs", (*words, "10"), minutes=8.0, rehearsal=rehearsal, has_rows=False)


def main() -> int:
    """Run what is left, in order; the exit code is 1 where a cell has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=28.0, help="for all; a cell that does not fit is left out")
    parser.add_argument("--json", type=Path, default=Path("gpu_hour.json"))
    parser.add_argument("--table", type=Path, help=f"{TABLE}, unless rehearsed")
    parser.add_argument("--phases", nargs="+", choices=sorted({cell.phase for cell in cells(Path())}))
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10 with train/ and test/, each a folder a class")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    chosen = [cell for cell in cells(given.cifar) if cell.rehearsal or not given.rehearse]
    if given.cifar is None:
        print("cifar: left out. Give --cifar a folder with train/ and test/.")
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
        done.append(run(cell, min(60 * cell.minutes, left_s), given.rehearse))
        _write(given.json, done)
        print(json.dumps(done[-1]), flush=True)
    table = given.table or (None if given.rehearse else TABLE)
    if table is not None:
        table.write_text(as_table(done))
    return int(any("error" in row for row in done))


def run(cell: Cell, limit_s: float, is_rehearsal: bool) -> dict[str, Any]:
    """Return what one cell has found: the last line of tests, the rows of a benchmark, or its error."""
    started, row = time.monotonic(), {"phase": cell.phase, "name": cell.name, "card": _card()}
    words = cell.rehearsal if is_rehearsal else cell.words
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, *words, *(("--json", str(rows)) if cell.has_rows else ())]
        command = [word.replace("{folder}", folder) for word in command]
        environment = os.environ | {"VISSL_ZERO_TEST_DEVICE": cell.device, "PYTHONPATH": os.getcwd()}  # noqa: PTH109
        output = Path(folder) / "output"
        with output.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
                row["seconds"] = round(time.monotonic() - started, 1)
                if code not in (0, *([5] if cell.phase == "tests" else [])):  # 5: no tests were left to run
                    row["error"] = output.read_text()[-600:]
            except subprocess.TimeoutExpired:
                row["error"] = f"not done after {limit_s:.0f} s"
            finally:
                with suppress(ProcessLookupError):  # none is left
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks too, which would keep memory of the card
                process.wait()
        if rows.exists():  # of a benchmark that was cut off, those of the models before
            row["rows"] = json.loads(rows.read_text())
        elif "error" not in row:
            row["result"] = output.read_text().strip().splitlines()[-1]
    return row


def as_table(cells: list[dict[str, Any]]) -> str:
    """Write the page of what the cells have found."""
    cards = ", ".join(sorted({cell["card"] for cell in cells}))
    lines = [f"# On a GPU\n\n`python tools/gpu_hour.py` on {cards}, {date.today():%Y-%m-%d}.\n"]
    lines += ["| phase | cell | s | result |", "| --- | --- | --- | --- |"]
    for cell in cells:
        found = cell.get("error", cell.get("result", f"{len(cell.get('rows', []))} rows below"))
        short = found.replace("\n", " ").replace("|", "/")[-120:]
        lines.append(f"| {cell['phase']} | {cell['name']} | {cell.get('seconds', '')} | {short} |")
    keys = (
        "ms",
        "images_per_s",
        "over DDP by hand",
        "over fully_shard by hand",
        "idle",
        "forecast over measured",
        "distance",
    )
    lines += ["", f"| model | system | {' | '.join(keys)} | peak GiB |", "| --- " * (len(keys) + 3) + "|"]
    for row in (row for cell in cells for row in cell.get("rows", [])):
        figures = " | ".join(str(row.get(key, "")) for key in keys)
        lines.append(f"| {row['model']} | {row['system']} | {figures} | {row['peak_bytes'] / 2**30:.2f} |")
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
