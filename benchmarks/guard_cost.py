"""What it costs to notice wrong uses: steps of ``initialize`` with all that watches over them, against steps without.

    torchrun --nproc-per-node 2 benchmarks/guard_cost.py [--level 3] [--width 192] [--depth 12] [--rounds 12]

Watched is what docs/initialize.md says ranks tell each other (which unit a message is for; before an update, which
gradients there were and what must be alike), and what each rank looks at by itself (parameters in their places, writes
and hooks, samples of saved tensors). It is switched off by putting nothing in the place of these methods.

A round is on, off, off, on, a few steps each, so that a machine that slows down in it slows both. Prints median and
quartiles of the rounds' ratios, of wall time and of rank 0's processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import vissl_zero
from vissl_zero.sharding.checks.replica_check import ParameterGuard, StepCheck
from vissl_zero.sharding.engines.torch import unit_guard

STEPS = 3  # of a turn
WARM_UP = 6  # steps; in the first three units are watched more closely


def _all_present(self: Any, problem: Any, facts: Any, marks: Sequence[bool] = ()) -> list[bool]:
    return [True] * len(marks)


_OFF: list[tuple[type, str, Any]] = [
    (unit_guard.UnitGuard, "_announce", lambda self, tag: None),
    (unit_guard.UnitGuard, "record", lambda self, number, is_reduce: None),
    (unit_guard._GuardedUnit, "_require_own_parameters", lambda self: None),
    (unit_guard._GuardedUnit, "_require_unwritten", lambda self: None),
    (unit_guard._GuardedUnit, "_follow_hooked", lambda self: None),
    (unit_guard._Forward, "_is_sample", lambda self: False),
    (ParameterGuard, "problem", lambda self: None),
    (StepCheck, "require_equal", _all_present),
]


@contextmanager
def unwatched() -> Iterator[None]:
    """On every rank at once."""
    with ExitStack() as undo:
        for cls, name, nothing in _OFF:
            undo.callback(setattr, cls, name, getattr(cls, name))
            setattr(cls, name, nothing)
        yield


def main() -> None:
    """Every rank."""
    parser = argparse.ArgumentParser()
    for name, default in {"level": 3, "width": 192, "depth": 12, "tokens": 65, "batch": 4, "rounds": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options.width
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, options.depth, enable_nested_tensor=False)
    model, optimizer = vissl_zero.initialize(model, {"type": "AdamW", "lr": 1e-4}, {"level": options.level})
    x = torch.randn(options.batch, options.tokens, width)

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def turn(is_watched: bool) -> list[float]:
        dist.barrier()
        with ExitStack() if is_watched else unwatched():
            wall, processor = time.perf_counter(), time.process_time()
            steps(STEPS)
        return [time.perf_counter() - wall, time.process_time() - processor]

    steps(WARM_UP)
    rounds = []
    for _ in range(options.rounds):
        first, second, third, fourth = (turn(is_watched) for is_watched in (True, False, False, True))
        rounds.append([(first[i] + fourth[i]) / (second[i] + third[i]) for i in range(2)])
        rounds[-1].append((second[0] + third[0]) / (2 * STEPS))
    if dist.get_rank() == 0:
        walls, processors, seconds = zip(*rounds, strict=True)
        ranks = f"{dist.get_world_size()} ranks, {options.rounds} rounds of {4 * STEPS} steps"
        size = f"width {width}, depth {options.depth}, {statistics.median(seconds) * 1000:.0f} ms a step"
        print(f"level {options.level}, {ranks}, {size}")
        for name, ratios in (("wall time", walls), ("processor time", processors)):
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            print(f"  watched over unwatched, {name}: {middle:.3f} ({low:.3f} to {high:.3f})")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
