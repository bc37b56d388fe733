"""The scoreboard of VISSL's own recipes: how many are accepted unmodified, and what blocks the others.

    python benchmarks/vissl_recipes.py <checkout of facebookresearch/vissl>
    python benchmarks/vissl_recipes.py <checkout> --overlays --match benchmark/linear   # more of them, or fewer
    python benchmarks/vissl_recipes.py <checkout> --json scoreboard.json

A recipe is complete if it names a trunk, data and an optimizer. One that names no loss is a ``models/`` overlay. It is
composed on the first complete recipe in the nearest folder above it. ``--overlays`` adds all other files that name a
trunk. Every recipe is composed and checked as ``vissl-zero config=<recipe> --dry-run`` does before it builds the model,
for as many machines as it asks for, each with its GPUs.

What VISSL leaves to its user is filled in, as a user would: the paths of data sets by a catalogue, and
MODEL.WEIGHTS_INIT by an empty file where a recipe asks for weights. Of a weights file only its presence is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import yaml

CORES = 64


@dataclass(frozen=True)
class Recipe:
    """What to compose: a complete recipe, and the overlay on it if there is one."""

    name: str
    overlay: str = ""

    def __str__(self) -> str:
        return f"{self.name} + {self.overlay}" if self.overlay else self.name


@dataclass(frozen=True)
class Verdict:
    """What became of a recipe; ``problems`` is empty if it is accepted."""

    recipe: str
    problems: tuple[str, ...]


def _blocks(file: Path) -> set[str]:
    config = (yaml.load(file.read_text(), yaml.CSafeLoader) or {}).get("config") or {}
    model, data = config.get("MODEL") or {}, config.get("DATA") or {}
    found = {"trunk"} if (model.get("TRUNK") or {}).get("NAME") else set()
    found |= {"data"} if data.get("TRAIN") or data.get("TEST") else set()
    found |= {"optimizer"} if config.get("OPTIMIZER") else set()
    return found | ({"loss"} if (config.get("LOSS") or {}).get("name") else set())


def recipes(root: Path, with_overlays: bool) -> Iterator[Recipe]:
    """Every recipe below ``root``, the folder ``configs/config`` of VISSL."""
    blocks = {file: _blocks(file) for file in sorted(root.rglob("*.yaml"))}
    complete = {"trunk", "data", "optimizer"}
    bases = [file for file, found in blocks.items() if found >= complete | {"loss"}]

    def name(file: Path) -> str:
        return file.relative_to(root).with_suffix("").as_posix()

    for file, found in blocks.items():
        if file in bases:
            yield Recipe(name(file))
        elif found >= complete or (with_overlays and "trunk" in found):
            base = _base(file, bases, root)
            if base is not None:
                yield Recipe(name(base), name(file))


def _base(file: Path, bases: list[Path], root: Path) -> Path | None:
    for folder in file.parents:
        if found := [base for base in bases if base.parent == folder]:
            return found[0]
        if folder == root:
            break
    return None


def check(job: tuple[Recipe, Path]) -> Verdict:
    """Compose and check one recipe."""
    from vissl_zero.config.compose import compose
    from vissl_zero.config.host import Host
    from vissl_zero.config.resolve import resolve
    from vissl_zero.errors import VisslZeroError

    recipe, checkout = job
    group, _, choice = recipe.overlay.rpartition("/")
    overrides = [f"hydra.searchpath=[file://{checkout}/configs]"]
    overrides += [f"+config/{group}={choice}"] if recipe.overlay else []
    overrides += ["config.DRY_RUN=true"]  # data sets may be elsewhere, and machines meet when they start
    try:
        composed = compose(recipe.name, overrides)
        host = Host(num_gpus=max(1, composed.run.DISTRIBUTED.NUM_PROC_PER_NODE), why_no_gpu="", num_cores=CORES)
        with tempfile.TemporaryDirectory() as folder:
            if composed.run.MODEL.WEIGHTS_INIT.PARAMS_FILE:
                weights = Path(folder) / "weights.torch"
                weights.touch()
                composed.run.MODEL.WEIGHTS_INIT.PARAMS_FILE = str(weights)
            resolve(composed.run, folder, recipe=recipe.name, written=composed.written, host=host)
    except VisslZeroError as error:
        problems = getattr(error, "problems", None)
        return Verdict(str(recipe), tuple(map(str, problems)) if problems else (str(error),))
    except Exception as error:  # noqa: BLE001 - a traceback is a figure of its own
        return Verdict(str(recipe), (f"TRACEBACK {type(error).__name__}: {error}",))
    return Verdict(str(recipe), ())


def _catalogue(checkout: Path, folder: Path) -> Path:
    """VISSL's catalogue with every placeholder replaced by a path that a cluster may have."""
    catalogue = json.loads((checkout / "configs/config/dataset_catalog.json").read_text())
    for file in (checkout / "configs/config").rglob("*.yaml"):
        data = ((yaml.load(file.read_text(), yaml.CSafeLoader) or {}).get("config") or {}).get("DATA") or {}
        for split in ("TRAIN", "TEST"):
            names = (data.get(split) or {}).get("DATASET_NAMES") or []
            for name in [names] if isinstance(names, str) else names:
                catalogue.setdefault(name, {"train": [], "val": []})
    for name, splits in catalogue.items():
        for split in splits:
            splits[split] = [f"/data/{name}/{split}", f"/data/{name}/{split}_labels.npy"]
    path = folder / "dataset_catalog.json"
    path.write_text(json.dumps(catalogue))
    return path


