"""Forecasts of a level-3 run's memory by three programs, against the measured peak of live tensors, on the CPU.

    python benchmarks/plan_peers.py [--trunks regnet resnet vit]

DeepSpeed's ``estimate_zero3_model_states_mem_needs`` counts model states alone, by a formula
(https://deepspeed.readthedocs.io/en/latest/memory.html: 4 bytes of each parameter of the largest layer, and 18 bytes of
each parameter over the ranks). torch's ``FSDPMemTracker`` records a step of the sharded model with fake tensors, as the
forecast does of the whole model. Each is given the same recipe, batch and optimizer.
"""

from __future__ import annotations

import argparse
import logging
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist
from plan_accuracy import METHODS, TRUNKS, Cell, measure, planned
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import run_on_ranks
from vissl_zero.planner.dry_run import dry_run, set_stage
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.model.wrap_plan import plan_wrap

NUM_RANKS = 2


def deepspeed_bytes(plan: ResolvedRun) -> int:
    """Of a GPU, nothing offloaded, by the formula."""
    model = set_stage(plan).model
    largest = max(sum(p.numel() for p in part.parameters(recurse=False)) for part in model.modules())
    return 4 * largest + 18 * sum(p.numel() for p in model.parameters()) // NUM_RANKS


def tracked_bytes(plan: ResolvedRun) -> int:
    """The peak that torch's tracker forecasts for ``fully_shard`` over the same units."""
    stage = set_stage(plan)
    subject = stage.forecaster.subject
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        with ExitStack() as stack:
            stack.enter_context(stage.mode)
            for unit in plan_wrap(stage.model, plan.sharding, NUM_RANKS).units:
                fully_shard([stage.model.get_submodule(name) for name in unit.modules], mesh=mesh)
            # With Adam the tracker ends at its step counters, whose values it reads.
            trained = [param for param in stage.model.parameters() if param.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1, momentum=plan.optimizer.options["momentum"])
            tracker = FSDPMemTracker(stage.model, optimizer)
            tracker.track_inputs(tuple(subject.inputs))
            stack.enter_context(tracker)
            for step in range(2):
                loss, _ = subject.run_forward()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        found = tracker.get_tracker_snapshot("peak")
        return int(next(kinds["Total"] for device, kinds in found.items() if device.type == "cpu"))
    finally:
        dist.destroy_process_group()


def main() -> None:
    """See the module."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trunks", nargs="+", default=list(TRUNKS))
    parser.add_argument("--methods", nargs="+", default=["supervised"], choices=list(METHODS))
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    given = parser.parse_args()
    print("| trunk | method | measured, MB | this forecast | FSDPMemTracker | DeepSpeed's estimate |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for trunk in given.trunks:
        for method in given.methods:
            plan = planned(Cell(trunk, method, "level3", "kept", "sgd", "float32", NUM_RANKS), given.batch)
            step = dry_run(plan).forecast.step
            assert step is not None
            measured = max(run_on_ranks(NUM_RANKS, measure, replace(plan, run_dir="/nowhere"), timeout_s=300))
            texts = [
                f"{found / 1e6:.2f} ({found / measured - 1:+.1%})"
                for found in (step.peak_bytes, tracked_bytes(plan), deepspeed_bytes(plan))
            ]
            print(f"| {trunk} | {method} | {measured / 1e6:.2f} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
