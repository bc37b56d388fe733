"""Is the plan that ``fit`` chooses the right one? Every candidate of small recipes is run, on two CPU ranks.

    python benchmarks/plan_choice.py --json out.json            # forecast, run, choose; goes on where it was stopped
    python benchmarks/plan_choice.py --json out.json --table    # the tables of what is there
    python benchmarks/plan_choice.py --json out.json --again    # forecast again, with the measurements that are there
    python benchmarks/plan_choice.py --json out.json --memory   # measure memory again; times stay

Per recipe, all candidates take turns: each is run for a few steps, then all again. A rank is forked from a process that
has imported everything and has the allocator's settings that ``vissl-zero`` starts ranks with. What it took is its
largest resident memory in steps, less what it held at the fork and the code that is mapped from files.

Three budgets each: so that the cheapest plan of all is chosen, one of the middle, and the smallest. Each lies half-way
between the chosen plan's forecast and the least of those that are cheaper, which are at least 8 % apart: closer than a
forecast of resident memory is to be exact, no plan can be told to be the right one. The chosen plan is run with each
rank in a memory cgroup of exactly that size, in which a rank starts from nothing, so that it holds what the run takes
beyond the imports. So is the next cheaper plan, which is forecast not to fit. It needs the right to make such groups.

Times are of the processor: other load on the machine then counts little, waiting for a disk not at all. Images are
loaded before the clock starts, as a run's workers do.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from memory_group import NO_LIMIT, MemoryGroup

from vissl_zero.config.compose import compose
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.allocator import allocator_environment

NUM_RANKS = 2
NUM_STEPS, NUM_WARM = 8, 2
NUM_STEPS_AGAIN = 4  # where times are known: memory grows no more after the third
APART = 0.08  # a share of memory: forecasts closer than this say nothing about which plan needs less
BATCH = {"regnet": 24, "resnet": 16, "vit": 16}  # images per rank: activations take no more than state
TRUNKS = {
    "regnet": [
        "config.MODEL.TRUNK={NAME: regnet, REGNET: {block_type: RES_BASIC_BLOCK, depth: 10, w_0: 64, w_a: 56.0, "
        "w_m: 2.0, group_width: 32, stem_width: 32}}"
    ],
    "resnet": ["config.MODEL.TRUNK={NAME: resnet, RESNETS: {DEPTH: 34, WIDTH_PER_GROUP: 64}}"],
    "vit": [
        "config.MODEL.TRUNK={NAME: vision_transformer, VISION_TRANSFORMERS: {IMAGE_SIZE: 16, PATCH_SIZE: 4, "
        "NUM_LAYERS: 4, NUM_HEADS: 4, HIDDEN_DIM: 512, MLP_DIM: 2048}}"
    ],
}
IMPORTED = (  # by the runs, sooner or later
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "PIL.ImageFile",
    "timm",
    "sklearn.datasets",
    "vissl_zero.engine.build",
    "vissl_zero.planner.dry_run",
    "vissl_zero.engine.loop",
    "vissl_zero.sharding.memory",
)
_HEAD = "config.MODEL.HEAD.PARAMS="
METHODS = {
    "supervised": [_HEAD + "[[mlp, {dims: [-1, 10]}]]"],
    "swav": [_HEAD + "[[swav_head, {dims: [-1, 256, 64], use_bn: true, num_clusters: [256]}]]"],
    "dino": [
        _HEAD + "[[swav_head, {dims: [-1, 256, 64], use_bn: true, num_clusters: [256], "
        "use_weight_norm_prototypes: true}]]"
    ],
    "simclr": [_HEAD + "[[mlp, {dims: [-1, 256, 64], use_bn: true, use_relu: true}]]"],
}
DISK = "config.ZERO.offload_optimizer_config.nvme_path="
OPTIMIZERS = {"resnet": ["config.OPTIMIZER.name=sgd"]}


def recipes() -> list[str]:
    """Names, in an order whose beginning is a fair sample."""
    pairs = [f"{trunk} {method}" for method in METHODS for trunk in TRUNKS]
    return [pair for start in range(5) for pair in pairs[start::5]]


def overrides(name: str, num_steps: int) -> tuple[str, list[str]]:
    """The recipe that ships, and what is changed of it."""
    trunk, method = name.split()
    return f"digits/{method}", [
        *TRUNKS[trunk],
        *METHODS[method],
        *OPTIMIZERS.get(trunk, []),
        f"{DISK}{tempfile.gettempdir()}",
        f"config.DISTRIBUTED.NUM_PROC_PER_NODE={NUM_RANKS}",
        "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]",
        "config.TRAINER.THREADS_PER_RANK=1",
        f"config.TRAINER.MAX_STEPS={num_steps}",
        f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={BATCH[trunk]}",
    ]


def candidates_of(name: str, num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
    """Forecasts of all candidates, cheapest first, and the runs they stand for."""
    from vissl_zero.planner.fit_plans import with_settings
    from vissl_zero.planner.planning import plan_run

    recipe, words = overrides(name, num_steps)
    cfg = compose(recipe, words).run
    found = []
    for candidate in plan_run(compose(recipe, [*words, "config.DRY_RUN=true"]).run, recipe).candidates:
        step = candidate.forecast.step
        assert step is not None, candidate.forecast.unknown
        with tempfile.TemporaryDirectory() as folder:
            run = resolve(with_settings(cfg, candidate.settings()), folder, recipe=recipe, host=Host(num_cores=1))
        row = {
            "plan": str(candidate),
            "tensors": step.peak_bytes,
            "peak": step.resident_bytes,
            "seconds": candidate.forecast.seconds,
        }
        found.append({**row, "by_kind": step.by_kind, "run": run})
    return found


# -- ranks ------------------------------------------------------------------------------------------------------------


class Repeated:
    """A loader that gives the first step's images again and again: loading them takes no time of a step."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def epoch(self, epoch: int, start_sample: int = 0) -> Iterator[Any]:
        """As ``Loader.epoch``, without end."""
        first = next(iter(self._loader.epoch(0)))
        while True:
            yield first


