"""What a training step costs at each ZeRO level, beside the best that plain torch, fairscale and DeepSpeed do.

    python benchmarks/step_cost.py --model mlp --optimizer sgd --ranks 2 --levels 1 2 3
    python benchmarks/step_cost.py --levels offload --optimizer adamw --nvme <folder>
    python benchmarks/step_cost.py --levels muon --optimizer adamw --steps 1 --minutes 8
    python benchmarks/step_cost.py --levels compile --model vit --optimizer adamw
    python benchmarks/step_cost.py --quick

Every way of training has processes of its own. They take turns: in each round each trains a few steps while the others
sleep, in an order that changes from round to round, so that whatever the machine does happens to all. A ratio is that
of two times of one round; its median and quartiles over the rounds are printed. Time, memory and traffic are of one
run, with the same allocator settings for all: those that the package's launcher gives to CPU ranks of the level.

Processor time is that of all ranks together. On a machine that others use too it says more than wall time does, which
then says who waited; of a step that waits for a disk it says less.

Bytes moved are those that cross the loopback interface while a step runs, and what vissl_zero passes through shared
memory; peak memory is the resident memory of a rank above what it was after imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASELINE = "DDP"
# Each level with its peers, in one interleaved run; DDP is in all of them.
GROUPS: dict[str, tuple[str, ...]] = {
    "0": ("DDP", "DDP, bucket views", "vissl_zero level 0"),
    "1": ("DDP", "DDP + ZeroRedundancyOptimizer", "fairscale OSS + DDP", "DeepSpeed ZeRO-1", "vissl_zero level 1"),
    "2": ("DDP", "fairscale ShardedDDP", "fully_shard, no reshard", "DeepSpeed ZeRO-2", "vissl_zero level 2"),
    "3": ("DDP", "fully_shard", "DeepSpeed ZeRO-3", "vissl_zero level 3"),
    # No peer: a step with LARC beside one with plain SGD.
    "larc": ("DDP", "vissl_zero level 1", "vissl_zero level 1, LARC", "vissl_zero level 3", "vissl_zero level 3, LARC"),
    # A step with Muon beside one with AdamW at the same level, and beside torch's Muon.
    "muon": (
        "DDP",
        "DDP, Muon",
        "fully_shard, Muon",
        *(f"DeepSpeed ZeRO-{level}, Muon" for level in (1, 3)),
        *(f"vissl_zero level {level}{what}" for level in (1, 2, 3) for what in ("", ", Muon")),
    ),
    # torch.compile unit by unit beside the same level without it.
    "compile": ("DDP", *(f"vissl_zero level {level}{what}" for level in (0, 3) for what in ("", ", compiled"))),
    # What rests elsewhere; DeepSpeed has it with AdamW alone.
    "offload": (
        "DDP",
        "DeepSpeed ZeRO-3",
        "DeepSpeed ZeRO-3, optimizer on CPU",
        "DeepSpeed ZeRO-3, optimizer on NVMe",
        "DeepSpeed ZeRO-3, optimizer on NVMe, pipelined",
        "vissl_zero level 2, optimizer on NVMe",
        "vissl_zero level 3",
        "vissl_zero level 3, optimizer on CPU",
        "vissl_zero level 3, optimizer on NVMe",
        "vissl_zero level 3, parameters on NVMe",
        "vissl_zero level 3, both on NVMe",
    ),
}
ALLOCATOR_LEVELS = {"larc": 1, "muon": 1, "compile": 3, "offload": 3}  # of the groups that are none
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "eager": {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"},
}


# --- in a rank ------------------------------------------------------------------------------------------------------


def work(system_name: str, model_name: str, optimizer: str) -> None:
    """Build, then answer requests of the parent: one JSON object a line."""
    import torch
    import torch._dynamo  # fully_shard imports it on first use
    import torch.distributed as dist
    from step_cost_systems import MODELS, SYSTEMS

    if system_name.startswith("DeepSpeed"):
        import step_cost_deepspeed  # noqa: F401 - adds its systems
    import vissl_zero.integration.initialize
    import vissl_zero.sharding.engines.torch.strategy  # noqa: F401 - imported before memory is measured, like torch

    # Others print on standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of imports
    imported_bytes = _status_bytes("VmRSS:")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], world), rank=rank, world_size=world)
    build, make_batch = MODELS[model_name]
    torch.manual_seed(0)
    model = build()
    num_params = sum(param.numel() for param in model.parameters())
    system = SYSTEMS[system_name](model, optimizer)
    del model
    torch.manual_seed(1 + rank)
    batch = make_batch()

    def step() -> int:
        system.forward_backward(batch)
        held = 0 if measured else system.state_bytes()
        system.update()
        return held

    measured = False
    for _ in range(6 if system_name.endswith("compiled") else 2):  # once no check listens
        state_bytes = step()
    measured = True
    print(json.dumps({"num_params": num_params, "state_bytes": state_bytes}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # Wakes the caches up, which are nothing to a step with Muon: on a CPU, its products take seconds.
        num_warm = 0 if system_name.endswith("Muon") else 1
        for _ in range(num_warm):
            step()
        dist.barrier()
        exchanged, started, worked = system.exchanged_bytes(), time.perf_counter(), time.process_time()
        for _ in range(request["steps"]):
            step()
        seconds = (time.perf_counter() - started) / request["steps"]
        answer = {
            "seconds": seconds,
            "processor_seconds": (time.process_time() - worked) / request["steps"],
            "peak_bytes": _status_bytes("VmHWM:") - imported_bytes,
            "exchanged_bytes": (system.exchanged_bytes() - exchanged) / request["steps"],
            "num_steps": num_warm + request["steps"],
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


# --- the parent -----------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """The processes of one system, and what they have measured."""

    name: str
    processes: list[subprocess.Popen[str]]
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    wire_bytes: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0

    def answers(self) -> list[dict[str, Any]]:
        """One line of each rank."""
        lines = [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]
        if not all(lines):
            raise SystemExit(f"{self.name}: a rank has ended; its error is above")
        return [json.loads(line) for line in lines]

    def run(self, steps: int) -> None:
        """One round."""
        before = _loopback_bytes()
        for process in self.processes:
            process.stdin.write(json.dumps({"steps": steps}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        answers = self.answers()
        self.seconds.append(max(answer["seconds"] for answer in answers))
        self.processor_seconds.append(sum(answer["processor_seconds"] for answer in answers))
        network = (_loopback_bytes() - before) / answers[0]["num_steps"] / len(self.processes)
        self.wire_bytes.append(network + answers[0]["exchanged_bytes"])
        self.peak_bytes = max(answer["peak_bytes"] for answer in answers)


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    return 0


def start(name: str, level: str, options: argparse.Namespace, folder: str) -> Contestant:
    """Start the ranks of one system, with the allocator settings of a level."""
    environment = os.environ | {
        "WORLD_SIZE": str(options.ranks),
        "STORE": f"{folder}/{name.replace(' ', '_')}",
        "NVME": options.nvme or folder,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MPLBACKEND": "agg",
        **allocator(options.malloc, level),
    }
    command = [sys.executable, __file__, "--work", name, "--model", options.model, "--optimizer", options.optimizer]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(options.ranks)
    ]
    return Contestant(name, processes)


def allocator(name: str, level: str) -> dict[str, str]:
    """Environment for malloc."""
    if name != "launcher":
        return ALLOCATORS[name]
    from vissl_zero.resolve.resolved import ShardingPlan
    from vissl_zero.sharding.allocator import allocator_environment

    return allocator_environment(ShardingPlan(level=int(level) if level.isdigit() else ALLOCATOR_LEVELS[level]), {})


def compete(names: Sequence[str], level: str, options: argparse.Namespace) -> list[Contestant]:
    """All rounds of one group."""
    with tempfile.TemporaryDirectory() as folder:
        contestants: list[Contestant] = []
        try:
            for name in names:
                contestants.append(start(name, level, options, folder))
            for contestant in contestants:
                contestant.facts = contestant.answers()[0]
                print(f"  {contestant.name} is ready", file=sys.stderr)
            started = time.monotonic()
            for number in range(options.rounds):
                if number and options.minutes and time.monotonic() - started > 60 * options.minutes:
                    print(f"  stopped after {number} of {options.rounds} rounds", file=sys.stderr)
                    break
                for contestant in contestants[number % len(names) :] + contestants[: number % len(names)]:
                    contestant.run(options.steps)
                shown = ", ".join(f"{c.name} {c.seconds[-1] * 1e3:.0f}" for c in contestants)
                print(f"  round {number + 1}/{options.rounds}, ms a step: {shown}", file=sys.stderr)
        finally:
            for contestant in contestants:
                for process in contestant.processes:
                    process.kill()
                    process.wait()
    return contestants


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First, second, third."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(own: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of the ratios of each round."""
    return quartiles([one / other for one, other in zip(own, others, strict=True)])


