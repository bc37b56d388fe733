"""What the training loop adds to a step: the loop with all its hooks against a bare loop over the same sharded model.

    torchrun --nproc-per-node 2 benchmarks/loop_overhead.py [overrides of the quickstart recipe]

Both train the same model on the same micro-batch, in turns of a few steps; the data loader is left out of both. Prints
the median and the quartiles of the paired ratios.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from vissl_zero.config.compose import compose
from vissl_zero.config.host import Host
from vissl_zero.config.resolve import resolve
from vissl_zero.data.batch import Batch
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Run
from vissl_zero.engine.loop import train
from vissl_zero.reporting.hooks import build_hooks

RECIPE = "quickstart/swav_digits"
ROUNDS, STEPS = 9, 5


def bare_step(run: Run, batch: Batch) -> None:
    """What has to be done."""
    with run.sharded.micro_batch(is_last=True):
        loss = run.criterion(run.sharded.model(batch.images, run.criterion.probe()), batch)
        run.sharded.backward(loss)
    run.sharded.step()
    run.sharded.zero_grad()
    run.sharded.normalize_rows(run.criterion.normalized_rows())


class Turns:
    """A loader that gives one micro-batch over and over, and trains by itself between the turns of the loop."""

    def __init__(self, run: Run):
        self._run, self._loader = run, run.loader
        self._batch = next(run.loader.epoch(0))[0]
        self.ratios: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """As ``Loader.epoch``, of any length."""
        yield [self._batch]  # hooks have done what they do once
        while True:
            started = time.perf_counter()
            for _ in range(STEPS):
                yield [self._batch]
            looped = time.perf_counter()
            for _ in range(STEPS):
                bare_step(self._run, self._batch)
            self.ratios.append((looped - started) / (time.perf_counter() - looped))


def main() -> None:
    """Every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    length = f"config.TRAINER.MAX_STEPS={2 + ROUNDS * STEPS}"
    overrides = [*sys.argv[1:], length, f"config.DISTRIBUTED.NUM_PROC_PER_NODE={dist.get_world_size()}"]
    plan = resolve(compose(RECIPE, overrides).run, str(folder[0]), recipe=RECIPE, host=Host(num_cores=1))
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    run.loader = turns = Turns(run)  # type: ignore[assignment]
    train(run, schedules, frozen, build_hooks(plan))
    if dist.get_rank() == 0:
        low, middle, high = statistics.quantiles(turns.ratios, n=4, method="inclusive")
        print(
            f"loop over bare loop: {middle:.3f} ({low:.3f} to {high:.3f}), {len(turns.ratios)} rounds of {STEPS} steps"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