_POPULATE_WRITE = 23  # of madvise, Linux 5.14


def own_pages() -> None:
    """Make every page that a forked process shares with its parent its own, so that none is counted as new later.

    The kernel copies them. Writing to them would be no replacement: this function's own objects and other threads
    change the memory meanwhile, and an area that is unmapped by then would be a segmentation fault.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    library = ctypes.CDLL(None)
    with Path("/proc/self/maps").open() as maps:
        areas = [line.split() for line in maps]
    with Path("/proc/self/pagemap").open("rb", 0) as entries:
        for span, rights, *rest in areas:
            if not rights.startswith("rw-p") or (rest[3:] and rest[3].startswith("[v")):
                continue
            start, end = (int(number, 16) for number in span.split("-"))
            entries.seek(start // page * 8)
            is_there = [byte >> 7 for byte in entries.read((end - start) // page * 8)[7::8]]
            for present, run in groupby(range(len(is_there)), is_there.__getitem__):
                pages = list(run)
                if present:  # an error: it is there no more
                    first = ctypes.c_void_p(start + pages[0] * page)
                    library.madvise(first, ctypes.c_size_t(len(pages) * page), _POPULATE_WRITE)


def resident(kind: str) -> int:
    """Bytes of this process: ``VmHWM`` (the most so far, all kinds), ``RssAnon`` or ``RssFile``."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) * 1024