def rows(level: str, contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """One row a system, over DDP's of the same rounds; ours also over its peers."""
    base = next(c for c in contestants if c.name == BASELINE)
    found = []
    for contestant in contestants:
        over, over_processor = {}, {}
        if contestant.name.startswith("vissl_zero"):
            for peer in contestants:
                is_plainer = contestant.name.startswith(f"{peer.name},")
                if is_plainer or not peer.name.startswith("vissl_zero"):
                    over[peer.name] = ratios(contestant.seconds, peer.seconds)
                    over_processor[peer.name] = ratios(contestant.processor_seconds, peer.processor_seconds)
        found.append(
            {
                "level": level,
                "system": contestant.name,
                "ms": statistics.median(contestant.seconds) * 1e3,
                "time": ratios(contestant.seconds, base.seconds),
                "processor_time": ratios(contestant.processor_seconds, base.processor_seconds),
                "bytes": statistics.median(contestant.wire_bytes) / statistics.median(base.wire_bytes),
                "state": contestant.facts["state_bytes"] / 4 / contestant.facts["num_params"],
                "peak": contestant.peak_bytes / base.peak_bytes,
                "peak_mb": contestant.peak_bytes / 1e6,
                "over": over,
                "over_processor": over_processor,
            }
        )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| level | system | ms a step | time over DDP: median (quartiles) | bytes moved over DDP | state a rank, "
        "parameters = 1 | peak over DDP |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        low, middle, high = row["time"]
        lines.append(
            f"| {row['level']} | {row['system']} | {row['ms']:.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) | "
            f"{row['bytes']:.2f} | {row['state']:.2f} | {row['peak']:.2f} ({row['peak_mb']:.0f} MB) |"
        )
    lines.append("")
    for row in found:
        for peer, (low, middle, high) in row["over"].items():
            line = f"- {row['system']} over {peer}: {middle:.2f} ({low:.2f} to {high:.2f})"
            if "over_processor" in row:  # results of older runs lack it
                low, middle, high = row["over_processor"][peer]
                line += f"; processor time {middle:.2f} ({low:.2f} to {high:.2f})"
            lines.append(line)
    return "\n".join(lines)


def plot(found: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Time and peak memory of every system, level by level."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [row for row in found if row["system"] != BASELINE]
    names = [f"{row['level']}: {row['system'].removesuffix(' level ' + row['level'])}" for row in shown]
    colors = ["tab:blue" if row["system"].startswith("vissl_zero") else "silver" for row in shown]
    low, middle, high = ([row["time"][i] for row in shown] for i in range(3))
    spread = [[m - q for q, m in zip(low, middle, strict=True)], [q - m for q, m in zip(high, middle, strict=True)]]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.4 * len(shown) + 1.5), sharey=True)
    axes[0].bar_label(axes[0].barh(names, middle, xerr=spread, color=colors), fmt="%.2f", label_type="center")
    axes[0].set_xlabel("time of a step over DDP's (median, quartiles)")
    peaks = axes[1].barh(names, [row["peak"] for row in shown], color=colors)
    axes[1].bar_label(peaks, fmt="%.2f", label_type="center")
    axes[1].set_xlabel("peak memory over DDP's")
    for axis in axes:
        axis.axvline(1.0, color="black", linewidth=1, linestyle="--", zorder=0)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp", choices=["mlp", "regnet", "regnet-two-crops", "vit", "tiny"])
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adamw"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--levels", nargs="+", default=["0", "1", "2", "3"], choices=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each system in each round")
    parser.add_argument("--minutes", type=float, help="begin no round of a group after so many")
    parser.add_argument("--malloc", default="launcher", choices=["launcher", *ALLOCATORS])
    parser.add_argument("--nvme", help="folder on a local disk, for offload; a temporary one")
    parser.add_argument("--only", nargs="+", help="systems to run beside DDP")
    parser.add_argument("--quick", action="store_true", help="a small model, 3 rounds: does it run?")
    parser.add_argument("--plot", type=Path, help="also draw a picture: .svg, .png, ...")
    parser.add_argument("--json", type=Path, help="also write the figures")
    parser.add_argument("--read", type=Path, nargs="+", help="run nothing: figures that --json has written")
    parser.add_argument("--verbose", action="store_true", help="show what ranks print")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.model, options.optimizer)
    if options.quick:
        options.model, options.rounds, options.steps = "tiny", 3, 2
    found: list[dict[str, Any]] = []
    for path in options.read or ():
        found += json.loads(path.read_text())
    for level in options.levels if not options.read else ():
        names = [n for n in GROUPS[level] if n == BASELINE or not options.only or n in options.only]
        if not importlib.util.find_spec("deepspeed"):
            print("DeepSpeed is not installed and left out", file=sys.stderr)
            names = [name for name in names if not name.startswith("DeepSpeed")]
        print(f"level {level}: {options.model}, {options.optimizer}, {options.ranks} ranks", file=sys.stderr)
        found += rows(level, compete(names, level, options))
    title = f"{options.model}, {options.optimizer}, {options.ranks} ranks"
    print(f"## {title}\n\n{table(found)}")
    if options.json:
        options.json.write_text(json.dumps(found))
    if options.plot:
        plot(found, options.plot, title)
    return None


if __name__ == "__main__":
    main()
