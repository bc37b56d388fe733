"""A run resumes from any level, engine, tier and number of ranks at any other, as if nothing had happened.

SwAV on digits with everything that has state: RegNet with batch norm over all ranks, a queue shared by all, schedules,
a partial last batch, loss scaling, dropout-free crops drawn per sample. Each cell trains on from a checkpoint in the
middle of the second epoch and is compared with the run that wrote it and was not interrupted: losses, the samples of
each step, parameters, momenta, buffers, queue, loss scale. The same layout must agree bit for bit, any other to 1e-10
in float64.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.cuda_streams import streams_on_cpu
from tests.ranks import run_on_ranks
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint import open_checkpoint
from vissl_zero.checkpoint.folder import name_of
from vissl_zero.checkpoint.resume import restore
from vissl_zero.checkpoint.saver import Saver
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.engine.loop import train
from vissl_zero.resolve.resolved import LarcPlan, OffloadPlan, OptimizerPlan, Precision, ResolvedRun

SAVED_AT, NUM_STEPS, GLOBAL_BATCH, NUM_IMAGES = 4, 6, 12, 32  # three steps an epoch, the last of 8
TOLERANCE, FLOAT32_TOLERANCE = 1e-10, 1e-5
OPTIMIZERS = {
    "sgd_larc": OptimizerPlan(
        "sgd",
        {"momentum": 0.9},
        larc=LarcPlan(trust_coefficient=0.02),
        weight_decay=0.01,
        lr={"name": "linear", "start_value": 0.1, "end_value": 0.02},
    ),
    "adamw": OptimizerPlan(
        "adamw", {"eps": 1e-3}, weight_decay=0.05, lr={"name": "linear", "start_value": 2e-3, "end_value": 1e-3}
    ),
}
PAIRS = ((2, 2), (2, 3), (3, 2), (4, 1))
LEVELS = (0, 1, 2, 3)
# name -> (engine, level, where optimizer state is, where parameters are)
LAYOUTS: dict[str, tuple[str, int, str, str]] = {f"torch {level}": ("torch", level, "none", "none") for level in LEVELS}
LAYOUTS |= {
    "fairscale 1": ("fairscale", 1, "none", "none"),
    "fairscale 2": ("fairscale", 2, "none", "none"),
    "nvme 1": ("torch", 1, "nvme", "none"),
    "nvme 3": ("torch", 3, "nvme", "none"),
    "cpu 3": ("torch", 3, "cpu", "cpu"),
    "nvme params 3": ("torch", 3, "nvme", "nvme"),
}


def _plan(folder: Path, layout: str, world_size: int, optimizer: str) -> ResolvedRun:
    engine, level, optimizer_tier, param_tier = LAYOUTS.get(layout, ("fairscale", 3, "none", "none"))
    dtype = "float32" if "float32" in folder.parts else "float64"
    config = make_config(USE_KNN=False)
    data = config["DATA"]["TRAIN"]
    data["DROP_LAST"], data["DATA_LIMIT"] = False, NUM_IMAGES
    crops = {"total_num_crops": 3, "size_crops": [8, 6], "num_crops": [2, 1], "crop_scales": [[0.5, 1], [0.4, 0.8]]}
    data["TRANSFORMS"] = [{"name": "ImgPilToMultiCrop", **crops}, *data["TRANSFORMS"]]
    # No bias before batch norm: its true gradient is zero, and layer-wise rates make steps of the rounding noise.
    config["MODEL"]["HEAD"]["PARAMS"] = [["swav_head", {"dims": [32, 8], "use_bn": False, "num_clusters": [5]}]]
    swav = {"num_crops": 3, "num_prototypes": [5], "embedding_dim": 8, "queue": {"queue_length": 16}}
    config["LOSS"] = {"name": "swav_loss", "swav_loss": swav}
    plan = make_plan(config, folder, level=level, world_size=world_size)
    nvme = str(folder)
    sharding = dataclasses.replace(
        plan.sharding,
        engine=engine,
        precision=Precision(master=dtype, compute=dtype, reduce=dtype, use_loss_scale=True),
        offload_optimizer=OffloadPlan(optimizer_tier, nvme_path=nvme if optimizer_tier == "nvme" else None),
        offload_params=OffloadPlan(param_tier, nvme_path=nvme if param_tier == "nvme" else None),
    )
    return dataclasses.replace(
        plan,
        sharding=sharding,
        optimizer=OPTIMIZERS[optimizer],
        batch_per_rank=GLOBAL_BATCH // world_size,
        global_batch=GLOBAL_BATCH,
        max_steps=NUM_STEPS,
        num_epochs=3,
    )


class _Trace(Hook):
    """Notes losses and the samples of each step; saves at ``SAVED_AT`` where a saver is given."""

    def __init__(self, saver: Saver | None = None):
        self.saver = saver
        self.losses: list[float | None] = []
        self.samples: list[list[int]] = []

    def watch(self, run: Run) -> None:
        forward = run.method.forward
        run.method.forward = lambda outputs, batch: (self._note(batch), forward(outputs, batch))[1]

    def _note(self, batch: Any) -> None:
        parts: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, batch.sample_ids.tolist())
        self.samples.append(sorted(itertools.chain(*parts)))

    def on_record(self, run: Run, record: StepRecord) -> None:
        self.losses.append(record.loss)

    def on_step(self, run: Run, step: Step) -> None:
        if self.saver is not None and run.step == SAVED_AT:
            self.saver.save(run, [], is_epoch_over=False)
            self.saver.finish()
            assert self.saver.latest_step == SAVED_AT


def _state_at_end(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    """Everything there is, as full tensors, by way of a second checkpoint; on rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    saver = Saver(folder, is_async=False, keep_last=-1, keep_every=-1)
    saver.save(run, [], is_epoch_over=False)
    saver.close()
    if dist.get_rank():
        return {}
    with open_checkpoint(folder / "checkpoints" / name_of(run.step)) as checkpoint:
        assert list(checkpoint.verify()) == []
        found = {name: checkpoint.read(name) for name in checkpoint.tensors}
        for name in checkpoint.tensors:
            for key, entry in checkpoint.scalars(name.removeprefix("model/")).items():
                found[f"{name} {key}"] = torch.tensor(float(entry["value"]))
        assert checkpoint.manifest.loss_scale is not None
        found |= {key: torch.tensor(float(value)) for key, value in checkpoint.manifest.loss_scale.items()}
        found["position"] = torch.tensor(float(checkpoint.manifest.position))
    shutil.rmtree(folder)
    return found


