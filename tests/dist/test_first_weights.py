"""A recipe's model starts unit by unit where its parameters are sharded, with the weights of a whole one."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.test_method_parity import make_method_plan
from tests.ranks import close_pool, run_on_ranks
from tests.unit.commands.example_checkpoint import write_checkpoint
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import build_model
from vissl_zero.reporting.weight_files import stream_weights
from vissl_zero.resolve.resolved import OffloadPlan, OptimizerPlan, Precision, ResolvedRun
from vissl_zero.sharding.allocator import give_back_large_blocks
from vissl_zero.sharding.checks.replica_check import ModelsDifferError
from vissl_zero.sharding.memory import peak_bytes, resident_bytes

CPU = torch.device("cpu")


def _plan(method: str, level: int, file: str, disk: str = "") -> ResolvedRun:
    plan = make_method_plan(method, level, dist.get_world_size() if dist.is_initialized() else 1, "batch")
    plan.config.MODEL.WEIGHTS_INIT.PARAMS_FILE = file
    tier = OffloadPlan("nvme", nvme_path=disk) if disk else OffloadPlan()
    return replace(plan, sharding=replace(plan.sharding, offload_params=tier, offload_optimizer=tier))


def _first(method: str, file: str, places: list[tuple[int, str]]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for level, disk in places:
        plan = _plan(method, level, file, disk)
        run, _, _ = build_run(plan, CPU, lambda model, plan=plan: load_first_weights(model, plan))
        found.append((run.sharded.full_state(), run.sharded.full_teacher_state()))
        run.sharded.close()
    return found


def _write(folder: Path, module: nn.Module, seed: int = 0) -> None:
    """Give a trunk other weights and statistics, finer than it can hold, and write a checkpoint that has just them."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {name: "model" for name, _ in module.named_parameters()}
    drawn = {
        name: torch.rand(t.shape, dtype=torch.float64, generator=generator) if name in kinds else t.double() + 1 / 3
        for name, t in module.state_dict().items()
        if t.is_floating_point()
    }
    module.load_state_dict(drawn, strict=False)
    write_checkpoint(folder, {f"{kinds.get(name, 'buffer')}/trunk.{name}": tensor for name, tensor in drawn.items()})


@pytest.mark.parametrize(("method", "is_loaded"), [("dino", True), ("ijepa", False)])
def test_a_model_and_its_teacher_start_alike_whole_and_in_units(method: str, is_loaded: bool, tmp_path: Path) -> None:
    plan = _plan(method, 0, "")
    model = build_model(plan.config.MODEL, 10)
    initialize_(model, plan.seed)
    if is_loaded:
        _write(tmp_path, model.trunk)
    expected = model.double().state_dict()
    cells = run_on_ranks(
        2, _first, method, str(tmp_path) if is_loaded else "", [(0, ""), (1, ""), (3, ""), (3, str(tmp_path))]
    )[0]
    for student, teacher in cells:
        assert student.keys() == {name for name in expected if name in student} and len(student) > 10
        assert teacher and teacher.keys() <= student.keys()
        for name, tensor in (*student.items(), *teacher.items()):
            assert torch.equal(tensor, expected[name]), name


def _differ(folder: str) -> str:
    own = Path(folder) / str(dist.get_rank())
    _write(own, build_model(_plan("simclr", 3, "").config.MODEL, 10).trunk, seed=dist.get_rank())
    try:
        _first("simclr", str(own), [(3, "")])
    except ModelsDifferError as error:
        return str(error)
    return ""


def test_files_that_differ_between_ranks_are_found(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, _differ, str(tmp_path))
    assert first == second and "differs between them" in first


# A transformer of 454 million parameters. What a rank takes does not depend on the depth, and varies by 15 %.
DEPTH, WIDTH = 64, 768


def _large_plan(disk: str, depth: int) -> ResolvedRun:
    config = make_config()
    vit = {"IMAGE_SIZE": 16, "PATCH_SIZE": 8, "NUM_LAYERS": depth, "NUM_HEADS": 12}
    config["MODEL"]["TRUNK"] = {
        "NAME": "vision_transformer",
        "VISION_TRANSFORMERS": {**vit, "HIDDEN_DIM": WIDTH, "MLP_DIM": 4 * WIDTH},
    }
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [WIDTH, 10]}]]
    config["DATA"]["TRAIN"]["TRANSFORMS"] = [{"name": "Resize", "size": 16}, *config["DATA"]["TRAIN"]["TRANSFORMS"]]
    adamw = OptimizerPlan("adamw", {}, lr={"name": "constant", "value": 1e-3})
    plan = make_plan(config, level=3, world_size=2, max_steps=1, batch_per_rank=2, global_batch=4, optimizer=adamw)
    tier = OffloadPlan("nvme", nvme_path=disk, fast_init=True)
    sharding = replace(plan.sharding, precision=Precision(), offload_params=tier, offload_optimizer=tier)
    return replace(plan, sharding=sharding)


def _train_large(disk: str, depth: int) -> tuple[int, int, int]:
    """Bytes of all parameters, and by how much this rank has grown at most: to start, and to the end of a step."""
    gc.collect()
    before = resident_bytes()
    assert before is not None
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    run, schedules, frozen = build_run(_large_plan(disk, depth), CPU)
    try:
        started = peak_bytes(CPU) - before
        tensors = run.sharded.whole_tensors()
        train(run, schedules, frozen, [])
        assert run.step == 1
        stream_weights(tensors, Path(disk) / "weights.safetensors", {}, run.is_main)
        num_bytes = sum(tensor.dtype.itemsize * math.prod(tensor.shape) for tensor in tensors)
        return num_bytes, started, peak_bytes(CPU) - before
    finally:
        run.sharded.close()


def _start_large(disk: str) -> tuple[int, int, int]:
    give_back_large_blocks()  # as the environment of ranks has it
    _train_large(disk, 1)  # what any run imports and sets up
    return _train_large(disk, DEPTH)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_eight_times_what_a_rank_takes_starts_and_trains(tmp_path: Path) -> None:
    close_pool()  # memory is counted, and what earlier tests have left in a process would count
    for num_bytes, to_start, to_train in run_on_ranks(2, _start_large, str(tmp_path), timeout_s=500):
        print(f"{num_bytes:,} bytes of parameters: {to_start:,} to start, {to_train:,} to train and to write weights")
        assert num_bytes >= 8 * to_train
