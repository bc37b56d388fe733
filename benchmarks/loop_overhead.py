"""What the training loop adds to a step: the loop with all its hooks against a bare loop over the same sharded model.

    torchrun --nproc-per-node 2 benchmarks/loop_overhead.py [--rounds 24] [overrides of the quickstart recipe]

Both train the same model on the same micro-batch, with the collectives that the method itself needs; the data loader is
left out of both. The loop has what a user's run has: metrics, display, watch on collapse, agreement on stopping.

A round is loop, bare, bare, loop, a few steps each, so that a machine that slows down in it slows both. Prints median
and quartiles of the rounds' ratios, of wall time and of rank 0's processor time; the latter says what the loop
computes, whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from vissl_zero.config.compose import compose
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Run
from vissl_zero.engine.loop import Schedules, train
from vissl_zero.launch.worker import with_checkpoints
from vissl_zero.reporting.hooks import build_hooks
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve

RECIPE = "quickstart/swav_digits"
STEPS = 4  # of a turn
WARM_UP = 4  # steps; in the first ones hooks do what they do once


def bare_step(run: Run, schedules: Schedules, batch: ImageBatch) -> None:
    """What has to be done."""
    schedules.apply(run.sharded, run.step)
    run.method.on_step(run.step, run.epoch)
    with run.sharded.micro_batch(is_last=True):
        outputs = run.sharded.model(batch.images, run.method.probe())
        run.sharded.backward(run.method(outputs, batch))
    run.method.update_state([run.method.observe(outputs, batch)])
    run.sharded.step()
    run.sharded.zero_grad()
    run.sharded.normalize_rows(run.method.normalized_rows())


class Turns:
    """A loader that gives one micro-batch over and over, and trains by itself between the turns of the loop."""

    def __init__(self, run: Run, schedules: Schedules, num_rounds: int):
        self._run, self._schedules, self._loader = run, schedules, run.loader
        self._num_rounds = num_rounds
        self._batch = next(run.loader.epoch(0))[0]
        self.wall_ratios: list[float] = []
        self.processor_ratios: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[ImageBatch]]:
        """As ``Loader.epoch``, of another length."""
        for _ in range(WARM_UP):
            yield [self._batch]
        for _ in range(self._num_rounds):
            clocks = [_clocks()]
            yield from [[self._batch]] * STEPS
            clocks.append(_clocks())
            for _ in range(2 * STEPS):
                bare_step(self._run, self._schedules, self._batch)
            clocks.append(_clocks())
            yield from [[self._batch]] * STEPS
            clocks.append(_clocks())
            for ratios, (begin, looped, bare, end) in zip(
                (self.wall_ratios, self.processor_ratios), zip(*clocks, strict=True), strict=True
            ):
                ratios.append((looped - begin + end - bare) / (bare - looped))
        yield [self._batch]  # the last step, which ends the epoch


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=24)
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    overrides += [
        f"config.TRAINER.MAX_STEPS={WARM_UP + 2 * STEPS * options.rounds + 1}",
        f"config.DISTRIBUTED.NUM_PROC_PER_NODE={dist.get_world_size()}",
        "config.NEAREST_NEIGHBOR.USE_KNN=false",
    ]
    plan = resolve(compose(RECIPE, overrides).run, str(folder[0]), recipe=RECIPE, host=Host(num_cores=1))
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hooks = with_checkpoints(run, build_hooks(plan))
    assert hooks is not None
    run.loader = turns = Turns(run, schedules, options.rounds)  # type: ignore[assignment]
    train(run, schedules, frozen, hooks)
    if dist.get_rank() == 0:
        for name, ratios in (("wall time", turns.wall_ratios), ("processor time", turns.processor_ratios)):
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            print(f"loop over bare loop, {name}: {middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"{options.rounds} rounds of {4 * STEPS} steps, {dist.get_world_size()} ranks")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
