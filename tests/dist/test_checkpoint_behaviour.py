"""Saving and going on when things go wrong: full disks, damaged files, planted code, changed configurations."""

from __future__ import annotations

import dataclasses
import os
import pickle
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.blocks import run_block
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.test_format import write
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint import find_checkpoints, newest_checkpoint, open_checkpoint
from vissl_zero.checkpoint.resume import find_resumable, opening_lines, resume
from vissl_zero.checkpoint.saver import CheckpointHook, Saver
from vissl_zero.checkpoint.snapshot import RankCheck, RanksDifferError
from vissl_zero.engine import stopping
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.engine.loop import DivergedError, train
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.launch.worker import with_checkpoints
from vissl_zero.reporting.metrics_file import MetricsFile
from vissl_zero.resolve.resolved import ResolvedRun

NUM_STEPS = 8  # four an epoch


def _plan(folder: Path, **changes: Any) -> ResolvedRun:
    config = make_config(USE_KNN=False)
    config["CHECKPOINT"] |= changes.pop("checkpoint", {})
    plan = make_plan(config, folder, level=changes.pop("level", 2), world_size=dist.get_world_size())
    return dataclasses.replace(plan, **changes)


def _train(folder: Path, is_async: bool, *hooks: Hook, **changes: Any) -> tuple[Run, Saver]:
    """A checkpoint every second step, and at the end."""
    plan = _plan(folder, **changes)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    saver = Saver(folder, is_async, keep_last=-1, keep_every=-1)
    for hook in hooks:
        if isinstance(hook, _FillDisk):
            hook.saver = saver
    every = [MetricsFile(), *hooks]
    if resume(run, every, plan).path is not None:
        saver.latest_step = run.step
    train(run, schedules, frozen, [*every, CheckpointHook(saver, every, epochs=-1, steps=2)])
    return run, saver


def _steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in reversed(find_checkpoints(folder))]


# --- a full disk ----------------------------------------------------------------------------------------------------