def _outcome(trace: _Trace, run: Run, scratch: Path) -> tuple[list, list, dict[str, torch.Tensor]]:
    return trace.losses, trace.samples, _state_at_end(run, scratch)


def _write(folder: Path, layouts: list[str], optimizer: str) -> list[Any]:
    """Train to the end with a checkpoint on the way, for each layout."""
    outcomes = []
    for index, layout in enumerate(layouts):
        where = folder / layout / str(dist.get_world_size())
        where.mkdir(parents=True, exist_ok=True)
        run, schedules, frozen = build_run(_plan(where, layout, dist.get_world_size(), optimizer), torch.device("cpu"))
        trace = _Trace(Saver(where, is_async=bool(index % 2), keep_last=-1, keep_every=-1))
        trace.watch(run)
        train(run, schedules, frozen, [trace])
        outcomes.append(_outcome(trace, run, where / "end"))
    return outcomes


def _go_on(folder: Path, sources: list[tuple[str, int]], layout: str, optimizer: str) -> list[Any]:
    """Train on from each source in turn, in one run that is overwritten each time."""
    where = folder / "target"
    where.mkdir(exist_ok=True)
    plan = _plan(where, layout, dist.get_world_size(), optimizer)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    forward = run.method.forward
    outcomes = []
    for source, num_ranks in sources:
        run.method.forward = forward
        trace = _Trace()
        trace.watch(run)
        with open_checkpoint(folder / source / str(num_ranks) / "checkpoints" / name_of(SAVED_AT)) as checkpoint:
            restore(run, [], checkpoint)
        train(run, schedules, frozen, [trace])
        outcomes.append(_outcome(trace, run, where / "end"))
    return outcomes