def _topic(problem: str) -> str:
    """What a problem is about: its key and, for a component, its name."""
    key = problem.split(":", 1)[0]
    got = re.search(r"\(got ('[^']*'|[\w.]+)\)", problem)
    return f"{key} {got[1]}" if got and ("NAME" in key or "PARAMS" in key or key.endswith(("name", "SOURCES"))) else key


def main() -> None:
    """Print the scoreboard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of facebookresearch/vissl")
    parser.add_argument("--overlays", action="store_true", help="every other file that names a trunk too")
    parser.add_argument("--match", default="", help="only recipes whose name holds this")
    parser.add_argument("--json", type=Path, help="write every verdict here")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--accepted", action="store_true", help="list the accepted recipes")
    args = parser.parse_args()
    root = args.checkout / "configs/config"
    if not root.is_dir():
        parser.error(f"{args.checkout} is no checkout of VISSL: it has no configs/config. Name the folder above it.")
    chosen = [recipe for recipe in recipes(root, args.overlays) if args.match in str(recipe)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.environ["VISSL_ZERO_CATALOG"] = str(_catalogue(args.checkout, Path(folder)))
        pool = stack.enter_context(Pool(args.processes))
        verdicts: list[Verdict] = []
        for verdict in pool.imap_unordered(check, [(recipe, args.checkout.absolute()) for recipe in chosen], 4):
            verdicts.append(verdict)
            if len(verdicts) % 20 == 0 or len(verdicts) == len(chosen):
                print(f"\r{len(verdicts)} of {len(chosen)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    _print(verdicts, args.accepted)
    if args.json:
        rows: list[dict[str, Any]] = [asdict(verdict) for verdict in sorted(verdicts, key=lambda v: v.recipe)]
        args.json.write_text(json.dumps(rows, indent=1))


def _print(verdicts: list[Verdict], with_accepted: bool) -> None:
    accepted = sorted(verdict.recipe for verdict in verdicts if not verdict.problems)
    print(f"{len(accepted)} of {len(verdicts)} recipes are accepted")
    if with_accepted:
        print("\n".join(f"  {recipe}" for recipe in accepted))
    alone: Counter[str] = Counter()
    part: Counter[str] = Counter()
    for verdict in verdicts:
        topics = {_topic(problem) for problem in verdict.problems}
        part.update(topics)
        if len(topics) == 1:
            alone.update(topics)
    print(f"\n{'blocks':>7} {'alone':>6}")
    for topic, count in part.most_common(60):
        print(f"{count:7} {alone[topic]:6}  {topic}")


if __name__ == "__main__":
    main()