@contextmanager
def _full_disk(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond ``num_bytes``: the kernel refuses, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class _FillDisk(Hook):
    """The disk of the last rank, and of rank 0's metrics, is full from step 3 to step 5."""

    saver: Saver

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self._limit: Any = None

    def on_step(self, run: Run, step: Step) -> None:
        if run.step == 3:
            # Training has not waited for the checkpoint of step 2: it is not complete before ranks agree on it.
            assert self.saver.latest_step == (None if self.is_async else 2)
            self.saver.finish()  # what is under way still finds room
            self._limit = _full_disk(2000 if run.rank == 0 else 5000)
            self._limit.__enter__()
        if run.step == 6:
            self._limit.__exit__(None, None, None)


def _run_with_full_disk(folder: Path, is_async: bool) -> tuple[list[int], int]:
    run, saver = _train(folder, is_async, _FillDisk(is_async))
    return [record.step for record in run.records], saver.latest_step or 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_in_a_save_leaves_the_run_alive_and_the_previous_one_valid(tmp_path: Path, is_async: bool) -> None:
    for steps, latest in run_on_ranks(2, _run_with_full_disk, tmp_path, is_async):
        assert steps == list(range(1, NUM_STEPS + 1)) and latest == NUM_STEPS
    assert _steps(tmp_path) == [2, 6, 8]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    for path in find_checkpoints(tmp_path):
        with open_checkpoint(path) as checkpoint:
            assert list(checkpoint.verify()) == []
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == NUM_STEPS, "lines that had to wait are written later, and each once"


# --- damaged files --------------------------------------------------------------------------------------------------


def _just_train(folder: Path) -> None:
    _train(folder, True)


def _find(folder: Path) -> tuple[str, list[str]]:
    found = find_resumable(folder)
    assert found.path is not None
    return found.path.name, found.skipped


def _no_whole_one(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_resumable(folder)
    return str(caught.value)


def _go_on(folder: Path) -> tuple[int, list[str], list[float]]:
    plan = _plan(folder)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hooks: list[Hook] = [MetricsFile()]
    found = resume(run, hooks, plan)
    first = run.first_step
    train(run, schedules, frozen, hooks)
    return first, opening_lines(found, plan), [float(record.loss or 0) for record in run.records]


class _Payload:
    def __init__(self, canary: Path):
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._canary}",)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damage_that_one_rank_finds_turns_all_of_them_to_the_checkpoint_before(damaged: int, tmp_path: Path) -> None:
    """Two ranks share the reading of three files."""
    for step in (2, 4):
        newest = write(tmp_path, step)
    file = newest / f"rank0000{damaged}.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    for name, skipped in run_on_ranks(2, _find, tmp_path):
        assert name == "step_000000002" and len(skipped) == 1 and str(file) in skipped[0]


@pytest.mark.slow
def test_damaged_files_are_named_and_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    run_on_ranks(2, _just_train, tmp_path)
    assert _steps(tmp_path) == [2, 4, 6, 8]
    newest = find_checkpoints(tmp_path)
    flipped = newest[0] / "rank00001.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-5] ^= 4
    flipped.write_bytes(data)
    torn = newest[1] / "rank00000.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    (tmp_path / "checkpoints" / ".step_000000099.partial").mkdir()
    for name, skipped in run_on_ranks(3, _find, tmp_path):
        assert name == "step_000000004"
        assert len(skipped) == 2
        assert str(flipped) in skipped[0] and "do not fit their checksum" in skipped[0]
        assert str(torn) in skipped[1]
    losses = (tmp_path / "metrics.jsonl").read_text()
    first, lines, again = run_on_ranks(2, _go_on, tmp_path)[0]
    assert first == 4 and "skipped: " in lines[0] and "Resuming from step_000000004" in lines[2]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == NUM_STEPS == len(again)
    assert [text.split('"loss":')[1].split(",")[0] for text in losses.splitlines()] == [f" {loss!r}" for loss in again]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    for path in newest[1:]:
        (path / "manifest.json").unlink()
    assert "so there is nothing to resume from" in run_on_ranks(2, _no_whole_one, tmp_path)[0]


def test_a_payload_in_any_file_is_refused_and_does_not_run(tmp_path: Path) -> None:
    run_on_ranks(2, _just_train, tmp_path)
    canary = tmp_path / "canary"
    newest = find_checkpoints(tmp_path)[0]
    files = sorted(newest.iterdir())
    assert len(files) == 5
    for file in files:
        whole = file.read_bytes()
        for payload in (
            pickle.dumps(_Payload(canary)),
            b"!!python/object/apply:os.system ['touch %s']" % bytes(canary),
        ):
            file.write_bytes(payload)
            name, skipped = run_on_ranks(1, _find, tmp_path)[0]
            assert name == "step_000000006" and str(file) in skipped[0]
        file.write_bytes(whole)
    assert run_on_ranks(1, _find, tmp_path)[0] == ("step_000000008", [])
    assert not canary.exists()


# --- changed configurations -----------------------------------------------------------------------------------------


def _changed(folder: Path) -> list[str]:
    """What is said of each change; the last of them are allowed."""
    said = []
    whole = _plan(folder)

    def attempt(config: Any, **changes: Any) -> None:
        plan = dataclasses.replace(whole, config=run_block(config), **changes)
        run, _, _ = build_run(plan, torch.device("cpu"))
        try:
            said.append("\n".join(opening_lines(resume(run, [], plan), plan)))
        except (ConfigError, CheckpointError) as error:
            said.append(f"{type(error).__name__}: {error}")

    def config_with(block: str, key: str, value: Any, *allowed: str) -> dict[str, Any]:
        config = make_config(USE_KNN=False)
        config[block] = {**config[block], key: value} if key else value
        config["CHECKPOINT"]["ALLOW_CHANGED"] = list(allowed)
        return config

    attempt(config_with("LOG_FREQUENCY", "", 7) | {"DRY_RUN": True})  # which changes nothing, and is not listed
    attempt(config_with("SEED_VALUE", "", 5))
    attempt(config_with("SEED_VALUE", "", 5, "config.SEED_VALUE"))
    wider = {"PARAMS": [["mlp", {"dims": [32, 11]}]], **{}}
    attempt(config_with("MODEL", "HEAD", {**dataclasses.asdict(whole.config.MODEL.HEAD), **wider}))
    attempt(config_with("MODEL", "HEAD", {**dataclasses.asdict(whole.config.MODEL.HEAD), **wider}, "MODEL.HEAD"))
    attempt(whole.config, global_batch=20)
    attempt(whole.config, optimizer=dataclasses.replace(whole.optimizer, name="adamw", options={}))
    allowed = config_with("LOG_FREQUENCY", "", 7, "OPTIMIZER")
    attempt(allowed, optimizer=dataclasses.replace(whole.optimizer, name="adamw", options={}))
    return said


@pytest.mark.slow
def test_changes_are_listed_and_those_that_change_shapes_or_data_are_refused_unless_allowed(tmp_path: Path) -> None:
    run_on_ranks(2, _just_train, tmp_path)
    harmless, seed, allowed_seed, head, allowed_head, batch, optimizer, allowed_optimizer = run_on_ranks(
        2, _changed, tmp_path
    )[0]
    assert harmless.endswith("Changed since then:\n  config.LOG_FREQUENCY: 10 in the checkpoint, 7 now")
    assert "config.SEED_VALUE: was 0" in seed and "ALLOW_CHANGED=[SEED_VALUE]" in seed
    assert "Resuming from step_000000008" in allowed_seed
    assert "ConfigError: config.MODEL.HEAD.PARAMS: was" in head and "shapes" in head
    assert "CheckpointError: heads.0" in allowed_head and "has shape" in allowed_head
    assert "BATCHSIZE_PER_REPLICA: must make steps" in batch
    assert "config.OPTIMIZER.name: was sgd" in optimizer
    assert "Resuming from step_000000008" in allowed_optimizer


class _Draws(Hook):
    """Has state of its own, draws a random number each step, and finds a figure."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step(self, run: Run, step: Step) -> None:
        self.drawn.append(float(torch.rand(())))
        run.results["largest"] = max(self.drawn)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = list(state["drawn"])


def _draw(folder: Path) -> list[float]:
    hook = _Draws()
    _train(folder, True, hook)
    return hook.drawn


def _go_back(folder: Path) -> tuple[str, list[float], float, float]:
    plan = _plan(folder, checkpoint={"LATEST_CHECKPOINT_RESUME_FILE_NUM": 2})
    run, _, _ = build_run(plan, torch.device("cpu"))
    hook = _Draws()
    found = resume(run, [MetricsFile(), hook], plan)
    assert found.path is not None
    return found.path.name, hook.drawn, run.results["largest"], float(torch.rand(()))


def test_hooks_figures_and_random_numbers_come_back_from_the_checkpoint_before_the_newest(tmp_path: Path) -> None:
    drawn = run_on_ranks(2, _draw, tmp_path)
    assert drawn[0] != drawn[1]
    for own, (name, before, largest, following) in zip(drawn, run_on_ranks(2, _go_back, tmp_path), strict=True):
        assert name == f"step_{NUM_STEPS - 2:09d}"
        assert before == drawn[0][:-2] and largest == max(before), "rank 0's are stored"
        assert following == own[-2], "each rank's generator goes on by itself"


class _SaveLate(Hook):
    """Saves at step 2 while the thread that copies is busy with something else for a while."""

    def __init__(self, saver: Saver):
        self._saver = saver
        self.weights: dict[str, torch.Tensor] = {}

    def on_step(self, run: Run, step: Step) -> None:
        if run.step == 2:
            is_free = threading.Event()
            self._saver._thread.submit(is_free.wait)
            self.weights = {name: tensor.detach().clone() for name, tensor in run.sharded.named_parameters()}
            self._saver.save(run, [], is_epoch_over=False)
            threading.Timer(1.0, is_free.set).start()


def _save_late(folder: Path) -> float:
    run, schedules, frozen = build_run(_plan(folder, level=0), torch.device("cpu"))
    saver = Saver(folder, is_async=True, keep_last=-1, keep_every=-1)
    hook = _SaveLate(saver)
    train(run, schedules, frozen, [hook])
    saver.finish()
    with open_checkpoint(find_checkpoints(folder)[0]) as checkpoint:
        return max(float((checkpoint.read(f"model/{name}") - w).abs().max()) for name, w in hook.weights.items())


def test_an_asynchronous_save_holds_the_step_it_was_begun_at(tmp_path: Path) -> None:
    """The next update waits for the copy, however late that comes."""
    assert run_on_ranks(1, _save_late, tmp_path) == [0.0]


def _save_by(folder: Path, options: dict[str, Any]) -> list[str]:
    folder.mkdir()
    run, schedules, frozen = build_run(_plan(folder, num_epochs=3, checkpoint=options), torch.device("cpu"))
    hooks = with_checkpoints(run, [])
    assert hooks is not None
    train(run, schedules, frozen, hooks)
    return [type(hook).__name__ for hook in hooks]


def test_frequencies_and_retention(tmp_path: Path) -> None:
    """Three epochs of four steps; the end is saved in any case, unless nothing is to be."""
    every_epoch, every_step = "CHECKPOINT_FREQUENCY", "CHECKPOINT_ITER_FREQUENCY"
    for name, options, expected in (
        ("default", {}, [8, 12]),
        ("epochs", {every_epoch: 2, "KEEP_LAST": -1, "CHECK_RANKS_EVERY": 3}, [8, 12]),
        ("steps", {every_epoch: -1, every_step: 5, "KEEP_LAST": -1}, [5, 10, 12]),
        ("both", {every_epoch: 2, every_step: 5, "KEEP_LAST": 2, "KEEP_EVERY": 5}, [5, 10, 12]),
        ("never", {every_epoch: -1}, []),
    ):
        (hooks,) = run_on_ranks(1, _save_by, tmp_path / name, options)
        assert _steps(tmp_path / name) == expected, name
        assert hooks == ["RankCheck"] * ("CHECK_RANKS_EVERY" in options) + ["CheckpointHook"]


def _change_optimizer(folder: Path, name: str, options: dict[str, Any], num_epochs: int) -> int:
    plan = _plan(folder, checkpoint={"ALLOW_CHANGED": ["OPTIMIZER"]}, num_epochs=num_epochs)
    plan.config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP = [["heads.0.clf.0.weight", 10]]
    plan = dataclasses.replace(plan, optimizer=dataclasses.replace(plan.optimizer, name=name, options=options))
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hooks = with_checkpoints(run, [])
    assert hooks is not None
    train(run, schedules, frozen, hooks)
    return run.first_step


def test_an_optimizer_that_begins_anew_meets_what_is_thawed_later(tmp_path: Path) -> None:
    run_on_ranks(1, _change_optimizer, tmp_path, "adamw", {}, 2)
    assert run_on_ranks(1, _change_optimizer, tmp_path, "sgd", {"momentum": 0.9}, 3) == [NUM_STEPS]


# --- save and stop --------------------------------------------------------------------------------------------------


class _AskOnOneRank(Hook):
    def __init__(self, rank: int, step: int):
        self._rank, self._step = rank, step

    def on_step(self, run: Run, step: Step) -> None:
        if (run.rank, run.step) == (self._rank, self._step):
            stopping.request_stop("a test")


def _stop(folder: Path) -> tuple[int, Any, list[int]]:
    try:
        run, saver = _train(folder, True, _AskOnOneRank(1, 2))
    finally:
        stopping.forget()
    return run.step, run.stop, [saver.latest_step or 0]


def test_one_rank_that_is_asked_stops_all_after_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    for step, stop, latest in run_on_ranks(2, _stop, tmp_path):
        assert (step, stop, latest) == (4, stopping.Stop("a test", 75), [4])  # asked in step 3
    assert newest_checkpoint(tmp_path).manifest.step == 4
    first, lines, losses = run_on_ranks(2, _go_on, tmp_path)[0]
    assert first == 4 and len(losses) == NUM_STEPS and "epoch" in lines[0]


# --- a loss that is never a number, under loss scaling ---------------------------------------------------------------


def _never_finite(folder: Path) -> tuple[str, int]:
    plan = _plan(folder)
    scaled = dataclasses.replace(plan.sharding.precision, use_loss_scale=True)
    plan = dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, precision=scaled))
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    forward = run.method.forward
    run.method.forward = lambda outputs, batch: forward(outputs, batch) * float("nan" if run.rank else 1)
    run.sharded._loss_scale.scale = 4.0  # type: ignore[attr-defined]
    with pytest.raises(DivergedError) as caught:
        train(run, schedules, frozen, [])
    return str(caught.value), run.step


@pytest.mark.slow
def test_a_loss_that_is_never_a_number_is_not_skipped_for_ever(tmp_path: Path) -> None:
    for message, step in run_on_ranks(2, _never_finite, tmp_path):
        assert step == 3, "from 4 down to 1"
        assert "The loss became nan at step 3 " in message and "Gradients that are not finite" in message


# --- ranks that drift apart -----------------------------------------------------------------------------------------


class _FlipBit(Hook):
    def on_step(self, run: Run, step: Step) -> None:
        if (run.rank, run.step) == (1, 4):
            with torch.no_grad():
                next(tensor for name, tensor in run.sharded.replicated().items() if "weight" in name).view(-1)[0] += (
                    1e-9
                )


class _OtherRate(Hook):
    """Changes the learning rate of one rank."""

    def on_step(self, run: Run, step: Any) -> None:
        if (run.rank, run.step) == (1, 4):
            run.sharded.optimizer.param_groups[-1]["lr"] *= 1 + 1e-9


def _drift(level: int, engine: str, hook: Hook) -> tuple[str, int]:
    run, schedules, frozen = build_run(_plan(Path(), level=level), torch.device("cpu"))
    if engine == "fairscale":
        plan = _plan(Path(), level=level)
        plan = dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, engine=engine))
        run, schedules, frozen = build_run(plan, torch.device("cpu"))
    with pytest.raises(RanksDifferError) as caught:
        train(run, schedules, frozen, [hook, RankCheck(2)])
    return str(caught.value), run.step


@pytest.mark.parametrize(("level", "engine"), [(0, "torch"), (2, "torch"), (1, "fairscale")])
def test_a_flipped_bit_on_one_rank_is_found_and_named(level: int, engine: str) -> None:
    for message, step in run_on_ranks(2, _drift, level, engine, _FlipBit()):
        assert step == 4 and "drifted apart by step 4: " in message and "weight of rank 1" in message


def test_another_learning_rate_of_one_rank_is_found_and_named() -> None:
    for message, step in run_on_ranks(2, _drift, 0, "torch", _OtherRate()):
        assert step == 4 and "drifted apart by step 4: learning rates of rank 1" in message