class _Matrix:
    """Runs cells and counts them."""

    def __init__(self, folder: Path, optimizer: str):
        self._folder, self._optimizer = folder, optimizer
        self._written: dict[tuple[str, int], Any] = {}
        self.num_cells = self.num_exact = 0
        self.worst = 0.0

    def write(self, layouts: list[str], num_ranks: int) -> None:
        outcomes = run_on_ranks(num_ranks, _write, self._folder, layouts, self._optimizer)[0]
        self._written |= {(layout, num_ranks): outcome for layout, outcome in zip(layouts, outcomes, strict=True)}

    def check(self, sources: list[tuple[str, int]], layout: str, num_ranks: int) -> None:
        outcomes = run_on_ranks(num_ranks, _go_on, self._folder, sources, layout, self._optimizer)[0]
        for source, outcome in zip(sources, outcomes, strict=True):
            losses, samples, state = self._written[source]
            cell = f"{source[0]} on {source[1]} -> {layout} on {num_ranks}"
            assert outcome[1] == samples[SAVED_AT:], f"{cell}: other samples"
            assert outcome[2].keys() == state.keys(), cell
            gaps = [abs(a - b) for a, b in zip(outcome[0], losses[SAVED_AT:], strict=True)]
            gaps += [float((outcome[2][name] - state[name]).abs().max()) for name in state if state[name].numel()]
            is_same_layout = source == (layout, num_ranks)
            assert max(gaps) == 0.0 if is_same_layout else max(gaps) <= TOLERANCE, f"{cell}: {max(gaps)}"
            self.num_cells += 1
            self.num_exact += is_same_layout
            self.worst = max(self.worst, *gaps)


@pytest.fixture(
    params=[pytest.param("sgd_larc", marks=pytest.mark.slow), pytest.param("adamw", marks=pytest.mark.soak)]
)
def matrix(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[_Matrix]:
    # In memory, where there is such a folder: hundreds of synced files would wait for the disk longer than they train.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        found = _Matrix(Path(folder), request.param)
        yield found
    with capsys.disabled():
        print(
            f"\n  {request.param}: {found.num_cells} cells resumed, {found.num_exact} of them bit for bit, "
            f"the others within {found.worst:.1e}"
        )


def test_every_level_to_every_level_on_other_numbers_of_ranks(matrix: _Matrix) -> None:
    names = [f"torch {level}" for level in LEVELS]
    for num_ranks in (2, 3, 4):
        matrix.write(names, num_ranks)
    for num_ranks, sources in ((1, [4]), (2, [2, 3]), (3, [2])):
        for layout in names:
            matrix.check([(name, source) for source in sources for name in names], layout, num_ranks)
    assert matrix.num_cells == len(LEVELS) ** 2 * len(PAIRS)


def test_engines_and_offload_tiers_one_after_the_other(matrix: _Matrix) -> None:
    ring = [name for name in LAYOUTS if not name.startswith("torch")] + ["torch 0"]
    matrix.write(ring, 2)
    for layout, following in pairwise([*ring, ring[0]]):
        matrix.check([(layout, 2)], following, 2)
    matrix.check([("nvme params 3", 2), ("fairscale 2", 2)], "nvme 1", 1)


def test_every_engine_and_offload_tier_to_every_other(matrix: _Matrix) -> None:
    others = [name for name in LAYOUTS if not name.startswith("torch")]
    matrix.write([*others, "torch 0"], 2)
    matrix.write(["fairscale 2", "nvme params 3"], 3)
    sources = [*((name, 2) for name in (*others, "torch 0")), ("fairscale 2", 3), ("nvme params 3", 3)]
    for layout in (*others, "torch 0"):
        matrix.check(sources, layout, 2)
    matrix.check(sources, "nvme params 3", 1)


def _flat_sharded(folder: Path) -> tuple[float, float]:
    """fairscale's level 3 in float32 (it knows no other) to itself and to the torch engine; largest differences."""
    with streams_on_cpu():
        (written,) = _write(folder, ["fairscale 3"], "sgd_larc")
        gaps = []
        for layout in ("fairscale 3", "torch 3"):
            (outcome,) = _go_on(folder, [("fairscale 3", dist.get_world_size())], layout, "sgd_larc")
            losses = [abs(a - b) for a, b in zip(outcome[0], written[0][SAVED_AT:], strict=True)]
            state = [float((outcome[2][name] - value).abs().max()) for name, value in written[2].items()]
            gaps.append(max(losses + state))
    return gaps[0], gaps[1]


@pytest.mark.slow
def test_fairscales_level_3(tmp_path: Path) -> None:
    for exact, other in run_on_ranks(2, _flat_sharded, tmp_path / "float32"):
        assert exact == 0.0 and other <= FLOAT32_TOLERANCE
