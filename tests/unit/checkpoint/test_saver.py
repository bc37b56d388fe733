"""When checkpoints are written, and what a save that fails leaves behind. One rank."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.checkpoint.test_format import _manifest
from vissl_zero import collectives
from vissl_zero.checkpoint import find_checkpoints, open_checkpoint
from vissl_zero.checkpoint import saver as saver_module
from vissl_zero.checkpoint.saver import LOCK_NAME, CheckpointHook, Saver, _shape_in_file
from vissl_zero.checkpoint.snapshot import Snapshot, replicated_parts
from vissl_zero.engine import stopping
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state.saved_state import Part

VALUES = torch.arange(6.0).view(2, 3)


def _part(read: Callable[[], Tensor] = lambda: VALUES, **more: Any) -> Part:
    return Part("model/w", torch.Size((2, 3)), 0, 6, torch.float32, read, **more)


def _snapshot(step: int, part: Part, mean: Tensor | None = None) -> Snapshot:
    buffers = replicated_parts("buffer", {"mean": torch.ones(2) if mean is None else mean})
    return Snapshot([part], buffers, {}, {}, _manifest(step, 1))


class _Sharded:
    """Notes what the next change of parameters must wait for."""

    def __init__(self) -> None:
        self.waits: list[Callable[[], Any]] = []

    def before_next_change(self, wait: Callable[[], Any]) -> None:
        self.waits.append(wait)


@pytest.fixture
def saver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Saver]:
    made = Saver(tmp_path, getattr(request, "param", False), keep_last=2, keep_every=-1)
    yield made
    made.close()


def _fail() -> Tensor:
    raise OSError("the disk is full")


def _steps(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoints(folder)]


def test_a_save_is_complete_and_old_ones_go(saver: Saver, tmp_path: Path) -> None:
    assert saver.latest_step is None
    num_open = []
    for step in (1, 2, 3):
        saver.store(_snapshot(step, _part()), _Sharded())  # type: ignore[arg-type]
        assert saver.latest_step == step
        num_open.append(len(list(Path("/proc/self/fd").iterdir())))
    assert len(set(num_open)) == 1, "a save leaves no file open"
    assert _steps(tmp_path) == ["step_000000003", "step_000000002"]
    with open_checkpoint(find_checkpoints(tmp_path)[0]) as checkpoint:
        assert torch.equal(checkpoint.read("model/w"), VALUES) and list(checkpoint.verify()) == []
        assert checkpoint.read("buffer/mean").tolist() == [1.0, 1.0]


def test_a_save_again_takes_the_place_of_the_one_of_its_step(saver: Saver, tmp_path: Path) -> None:
    for factor in (1.0, 2.0):
        saver.store(_snapshot(1, _part(lambda factor=factor: factor * VALUES)), _Sharded())  # type: ignore[arg-type, misc]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000000001"]
    with open_checkpoint(find_checkpoints(tmp_path)[0]) as checkpoint:
        assert torch.equal(checkpoint.read("model/w"), 2 * VALUES)


def test_names_are_on_the_disk_before_a_checkpoint_gets_its_own(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, what is called a checkpoint has all of its files."""
    synced: list[tuple[str, list[str]]] = []

    def note(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            synced.append((path.name, sorted(each.name for each in path.iterdir())))

    monkeypatch.setattr(os, "fsync", note)
    for _ in range(2):  # the second takes the place of the first
        synced.clear()
        saver.store(_snapshot(1, _part()), _Sharded())  # type: ignore[arg-type]
        files = sorted(path.name for path in find_checkpoints(tmp_path)[0].iterdir())
        (first, written), *_, (partial, complete), (base, names) = synced
        assert first == partial and base == "checkpoints"
        assert complete == files and "step_000000001" in names and partial not in names
        assert len(written) == 2 and set(written) < set(files), "a rank's files, before the manifest names them"


@pytest.mark.parametrize("saver", [False, True], indirect=True, ids=["at once", "while training"])
def test_a_save_that_fails_is_given_up_with_a_warning(
    saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sharded, newest = _Sharded(), ["there is none yet", "the newest is of step 2"]
    for step, said in zip((1, 3), newest, strict=True):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            saver.store(_snapshot(step, _part(_fail)), sharded)  # type: ignore[arg-type]
            saver.finish()
        (record,) = caplog.records
        assert record.getMessage() == (
            f"The checkpoint of step {step} could not be written (rank 0: the disk is full). Training continues; "
            f"{said}."
        )
        assert not list((tmp_path / "checkpoints").glob(".*"))
        for wait in sharded.waits:
            assert wait(20), "the next update goes on"  # type: ignore[call-arg]
        if step == 1:
            saver.store(_snapshot(2, _part()), sharded)  # type: ignore[arg-type]
            saver.finish()
    assert _steps(tmp_path) == ["step_000000002"] and saver.latest_step == 2


@pytest.mark.parametrize("saver", [True], indirect=True)
def test_training_goes_on_while_a_save_is_written_and_changes_wait_for_the_copy(saver: Saver, tmp_path: Path) -> None:
    gate, sharded, mean = threading.Event(), _Sharded(), torch.ones(2)
    saver.store(_snapshot(5, _part(lambda: (gate.wait(20), VALUES)[1]), mean), sharded)  # type: ignore[arg-type]
    mean.zero_()  # the next forward pass
    saver.advance()
    (wait,) = sharded.waits
    assert saver.latest_step is None and not wait(0.01)  # type: ignore[call-arg]
    gate.set()
    saver.finish()
    assert wait(20) and saver.latest_step == 5  # type: ignore[call-arg]
    saver.advance()  # nothing is under way
    with open_checkpoint(find_checkpoints(tmp_path)[0]) as checkpoint:
        assert checkpoint.read("buffer/mean").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("saver", [True], indirect=True)
def test_a_save_begins_after_the_newest_loss_and_the_save_before_it(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    run: Any = SimpleNamespace(step=3, sharded=_Sharded(), settle=lambda: seen.append("loss"))

    def take(run: Any, hooks: Any, is_epoch_over: bool) -> Snapshot:
        seen.append((saver.latest_step, is_epoch_over))
        return _snapshot(run.step, _part())

    monkeypatch.setattr(saver_module, "take_snapshot", take)
    saver.save(run, [], is_epoch_over=False)
    run.step = 4
    saver.save(run, [], is_epoch_over=True)
    saver.save(run, [], is_epoch_over=True)  # an interval in steps and one in epochs fall together
    saver.finish()
    assert seen == ["loss", (None, False), "loss", (3, True), "loss"] and saver.latest_step == 4


@pytest.mark.parametrize("saver", [True], indirect=True)
def test_state_on_a_disk_is_written_before_training_goes_on(saver: Saver) -> None:
    sharded = _Sharded()
    saver.store(_snapshot(5, _part(is_streamed=True)), sharded)  # type: ignore[arg-type]
    assert saver.latest_step == 5 and not sharded.waits


@pytest.mark.parametrize("how", ["removed", "made anew"])
def test_a_run_whose_folder_is_gone_ends(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK_NAME).touch()
    saver = Saver(folder, False, keep_last=-1, keep_every=-1)
    shutil.rmtree(folder)
    if how == "made anew":
        folder.mkdir()
    with pytest.raises(CheckpointError, match="was moved or removed while the run wrote to it"):
        saver.store(_snapshot(1, _part()), _Sharded())  # type: ignore[arg-type]
    assert not find_checkpoints(folder)
    saver.close()


@pytest.mark.parametrize(
    ("first", "count", "shape"), [(0, 6, (2, 3)), (0, 3, (3,)), (3, 3, (3,)), (0, 0, (0,)), (1, 5, (5,))]
)
def test_a_whole_tensor_keeps_its_shape_in_the_file(first: int, count: int, shape: tuple[int, ...]) -> None:
    assert _shape_in_file(dataclasses.replace(_part(), first_element=first, num_elements=count)) == shape


class _Noting(Saver):
    """Notes the steps that it is asked to save, and whether an epoch was over."""

    def __init__(self, folder: Path):
        super().__init__(folder, False, keep_last=-1, keep_every=-1)
        self.saved: list[tuple[int, bool]] = []
        self.num_finished = 0

    def save(self, run: Any, hooks: Any, is_epoch_over: bool) -> None:
        self.saved.append((run.step, is_epoch_over))

    def finish(self) -> None:
        super().finish()
        self.num_finished += 1


@pytest.mark.parametrize(
    ("epochs", "steps", "max_steps", "saved"),
    [
        (1, -1, 12, [(4, True), (8, True), (12, True)]),
        (2, -1, 12, [(8, True), (12, True)]),
        (-1, 5, 12, [(5, False), (10, False), (12, True)]),
        (-1, 6, 12, [(6, False), (12, True)]),  # the last step is saved once
        (2, 3, 12, [(3, False), (6, False), (8, True), (9, False), (12, True)]),
        (-1, -1, 12, []),
        (1, -1, 10, [(4, True), (8, True), (10, False)]),  # ended in mid-epoch
    ],
)
def test_the_steps_that_are_saved(
    epochs: int, steps: int, max_steps: int, saved: list[tuple[int, bool]], tmp_path: Path
) -> None:
    saver = _Noting(tmp_path)
    hook = CheckpointHook(saver, [], epochs, steps)
    run: Any = SimpleNamespace(step=0, epoch=0, num_steps=max_steps, is_asked_to_stop=False, epoch_samples=0)
    run.loader = SimpleNamespace(order=SimpleNamespace(num_kept=4))
    while run.step < max_steps:
        run.step, run.epoch_samples = run.step + 1, run.epoch_samples + 1
        hook.on_step(run, None)  # type: ignore[arg-type]
        if run.epoch_samples == 4 or run.step == max_steps:
            hook.on_epoch_end(run)
            run.epoch, run.epoch_samples = run.epoch + 1, 0
    hook.close(run)
    assert saver.saved == saved and saver.num_finished == 1


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("is_main", [True, False])
def test_a_stop_is_saved_and_said_before_the_run_ends(
    is_saved: bool, is_main: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = _Noting(tmp_path)
    saver.latest_step = 3 if is_saved else None
    hook = CheckpointHook(saver, [], -1, 2)
    run: Any = SimpleNamespace(step=2, epoch=0, num_steps=4, is_asked_to_stop=False, stop=None, is_main=is_main)
    try:
        hook.on_step(run, None)  # type: ignore[arg-type]
        assert (saver.saved, saver.num_finished, run.stop) == ([(2, False)], 0, None)
        stopping.request_stop("a test")
        run.step, run.is_asked_to_stop = 3, True
        hook.on_step(run, None)  # type: ignore[arg-type]
        assert (saver.saved[1:], saver.num_finished, run.stop) == ([(3, False)], 1, stopping.Stop("a test"))
        saved = "the checkpoint of step 3 is saved" if is_saved else "no checkpoint could be saved"
        said = " ".join(capsys.readouterr().out.split())
        text = f"Stopping after step 3 (a test); {saved}. The same command resumes from there."
        assert said == (text if is_main else "")
        run.step, run.stop = 4, None
        hook.on_step(run, None)  # type: ignore[arg-type]
        assert run.stop is None and len(saver.saved) == 2  # the last step ends the run by itself
    finally:
        stopping.forget()
        hook.close(run)


def test_all_ranks_stop_for_the_reason_of_the_first_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = CheckpointHook(_Noting(tmp_path), [], -1, -1)
    run: Any = SimpleNamespace(step=1, num_steps=4, is_asked_to_stop=True, stop=None, is_main=False)
    reasons = [None, stopping.Stop("one", 3), stopping.Stop("two", 4)]

    def gather(stops: list[Any], own: Any) -> None:
        assert len(stops) == 3 and own is None
        stops[:] = reasons

    monkeypatch.setattr(collectives, "world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    hook.on_step(run, None)  # type: ignore[arg-type]
    assert run.stop == reasons[1]
    hook.close(run)