def train_rank(plan: ResolvedRun, rank: int, group: MemoryGroup, folder: Path) -> None:
    """In a forked process: train, and write down seconds of steps and bytes."""
    import torch
    import torch.distributed as dist

    from vissl_zero.engine.build import build_run
    from vissl_zero.engine.hook import Hook, Run, Step
    from vissl_zero.engine.loop import train

    wall: list[float] = []
    cpu: list[float] = []

    class Clock(Hook):
        def on_step(self, run: Run, step: Step) -> None:
            wall.append(time.perf_counter())
            cpu.append(time.process_time())
            if len(cpu) == NUM_WARM:  # code is mapped by now, and the state is there
                Path("/proc/self/clear_refs").write_text("5")  # forget the largest resident memory so far

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=120))
    gc.collect()
    own_pages()
    group.enter()
    held = resident("RssAnon")
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    run.loader = Repeated(run.loader)  # type: ignore[assignment]
    train(run, schedules, frozen, [Clock()])
    most = resident("VmHWM") - resident("RssFile")
    run.sharded.close()
    steps = slice(NUM_WARM, None)
    found = {
        "wall": [b - a for a, b in pairwise(wall)][steps],
        "cpu": [b - a for a, b in pairwise(cpu)][steps],
        "taken": most - held,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


def serve() -> None:
    """Import everything; for each line (a file with a plan, a limit and a folder) fork ranks and await them.

    They are forked from a process that was forked for them: one that has forked ranks before holds other memory.
    """
    for module in IMPORTED:
        import_module(module)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            file, limit, folder = json.loads(line)
            _run_ranks(pickle.loads(Path(file).read_bytes()), limit, Path(folder))
            os._exit(0)
        os.waitpid(process, 0)


def _run_ranks(plan: ResolvedRun, limit: int, folder: Path) -> None:
    """Print exit codes, and what ranks report."""
    groups = [MemoryGroup(str(rank), limit) for rank in range(NUM_RANKS)]
    codes = _await([_fork(plan, rank, groups[rank], folder) for rank in range(NUM_RANKS)])
    for group in groups:
        group.close()
    found = [folder / f"{rank}.json" for rank in range(NUM_RANKS)]
    reports = [json.loads(path.read_text()) if path.exists() else None for path in found]
    print(json.dumps({"codes": codes, "ranks": reports}), flush=True)


def _fork(plan: ResolvedRun, rank: int, group: MemoryGroup, folder: Path) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with (folder / f"{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            train_rank(plan, rank, group, folder)
            code = 0
    except BaseException:  # noqa: BLE001 - the file says what it was
        import traceback

        (folder / f"{rank}.error").write_text(traceback.format_exc())
    os._exit(code)


def _await(ranks: list[int], timeout_s: float = 300.0) -> list[int]:
    """Exit codes (negative: signals). Once one has failed, the others are killed: they wait for it."""
    codes: dict[int, int] = {}
    until = time.monotonic() + timeout_s
    while len(codes) < len(ranks):
        time.sleep(0.02)
        for process in ranks:
            done, status = os.waitpid(process, os.WNOHANG) if process not in codes else (0, 0)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > until:
            for process in ranks:
                if process not in codes:
                    os.kill(process, signal.SIGTERM)
                    _, status = os.waitpid(process, 0)
                    codes[process] = os.waitstatus_to_exitcode(status)
    return [codes[process] for process in ranks]


@functools.cache
def server(environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """A process that serves, with these settings of the allocator: they are read when a process starts."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | dict(environment)
    command = [sys.executable, __file__, "serve"]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_limited(plan: ResolvedRun, limit: int = NO_LIMIT) -> dict[str, Any]:
    """Run a plan; exit codes of its ranks, and what they report.

    With a limit, from a new process: of ranks that were forked from one that had forked others before, the kernel
    counted up to 80 MiB of huge pages in their cgroups that they did not hold.
    """
    environment = tuple(sorted(allocator_environment(plan.sharding, os.environ).items()))
    own = server(environment) if limit == NO_LIMIT else server.__wrapped__(environment)
    assert own.stdin is not None
    assert own.stdout is not None
    with tempfile.TemporaryDirectory(prefix="plan_choice_") as folder:
        file = Path(folder) / "plan"
        file.write_bytes(pickle.dumps(replace(plan, run_dir=folder)))
        print(json.dumps([str(file), limit, folder]), file=own.stdin, flush=True)
        found: dict[str, Any] = json.loads(own.stdout.readline())
        if limit < NO_LIMIT:
            own.communicate()
        found["errors"] = [path.read_text()[-600:] for path in Path(folder).glob("*.error")]
    return found


# -- recipes ----------------------------------------------------------------------------------------------------------


def measure(rows: list[dict[str, Any]], rounds: int) -> None:
    """Run every candidate, in turns; ``wall``, ``cpu`` and ``taken`` are added."""
    for row in rows:
        row |= {"wall": [], "cpu": [], "taken": 0}
    for _ in range(rounds):
        for row in rows:
            ranks = measure_memory(row)
            for key in ("wall", "cpu"):  # a step is over when the slower rank is
                row[key] += [max(pair) for pair in zip(*(rank[key] for rank in ranks), strict=True)]


def measure_memory(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a candidate once; ``taken`` is at least what the rank that took most did. Gives what ranks report."""
    found = run_limited(row["run"])
    if any(found["codes"]):
        raise RuntimeError(f"{row['plan']}: {found}")
    ranks: list[dict[str, Any]] = found["ranks"]
    row["taken"] = max(row["taken"], *(rank["taken"] for rank in ranks))
    return ranks


def budgets_of(rows: list[dict[str, Any]]) -> list[int]:
    """What a rank may use, largest first."""
    # Peaks of the plans that some budget would choose: less than all that are cheaper need, by what can be told apart.
    front = [rows[0]["peak"]]
    for row in rows:
        if row["peak"] < (1 - APART) * front[-1]:
            front.append(row["peak"])
    above = [
        2 * front[0] - front[min(1, len(front) - 1)],
        *front,
    ]  # as far above the cheapest plan as the next one is below
    return [(above[place] + front[place]) // 2 for place in sorted({0, len(front) // 2, len(front) - 1})]


def choose(rows: list[dict[str, Any]], budget: int) -> int:
    """Index of the first, hence cheapest, that is forecast to fit."""
    return next(index for index, row in enumerate(rows) if row["peak"] <= budget)


def limited(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each budget: what is chosen, whether that runs in it, and whether the next cheaper plan does."""
    found = []
    for budget in budgets_of(rows):
        chosen = choose(rows, budget)
        ran = not any(run_limited(rows[chosen]["run"], budget)["codes"])
        cheaper = None if chosen == 0 else not any(run_limited(rows[chosen - 1]["run"], budget)["codes"])
        found.append({"bytes": budget, "chosen": rows[chosen]["plan"], "runs": ran, "cheaper_runs": cheaper})
    return found


def step_time(row: dict[str, Any]) -> float:
    """Measured: the median."""
    return statistics.median(row["cpu"])


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Tau-b of predicted and measured."""
    from scipy.stats import kendalltau

    return float(kendalltau(*zip(*pairs, strict=True)).statistic)


def tables(recipes_done: dict[str, Any]) -> Iterator[str]:
    """Figures, and a row for each recipe and budget."""
    pairs, errors, taus = [], [], []
    runs = dies = tried = near = num_budgets = 0
    lines = []
    for name, recipe in recipes_done.items():
        rows = recipe["candidates"]
        own = [(row["seconds"], step_time(row)) for row in rows]
        pairs += own
        errors += [abs(a / b - 1) for a, b in own]
        taus.append(kendall(own))
        for budget in recipe["budgets"]:
            fitting = [row for row in rows if row["taken"] <= budget["bytes"]]
            chosen = next(row for row in rows if row["plan"] == budget["chosen"])
            fastest = min(fitting, key=step_time, default=None)
            ratio = float("inf") if fastest is None else step_time(chosen) / step_time(fastest)
            beside = "none | - |" if fastest is None else f"{fastest['plan']} | {ratio:.2f} |"
            num_budgets += 1
            runs += budget["runs"]
            near += budget["runs"] and ratio <= 1.1
            tried += budget["cheaper_runs"] is not None
            dies += budget["cheaper_runs"] is False
            cheaper = {None: "there is none", True: "runs", False: "is killed"}[budget["cheaper_runs"]]
            lines.append(
                f"| {name} | {budget['bytes'] / 2**20:.0f} | {budget['chosen']} | {chosen['peak'] / 2**20:.0f} | "
                f"{chosen['taken'] / 2**20:.0f} | {'runs' if budget['runs'] else 'is killed'} | {cheaper} | "
                f"{beside}"
            )
    over = [row["taken"] / row["peak"] - 1 for recipe in recipes_done.values() for row in recipe["candidates"]]
    yield f"{len(recipes_done)} recipes, {len(pairs)} candidates, {num_budgets} budgets"
    yield f"the chosen plan runs: {runs} of {num_budgets}; the next cheaper is killed: {dies} of {tried}"
    yield f"its step takes at most 1.1 times that of the fastest that fits: {near} of {num_budgets}"
    yield (
        f"Kendall's tau, all: {kendall(pairs):.3f}; median of recipes {statistics.median(taus):.3f}, "
        f"least {min(taus):.3f}; median relative error {statistics.median(errors):.1%}"
    )
    within = sum(abs(share) <= 0.08 for share in over)
    yield (
        f"memory over forecast: median {statistics.median(over):+.1%}, from {min(over):+.1%} to {max(over):+.1%}, "
        f"within 8 %: {within} of {len(over)}"
    )
    yield (
        "| recipe | budget, MiB | chosen | forecast, MiB | taken, MiB | chosen plan | next cheaper | "
        "fastest that fits | time against it |"
    )
    yield "| --- | ---: | --- | ---: | ---: | --- | --- | --- | ---: |"
    yield from lines


def main() -> None:
    """See the module."""
    if sys.argv[1:] == ["serve"]:
        serve()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where results are kept")
    parser.add_argument("--recipes", type=int, default=None, help="only the first N")
    parser.add_argument("--match", default="", help="only those whose name holds this text")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each candidate")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--again", action="store_true", help="forecast again; run only under the new choices' limits")
    parser.add_argument("--memory", action="store_true", help="measure memory again, in few steps; times stay")
    parser.add_argument("--verbose", action="store_true", help="print every candidate")
    given = parser.parse_args()
    done: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {}
    names = [] if given.table else [name for name in recipes() if given.match in name][: given.recipes]
    for name in names:
        is_repeated = given.again or given.memory
        if (name in done) != is_repeated:
            continue
        rows = candidates_of(name, NUM_STEPS_AGAIN if is_repeated else NUM_STEPS)
        if is_repeated:
            before = {row["plan"]: row for row in done[name]["candidates"]}
            rows = [{**before[row["plan"]], **row} for row in rows]
        else:
            measure(rows, given.rounds)
        for row in rows if given.memory else ():
            row["taken"] = 0
            measure_memory(row)
        budgets = limited(rows) if not given.memory else done[name]["budgets"]
        done[name] = {"candidates": [{k: v for k, v in row.items() if k != "run"} for row in rows], "budgets": budgets}
        given.json.write_text(json.dumps(done, indent=1))
        print(f"{name}: {len(rows)} candidates", flush=True)
    if given.verbose:
        for name, recipe in done.items():
            for row in recipe["candidates"]:
                sizes = " ".join(f"{row[key] / 2**20:6.1f}" for key in ("tensors", "peak", "taken"))
                print(
                    f"{name:18} {row['plan']:52} {row['seconds']:7.3f} {step_time(row):7.3f} "
                    f"{statistics.median(row['wall']):7.3f}  {sizes}"
                )
    if done:
        print("\n".join(tables(done)))


if __name__ == "__main__":
    main()
